#!/bin/sh
# Makes .venv-compiled anew: the adapter as a wheel whose hot modules are compiled, beside the packages of .venv. With
# arguments it then runs that pytest on the wheel, not on the checkout: scripts/compiled.sh tests/dataplane
# CFLAGS reaches the compiler.
set -eu
cd "$(dirname "$0")/.."
env="$PWD/.venv-compiled"
rm -rf "$env"
.venv/bin/python -m venv --without-pip "$env"
site="$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/packages.pth"
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }
PURE=0 pip wheel --no-deps --no-build-isolation --wheel-dir "$env/wheel" .
pip --python "$env/bin/python" install --no-deps --no-index "$env"/wheel/*.whl
"$env/bin/triton-adapter" version
[ $# = 0 ] || PYTHONSAFEPATH=1 PYTHONPATH="$site:$PWD" exec "$env/bin/python" -m pytest -o pythonpath= -m 'not pure and not nightly' "$@"
