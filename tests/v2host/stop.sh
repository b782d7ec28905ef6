#!/bin/bash
# Ends the v2 guest of RUNDIR, nothing else, and removes RUNDIR.
#
# usage: stop.sh RUNDIR        fine when the guest has ended already, or RUNDIR is gone
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=../setup/lib.sh
. "$here/../setup/lib.sh"

run=$(realpath -m "${1:?usage: stop.sh RUNDIR}")
[[ -e $run ]] || exit 0
[[ -d $run/share/cmd && -e $run/pid ]] || { echo "$run is not the folder of a guest" >&2; exit 2; }
pid=$(cat "$run/pid")
# The pid may be a stranger's by now: only the keeper of this very folder is signalled.
# shellcheck disable=SC2002 # cat, whose error message can be silenced when the process is gone
if cat "/proc/$pid/cmdline" 2>/dev/null | tr '\0' ' ' | grep -qF -- "--keep $run "; then
  kill -TERM "$pid" 2>/dev/null || true
  keeper_gone() { ! kill -0 "$pid" 2>/dev/null; }
  wait_until 20 keeper_gone || { echo "the guest's keeper (pid $pid) does not end" >&2; exit 1; }
fi
rm -rf "$run"
