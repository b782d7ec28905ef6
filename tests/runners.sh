# shellcheck shell=bash
# Runs tests and keeps their results. Sourced by run.sh and packages/run.sh, which set:
#
# work     a folder of the run; in it, `results` gets a line for each test (tests/results.py)
# retry    not empty: the tests that failed run once more, one at a time
# flaky    where the output of a test goes that failed and then passed

results() { python3 -B tests/results.py "$@"; }

# test_run: prints an id of a run of the tests, which no other name contains.
test_run() { printf 'r%dx%06x' $$ $((RANDOM * 32768 + RANDOM & 0xffffff)); }

# fail WHAT: records that something failed that is no test, or that tests could not run.
fail() { echo "run failed $1" >>"$work/results"; }

# has_failed: something in the results failed.
has_failed() { grep -qE '^[a-z]+ failed ' "$work/results"; }

# gate: nextest's filter for the tests that gate a change.
gate() { printf 'not binary(real) + test(/^(%s)/)' "$(grep -v '^#' tests/gate.txt | grep . | paste -sd'|')"; }

# run_nextest NAME ARGUMENT...: leaves NAME.xml and NAME.log. In the background, so that a signal is acted on at once. That tests
# failed is in the file; that they could not all run is recorded here.
run_nextest() {
  local name=$1 junit=target/nextest/${NEXTEST_PROFILE:-default}/junit.xml status=0 # nextest's own folder, whatever cargo's is
  shift
  rm -f "$junit"
  ("$MEMLEDGER_TEST_NEXTEST" nextest run --color never --workspace --locked --no-fail-fast "$@" 2>&1 | tee "$work/$name.log") &
  wait $! || status=$?
  [[ ! -e $junit ]] || cp "$junit" "$work/$name.xml"
  # 100: tests failed; "5/9 tests run": it was interrupted
  if ((status != 0 && status != 100)) || grep -qE '^ +Summary .* [0-9]+/[0-9]+ tests? run' "$work/$name.log" ||
    { ((status == 100)) && ! grep -qE '<(failure|error)' "$work/$name.xml"; }; then
    fail "nextest ($name, status $status)"
  fi
}

# collect_nextest NAME...: the results of these runs, after a retry.
collect_nextest() {
  local files=("${@/#/$work/}") filter again=() retried=$1-retried
  files=("${files[@]/%/.xml}")
  if [[ -n $retry ]] && filter=$(results retry "${files[@]}"); then
    echo 'the tests that failed, once more, one at a time:'
    run_nextest "$retried" --test-threads 1 -E "$filter"
    again=(--retried "$work/$retried.xml")
  fi
  results collect host "$flaky" "${files[@]}" "${again[@]}" >>"$work/results" || fail 'reading the results of nextest'
}

# run_pytest RUNNER COMMAND...: the command is pytest with its arguments. Runs the tests, retries, and keeps the results.
run_pytest() {
  local runner=$1 junit=$work/$1.xml status=0 again=()
  shift
  set -- "$@" -o "cache_dir=$work/$runner.cache" -o junit_logging=all
  "$@" --junitxml="$junit" || status=$?
  if ((status == 1)) && [[ -n $retry ]] && results retry "$junit" >/dev/null; then
    echo "$runner: the tests that failed, once more:"
    "$@" --last-failed --junitxml="$junit.retried" || true # what it leaves says which passed
    again=(--retried "$junit.retried")
  fi
  ((status <= 1)) || fail "pytest ($runner, status $status)"
  results collect "$runner" "$flaky" "$junit" "${again[@]}" >>"$work/results" || fail "reading the results of $runner"
}
