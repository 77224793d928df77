#!/bin/sh
# Trains the model and packs it with its environment: build.sh STORE writes STORE/sklearn.tar.
# PYTHON must have the version of Triton's Python; it is that of .venv if not given.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../../../.venv/bin/python}
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT

"$python" -m venv --copies "$made/env"
"$made/env/bin/pip" install --quiet 'numpy<2' 'scikit-learn==1.5.2'
cat > "$made/env/bin/activate" <<'END'
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PATH="$here/bin:$PATH"
END

mkdir "$made/sklearn"
cp -r "$here/1" "$here/config.pbtxt" "$made/sklearn"
"$made/env/bin/python" "$here/train.py" "$made/sklearn/1/model.pkl"
tar -czf "$made/sklearn/env.tar.gz" -C "$made/env" .
tar -cf "$made/sklearn.tar" -C "$made/sklearn" .
mv "$made/sklearn.tar" "$1/sklearn.tar"
