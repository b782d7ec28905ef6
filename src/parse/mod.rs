//! Kernel text to structs: bytes in, values out. No I/O, no clock, no log.
//!
//! Our own parsers exist where the text is not UTF-8 (names of processes) or where they run once per container and
//! cycle. What is read once per cycle goes through the `procfs` crate.

pub mod cgroup;
pub mod container_id;
pub mod mount;
pub mod process;
pub mod psi;

/// A decimal number that fills `text`, white space around it ignored. `None` if it is anything else or overflows.
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

/// The `key value` lines of a flat keyed kernel file.
pub fn keyed(text: &[u8]) -> impl Iterator<Item = (&[u8], u64)> {
    text.split(|&byte| byte == b'\n').filter_map(|line| {
        let space = line.iter().position(|&byte| byte == b' ')?;
        Some((&line[..space], number(&line[space + 1..])?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn numbers_are_whole_and_fill_the_text() {
        assert_eq!(number(b"18446744073709551615\n"), Some(u64::MAX));
        for not_a_number in [&b"18446744073709551616"[..], b"", b"-1", b"1 2", b"0x10", b"max"] {
            assert_eq!(number(not_a_number), None, "{not_a_number:?}");
        }
    }

    proptest! {
        #[test]
        fn any_number_survives(value: u64) {
            prop_assert_eq!(number(format!("{value}\n").as_bytes()), Some(value));
        }

        #[test]
        fn no_bytes_make_the_keyed_parser_panic(bytes: Vec<u8>) {
            let _ = keyed(&bytes).count();
        }
    }
}
