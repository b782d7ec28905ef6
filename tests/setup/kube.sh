#!/bin/bash
# The programs of a Kubernetes node for `make test-kube`, and the device plugin of its tests: no package of Debian 12 has them, so they are
# built from Go modules into `kube/bin` in the cache folder, once. Nothing is installed or started: tests/kube/node.sh starts them.
#
# tests/kube/programs has their versions and the hashes of all modules. A newer release: change k8s.io/kubernetes and its parts in
# go.mod (a release requires them as v0.0.0), then `go mod tidy`.
#
# usage: kube.sh build    builds what is missing in these versions: 5 to 15 min for all of it
#        kube.sh has      succeeds if all of it is there
#        kube.sh list     prints the programs with their versions
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib.sh
. "$here/lib.sh"
cache=$(test_cache)
folder=$cache/kube work=$cache/kube-work modules=$here/../kube/programs
readonly PROGRAMS=(etcd kube-apiserver kube-controller-manager kube-scheduler kubelet device-plugin)

module_version() { awk -v module="$1" '$1 == module && $2 ~ /^v/ { print $2; exit }' "$modules/go.mod"; }
program_version() {
  case $1 in
    etcd) module_version go.etcd.io/etcd/server/v3 ;;
    device-plugin) module_version k8s.io/kubelet ;;
    *) module_version k8s.io/kubernetes ;;
  esac
}

# hash_sources PROGRAM: of what it is built from
hash_sources() {
  local sources=("$modules"/go.{mod,sum})
  if [[ $1 == device-plugin ]]; then sources+=("$modules/device-plugin/main.go"); fi
  cat "${sources[@]}" | sha256sum | cut -d' ' -f1
}

is_current() { [[ -x $folder/bin/$1 && $(cat "$folder/made-from/$1" 2>/dev/null) == "$(hash_sources "$1")" ]]; }

# What a node calls itself: the API server accepts no kubelet of an unknown version.
version_flags() {
  local version package minor
  version=$(module_version k8s.io/kubernetes)
  minor=${version#v1.}
  printf -- '-s -w'
  for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    printf ' -X %s.gitVersion=%s -X %s.gitMajor=1 -X %s.gitMinor=%s' "$package" "$version" "$package" "$package" "${minor%%.*}"
  done
}

build_program() {
  local name=$1 package=k8s.io/kubernetes/cmd/$1
  if is_current "$name"; then return; fi
  case $name in
    etcd) package=go.etcd.io/etcd/server/v3 ;;
    device-plugin) package=./device-plugin ;;
  esac
  go_into "$folder/bin" "$work" -C "$modules" build -trimpath -ldflags "$(version_flags)" -o "$folder/bin/$name" "$package"
  hash_sources "$name" >"$folder/made-from/$name"
}

has_all() {
  local name
  for name in "${PROGRAMS[@]}"; do is_current "$name" || return 1; done
}

build() {
  local name
  if has_all; then return; fi
  rm -rf "$work"
  mkdir -p "$folder/bin" "$folder/made-from" "$work"
  # one set of modules, so most of what the first compiles the others share
  for name in "${PROGRAMS[@]}"; do build_program "$name"; done
  rm -rf "$work"
}

case ${1:-} in
  build) build ;;
  has) has_all ;;
  list) for name in "${PROGRAMS[@]}"; do printf '%s %s\n' "$name" "$(program_version "$name")"; done ;;
  *) sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
