use super::*;
use crate::parse::kernel_log::records::{KmsgRecord, OomLine, RecordAssembler, SyslogText};

const MIB: u64 = 1 << 20;

/// Returns the relevant lines of a log in the format of /dev/kmsg.
fn kmsg(log: &[u8]) -> Vec<OomLine> {
    let (mut assembler, mut found) = (RecordAssembler::default(), vec![]);
    for record in log.split(|&byte| byte == b'\n').filter_map(KmsgRecord::of) {
        assembler.push(record, &mut found);
    }
    assembler.flush(&mut found);
    found
}

fn reports(found: &[OomLine]) -> Vec<&OomReport> {
    found.iter().filter_map(|found| found.report.as_deref()).collect()
}

/// Returns the report of records without numbers, at the kernel's levels.
fn of(lines: &[&str]) -> Option<OomReport> {
    let mut assembler = ReportAssembler::default();
    let push = |line: &&str| assembler.push(1, line.as_bytes(), Line::of(line.as_bytes()).as_ref());
    lines.iter().filter_map(push).last()
}

const INVOKED: &str = "hog invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0";
const USAGE: &str = "memory: usage 65536kB, limit 65536kB, failcnt 59";
const HEADER: &str = "[  pid  ]   uid  tgid total_vm      rss pgtables_bytes swapents oom_score_adj name";
const ROW: &str = "[   7493]     0  7493    16880    16396   172032        0             0 hog";

fn killed(pid: u32) -> String {
    format!(
        "Memory cgroup out of memory: Killed process {pid} (hog) total-vm:67520kB, anon-rss:64880kB, file-rss:704kB"
    )
}

#[test]
fn folds_recorded_block_of_cgroup_v1() {
    let found = kmsg(include_bytes!("../../../../tests/kernel-logs/v1-6.18-container.kmsg"));
    let report = reports(&found)[0].clone();
    let row = ReportProcess {
        pid: 22212,
        uid: Some(0),
        process: "hog".into(),
        rss_bytes: 16406 * 4096,
        anon_bytes: Some(16256 * 4096),
        file_bytes: Some(150 * 4096),
        shmem_bytes: Some(0),
        swap_bytes: Some(0),
        oom_score_adj: Some(0),
        ..ReportProcess::default()
    };
    let want = OomReport {
        requested_by: "hog".into(),
        order: Some(0),
        usage_bytes: Some(64 * MIB),
        limit_bytes: Some(64 * MIB),
        anon_bytes: Some(66_695_168),
        file_bytes: Some(0),
        shmem_bytes: Some(0),
        kernel_bytes: Some(404 << 10),
        unaccounted_bytes: Some(0),
        dirty_bytes: Some(0),
        swap_bytes: Some(0),
        cgroup: "/docker/13739abf5e8e4d06df24f17677521acdff6e99f23a435204a9c314051f22bc48".into(),
        swap_limit_bytes: Some(64 * MIB),
        process_count: Some(1),
        processes: vec![row],
        context_pid: Some(22212),
        has_size_of_victim: true,
        ..OomReport::default()
    };
    assert_eq!(report, want);
}

#[test]
fn folds_recorded_block_of_cgroup_v2_with_escaped_line_feeds() {
    let found = kmsg(include_bytes!("../../../../tests/kernel-logs/v2-6.1-worker.kmsg"));
    let report = reports(&found)[0].clone();
    assert_eq!(report.requested_by, "dataloader-w0");
    assert_eq!((report.usage_bytes, report.limit_bytes), (Some(64 * MIB), Some(64 * MIB)));
    assert_eq!(
        (report.anon_bytes, report.file_bytes, report.shmem_bytes),
        (Some(66_658_304), Some(0), Some(0))
    );
    assert_eq!(report.kernel_bytes, Some(450_560));
    assert_eq!((report.swap_bytes, report.swap_limit_bytes), (Some(0), Some(64 * MIB)));
    let rows: Vec<_> = report.processes.iter().map(|row| (row.pid, &*row.process, row.rss_bytes)).collect();
    assert_eq!(rows, [(1119, "dataloader-w0", 16293 * 4096), (1090, "hog", 4096)]);
    assert!(!report.incomplete && !report.host);
}

#[test]
fn folds_recorded_block_of_host() {
    let log = include_bytes!("../../../../tests/kernel-logs/v2-6.1-host.dmesg");
    // dmesg prints the lines of one record without a stamp; syslog(2) repeats the stamp
    let log: String = String::from_utf8_lossy(log)
        .lines()
        .map(|line| {
            if line.starts_with('<') {
                format!("{line}\n")
            } else {
                format!("<4>[  839.340000] {}\n", line.trim())
            }
        })
        .collect();
    let found = SyslogText::of(log.as_bytes()).found;
    let report = reports(&found)[0].clone();
    assert!(report.host && !report.incomplete);
    assert_eq!(report.limit_bytes, Some((563_224 - 51_995) * 4096));
    assert_eq!(report.free_bytes, Some(1404 * 4096));
    assert_eq!(report.anon_bytes, Some((44 + 501_493 - 53) * 4096));
    assert_eq!(report.file_bytes, Some((3 + 16 + 17) * 4096));
    assert_eq!(report.shmem_bytes, Some(53 * 4096));
    assert_eq!(report.kernel_bytes, Some((695 + 3257 + 1307) * 4096 + (1440 << 10)));
    assert_eq!((report.swap_bytes, report.swap_limit_bytes), (Some(0), Some(0)));
    assert_eq!(report.process_count, Some(15));
    let first = &report.processes[0];
    assert_eq!((first.pid, first.rss_bytes, first.oom_score_adj), (4713, 450_398 * 4096, Some(800)));
    assert_eq!(report.context_pid, Some(4713));
}

#[test]
fn rate_limited_kills_have_no_report() {
    let found = kmsg(include_bytes!("../../../../tests/kernel-logs/v1-6.18-burst.kmsg"));
    let kills: Vec<_> = found.iter().filter(|found| matches!(found.line, Line::Killed(_))).collect();
    assert_eq!((kills.len(), kills.iter().filter(|kill| kill.report.is_some()).count()), (30, 10));
    assert!(kills.iter().filter_map(|kill| kill.report.as_ref()).all(|report| !report.incomplete));
}

#[test]
fn columns_are_those_of_the_header() {
    let processes = |header: &str, row: &str| {
        let report =
            of(&[INVOKED, USAGE, "Memory cgroup stats for /a: cache:0KB rss:64KB", header, row, &killed(7)]);
        report.unwrap().processes
    };
    let row = |rss: u64, swap: u64, name: &str| ReportProcess {
        pid: 7,
        uid: Some(1000),
        process: name.into(),
        rss_bytes: rss * 4096,
        swap_bytes: Some(swap * 4096),
        oom_score_adj: Some(-5),
        ..ReportProcess::default()
    };
    let cases = [
        (
            "[ pid ]   uid  tgid total_vm      rss nr_ptes swapents oom_score_adj name",
            "[    7]  1000     7    16880      100      40       50            -5 a b 9 [x]",
        ),
        (
            "[ pid ]   uid  tgid total_vm      rss nr_ptes nr_pmds swapents oom_score_adj name",
            "[    7]  1000     7    16880      100      40       3       50            -5 a b 9 [x]",
        ),
        (HEADER, "[      7]  1000     7    16880      100   172032       50            -5 a b 9 [x]"),
    ];
    for (header, text) in cases {
        assert_eq!(processes(header, text), [row(100, 50, "a b 9 [x]")], "{header}");
    }
}

#[test]
fn memory_before_5_3_is_the_sum_of_the_cgroups() {
    let report = of(&[
        "python invoked oom-killer: gfp_mask=0x14000c0(GFP_KERNEL), nodemask=(null),  order=0, oom_score_adj=0",
        "python cpuset=a mems_allowed=0",
        "Task in /docker/a/b killed as a result of limit of /docker/a",
        "memory: usage 204800kB, limit 204800kB, failcnt 9",
        "memory+swap: usage 204800kB, limit 9007199254740988kB, failcnt 0",
        "kmem: usage 2048kB, limit 9007199254740988kB, failcnt 0",
        "Memory cgroup stats for /docker/a: cache:1024KB rss:4096KB rss_huge:0KB shmem:1000KB mapped_file:0KB dirty:4KB writeback:8KB swap:16KB inactive_anon:1KB",
        "Memory cgroup stats for /docker/a/b: cache:2048KB rss:190000KB rss_huge:0KB shmem:0KB mapped_file:0KB dirty:0KB writeback:0KB swap:0KB inactive_anon:1KB",
        "[ pid ]   uid  tgid total_vm      rss nr_ptes nr_pmds swapents oom_score_adj name",
        "[ 7493]     0  7493    16880    16396      40       3        0             0 python",
        "Memory cgroup out of memory: Kill process 7493 (python) score 990 or sacrifice child",
        "Killed process 7493 (python) total-vm:67520kB, anon-rss:64880kB, file-rss:704kB, shmem-rss:0kB",
    ])
    .unwrap();
    assert_eq!((report.requested_by.as_str(), report.order), ("python", Some(0)));
    assert_eq!((report.anon_bytes, report.shmem_bytes), (Some(194_096 << 10), Some(1000 << 10)));
    assert_eq!(report.file_bytes, Some((3072 - 1000) << 10));
    assert_eq!((report.kernel_bytes, report.dirty_bytes), (Some(2 * MIB), Some(12 << 10)));
    assert_eq!((report.swap_bytes, report.swap_limit_bytes), (Some(16 << 10), None), "no limit of swap");
    assert!(!report.incomplete && report.context_pid.is_none());
}

#[test]
fn page_size_is_that_of_the_kernel_that_wrote_the_log() {
    let row = "[   7493]     0  7493     1055     1024   172032        0             0 hog";
    let report =
        of(&[INVOKED, USAGE, "Memory cgroup stats for /a:", "anon 5", HEADER, row, &killed(7493)]).unwrap();
    assert_eq!(report.processes[0].rss_bytes, 1024 << 16, "67520 kB are 1055 pages of 64 KiB");
    let small =
        of(&[INVOKED, USAGE, "Memory cgroup stats for /a:", "anon 5", HEADER, row, &killed(1)]).unwrap();
    assert_eq!(
        small.processes[0].rss_bytes,
        4 * MIB,
        "172032 bytes of page tables are no multiple of 16 KiB"
    );
    let row = row.replace("172032", "196608");
    let killed = killed(1).replace("67520kB", "67584kB").replace("64880kB", "64896kB");
    let report =
        of(&[INVOKED, USAGE, "Memory cgroup stats for /a:", "anon 5", HEADER, &row, &killed]).unwrap();
    assert!(report.incomplete && report.processes.is_empty(), "unknown page size: {report:?}");
}

#[test]
fn free_memory_is_in_pieces_if_no_block_of_the_order_is_free() {
    const DMA: &str = "Node 0 DMA free:15360kB boost:0kB min:100kB low:200kB high:300kB managed:15360kB";
    const DMA_BLOCKS: &str = "Node 0 DMA: 0*4kB 0*8kB 0*16kB 0*32kB 3*4096kB (M) = 15360kB";
    let is_fragmented = |order: i32, free: u64, blocks: &str| {
        let invoked =
            format!("hog invoked oom-killer: gfp_mask=0x40dc0(GFP_KERNEL), order={order}, oom_score_adj=0");
        let zone = format!(
            "Node 0 Normal free:{free}kB boost:0kB min:40000kB low:50000kB high:60000kB managed:8000000kB"
        );
        let blocks = format!("Node 0 Normal: {blocks} = 160000kB");
        let lines = [
            &*invoked,
            "Mem-Info:",
            "active_anon:1 free:40000 shmem:0",
            DMA,
            &zone,
            DMA_BLOCKS,
            &blocks,
            &killed(1),
        ];
        of(&lines).unwrap().fragmented
    };
    let small = "30000*4kB (UME) 5000*8kB (UME) 0*16kB 0*32kB 0*64kB";
    assert!(is_fragmented(3, 160_000, small));
    assert!(
        is_fragmented(3, 160_000, "30000*4kB (UME) 0*16kB 7*32kB (H) 1*64kB (CH)"),
        "reserved for others"
    );
    assert!(!is_fragmented(3, 160_000, "30000*4kB (UME) 0*16kB 1*32kB (UM) 0*64kB"));
    assert!(!is_fragmented(1, 160_000, small), "two pages were free");
    assert!(!is_fragmented(3, 30_000, small), "memory was exhausted");
    assert!(!is_fragmented(0, 160_000, small));
    assert!(!is_fragmented(-1, 160_000, small));
}

#[test]
fn sysrq_has_order_minus_one() {
    let invoked = "kworker/0:1 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=-1, oom_score_adj=0";
    let report = of(&[invoked, &killed(1)]).unwrap();
    assert_eq!((report.order, report.incomplete), (Some(-1), true));
}

#[test]
fn unlimited_cgroup_has_no_limit() {
    for limit in ["9007199254740988", "9007199254740991", "18014398509481983"] {
        let usage = format!("memory: usage 1024kB, limit {limit}kB, failcnt 0");
        let report = of(&[INVOKED, &usage, "Memory cgroup stats for /a:", "anon 1", &killed(1)]).unwrap();
        assert_eq!((report.usage_bytes, report.limit_bytes), (Some(MIB), None), "{limit}");
    }
}

#[test]
fn block_without_its_begin_or_its_header_is_incomplete() {
    let report =
        of(&[USAGE, "Memory cgroup stats for /a:", "anon 66695168", HEADER, ROW, &killed(7493)]).unwrap();
    assert_eq!(
        (report.anon_bytes, report.process_count, report.incomplete),
        (Some(66_695_168), Some(1), true)
    );
    let report = of(&[ROW, ROW, &killed(7493)]);
    let unknown = OomReport { incomplete: true, ..OomReport::default() };
    assert_eq!(report, Some(unknown), "rows without a header show nothing");
    let mut assembler = ReportAssembler::default();
    let mut push = |text: &str| assembler.push(1, text.as_bytes(), Line::of(text.as_bytes()).as_ref());
    let whole = [INVOKED, USAGE, "Memory cgroup stats for /a:", "anon 5", HEADER, ROW, &killed(7493)];
    assert!(!whole.into_iter().filter_map(&mut push).last().unwrap().incomplete);
    let rest = [ROW, &killed(7493)].into_iter().filter_map(&mut push).last().unwrap();
    assert_eq!(
        (rest.process_count, rest.incomplete),
        (Some(1), true),
        "the header is that of the last table"
    );
}

#[test]
fn block_that_ended_without_a_kill_has_no_report() {
    let skipped =
        "Memory cgroup out of memory: OOM victim 7493 (hog) is already exiting. Skip killing the task";
    assert_eq!(of(&[INVOKED, USAGE, HEADER, ROW, skipped, &killed(7493)]), None);
    let no_victim = "Out of memory and no killable processes...";
    let report = of(&[INVOKED, USAGE, HEADER, ROW, no_victim]).expect("its own report");
    assert_eq!((report.usage_bytes, report.process_count), (Some(64 * MIB), Some(1)));
    assert_eq!(
        of(&[INVOKED, USAGE, HEADER, ROW, no_victim, &killed(7493)]).as_ref(),
        Some(&report),
        "of the OOM, not of the kill"
    );
    let mut assembler = ReportAssembler::default();
    let mut push =
        |usec, text: &str| assembler.push(usec, text.as_bytes(), Line::of(text.as_bytes()).as_ref());
    for text in [INVOKED, USAGE, HEADER, ROW] {
        push(1_000_000, text);
    }
    assert_eq!(push(12_000_000, &killed(7493)), None, "a kill 11 s later");
}

#[test]
fn unknown_lines_in_a_block_change_nothing() {
    let lines = [INVOKED, USAGE, "Memory cgroup stats for /a:", "anon 5", HEADER, ROW];
    let end = killed(7493);
    let whole = of(&[&lines[..], &[&end]].concat());
    let noise = ["eth0: link up", "anon of nothing", "[drm] ready", "usage 5kB", "Mem abort info:", "", "\n"];
    let noisy: Vec<&str> = lines.iter().flat_map(|line| [&[*line][..], &noise].concat()).collect();
    assert_eq!(of(&[&noisy[..], &[&end]].concat()), whole);
}

#[test]
fn memory_of_an_open_block_is_bounded() {
    let mut assembler = ReportAssembler::default();
    let mut push = |text: &str| assembler.push(1, text.as_bytes(), Line::of(text.as_bytes()).as_ref());
    [INVOKED, USAGE, HEADER].into_iter().for_each(|text| drop(push(text)));
    for pid in 1..=20_000 {
        push(&format!("[{pid:7}]     0 {pid:5}    16880 {pid:8}   172032        0             0 hog"));
    }
    let report = push(&killed(20_000)).unwrap();
    assert_eq!((report.process_count, report.processes[0].pid), (Some(20_000), 20_000));
    assert!(report.processes.len() <= 4_096);
}
