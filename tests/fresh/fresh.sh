#!/bin/bash
# `make test-fresh`: README's two commands on a machine that has nothing but a minimal Debian 12, in a folder of this one.
#
# The root is made by mmdebstrap from the package sources of this machine. Into it go a clone of HEAD (what is not committed
# does not), the Rust toolchain, and what makes the registries reachable from here: the configuration and the environment
# of apt, cargo, pip and npm of the user who calls this, with the certificates that they name. Caches start empty. The
# packages that README names are installed, then `make run` must serve, `make install` must put the program into
# PATH, and `make test` must pass.
#
# Own: the mount namespace, the root, /tmp, /run, and the Docker engine, which leaves the docker0 of the machine's engine alone
# (setup/engine.sh). Shared: the kernel with its log and its cgroups, /dev, the network and process ids. So nothing else may run
# that kills for memory, and port 10853 must be free.
# Not proven: that rustup can be downloaded. The toolchain is copied, and rustup itself is not in the root.
#
# usage: fresh.sh [--user] [--folder FOLDER] [--skip-run] [--all] [--keep] [ARGUMENT...]
#        --user      as a user with sudo, instead of as root
#        --folder    where the root is made: about 12 GB (default: /var/tmp)
#        --skip-run  without `make run` and `make install`
#        --all       then also `make test-all`, whose tests of the image need a machine without a docker0
#        --keep      leaves the root in its folder, for a look; processes and cgroups are cleared away
#        ARGUMENT    for `cargo nextest run`, such as -E and a filter: those tests instead of those of `make test`
# needs: root (or sudo), mmdebstrap, git
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)
# shellcheck source=../setup/lib.sh
. "$here/../setup/lib.sh"

# What of the environment makes a registry reachable.
readonly REACH='^(https?_proxy|no_proxy|all_proxy|HTTPS?_PROXY|NO_PROXY|ALL_PROXY|SSL_CERT_(FILE|DIR)|CURL_CA_BUNDLE|REQUESTS_CA_BUNDLE|NODE_EXTRA_CA_CERTS|PIP_(CERT|INDEX_URL|EXTRA_INDEX_URL|TRUSTED_HOST|PROXY|DEFAULT_TIMEOUT|FIND_LINKS|CONFIG_FILE|RETRIES)|CARGO_(HTTP|NET|REGISTRY|REGISTRIES|SOURCE)_.*|(NPM_CONFIG|npm_config)_.*)='

# --- in the new mount namespace ------------------------------------------------------------------------------------------

# enter ROOT COMMAND...: makes ROOT the root of this namespace, so that container runtimes can change theirs again, and
# becomes the command.
enter() {
  local root=$1
  shift
  mount --bind "$root" "$root"
  mount -t proc proc "$root/proc"
  mount --rbind /sys "$root/sys"
  mount --rbind /dev "$root/dev"
  mount -t tmpfs -o mode=755 run "$root/run"
  mkdir -p "$root/old"
  cd "$root"
  pivot_root . old
  umount -l /old
  rmdir /old
  exec "$@"
}

# --- outside -------------------------------------------------------------------------------------------------------------

# copy FILE: into the root, to the same place.
copy() {
  [[ -e $1 ]] || return 0
  mkdir -p "$root$(dirname "$1")"
  cp -aLT -- "$1" "$root$1"
}

make_root() {
  debian_sources >"$work/sources"
  mmdebstrap --variant=minbase --quiet "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$root" - <"$work/sources"
}

# What makes registries reachable. Of apt's files, those that no package of Debian's brought.
copy_configuration() {
  local file line value
  rm -f "$root/etc/resolv.conf"
  for file in /etc/resolv.conf /etc/hosts /etc/pip.conf /etc/npmrc /etc/ssl/certs/ca-certificates.crt /etc/apt/apt.conf; do
    copy "$file"
  done
  for file in /usr/local/share/ca-certificates/* /etc/apt/{apt.conf.d,auth.conf.d,trusted.gpg.d,keyrings}/*; do
    dpkg-query -S "$file" >/dev/null 2>&1 || copy "$file"
  done
  for file in .cargo/config .cargo/config.toml .cargo/credentials .cargo/credentials.toml .config/pip/pip.conf .pip/pip.conf \
    .npmrc .netrc; do
    if [[ -e $caller_home/$file ]]; then
      mkdir -p "$root$home/$(dirname "$file")"
      cp -aL "$caller_home/$file" "$root$home/$file"
    fi
  done
  (umask 077 && grep -zE "$REACH" /proc/self/environ >"$root/environment") || true # may hold passwords of proxies
  while IFS= read -r -d '' line; do
    value=${line#*=}
    if [[ $value == /* && -f $value ]]; then copy "$value"; fi
  done <"$root/environment"
}

# As rustup would lay it out; the documentation stays here.
copy_toolchain() {
  local sysroot channel target program
  sysroot=$(rustc --print sysroot)
  channel=$(sed -n 's/^channel = "\(.*\)"/\1/p' "$repository/rust-toolchain.toml")
  [[ $(rustc --version) == "rustc $channel "* ]] || { echo "rustc here is not $channel: $(rustc --version)" >&2; return 1; }
  target=$home/.rustup/toolchains/$channel
  mkdir -p "$root$target" "$root$home/.cargo/bin"
  tar -C "$sysroot" --exclude=./share -c . | tar -C "$root$target" -x --no-same-owner
  for program in "$root$target"/bin/*; do
    ln -s "$target/bin/$(basename "$program")" "$root$home/.cargo/bin/"
  done
}

pids_inside() {
  local link
  for link in /proc/[0-9]*/root; do
    if [[ $(readlink "$link" 2>/dev/null) == "$root" || -n ${namespace:-} && \
      $(readlink "${link%root}ns/mnt" 2>/dev/null) == "$namespace" ]]; then
      link=${link%/root}
      echo "${link#/proc/}"
    fi
  done
}

none_inside() { [[ -z $(pids_inside) ]]; }

# Ends what still runs inside, first asking: engines then end their containers. Then what is left in cgroups.
# shellcheck disable=SC2329 # called by the trap
clean() {
  local status=$? pids line
  trap '' INT TERM HUP
  if pids=$(pids_inside) && [[ -n $pids ]]; then
    # shellcheck disable=SC2086 # a list
    kill -TERM $pids 2>/dev/null || true
    wait_until 30 none_inside || true
    # shellcheck disable=SC2046
    kill -KILL $(pids_inside) 2>/dev/null || true
    wait_until 10 none_inside || true
  fi
  "$here/../leftovers.sh" after "$work/state" "fresh-$$" >"$work/left" || true
  tac "$work/left" | sed -n 's/^cgroup //p' | while read -r line; do
    # only empty ones: a process in it is not of the fresh root, whose processes have ended, and neither is the cgroup
    gone() { rmdir "$line" 2>/dev/null || [[ ! -e $line ]]; }
    wait_until 5 gone || echo "fresh: cannot remove the cgroup $line" >&2
  done
  if [[ -n $keep ]]; then
    rm -f "$root/environment"
    echo "fresh: the root stays in $root, with the copied configuration of clients"
  else
    rm -rf --one-file-system "$work"
  fi
  exit "$status"
}

main() {
  local as_user='' folder=/var/tmp skip_run='' all='' began reach
  keep='' home=/root
  while (($#)); do
    case $1 in
      --user) as_user=1 home=/home/anna; shift ;;
      --folder) folder=$2; shift 2 ;;
      --skip-run) skip_run=1; shift ;;
      --all) all=1; shift ;;
      --keep) keep=1; shift ;;
      -h | --help) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0"; exit ;;
      *) break ;;
    esac
  done
  if ((EUID != 0)); then
    mapfile -d '' -t reach < <(grep -zE "$REACH" /proc/self/environ || true) # sudo drops them
    exec sudo env "${reach[@]}" "PATH=$PATH" "FRESH_HOME=$HOME" "$0" ${as_user:+--user} ${skip_run:+--skip-run} ${all:+--all} ${keep:+--keep} \
      --folder "$folder" "$@"
  fi
  caller_home=${FRESH_HOME:-$HOME}
  has mmdebstrap || apt_or_update install -y --no-install-recommends mmdebstrap
  work=$(mktemp -d "$folder/memledger-fresh.XXXXXX")
  chmod 755 "$work"
  root=$work/root
  "$here/../leftovers.sh" before "$work/state"
  trap clean EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  began=$SECONDS
  make_root
  copy_configuration
  copy_toolchain
  git clone --quiet --no-hardlinks "$repository" "$root$home/memledger"
  echo "fresh: made $root in $((SECONDS - began)) s, $(du -sh "$root" | cut -f1) with the toolchain"
  # In the background, so that a signal ends this at once and not when the tests end.
  env -i "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" LANG=C.UTF-8 TERM=dumb \
    unshare --mount --propagation private "$0" --enter "$root" \
    /bin/bash "$home/memledger/tests/fresh/inside.sh" "$home" "${skip_run:-0}" "${all:-0}" "$@" &
  # without a namespace of its own it must not be looked for by that, or the whole machine would be found
  if wait_until 60 entered; then namespace=$(readlink "/proc/$!/ns/mnt" || true); fi
  wait $!
}

entered() { [[ $(readlink "/proc/$!/ns/mnt") != "$(readlink /proc/self/ns/mnt)" ]]; }

if [[ ${1:-} == --enter ]]; then
  shift
  enter "$@"
fi
main "$@"
