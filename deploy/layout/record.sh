#!/bin/bash
# Writes functions.txt: the functions that memledger calls while it does what people run it for. build.rs orders the program by it, so that
# the rest need not be in memory.
#
# record.py records the functions of a release build and of what is shipped while each serves alone, with containers that start and end,
# and is scraped; then those of the release build in real tests: Docker, CRI, GPUs and OTLP, `top`, `ps`, `why`, `runs`. A test that
# fails there is reported; what it called counts as well.
#
# usage: record.sh    as root, on x86-64, with what `make test` needs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if ((EUID != 0)) || [[ $(uname -m) != x86_64 ]]; then
  echo "layout: needs root, for ptrace(2), and x86-64" >&2
  exit 1
fi
tests/setup/setup.sh engine image dist env
set -a
# shellcheck disable=SC1090 # written by the setup
. "$(tests/setup/setup.sh cache)/env"
set +a
target=${CARGO_TARGET_DIR:-target}
[[ $target == /* ]] || target=$PWD/$target
work=$(mktemp -d)
containers=() memledger=''
# shellcheck disable=SC2329 # called by the trap
clean() {
  [[ -z $memledger ]] || kill "$memledger" 2>/dev/null || true
  ((${#containers[@]} == 0)) || docker rm --force "${containers[@]}" >/dev/null
  rm -rf "$work"
}
trap clean EXIT
mkdir "$work/serve" "$work/tests"

start_container() { containers+=("$(docker run --detach "$MEMLEDGER_TEST_IMAGE" "$@")"); }

# record PROGRAM FOLDER: from now on the functions of this program are recorded into this folder
record() {
  export LAYOUT_PROGRAM=$1 LAYOUT_SYMBOLS=$work/functions LAYOUT_FOLDER=$work/$2
  readelf --syms --wide "$1" | awk '$4 == "FUNC" && $3 > 0 { print $2, $8 }' >"$work/functions"
}

# recorded FOLDER COUNT: waits until so many processes have left their functions, and none is still writing
recorded() {
  local second
  for ((second = 0; second < 30; second++)); do
    if (($(find "$work/$1" -name '*.symbols' | wc -l) >= $2)) && ! pgrep --full "^python3.*deploy/layout/record.py" >/dev/null; then return; fi
    sleep 1
  done
  echo "layout: fewer than $2 processes were recorded in $1" >&2
  exit 1
}

builds=$target/layout
CARGO_PROFILE_RELEASE_STRIP=none cargo build --release --locked --bin memledger --target-dir "$builds"
CARGO_PROFILE_DIST_STRIP=none CARGO_TARGET_DIR=$builds deploy/supply/dist.sh "$work/dist"
served=0
for program in "$builds/release/memledger" "$work/dist/memledger"; do
  record "$program" serve
  for ((i = 0; i < 30; i++)); do start_container /busybox/sleep 100000; done # a sort of more than 20 is another function
  port=$((20000 + RANDOM % 10000))
  deploy/layout/record.py serve --web.listen-address="127.0.0.1:$port" --state.path="$work/state-$served" 2>"$work/log" &
  memledger=$!
  for ((second = 0; second < 70; second += 5)); do # command lines are read again after 64 s
    sleep 5
    if ! curl --silent --show-error --fail --output /dev/null --compressed "127.0.0.1:$port/metrics" "127.0.0.1:$port/metrics"; then
      tail -5 "$work/log" >&2
      exit 1
    fi
    start_container /busybox/true
  done
  kill "$memledger"
  wait "$memledger" || true
  memledger=''
  served=$((served + 1))
  recorded serve "$served"
done

record "$builds/release/memledger" tests
MEMLEDGER_BIN=$PWD/deploy/layout/record.py tests/run.sh all \
  -E 'test(/^(docker|oom::exits|oom::why|screens|gpu::health|gpu::peaks|otlp|cri|podman|why|events|inside|runs|serving)::/)' || true
recorded tests 200
python3 -B deploy/layout/names.py "$work" >"$work/functions.txt"
mv "$work/functions.txt" deploy/layout/functions.txt
echo "$(wc -l <deploy/layout/functions.txt) names in deploy/layout/functions.txt"
