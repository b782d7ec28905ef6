//! Parsers from kernel text to structs: bytes in, values out. No I/O, no clock, no log.
//!
//! `/proc/meminfo`, pressure, `smaps_rollup` and the process of memledger itself are read with the `procfs` crate. What is parsed
//! here, it has not (cgroup files), reads lossily (names and paths may be invalid UTF-8, and the ledger compares their bytes), or
//! reads whole where this reads one value of each process in each cycle (`statm`) or one line of many (`mountinfo`).

pub mod cgroup;
pub mod container_id;
pub mod cuda_oom;
pub mod kernel_log;
pub mod kill_notice;
pub mod log_error;
pub mod kubernetes;
#[cfg(any(test, fuzzing))]
pub mod invariants;
pub mod mount;
pub mod process;
pub mod start_error;

/// The most memory that a GPU plausibly has, 1 PiB: what a driver reports beyond that is a sentinel or an overflow.
pub const MAX_GPU_MEMORY: u64 = 1 << 50;

/// Parses `text` as a decimal number, ignoring white space around it. Returns `None` for anything else and on overflow.
pub fn number(text: &[u8]) -> Option<u64> {
    let text = text.trim_ascii();
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0u64, |sum, byte| {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 { None } else { sum.checked_mul(10)?.checked_add(u64::from(digit)) }
    })
}

/// Returns the complete lines of a kernel file. The kernel ends each with a line feed; the text after the last one is
/// truncated, and a truncated number is another number.
pub fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split_inclusive(|&byte| byte == b'\n').filter_map(|line| line.strip_suffix(b"\n"))
}

/// Returns the `key value` lines of a flat keyed kernel file.
pub fn keyed(text: &[u8]) -> impl Iterator<Item = (&[u8], u64)> {
    lines(text).filter_map(|line| {
        let space = line.iter().position(|&byte| byte == b' ')?;
        Some((&line[..space], number(&line[space + 1..])?))
    })
}

/// Returns the position of the first `part` in `text`.
fn find(text: &[u8], part: &[u8]) -> Option<usize> {
    text.windows(part.len()).position(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn number_must_be_the_whole_text() {
        assert_eq!(number(b"18446744073709551615\n"), Some(u64::MAX));
        for not_a_number in [&b"18446744073709551616"[..], b"", b"-1", b"1 2", b"0x10", b"max"] {
            assert_eq!(number(not_a_number), None, "{not_a_number:?}");
        }
    }

    proptest! {
        #[test]
        fn reads_any_number(value: u64) {
            prop_assert_eq!(number(format!("{value}\n").as_bytes()), Some(value));
        }

        #[test]
        fn keyed_never_panics_on_any_bytes(bytes: Vec<u8>) {
            let _ = keyed(&bytes).count();
        }
    }
}
