#!/bin/bash
# `make test-kube`: the tests `kube::` of tests/main.rs, on one node of Kubernetes that node.sh starts for all of them, with memledger
# from its chart.
#
# usage: run.sh [ARGUMENT...]      builds Kubernetes if it is not cached; arguments are for `cargo nextest run`
#        run.sh --cached           tells why it is not; fails then
#        KUBE_PROGRAM=FILE run.sh  with this memledger in place of the debug build, such as target/packages/memledger of make dist
#        FULL=1 run.sh             also eviction, and all of it once more with containerd 2 of `make test-engines`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [[ ${1:-} == --cached ]]; then
  if tests/setup/setup.sh has-kube; then exit; fi
  echo "SKIPPED: make test-kube: Kubernetes is not built in this version: tests/setup/setup.sh kube" >&2
  exit 1
fi
exec tests/run.sh kube "$@"
