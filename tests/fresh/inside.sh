#!/bin/bash
# The part of fresh.sh that runs as root in the fresh Debian: README's commands, each with its time.
#
# usage: inside.sh HOME SKIP_RUN ALL [ARGUMENT...]
#        HOME      /root, or the home of a user who is made with sudo
#        SKIP_RUN  1: neither `make run` nor `make install`
#        ALL       1: also `make test-all`
set -euo pipefail
home=$1 skip_run=$2 all=$3
shift 3
readonly RUN_LIMIT_S=1200 # for building the release and serving
cd "$home/memledger"

# The caller's way to the registries.
while IFS= read -r -d '' line; do export "${line?}"; done </environment
export DEBIAN_FRONTEND=noninteractive HOME=$home

stage() {
  printf 'fresh: %-24s %5s s\n' "$1" "$((SECONDS - began))"
  began=$SECONDS
}

# A command of README's as it stands there, without sudo for root: the first line that begins so.
readme() {
  sed -n '/^## Get it/,/^## /p' README.md | grep -m1 "^sudo $1" | sed 's/ *#.*//; s/^sudo //; s/&& sudo /\&\& /' ||
    { echo "README.md has no line 'sudo $1'" >&2; return 1; }
}

# As the user whose home it is.
as_caller() {
  if [[ $home == /root ]]; then "$@"; else
    mapfile -d '' environment < <(env -0)
    setpriv --reuid=anna --regid=anna --init-groups env -- "${environment[@]}" USER=anna LOGNAME=anna "$@"
  fi
}

serves() {
  curl --silent --fail http://localhost:10853/-/ready >/dev/null &&
    [[ $(curl --silent http://localhost:10853/metrics | grep -c '^memledger_') -gt 50 ]]
}

# `make run` until it serves and answers, then Ctrl-C.
make_run() {
  local deadline=$((SECONDS + RUN_LIMIT_S)) run
  if curl --silent http://localhost:10853/ >/dev/null; then
    echo "port 10853 is taken: this proves nothing" >&2
    return 1
  fi
  set -m # a process group of its own, for Ctrl-C
  as_caller make run >/tmp/make-run.log 2>&1 &
  run=$!
  set +m
  until serves; do
    if ! kill -0 "$run" 2>/dev/null || ((SECONDS >= deadline)); then
      echo "make run does not serve; the end of its output:" >&2
      tail -n 30 /tmp/make-run.log >&2
      kill -KILL -- "-$run" 2>/dev/null || true
      return 1
    fi
    sleep 1
  done
  curl --silent http://localhost:10853/metrics | grep -m3 '^memledger_host_memory' || true
  kill -INT -- "-$run"
  wait "$run" || true
  while curl --silent http://localhost:10853/ >/dev/null; do sleep 0.2; done
}

sizes() {
  du -sh "$home/.cargo/registry" target "$home/.cache/memledger-tests" / --exclude=/proc --exclude=/sys --exclude=/dev 2>/dev/null |
    sed 's/^/fresh: disk  /'
}

# The lists are those of the installer; a machine's are of its last update.
began=$SECONDS
apt-get -q update
if [[ $home != /root ]]; then
  apt-get -q install -y --no-install-recommends sudo
  useradd --create-home --shell /bin/bash anna
  echo 'anna ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/anna
  chown -R anna:anna "$home"
fi
stage "(lists of packages)"
packages=$(readme "apt-get install")
echo "fresh: $packages"
bash -ec "$packages"
stage "README's packages"
export PATH=$home/.cargo/bin:$PATH
if [[ $skip_run == 0 ]]; then
  make_run
  stage "make run"
  as_caller make install
  memledger --version
  stage "make install"
fi
status=0
if (($#)); then as_caller tests/run.sh gate "$@" || status=$?; else as_caller make test || status=$?; fi
stage "make test"
if [[ $all == 1 ]]; then
  as_caller make test-all || status=$?
  stage "make test-all"
fi
sizes
as_caller tests/setup/engine.sh stop
exit "$status"
