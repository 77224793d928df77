#!/bin/sh
# V2 REST of the adapter with curl: curl.sh [HOST:PORT]
set -eu
url="http://${1:-127.0.0.1:8080}"
sample="$(dirname "$0")/../models/digits/sample.json"
call() { curl --silent --show-error --fail-with-body "$@"; }

# Triton's own answers end without a line break; those of the adapter have one
call "$url/v2"
# the folder digits of a model root
call --request POST "$url/v2/repository/models/digits/load"
call --write-out '\n' "$url/v2/models/digits"
call --write-out '\n' --data "@$sample" "$url/v2/models/digits/infer"
# any other character of a name is percent-encoded: the model team/digits is team%2Fdigits
curl --silent --output /dev/null --write-out 'team/digits: %{http_code}\n' "$url/v2/models/team%2Fdigits"
call --request POST "$url/v2/repository/index"
call --request POST "$url/v2/repository/models/digits/unload"
