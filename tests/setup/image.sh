#!/bin/bash
# The image that every container of the tests runs: busybox, and room for the tools of the host.
#
# Nothing can be pulled where the tests run, so the image is made from a static busybox and imported. Its root is merged
# like Debian's (/bin, /lib and /lib64 point into /usr), so that `docker run -v /usr:/usr:ro IMAGE python3 ...` runs the
# host's programs with the host's libraries. Without that mount /usr/bin holds busybox applets; /busybox always does.
# Not a model for an image of memledger itself, nor small for its own sake.
#
# usage: image.sh name            prints NAME:TAG
#        image.sh tar BUSYBOX     writes the tar of the root to stdout; BUSYBOX is a static busybox
#        image.sh import BUSYBOX  imports it into the Docker engine, unless this very image is there
set -euo pipefail

readonly IMAGE=memledger-test:1

root_tar() (
  root=$(mktemp -d)
  trap 'rm -rf "$root"' EXIT
  cd "$root"
  mkdir -p busybox dev etc proc root run sys tmp usr/bin usr/lib usr/lib64 usr/local/bin var/tmp
  ln -s usr/bin bin
  ln -s usr/lib lib
  ln -s usr/lib64 lib64
  # A folder, not a link into /usr: `docker run --init` makes /sbin/docker-init, which a read-only /usr would refuse.
  mkdir sbin
  chmod 1777 tmp var/tmp
  cp "$1" busybox/busybox
  chmod 755 busybox/busybox
  for applet in $(./busybox/busybox --list); do
    [[ $applet == busybox ]] || ln -s busybox "busybox/$applet"
    ln -s /busybox/busybox "usr/bin/$applet"
  done
  printf '%s\n' 'root:x:0:0:root:/root:/bin/sh' 'worker:x:1000:1000:worker:/tmp:/bin/sh' \
    'nobody:x:65534:65534:nobody:/:/bin/sh' >etc/passwd
  printf '%s\n' 'root:x:0:' 'worker:x:1000:' 'nogroup:x:65534:' >etc/group
  tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -c .
)

# Names what the image is made of: another busybox or another recipe gives another one.
recipe() { cat "$0" "$1" | sha256sum | cut -c1-16; }

import() {
  local want have
  want=$(recipe "$1")
  have=$(docker image inspect -f '{{index .Config.Labels "memledger.recipe"}}' "$IMAGE" 2>/dev/null || true)
  if [[ $have == "$want" ]]; then
    echo "$IMAGE is there"
    return
  fi
  root_tar "$1" | docker import \
    --change 'ENV PATH=/usr/bin:/usr/local/bin:/usr/sbin:/busybox' \
    --change 'CMD ["sh"]' \
    --change "LABEL memledger.recipe=$want" \
    - "$IMAGE" >/dev/null
  echo "$IMAGE imported"
}

case ${1:-} in
  name) echo "$IMAGE" ;;
  tar) root_tar "${2:?image.sh tar BUSYBOX}" ;;
  import) import "${2:?image.sh import BUSYBOX}" ;;
  *) sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
