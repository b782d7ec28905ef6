//! The kernel's table of processes: its columns, by the header, and its rows.
//!
//! A row ends in the name of a process, which may contain spaces, brackets and digits: so the numbers before it are counted.

use super::super::{Killed, digits};
use super::{OomReport, ReportProcess};
use crate::text::printable;

/// Rows that are kept while a block is open; the smallest are dropped.
const MAX_ROWS: usize = 4_096;

/// Longer names are not the kernel's: 15 bytes, each of which may be escaped as `\x1b`.
const MAX_NAME_BYTES: usize = 60;

/// The smallest page; the next larger one has four times its size.
const SMALL_PAGE: u64 = 4_096;
/// Pages from which on the number of page tables shows the size of a page.
const MIN_RSS_OF_PAGE_SIZE: u64 = 100_000;

/// A column that is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TableColumn {
    Uid,
    Tgid,
    TotalVm,
    Rss,
    RssAnon,
    RssFile,
    RssShmem,
    Swap,
    ScoreAdj,
    /// Page tables: in bytes, or before 4.15 their number.
    PageTableBytes,
    PageTables,
    Other,
}

/// The columns between the pid and the name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Columns(Vec<TableColumn>);

impl Columns {
    const MAX: usize = 24;

    /// Parses `[  pid  ]   uid  tgid total_vm      rss ... oom_score_adj name`.
    pub(super) fn of(text: &[u8]) -> Option<Self> {
        let rest = text.strip_prefix(b"[")?.trim_ascii_start().strip_prefix(b"pid")?;
        let rest = rest.trim_ascii_start().strip_prefix(b"]")?;
        let names = rest.split(u8::is_ascii_whitespace).filter(|name| !name.is_empty());
        let mut columns = Vec::new();
        for name in names {
            if name == b"name" {
                return columns.contains(&TableColumn::Rss).then_some(Self(columns));
            }
            if columns.len() == Self::MAX {
                return None;
            }
            columns.push(match name {
                b"uid" => TableColumn::Uid,
                b"tgid" => TableColumn::Tgid,
                b"total_vm" => TableColumn::TotalVm,
                b"rss" => TableColumn::Rss,
                b"rss_anon" => TableColumn::RssAnon,
                b"rss_file" => TableColumn::RssFile,
                b"rss_shmem" => TableColumn::RssShmem,
                b"swapents" => TableColumn::Swap,
                b"oom_score_adj" => TableColumn::ScoreAdj,
                b"pgtables_bytes" => TableColumn::PageTableBytes,
                b"nr_ptes" => TableColumn::PageTables,
                _ => TableColumn::Other,
            });
        }
        None // cut
    }
}

/// Returns whether a text is a row: a pid in brackets, and a number.
pub(super) fn is_row(text: &[u8]) -> bool {
    pid_and_rest(text).is_some_and(|(_, rest)| {
        let rest = rest.trim_ascii_start();
        rest.first().is_some_and(u8::is_ascii_digit)
    })
}

fn pid_and_rest(text: &[u8]) -> Option<(u32, &[u8])> {
    let text = text.strip_prefix(b"[")?;
    let close = text.iter().take(16).position(|&byte| byte == b']')?;
    let pid = text[..close].trim_ascii();
    let pid = digits(pid).filter(|_| !pid.is_empty())?;
    let rest = text[close + 1..].strip_prefix(b" ")?;
    Some((u32::try_from(pid).ok()?, rest))
}

/// Parses a number, also a negative one, at the beginning of a text.
pub(super) fn signed(text: &[u8]) -> Option<i32> {
    let (sign, number) = match text.strip_prefix(b"-") {
        Some(number) => (-1, number),
        None => (1, text),
    };
    let end = number.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(number.len());
    let number = digits(&number[..end]).filter(|_| end > 0)?;
    Some(sign * i32::try_from(number).ok()?)
}

/// A row, in pages.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TableRow {
    pid: u32,
    tgid: Option<u32>,
    uid: Option<u32>,
    total_vm: Option<u64>,
    rss: u64,
    anon: Option<u64>,
    file: Option<u64>,
    shmem: Option<u64>,
    swap: Option<u64>,
    score_adj: Option<i32>,
    has_small_pages: bool,
    name: Box<[u8]>,
}

impl TableRow {
    fn of(text: &[u8], columns: &Columns) -> Option<Self> {
        let (pid, mut rest) = pid_and_rest(text)?;
        let (mut tgid, mut uid, mut total_vm, mut rss, mut swap) = (None, None, None, None, None);
        let (mut anon, mut file, mut shmem, mut score_adj) = (None, None, None, None);
        let mut has_small_pages = false;
        for column in &columns.0 {
            rest = rest.trim_ascii_start();
            let end = rest.iter().position(|&byte| byte == b' ')?;
            let field = &rest[..end];
            rest = &rest[end..];
            let number = digits(field);
            if number.is_none() && signed(field).is_none() {
                return None;
            }
            match column {
                TableColumn::Uid => uid = number.and_then(|uid| u32::try_from(uid).ok()),
                TableColumn::Tgid => tgid = number.and_then(|tgid| u32::try_from(tgid).ok()),
                TableColumn::TotalVm => total_vm = number,
                TableColumn::Rss => rss = number,
                TableColumn::RssAnon => anon = number,
                TableColumn::RssFile => file = number,
                TableColumn::RssShmem => shmem = number,
                TableColumn::Swap => swap = number,
                TableColumn::ScoreAdj => score_adj = signed(field),
                // page tables are whole pages
                TableColumn::PageTableBytes => {
                    has_small_pages = number.is_some_and(|bytes| !bytes.is_multiple_of(4 * SMALL_PAGE));
                }
                // a table maps 512 small pages, or 8,192 pages of 64 KiB
                TableColumn::PageTables => {
                    has_small_pages = number.zip(rss).is_some_and(|(tables, rss)| {
                        rss > MIN_RSS_OF_PAGE_SIZE && tables.saturating_mul(1_024) > rss
                    });
                }
                TableColumn::Other => {}
            }
        }
        let name = rest.strip_prefix(b" ").filter(|name| name.len() <= MAX_NAME_BYTES)?.into();
        Some(Self {
            pid,
            tgid,
            uid,
            total_vm,
            rss: rss?,
            anon,
            file,
            shmem,
            swap,
            score_adj,
            has_small_pages,
            name,
        })
    }

    fn is_of(&self, pid: u32) -> bool {
        self.pid == pid || self.tgid == Some(pid)
    }

    fn to_process(&self, page: u64) -> ReportProcess {
        let bytes = |pages: u64| pages.saturating_mul(page);
        ReportProcess {
            pid: self.pid,
            tgid: self.tgid.filter(|tgid| *tgid != self.pid),
            uid: self.uid,
            process: printable(&self.name),
            rss_bytes: bytes(self.rss),
            anon_bytes: self.anon.map(bytes),
            file_bytes: self.file.map(bytes),
            shmem_bytes: self.shmem.map(bytes),
            swap_bytes: self.swap.map(bytes),
            oom_score_adj: self.score_adj,
            ..ReportProcess::default()
        }
    }
}

/// The rows of a table.
#[derive(Clone, Debug, Default)]
pub(super) struct ReportTable {
    rows: Vec<TableRow>,
    count: u32,
    has_header: bool,
    has_unreadable: bool,
    has_small_pages: bool,
}

impl ReportTable {
    pub(super) fn begin(&mut self) {
        self.has_header = true;
    }

    pub(super) fn has_header(&self) -> bool {
        self.has_header
    }

    pub(super) fn has_rows(&self) -> bool {
        !self.rows.is_empty()
    }

    pub(super) fn has_unreadable(&self) -> bool {
        self.has_unreadable
    }

    pub(super) fn add(&mut self, text: &[u8], columns: &Columns) {
        let Some(row) = TableRow::of(text, columns) else { return self.add_unreadable() };
        self.count = self.count.saturating_add(1);
        self.has_small_pages |= row.has_small_pages;
        self.rows.push(row);
        if self.rows.len() >= 2 * MAX_ROWS {
            self.sort();
            self.rows.truncate(MAX_ROWS);
        }
    }

    pub(super) fn add_unreadable(&mut self) {
        self.has_unreadable = true;
    }

    fn sort(&mut self) {
        self.rows.sort_by_key(|row| std::cmp::Reverse(row.rss));
    }

    /// Derives the page size: from the victim's row, whose address space is in the row in pages, and in the record of its kill in
    /// kilobytes; else from sizes that are no multiples of a larger page.
    ///
    /// `context_pid`: its pid in the context line, if the table does not list the thread that was killed.
    pub(super) fn page_bytes(&self, killed: &Killed, context_pid: Option<u32>) -> Option<u64> {
        let of_killed = [killed.total_vm_bytes, killed.anon_bytes, killed.file_bytes, killed.shmem_bytes];
        let is_small = |bytes: &u64| !bytes.is_multiple_of(4 * SMALL_PAGE);
        let has_small_pages = self.has_small_pages || of_killed.iter().flatten().any(is_small);
        self.page_of_victim(killed, context_pid).or(has_small_pages.then_some(SMALL_PAGE))
    }

    fn page_of_victim(&self, killed: &Killed, context_pid: Option<u32>) -> Option<u64> {
        let row_of = |pid: u32| self.rows.iter().find(|row| row.is_of(pid));
        let row = row_of(killed.pid).or_else(|| row_of(context_pid?))?;
        let (pages, bytes) = (row.total_vm.filter(|pages| *pages > 0)?, killed.total_vm_bytes?);
        let page = bytes / pages;
        (bytes % pages == 0 && page.is_power_of_two() && (4_096..=1 << 20).contains(&page)).then_some(page)
    }

    /// Returns whether the process in the context line had the address space of the one that was killed.
    pub(super) fn has_size_of(&self, killed: &Killed, context_pid: Option<u32>, page: Option<u64>) -> bool {
        let row = context_pid.and_then(|pid| self.rows.iter().find(|row| row.is_of(pid)));
        let size = row.and_then(|row| row.total_vm?.checked_mul(page?));
        size.is_some() && size == killed.total_vm_bytes
    }

    pub(super) fn write(mut self, page: Option<u64>, report: &mut OomReport) {
        let Some(page) = page else { return };
        if !self.has_header || (self.has_unreadable && self.rows.is_empty()) {
            return;
        }
        self.sort();
        self.rows.truncate(MAX_ROWS);
        report.process_count = Some(self.count);
        report.processes = self.rows.iter().map(|row| row.to_process(page)).collect();
    }
}
