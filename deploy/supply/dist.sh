#!/bin/bash
# Builds the shipped program. The same source and the same compilers give the same bytes, independently of the paths of the source and
# the build directory (docs/supply-chain.md).
#
# usage: dist.sh FOLDER    by maturin, with zig as C compiler and linker, for glibc 2.31 and later: writes the program and the wheel, with
#                          the Python client, into FOLDER
#        dist.sh           with this machine's C compiler and linker, for its glibc and later, as deploy/Dockerfile does: prints the
#                          path of the program
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
tools=$(tests/setup/setup.sh cache)/dist # maturin and zig, whose headers the C code includes
flags=(-Csymbol-mangling-version=v0) c_flags=() # as in .cargo/config.toml, which these flags replace
for place in "$tools=/tools" "$cargo_home=/cargo" "$source=/memledger" "$target=/target"; do
  flags+=("--remap-path-prefix=$place")
  c_flags+=("-ffile-prefix-map=$place")
done
printf -v CARGO_ENCODED_RUSTFLAGS '%s\x1f' "${flags[@]}"
export CARGO_ENCODED_RUSTFLAGS=${CARGO_ENCODED_RUSTFLAGS%$'\x1f'}
export CFLAGS="${c_flags[*]}" CARGO_INCREMENTAL=0 LC_ALL=C TZ=UTC
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)} # the time of files in the wheel
if [[ -z ${MEMLEDGER_REVISION:-} && -n $(git status --porcelain 2>/dev/null) ]]; then
  echo "dist: warning: uncommitted changes: the program will report a commit that does not match its source" >&2
fi

if (($# == 0)); then
  cargo build --locked --profile dist --package memledger --bin memledger --target-dir "$target" >&2
  echo "$target/dist/memledger"
  exit
fi
out=$1
triple=$(rustc -vV | sed -n 's/^host: //p')
mkdir -p "$out"
rm -f "$out"/*.whl "$out"/*.deb "$out"/*.tar.gz # of other versions
# An explicit target keeps build scripts and macros with this machine's compiler.
PATH=$tools/bin:$PATH "$tools/bin/maturin" build --zig --target "$triple" --compatibility manylinux_2_31 \
  --target-dir "$target" --out "$out" >&2
install -m 755 "$target/$triple/dist/memledger" "$out/memledger"
