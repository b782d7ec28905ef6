//! The kernel log of this machine, with real kills in it, read in both ways.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;

use memledger::clock::Moment;
use memledger::collect::kernel_log::{Entry, KernelLog, Way};
use memledger::collect::oom_counter::OomCounter;
use memledger::host::Roots;
use memledger::parse::kernel_log::{Context, Killed, Line};

use crate::support::cgroups::{TestCgroup, new_id};
use crate::support::docker::{Engine, unique};
use crate::support::python::Python;
use crate::support::{eventually, eventually_true, in_v2_guest, skip};

/// The log opened in both ways; `None`, with the reason said, where it cannot be read.
fn both_ways() -> Option<[KernelLog; 2]> {
    stamped();
    let open = |way| {
        KernelLog::open(&Roots::default(), way)
            .map_err(|error| skip(&format!("the kernel log cannot be read by {way:?}: {error}")))
            .ok()
    };
    Some([open(Way::Device)?, open(Way::Syslog)?])
}

/// User-mode Linux gives the lines of syslog(2) no stamps unless told to. The guest is the tests' own.
fn stamped() {
    if in_v2_guest() {
        std::fs::write("/sys/module/printk/parameters/time", "Y").expect("a setting of the guest's kernel");
    }
}

/// A log and everything that it has given.
struct Reader {
    log: KernelLog,
    entries: Vec<Entry>,
}

impl Reader {
    /// Passes over what is there already.
    fn at_the_end_of(mut log: KernelLog) -> Self {
        log.read().expect("the log is read");
        Self { log, entries: vec![] }
    }

    fn read(&mut self) {
        let seen = self.log.read().expect("the log is read");
        self.entries.extend(seen.entries);
    }

    fn kills(&self, name: &str) -> Vec<Killed> {
        let kill = |entry: &Entry| match &entry.line {
            Line::Killed(killed) if killed.process == name => Some(killed.clone()),
            _ => None,
        };
        self.entries.iter().filter_map(kill).collect()
    }

    fn contexts(&self, pid: u32) -> Vec<Context> {
        let context = |entry: &Entry| match &entry.line {
            Line::Context(context) if context.pid == Some(pid) => Some(context.clone()),
            _ => None,
        };
        self.entries.iter().filter_map(context).collect()
    }
}

/// The last text of the log that holds `part`: `prefix,sequence,...`.
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
            Err(_) => {} // ran over: goes on at the oldest
        }
    }
}

#[test]
fn a_real_kill_of_a_process_with_an_odd_name_is_given_once_by_both_ways() {
    let (Some(engine), Some(logs)) = (Engine::shared(), both_ways()) else { return };
    let mut readers = logs.map(Reader::at_the_end_of);
    let mut counter = OomCounter::open(&Roots::default()).expect("vmstat");
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
    eventually_true("its end", || container.inspect("{{.State.Running}}") == "false");

    let printable = format!("a\\x0a),\\xff\\={number}");
    for reader in &mut readers {
        let way = reader.log.way();
        eventually("the kill's record", || {
            reader.read();
            if reader.kills(&printable).is_empty() { Err(format!("{:?}", reader.entries)) } else { Ok(()) }
        });
        reader.read();
        let kills = reader.kills(&printable);
        assert_eq!(kills.len(), 1, "{way:?}: {kills:?}");
        assert_eq!((kills[0].pid, kills[0].global), (pid, Some(false)), "{way:?}");
        let held = kills[0].anon_bytes.expect("anonymous memory");
        assert!((32 << 20..=64 << 20).contains(&held), "{way:?}: {held}");
        // this line is rate limited: with other tests beside it may be missing, but never wrong
        for context in reader.contexts(pid) {
            assert_eq!(context.task_cgroups.len(), 1, "{way:?}: {context:?}");
            assert!(context.task_cgroups[0].contains(&container.id), "{way:?}: {context:?}");
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
    let now = Moment::now();
    let age = now.unix_seconds() - now.unix_seconds_of_kernel(by_way[0].0);
    assert!((0.0..120.0).contains(&age), "killed {age} s ago");
    assert!(counter.read().expect("a count") > before);
}

#[test]
fn what_user_space_writes_into_the_log_is_no_kill() {
    let Some(logs) = both_ways() else { return };
    let mut readers = logs.map(Reader::at_the_end_of);
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
        assert_eq!(reader.kills(&name), [], "{:?}", reader.log.way());
    }
    assert!(readers[0].log.position().sequence >= Some(sequence), "it was read");
}

#[test]
fn two_readers_see_the_same_and_a_third_goes_on_where_one_stopped() {
    stamped();
    for way in [Way::Device, Way::Syslog] {
        let open = || KernelLog::open(&Roots::default(), way);
        let (mut one, mut two, mut three) = match (open(), open(), open()) {
            (Ok(one), Ok(two), Ok(three)) => (one, two, three),
            (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => {
                skip(&format!("the kernel log cannot be read by {way:?}: {error}"));
                continue;
            }
        };
        assert_eq!(one.fd().is_some(), way == Way::Device);
        let (first, second) = (one.read().expect("read"), two.read().expect("read"));
        let position = one.position();
        // other tests may make new records, and push the oldest ones out, between the two reads
        let from = second.entries.first().map_or(u64::MAX, |entry| entry.position.usec);
        let common: Vec<_> = first.entries.iter().filter(|entry| entry.position.usec > from).collect();
        let same: Vec<_> = second.entries.iter().filter(|entry| entry.position.usec > from).collect();
        assert!(same.starts_with(&common), "{way:?}: {common:?} and {same:?}");
        three.resume_after(position);
        assert_eq!(three.position().usec, position.usec);
        let third = three.read().expect("read");
        assert!(!third.rewound, "{way:?}");
        assert!(third.entries.iter().all(|entry| entry.position.usec >= position.usec), "{way:?}: {third:?}");
    }
}

#[test]
fn the_boot_has_an_id() {
    let id = Roots::default().boot_id().expect("a boot id");
    assert_eq!((id.len(), id.matches('-').count()), (36, 4), "{id}");
}

#[test]
fn a_kill_in_a_cgroup_far_below_its_container_leads_to_the_container() {
    let Some(logs) = both_ways() else { return };
    let mut readers = logs.map(Reader::at_the_end_of);
    // long enough for fragments; then so long that the kernel cuts the path
    for levels in [10, 20] {
        let id = new_id();
        let below = format!("/{}", "a-long-name-of-a-cgroup-".repeat(3)).repeat(levels);
        let path = format!("/memledger-tests/{id}{below}");
        let cgroup = TestCgroup::at(&path[1..], &id);
        cgroup.limit(16 << 20);
        let contexts = eventually("a kill with its path, which the kernel does not always print", || {
            // what runs the tests may be protected from OOM kills, and its children with it
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
                // the guest's clock stands still for 10 ms: by syslog(2) nobody can tell where this record begins
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
