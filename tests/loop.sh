#!/bin/bash
# Runs a tier of the tests again and again and writes a line for each round: its number, passed, flaky and failed tests, leftovers,
# seconds, and the names of what failed, was flaky, or was left behind. Fails if a round failed or had a flaky test; the log of
# such a round stays.
#
# usage: loop.sh gate|all TIMES [ARGUMENT...]    ARGUMENT as for run.sh
#        $STRESS  1: beside `stress-ng --cpu 2`, which is installed if it is missing
#        lines go to standard output and to target/test-loop/rounds; logs lie beside that
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=setup/lib.sh
. tests/setup/lib.sh

tier=${1:?usage: loop.sh gate|all TIMES} times=${2:?usage: loop.sh gate|all TIMES}
shift 2
target=${CARGO_TARGET_DIR:-target}
folder=$target/test-loop
mkdir -p "$folder"
stress=''
if [[ ${STRESS:-0} == 1 ]]; then
  has stress-ng || apt_or_update install -y --no-install-recommends stress-ng >"$folder/stress-ng.log"
  stress-ng --cpu 2 --quiet &
  stress=$!
  trap 'kill "$stress" 2>/dev/null || true' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
fi

leftovers() {
  sed -n '/^FAILED: left behind/,/^\(time:\| *Summary\)/{/^\(container\|volume\|image\|cgroup\|mount\|process\|file\) /p}' "$1"
}

count() { grep -cE "^[a-z]+ $1 " "$target/test-results/$tier" || true; }

failed_rounds=0
for ((round = 1; round <= times; round++)); do
  log=$folder/$(date +%Y%m%dT%H%M%S).log
  began=$SECONDS
  result=ok
  tests/run.sh "$tier" "$@" >"$log" 2>&1 || result=FAILED
  touch "$target/test-results/$tier" # there is none if it failed before its tests
  printf '%s%s %s %s of %s: %s, %s passed, %s flaky, %s failed, %s left behind, %s s %s\n' "$(date +%F\ %T)" "${stress:+ (stress)}" \
    "$tier" "$round" "$times" "$result" "$(count passed)" "$(count flaky)" "$(count failed)" "$(leftovers "$log" | wc -l)" \
    "$((SECONDS - began))" "$({ grep -E '^[a-z]+ (flaky|failed) ' "$target/test-results/$tier"; leftovers "$log"; } | paste -sd';')" |
    tee -a "$folder/rounds"
  if [[ $result == ok ]] && (($(count flaky) == 0)); then rm "$log"; else failed_rounds=$((failed_rounds + 1)); fi
done
((failed_rounds == 0))
