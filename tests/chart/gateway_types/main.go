// Reads objects of Kubernetes, a JSON array, from stdin, each strictly into its type of the Gateway API or of Envoy
// Gateway. Says what does not fit, an object a line, and exits with 1 then.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	envoy "github.com/envoyproxy/gateway/api/v1alpha1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	gateway "sigs.k8s.io/gateway-api/apis/v1"
)

func main() {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{envoy.AddToScheme, gateway.Install} {
		if err := add(scheme); err != nil {
			panic(err)
		}
	}
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	var objects []json.RawMessage
	if err := json.NewDecoder(os.Stdin).Decode(&objects); err != nil {
		panic(err)
	}
	misfits := 0
	for _, object := range objects {
		if _, _, err := decoder.Decode(object, nil, nil); err != nil {
			fmt.Println(err)
			misfits++
		}
	}
	if misfits > 0 {
		os.Exit(1)
	}
}
