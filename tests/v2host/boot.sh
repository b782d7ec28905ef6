#!/bin/bash
# Boots a v2 guest and returns when it takes commands (run.sh); stop.sh ends it.
#
# The guest is a process tree on this host. Its disk is DIR's image with changes in a copy-on-write file of RUNDIR, so any
# number of guests run side by side and none marks the image. RUNDIR/share is /host in the guest, and all that the guest
# sees of this host. A keeper process ends the guest after its lifetime, or when the caller (--parent) is gone, so that no
# guest is left behind by a test that was killed.
#
# usage: boot.sh [--image FILE] [--mem 2G] [--lifetime SECONDS] [--parent PID] [--writable FILE] RUNDIR
#        --image     default: $MEMLEDGER_TEST_V2HOST/root.ext4, else the one that setup.sh made
#        --lifetime  default 1800
#        --writable  boots FILE itself, without a copy-on-write file (build.sh makes the image with it)
#        RUNDIR      must not exist; stop.sh removes it
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=../setup/lib.sh
. "$here/../setup/lib.sh"

readonly BOOT_DEADLINE=300

# The keeper: the parent of the guest, so that the guest's pid stays its own until the keeper has seen it end.
keep() {
  local run=$1 lifetime=$2 parent=$3
  shift 3
  local ends=$((SECONDS + lifetime)) guest
  "$@" >"$run/console.log" 2>&1 </dev/null &
  guest=$!
  trap 'end_guest "$guest"; touch "$run/ended"; exit 0' TERM INT HUP
  while kill -0 "$guest" 2>/dev/null; do
    ((SECONDS < ends)) || break
    ((parent == 0)) || kill -0 "$parent" 2>/dev/null || break
    # A wait, not a plain sleep: bash runs the trap only between commands, and at once inside `wait`.
    sleep 0.5 & wait $! || true
  done
  # Also after a guest that ended by itself: helpers may be left.
  end_guest "$guest"
  touch "$run/ended"
}

# The kernel process makes a session and group of its own, which its helper processes (one per address space) share; they
# do not all end with it. The disk is thrown away, so there is nothing to shut down.
end_guest() {
  kill -KILL -- "-$1" "$1" 2>/dev/null || true
  wait "$1" 2>/dev/null || true
}

ready_or_ended() { [[ -e $run/share/ready || -e $run/ended ]]; }

main() {
  local image='' mem=2G lifetime=1800 parent=0 writable='' disk
  while (($# > 1)); do
    case $1 in
      --image) image=$2 ;;
      --mem) mem=$2 ;;
      --lifetime) lifetime=$2 ;;
      --parent) parent=$2 ;;
      --writable) writable=$2 ;;
      *) echo "unknown option: $1" >&2; exit 2 ;;
    esac
    shift 2
  done
  run=$(realpath -m "${1:?usage: boot.sh [options] RUNDIR}")
  image=${image:-${MEMLEDGER_TEST_V2HOST:-$(test_cache)/v2host}/root.ext4}
  [[ -e ${writable:-$image} ]] || { echo "no image ${writable:-$image}: run tests/setup/setup.sh v2guest" >&2; exit 1; }
  [[ $run$image$writable != *[[:space:],:]* ]] || { echo "no spaces, commas or colons in paths: $run" >&2; exit 2; }
  # mkdir without -p fails if it is there: two guests must not share a folder.
  mkdir -p "$(dirname "$run")"
  mkdir "$run"
  mkdir -p "$run/share/cmd"
  disk=$run/cow,$image
  [[ -z $writable ]] || disk=$writable
  # the linker that Rust needs is a C compiler's
  cc -O2 -shared -fPIC -o "$run/xstate.so" "$here/xstate.c"
  # panic=1 and no reboot: a guest that panics ends.
  # A larger log than its 16 KiB: a kill's report has a line for each process.
  # systemd's own cgroup choice is v2 unless told otherwise; said here so that it fails loudly if that changes.
  setsid "${BASH_SOURCE[0]}" --keep "$run" "$lifetime" "$parent" \
    env LD_PRELOAD="$run/xstate.so" linux.uml mem="$mem" ubd0="$disk" root=/dev/ubda rw hostfs="$run/share" uml_dir="$run/uml/" umid=guest \
    con=null con0=null,fd:1 con1=null ssl=null panic=1 noreboot systemd.unified_cgroup_hierarchy=1 \
    log_buf_len=1M systemd.show_status=0 quiet >"$run/keeper.log" 2>&1 </dev/null 3>&- 9>&- &
  echo $! >"$run/pid"
  disown
  if ! wait_until "$BOOT_DEADLINE" ready_or_ended || [[ -e $run/ended ]]; then
    echo "the guest did not come up within $BOOT_DEADLINE s; the end of its console:" >&2
    tail -n 20 "$run/console.log" "$run/keeper.log" >&2
    "$here/stop.sh" "$run"
    exit 1
  fi
}

if [[ ${1:-} == --keep ]]; then
  shift
  keep "$@"
else
  main "$@"
fi
