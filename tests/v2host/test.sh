#!/bin/bash
# Runs Rust test executables in a v2 guest: boots one, puts the files in, runs every test in a process of its own and
# one after the other, prints their output and a list of results, ends the guest.
#
# A process per test, as nextest does: the result is the exit status and needs no guessing from mixed output, and a test
# that hangs loses only itself. A test that fails is retried; if it passes then, it is flaky, and the run has not failed. No test
# run at all is a failure.
# The executables are dynamically linked and must fit the guest's C library, which is this machine's release.
#
# usage: test.sh [--file PATH]... MEMLEDGER_BINARY TEST_EXECUTABLE...
#        --file PATH      puts a file or folder beside the executables too
#        $V2_TEST_ARGS    further arguments for the executables, split at spaces: a filter, --skip NAME, --include-ignored
#        $V2_TEST_LIMIT   seconds for one test, default 180
#        $V2_LIMIT        seconds for the whole, default 1800
#        $V2_RESULTS      a file that gets a line "guest RESULT NAME" for each test
#        $V2_FLAKY        a folder that gets what each flaky test printed when it failed
# In the guest: MEMLEDGER_BIN is the path of the binary, MEMLEDGER_TEST_IMAGE the containers' image, MEMLEDGER_V2HOST=1;
# the current folder is that of the executables.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

files=()
while [[ ${1:-} == --file ]]; do
  files+=("$2")
  shift 2
done
(($# >= 2)) || { sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2; exit 2; }
binary=$1
shift
limit=${V2_LIMIT:-1800}

work=$(mktemp -d "${TMPDIR:-/tmp}/memledger-v2.XXXXXX")
run=$work/guest
# shellcheck disable=SC2329 # called by the trap
clean() {
  local status=$?
  "$here/stop.sh" "$run" || status=1
  rm -rf "$work"
  exit "$status"
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

began=$SECONDS
"$here/boot.sh" --lifetime $((limit + 120)) --parent $$ "$run"
echo "v2 host: booted in $((SECONDS - began)) s"

mkdir "$run/share/in"
cp -L -- "$binary" "$run/share/in/memledger"
for file in "$@"; do
  # The name that cargo gives, less its hash.
  name=$(basename "$file" | sed -E 's/-[0-9a-f]{16}$//')
  [[ $name != memledger ]] || name=memledger-unit
  [[ ! -e $run/share/in/$name.test ]] || { echo "two test executables are called $name" >&2; exit 2; }
  cp -L -- "$file" "$run/share/in/$name.test"
done
for file in "${files[@]}"; do cp -a -- "$file" "$run/share/in/"; done
# shellcheck disable=SC2086 # split at spaces on purpose
printf '%s\n' ${V2_TEST_ARGS:-} >"$run/share/args"

failed_to_run=0
{
  printf 'export MEMLEDGER_V2HOST=1 MEMLEDGER_BIN=/opt/memledger-test/memledger\n'
  printf 'export MEMLEDGER_TEST_IMAGE=%q\n' "$("$here/../setup/image.sh" name)"
  printf 'test_limit=%q\n' "${V2_TEST_LIMIT:-180}"
  cat "$here/guest-tests.sh"
} | "$here/run.sh" -t "$limit" "$run" || failed_to_run=$?

# guest-tests.sh leaves a line "RESULT SECONDS EXECUTABLE NAME" for every test.
results=$run/share/results
touch "$results"
count() { grep -c "^$1 " "$results" || true; }
passed=$(count passed) flaky=$(count flaky) failed=$(count failed) ignored=$(count ignored)
ran=$((passed + flaky + failed))
echo
echo "v2 host: $ran tests ran, $failed failed, $flaky passed when retried:"
awk '{ printf "  %-8s %5s s  %s %s\n", $1, $2, $3, $4 }' "$results"
if [[ -n ${V2_RESULTS:-} ]]; then awk '$1 != "ignored" { print "guest", $1, $4 }' "$results" >"$V2_RESULTS"; fi
if ((flaky)) && [[ -n ${V2_FLAKY:-} ]]; then
  mkdir -p "$V2_FLAKY"
  awk '$1 == "flaky" { gsub(":", "-", $4); print $3 "-" $4 }' "$results" | while read -r name; do
    cp "$run/share/failed/$name" "$V2_FLAKY/guest-$name"
  done
fi
if ((failed_to_run)); then
  echo "v2 host: the run itself ended with status $failed_to_run" >&2
  exit 1
fi
((ignored == 0)) || echo "v2 host: $ignored ignored (V2_TEST_ARGS=--include-ignored runs them)"
if ((ran == 0)); then
  echo "v2 host: no test ran, which counts as a failure" >&2
  exit 1
fi
((failed == 0))
