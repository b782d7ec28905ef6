#!/bin/bash
# `make dist`: builds the shipped program. The same source, compiler and C compiler give the same bytes, independently of the paths of
# the source and the build directory (docs/supply-chain.md); deploy/Dockerfile runs this too.
#
# usage: dist.sh      prints the path of the program, and writes its SHA-256 beside it
#        $MEMLEDGER_REVISION  its commit, where git is not available
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source=$PWD
target=${CARGO_TARGET_DIR:-$source/target}
[[ $target == /* ]] || target=$source/$target
cargo_home=${CARGO_HOME:-${HOME:-/root}/.cargo}
if [[ -n ${RUSTFLAGS:-}${CARGO_ENCODED_RUSTFLAGS:-} ]]; then
  echo "dist: RUSTFLAGS is set and changes the program; unset it" >&2
  exit 1
fi

# Keeps paths of this machine out of the program, from rustc and from the C compiler (SQLite, ring). The longest come last, because
# the last match wins.
flags=() c_flags=()
for place in "$cargo_home=/cargo" "$source=/memledger" "$target=/target"; do
  flags+=("--remap-path-prefix=$place")
  c_flags+=("-ffile-prefix-map=$place")
done
printf -v CARGO_ENCODED_RUSTFLAGS '%s\x1f' "${flags[@]}"
export CARGO_ENCODED_RUSTFLAGS=${CARGO_ENCODED_RUSTFLAGS%$'\x1f'}
export CFLAGS="${c_flags[*]}" CARGO_INCREMENTAL=0 LC_ALL=C TZ=UTC
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-0} # no timestamps are embedded today; a tool that starts to do so uses this one
if [[ -z ${MEMLEDGER_REVISION:-} && -n $(git status --porcelain 2>/dev/null) ]]; then
  echo "dist: warning: uncommitted changes: the program will report a commit that does not match its source" >&2
fi

cargo build --locked --profile dist --package memledger --bin memledger --target-dir "$target" >&2
program=$target/dist/memledger
(cd "$(dirname "$program")" && sha256sum memledger >memledger.sha256)
echo "$program"
