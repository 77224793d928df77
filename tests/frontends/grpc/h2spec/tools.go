//go:build tools

// Only to pin what `go build` makes of the module in go.mod.
package tools

import _ "github.com/summerwind/h2spec/cmd/h2spec"
