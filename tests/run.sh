#!/bin/bash
# Runs the tests of this repository, in tiers:
#
# gate     `make test`: what each change has to pass. Format, lints, unit tests, recorded hosts, the fast tests of the Python client,
#          and those real tests that gate.txt names. Nothing is retried.
# all      `make test-all`: what `gate` leaves out. The other real tests, those of the kernel's figures in the cgroup v2 guest, which
#          run beside them, the other tests of the Python client, and the packages. Tests that fail are retried once, one at a time:
#          one that passes then is flaky, which is listed and fails nothing.
# engines  `make test-engines`, by engines/run.sh: the tests `engines::`, with Docker 29, containerd 2 and Podman 5, which are built
#          once. Retried like `all`, of which it is no part.
# kube     `make test-kube`, by kube/run.sh: the tests `kube::`, on a node of Kubernetes that is started here for all of them. Likewise.
#
# Installs what the tests need. Fails if a test failed, if no test ran in the guest, or if anything was left behind. Ends with a
# summary like nextest's; the results are in target/test-results/TIER.
#
# usage: run.sh gate|all|engines|kube [ARGUMENT...]    for `cargo nextest run`, such as a filter: those tests instead, with what the tier installs
#
# As a user who is not root, it builds as that user and runs the tests with sudo.
#
# $KUBE_PROGRAM              the memledger that the node of Kubernetes runs, in place of the debug build
# $MEMLEDGER_TESTS_REQUIRED  a test that cannot run here fails instead of being skipped; set in CI and here
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=setup/lib.sh
. tests/setup/lib.sh
# shellcheck source=runners.sh
. tests/runners.sh
need_cargo

# The tests of the ledger that the kernel or systemd can make different in the guest: a container takes seconds to start
# there, and its exit may be reported too late to know that it was the victim's.
readonly V2_TESTS="truth:: roles:: vanishing:: oom::limits oom::host oom::names::case_18 oom::names::case_20
  oom::names::case_21 oom::away::case_15 oom::away::case_19 oom::away::clock_jump oom::exits::case_26
  run_command:: inside::batch_search oom::bursts::case_23 oom::pods oom::sources::in_a hostile::scale::cgroups_10000
  --skip roles::trees --skip oom::limits::case_01_process_below --skip oom::limits::case_11_restarting"
# These need the engines of `make test-engines`.
readonly ENGINES='test(/^engines::/)'
# These need the node of `make test-kube`; the second ones take long.
readonly KUBE='test(/^kube::/)' KUBE_FULL='test(/^kube::eviction::/)'
# These measure memory and time under load, so they run with nothing but the guest beside them.
readonly UNDER_LOAD='test(/^(otlp::many::|web::slow::|web::limits::ten_thousand)/)'

case ${1:-} in
  gate) retry='' steps=(gate) ;;
  all) retry=1 steps=(all) ;;
  engines) retry=1 steps=(packages python nextest podman engine image hog engines env) ;;
  kube)
    retry=1 steps=(packages prometheus python nextest helm hog kube)
    [[ -z ${FULL:-} ]] || steps+=(podman engine image engines)
    steps+=(env)
    ;;
  *) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0" >&2; exit 2 ;;
esac
tier=$1
shift
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
flaky=$target/flaky/$(date +%Y%m%dT%H%M%S)
mkdir -p "$target/test-results"
rm -f "$target/test-results/$tier"

tests/setup/setup.sh "${steps[@]}"
set -a
# shellcheck disable=SC1090,SC1091 # written by setup.sh
. "$(tests/setup/setup.sh cache)/env"
set +a
export MEMLEDGER_TESTS_REQUIRED=1

work=$(mktemp -d "${TMPDIR:-/tmp}/mlt.XXXXXX")
chmod 755 "$work" # some tests run as another user
guest='' python='' other='' node=''
# shellcheck disable=SC2329 # called by the trap
clean() {
  local status=$?
  trap '' INT TERM HUP
  if [[ -n $guest ]]; then
    as_root kill -- -"$guest" 2>/dev/null || true
    wait "$guest" 2>/dev/null || true
  fi
  kill ${python:+"$python"} ${other:+"$other"} 2>/dev/null || true
  if [[ -n $other ]]; then wait "$other" 2>/dev/null || true; fi
  if [[ -n $node ]]; then stop_node || true; fi
  if ((status > 128)) && [[ -e $work/tmp ]]; then
    env -u MEMLEDGER_TEST_RUN tests/leftovers.sh remove "$work" "$MEMLEDGER_TEST_RUN" || true
  fi
  as_root rm -rf --one-file-system "$work"
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

if [[ $tier == gate ]]; then
  cargo fmt --all --check
  cargo clippy --workspace --all-targets --locked -- -D warnings
fi
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

# the message of a failed test names its place: a backtrace only pushes it off the screen
export RUST_BACKTRACE=0
# the same cases in each run; `make check` draws new ones
export PROPTEST_RNG_SEED=${PROPTEST_RNG_SEED:-7}
export MEMLEDGER_TEST_RUN=$(test_run)
env -u MEMLEDGER_TEST_RUN tests/leftovers.sh before "$work"
export TMPDIR=$work/tmp
if ((EUID != 0)); then
  export CARGO_TARGET_"$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')"_RUNNER="$PWD/tests/as-root.sh"
fi

# phase NAME: prints how long the one before took, so that a growth is noticed
phase_name='setup and build' phase_began=0
phase() {
  printf 'time: %s took %s s, at %s s\n' "$phase_name" "$((SECONDS - phase_began))" "$SECONDS"
  phase_name=$1 phase_began=$SECONDS
}

# in_background COMMAND...: waits for it, and acts on a signal meanwhile.
in_background() {
  local status=0
  "$@" &
  other=$!
  wait "$other" || status=$?
  other=''
  return "$status"
}

# start_guest: the tests in the guest take the longest, so they start first. It is a process with a kernel of its own, so its kills
# are not counted here.
start_guest() {
  set -m # a process group of its own, which is ended as a whole
  V2_TEST_ARGS=$V2_TESTS V2_TEST_LIMIT=900 V2_LIMIT=4500 V2_RESULTS=$work/guest.results V2_FLAKY=$work/guest.flaky as_root_with_environment \
    tests/v2host/test.sh --file "$MEMLEDGER_TEST_HOG" "$(executable memledger bin binary)" "$(executable real test test)" \
    >"$work/guest.log" 2>&1 &
  guest=$!
  set +m
}

wait_for_guest() {
  wait "$guest" || fail 'the guest'
  guest=''
  cat "$work/guest.log"
  if [[ -e $work/guest.results ]]; then cat "$work/guest.results" >>"$work/results"; fi
  if [[ -e $work/guest.flaky ]]; then mkdir -p "$flaky" && cp "$work"/guest.flaky/* "$flaky/"; fi
}

# start_python ARGUMENT...: the tests of the Python client need neither root nor the binary.
start_python() {
  (run_pytest python timeout --kill-after=10 900 tests/python.sh "$@") >"$work/python.log" 2>&1 &
  python=$!
}

wait_for_python() {
  wait "$python" || fail 'the tests of the Python client'
  python=''
  cat "$work/python.log"
}

# start_node [FOLDER]: the node of the tests `kube::`, with the containerd in FOLDER instead of this machine's
start_node() {
  node=$work/kube
  export MEMLEDGER_TEST_KUBE_NODE=$node KUBE_CONTAINERD=${1:-}
  in_background as_root_with_environment tests/kube/node.sh up "$node" "${KUBE_PROGRAM:-$(executable memledger bin binary)}"
}

stop_node() {
  as_root_with_environment tests/kube/node.sh down "$node" && node=''
}

# test_on_node NAME ARGUMENT...: runs these tests and ends the node
test_on_node() {
  local name=$1
  shift
  phase "the tests, $name"
  run_nextest "$name" "$@"
  collect_nextest "$name"
  phase 'the end of the node'
  stop_node || fail 'the end of the node'
}

test_kube() {
  local filter=$KUBE
  [[ -n ${FULL:-} ]] || filter="$KUBE - $KUBE_FULL"
  if (($# == 0)); then set -- -E "$filter"; fi
  # what only nextest builds would be built beside the node, and make its times another machine's
  "$MEMLEDGER_TEST_NEXTEST" nextest run --workspace --locked --no-run
  phase 'the node'
  if start_node; then test_on_node host "$@"; else fail 'the node'; stop_node || true; fi
  [[ -n ${FULL:-} ]] || return 0
  [[ -z $node ]] || stop_node || true
  phase 'the node with containerd 2'
  if start_node "$MEMLEDGER_TEST_ENGINES"; then test_on_node containerd-2 "$@"; else fail 'the node with containerd 2'; stop_node || true; fi
}

# in_background runs these in a process of their own, which becomes the program: so that gets the signal
extend() { exec timeout --kill-after=10 900 python3 -B tests/extend.py; }
build_packages() {
  unset TMPDIR MEMLEDGER_TEST_RUN
  exec nice make dist
}
test_packages() {
  unset TMPDIR MEMLEDGER_TEST_RUN
  RETRY=1 FLAKY=$flaky exec tests/packages/run.sh "$target/packages"
}

touch "$work/results"
phase 'the tests'
has_packages=''
if [[ $tier == kube ]]; then
  test_kube "$@"
elif (($#)); then
  run_nextest host "$@"
  collect_nextest host
elif [[ $tier == gate ]]; then
  start_python -m 'not slow'
  run_nextest host -E "$(gate)"
  wait_for_python
  collect_nextest host
elif [[ $tier == engines ]]; then
  run_nextest host -E "$ENGINES"
  collect_nextest host
else
  start_guest
  run_nextest under-load -E "$UNDER_LOAD - ($(gate))"
  phase 'the other tests'
  start_python -m slow
  run_nextest host -E "not ($UNDER_LOAD + $ENGINES + $KUBE + $(gate))"
  in_background extend || fail extend.py # compiles a copy
  wait_for_python
  phase 'building the packages' # beside the guest, which has one processor and goes first
  if in_background build_packages; then has_packages=1; else fail 'make dist'; fi
  phase 'waiting for the guest'
  wait_for_guest
  phase 'the retries'
  collect_nextest under-load host
fi
phase 'the check for leftovers'

# An image that was removed while its last container was being removed has lost its name and stays: by the label of tests.
docker image prune --force --filter "label=memledger.test.run=$MEMLEDGER_TEST_RUN" >/dev/null 2>&1 || true
if left=$(env -u MEMLEDGER_TEST_RUN tests/leftovers.sh after "$work" "$MEMLEDGER_TEST_RUN"); then
  echo "nothing was left behind"
else
  fail 'the check for leftovers'
  printf 'FAILED: left behind by the tests:\n%s\n' "$left"
fi
if [[ $tier == all ]] && ((!$#)); then
  phase 'the packages'
  if [[ -n $has_packages ]]; then
    rm -f "$target/test-results/packages"
    in_background test_packages || true # its results say so
    cat "$target/test-results/packages" >>"$work/results" || fail 'the tests of the packages'
  fi
  missing=$MEMLEDGER_TEST_NO_CRATES$MEMLEDGER_TEST_NO_CARGO_DENY
  [[ -z $missing ]] || echo "SKIPPED: tests of supply.rs: $missing"
  [[ -z $MEMLEDGER_TEST_NO_HELM ]] || echo "SKIPPED: tests of helm.rs: $MEMLEDGER_TEST_NO_HELM"
fi
phase ''
cp "$work/results" "$target/test-results/$tier"
# what a runner's machine keeps is only this output
for file in "$flaky"/*; do
  [[ -e $file ]] || continue
  printf '\nthe end of what %s printed when it failed:\n' "$(basename "$file")"
  tail -n 20 "$file" | cut -c1-600
done
results summary "$SECONDS" "$work/results"
! has_failed
