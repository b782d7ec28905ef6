#!/bin/bash
# `make test-engines`: the tests `engines::` of tests/main.rs, with Docker 29, containerd 2, Compose 5 and Podman 5. Each test starts the
# engine that it needs; those of the machine stay as they are.
#
# usage: run.sh [ARGUMENT...]    builds the engines if they are not cached; arguments are for `cargo nextest run`
#        run.sh --cached         tells why they are not; fails then
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [[ ${1:-} == --cached ]]; then
  if tests/setup/setup.sh has-engines; then exit; fi
  echo "SKIPPED: make test-engines: Docker 29, containerd 2, Compose 5 and Podman 5 are not built in these versions: tests/setup/setup.sh engines" >&2
  exit 1
fi
exec tests/run.sh engines "$@"
