//! `memory.stat` and the limits of cgroup v1 and v2.
//!
//! The parsers return the contents of the file; the collector decides which missing lines are normal.

use super::keyed;

/// `memory.stat` of cgroup v2, in bytes. `None` for a line that this kernel does not print.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // the fields have the kernel's names
pub struct StatV2 {
    pub anon: Option<u64>,
    pub file: Option<u64>,
    pub shmem: Option<u64>,
    pub file_mapped: Option<u64>,
    /// Since 5.18.
    pub kernel: Option<u64>,
    pub kernel_stack: Option<u64>,
    pub pagetables: Option<u64>,
    pub percpu: Option<u64>,
    pub sock: Option<u64>,
    pub slab: Option<u64>,
    pub slab_reclaimable: Option<u64>,
    pub slab_unreclaimable: Option<u64>,
    pub inactive_file: Option<u64>,
    pub unevictable: Option<u64>,
    /// A count.
    pub pgmajfault: Option<u64>,
    /// Pages, since 5.9.
    pub workingset_refault_anon: Option<u64>,
    /// Pages, since 5.9.
    pub workingset_refault_file: Option<u64>,
}

impl StatV2 {
    /// Parses the file.
    pub fn parse(text: &[u8]) -> Self {
        let mut stat = Self::default();
        for (key, value) in keyed(text) {
            let field = match key {
                b"anon" => &mut stat.anon,
                b"file" => &mut stat.file,
                b"shmem" => &mut stat.shmem,
                b"file_mapped" => &mut stat.file_mapped,
                b"kernel" => &mut stat.kernel,
                b"kernel_stack" => &mut stat.kernel_stack,
                b"pagetables" => &mut stat.pagetables,
                b"percpu" => &mut stat.percpu,
                b"sock" => &mut stat.sock,
                b"slab" => &mut stat.slab,
                b"slab_reclaimable" => &mut stat.slab_reclaimable,
                b"slab_unreclaimable" => &mut stat.slab_unreclaimable,
                b"inactive_file" => &mut stat.inactive_file,
                b"unevictable" => &mut stat.unevictable,
                b"pgmajfault" => &mut stat.pgmajfault,
                b"workingset_refault_anon" => &mut stat.workingset_refault_anon,
                b"workingset_refault_file" => &mut stat.workingset_refault_file,
                _ => continue,
            };
            *field = Some(value);
        }
        stat
    }
}

/// `memory.stat` of cgroup v1, in bytes. The `total_` lines include the cgroups below.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // the fields have the kernel's names
pub struct StatV1 {
    pub total_cache: Option<u64>,
    pub total_rss: Option<u64>,
    pub total_shmem: Option<u64>,
    pub total_mapped_file: Option<u64>,
    pub total_inactive_file: Option<u64>,
    /// Only with swap accounting.
    pub total_swap: Option<u64>,
    /// A count.
    pub total_pgmajfault: Option<u64>,
    /// Pages; not of all kernels.
    pub total_workingset_refault_anon: Option<u64>,
    /// Pages; not of all kernels.
    pub total_workingset_refault_file: Option<u64>,
}

impl StatV1 {
    /// Parses the file.
    pub fn parse(text: &[u8]) -> Self {
        let mut stat = Self::default();
        for (key, value) in keyed(text) {
            let field = match key {
                b"total_cache" => &mut stat.total_cache,
                b"total_rss" => &mut stat.total_rss,
                b"total_shmem" => &mut stat.total_shmem,
                b"total_mapped_file" => &mut stat.total_mapped_file,
                b"total_inactive_file" => &mut stat.total_inactive_file,
                b"total_swap" => &mut stat.total_swap,
                b"total_pgmajfault" => &mut stat.total_pgmajfault,
                b"total_workingset_refault_anon" => &mut stat.total_workingset_refault_anon,
                b"total_workingset_refault_file" => &mut stat.total_workingset_refault_file,
                _ => continue,
            };
            *field = Some(value);
        }
        stat
    }
}

/// Returns the values of these keys of a keyed file, such as `cpu.stat` or `memory.events`; `None` for a missing one.
pub fn values<const N: usize>(text: &[u8], keys: [&[u8]; N]) -> [Option<u64>; N] {
    let mut values = [None; N];
    for (key, value) in keyed(text) {
        if let Some(at) = keys.iter().position(|wanted| *wanted == key) {
            values[at] = Some(value);
        }
    }
    values
}

/// Parses a limit: the inner `None` means unlimited, the outer one invalid text.
///
/// v2 writes `max`. v1 writes the largest multiple of the page size below 2^63; no machine has half of that, so
/// any value above 2^62 is *unlimited*, whatever the page size.
pub fn limit(text: &[u8]) -> Option<Option<u64>> {
    if text.trim_ascii() == b"max" {
        return Some(None);
    }
    super::number(text).map(|bytes| (bytes <= 1 << 62).then_some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn reads_every_line_among_others(values: [Option<u64>; 17], other in "[a-z_]{1,12}[0-9]") {
            let keys = ["anon", "file", "shmem", "file_mapped", "kernel", "kernel_stack", "pagetables", "percpu", "sock", "slab",
                "slab_reclaimable", "slab_unreclaimable", "inactive_file", "unevictable", "pgmajfault", "workingset_refault_anon",
                "workingset_refault_file"];
            let lines = std::iter::zip(keys, values).filter_map(|(key, value)| Some(format!("{key} {}\n{other} 5\n", value?)));
            let stat = StatV2::parse(lines.collect::<String>().as_bytes());
            let read = [stat.anon, stat.file, stat.shmem, stat.file_mapped, stat.kernel, stat.kernel_stack, stat.pagetables, stat.percpu,
                stat.sock, stat.slab, stat.slab_reclaimable, stat.slab_unreclaimable, stat.inactive_file, stat.unevictable, stat.pgmajfault,
                stat.workingset_refault_anon, stat.workingset_refault_file];
            prop_assert_eq!(read, values);
        }

        #[test]
        fn reads_every_hierarchical_line_of_v1(values: [Option<u64>; 7]) {
            let keys = ["cache", "rss", "shmem", "mapped_file", "inactive_file", "swap", "pgmajfault"];
            let lines = std::iter::zip(keys, values).filter_map(|(key, value)| Some(format!("{key} 5\ntotal_{key} {}\n", value?)));
            let stat = StatV1::parse(lines.collect::<String>().as_bytes());
            let read = [stat.total_cache, stat.total_rss, stat.total_shmem, stat.total_mapped_file, stat.total_inactive_file, stat.total_swap,
                stat.total_pgmajfault];
            prop_assert_eq!(read, values);
        }
    }

    #[test]
    fn reads_unlimited_on_both_versions() {
        assert_eq!(limit(b"max\n"), Some(None));
        assert_eq!(limit(b"9223372036854771712\n"), Some(None));
        assert_eq!(limit(b"9223372036854710272\n"), Some(None), "64 KiB pages");
        assert_eq!(limit(b"67108864\n"), Some(Some(64 << 20)));
        assert_eq!(limit(b"0\n"), Some(Some(0)));
        assert_eq!(limit(b"maximum"), None);
    }

    #[test]
    fn reads_wanted_keys_only() {
        let text = b"usage_usec 9\nuser_usec 5\nuser_usec_more 7\nnonsense\n";
        assert_eq!(values(text, [b"user_usec", b"system_usec"]), [Some(5), None]);
    }

    #[test]
    fn missing_line_is_absent_and_not_zero() {
        let stat = StatV2::parse(b"anon 4096\nfile 0\nnonsense\nshmem x\n");
        assert_eq!((stat.anon, stat.file, stat.shmem, stat.kernel), (Some(4096), Some(0), None, None));
    }

    #[test]
    fn v1_reads_hierarchical_lines_and_not_local_ones() {
        let stat = StatV1::parse(b"cache 1\nrss 2\nshmem 3\ntotal_cache 10\ntotal_rss 20\ntotal_shmem 30\n");
        assert_eq!((stat.total_cache, stat.total_rss, stat.total_shmem), (Some(10), Some(20), Some(30)));
        assert_eq!(stat.total_swap, None);
    }
}
