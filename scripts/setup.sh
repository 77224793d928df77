#!/bin/sh
# Makes .venv with the locked packages; does nothing when it is up to date. What a lock no longer has
# stays there until `make clean`.
#   scripts/setup.sh run    what `make run` needs: requirements/run.txt
#   scripts/setup.sh demo   what `make demo` needs: requirements/demo.txt, which has all of run.txt
#   scripts/setup.sh        what development needs: requirements/dev.txt, which has all of demo.txt
#   PYTHON=python3.12 scripts/setup.sh    to choose the interpreter
# Exit code 2: no interpreter here can do it; nothing was installed then.
set -eu
cd "$(dirname "$0")/.."
kind="${1:-dev}"

# Says what the interpreter $1 is; the exit code is 0 when it will do. Any Python can read this.
# The Triton that is run here has its Python models run by 3.11 or 3.12.
judge() {
  "$1" - 2>/dev/null <<'END'
import platform, sys
lacks = ""
name = platform.python_implementation().replace("CPython", "Python")
system = platform.system() + " on " + platform.machine()
if name != "Python" or not (3, 11) <= sys.version_info[:2] <= (3, 12):
    lacks = " "
elif system != "Linux on x86_64":
    lacks = " for " + system + ", not Linux on x86_64,"
else:
    try:
        import ensurepip, venv
    except ImportError:
        lacks = " without the module venv (Debian, Ubuntu: apt-get install python3-venv)"
print((name + " " + platform.python_version() + lacks).strip())
sys.exit(lacks != "")
END
}

# The first that will do becomes $PYTHON; $found says what the others are.
choose() {
  found=""
  for PYTHON in "$@"; do
    if said="$(judge "$PYTHON")"; then return 0; fi
    case "$found" in
      *"${said:-?}"*) ;;
      *) [ -z "$said" ] || found="$found${found:+, }$PYTHON is $said" ;;
    esac
  done
  return 1
}

refuse() {
  # shellcheck disable=SC2016  # to be pasted as it stands
  echo "setup: Python 3.11 or 3.12 is needed, and $1; get one, for example by \`uv python install 3.12\`, and name it: make run PYTHON=\"\$(uv python find 3.12)\"" >&2
  exit 2
}

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    given="$PYTHON"
    choose "$given" || refuse "${found:-PYTHON=$given cannot be run}"
    return
  fi
  ! choose python3.12 python3.11 python3 || return 0
  found="${found:-there is no python3}"
  command -v uv >/dev/null || refuse "$found"
  echo "setup: Python 3.11 or 3.12 is needed, and $found; uv is asked for one" >&2
  others="$found"
  uv python install 3.12 >&2 || refuse "$others, and uv could not get another"
  choose "$(uv python find --system --python-preference only-managed 3.12)" ||
    refuse "$others, and what uv has cannot be used"
}

# .venv is kept while its interpreter will do and no other one is asked for.
is_usable() {
  [ -x .venv/bin/python ] && judge .venv/bin/python >/dev/null &&
    { [ -z "${PYTHON:-}" ] || [ "$("$PYTHON" -V 2>&1)" = "$(.venv/bin/python -V)" ]; }
}

# `done_before NAME WANT`: was this step done before, for just this? `note NAME WANT`: now it is.
done_before() { [ "$(cat ".venv/.$1" 2>/dev/null)" = "$2" ]; }
# A new file each time: copies of .venv may share the old one by a hard link.
note() { rm -f ".venv/.$1"; printf '%s' "$2" > ".venv/.$1"; }

pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

# What was made with more stays so.
case "$kind $(cat .venv/.packages 2>/dev/null)" in *" dev "*) kind=dev ;; "run demo "*) kind=demo ;; esac
lock="$kind $(cat "requirements/$kind.txt" scripts/setup.sh | cksum)"
project="$(cksum < pyproject.toml)"

if ! is_usable; then
  find_python
  rm -rf .venv
  "$PYTHON" -m venv .venv
fi
if ! done_before packages "$lock"; then
  echo "setup: installing the packages of requirements/$kind.txt into .venv, with $(.venv/bin/python -V); this is done once" >&2
  quiet=--quiet
  [ ! -t 1 ] || quiet=--progress-bar=on
  pip install "$quiet" --no-deps --require-hashes -r "requirements/$kind.txt"
  PYTHONPATH=. .venv/bin/python scripts/libpython.py
  note packages "$lock"
fi
if ! done_before project "$project"; then
  pip install --quiet --no-deps --no-build-isolation -e .
  note project "$project"
fi
