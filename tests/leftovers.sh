#!/bin/bash
# Lists what a run of the tests left on this machine: containers, volumes, images, cgroups, mounts, processes, files.
#
# Others may use this machine too, and start containers or runs of their own meanwhile. So only what carries the id of the run is
# looked for: containers, volumes and images have it in a label or in their name (memledger.test.run=ID, a project of Compose), cgroups in
# their path, processes in their environment (MEMLEDGER_TEST_RUN=ID); mounts and files are those in the run's own folder. The cgroup of a
# container that is gone is its engine's.
#
# usage: leftovers.sh before FOLDER      makes the folder for the run's files, FOLDER/tmp, which is its TMPDIR
#        leftovers.sh after FOLDER ID    prints what was left, one a line; fails if there is anything
#        leftovers.sh remove FOLDER ID   removes what a run that was interrupted left, but for its files
#        $LEFTOVERS_WAIT   seconds for what has just ended to vanish, default 60
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=setup/lib.sh
. "$here/setup/lib.sh"

engine() { if has docker; then docker "$@" 2>/dev/null || true; fi; }

# in_engine ID: what the engine has of the run.
in_engine() {
  {
    engine ps -a --no-trunc --format 'container {{.ID}} {{.Names}} {{.Labels}}'
    engine volume ls --format 'volume {{.Name}} {{.Labels}}'
    engine images --no-trunc --format 'image {{.ID}} {{.Repository}}:{{.Tag}}'
    engine images --no-trunc --filter "label=memledger.test.run=$1" --format "image {{.ID}} {{.Repository}}:{{.Tag}} $1"
  } | grep -F -- "$1" | cut -d' ' -f1-3 | sort -u || true
}

cgroups() { find /sys/fs/cgroup -mindepth 1 -type d -path "*$1*" -printf 'cgroup %p\n' 2>/dev/null || true; }

mounts() { awk -v folder="$1/" 'index($2, folder) == 1 { print "mount " $2 }' /proc/self/mounts; }

# The environment of a process with a locked memory map cannot be read: skip it.
processes() {
  local environment
  {
    as_root timeout 20 grep -lzxF "MEMLEDGER_TEST_RUN=$1" /proc/[0-9]*/environ 2>/dev/null ||
      (($? != 124)) || echo "/proc/?/environ" # of one that hangs
  } | while read -r environment; do
    printf 'process %s %s\n' "${environment//[!0-9?]/}" \
      "$(timeout 5 tr '\0' ' ' <"${environment%/*}/cmdline" 2>/dev/null | cut -c1-200)"
  done
}

# The shared parent of the run's cgroups, which no test may remove while others run.
remove_parent() {
  find /sys/fs/cgroup -maxdepth 2 -type d -name "memledger-tests-$1" -print0 2>/dev/null |
    as_root xargs -0r rmdir --ignore-fail-on-non-empty 2>/dev/null || true
}

found() {
  local file
  remove_parent "$2"
  in_engine "$2"
  cgroups "$2"
  mounts "$1"
  processes "$2"
  # a killed Python and a containerd that dumps its stacks leave these; they go with the folder
  find "$1/tmp" -mindepth 1 -maxdepth 1 ! -name 'pymp-*' ! -name 'containerd.*.stacks.log' | while IFS= read -r file; do
    # its name is random: what is in it tells which test it was
    printf 'file %s %s\n' "$file" "$(find "$file" -mindepth 1 -printf '%P ' 2>/dev/null | cut -c1-500)"
  done
}

# What has just ended needs a moment to vanish; how long depends on the machine, and what does not vanish is found anyway.
after() {
  nothing() { [[ -z $(found "$@") ]]; }
  if ! wait_until "${LEFTOVERS_WAIT:-60}" nothing "$@"; then
    found "$@"
    return 1
  fi
}

remove() {
  local kind what
  processes "$2" | while read -r _ what _; do as_root kill -KILL "$what" 2>/dev/null || true; done
  # the containers first: their cgroups go with them, and volumes and images are in use until then
  in_engine "$2" | while read -r kind what _; do
    case $kind in
      container) engine rm -f -v "$what" >/dev/null ;;
      volume) engine volume rm -f "$what" >/dev/null ;;
      image) engine rmi -f "$what" >/dev/null ;;
    esac
  done
  { cgroups "$2"; mounts "$1"; } | tac | while read -r kind what; do
    case $kind in
      mount) as_root umount -l "$what" || true ;;
      cgroup) wait_until 5 as_root rmdir "$what" || true ;; # its last processes may still be exiting
    esac
  done
}

case ${1:-} in
  before)
    mkdir -p "${2:?}/tmp"
    chmod 1777 "$2/tmp"
    ;;
  after) after "${2:?}" "${3:?}" ;;
  remove) remove "${2:?}" "${3:?}" ;;
  *) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0" >&2; exit 2 ;;
esac
