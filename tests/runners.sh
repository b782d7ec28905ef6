# shellcheck shell=bash
# Runs tests and keeps their results. Sourced by run.sh and packages/run.sh, which set:
#
# work     a folder of the run; in it, `results` gets a line for each test (tests/results.py)
# repeat   not empty: the tests that failed run once more, one at a time
# flaky    where the output of a test goes that failed and then passed

results() { python3 -B tests/results.py "$@"; }

# gate: nextest's filter for the tests that gate a change.
gate() { printf 'not binary(real) + test(/^(%s)/)' "$(grep -v '^#' tests/gate.txt | grep . | paste -sd'|')"; }

# run_nextest NAME ARGUMENT...: leaves NAME.xml and adds the output to the log. In the background, so that a signal is acted on at
# once. Fails if the tests could not run, and not if some failed: the results say that.
run_nextest() {
  local name=$1 profile=${NEXTEST_PROFILE:-default} status=0
  local junit=${CARGO_TARGET_DIR:-target}/nextest/$profile/junit.xml
  shift
  rm -f "$junit"
  ("$MEMLEDGER_TEST_NEXTEST" nextest run --workspace --locked --no-fail-fast "$@" 2>&1 | tee -a "$work/log") &
  wait $! || status=$?
  ((status == 0 || status == 100)) && cp "$junit" "$work/$name.xml"
}

# repeat_nextest NAME...: the tests that failed in these runs, once more; then the results of all.
repeat_nextest() {
  local files=("${@/#/$work/}") filter again=()
  files=("${files[@]/%/.xml}")
  if [[ -n $repeat ]] && filter=$(results repeat "${files[@]}"); then
    echo 'the tests that failed, once more, one at a time:'
    run_nextest repeated --test-threads 1 -E "$filter"
    again=(--repeated "$work/repeated.xml")
  fi
  results collect host "$flaky" "${files[@]}" "${again[@]}" >>"$work/results"
}

# run_pytest RUNNER COMMAND...: the command is pytest with its arguments. As run_nextest and repeat_nextest.
run_pytest() {
  local runner=$1 junit=$work/$1.xml status=0 again=()
  shift
  set -- "$@" -o "cache_dir=$work/$runner.cache" -o junit_logging=all
  "$@" --junitxml="$junit" || status=$?
  if ((status == 1)) && [[ -n $repeat ]] && results repeat "$junit" >/dev/null; then
    echo "$runner: the tests that failed, once more:"
    "$@" --last-failed --junitxml="$junit.repeated" || true
    again=(--repeated "$junit.repeated")
  fi
  ((status <= 1)) && results collect "$runner" "$flaky" "$junit" "${again[@]}" >>"$work/results"
}
