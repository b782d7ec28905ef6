//! Pressure stall information of a cgroup: `memory.pressure`.

use super::{lines, number};

/// Total stall time in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stalls {
    /// Time in which at least one task waited.
    pub some_usec: u64,
    /// Time in which all tasks waited.
    pub full_usec: u64,
}

/// Parses `memory.pressure`; `None` if a line or its `total=` is missing.
pub fn stalls(text: &[u8]) -> Option<Stalls> {
    let total = |kind: &[u8]| {
        let line = lines(text).find(|line| line.starts_with(kind))?;
        number(line.rsplit(|&b| b == b' ').next()?.strip_prefix(b"total=")?)
    };
    Some(Stalls { some_usec: total(b"some ")?, full_usec: total(b"full ")? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn reads_any_total_in_any_order_of_lines(some_usec: u64, full_usec: u64, average in 0.0..100.0, swapped: bool) {
            let line = |kind, total| format!("{kind} avg10={average:.2} avg60=0.00 avg300=0.00 total={total}\n");
            let mut lines = [line("some", some_usec), line("full", full_usec)];
            if swapped {
                lines.reverse();
            }
            prop_assert_eq!(stalls(lines.concat().as_bytes()), Some(Stalls { some_usec, full_usec }));
        }
    }

    #[test]
    fn reads_totals_and_ignores_averages() {
        let text = b"some avg10=1.18 avg60=0.20 avg300=0.04 total=34636\nfull avg10=1.09 avg60=0.19 avg300=0.04 total=31001\n";
        assert_eq!(stalls(text), Some(Stalls { some_usec: 34_636, full_usec: 31_001 }));
        assert_eq!(stalls(b"some avg10=0.00 total=1\n"), None);
    }
}
