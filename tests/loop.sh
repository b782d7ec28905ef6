#!/bin/bash
# Runs the whole suite again and again and writes a line for each round: its number, passed and failed tests of this host, of the
# guest and of Python, leftovers, seconds, and the names of what failed or was left behind. Fails if a round failed. The log of a
# round that failed stays.
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

# The sum of the numbers before a word in some lines.
count() { grep -oE "[0-9]+ $1" <<<"$2" | awk '{ sum += $1 } END { print sum + 0 }'; }

# counts LOG: passed and failed tests of each runner, and the number of leftovers.
counts() {
  local host python guest left
  host=$(grep -E '^ +Summary ' "$1" | sort -u || true)
  python=$(grep -E '^(=+ )?([0-9]+ (passed|failed|errors?|skipped)(, )?)+ in [0-9.]+s' "$1" || true)
  guest=$(grep -E '^v2 host: [0-9]+ tests ran, [0-9]+ failed' "$1" || true)
  left=$(leftovers "$1" | wc -l)
  printf 'host %s passed %s failed, guest %s ran %s failed, python %s passed %s failed, %s left behind' \
    "$(count passed "$host")" "$(count failed "$host")" \
    "$(count 'tests ran' "$guest")" "$(count failed "$guest")" \
    "$(count passed "$python")" "$(($(count failed "$python") + $(count error "$python")))" "$left"
}

leftovers() {
  sed -n '/^FAILED: left behind/,/^\(time:\| *Summary\)/{/^\(container\|volume\|image\|cgroup\|mount\|process\|file\) /p}' "$1"
}

# names LOG: what failed, by runner.
names() {
  awk '/^ +(FAIL|SIGNAL|SIGSEGV|SIGABRT|SIGKILL|TIMEOUT) / { print $NF }
       /^  failed / { print "v2:" $NF }
       /^(FAILED|ERROR) [^ ]+\.py/ { print "python:" $2 }' "$1" | sort -u | paste -sd' '
  leftovers "$1" | sed 's/^/ left:/' | tr '\n' ';'
}

failed_rounds=0
for ((round = 1; round <= times; round++)); do
  log=$folder/$(date +%Y%m%dT%H%M%S).log
  began=$SECONDS
  result=ok
  tests/run.sh >"$log" 2>&1 || result=FAILED
  printf '%s%s round %s of %s: %s, %s, %s s %s\n' "$(date +%F\ %T)" "${stress:+ (stress)}" "$round" "$times" \
    "$result" "$(counts "$log")" "$((SECONDS - began))" "$(names "$log" | tr -d '\n')" | tee -a "$folder/rounds"
  if [[ $result == ok ]]; then rm "$log"; else failed_rounds=$((failed_rounds + 1)); fi
done
((failed_rounds == 0))
