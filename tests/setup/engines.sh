#!/bin/bash
# The newest container engines, for `make test-engines`: no package of Debian 12 has them, so they are built from Go modules into
# `engines` in the cache folder, once. Nothing is installed and no engine is started: tests start these for themselves.
#
# usage: engines.sh build    builds what is missing in these versions: 10 min for all of it
#        engines.sh has      succeeds if all of it is there
#        engines.sh list     prints the programs with their versions
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib.sh
. "$here/lib.sh"
cache=$(test_cache)
folder=$cache/engines work=$cache/engines-work

# programs ACTION: calls it with each program: its name, whether it needs cgo, module, version, package in it, options of `go build`.
#
# The versions are pinned, because the tests are about what these releases do. Not the newest are Compose (5.7.1 requires a module that
# a public proxy rejects) and Podman (6 is another module, which was not to be had either).
programs() {
  # the line of Docker Engine 29; without this option it calls itself "library-import"
  local moby=github.com/moby/moby/v2 version=v2.0.0-beta.24
  "$1" dockerd 0 "$moby" "$version" ./cmd/dockerd -ldflags "-s -w -X $moby/dockerversion.Version=$version"
  # ctr is for whoever looks into what a failed test left
  local containerd=github.com/containerd/containerd/v2 program
  for program in containerd containerd-shim-runc-v2 ctr; do
    "$1" "$program" 0 "$containerd" v2.4.2 "./cmd/$program" -ldflags '-s -w'
  done
  # Debian's 1.1 rejects the time namespace that this dockerd requests. It enters namespaces in C, before Go runs. Without seccomp, which
  # needs a library: so the configuration of both engines must say "unconfined".
  "$1" runc 1 github.com/opencontainers/runc v1.5.3 . -ldflags '-s -w'
  local compose=github.com/docker/compose/v5
  "$1" docker-compose 0 "$compose" v5.5.0 ./cmd -ldflags "-s -w -X $compose/internal.Version=v5.5.0"
  # SQLite is in C. The tags leave out what needs the libraries of btrfs and of GnuPG.
  "$1" podman 1 github.com/containers/podman/v5 v5.8.4 ./cmd/podman -ldflags '-s -w' \
    -tags exclude_graphdriver_btrfs,containers_image_openpgp
}

# What Podman calls: netavark also for containers without a network, catatonit in pods. Unpacked here: if it were installed, netavark
# would change the networks of Debian's Podman. conmon is that one's (setup.sh podman).
readonly HELPERS=(netavark catatonit)

is_current() { [[ -x $folder/$1 && $(cat "$folder/made-from/$1" 2>/dev/null) == "$*" ]]; }
must_be_current() { is_current "$@" || exit 1; }
list_program() { printf '%s %s\n' "$1" "$4"; }

# build_program NAME CGO MODULE VERSION PACKAGE OPTION...: builds in the folder of the module itself, by the go.mod and go.sum that its authors
# release. `go install MODULE@VERSION` cannot: it rejects a go.mod with exclude lines, as Compose's (which keep out two versions
# that Kubernetes' modules name), and it requests the list of Podman's versions, because that module is deprecated; a proxy may lack it.
build_program() {
  local name=$1 cgo=$2 module=$3 version=$4 package=$5 source
  if is_current "$@"; then return; fi
  source=$(go_into "$folder" "$work" mod download -json "$module@$version" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
  CGO=$cgo go_into "$folder" "$work" -C "$source" build -trimpath -o "$folder/$name" "${@:6}" "$package"
  mkdir -p "$folder/made-from"
  echo "$*" >"$folder/made-from/$name"
}

fetch_helper() {
  local name=$1 package=$cache/engines-work/$1
  if [[ -x $folder/helpers/$name ]]; then return; fi
  fetch_package "$name" "$package"
  mkdir -p "$folder/helpers"
  find "$package/usr" -type f -name "$name" -perm -u+x -exec mv -t "$folder/helpers" {} +
}

has_all() (
  local helper
  programs must_be_current
  for helper in "${HELPERS[@]}"; do [[ -x $folder/helpers/$helper ]] || exit 1; done
)

build() {
  local helper
  if has_all; then return; fi
  rm -rf "$work"
  mkdir -p "$folder" "$work"
  programs build_program
  for helper in "${HELPERS[@]}"; do fetch_helper "$helper"; done
  rm -rf "$work"
}

case ${1:-} in
  build) build ;;
  has) has_all ;;
  list) programs list_program ;;
  *) sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
