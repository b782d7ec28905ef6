#!/bin/bash
# Boots the systemd of a Debian root, as the first process of namespaces of its own. Its /metrics are reached in its network
# namespace; the kernel with its log, the cgroups and the Docker engine are those of this machine.
#
# usage: boot.sh ROOT NAME      replaces itself by `unshare`, whose child is that systemd; NAME is its cgroup
# needs: root
set -euo pipefail

# Its processes are in a cgroup of their own in every hierarchy, below which systemd makes those of its services.
enter_cgroup() {
  local folder part
  for folder in /sys/fs/cgroup/*/cgroup.procs /sys/fs/cgroup/cgroup.procs; do
    [[ -e $folder ]] || continue
    # on cgroup v2 the folders below the root are cgroups of others, and not hierarchies
    [[ ! -e /sys/fs/cgroup/cgroup.controllers || $folder == /sys/fs/cgroup/cgroup.procs ]] || continue
    folder=${folder%/cgroup.procs}/$1
    mkdir -p "$folder"
    for part in cpus mems; do
      if [[ -e $folder/cpuset.$part && -z $(<"$folder/cpuset.$part") ]]; then
        cat "${folder%/*}/cpuset.$part" >"$folder/cpuset.$part"
      fi
    done
    echo $$ >"$folder/cgroup.procs"
  done
}

# On cgroup v1 the hierarchies lie in a tmpfs. systemd makes that read-only, also for the machine, and mounts the controllers that are
# missing in it: so it gets a tmpfs of its own, and a list of controllers without those.
mount_cgroups() {
  local root=$1 folder name
  [[ $(stat -fc %T /sys/fs/cgroup) == tmpfs ]] || return 0
  mount -t tmpfs -o mode=755 cgroup "$root/sys/fs/cgroup"
  for folder in /sys/fs/cgroup/*; do
    name=${folder##*/}
    if [[ -L $folder ]]; then
      ln -s "$(readlink "$folder")" "$root/sys/fs/cgroup/$name"
    elif mountpoint -q "$folder"; then
      mkdir "$root/sys/fs/cgroup/$name"
      mount --bind "$folder" "$root/sys/fs/cgroup/$name"
    fi
  done
  awk -v OFS='\t' '$2 == 0 { $4 = 0 } { print }' /proc/cgroups >"$root/run/controllers"
  mount --bind "$root/run/controllers" "$root/proc/cgroups"
}

inside() {
  local root=$1
  mount --make-rprivate /
  mount --bind "$root" "$root"
  mount -t proc proc "$root/proc"
  mount -t tmpfs -o mode=755 run "$root/run"
  mount -t tmpfs -o mode=1777 tmp "$root/tmp"
  mount --rbind /sys "$root/sys"
  mount --rbind /dev "$root/dev"
  mount_cgroups "$root"
  # no setting of this machine's kernel is changed
  mount --bind "$root/proc/sys" "$root/proc/sys"
  mount -o remount,bind,ro "$root/proc/sys"
  mount -o remount,bind,ro "$root/sys"
  touch "$root/run/docker.sock"
  mount --bind /var/run/docker.sock "$root/run/docker.sock"
  ip link set lo up
  cd "$root"
  mkdir -p old
  pivot_root . old
  umount -l /old
  rmdir /old
  exec env -i container=memledger-test PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --unit=basic.target --show-status=false --log-target=console
}

if [[ $1 == --inside ]]; then
  inside "$2"
fi
enter_cgroup "$2"
exec unshare --mount --pid --fork --kill-child --uts --ipc --net --propagation private "$0" --inside "$1"
