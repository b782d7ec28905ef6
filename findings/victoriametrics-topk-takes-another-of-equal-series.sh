#!/bin/bash
# believed: topk by (x) (1, v) takes one of several series with equal values, and the same one at each evaluation.
# so: VictoriaMetrics takes another one now and then, although nothing was written in between: which of the equal series comes first is
#     not defined. A recording rule that selects the newest info series so, or an alert with a duration that is joined with it, changes its
#     labels from one evaluation to the next, and the alert begins again. Rank by something that cannot be equal, such as timestamp().
# seen with VictoriaMetrics v1.151.0 (go1.26, linux/amd64), 2026-11-29: of 2,000 queries 1,820 had one of them and 180 the other.
#
# usage: findings/victoriametrics-topk-takes-another-of-equal-series.sh; needs Go and curl. Fails if all queries have the same.
set -euo pipefail
readonly VERSION=v1.151.0 QUERIES=2000
folder=$(mktemp -d)
server=
trap '[[ -z $server ]] || { kill "$server"; wait "$server" 2>/dev/null || true; }; rm -rf "$folder"' EXIT
GOBIN=$folder nice go install "github.com/VictoriaMetrics/VictoriaMetrics/app/victoria-metrics@$VERSION"
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
url=http://127.0.0.1:$port
"$folder/victoria-metrics" -storageDataPath="$folder/data" -httpListenAddr="127.0.0.1:$port" -memory.allowedBytes=128MiB >"$folder/log" 2>&1 &
server=$!
until curl -fs "$url/health" >/dev/null || ! kill -0 "$server"; do :; done
now=$(date +%s)
for owner in one other; do
  echo "owner_info{container=\"train\",owner=\"$owner\"} 1 ${now}000"
done | curl -fs --data-binary @- "$url/api/v1/import/prometheus"
curl -fs "$url/internal/force_flush"
for ((query = 0; query < QUERIES; query++)); do
  printf 'url = "%s/api/v1/query?nocache=1&time=%s&query=topk%%20by(container)(1,owner_info)"\n' "$url" "$now"
done >"$folder/queries"
curl -fs --config "$folder/queries" | grep -o '"owner":"[a-z]*"' | sort | uniq -c | tee "$folder/seen"
[[ $(wc -l <"$folder/seen") == 2 ]] || { echo "changed: each query had the same series" >&2; exit 1; }
