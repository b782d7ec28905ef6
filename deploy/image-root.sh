#!/bin/sh
# Creates the root directory of the image: memledger and the shared libraries that it and the driver's NVML need. No shell, no package
# manager.
#
# The binary is linked to glibc because NVML is a shared library for glibc, which the NVIDIA runtime mounts into the
# container. libm, libdl, libpthread and librt are for NVML.
#
# The certificate authorities are those of the machine that builds the image (Debian's package ca-certificates), for OTLP over https.
# Mount a newer or an own bundle over /etc/ssl/certs/ca-certificates.crt, or set --otlp.certificate.
#
# usage: image-root.sh BINARY FOLDER
set -eu
binary=$1 root=$2

mkdir -p "$root/var/lib/memledger" "$root/etc" "$root/tmp" "$root/run"
chmod 1777 "$root/tmp"
cp "$binary" "$root/memledger"
chmod 755 "$root/memledger"
printf 'root:x:0:0:root:/:/memledger\n' >"$root/etc/passwd"

mkdir -p "$root/etc/ssl/certs"
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"

# copies a library, as a file, to the path at which the loader expects it
library() {
  mkdir -p "$root$(dirname "$1")"
  cp -L "$1" "$root$1"
}
ldd "$binary" | awk '$2 == "=>" { print $3 } $1 ~ /^\// { print $1 }' | while read -r path; do
  library "$path"
  libc=${path##*/}
  if [ "$libc" = libc.so.6 ]; then
    for also in libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1; do
      if [ -e "${path%/*}/$also" ]; then library "${path%/*}/$also"; fi
    done
  fi
done
