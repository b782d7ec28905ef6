#!/bin/bash
# `make pictures`: draws the dashboards with Grafana's own components and the data of the demo, into docs/pictures.
#
# It starts the demo, waits until everything in it has happened once, and then asks and draws until no panel is empty or
# cannot be drawn; if that is not so after a while, it fails and says which panel it is. *Compare runs* is drawn from the simulated
# history of tests/dashboards/simulated.py, because the runs of the demo last a minute. Needs what the demo needs, and
# node 18 or newer with npm. Takes five to ten minutes.
#
# $PROMETHEUS  draw what this Prometheus has (http://HOST:PORT) instead of the demo and the history
# $SIMULATED   1: draw Compare runs alone, from the history
# $PICTURES    the folder for the pictures, instead of docs/pictures
# $ASK         options for ask.py with $PROMETHEUS: range, pace of scraping, values of variables
# $WHOLE       1: draw collapsed rows open in the picture too
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$here/../..
work=$(mktemp -d)
demo=
history=
# a moment at which there is something to see: all hosts are there, a container is nearly full, alerts fire
when='count(memledger_build_info) > 2 and on () count(memledger_container_memory_limit_utilization_ratio > 0.85)
  and on () count(ALERTS{alertstate="firing", severity!="none"}) > 4'

cleanup() {
  if [[ $demo ]]; then
    kill -TERM -- "-$demo" 2>/dev/null || true # its own group: make, and the demo, which clears away what it started
    wait "$demo" 2>/dev/null || true
  fi
  if [[ $history ]]; then
    kill -TERM "$history" 2>/dev/null || true
    wait "$history" 2>/dev/null || true
  fi
  rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

# of_status FIELD: what the demo says of itself; nothing as long as it says nothing.
of_status() {
  [[ ! -e $work/demo.json ]] || python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$work/demo.json" "$1"
}

start_demo() {
  make -C "$root" demo ARGS="--minutes 20 --status $work/demo.json" >"$work/demo.log" 2>&1 &
  demo=$!
  echo "pictures: waiting for the demo"
  until [[ $(of_status state) == all-on ]]; do
    if ! kill -0 "$demo" 2>/dev/null; then
      tail -n 20 "$work/demo.log" >&2
      echo "pictures: the demo has ended; try \`make demo\` by itself" >&2
      exit 1
    fi
    sleep 1 # poll
  done
}

# draw URL ANSWERS OPTION...: asks a Prometheus, keeps the answers in a file, and draws them.
draw() {
  local url=$1 answers=$2
  shift 2
  "$MEMLEDGER_TEST_PYTHON" -B "$here/ask.py" "$url" --out "$answers" "$@" >"$work/said" &&
    node "$here/draw.mjs" "$answers" "$work/drawn" >>"$work/said"
}

# draw_demo: draws until all is well: the demo takes a GPU away, ends containers, starts them anew.
draw_demo() {
  local deadline=$((SECONDS + 300)) container ask
  # one with workers, a GPU and more than one run; beside another demo its name has a suffix
  container=$(of_status containers | grep -o "piper1-gpl-train-1[-0-9]*")
  # the demo is scraped every second, and plays in rounds of three minutes
  ask=(--range 200 --scrape 1 --set "container.container=$container" --without compare --when "$when")
  until draw "$(of_status prometheus)" "$work/answers.json" "${ask[@]}"; do
    if ((SECONDS > deadline)) || ! kill -0 "$demo" 2>/dev/null; then return 1; fi
    sleep 5 # the next things happen
  done
}

# draw_history: Compare runs with its collapsed row, which has data here.
draw_history() {
  "$MEMLEDGER_TEST_PYTHON" -B "$root/tests/dashboards/backfill.py" serve "$work/history" &
  history=$!
  until [[ -e $work/history ]]; do
    kill -0 "$history" || return 1
    sleep 1 # poll
  done
  WHOLE=1 draw "$(<"$work/history")" "$work/simulated.json" --simulated
}

set -m # the demo in a group of its own
"$root/tests/setup/setup.sh" pictures prometheus python env
set -a && . "$("$root/tests/setup/setup.sh" cache)/env" && set +a
made_from=$here/node_modules/made-from
if ! cmp -s "$here/package-lock.json" "$made_from"; then
  (cd "$here" && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error)
  cp "$here/package-lock.json" "$made_from"
fi
status=0
if [[ ${PROMETHEUS:-} ]]; then
  read -ra ask <<<"${ASK:-}"
  draw "$PROMETHEUS" "$work/answers.json" "${ask[@]}" || status=1
elif [[ ${SIMULATED:-} ]]; then
  draw_history || status=1
else
  start_demo
  if draw_demo; then
    cat "$work/said"
    draw_history || status=1
  else
    status=1
  fi
fi
cat "$work/said"
if ((status)); then
  echo "pictures: the dashboards cannot be drawn as they should be" >&2
  exit 1
fi
folder=${PICTURES:-$root/docs/pictures}
mkdir -p "$folder"
for picture in "$work"/drawn/*.png; do
  pngquant --force --strip --speed 1 --nofs --output "$folder/${picture##*/}" 128 "$picture"
done
du -ch "$folder"/*.png
[[ ! $demo ]] || python3 -B "$here/mutations.py" "$work/answers.json"
