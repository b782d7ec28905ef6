#!/bin/bash
# What a release needs besides its packages.
#
# usage: release.sh check VERSION    fails, with a line for each, if a file still says that nothing is published, or if the version is not
#                                    the one of Cargo.toml, the chart and the documents
#        release.sh notes VERSION    prints the part of CHANGELOG.md about it
set -euo pipefail
cd "${MEMLEDGER_SOURCE:-$(dirname "${BASH_SOURCE[0]}")/../..}"

# Files that people read, or that are published as a part of something.
places=(README.md CHANGELOG.md docs helm deploy/*.yml deploy/kubernetes)

check() {
  local version=$1 status=0
  if grep -rniE 'nothing is published|not published yet|no published image|is published yet' "${places[@]}"; then status=1; fi
  grep -qx "version = \"$version\"" Cargo.toml || { echo "Cargo.toml: is not version $version"; status=1; }
  grep -qxE "appVersion: \"?${version//./\\.}\"?" helm/memledger/Chart.yaml || { echo "helm/memledger/Chart.yaml: is not version $version"; status=1; }
  [[ -n $(notes "$version") ]] || { echo "CHANGELOG.md: has no part '## $version'"; status=1; }
  if grep -rnoE 'memledger/memledger:[0-9]+\.[0-9]+\.[0-9]+' "${places[@]}" | grep -v ":$version\$"; then status=1; fi
  return "$status"
}

notes() {
  awk -v version="$1" '/^## / { found = $2 == version; next } found' CHANGELOG.md
}

case ${1:-} in
  check | notes) "$1" "${2:?VERSION}" ;;
  *) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0" >&2; exit 2 ;;
esac
