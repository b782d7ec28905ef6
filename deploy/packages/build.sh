#!/bin/bash
# `make dist`, after the program is built: the tarball and the deb around it, and the checksums of everything in the folder.
#
# usage: build.sh FOLDER [VERSION]    FOLDER holds the program memledger, and gets the packages
#        VERSION  of the packages; default: the program's. Tests give another one, to upgrade to
# needs: debhelper, dpkg-dev
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=$(realpath "$1")
version=${2:-$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)}
machine=$(uname -m)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export LC_ALL=C TZ=UTC
# the same bytes from the same commit
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
umask 022

"$out/memledger" package-files "$work/generated"

# To be unpacked in /usr/local: systemd finds the unit there, and shells and man their files. It has no entries of directories: they
# would give those of the host, such as /usr/local/bin, another mode and owner.
tarball() {
  local name=memledger-$version-$machine-linux root
  root=$work/$name
  install -D -m 755 "$out/memledger" "$root/bin/memledger"
  install -D -m 644 deploy/systemd/memledger.service "$root/lib/systemd/system/memledger.service"
  install -D -m 644 -t "$root/share/man/man1" "$work"/generated/man/*.1
  install -D -m 644 "$work/generated/completions/memledger.bash" "$root/share/bash-completion/completions/memledger"
  install -D -m 644 -t "$root/share/zsh/site-functions" "$work/generated/completions/_memledger"
  install -D -m 644 -t "$root/share/fish/vendor_completions.d" "$work/generated/completions/memledger.fish"
  install -D -m 644 -t "$root/share/doc/memledger" README.md CHANGELOG.md LICENSE deploy/packages/memledger.yml
  (cd "$work" && find "$name" -type f -print0 | sort -z |
    tar --null --files-from=- --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner -c) |
    gzip -9n >"$out/$name.tar.gz"
}

deb() {
  local root=$work/deb
  mkdir -p "$root"
  cp -r deploy/packages/debian "$root/"
  cp -r "$work/generated" "$out/memledger" deploy/packages/group.conf README.md CHANGELOG.md "$root/"
  # the package makes the group, and lets its members use the control socket
  { cat deploy/packages/memledger.yml; printf '\nlocal.group: memledger\n'; } >"$root/memledger.yml"
  sed 's,^ExecStart=/usr/local/bin/,ExecStart=/usr/bin/,' deploy/systemd/memledger.service >"$root/debian/memledger.service"
  # dh_bash-completion is a package of its own
  install -D -m 644 "$work/generated/completions/memledger.bash" "$root/bash/memledger"
  echo 'bash/memledger usr/share/bash-completion/completions' >>"$root/debian/memledger.install"
  printf 'memledger (%s) unstable; urgency=medium\n\n  * See CHANGELOG.md.\n\n -- %s  %s\n' "$version" \
    "$(sed -n 's/^Maintainer: //p' "$root/debian/control")" "$(date -R -d "@$SOURCE_DATE_EPOCH")" >"$root/debian/changelog"
  (cd "$root" && debian/rules binary) >"$work/deb.log" 2>&1 || { cat "$work/deb.log" >&2; return 1; }
  cp "$work"/*.deb "$out/"
}

tarball
deb
(cd "$out" && find . -maxdepth 1 -type f ! -name SHA256SUMS -printf '%f\n' | sort | xargs sha256sum >SHA256SUMS)
cat "$out/SHA256SUMS"
