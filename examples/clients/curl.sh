#!/bin/sh
# V2 REST of the adapter with curl: curl.sh [HOST:PORT]
set -eu
url="http://${1:-127.0.0.1:8080}"
sample="$(dirname "$0")/../models/digits/sample.json"

curl --silent --show-error --fail "$url/v2"
echo
# the folder digits of a model root; --fail-with-body shows why where it is refused
curl --silent --show-error --fail-with-body --request POST "$url/v2/repository/models/digits/load"
echo
curl --silent --show-error --fail "$url/v2/models/digits"
echo
curl --silent --show-error --fail --data "@$sample" "$url/v2/models/digits/infer"
echo
# any other character of a name is percent-encoded: the model team/digits is team%2Fdigits
curl --silent --output /dev/null --write-out 'team/digits: %{http_code}\n' "$url/v2/models/team%2Fdigits"
curl --silent --show-error --fail --request POST "$url/v2/repository/index"
echo
curl --silent --show-error --fail --request POST "$url/v2/repository/models/digits/unload"
echo
