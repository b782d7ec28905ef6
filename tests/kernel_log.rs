//! The kernel log of this machine, with real kills in it, read with both backends.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;

use memledger::clock::Timestamp;
use memledger::host::HostPaths;
use memledger::ledger::sources::kernel_log::{KernelLog, LogBackend, LogEntry};
use memledger::ledger::sources::vmstat_oom::OomCounter;
use memledger::parse::kernel_log::{Killed, Line, OomContext};

use crate::support::cgroups::{TestCgroup, new_id, parent};
use crate::support::docker::{Engine, unique};
use crate::support::python::Python;
use crate::support::{eventually, eventually_true, in_v2_guest, skip};

/// Opens the log with both backends; returns `None`, and prints the reason, if it cannot be read.
fn open_backends() -> Option<[KernelLog; 2]> {
    enable_stamps();
    let open = |backend| {
        KernelLog::open(&HostPaths::default(), backend)
            .map_err(|error| skip(&format!("the kernel log cannot be read by {backend:?}: {error}")))
            .ok()
    };
    Some([open(LogBackend::Device)?, open(LogBackend::Syslog)?])
}

/// User-mode Linux adds no stamps to the lines of syslog(2) by default. The guest belongs to the tests.
fn enable_stamps() {
    if in_v2_guest() {
        std::fs::write("/sys/module/printk/parameters/time", "Y").expect("a setting of the guest's kernel");
    }
}

/// A log, and the entries read from it.
struct Reader {
    log: KernelLog,
    entries: Vec<LogEntry>,
}

impl Reader {
    /// Skips the existing entries.
    fn at_end(mut log: KernelLog) -> Self {
        log.read().expect("the log is read");
        Self { log, entries: vec![] }
    }

    fn read(&mut self) {
        let seen = self.log.read().expect("the log is read");
        self.entries.extend(seen.entries);
    }

    fn kills(&self, name: &str) -> Vec<Killed> {
        let kill = |entry: &LogEntry| match &entry.line {
            Line::Killed(killed) if killed.process == name => Some(killed.clone()),
            _ => None,
        };
        self.entries.iter().filter_map(kill).collect()
    }

    fn contexts(&self, pid: u32) -> Vec<OomContext> {
        let context = |entry: &LogEntry| match &entry.line {
            Line::Context(context) if context.pid == Some(pid) => Some(context.clone()),
            _ => None,
        };
        self.entries.iter().filter_map(context).collect()
    }
}

/// Returns the last record of the log that contains `part`: `prefix,sequence,...`.
fn record_with(part: &str) -> Option<String> {
    let mut device = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32)
        .open("/dev/kmsg")
        .expect("the device is opened");
    let mut buffer = vec![0; 16 * 1024];
    let mut found = None;
    loop {
        match device.read(&mut buffer) {
            Ok(length) => {
                let record = String::from_utf8_lossy(&buffer[..length]).into_owned();
                found = if record.contains(part) { Some(record) } else { found };
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return found,
            Err(_) => {} // overrun: the next read continues with the oldest record
        }
    }
}

#[test]
fn kill_of_process_with_odd_name_is_read_once_by_both_backends() {
    let (Some(engine), Some(logs)) = (Engine::shared(), open_backends()) else { return };
    let mut readers = logs.map(Reader::at_end);
    let mut counter = OomCounter::open(&HostPaths::default()).expect("vmstat");
    let before = counter.read().expect("a count");
    let number = std::process::id();
    // 15 bytes at most; a pid has up to 7 digits
    let name = format!("a\\n),\\377\\134={number}");
    let program = format!(
        "printf '{name}' > /proc/self/comm; while [ ! -e /go ]; do sleep 0.1; done; \
         x=$(dd if=/dev/zero bs=1M count=200 2>/dev/null | tr '\\000' a); exit 0"
    );
    let container = engine.run(&unique("odd"), &["--memory=64m"], &["sh", "-c", &program]);
    let pid: u32 = container.inspect("{{.State.Pid}}").parse().expect("a pid");
    engine.docker(&["exec", &container.id, "touch", "/go"]);
    eventually_true("its end", || {
        readers.iter_mut().for_each(Reader::read); // at once: kills of other tests overwrite the log
        container.inspect("{{.State.Running}}") == "false"
    });

    let printable = format!("a\\x0a),\\xff\\={number}");
    for reader in &mut readers {
        let backend = reader.log.backend();
        eventually("the kill's record", || {
            reader.read();
            if reader.kills(&printable).is_empty() { Err(format!("{:?}", reader.entries)) } else { Ok(()) }
        });
        reader.read();
        let kills = reader.kills(&printable);
        assert_eq!(kills.len(), 1, "{backend:?}: {kills:?}");
        assert_eq!((kills[0].pid, kills[0].global), (pid, Some(false)), "{backend:?}");
        let anon = kills[0].anon_bytes.expect("anonymous memory");
        assert!((32 << 20..=64 << 20).contains(&anon), "{backend:?}: {anon}");
        // this line is rate limited: with other tests it may be missing, but never wrong
        for context in reader.contexts(pid) {
            assert_eq!(context.task_cgroups.len(), 1, "{backend:?}: {context:?}");
            assert!(context.task_cgroups[0].contains(&container.id), "{backend:?}: {context:?}");
        }
    }
    let by_way = readers.map(|reader| {
        let entry = reader
            .entries
            .iter()
            .find(|entry| entry.text.contains(&printable) && matches!(entry.line, Line::Killed(_)));
        let entry = entry.expect("the kill").clone();
        (entry.position.usec, entry.line, entry.text)
    });
    assert_eq!(by_way[0], by_way[1]);
    let now = Timestamp::now();
    let age = now.unix_seconds() - now.unix_seconds_of_kernel(by_way[0].0);
    assert!((0.0..120.0).contains(&age), "killed {age} s ago");
    assert!(counter.read().expect("a count") > before);
}

#[test]
fn line_written_by_user_space_is_not_a_kill() {
    let Some(logs) = open_backends() else { return };
    let mut readers = logs.map(Reader::at_end);
    let name = unique("forged");
    let text = format!(
        "<3>Memory cgroup out of memory: Killed process 1 ({name}) total-vm:1kB, anon-rss:1kB, file-rss:1kB, shmem-rss:0kB, UID:0 pgtables:1kB oom_score_adj:0\n"
    );
    let written = std::fs::OpenOptions::new()
        .write(true)
        .open("/dev/kmsg")
        .and_then(|mut device| device.write_all(text.as_bytes()));
    if let Err(error) = written {
        return skip(&format!("nothing can be written into the kernel log: {error}"));
    }
    let record = record_with(&name).expect("it is in the log");
    let sequence: u64 = record.split(',').nth(1).expect("a number").parse().expect("a number");
    assert!(record.starts_with("11,"), "facility 1, level 3: {record}");
    for reader in &mut readers {
        reader.read();
        assert_eq!(reader.kills(&name), [], "{:?}", reader.log.backend());
    }
    assert!(readers[0].log.position().sequence >= Some(sequence), "it was read");
}

#[test]
fn two_readers_agree_and_a_third_resumes_where_one_stopped() {
    enable_stamps();
    for backend in [LogBackend::Device, LogBackend::Syslog] {
        let open = || KernelLog::open(&HostPaths::default(), backend);
        let (mut one, mut two, mut three) = match (open(), open(), open()) {
            (Ok(one), Ok(two), Ok(three)) => (one, two, three),
            (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => {
                skip(&format!("the kernel log cannot be read by {backend:?}: {error}"));
                continue;
            }
        };
        assert_eq!(one.fd().is_some(), backend == LogBackend::Device);
        let (first, second) = (one.read().expect("read"), two.read().expect("read"));
        let position = one.position();
        // other tests may add records, and overwrite the oldest ones, between the two reads
        // a report whose begin was overwritten ends with its kill
        let is_kill = |entry: &&LogEntry| matches!(entry.line, Line::Killed(_));
        let from = second.entries.iter().find(is_kill).map_or(u64::MAX, |entry| entry.position.usec);
        let common: Vec<_> = first.entries.iter().filter(|entry| entry.position.usec > from).collect();
        let same: Vec<_> = second.entries.iter().filter(|entry| entry.position.usec > from).collect();
        assert!(same.starts_with(&common), "{backend:?}: {common:?} and {same:?}");
        three.resume_after(position);
        assert_eq!(three.position().usec, position.usec);
        let third = three.read().expect("read");
        assert!(!third.rewound, "{backend:?}");
        assert!(
            third.entries.iter().all(|entry| entry.position.usec >= position.usec),
            "{backend:?}: {third:?}"
        );
    }
}

#[test]
fn boot_has_an_id() {
    let id = HostPaths::default().boot_id().expect("a boot id");
    assert_eq!((id.len(), id.matches('-').count()), (36, 4), "{id}");
}

#[test]
fn kill_in_deeply_nested_cgroup_is_attributed_to_its_container() {
    let Some(logs) = open_backends() else { return };
    let mut readers = logs.map(Reader::at_end);
    // long enough for fragments; then so long that the kernel truncates the path
    for levels in [10, 20] {
        let id = new_id();
        let below = format!("/{}", "a-long-name-of-a-cgroup-".repeat(3)).repeat(levels);
        let path = format!("/{}/{id}{below}", parent());
        let cgroup = TestCgroup::at(&path[1..], &id);
        cgroup.limit(16 << 20);
        let contexts = eventually("a kill with its path, which the kernel does not always print", || {
            // the test runner may be protected from OOM kills, and its children too
            let program = "open('/proc/self/oom_score_adj', 'w').write('500'); x = 'x' * (64 << 20)";
            let mut python = Python::start(&cgroup, program);
            let pid = python.pid();
            eventually_true("its end", || python.has_ended());
            let contexts = readers.each_mut().map(|reader| {
                reader.read();
                reader.contexts(pid).pop()
            });
            match contexts {
                [Some(device), Some(syslog)] => Ok([device, syslog]),
                // the guest's clock stands still for 10 ms: with syslog(2) the beginning of this record is ambiguous
                [Some(device), None] if in_v2_guest() => Ok([device.clone(), device]),
                other => Err(format!("{other:?}")),
            }
        });
        assert_eq!(contexts[0], contexts[1], "both ways");
        let [task] = contexts[0].task_cgroups.as_slice() else { panic!("{contexts:?}") };
        assert!(path.starts_with(task.as_str()) && task.contains(&id), "{task} of {path}");
        assert_eq!(*task == path, levels == 10, "{} of {} bytes are known", task.len(), path.len());
        assert_eq!(contexts[0].oom_cgroup, (levels == 10).then_some(path));
    }
}
