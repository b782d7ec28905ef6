#!/bin/bash
# `make test`: installs what the tests need, runs them here, and runs those of the kernel's figures in the cgroup v2
# guest too. Ends with the runner's closing line; fails if anything failed, or if no test ran in the guest.
#
# $MEMLEDGER_TESTS_REQUIRED  a test that cannot run here fails instead of being skipped; set in CI and here
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tests/setup/setup.sh
set -a
# shellcheck disable=SC1090,SC1091 # written by setup.sh
. "$(tests/setup/setup.sh cache)/env"
set +a
export MEMLEDGER_TESTS_REQUIRED=1

log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
cargo fmt --all --check
cargo clippy --workspace --all-targets --locked -- -D warnings
cargo nextest run --workspace --locked --no-fail-fast 2>&1 | tee "$log" || status=1

# the same tests against another kernel: cgroup v2, systemd
built=$(cargo build --locked --bins --tests --message-format=json-render-diagnostics)
# executable NAME KIND TEST: the executable of a target, and not its unit tests
executable() {
  printf '%s\n' "$built" | python3 -c '
import json, sys
name, kind, test = sys.argv[1], sys.argv[2], sys.argv[3] == "test"
for line in sys.stdin:
    message = json.loads(line)
    target = message.get("target", {})
    if message.get("executable") and (target["name"], target["kind"], message["profile"]["test"]) == (name, [kind], test):
        print(message["executable"])' "$@"
}
# of the ledger's, those that the kernel or systemd can make different there: a container takes seconds to start
v2_tests="truth:: roles:: vanishing:: oom::limits oom::host oom::names::case_18 oom::names::case_20
  oom::names::case_21 oom::away::case_15 oom::bursts::case_23 oom::pods oom::sources::in_a --skip roles::trees"
V2_TEST_ARGS=$v2_tests V2_TEST_LIMIT=400 V2_LIMIT=3000 tests/v2host/test.sh --file "$MEMLEDGER_TEST_HOG" \
  "$(executable memledger bin binary)" "$(executable real test test)" || status=1

grep -E '^ +Summary ' "$log" | tail -1
exit "$status"
