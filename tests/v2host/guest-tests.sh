# shellcheck shell=bash
# The guest's half of test.sh: runs every test of every executable in /host/in, one process each.
# test.sh prepends the variables (MEMLEDGER_*, test_limit); results go to /host/results, output to stdout.

shopt -s nullglob
set -u
# Off the shared folder: containers mount these, and the page cache of the guest's own disk behaves like a real host's.
mkdir -p /opt/memledger-test
cp -a /host/in/. /opt/memledger-test/
cd /opt/memledger-test || exit 3
chmod 755 memledger ./*.test
mapfile -t args </host/args
[[ -n ${args[0]:-} ]] || args=()

for exe in ./*.test; do
  short=$(basename "$exe" .test)
  if ! list=$("$exe" "${args[@]}" --list --format terse 2>&1); then
    printf '%s\n' "$list"
    echo "failed 0 $short (does-not-start)" >>/host/results
    continue
  fi
  mapfile -t tests < <(printf '%s\n' "$list" | sed -n 's/: test$//p')
  for name in "${tests[@]}"; do
    echo "--- $short $name"
    began=$SECONDS
    # shellcheck disable=SC2154 # from test.sh
    timeout -k 5 "$test_limit" "$exe" "${args[@]}" --exact "$name" --test-threads=1 >/host/output 2>&1
    status=$?
    result=failed
    if ((status == 0)); then
      result=ok
      grep -q '^test result: ok. 0 passed; 0 failed; [1-9][0-9]* ignored' /host/output && result=ignored
    fi
    ((status != 124)) || echo "killed after $test_limit s" >>/host/output
    cat /host/output
    echo "$result $((SECONDS - began)) $short $name" >>/host/results
  done
done
exit 0
