#!/bin/bash
# `make test-servers`: the rules, the dashboards and OTLP at Prometheus 3, at VictoriaMetrics with vmalert, and through a collector.
#
# unit_tests.py  the unit tests of the rules, with vmalert-tool and with promtool 3
# compare.py     each query of each dashboard at both, on the same samples: equal results, or the reason why not
# replay.py      four hours of a fleet at six ways to receive it, evaluated by the servers: what alerts, and how often
# live.py        a real memledger at each, and at a collector: rules, names, dashboards, and receivers that take no logs
#
# usage: run.sh             builds the servers if they are not cached
#        run.sh --cached    tells why they are not; fails then
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
cache=$(tests/setup/setup.sh cache)
if [[ ${1:-} == --cached ]]; then
  if tests/setup/setup.sh has-servers; then exit; fi
  echo "SKIPPED: make test-servers: Prometheus 3, VictoriaMetrics and the collector are not built in these versions: tests/setup/setup.sh servers" >&2
  exit 1
fi
tests/setup/setup.sh prometheus python servers env
set -a
# shellcheck disable=SC1091 # written by setup.sh
. "$cache/env"
set +a
cargo build --locked --bin memledger
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
python=("$MEMLEDGER_TEST_PYTHON" -B)
mkdir -p "$target/test-results"
results=$target/test-results/servers
: >"$results"
status=0
# part NAME COMMAND...: runs it, prints how long it took, and writes its result
part() {
  local name=$1 began=$SECONDS result=passed
  shift
  "$@" || { result=failed status=1; }
  echo "time: $name took $((SECONDS - began)) s"
  echo "servers $result $name" >>"$results"
}
part live "${python[@]}" tests/servers/live.py "$target/debug/memledger"
part compare "${python[@]}" tests/servers/compare.py
part replay "${python[@]}" tests/servers/replay.py
part unit_tests "${python[@]}" tests/servers/unit_tests.py "$MEMLEDGER_TEST_SERVERS"/{vmalert-tool,promtool}
exit "$status"
