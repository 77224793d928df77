#!/usr/bin/env bash
# Runs a command, `make e2e` unless another is given, with a container engine that answers. The
# engine that is there is taken. Where there is none, one is started as root on Debian 12, out of
# Debian's packages, with all it has in a temporary folder; it is stopped and removed at the end.
# Where that cannot be tried, this says why, also in the file that TEST_OUTCOMES names, does nothing,
# and is content; where it was tried and failed it is not.
#   PYTHON_IMAGE    base of the images; made here when an engine was started and none is named
#   PIP_CERT, PIP_INDEX_URL    for the builds; taken from pip's own settings when they are not set
set -euo pipefail
cd "$(dirname "$0")/.."

skip() {
  local said="containers not tested: no engine can be started here: $1; skipped: ${command[*]}"
  [ -z "${TEST_OUTCOMES:-}" ] || echo "$said" >> "$TEST_OUTCOMES"
  echo "$said" >&2
}
fail() { echo "engine: no container engine could be started: $1" >&2; exit 1; }
works() { docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1; }

installed() { command -v dockerd >/dev/null && command -v mmdebstrap >/dev/null && docker compose version >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1; }

pip_setting() { python3 -m pip config get "global.$1" 2>/dev/null || true; }
adopt() { [ -n "${!1:-}" ] || { value="$(pip_setting "$2")"; [ -z "$value" ] || export "$1=$value"; }; }

# Newer than what Debian 12 has, and only what is named: the rest of the machine stays as it is.
install_engine() {
  local apt="$folder/apt" sources=/etc/apt/sources.list.d/debian.sources
  mkdir -p "$apt"/{sources,preferences,lists/partial}
  cp "$sources" "$apt/sources/"
  sed '/^$/q; s/^Suites:.*/Suites: trixie/' "$sources" > "$apt/sources/trixie.sources"
  printf 'Package: *\nPin: release n=trixie\nPin-Priority: 100\n' > "$apt/preferences/trixie"
  local from=(-qq -o Dir::Etc::SourceList=/dev/null -o "Dir::Etc::SourceParts=$apt/sources"
    -o "Dir::Etc::PreferencesParts=$apt/preferences" -o "Dir::State::Lists=$apt/lists")
  apt-get "${from[@]}" update &&
    DEBIAN_FRONTEND=noninteractive apt-get "${from[@]}" install -y --no-install-recommends \
      runc iptables iproute2 mmdebstrap docker.io/trixie docker-cli/trixie containerd/trixie \
      docker-buildx/trixie docker-compose/trixie
}

start_engine() {
  ip link show docker0 >/dev/null 2>&1 || made_bridge=yes
  iptables-save > "$folder/rules" 2>/dev/null || true  # the engine leaves its own behind
  export DOCKER_HOST="unix://$folder/sock"
  # images built twice can be compared only where this store has them
  echo '{"features": {"containerd-snapshotter": true}}' > "$folder/daemon.json"
  setsid dockerd --config-file "$folder/daemon.json" --data-root "$folder/data" --exec-root "$folder/run" \
    --pidfile "$folder/pid" --host "$DOCKER_HOST" > "$folder/log" 2>&1 &
  for _ in $(seq 120); do
    ! works || return 0
    kill -0 $! 2>/dev/null || return 1
    sleep .25
  done
  return 1
}

restore_rules() {
  if [ -s "$folder/rules" ]; then
    iptables-restore < "$folder/rules" || true
    return 0  # in a trap a bare one has the status of the command that failed
  fi
  for table in nat filter; do
    iptables -t "$table" -F 2>/dev/null && iptables -t "$table" -X || true
  done
  iptables -P FORWARD ACCEPT 2>/dev/null || true
}

stop_engine() {
  local pid
  if pid="$(cat "$folder/pid" 2>/dev/null)"; then
    kill "$pid" 2>/dev/null || true
    while kill -0 "$pid" 2>/dev/null; do sleep .2; done
  fi
  umount "$folder"/run/netns/* 2>/dev/null || true
  restore_rules
  rm -rf "$folder" || true
  [ -z "$made_bridge" ] || ip link del docker0 2>/dev/null || true
}

make_base_image() {
  export PYTHON_IMAGE=local/python-base:bookworm
  mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,libpython3.11,ca-certificates \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' bookworm - /etc/apt/sources.list.d/debian.sources |
    docker import - "$PYTHON_IMAGE" > /dev/null
}

command=("${@:-make}")
[ $# -gt 0 ] || command+=(e2e)
adopt PIP_CERT cert
adopt PIP_INDEX_URL index-url
if ! works; then
  made_bridge=""
  [ "$(id -u)" = 0 ] || { skip "this is not root"; exit 0; }
  grep -q '^VERSION_CODENAME=bookworm$' /etc/os-release || { skip "this is not Debian 12"; exit 0; }
  folder="$(mktemp -d)"
  trap stop_engine EXIT
  if ! installed; then
    install_engine > "$folder/apt.log" 2>&1 || fail "$(tail -n 1 "$folder/apt.log")"
  fi
  works || start_engine || fail "$(tail -n 1 "$folder/log")"
  [ -n "${PYTHON_IMAGE:-}" ] || make_base_image || fail "no base image could be made"
fi
"${command[@]}"
