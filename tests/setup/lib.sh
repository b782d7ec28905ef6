# shellcheck shell=bash
# Shared by the scripts that prepare the machine for the tests. Sourced, never run.
#
# Everything that can live outside the system does so in one cache folder; only tools that need root to work at all
# (a container engine, the builder of the guest image) are installed as packages.

# The folder that holds everything the tests need and that may be deleted at any time (after `engine.sh stop`).
test_cache() {
  local cache=${MEMLEDGER_TEST_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/memledger-tests}
  [[ $cache == /* ]] || cache=$PWD/$cache
  # The user-mode kernel takes paths on its command line, where these characters separate things.
  if [[ $cache == *[[:space:],:]* ]]; then
    echo "the cache folder '$cache' must not contain spaces, commas or colons: set MEMLEDGER_TEST_CACHE" >&2
    return 1
  fi
  printf '%s\n' "$cache"
}

as_root() {
  if ((EUID == 0)); then "$@"; else sudo -- "$@"; fi
}

# The same with the whole environment of the caller, of which sudo keeps little.
as_root_with_environment() {
  local environment
  if ((EUID == 0)); then "$@"; return; fi
  mapfile -d '' environment < <(env -0)
  sudo -- env -- "${environment[@]}" "$@"
}

has() { command -v "$1" >/dev/null 2>&1; }

# Fails with what to do where there is no cargo.
need_cargo() {
  if has "${CARGO:-cargo}"; then return; fi
  echo "cargo is not on the PATH. Install Rust with rustup (README.md, \"Get it\"), then: . ~/.cargo/env" >&2
  if [[ -n ${SUDO_USER:-} ]]; then
    echo "sudo does not keep $SUDO_USER's PATH: run make without sudo, it calls sudo itself where it needs root" >&2
  fi
  return 1
}

# Tells whether a Debian package is installed and configured.
package_installed() {
  [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]
}

# apt-get, waiting for another apt to finish instead of failing on its lock.
apt() { as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 "$@"; }

# Runs an apt command; refreshes the package lists and tries once more if it fails, because lists go stale or are absent
# on a fresh machine.
apt_or_update() {
  apt "$@" && return
  echo "-- refreshing the package lists, then once more"
  apt update && apt "$@"
}

# This machine's Debian sources of its own release, a `deb` line each, as mmdebstrap wants them.
debian_sources() {
  local lines
  lines=$(list_debian_sources)
  # no lists, no targets
  [[ -n $lines ]] || { apt update >&2; lines=$(list_debian_sources); }
  printf '%s\n' "$lines"
}

list_debian_sources() {
  local release
  release=$(. /etc/os-release && echo "$VERSION_CODENAME")
  # shellcheck disable=SC2016 # apt fills these in
  apt-get indextargets --format '$(ORIGIN)|$(RELEASE)|$(COMPONENT)|$(REPO_URI)' 'Created-By: Packages' |
    awk -F'|' -v r="$release" '$1 == "Debian" && index($2, r) == 1 { print "deb " $4 " " $2 " " $3 }' | sort -u
}

# fetch_package NAME FOLDER: unpacks a Debian package into FOLDER without installing it (no service, no conffile, no conflict).
fetch_package() {
  local name=$1 folder=$2 work
  work=$(mktemp -d)
  # apt drops privileges while it downloads: its user must be able to write here.
  chmod 755 "$work"
  # In a subshell: `apt-get download` writes to the current folder, and as root, for the lists.
  (cd "$work" && apt_or_update -o APT::Sandbox::User=root download "$name") || { rm -rf "$work"; return 1; }
  rm -rf "$folder"
  mkdir -p "$folder"
  dpkg -x "$work"/*.deb "$folder"
  rm -rf "$work"
}

# static_busybox CACHE: the path of a static busybox: the installed one, or a package that is unpacked there (installing it may push out
# another busybox).
static_busybox() {
  local candidate
  for candidate in /usr/bin/busybox /bin/busybox "$1/busybox/bin/busybox"; do
    if [[ -x $candidate ]] && ! ldd "$candidate" >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  fetch_package busybox-static "$1/busybox" >&2 || return 1
  echo "$1/busybox/bin/busybox"
}

# wait_until SECONDS COMMAND...: polls until the command succeeds; fails at the deadline.
wait_until() {
  local deadline=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    ((SECONDS < deadline)) || return 1
    sleep 0.1
  done
}

# go_into FOLDER WORK ARGUMENT...: runs a command of go that leaves nothing but its programs, in FOLDER. $CGO: 1 for one with C in it.
go_into() {
  local folder=$1 work=$2
  shift 2
  GOPATH=$work GOMODCACHE=$work/mod GOCACHE=$work/cache GOBIN=$folder CGO_ENABLED=${CGO:-0} GOFLAGS='-modcacherw -buildvcs=false' \
    nice go "$@"
}
