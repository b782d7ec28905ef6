//! Properties of the parsers that hold for any bytes. The property tests below and the fuzzer (`fuzz/`) call the same functions,
//! which panic on a violation.
//!
//! Not here: the meaning of particular texts. The tests beside each parser cover that.

use super::cgroup::{StatV1, StatV2, limit};
use super::kernel_log::entries::EntryReader;
use super::kernel_log::records::{KmsgRecord, OomLine, RecordAssembler, SyslogText};
use super::kernel_log::text_log::{TextLine, TextLog};
use super::kernel_log::{Line, OomReport};
use super::kubernetes::qos;
use super::process::{Command, Launch, Stat, arguments, cgroup_path, resident_and_shared_pages};
use super::{container_id, keyed, lines, mount, number};
use crate::parse::container_id::RuntimeKind;
use crate::text::printable;

/// Returns a prefix of a text. Its length depends only on the text, so that failures are reproducible.
fn cut(text: &[u8]) -> &[u8] {
    let sum = text.iter().fold(7_usize, |sum, byte| sum.wrapping_mul(31).wrapping_add(usize::from(*byte)));
    &text[..sum % (text.len() + 1)]
}

/// Asserts that a truncated text yields the same value as the whole one, or none.
fn same_or_nothing<T: PartialEq + std::fmt::Debug>(cut: Option<T>, whole: Option<T>) {
    assert!(cut.is_none() || cut == whole, "cut: {cut:?}, whole: {whole:?}");
}

/// Checks files of cgroups: `memory.stat`, limits.
pub fn cgroup_files(text: &[u8]) {
    if let Some(value) = number(text) {
        assert_eq!(text.trim_ascii().iter().filter(|byte| !byte.is_ascii_digit()).count(), 0);
        assert_eq!(number(value.to_string().as_bytes()), Some(value));
    }
    if let Some(Some(bytes)) = limit(text) {
        assert!(bytes <= 1 << 62, "{bytes} is no limit");
        assert_eq!(limit(format!("{bytes}\n").as_bytes()), Some(Some(bytes)));
    }
    let pairs: Vec<_> = keyed(text).collect();
    let part: Vec<_> = keyed(cut(text)).collect();
    assert!(pairs.starts_with(&part), "a truncated file has fewer lines and no other ones");
    let print = |(key, value): &(&[u8], u64)| [*key, format!(" {value}\n").as_bytes()].concat();
    let printed: Vec<u8> = pairs.iter().flat_map(print).collect();
    assert_eq!(keyed(&printed).collect::<Vec<_>>(), pairs);
    let later = [b"a_line_of_a_later_kernel 7\nno number\n", text].concat();
    assert_eq!(StatV2::parse(&later), StatV2::parse(text));
    assert_eq!(StatV1::parse(&later), StatV1::parse(text));
}

/// Checks files of processes: `stat`, `statm`, `cgroup`, `cmdline`, `mountinfo`.
pub fn process_files(text: &[u8]) {
    if let Some(stat) = Stat::parse(text) {
        let flags = u8::from(stat.is_exiting) * 4;
        let Stat { ppid, threads, start_ticks, .. } = stat;
        let tail = format!(" {ppid} 0 0 0 0 {flags} {}{threads} 0 {start_ticks} 0\n", "0 ".repeat(10));
        let printed = [b"1 (", stat.comm.as_slice(), b") ", &[stat.state], tail.as_bytes()].concat();
        assert_eq!(Stat::parse(&printed), Some(stat));
    }
    same_or_nothing(resident_and_shared_pages(cut(text)), resident_and_shared_pages(text));
    for v1 in [true, false] {
        same_or_nothing(cgroup_path(cut(text), v1), cgroup_path(text, v1));
    }
    let all: Vec<_> = arguments(text).collect();
    assert_eq!(all.join(&0), text.strip_suffix(b"\0").unwrap_or(text));
    let command = Command::of(text);
    assert!(command.python || command.launch == Launch::Plain);
    for id in lines(text).filter_map(|line| number(line.split(|&byte| byte == b' ').next()?)).take(4) {
        same_or_nothing(mount::find(cut(text), id), mount::find(text, id));
    }
}

/// Checks paths of cgroups, which any process that may create cgroups chooses.
pub fn cgroup_paths(text: &[u8]) {
    let text = printable(text);
    assert!(!text.chars().any(char::is_control), "{text:?}");
    assert_eq!(printable(text.as_bytes()), text, "printable text is kept");
    let found: Vec<_> = container_id::in_path(&text).collect();
    assert!(found.len() <= text.split('/').count());
    for id in found.iter().map(|found| found.id) {
        let digits = id.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        assert!(id.len() == 64 && digits && text.contains(id), "{id} of {text}");
    }
    if let Some(first) = found.first() {
        let joined = format!("kubepods-pod1.slice:cri-containerd:{}", first.id);
        assert_eq!(
            container_id::in_path(&joined).collect::<Vec<_>>(),
            [container_id::ContainerIdMatch { runtime: RuntimeKind::Containerd, ..*first }]
        );
    }
    let below = format!("x/{text}");
    assert_eq!(container_id::in_path(&below).collect::<Vec<_>>(), found);
    assert!(qos(&format!("kubepods/burstable/pod1/{text}")).is_some(), "every path in a pod has its class");
}

/// Checks the kernel log: /dev/kmsg, one record per line, and syslog(2).
pub fn kernel_log(text: &[u8]) {
    let (mut assembler, mut found) = (RecordAssembler::default(), vec![]);
    for record in text.split(|&byte| byte == b'\n').filter_map(KmsgRecord::of) {
        let (before, pending) = (found.len(), assembler.held_sequence());
        let user = !record.is_kernel();
        assembler.push(record, &mut found);
        assert!(
            !user || (found.len(), assembler.held_sequence()) == (before, pending),
            "messages of user space are skipped"
        );
    }
    assembler.flush(&mut found);
    assert!(found.iter().all(|found| found.sequence.is_some()));
    found.iter().for_each(check_line);
    let syslog = SyslogText::of(text);
    assert!(syslog.settled <= text.len());
    syslog.found.iter().for_each(check_line);
    let settled = SyslogText::of(&text[..syslog.settled]);
    assert_eq!(settled.found, syslog.found, "an incomplete line yields nothing");
    text_log(text);
    if let Some(line) = Line::of(text) {
        check_line(&OomLine { sequence: None, usec: 0, line, text: text.to_vec(), report: None });
    }
}

/// Checks a saved kernel log: complete lines that follow change nothing that was found before.
fn text_log(text: &[u8]) {
    let read = |text: &[u8]| {
        let (mut reader, mut entries) = (EntryReader::default(), vec![]);
        lines(text).for_each(|line| reader.push(line, &mut entries));
        let (mut log, mut found) = (TextLog::default(), vec![]);
        entries.iter().for_each(|entry| log.push(entry, &mut found));
        found
    };
    let whole = read(text);
    for TextLine { found, stamp } in &whole {
        match Line::of(&found.text) {
            Some(_) => check_line(found),
            None => assert!(matches!(found.line, Line::Killed(_)), "only a kill may be shortened: {found:?}"),
        }
        assert_eq!(printable(stamp.as_bytes()), *stamp);
    }
    assert!(whole.starts_with(&read(cut(text))));
}

/// Asserts that a report is bounded, and that its strings are printable.
fn check_report(report: &OomReport) {
    assert!(report.processes.len() <= 8_192);
    assert!(report.processes.is_sorted_by(|one, other| one.rss_bytes >= other.rss_bytes), "{report:?}");
    let names = report.processes.iter().map(|row| &row.process).chain([&report.requested_by]);
    names.for_each(|name| assert_eq!(printable(name.as_bytes()), *name));
    let page =
        report.processes.iter().map(|row| row.rss_bytes).all(|bytes| bytes % 4_096 == 0 || bytes == u64::MAX);
    assert!(page, "whole pages: {report:?}");
}

/// Asserts that a line equals the parse of its text, and that its strings are printable.
fn check_line(found: &OomLine) {
    if let Some(report) = &found.report {
        assert!(matches!(found.line, Line::Killed(_) | Line::NoKill(_)));
        check_report(report);
    }
    assert_eq!(Line::of(&found.text).as_ref(), Some(&found.line));
    let shown: Vec<&String> = match &found.line {
        Line::Killed(killed) => vec![&killed.process],
        Line::Group { path } => vec![path],
        Line::Context(context) => context.task_cgroups.iter().chain(&context.oom_cgroup).collect(),
        Line::Invoked | Line::Chosen { .. } | Line::NoKill(_) | Line::Xid(_) | Line::Resumed => vec![],
    };
    assert!(shown.iter().all(|text| printable(text.as_bytes()) == **text), "{shown:?}");
    if let Line::Context(context) = &found.line {
        assert!(context.task_cgroups.iter().all(|path| path.starts_with('/')), "{context:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use proptest::sample::Index;

    /// Files in the format of the kernel, which [`damaged`] modifies.
    const FILES: [&str; 10] = [
        "MemTotal: 1000 kB\nMemFree: 400 kB\nBuffers: 10 kB\nCached: 200 kB\nSwapTotal: 9 kB\nSwapFree: 8 kB\nShmem: 5 kB\nHugePages_Total: 2\nHugepagesize: 25 kB\nPercpu: 10 kB\n",
        "anon 4096\nfile 8192\nkernel 0\nkernel_stack 16384\nshmem 18446744073709551615\ninactive_file 12\n",
        "cache 1\ntotal_cache 10\ntotal_rss 20\ntotal_shmem 30\ntotal_inactive_file 40\ntotal_swap 50\n",
        "some avg10=1.18 avg60=0.20 avg300=0.04 total=34636\nfull avg10=1.09 avg60=0.19 avg300=0.04 total=31001\n",
        "4242 (python) S 7 4242 4242 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 1000 200 18446744073709551615\n",
        "12:cpu,cpuacct:/a\n4:memory:/docker/x\n1:name=systemd:/b\n0::/system.slice/x\n",
        "22 1 0:21 / /proc rw - proc proc rw\n25 24 0:23 / /dev/shm rw shared:4 - tmpfs shm rw\n",
        "6,1,1001,-;oom-kill:constraint=CONSTRAINT_NONE,cpuset=x,global_oom,task_memcg=/a/b,task=x,pid=5,uid=0\n3,2,1002,-;Out of memory: Killed process 5 (x) total-vm:1kB, anon-rss:1kB, file-rss:1kB, shmem-rss:1kB\n",
        "<6>[    1.001001] oom-kill:constraint=CONSTRAINT_MEMCG,cpuset=x,mems_allowed=0,oom_memcg=/a,task_memcg=/a/b,task=x,pid=5,uid=0\n<3>[    1.001002] Killed process 5 (x) total-vm:1kB, anon-rss:1kB, file-rss:1kB\n",
        "[    1.000001] x invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0\n[    1.000002] memory: usage 64kB, limit 64kB, failcnt 5\n[    1.000003] Memory cgroup stats for /a:\n[    1.000004] anon 4096\n[    1.000005] [  pid  ]   uid  tgid total_vm      rss pgtables_bytes swapents oom_score_adj name\n[    1.000006] [      5]     0     5        2        1     4096        0             0 x\n[    1.000007] Memory cgroup out of memory: Killed process 5 (x) total-vm:8kB, anon-rss:4kB, file-rss:0kB\n",
    ];

    /// A file with parts removed or repeated, and bytes changed.
    fn damaged() -> impl Strategy<Value = Vec<u8>> {
        let changes = proptest::collection::vec((any::<Index>(), any::<Index>(), 0..4_u8, any::<u8>()), 0..6);
        (proptest::sample::select(FILES.to_vec()), changes).prop_map(|(text, changes)| {
            let mut text = text.as_bytes().to_vec();
            for (first, second, what, byte) in changes.into_iter() {
                if text.is_empty() {
                    break;
                }
                let (first, second) = (first.index(text.len()), second.index(text.len()));
                match what {
                    0 => text[first] = byte,
                    1 => drop(text.drain(first.min(second)..first.max(second))),
                    2 => {
                        let part = text[first.min(second)..first.max(second)].to_vec();
                        text.splice(first..first, part);
                    }
                    _ => text.insert(first, byte),
                }
            }
            text
        })
    }

    fn all(text: &[u8]) {
        for check in [cgroup_files, process_files, cgroup_paths, kernel_log] {
            check(text);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]

        #[test]
        fn invariants_hold_for_any_bytes(text: Vec<u8>) {
            all(&text);
        }

        #[test]
        fn invariants_hold_for_damaged_files(text in damaged()) {
            all(&text);
        }
    }

    #[test]
    fn truncated_file_yields_less_and_never_different_data() {
        for text in FILES.map(str::as_bytes) {
            all(text);
            for end in 0..text.len() {
                let cut = &text[..end];
                all(cut);
                for (key, value) in keyed(cut) {
                    assert!(keyed(text).any(|whole| whole == (key, value)));
                }
                same_or_nothing(Stat::parse(cut), Stat::parse(text));
                same_or_nothing(cgroup_path(cut, true), cgroup_path(text, true));
                same_or_nothing(cgroup_path(cut, false), cgroup_path(text, false));
                same_or_nothing(mount::find(cut, 25), mount::find(text, 25));
            }
        }
    }
}
