# shellcheck shell=bash
# The guest's half of test.sh: runs every test of every executable in /host/in, one process each, and retries one that fails.
# test.sh prepends the variables (MEMLEDGER_*, test_limit); results go to /host/results, what a test printed when it failed first to
# /host/failed, output to stdout.

shopt -s nullglob
set -u
# Off the shared folder: containers mount these, and the page cache of the guest's own disk behaves like a real host's.
mkdir -p /opt/memledger-test
cp -a /host/in/. /opt/memledger-test/
cd /opt/memledger-test || exit 3
chmod 755 memledger ./*.test
mapfile -t args </host/args
[[ -n ${args[0]:-} ]] || args=()

# run_test EXECUTABLE NAME: sets `result` and `status`; the output stays in /host/output.
run_test() {
  status=0
  echo "--- $(basename "$1" .test) $2"
  # shellcheck disable=SC2154 # from test.sh
  timeout -k 5 "$test_limit" "$1" "${args[@]}" --exact "$2" --test-threads=1 >/host/output 2>&1 || status=$?
  result=failed
  if ((status == 0)); then
    result=passed
    grep -q '^test result: ok. 0 passed; 0 failed; [1-9][0-9]* ignored' /host/output && result=ignored
  fi
  ((status != 124)) || echo "killed after $test_limit s" >>/host/output
  cat /host/output
}

mkdir -p /host/failed
retried=0
for exe in ./*.test; do
  short=$(basename "$exe" .test)
  if ! list=$("$exe" "${args[@]}" --list --format terse 2>&1); then
    printf '%s\n' "$list"
    echo "failed 0 $short (does-not-start)" >>/host/results
    continue
  fi
  mapfile -t tests < <(printf '%s\n' "$list" | sed -n 's/: test$//p')
  for name in "${tests[@]}"; do
    began=$SECONDS
    run_test "$exe" "$name"
    # with more failures, the change is wrong or the guest; one that hangs would hang again
    if [[ $result == failed ]] && ((status != 124 && ++retried <= 10)); then
      cp /host/output "/host/failed/$short-${name//:/-}"
      echo "--- $short $name failed; once more:"
      run_test "$exe" "$name"
      [[ $result != passed ]] || result=flaky
    fi
    echo "$result $((SECONDS - began)) $short $name" >>/host/results
  done
done
exit 0
