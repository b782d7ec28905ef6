#!/bin/bash
# Runs a bash script (stdin) as root in a booted v2 guest: prints its output as it comes, returns its exit status.
#
# Not a terminal: no input, and stdout and stderr come as one. Several may run at once.
#
# usage: run.sh [-t SECONDS] RUNDIR <SCRIPT     -t: deadline, default 300; then the script is killed and the status is 124
#        files in RUNDIR/share are at /host in the guest
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=../setup/lib.sh
. "$here/../setup/lib.sh"

limit=300
if [[ ${1:-} == -t ]]; then
  limit=$2
  shift 2
fi
run=$(realpath "${1:?usage: run.sh [-t SECONDS] RUNDIR <SCRIPT}")
[[ -d $run/share/cmd ]] || { echo "$run is not a booted guest" >&2; exit 2; }

base=$(mktemp -u "$run/share/cmd/XXXXXXXX")
cat >"$base.part"
mv "$base.part" "$base.sh"

finished() { [[ -e $base.rc || -e $run/ended ]]; }

printed=0
# Prints what came since the last call.
pump() {
  local size
  size=$(stat -c %s "$base.out" 2>/dev/null || echo 0)
  if ((size > printed)); then
    tail -c +$((printed + 1)) "$base.out" | head -c $((size - printed))
    printed=$size
  fi
}

deadline=$((SECONDS + limit))
until finished; do
  if ((SECONDS >= deadline)); then
    touch "$base.stop"
    wait_until 10 finished || true
    pump
    echo "run.sh: killed after $limit s" >&2
    exit 124
  fi
  pump
  sleep 0.1
done
pump
[[ -e $base.rc ]] || { echo "run.sh: the guest ended" >&2; exit 125; }
exit "$(cat "$base.rc")"
