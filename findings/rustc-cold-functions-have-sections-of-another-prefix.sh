#!/bin/bash
# believed: with a section for each function, which rustc makes by default, the code of function NAME is in .text.NAME, so that a linker
#     script that lists *(.text.NAME) places it.
# so: what LLVM takes for cold is in .text.unlikely.NAME, and such a script leaves it where it was, without a word. That is not rare code:
#     hashbrown marks the growth of its table as cold, so that each program that fills a map calls it. A program whose called functions are
#     placed together so that the others need not be resident keeps the 64 KiB around each such function resident.
# seen with rustc 1.95.0 (x86_64-unknown-linux-gnu), hashbrown 0.16.1, 2026-11-30: the function that fills the map is in .text.NAME, the
#     instance of reserve_rehash that it calls in .text.unlikely.NAME.
#
# usage: findings/rustc-cold-functions-have-sections-of-another-prefix.sh; needs Rust, its crates, and binutils. Fails if reserve_rehash is in .text.NAME.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/src"
cat >"$folder/Cargo.toml" <<'END'
[package]
name = "growing"
version = "0.0.0"
edition = "2024"
[lib]
crate-type = ["rlib"]
[dependencies]
hashbrown = "=0.16.1"
END
cat >"$folder/src/lib.rs" <<'END'
#[inline(never)]
pub fn fill(map: &mut hashbrown::HashMap<u64, u64>, count: u64) {
    for number in 0..count {
        map.insert(number, number);
    }
}
END
rustc --version
unset CARGO_ENCODED_RUSTFLAGS CARGO_BUILD_TARGET
CARGO_TARGET_DIR=$folder/target RUSTFLAGS=-Csymbol-mangling-version=v0 \
  cargo rustc --quiet --release --manifest-path "$folder/Cargo.toml" -- --emit=obj -Ccodegen-units=1
readelf --sections --wide "$folder"/target/release/deps/growing-*.o | grep -o ' \.text\.[^ ]*' | tr -d ' ' | tee "$folder/sections"
[[ $(grep -c '^\.text\._R.*7growing4fill' "$folder/sections") -ge 1 ]] || { echo "the function that fills the map has no section of its own" >&2; exit 1; }
grep -q '^\.text\.unlikely\._R.*reserve_rehash' "$folder/sections" || { echo "changed: no reserve_rehash in .text.unlikely" >&2; exit 1; }
if grep -q '^\.text\._R.*reserve_rehash' "$folder/sections"; then echo "changed: reserve_rehash is in .text" >&2; exit 1; fi
