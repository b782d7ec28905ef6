#!/bin/bash
# Runs the whole suite again and again and writes a line for each round: its number, passed and failed tests, seconds, and
# the names of those that failed. Fails if a round failed. The log of a round that failed stays.
#
# usage: loop.sh TIMES
#        $STRESS  1: beside `stress-ng --cpu 2`, which is installed if it is missing
#        lines go to standard output and to target/test-loop/rounds; logs lie beside that
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=setup/lib.sh
. tests/setup/lib.sh

times=${1:?usage: loop.sh TIMES}
folder=${CARGO_TARGET_DIR:-target}/test-loop
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

# The sum of the numbers before a word in nextest's closing lines, of which there are two: see run.sh.
count() { grep -oE "[0-9]+ $1" <<<"$2" | awk '{ sum += $1 } END { print sum + 0 }'; }

failed_rounds=0
for ((round = 1; round <= times; round++)); do
  log=$folder/$(date +%Y%m%dT%H%M%S).log
  began=$SECONDS
  result=ok
  tests/run.sh >"$log" 2>&1 || result=FAILED
  summary=$(grep -E '^ +Summary ' "$log" | sort -u || true)
  names=$(awk '/^ +(FAIL|SIGNAL|SIGSEGV|SIGABRT|SIGKILL|TIMEOUT) / { print $NF } /^  failed / { print "v2:" $NF }' "$log" | sort -u | paste -sd' ')
  names+=$(sed -n '/^FAILED: left behind/,/^ *Summary/{/^\(container\|volume\|image\|cgroup\|mount\|process\|file\) /s/^/ left:/p}' "$log" | tr '\n' ';')
  printf '%s%s round %s of %s: %s, %s passed, %s failed, %s s %s\n' "$(date +%F\ %T)" "${stress:+ (stress)}" "$round" "$times" \
    "$result" "$(count passed "$summary")" "$(count failed "$summary")" "$((SECONDS - began))" "$names" | tee -a "$folder/rounds"
  if [[ $result == ok ]]; then rm "$log"; else failed_rounds=$((failed_rounds + 1)); fi
done
((failed_rounds == 0))
