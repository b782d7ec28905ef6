#!/bin/bash
# Writes functions.txt: the functions that memledger calls while it does what people run it for. build.rs has the linker place them
# beside each other, so that the rest of the program need not be in memory.
#
# record.py records the functions of a release build and of what is shipped while each serves alone, with containers that start and end,
# and is scraped; then those of the release build in the real tests below: Docker, CRI, GPUs and OTLP, `top`, `ps`, `why`, `runs`. Whether
# a test passes does not matter here, only what it calls.
#
# usage: record.sh    needs root, and what `make test` installs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
tests/setup/setup.sh engine image dist env
set -a
# shellcheck disable=SC1090 # written by the setup
. "$(tests/setup/setup.sh cache)/env"
set +a
target=${CARGO_TARGET_DIR:-target}
[[ $target == /* ]] || target=$PWD/$target
work=$(mktemp -d)
containers=()
# shellcheck disable=SC2329 # called by the trap
clean() {
  ((${#containers[@]} == 0)) || docker rm --force "${containers[@]}" >/dev/null
  rm -rf "$work"
}
trap clean EXIT
mkdir "$work/serve" "$work/tests"
idle() { containers+=("$(docker run --detach "$MEMLEDGER_TEST_IMAGE" "$@")"); }

# use PROGRAM FOLDER: record the functions of this program into this folder
use() {
  export LAYOUT_PROGRAM=$1 LAYOUT_SYMBOLS=$work/functions LAYOUT_FOLDER=$work/$2
  readelf --syms --wide "$1" | awk '$4 == "FUNC" && $3 > 0 { print $2, $8 }' >"$work/functions"
}

export CARGO_PROFILE_RELEASE_STRIP=none CARGO_PROFILE_DIST_STRIP=none CARGO_TARGET_DIR=$target/layout
cargo build --release --locked --bin memledger
deploy/supply/dist.sh "$work/dist"
for program in "$CARGO_TARGET_DIR/release/memledger" "$work/dist/memledger"; do
  use "$program" serve
  for _ in 1 2 3; do idle /busybox/sleep 100000; done
  port=$((20000 + RANDOM % 10000))
  timeout --signal=TERM 60 deploy/layout/record.py serve --web.listen-address=127.0.0.1:$port --state.path="$work/state" &>/dev/null &
  for ((second = 0; second < 50; second += 5)); do
    sleep 5
    curl --silent --output /dev/null --compressed "127.0.0.1:$port/metrics" || true
    curl --silent --output /dev/null "127.0.0.1:$port/metrics" || true
    idle /busybox/true
  done
  wait
done

unset CARGO_TARGET_DIR
tests=$(cargo test --locked --no-run --test real 2>&1 | sed -n 's/.*(\(.*real-[0-9a-f]*\)).*/\1/p')
[[ $tests == /* ]] || tests=$PWD/$tests
use "$target/layout/release/memledger" tests
for filter in docker:: oom::exits:: oom::why:: screens:: gpu::health:: gpu::peaks:: otlp:: cri:: podman:: why:: events:: inside:: \
  runs:: serving::; do
  MEMLEDGER_BIN=$PWD/deploy/layout/record.py timeout 300 "$tests" "$filter" --test-threads=4 2>&1 | grep '^test result' || true
done
python3 -B deploy/layout/names.py "$work" >deploy/layout/functions.txt
echo "$(wc -l <deploy/layout/functions.txt) names in deploy/layout/functions.txt"
