#!/bin/bash
# Lists what a run of the tests left on this machine: containers, volumes, images, cgroups, mounts, processes, files.
#
# Containers, volumes, images, cgroups (those that tests and runtimes name) and mounts are compared with those before the
# run; a process is the run's if it has MEMLEDGER_TEST_RUN=ID in its environment; files are the entries of the run's own
# TMPDIR. So nothing of the machine's own, and nothing of an earlier run, is taken for a leftover.
#
# usage: leftovers.sh before FOLDER      writes the state before the run into FOLDER
#        leftovers.sh after FOLDER ID    prints what was left, one a line; fails if there is anything
#        leftovers.sh remove FOLDER ID   removes what a run that was interrupted left, but for its files
#        ID is that of $MEMLEDGER_TEST_RUN; files are searched in FOLDER/tmp
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=setup/lib.sh
. "$here/setup/lib.sh"

engine() { if has docker; then docker "$@" 2>/dev/null || true; fi; }

# The cgroups that tests, the demo and their runtimes create; everything else is the machine's own. The engines' parents of
# all containers, and that of all runs, are not listed: whoever runs the first one makes them.
cgroups() {
  find /sys/fs/cgroup -mindepth 1 -type d 2>/dev/null |
    grep -E '/(memledger[^/]*|mlt[^/]*|docker|libpod[^/]*|kubepods[^/]*|k8s\.io|machine\.slice)(/|$)' |
    grep -vE '/(docker|libpod_parent(/conmon)?|memledger)$' || true
}

# Not the mounts that systemd makes for log-ins and services, nor an engine's own: the file systems and networks of its
# running containers, which are found as containers, and the host's network, which it keeps from the first container on that
# asks for it.
mounts() { awk '{ print $2 }' /proc/self/mounts | grep -vE '^/run/(user|credentials|docker)/|^/var/lib/(docker|containers)/' || true; }

list() {
  engine ps -a --no-trunc --format 'container {{.ID}} {{.Names}}'
  engine volume ls --format 'volume {{.Name}}'
  engine images --format 'image {{.Repository}}:{{.Tag}} {{.ID}}'
  cgroups | sed 's/^/cgroup /'
  mounts | sed 's/^/mount /'
}

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

# The shared parent of the tests' cgroups, which no test may remove while others run.
remove_parent() {
  find /sys/fs/cgroup -maxdepth 2 -type d -name memledger-tests -print0 2>/dev/null |
    as_root xargs -0r rmdir --ignore-fail-on-non-empty 2>/dev/null || true
}

found() {
  local file
  remove_parent
  LC_ALL=C comm -13 <(LC_ALL=C sort "$1/before") <(list | LC_ALL=C sort)
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
  if ! wait_until 60 nothing "$@"; then
    found "$@"
    return 1
  fi
}

# Of what is new, only what tests and the demo make: others may use this machine too.
remove() {
  local kind what name demo
  processes "$2" | while read -r _ what _; do as_root kill -KILL "$what" 2>/dev/null || true; done
  demo=$(engine ps -aq --no-trunc --filter label=memledger.demo)
  found "$@" | tac | while read -r kind what name; do
    case $kind in
      container) if [[ $name == mlt-* || $demo == *"$what"* ]]; then engine rm -f -v "$what" >/dev/null; fi ;;
      mount) if [[ $what == "$1"/* ]]; then as_root umount -l "$what" || true; fi ;;
      cgroup) as_root rmdir "$what" 2>/dev/null || true ;; # those of containers went with them
    esac
  done
}

case ${1:-} in
  before)
    mkdir -p "${2:?}/tmp"
    chmod 1777 "$2/tmp"
    list >"$2/before"
    ;;
  after) after "${2:?}" "${3:?}" ;;
  remove) remove "${2:?}" "${3:?}" ;;
  *) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0" >&2; exit 2 ;;
esac
