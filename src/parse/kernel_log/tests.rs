use proptest::prelude::*;

use super::records::{KmsgRecord, OomLine, RecordAssembler, SyslogText};
use super::*;

const A: &str = "13739abf5e8e4d06df24f17677521acdff6e99f23a435204a9c314051f22bc48";
const B: &str = "2d632a91d52fc22d2e6c90d0daee99618edc528c5c77ead45b7cc038ffde37b3";
const NUMBERS: &str = "total-vm:67528kB, anon-rss:65024kB, file-rss:600kB, shmem-rss:4kB";
const TAIL: &str = ", UID:1000 pgtables:172kB oom_score_adj:-5";

fn killed(text: impl AsRef<[u8]>) -> Option<Killed> {
    match Line::of(text.as_ref()) {
        Some(Line::Killed(killed)) => Some(killed),
        _ => None,
    }
}

fn context(text: impl AsRef<[u8]>) -> Option<OomContext> {
    match Line::of(text.as_ref()) {
        Some(Line::Context(context)) => Some(context),
        _ => None,
    }
}

/// The kernel's line about a victim, with the raw name.
fn context_text(cpuset: &[u8], limit: &[u8], task: &[u8], name: &[u8], pid: u32) -> Vec<u8> {
    let pid = pid.to_string();
    [
        &b"oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset="[..],
        cpuset,
        b",mems_allowed=0,oom_memcg=",
        limit,
        b",task_memcg=",
        task,
        b",task=",
        name,
        b",pid=",
        pid.as_bytes(),
        b",uid=0",
    ]
    .concat()
}

fn killed_text(name: &[u8], pid: u32) -> Vec<u8> {
    let head = format!("Memory cgroup out of memory: Killed process {pid} (");
    [head.as_bytes(), name, format!(") {NUMBERS}{TAIL}").as_bytes()].concat()
}

/// A record in the format of /dev/kmsg.
fn device(priority: u32, sequence: u64, flag: &str, text: &[u8]) -> Vec<u8> {
    let mut out = format!("{priority},{sequence},{},{flag};", 1_000 + sequence).into_bytes();
    for &byte in text {
        match byte {
            b'\\' | 0..b' ' | 127.. => out.extend(format!("\\x{byte:02x}").bytes()),
            _ => out.push(byte),
        }
    }
    out.push(b'\n');
    out
}

/// A record in the format of syslog(2): with a prefix before each line.
fn syslog(priority: u32, usec: u64, text: &[u8]) -> Vec<u8> {
    let prefix = format!("<{priority}>[{:5}.{:06}] ", usec / 1_000_000, usec % 1_000_000);
    text.split(|&byte| byte == b'\n').flat_map(|line| [prefix.as_bytes(), line, b"\n"].concat()).collect()
}

fn joined(records: &[Vec<u8>]) -> Vec<OomLine> {
    let (mut assembler, mut out) = (RecordAssembler::default(), vec![]);
    for record in records {
        assembler.push(KmsgRecord::of(record).expect("a record"), &mut out);
    }
    assembler.flush(&mut out);
    out
}

fn lines(found: Vec<OomLine>) -> Vec<Line> {
    found.into_iter().map(|found| found.line).collect()
}

#[test]
fn reads_every_form_of_a_kill() {
    let base = Killed {
        pid: 22212,
        process: "hog".into(),
        global: None,
        total_vm_bytes: Some(67528 << 10),
        anon_bytes: Some(65024 << 10),
        file_bytes: Some(600 << 10),
        shmem_bytes: Some(4 << 10),
        uid: None,
        oom_score_adj: None,
    };
    let of = |text: String| killed(&text).unwrap_or_else(|| panic!("{text}"));
    assert_eq!(of(format!("Killed process 22212 (hog) {NUMBERS}")), base, "4.19");
    assert_eq!(of(format!("Killed process 22212 (hog), UID 7, {NUMBERS}")), base, "Red Hat's");
    let limit = Killed { global: Some(false), ..base.clone() };
    assert_eq!(
        of(format!("Memory cgroup out of memory: Killed process 22212 (hog) {NUMBERS}")),
        limit,
        "5.1"
    );
    let whole = Killed { uid: Some(1000), oom_score_adj: Some(-5), ..limit };
    assert_eq!(of(format!("Memory cgroup out of memory: Killed process 22212 (hog) {NUMBERS}{TAIL}")), whole);
    let host = Killed { global: Some(true), ..whole };
    for prefix in ["Out of memory", "Out of memory (oom_kill_allocating_task)"] {
        assert_eq!(of(format!("{prefix}: Killed process 22212 (hog) {NUMBERS}{TAIL}")), host);
    }
    assert_eq!(
        of("Killed process 22212 (hog) total-vm:1kB, anon-rss:65024kB, file-rss:600kB".into()).shmem_bytes,
        None
    );
}

#[test]
fn ignores_other_messages_about_kills() {
    for text in [
        "Memory cgroup out of memory: Kill process 5 (hog)".to_owned(),
        "OOM victim 5 (hog) is already exiting. Skip killing the task".to_owned(),
        "oom_reaper: reaped process 5 (hog), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB".to_owned(),
        format!("x: Killed process 5 (hog) {NUMBERS}"),
        format!("Killed process x (hog) {NUMBERS}"),
        format!("Killed process 99999999999 (hog) {NUMBERS}"),
        "Killed process 5 (hog) total-vm:1kB, anon-rss:".to_owned(),
    ] {
        assert_eq!(Line::of(text.as_bytes()), None, "{text}");
    }
}

#[test]
fn reads_new_oom_and_group_kill() {
    let invoked = b"hog invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0";
    assert_eq!(Line::of(invoked), Some(Line::Invoked));
    let group = format!("Tasks in /docker/{A} are going to be killed due to memory.oom.group set");
    assert_eq!(Line::of(group.as_bytes()), Some(Line::Group { path: format!("/docker/{A}") }));
}

#[test]
fn reads_end_without_a_kill() {
    for message in
        ["Memory cgroup out of memory", "Out of memory", "Out of memory (oom_kill_allocating_task)"]
    {
        let text = format!("{message}: OOM victim 5 (a) is (b) is already exiting. Skip killing the task");
        assert_eq!(Line::of(text.as_bytes()), Some(Line::NoKill(NoKill::AlreadyExiting)), "{text}");
    }
    assert_eq!(Line::of(b"Out of memory and no killable processes..."), Some(Line::NoKill(NoKill::NoVictim)));
    let cut = "Memory cgroup out of memory: OOM victim 5 (a) is already exiting. Skip killing";
    assert_eq!(Line::of(cut.as_bytes()), None);
}

#[test]
fn reads_nodes_to_which_the_request_was_restricted() {
    for (middle, nodes) in [
        ("CPUSET,nodemask=(null),cpuset=train,mems_allowed=0,2-3", "0,2-3"),
        ("CPUSET,nodemask=0-7,cpuset=a,mems_allowed=9,mems_allowed=1", "1"),
        ("CPUSET,nodemask=(null),cpuset=a,mems_allowed=x", ""),
        ("MEMORY_POLICY,nodemask=0,2,cpuset=/,mems_allowed=0-3", "0,2"),
        ("MEMORY_POLICY,nodemask=1", "1"),
        ("NONE,nodemask=(null),cpuset=/,mems_allowed=0-1", ""),
    ] {
        let text =
            format!("oom-kill:constraint=CONSTRAINT_{middle},global_oom,task_memcg=/a,task=b,pid=5,uid=0");
        let context = context(&text).unwrap_or_else(|| panic!("{text}"));
        assert_eq!((context.global, &*context.nodes), (true, nodes), "{text}");
    }
    let limit = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0-1,oom_memcg=/a,task_memcg=/a,task=b,pid=5,uid=0";
    assert_eq!(&*context(limit).unwrap().nodes, "");
}

#[test]
fn reads_cgroup_of_victim_with_and_without_optional_fields() {
    let path = format!("/system.slice/docker-{A}.scope");
    let want = |global, limit: Option<&str>| OomContext {
        global,
        nodes: "".into(),
        task_cgroups: vec![path.clone()],
        oom_cgroup: limit.map(Into::into),
        pid: Some(5),
    };
    let text = |middle: &str| {
        format!("oom-kill:constraint=CONSTRAINT_X,{middle},task_memcg={path},task=a b,pid=5,uid=0")
    };
    for before in
        ["nodemask=(null),cpuset=x,mems_allowed=0-1,", "nodemask=(null),", "", "cpuset=/,mems_allowed=0,"]
    {
        assert_eq!(context(text(&format!("{before}oom_memcg={path}"))), Some(want(false, Some(&path))));
        assert_eq!(
            context(text(&format!("{before}oom_memcg=/system.slice"))),
            Some(want(false, Some("/system.slice")))
        );
        assert_eq!(context(text(&format!("{before}global_oom"))), Some(want(true, None)));
    }
    let without = b"oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task=hog,pid=5,uid=0";
    assert_eq!(context(without), Some(OomContext { global: true, pid: Some(5), ..OomContext::default() }));
    let old = format!("Task in {path}/sub killed as a result of limit of {path}");
    let old = context(old).expect("4.19");
    assert_eq!((old.task_cgroups, old.oom_cgroup), (vec![format!("{path}/sub")], Some(path)));
}

/// Recorded: a shell with the name `a\nb),x=\\` and 0xff exceeded `docker run --memory 64m`; Linux 6.18, cgroup v1.
/// The middle of the block is omitted.
const RECORDED: [&[u8]; 6] = [
    b"4,24709,2618123724,-;a\\x0ab),x=\\x5c\\xff invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0\n",
    b"4,24710,2618123740,-;CPU: 1 UID: 0 PID: 32096 Comm: a\\x0ab),x=\\x5c\\xff Not tainted 6.18.44-fc-v669 #1 PREEMPT(none) \n",
    b"6,24784,2618123953,-;[  32096]     0 32096    16696    16252    15872      380         0   176128        0             0 a\\x0ab),x=\\x5c\\xff\n",
    b"6,24787,2618123964,-;[  32211]     0 32211      567      348        0      348         0    36864        0             0 tr\n",
    b"6,24788,2618123966,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=e5c1f53836e9edd319144328d4c13a4eca264b04203a965381483e5d6726e34d,mems_allowed=0,oom_memcg=/docker/e5c1f53836e9edd319144328d4c13a4eca264b04203a965381483e5d6726e34d,task_memcg=/docker/e5c1f53836e9edd319144328d4c13a4eca264b04203a965381483e5d6726e34d,task=a\\x0ab),x=\\x5c\\xff,pid=32096,uid=0\n",
    b"3,24789,2618123987,-;Memory cgroup out of memory: Killed process 32096 (a\\x0ab),x=\\x5c\\xff) total-vm:66784kB, anon-rss:63488kB, file-rss:1520kB, shmem-rss:0kB, UID:0 pgtables:172kB oom_score_adj:0\n",
];

#[test]
fn reads_recorded_kill_from_kmsg_and_syslog() {
    let records = RECORDED.map(|record| KmsgRecord::of(record).expect("a record"));
    let text: Vec<u8> =
        records.iter().flat_map(|record| syslog(record.priority, record.usec, &record.text)).collect();
    let (by_device, by_syslog) = (joined(&RECORDED.map(<[u8]>::to_vec)), SyslogText::of(&text).found);
    let unnumbered = |found: &OomLine| OomLine { sequence: None, ..found.clone() };
    assert_eq!(by_device.iter().map(unnumbered).collect::<Vec<_>>(), by_syslog);
    let path = "/docker/e5c1f53836e9edd319144328d4c13a4eca264b04203a965381483e5d6726e34d".to_owned();
    let context = OomContext {
        global: false,
        task_cgroups: vec![path.clone()],
        oom_cgroup: Some(path),
        pid: Some(32096),
        nodes: "".into(),
    };
    let killed = Killed {
        pid: 32096,
        process: "a\\x0ab),x=\\\\xff".into(),
        global: Some(false),
        total_vm_bytes: Some(66784 << 10),
        anon_bytes: Some(63488 << 10),
        file_bytes: Some(1520 << 10),
        shmem_bytes: Some(0),
        uid: Some(0),
        oom_score_adj: Some(0),
    };
    assert_eq!(by_device[2].sequence, Some(24789));
    assert_eq!(lines(by_device), [Line::Invoked, Line::Context(context), Line::Killed(killed)]);
}

/// The container id in each possible cgroup of the victim: A, B, or none.
fn containers_of(context: &OomContext) -> Vec<Option<String>> {
    let container =
        |path: &String| crate::parse::container_id::in_path(path).next().map(|found| found.id.to_owned());
    context.task_cgroups.iter().map(container).collect()
}

#[test]
fn cgroup_name_cannot_blame_another_container() {
    let own = format!("/docker/{A}");
    for inner in [
        format!("x,task_memcg=/docker/{B}"),
        format!("x,task_memcg=/docker/{B},task=y,pid=1,uid=0"),
        format!("x,oom_memcg=/docker/{B},task_memcg=/docker/{B},task=y,pid=1,uid=0"),
        format!(",task_memcg=/docker,task_memcg=/docker/{B}"),
        format!("x,global_oom,task_memcg=/docker/{B}"),
        format!("x killed as a result of limit of /docker/{B}"),
        format!("x killed as a result of limit of /docker/{B} killed as a result of limit of /docker"),
    ] {
        let forged = format!("{own}/{inner}");
        for limit in [&own, &forged, &"/docker".to_owned()] {
            let new = context_text(b"x,oom_memcg=", limit.as_bytes(), forged.as_bytes(), b"a,task=b", 5);
            let global = format!(
                "oom-kill:constraint=CONSTRAINT_NONE,cpuset=x,global_oom,task_memcg=,mems_allowed=0,global_oom,task_memcg={forged},task=x,pid=5,uid=0"
            );
            let old = format!("Task in {forged} killed as a result of limit of {limit}");
            for text in [new, global.into_bytes(), old.into_bytes()] {
                let shown = String::from_utf8_lossy(&text).into_owned();
                let context = context(&text).unwrap_or_else(|| panic!("{shown}"));
                assert!(context.task_cgroups.contains(&forged), "{context:?} of {shown}");
                for container in containers_of(&context) {
                    assert_eq!(container.as_deref(), Some(A), "{context:?} of {shown}");
                }
            }
        }
    }
}

#[test]
fn context_longer_than_two_paths_is_not_read() {
    let paths = |count: usize| {
        let paths = ",task_memcg=/a".repeat(count);
        format!("oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/a{paths},task=x,pid=5,uid=0")
    };
    assert!(context(paths(1)).is_some());
    assert!(context(paths(10_000)).is_none(), "its readings would be compared with each other");
}

#[test]
fn truncated_path_still_names_its_container() {
    let long = format!("/docker/{A}{}", "/a-long-name-of-a-cgroup-far-below".repeat(40));
    let cut = &long.as_bytes()[..1023];
    let context_of = |path: &[u8]| context(context_text(b"x", path, path, b"hog", 5)).expect("a context");
    let context = context_of(cut);
    assert_eq!(containers_of(&context), [Some(A.to_owned())]);
    assert!(long.starts_with(&format!("{}/", context.task_cgroups[0])), "whole names only");
    assert_eq!(context.oom_cgroup, None);
    let without_container = format!("/kubepods{}", "/a-long-name".repeat(100));
    assert_eq!(context_of(&without_container.as_bytes()[..1023]).task_cgroups, Vec::<String>::new());
}

#[test]
fn joins_fragments_of_a_record() {
    let path = format!("/docker/{A}{}", "/nested".repeat(90));
    let text = context_text(b"x", path.as_bytes(), path.as_bytes(), b"a\nb", 5);
    let at = [0, 90, 800, 805, text.len()];
    let mut records: Vec<_> = at
        .windows(2)
        .enumerate()
        .map(|(index, at)| {
            let (level, flag) = if index == 0 { (6, "-") } else { (4, "c") };
            device(level, 10 + index as u64, flag, &text[at[0]..at[1]])
        })
        .collect();
    let (mut assembler, mut out) = (RecordAssembler::default(), vec![]);
    for record in &records[..3] {
        assembler.push(KmsgRecord::of(record).expect("a record"), &mut out);
        assembler.flush(&mut out);
        assert_eq!((out.len(), assembler.held_sequence()), (0, Some(10)), "the rest may come later");
    }
    records.insert(2, device(12, 99, "-", b"user space writes in between"));
    records.push(device(3, 14, "-", &killed_text(b"a\nb", 5)));
    let found = joined(&records);
    assert_eq!((found[0].sequence, found[1].sequence), (Some(10), Some(14)));
    let found = lines(found);
    assert_eq!(
        found[0],
        Line::Context(OomContext {
            task_cgroups: vec![path.clone()],
            oom_cgroup: Some(path),
            pid: Some(5),
            ..OomContext::default()
        })
    );
    assert!(matches!(&found[1], Line::Killed(killed) if killed.process == "a\\x0ab"));
}

#[test]
fn missing_fragment_yields_no_line() {
    let path = format!("/docker/{A}");
    let text = context_text(b"x", path.as_bytes(), path.as_bytes(), b"hog", 5);
    let fragments = [
        device(6, 1, "-", &text[..120]),
        device(6, 2, "-", b"another CPU's"),
        device(4, 3, "c", &text[120..]),
    ];
    assert_eq!(joined(&fragments), []);
    assert_eq!(joined(&fragments[2..]), [], "the beginning was overwritten");
    let other = KmsgRecord { caller: Some(b"T1"), ..KmsgRecord::of(&fragments[2]).expect("a record") };
    let (mut assembler, mut out) = (RecordAssembler::default(), vec![]);
    assembler.push(KmsgRecord::of(&fragments[0]).expect("a record"), &mut out);
    assembler.push(other, &mut out);
    assembler.flush(&mut out);
    assert_eq!(out, []);
}

#[test]
fn reads_caller_and_ignores_dictionary() {
    let record =
        KmsgRecord::of(b"6,339,5140900,-,caller=T7;NET: \\x5cx41;b\n SUBSYSTEM=net\n").expect("a record");
    assert_eq!((record.priority, record.sequence, record.usec), (6, 339, 5_140_900));
    assert_eq!((record.caller, record.text.as_slice()), (Some(&b"T7"[..]), &b"NET: \\x41;b"[..]));
    assert!(!record.is_continuation && record.is_kernel());
}

#[test]
fn syslog_and_kmsg_yield_the_same_lines() {
    let path = format!("/docker/{A}");
    let texts = [
        (6, b"[  22212]     0 22212    16882    16406    16256      150         0   176128        0             0 a\nb".to_vec()),
        (6, context_text(b"x", path.as_bytes(), path.as_bytes(), b"x,pid=1,uid=0\nb", 22212)),
        (3, killed_text(b"x\ny,pid=1,uid=0", 22212)),
        (3, killed_text(b"\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n", 22213)),
        (11, killed_text(b"forged", 1)),
        (4, b"a\n invoked oom-killer: gfp_mask=0xcc0".to_vec()),
    ];
    let records: Vec<_> = texts.iter().map(|(level, text)| device(*level, 1, "-", text)).collect();
    // all with one stamp, as on a machine with a coarse clock
    let text: Vec<_> = texts.iter().flat_map(|(level, text)| syslog(*level, 1_001, text)).collect();
    let by_syslog = SyslogText::of(&text);
    let by_device = joined(&records);
    assert_eq!(by_device.len(), 4);
    assert_eq!(lines(by_syslog.found.clone()), lines(by_device));
    assert_eq!((by_syslog.stamps, by_syslog.settled), (Some((1_001, 1_001)), text.len()));
    let with_caller = String::from_utf8(text).expect("text").replace("] ", "][ T1234] ");
    let with_caller = with_caller.replace("[  22212][ T1234]", "[  22212]");
    assert_eq!(lines(SyslogText::of(with_caller.as_bytes()).found), lines(by_syslog.found));
}

#[test]
fn line_feed_in_user_text_cannot_fake_a_kill() {
    let kill = String::from_utf8(killed_text(b"x", 1)).expect("text");
    let forged = format!("overlayfs: unrecognized mount option \"x\n{kill}\n{kill}\" or missing value");
    assert_eq!(SyslogText::of(&syslog(3, 5, forged.as_bytes())).found, []);
    let path = format!("/docker/{B}");
    let forged_context = context_text(b"x", path.as_bytes(), path.as_bytes(), b"x", 1);
    let forged = [b"loop: file x\n", forged_context.as_slice(), b"\n"].concat();
    assert_eq!(SyslogText::of(&syslog(6, 5, &forged)).found, []);
    let stamped = format!("process '\n<3>[    1.000000] {kill}' started with executable stack");
    assert_eq!(SyslogText::of(&syslog(4, 5, stamped.as_bytes())).found, []);
    let genuine = [syslog(3, 5, b"overlayfs: x\ny"), syslog(3, 6, kill.as_bytes())].concat();
    assert_eq!(SyslogText::of(&genuine).found.len(), 1, "a real one after it is not hidden");
}

#[test]
fn skips_truncated_first_line_and_lines_without_stamp() {
    let kill = killed_text(b"x", 1);
    let text = [&b"857491] "[..], &kill, b"\n", &kill, b"\n", &syslog(3, 7, &kill)].concat();
    let of = SyslogText::of(&text);
    assert_eq!((of.found.len(), of.stamps), (1, Some((7, 7))));
    assert_eq!(SyslogText::of(b"").stamps, None);
    assert_eq!(SyslogText::of(&kill).stamps, None);
}

#[test]
fn joins_syslog_fragments_or_waits_for_them() {
    let path = format!("/docker/{A}{}", "/nested".repeat(90));
    let text = context_text(b"x", path.as_bytes(), path.as_bytes(), b"hog", 5);
    let first = [syslog(6, 3, b"other"), syslog(6, 5, &text[..800])].concat();
    let waiting = SyslogText::of(&first);
    assert_eq!((waiting.found.len(), waiting.settled), (0, syslog(6, 3, b"other").len()));
    assert_eq!(waiting.stamps, Some((3, 3)));
    let whole = [first, syslog(4, 5, &text[800..])].concat();
    let found = SyslogText::of(&whole);
    assert_eq!((found.settled, lines(found.found)), (whole.len(), vec![Line::of(&text).expect("a line")]));
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    let bytes = prop_oneof![1u8.., proptest::sample::select(b"\n),=\"\\( []/x1".to_vec())];
    let any = proptest::collection::vec(bytes, 0..16);
    let known = proptest::sample::select(vec![
        ",task=/",
        ",pid=1,uid=0",
        ") total-vm:1kB",
        "\nKilled process",
        "Killed process ",
        "x,pid=1,uid=0\nb",
        "\nOut of memory:",
        "a,task=b,task=c",
    ]);
    prop_oneof![any, known.prop_map(|name| name.as_bytes().to_vec())]
}

fn container_path() -> impl Strategy<Value = String> {
    "(/[a-z]{1,8}){0,3}/docker-[0-9a-f]{64}[.]scope(/[a-z,= ]{1,20}){0,2}"
}

proptest! {
    #[test]
    fn never_panics_on_any_bytes(bytes: Vec<u8>) {
        let (mut assembler, mut out) = (RecordAssembler::default(), vec![]);
        if let Some(record) = KmsgRecord::of(&bytes) {
            assembler.push(record, &mut out);
        }
        assembler.flush(&mut out);
        let _ = (Line::of(&bytes), SyslogText::of(&bytes));
        for head in ["oom-kill:constraint=", "Task in ", "Tasks in ", "Killed process ", "Killed process 1 (", "<3>[", "<3>[ 1.000001]"] {
            let text = [head.as_bytes(), &bytes].concat();
            let _ = (Line::of(&text), SyslogText::of(&text));
        }
    }

    #[test]
    fn reads_any_name_and_path_correctly(name in name(), path in container_path(), pid in 1u32..4_194_304) {
        let context = context_text(b"x", path.as_bytes(), path.as_bytes(), &name, pid);
        let kill = killed_text(&name, pid);
        let by_device = joined(&[device(6, 1, "-", &context), device(3, 2, "-", &kill)]);
        let by_syslog = SyslogText::of(&[syslog(6, 1_001, &context), syslog(3, 1_002, &kill)].concat());
        prop_assert_eq!(by_syslog.settled, syslog(6, 1_001, &context).len() + syslog(3, 1_002, &kill).len());
        for found in [lines(by_device), lines(by_syslog.found)] {
            let [Line::Context(context), Line::Killed(killed)] = found.as_slice() else { panic!("{found:?}") };
            prop_assert!(context.task_cgroups.contains(&path), "{:?}", context);
            prop_assert_eq!(context.pid, Some(pid));
            prop_assert_eq!((killed.pid, &killed.process), (pid, &printable(&name)));
            prop_assert_eq!((killed.anon_bytes, killed.uid, killed.oom_score_adj), (Some(65024 << 10), Some(1000), Some(-5)));
        }
    }

    #[test]
    fn ignores_messages_of_user_space(name in name(), facility in 1u32..24) {
        let kill = killed_text(&name, 5);
        let priority = facility << 3 | 3;
        prop_assert_eq!(joined(&[device(priority, 1, "-", &kill)]), []);
        prop_assert_eq!(SyslogText::of(&syslog(priority, 1, &kill)).found, []);
    }

    #[test]
    fn name_cannot_turn_another_line_into_a_kill(name in name(), level in 0u32..8) {
        let around: [(&[u8], &[u8]); 6] = [
            (b"", b" invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0"),
            (b"", b"[5]: segfault at 0 ip 0 sp 0 error 4 in x[1,2]"),
            (b"Memory cgroup out of memory: Kill process 5 (", b") score 9 or sacrifice child"),
            (b"OOM victim 5 (", b") is already exiting. Skip killing the task"),
            (b"oom_reaper: reaped process 5 (", b"), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB"),
            (b"INFO: task ", b":5 blocked for more than 120 seconds."),
        ];
        for (before, after) in around {
            let text = [before, &name, after].concat();
            let found = [joined(&[device(level, 1, "-", &text)]), SyslogText::of(&syslog(level, 1, &text)).found].concat();
            let is_kill = |found: &OomLine| matches!(found.line, Line::Killed(_) | Line::Context(_));
            prop_assert!(!found.iter().any(is_kill), "{:?}", found);
        }
    }
}
