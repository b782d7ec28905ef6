#!/bin/bash
# Builds the root file system of the v2 guest: Debian with systemd and Docker on cgroup v2, to run as a user-mode-linux
# process, so that v2 behaviour is tested where the host itself has cgroup v1 and no virtualisation.
#
# The packages come from where this machine's own come, and of the same release, so that programs linked here run there.
# The finished image is never written again: boot.sh gives each guest a copy-on-write file of its own.
# Not a faithful machine: one CPU, no PSI, no cpuset, no network, and starting a process takes 0.1-0.2 s.
#
# usage: build.sh DIR [BUSYBOX]   makes DIR/root.ext4 unless it is there and its recipe is unchanged (about a minute);
#                                 BUSYBOX: a static busybox for the containers' image
# needs: root (or sudo); mmdebstrap e2fsprogs kmod user-mode-linux
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=../setup/lib.sh
. "$here/../setup/lib.sh"

# libpam-systemd and dbus-user-session: users have a systemd of their own.
readonly PACKAGES=(systemd systemd-sysv dbus libpam-systemd dbus-user-session docker.io containerd runc tini python3-minimal libpython3-stdlib
  procps kmod iproute2 util-linux)
# Units that have nothing to do here, or wait for what never comes.
readonly MASKED=(systemd-timesyncd.service systemd-networkd-wait-online.service systemd-update-utmp.service
  e2scrub_reap.service apt-daily.timer apt-daily-upgrade.timer systemd-tmpfiles-clean.timer fstrim.timer
  e2scrub_all.timer dpkg-db-backup.timer getty@tty1.service console-getty.service)

# The modules must fit the kernel, which is the installed one: a new kernel makes a new image.
recipe() {
  (cat "$here/build.sh" "$here/agent.py" "$here/../setup/image.sh" "$busybox"; linux.uml --version) | sha256sum
}

configure() {
  local root=$1 kernel unit
  kernel=$(basename /usr/lib/uml/modules/*)
  mkdir -p "$root/usr/lib/modules"
  cp -a "/usr/lib/uml/modules/$kernel" "$root/usr/lib/modules/"
  depmod -b "$root" "$kernel"
  echo v2host >"$root/etc/hostname"
  echo '127.0.0.1 localhost v2host' >"$root/etc/hosts"
  # boot.sh confines hostfs to the shared folder of that boot.
  printf '%s\n' '/dev/ubda / ext4 rw,relatime 0 1' 'none /host hostfs defaults 0 0' >"$root/etc/fstab"
  mkdir -p "$root/host" "$root/etc/docker" "$root/etc/systemd/system/multi-user.target.wants"
  # live-restore lets a test stop dockerd under running containers.
  cat >"$root/etc/docker/daemon.json" <<END
{ "iptables": false, "ip6tables": false, "ip-forward": false, "ip-masq": false, "bridge": "none",
  "storage-driver": "overlay2", "live-restore": true }
END
  install -m 755 "$here/agent.py" "$root/usr/local/sbin/v2host-agent"
  # KillMode and OOMScoreAdjust: the agent outlives what its commands do to the machine.
  cat >"$root/etc/systemd/system/v2host-agent.service" <<END
[Unit]
After=docker.service host.mount
Wants=docker.service
Requires=host.mount
[Service]
ExecStart=/usr/local/sbin/v2host-agent
KillMode=process
OOMScoreAdjust=-1000
Restart=always
[Install]
WantedBy=multi-user.target
END
  ln -s ../v2host-agent.service "$root/etc/systemd/system/multi-user.target.wants/"
  for unit in "${MASKED[@]}"; do ln -sf /dev/null "$root/etc/systemd/system/$unit"; done
  rm -rf "$root"/etc/apt/sources.list* "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/*.bin
}

# mmdebstrap calls this script again with --configure, inside its own mounts.
make_root() {
  local tar=$1
  debian_sources >"$tar.sources"
  # shellcheck disable=SC2016 # $1 is expanded by the hook's own shell
  nice mmdebstrap --variant=minbase --format=tar --include="$(IFS=,; echo "${PACKAGES[*]}")" \
    --aptopt='Acquire::Languages "none"' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/info/*' \
    --customize-hook="'$here/build.sh' --configure \"\$1\"" \
    "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$tar" - <"$tar.sources"
}

# First boot, on the image itself: imports the containers' image and lets every first-boot job finish, so that no boot
# of a test pays for them. It also proves that the image boots.
first_boot() {
  local run=$1/first
  "$here/boot.sh" --writable "$1/root.ext4" --lifetime 300 "$run"
  "$here/../setup/image.sh" tar "$busybox" >"$run/share/image.tar"
  # a guest that powers off may end before it has told how its last command ended: the file tells
  "$here/run.sh" -t 120 "$run" <<END || [[ -e $run/share/prepared ]]
set -eu
docker import --change 'ENV PATH=/usr/bin:/usr/local/bin:/usr/sbin:/busybox' --change 'CMD ["sh"]' /host/image.tar $("$here/../setup/image.sh" name)
docker run --rm --network none $("$here/../setup/image.sh" name) true
python3 -c 'import multiprocessing'
sync
touch /host/prepared
systemctl --no-block poweroff
END
  wait_until 60 test -e "$run/ended" || { echo "the guest did not power off" >&2; "$here/stop.sh" "$run"; return 1; }
  "$here/stop.sh" "$run"
}

build() {
  local began=$SECONDS new=$dir/new
  rm -rf "$new"
  mkdir -p "$new"
  make_root "$new/root.tar"
  mkdir "$new/root"
  tar -C "$new/root" --numeric-owner --xattrs -xf "$new/root.tar"
  rm "$new/root.tar"
  mkfs.ext4 -q -L root -E lazy_itable_init=0 -d "$new/root" "$new/root.ext4" 4G
  rm -rf "$new/root"
  first_boot "$new"
  mv -f "$new/root.ext4" "$dir/root.ext4"
  rm -rf "$new"
  echo "$want" >"$dir/recipe"
  echo "built in $((SECONDS - began)) s, $(du -h "$dir/root.ext4" | cut -f1)" >&3
}

if [[ ${1:-} == --configure ]]; then
  configure "$2"
  exit
fi

dir=$(realpath -m "${1:?usage: build.sh DIR [BUSYBOX]}")
busybox=${2:-/bin/busybox}
readonly dir busybox
# Output to stderr, the one line of result to stdout.
exec 3>&1 1>&2
want=$(recipe)
if [[ -e $dir/root.ext4 && $(cat "$dir/recipe" 2>/dev/null) == "$want" ]]; then
  echo "image is there" >&3
  exit
fi
if ((EUID != 0)); then exec sudo -- "$here/build.sh" "$dir" "$busybox" >&3; fi
mkdir -p "$dir"
build
