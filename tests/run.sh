#!/bin/bash
# `make test`: installs what the tests need, runs them here, and beside that those of the kernel's figures in the cgroup v2
# guest. Ends with the runner's closing line; fails if a test failed, if no test ran in the guest, or if anything was left
# behind.
#
# usage: run.sh [ARGUMENT...]    for `cargo nextest run`, such as a filter; with any, the guest's tests do not run
#
# As a user who is not root, it builds as that user and runs the tests with sudo.
#
# $MEMLEDGER_TESTS_REQUIRED  a test that cannot run here fails instead of being skipped; set in CI and here
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=setup/lib.sh
. tests/setup/lib.sh
need_cargo

# The tests of the ledger that the kernel or systemd can make different in the guest: a container takes seconds to start
# there, and its exit may be reported too late to know that it was the victim's.
readonly V2_TESTS="truth:: roles:: vanishing:: oom::limits oom::host oom::names::case_18 oom::names::case_20
  oom::names::case_21 oom::away::case_15 oom::away::case_19 oom::away::clock_jump oom::exits::case_26
  oom::bursts::case_23 oom::pods oom::sources::in_a hostile::scale::cgroups_10000
  --skip roles::trees --skip oom::limits::case_01_process_below --skip oom::limits::case_11_restarting"

tests/setup/setup.sh
set -a
# shellcheck disable=SC1090,SC1091 # written by setup.sh
. "$(tests/setup/setup.sh cache)/env"
set +a
export MEMLEDGER_TESTS_REQUIRED=1

work=$(mktemp -d "${TMPDIR:-/tmp}/mlt.XXXXXX")
chmod 755 "$work" # some tests run as another user
guest='' python=''
# shellcheck disable=SC2329 # called by the trap
clean() {
  local status=$?
  trap '' INT TERM HUP
  if [[ -n $guest ]]; then
    as_root kill -- -"$guest" 2>/dev/null || true
    wait "$guest" 2>/dev/null || true
  fi
  if ((status > 128)) && [[ -e $work/before ]]; then
    env -u MEMLEDGER_TEST_RUN tests/leftovers.sh remove "$work" "$MEMLEDGER_TEST_RUN" || true
  fi
  as_root rm -rf --one-file-system "$work"
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

status=0
cargo fmt --all --check
cargo clippy --workspace --all-targets --locked -- -D warnings
built=$(cargo build --workspace --locked --bins --tests --message-format=json-render-diagnostics)
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
memledger=$(executable memledger bin binary)
real=$(executable real test test)

# the message of a failed test names its place: a backtrace only pushes it off the screen
export RUST_BACKTRACE=0
# the same cases in each run; `make check` draws new ones
export PROPTEST_RNG_SEED=${PROPTEST_RNG_SEED:-7}
export MEMLEDGER_TEST_RUN=$$.$RANDOM
env -u MEMLEDGER_TEST_RUN tests/leftovers.sh before "$work"
export TMPDIR=$work/tmp
if ((EUID != 0)); then
  export CARGO_TARGET_"$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')"_RUNNER="$PWD/tests/as-root.sh"
fi

# run_tests ARGUMENT...: nextest, with its output appended to the log. In the background, so that a signal is acted on at once.
run_tests() {
  ("$MEMLEDGER_TEST_NEXTEST" nextest run --workspace --locked --no-fail-fast "$@" 2>&1 | tee -a "$work/log") &
  wait $!
}

# phase NAME: prints how long the one before took, so that a growth is noticed
phase_name='setup, lints and build' phase_began=0
phase() {
  printf 'time: %s took %s s, at %s s\n' "$phase_name" "$((SECONDS - phase_began))" "$SECONDS"
  phase_name=$1 phase_began=$SECONDS
}

phase 'the tests under load'
if (($# == 0)); then
  # The guest takes the longest, so it starts first and runs beside all tests: it is a process with a kernel of its own, so its kills
  # are not counted here.
  set -m # a process group of its own, which is ended as a whole
  V2_TEST_ARGS=$V2_TESTS V2_TEST_LIMIT=900 V2_LIMIT=4500 as_root_with_environment \
    tests/v2host/test.sh --file "$MEMLEDGER_TEST_HOG" "$memledger" "$real" >"$work/guest.log" 2>&1 &
  guest=$!
  set +m
  # These measure memory and time under load, so they run with nothing but the guest beside them.
  loaded='test(/^(otlp::many::|web::slow::|web::limits::ten_thousand)/)'
  run_tests -E "$loaded" || status=1
  # The tests of the Python client need neither root nor the binary; the check of what an addition touches compiles a copy.
  (
    timeout --kill-after=10 900 tests/python.sh && timeout --kill-after=10 900 python3 -B tests/extend.py
  ) >"$work/python.log" 2>&1 &
  python=$!
  set -- -E "not ($loaded)"
fi
phase 'the other tests'
run_tests "$@" || status=1
phase 'waiting for the guest'
if [[ -n $python ]]; then
  wait "$python" || status=1
  cat "$work/python.log"
fi
if [[ -n $guest ]]; then
  wait "$guest" || status=1
  guest=''
  cat "$work/guest.log"
fi
phase 'the check for leftovers'

# An image that was removed while its last container was being removed has lost its name and stays: by the label of tests.
docker image prune --force --filter label=memledger.test >/dev/null 2>&1 || true
if left=$(env -u MEMLEDGER_TEST_RUN tests/leftovers.sh after "$work" "$MEMLEDGER_TEST_RUN"); then
  echo "nothing was left behind"
else
  status=1
  printf 'FAILED: left behind by the tests:\n%s\n' "$left"
fi
missing=$MEMLEDGER_TEST_NO_CRATES$MEMLEDGER_TEST_NO_CARGO_DENY
[[ -z $missing ]] || echo "SKIPPED: tests of supply.rs: $missing"
[[ -z $MEMLEDGER_TEST_NO_HELM ]] || echo "SKIPPED: tests of helm.rs: $MEMLEDGER_TEST_NO_HELM"
phase 'nothing else'
grep -E '^ +Summary ' "$work/log" | tail -2
exit "$status"
