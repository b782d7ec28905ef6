//! `/proc/meminfo`.
//!
//! Not with the `procfs` crate, whose parser multiplies without checking for overflow: an absurd value would become another
//! value instead of an error.

use super::{lines, number};

/// Limit of a valid value, more than any host has. Sums of valid values cannot overflow.
const MAX_BYTES: u64 = 1 << 58;

/// The fields that memledger uses, in bytes. `None` for a line that this kernel does not print.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // the fields have the kernel's names
pub struct Meminfo {
    pub mem_total: u64,
    pub mem_free: u64,
    /// Since 3.14.
    pub mem_available: Option<u64>,
    pub buffers: u64,
    pub cached: u64,
    pub swap_total: u64,
    pub swap_free: u64,
    pub anon_pages: Option<u64>,
    pub shmem: Option<u64>,
    /// Since 4.20.
    pub k_reclaimable: Option<u64>,
    pub s_reclaimable: Option<u64>,
    pub s_unreclaim: Option<u64>,
    pub kernel_stack: Option<u64>,
    pub page_tables: Option<u64>,
    /// Since 6.1.
    pub sec_page_tables: Option<u64>,
    /// Since 5.0.
    pub percpu: Option<u64>,
    /// Huge pages of all sizes; before 4.14 those of the default size.
    pub hugetlb: Option<u64>,
}

/// Parses `1234 kB`, or a plain number.
fn amount(text: &[u8]) -> Option<u64> {
    let text = text.trim_ascii();
    let amount = match text.strip_suffix(b" kB") {
        Some(kib) => number(kib)?.checked_mul(1024)?,
        None => number(text)?,
    };
    (amount <= MAX_BYTES).then_some(amount)
}

impl Meminfo {
    /// Parses the file. Returns `None` if a line that every kernel prints is missing, or a value is invalid.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let mut info = Self::default();
        let [mut total, mut free, mut buffers, mut cached, mut swap_total, mut swap_free] = [None; 6];
        let [mut huge_pages, mut huge_page] = [None; 2];
        for line in lines(text) {
            let Some(colon) = line.iter().position(|&byte| byte == b':') else { continue };
            let field = match &line[..colon] {
                b"MemTotal" => &mut total,
                b"MemFree" => &mut free,
                b"MemAvailable" => &mut info.mem_available,
                b"Buffers" => &mut buffers,
                b"Cached" => &mut cached,
                b"SwapTotal" => &mut swap_total,
                b"SwapFree" => &mut swap_free,
                b"AnonPages" => &mut info.anon_pages,
                b"Shmem" => &mut info.shmem,
                b"KReclaimable" => &mut info.k_reclaimable,
                b"SReclaimable" => &mut info.s_reclaimable,
                b"SUnreclaim" => &mut info.s_unreclaim,
                b"KernelStack" => &mut info.kernel_stack,
                b"PageTables" => &mut info.page_tables,
                b"SecPageTables" => &mut info.sec_page_tables,
                b"Percpu" => &mut info.percpu,
                b"Hugetlb" => &mut info.hugetlb,
                b"HugePages_Total" => &mut huge_pages,
                b"Hugepagesize" => &mut huge_page,
                _ => continue,
            };
            *field = Some(amount(&line[colon + 1..])?);
        }
        if let (None, Some(pages), Some(page)) = (info.hugetlb, huge_pages, huge_page) {
            info.hugetlb = Some(pages.checked_mul(page).filter(|bytes| *bytes <= MAX_BYTES)?);
        }
        (info.mem_total, info.mem_free, info.buffers) = (total?, free?, buffers?);
        (info.cached, info.swap_total, info.swap_free) = (cached?, swap_total?, swap_free?);
        Some(info)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str = "MemTotal: 1000 kB\nMemFree: 400 kB\nBuffers: 10 kB\nCached: 200 kB\nSwapTotal: 8 kB\nSwapFree: 8 kB\n";

    fn with(more: &str) -> Option<Meminfo> {
        Meminfo::parse(format!("{BASE}{more}").as_bytes())
    }

    #[test]
    fn optional_lines_are_absent_and_basic_ones_required() {
        let info = with("").unwrap();
        assert_eq!((info.mem_total, info.swap_free), (1000 << 10, 8 << 10));
        assert_eq!((info.shmem, info.percpu, info.hugetlb), (None, None, None));
        for line in BASE.lines() {
            assert_eq!(Meminfo::parse(BASE.replace(line, "").as_bytes()), None, "without {line}");
        }
    }

    #[test]
    fn computes_hugetlb_where_the_kernel_does_not() {
        let pages = "HugePages_Total: 3\nHugepagesize: 2048 kB\n";
        assert_eq!(with(pages).unwrap().hugetlb, Some(6 << 20));
        assert_eq!(with(&format!("{pages}Hugetlb: 4 kB\n")).unwrap().hugetlb, Some(4 << 10));
    }

    #[test]
    fn rejects_absurd_values() {
        let (most, more) = (u64::MAX, u64::MAX / 1024 + 1);
        for absurd in [
            format!("Shmem: {more} kB\n"),
            format!("Shmem: {most} kB\n"),
            format!("Percpu: {most}\n"),
            format!("Hugetlb: {} kB\n", (MAX_BYTES >> 10) + 1),
            format!("HugePages_Total: {}\nHugepagesize: 2048 kB\n", MAX_BYTES),
            format!("HugePages_Total: {}\nHugepagesize: 2048 kB\n", MAX_BYTES >> 20),
            "Shmem: -5 kB\n".to_owned(),
            "Shmem: 5 MB\n".to_owned(),
            "Shmem:\n".to_owned(),
        ] {
            assert_eq!(with(&absurd), None, "{absurd}");
        }
        assert_eq!(with(&format!("Shmem: {} kB\n", MAX_BYTES >> 10)).unwrap().shmem, Some(MAX_BYTES));
        assert!(with(&format!("VmallocTotal: {most} kB\n")).is_some(), "unused lines may have any value");
    }
}
