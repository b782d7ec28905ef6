#!/bin/bash
# `make test-packages`: installs what `make dist` built by every route, each on a clean root, and checks `doctor`, `/metrics` and
# `why` there. Fails if a test failed or if anything was left behind. Part of `make test-all`.
#
# usage: run.sh FOLDER [ARGUMENT...]    FOLDER has the packages; arguments are for pytest
#        $RETRY   1: tests that fail are retried; what they printed goes to the folder $FLAKY if they pass then
#        the results go to target/test-results/packages, a line for each test
# needs: root or sudo, Docker; tests/setup/setup.sh installs the rest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=../setup/lib.sh
. tests/setup/lib.sh
# shellcheck source=../runners.sh
. tests/runners.sh
packages=$(realpath "$1")
shift
tests/setup/setup.sh packages python prometheus helm engine image hog routes sbom env
set -a
# shellcheck disable=SC1090,SC1091 # written by setup.sh
. "$(tests/setup/setup.sh cache)/env"
set +a
export MEMLEDGER_TEST_PACKAGES=$packages MEMLEDGER_TEST_RUN=$(test_run) MEMLEDGER_TEST_CARGO_HOME=${CARGO_HOME:-${HOME:-/root}/.cargo}

work=$(mktemp -d "${TMPDIR:-/tmp}/mlt.XXXXXX")
chmod 755 "$work"
# shellcheck disable=SC2329 # called by the trap
clean() {
  local status=$?
  trap '' INT TERM HUP
  if ((status > 128)) && [[ -e $work/tmp ]]; then
    env -u MEMLEDGER_TEST_RUN tests/leftovers.sh remove "$work" "$MEMLEDGER_TEST_RUN" || true
  fi
  as_root rm -rf --one-file-system "$work"
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
env -u MEMLEDGER_TEST_RUN tests/leftovers.sh before "$work"
export TMPDIR=$work/tmp

# shellcheck disable=SC2034 # of runners.sh
retry=${RETRY:-} flaky=${FLAKY:-$work/flaky}
touch "$work/results"
# in the background, so that a signal is acted on at once
run_pytest packages as_root_with_environment timeout --kill-after=10 1800 "$MEMLEDGER_TEST_PYTHON" -B -m pytest \
  -c tests/packages/pytest.ini --basetemp="$work/pytest" tests/packages "$@" &
wait $! || fail 'the tests of the packages'
if left=$(env -u MEMLEDGER_TEST_RUN tests/leftovers.sh after "$work" "$MEMLEDGER_TEST_RUN"); then
  echo "nothing was left behind"
else
  fail 'the check for leftovers of the packages'
  printf 'FAILED: left behind by the tests:\n%s\n' "$left"
fi
target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target/test-results"
cp "$work/results" "$target/test-results/packages"
results summary "$SECONDS" "$work/results"
! has_failed
