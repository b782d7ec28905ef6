//! Checks every memory metric against known amounts: a real process allocates a known amount of one kind of memory in a
//! real cgroup, and the tests state which series change, by how much, and that all others stay the same.

use std::collections::BTreeMap;

use crate::support::cgroups::{TestCgroup, is_v2, new_id};
use crate::support::python::Python;
use crate::support::{Memledger, Metrics, in_v2_guest};

const MIB: f64 = 1_048_576.0;

/// Maximum difference between a series and the allocated amount.
///
/// The kernel charges 64 pages at a time to each CPU (256 KiB), updates `memory.stat` after 64 changed pages per CPU or
/// 2 s, and counts resident pages in batches of 32 or more per CPU: on two CPUs each of the two readings of a
/// difference may be off by 512 KiB. The interpreter's own objects and the page tables of the allocation are a few
/// hundred KiB.
const TOLERANCE: f64 = 2.0 * MIB;

/// Prelude of every program. `done()` reports the end of a step and waits for the next one; `pin()` keeps a file's pages in
/// the cache.
const PRELUDE: &str = "
import mmap, os, select, sys, tempfile
MIB = 1 << 20
CHUNK = b'x' * MIB
BUFFER = bytearray(CHUNK)
def done(what='done'):
    print(what, flush=True)
    sys.stdin.readline()
def private(size):
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
def touch(area, start, end):
    for at in range(start, end, 4096):
        area[at] = 1
def pin(file):
    area = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    sum(area[at] for at in range(0, len(area), 4096))
    return area
";

/// A process in its own container, and a memledger that shows only this container.
struct Lab {
    memledger: Memledger,
    python: Python,
    cgroup: TestCgroup,
}

impl Lab {
    fn new(program: &str) -> Self {
        Self::within(TestCgroup::container(), program, &[])
    }

    fn within(cgroup: TestCgroup, program: &str, flags: &[&str]) -> Self {
        let mut python = Python::start(&cgroup, &format!("{PRELUDE}{program}"));
        python.line();
        let include = cgroup.include();
        let mut all = vec![include.as_str(), "--docker.socket=", "--podman.socket="];
        all.extend(flags);
        let memledger = Memledger::start(&all);
        Self { memledger, python, cgroup }
    }

    /// Returns one series of the container.
    fn value(&self, metrics: &Metrics, family: &str) -> Option<f64> {
        metrics.get(
            &format!("memledger_container_memory_{family}_bytes"),
            &[("container_name", self.cgroup.name())],
        )
    }

    /// Returns all memory values of the container, and those of the host that nothing else changes.
    fn values(&self, metrics: &Metrics) -> Result<BTreeMap<String, f64>, String> {
        let name = ("container_name", self.cgroup.name());
        let mut values = BTreeMap::new();
        for family in ["usage", "working_set", "rss", "unreclaimable"] {
            let value = metrics.try_value(&format!("memledger_container_memory_{family}_bytes"), &[name])?;
            values.insert(family.to_owned(), value);
        }
        for component in ["anon", "file", "shmem", "kernel"] {
            let labels = [name, ("component", component)];
            let value = metrics.try_value("memledger_container_memory_component_bytes", &labels)?;
            values.insert(component.to_owned(), value);
        }
        let resident = metrics.sum("memledger_container_process_rss_bytes", &[name]);
        values.insert("process_rss".to_owned(), resident);
        let host =
            metrics.try_value("memledger_host_memory_component_bytes", &[("component", "containers")])?;
        values.insert("host:containers".to_owned(), host);
        Ok(values)
    }

    /// Returns the values while the process is idle: two equal readings more than the kernel's 2 s apart.
    fn idle_values(&self) -> BTreeMap<String, f64> {
        let mut held: Option<(f64, BTreeMap<String, f64>)> = None;
        self.memledger.eventually("values that stay the same for 2 s", |metrics| {
            let now = metrics.try_value("memledger_snapshot_timestamp_seconds", &[])?;
            let values = self.values(metrics)?;
            match &held {
                Some((since, before)) if *before == values => {
                    if now - since > 2.5 {
                        return Ok(values);
                    }
                }
                _ => held = Some((now, values)),
            }
            Err("values are changing".to_owned())
        })
    }

    /// Waits until the named values have changed by the given MiB since `before`, and no other value has changed.
    fn wait_for_change(&self, what: &str, before: &BTreeMap<String, f64>, by: &[(&str, f64)]) {
        for (name, _) in by {
            assert!(before.contains_key(*name), "{name} is not one of the values");
        }
        self.memledger.eventually(what, |metrics| {
            let after = self.values(metrics)?;
            let wrong = before.iter().filter_map(|(name, before)| {
                let expected = by.iter().find(|(change, _)| change == name).map_or(0.0, |(_, mib)| mib * MIB);
                let change = after[name] - before;
                let near = (change - expected).abs() <= TOLERANCE;
                (!near).then(|| format!("{name} {:+.1} not {:+.1} MiB", change / MIB, expected / MIB))
            });
            let wrong: Vec<_> = wrong.collect();
            if wrong.is_empty() { Ok(()) } else { Err(wrong.join(", ")) }
        });
    }
}

/// The same amount for several values.
fn each<'a>(names: &[&'a str], mib: f64) -> Vec<(&'a str, f64)> {
    names.iter().map(|name| (*name, mib)).collect()
}

#[test]
fn anonymous_memory_changes_only_anonymous_values() {
    let mut lab = Lab::new(
        "
done('ready')
area = private(64 * MIB)
touch(area, 0, 64 * MIB)
done()
area.close()
done()
",
    );
    let before = lab.idle_values();
    lab.python.step();
    let changes = ["usage", "working_set", "rss", "anon", "unreclaimable", "process_rss", "host:containers"];
    lab.wait_for_change("64 MiB of anonymous memory", &before, &each(&changes, 64.0));
    lab.python.step();
    lab.wait_for_change("freeing it", &before, &[]);
}

#[test]
fn shared_memory_counts_once_as_shmem() {
    let mut lab = Lab::new(
        "
done('ready')
with tempfile.TemporaryFile(dir='/dev/shm', buffering=0) as file:
    for _ in range(48):
        file.write(CHUNK)
    done()
    area = mmap.mmap(file.fileno(), 48 * MIB)
    touch(area, 0, 48 * MIB)
    done()
    area.close()
memory = os.memfd_create('known')
os.ftruncate(memory, 256 * MIB)
for _ in range(24):
    os.write(memory, CHUNK)
done()
",
    );
    let changes = ["usage", "working_set", "shmem", "unreclaimable", "host:containers"];
    let before = lab.idle_values();
    lab.python.step();
    lab.wait_for_change("48 MiB written to /dev/shm", &before, &each(&changes, 48.0));
    let used = lab.memledger.fresh_metrics().value("memledger_host_shm_used_bytes", &[]);
    assert!(used >= 48.0 * MIB, "the host's /dev/shm has at least this: {used}");
    let size = lab.memledger.fresh_metrics().value("memledger_host_shm_size_bytes", &[]);
    assert!(size >= used, "{size}");
    lab.python.step();
    let mut mapped = each(&changes, 48.0);
    mapped.push(("process_rss", 48.0));
    lab.wait_for_change("mapping them: resident, and not charged again", &before, &mapped);
    lab.python.step();
    lab.wait_for_change(
        "24 MiB of a memfd; its size of 256 MiB is no memory",
        &before,
        &each(&changes, 24.0),
    );
}

#[test]
fn file_cache_is_usage_but_not_unreclaimable() {
    // /var/tmp, because /tmp may be a tmpfs, whose files are shared memory. Pages that were written once as a whole are
    // inactive: they are usage and not working set; after another read they are active and are both. Clean pages that no
    // process maps may be dropped at any time by something on the machine, so the program maps them
    let mut lab = Lab::new(
        "
done('ready')
with tempfile.TemporaryFile(dir='/var/tmp', buffering=0) as file:
    for _ in range(64):
        file.write(CHUNK)
    pinned = pin(file)
    os.fsync(file.fileno())
    done()
    for _ in range(3):
        file.seek(0)
        while file.readinto(BUFFER):
            pass
    done()
    pinned.close()
done()
",
    );
    // ext4 keeps a buffer head of 104 bytes and 8 of accounting for each folio: 2.4 MiB of kernel memory in all where a
    // fragmented machine gives folios of one page, next to nothing where folios are large. The middle is expected. They are
    // reclaimable slab, which v1 does not separate
    let heads = 1.2;
    let mut changes = vec![("file", 64.0), ("process_rss", 64.0), ("usage", 64.0 + heads), ("kernel", heads)];
    if !is_v2() {
        changes.push(("unreclaimable", heads));
    }
    let before = lab.idle_values();
    lab.python.step();
    changes.push(("working_set", heads));
    lab.wait_for_change("a file of 64 MiB", &before, &changes);
    lab.python.step();
    changes.pop();
    changes.push(("working_set", 64.0 + heads));
    lab.wait_for_change("reading it", &before, &changes);
    lab.python.step();
    lab.wait_for_change("deleting it", &before, &[]);
}

#[test]
fn dentries_are_kernel_memory_and_reclaimable_on_v2_only() {
    let mut lab = Lab::new(
        "
folder = tempfile.mkdtemp(dir='/var/tmp')
def look():
    for number in range(60_000):
        try:
            os.stat(f'{folder}/{number}')
        except FileNotFoundError:
            pass
done('ready')
look()
print('done', flush=True)
while not select.select([sys.stdin], [], [], 0.1)[0]:
    look()  # the kernel may drop unused ones at any time
sys.stdin.readline()
os.rmdir(folder)
done()
",
    );
    let before = lab.idle_values();
    lab.python.step();
    // a dentry is 192 bytes on a 64-bit kernel, its accounting 8 more
    let expected = 60_000.0 * 200.0 / MIB;
    let mut changes = each(&["usage", "working_set", "kernel"], expected);
    if !is_v2() {
        changes.push(("unreclaimable", expected));
    }
    lab.wait_for_change("60,000 negative dentries", &before, &changes);
    let (_, text) = lab.memledger.get("/metrics");
    let help = "# HELP memledger_container_memory_unreclaimable_bytes ";
    let help = text.lines().find(|line| line.starts_with(help)).expect("a help line");
    assert!(help.contains("cgroup v1 includes reclaimable slab"), "{help}");
}

#[test]
fn counts_processes_of_threaded_cgroup_below_container() {
    if !is_v2() {
        return; // v1 has no threaded cgroups: this is for the guest
    }
    let cgroup = TestCgroup::container();
    let threads = cgroup.path.join("threads");
    let program = format!(
        "
def write(file, text):
    with open('{}/' + file, 'w') as opened:
        opened.write(text)
os.mkdir('{}')
write('threads/cgroup.type', 'threaded')
write('threads/cgroup.threads', str(os.getpid()))
done('ready')
write('cgroup.threads', str(os.getpid()))
os.rmdir('{}')
done()
",
        cgroup.path.display(),
        threads.display(),
        threads.display()
    );
    let mut lab = Lab::within(cgroup, &program, &[]);
    let read = std::fs::read(threads.join("cgroup.procs"));
    assert_eq!(read.unwrap_err().raw_os_error(), Some(95), "EOPNOTSUPP");
    lab.memledger.eventually("its process", |metrics| {
        let name = ("container_name", lab.cgroup.name());
        metrics.try_value("memledger_container_processes", &[name, ("role", "other")]).map(drop)?;
        let count = metrics.sum("memledger_container_processes", &[name]);
        if count == 1.0 { Ok(()) } else { Err(format!("{count} processes")) }
    });
    lab.python.step();
}

#[test]
fn page_tables_are_unreclaimable_kernel_memory() {
    // reading a page that was never written maps the kernel's zero page: it costs only page tables, one of 4 KiB for
    // every 2 MiB of addresses
    let mut lab = Lab::new(
        "
MAP_NORESERVE = 0x4000
done('ready')
area = mmap.mmap(-1, 8192 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
for at in range(0, 8192 * MIB, 2 * MIB):
    area[at]
done()
area.close()
done()
",
    );
    let before = lab.idle_values();
    lab.python.step();
    let changes = ["usage", "working_set", "kernel", "unreclaimable"];
    lab.wait_for_change("4,096 page tables", &before, &each(&changes, 16.0));
    lab.python.step();
    lab.wait_for_change("unmapping", &before, &[]);
}

#[test]
fn forked_pages_count_in_every_rss_and_once_in_pss() {
    let mut lab = Lab::within(
        TestCgroup::container(),
        "
area = private(64 * MIB)
touch(area, 0, 64 * MIB)
done('ready')
orders, replies = [], []
for _ in range(4):
    (order_in, order), (reply, reply_out) = os.pipe(), os.pipe()
    if os.fork() == 0:
        while True:
            os.read(order_in, 1)
            touch(area, 0, 32 * MIB)
            os.write(reply_out, b'x')
    orders.append(order)
    replies.append(reply)
done()
os.write(orders[0], b'x')
os.read(replies[0], 1)
done()
",
        &["--pss.interval=1s"],
    );
    let name = lab.cgroup.name().to_owned();
    let of = |metrics: &Metrics, family: &str, role: &str| {
        let labels = [("container_name", name.as_str()), ("role", role)];
        metrics
            .try_value(&format!("memledger_container_process_{family}_bytes"), &labels)
            .map(|bytes| bytes / MIB)
    };
    let both = |metrics: &Metrics, family: &str| {
        Ok::<_, String>((of(metrics, family, "trainer")?, of(metrics, family, "worker")?))
    };
    // the interpreter itself: the fork shares its pages just like the 64 MiB
    let own = lab.memledger.eventually("a share before the fork", |metrics| {
        let share = of(metrics, "pss", "other")?;
        if share > 64.0 { Ok(share - 64.0) } else { Err(format!("{share}")) }
    });
    assert!((0.0..24.0).contains(&own), "an interpreter of {own} MiB");
    // its program and libraries, whose shares change with the interpreters that other tests run
    let status = std::fs::read_to_string(format!("/proc/{}/status", lab.python.pid())).expect("it runs");
    let program = status.lines().find_map(|line| line.strip_prefix("RssFile:")).expect("its file pages");
    let program = program.trim().trim_end_matches(" kB").parse::<f64>().expect("a number") / 1024.0;
    assert!(program < 20.0, "less than what is measured: {program} MiB");
    let before = lab.idle_values();

    lab.python.step();
    lab.memledger.eventually("five times resident, once a share", |metrics| {
        let ((rss, workers_rss), (pss, workers_pss)) = (both(metrics, "rss")?, both(metrics, "pss")?);
        // forks map their parent's anonymous pages, and those file pages that they use
        let resident = workers_rss >= 4.0 * 64.0 && workers_rss <= 4.0 * (rss + 2.0);
        // what five processes touch after a fork becomes their own: up to 2 MiB each
        let shared = (pss + workers_pss - 64.0 - own).abs() < 10.0 + program
            && (workers_pss / 4.0 - pss).abs() < 2.0 + own;
        let right = resident && shared && rss >= 64.0;
        right
            .then_some(())
            .ok_or_else(|| format!("rss {rss} {workers_rss}, pss {pss} {workers_pss}, own {own}"))
    });

    lab.python.step();
    lab.memledger.eventually("the share of 32 MiB that one child has written", |metrics| {
        let ((rss, workers_rss), (pss, workers_pss)) = (both(metrics, "rss")?, both(metrics, "pss")?);
        let anon = lab.values(metrics)?["anon"] - before["anon"];
        let resident = workers_rss >= 4.0 * 64.0 && workers_rss <= 4.0 * (rss + 2.0);
        let shared = (pss + workers_pss - 96.0 - own).abs() < 10.0 + program;
        // charged to the cgroup: the 32 MiB, and the pages of the interpreter that the five have written
        let charged = (30.0..42.0).contains(&(anon / MIB));
        let right = resident && shared && charged;
        right.then_some(()).ok_or_else(|| format!("rss {workers_rss}, pss {pss} {workers_pss}, anon {anon}"))
    });
}

/// A process that maps the same 128 MiB 22 times: its resident memory is 2.8 GiB, so it would wait long for a walk.
#[test]
fn largest_process_has_the_share_that_others_leave() {
    if in_v2_guest() {
        // each run of adjacent pages of such a process is a mapping of a process of this host, which may have 65,530
        eprintln!("SKIPPED: in the guest a process cannot map 2.8 GiB once its memory is fragmented");
        return;
    }
    let program = "
import mmap
memory = os.memfd_create('shared')
os.ftruncate(memory, 128 * MIB)
flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
maps = [mmap.mmap(memory, 128 * MIB, flags=flags) for _ in range(22)]
if os.fork() == 0:
    worker = private(64 * MIB)
    touch(worker, 0, 64 * MIB)
    done('ready')
    os.read(0, 1)
    os._exit(0)
os.wait()
";
    let lab = Lab::within(TestCgroup::container(), program, &["--pss.interval=1s"]);
    let name = ("container_name", lab.cgroup.name());
    lab.memledger.eventually("shares that add up to the memory of the container", |metrics| {
        let share =
            |role| metrics.try_value("memledger_container_process_pss_bytes", &[name, ("role", role)]);
        let shares = share("trainer")? + share("worker")? + share("other")?;
        let resident = metrics.sum("memledger_container_process_rss_bytes", &[name]);
        let part = |v1, v2| lab.cgroup.stat(v1, v2).map(|bytes| bytes as f64).ok_or("no stat");
        let charged = part("total_rss", "anon")? + part("total_mapped_file", "file_mapped")?;
        let (parent, worker) = (share("trainer")? / MIB, share("worker")? / MIB);
        // pages of Python and its libraries count in the worker's walk also where another cgroup is charged for them
        let elsewhere = worker - 64.0;
        let is_right = resident > 22.0 * 128.0 * MIB
            && shares == charged
            && (64.0..84.0).contains(&worker)
            && (128.0 - elsewhere..148.0).contains(&parent);
        is_right.then_some(()).ok_or_else(|| {
            format!(
                "shares {shares}, charged {charged}, resident {resident}, parent {parent}, worker {worker}"
            )
        })
    });
}

#[test]
fn pss_is_not_measured_near_the_memory_limit() {
    let program = "
area = private(256 * MIB)
touch(area, 0, 256 * MIB)
done('ready')
";
    let lab = Lab::within(TestCgroup::container(), program, &["--pss.interval=1s"]);
    let unlimited = Lab::new("done('ready')");
    let share = |metrics: &Metrics, lab: &Lab| {
        let labels = [("container_name", lab.cgroup.name()), ("role", "other")];
        metrics.try_value("memledger_container_process_pss_bytes", &labels)
    };
    lab.memledger.eventually("a share with enough headroom", |metrics| share(metrics, &lab).map(drop));
    let held = lab.idle_values()["unreclaimable"] as u64;
    lab.cgroup.limit(held + held / 64);
    // this memledger has no earlier share
    let include = format!("--container.include=^({}|{})$", lab.cgroup.name(), unlimited.cgroup.name());
    let memledger =
        Memledger::start(&[&include, "--pss.interval=1s", "--docker.socket=", "--podman.socket="]);
    memledger
        .eventually("a share of the unlimited container", |metrics| share(metrics, &unlimited).map(drop));
    for _ in 0..2 {
        assert!(share(&memledger.fresh_metrics(), &lab).is_err(), "measured at its limit");
    }
    assert!(share(&lab.memledger.fresh_metrics(), &lab).is_ok(), "the earlier measurement is kept");
    lab.cgroup.limit(1 << 30);
    memledger.eventually("a share with enough headroom again", |metrics| share(metrics, &lab).map(drop));
}

#[test]
fn unlimited_container_has_no_limit_series() {
    let lab = Lab::new("done('ready')");
    let metrics = lab.memledger.metrics();
    for family in ["limit", "effective_limit", "headroom"] {
        assert_eq!(lab.value(&metrics, family), None, "{family}");
    }
    assert!(lab.value(&metrics, "unreclaimable").is_some());
}

#[test]
fn own_limit_sets_limit_effective_limit_and_headroom() {
    let cgroup = TestCgroup::container();
    cgroup.limit(256 << 20);
    let mut lab =
        Lab::within(cgroup, "done('ready'); area = private(64 * MIB); touch(area, 0, 64 * MIB); done()", &[]);
    let headroom = |metrics: &Metrics| lab.value(metrics, "headroom").expect("headroom");
    let before = lab.memledger.metrics();
    assert_eq!(lab.value(&before, "limit"), Some(256.0 * MIB));
    assert_eq!(lab.value(&before, "effective_limit"), Some(256.0 * MIB));
    let unreclaimable = lab.value(&before, "unreclaimable").expect("unreclaimable");
    assert_eq!(headroom(&before), 256.0 * MIB - unreclaimable);
    let before = headroom(&before);
    lab.python.step();
    lab.memledger.eventually("64 MiB less headroom", |metrics| {
        let taken = before - lab.value(metrics, "headroom").ok_or("no headroom")?;
        ((taken - 64.0 * MIB).abs() <= TOLERANCE).then_some(()).ok_or_else(|| format!("{taken}"))
    });
    // the limit is raised, then removed
    lab.cgroup.limit(512 << 20);
    lab.memledger.eventually("the new limit", |metrics| {
        let limit = lab.value(metrics, "limit");
        (limit == Some(512.0 * MIB)).then_some(()).ok_or_else(|| format!("{limit:?}"))
    });
    let (file, unlimited) = if is_v2() { ("memory.max", "max") } else { ("memory.limit_in_bytes", "-1") };
    std::fs::write(lab.cgroup.path.join(file), unlimited).expect("no limit");
    lab.memledger.eventually("no limit", |metrics| match lab.value(metrics, "limit") {
        None if lab.value(metrics, "headroom").is_none() => Ok(()),
        limit => Err(format!("{limit:?}")),
    });
}

#[test]
fn lower_parent_limit_is_effective_and_sibling_reduces_headroom() {
    // 12 digits: with all 64 the parent would be taken for a container
    let parent_id = new_id()[..12].to_owned();
    let parent_path = format!("{}/parent-{parent_id}", crate::support::cgroups::parent());
    let parent = TestCgroup::at(&parent_path, &parent_id);
    let (id, sibling_id) = (new_id(), new_id());
    let cgroup = TestCgroup::at(&format!("{parent_path}/{id}"), &id);
    let sibling = TestCgroup::at(&format!("{parent_path}/{sibling_id}"), &sibling_id);
    parent.limit(192 << 20);
    cgroup.limit(256 << 20);
    let hold = |mib: u32| {
        format!("{PRELUDE}area = private({mib} * MIB); touch(area, 0, {mib} * MIB); done('ready')")
    };
    let mut neighbour = Python::start(&sibling, &hold(96));
    neighbour.line();
    let lab = Lab::within(cgroup, "area = private(32 * MIB); touch(area, 0, 32 * MIB); done('ready')", &[]);

    lab.memledger.eventually("the parent's limit and headroom", |metrics| {
        let value = |family| lab.value(metrics, family).ok_or_else(|| format!("no {family}"));
        assert_eq!(value("limit")?, 256.0 * MIB, "its own limit stays its own");
        assert_eq!(value("effective_limit")?, 192.0 * MIB);
        // 96 MiB of the sibling, 32 of its own, and two interpreters with their kernel memory: 5 to 20 MiB each,
        // depending on how much of the interpreter is file cache
        let headroom = value("headroom")?;
        let right = (24.0 * MIB..=64.0 * MIB).contains(&headroom);
        right.then_some(()).ok_or_else(|| format!("headroom {:.1} MiB", headroom / MIB))
    });
    // the parent's own files, read directly; the stat files lag by up to 2 s
    lab.memledger.eventually("the parent's limit less what is unreclaimable_bytes there", |metrics| {
        let headroom = lab.value(metrics, "headroom").ok_or("none")?;
        let expected = 192.0 * MIB - unreclaimable_bytes(&parent);
        (headroom == expected).then_some(()).ok_or_else(|| format!("{headroom} not {expected}"))
    });

    // its own limit is now the lower one; the sibling still bounds the headroom
    lab.cgroup.limit(160 << 20);
    lab.memledger.eventually("its own limit, the parent's headroom", |metrics| {
        let limit = lab.value(metrics, "effective_limit").ok_or("no limit")?;
        let headroom = lab.value(metrics, "headroom").ok_or("no headroom")?;
        let right = limit == 160.0 * MIB && headroom == 192.0 * MIB - unreclaimable_bytes(&parent);
        right.then_some(()).ok_or_else(|| format!("limit {limit}, headroom {headroom}"))
    });

    // without the sibling, the parent has more headroom than its own limit leaves
    drop(neighbour);
    drop(sibling);
    lab.memledger.eventually("its own headroom", |metrics| {
        let headroom = lab.value(metrics, "headroom").ok_or("no headroom")?;
        let expected = 160.0 * MIB - lab.value(metrics, "unreclaimable").ok_or("none")?;
        (headroom == expected).then_some(()).ok_or_else(|| format!("{headroom} not {expected}"))
    });
}

/// Returns the unreclaimable memory of a cgroup, summed from its files.
fn unreclaimable_bytes(cgroup: &TestCgroup) -> f64 {
    let stat = |v1, v2| cgroup.stat(v1, v2).unwrap_or_else(|| panic!("no {v2}"));
    let shared = stat("total_rss", "anon") + stat("total_shmem", "shmem");
    let kernel = if is_v2() {
        stat("", "kernel") - stat("", "slab_reclaimable") + stat("", "sock")
    } else {
        cgroup.number("memory.kmem.usage_in_bytes", "")
    };
    (shared + kernel) as f64
}

/// Holds memory of every kind.
const MIXTURE: &str = "
area = private(24 * MIB)
touch(area, 0, 24 * MIB)
shared = os.memfd_create('shared')
for _ in range(12):
    os.write(shared, CHUNK)
file = tempfile.TemporaryFile(dir='/var/tmp', buffering=0)
for _ in range(36):
    file.write(CHUNK)
pinned = pin(file)
os.fsync(file.fileno())
done('ready')
";

#[test]
fn components_sum_to_usage_and_host_memory() {
    let lab = Lab::new(MIXTURE);
    let mut seen = std::collections::BTreeSet::new();
    // in each of twenty cycles
    lab.memledger.eventually("twenty cycles", |metrics| {
        let name = ("container_name", lab.cgroup.name());
        let usage = metrics.value("memledger_container_memory_usage_bytes", &[name]);
        let parts = metrics.all("memledger_container_memory_component_bytes", &[name]);
        assert_eq!(parts.len(), 5, "anon, file, shmem, kernel and other");
        assert!(parts.iter().all(|(_, _, bytes)| *bytes >= 0.0), "{parts:?}");
        let sum: f64 = parts.iter().map(|(_, _, bytes)| bytes).sum();
        // `other` is the rest and completes the sum; it is 0 only if the components exceed the usage, by the lag of the
        // files and, on v1, by what a CPU has charged in advance
        assert!((sum - usage).abs() <= TOLERANCE, "{sum} of {usage}");
        let total = metrics.value("memledger_host_memory_total_bytes", &[]);
        let parts = metrics.all("memledger_host_memory_component_bytes", &[]);
        assert_eq!(parts.len(), 8);
        assert!(parts.iter().all(|(_, _, bytes)| *bytes >= 0.0), "{parts:?}");
        let sum: f64 = parts.iter().map(|(_, _, bytes)| bytes).sum();
        assert_eq!(sum, total, "{parts:?}");
        seen.insert(metrics.value("memledger_snapshot_timestamp_seconds", &[]).to_bits());
        if seen.len() >= 20 { Ok(()) } else { Err(format!("{} cycles", seen.len())) }
    });
    // while the process is idle, the container's sum is exact too
    lab.memledger.eventually("an exact sum", |metrics| {
        let name = ("container_name", lab.cgroup.name());
        let usage = metrics.try_value("memledger_container_memory_usage_bytes", &[name])?;
        let sum = metrics.sum("memledger_container_memory_component_bytes", &[name]);
        (sum == usage).then_some(()).ok_or_else(|| format!("{sum} of {usage}"))
    });
    let errors = lab.memledger.metrics().sum("memledger_collector_read_errors_total", &[]);
    assert_eq!(errors, 0.0);
}

#[test]
fn values_equal_those_of_kernel_files() {
    let lab = Lab::new(MIXTURE);
    lab.cgroup.limit(1 << 30);
    let cgroup = &lab.cgroup;
    let read = |v1: &str, v2: &str| Some(cgroup.number(v1, v2) as f64);
    let stat = |v1: &str, v2: &str| cgroup.stat(v1, v2).map(|bytes| bytes as f64);
    // the process is idle, so the files and the newest snapshot agree to the byte once the kernel has updated its
    // counters, which takes up to 2 s
    lab.memledger.eventually("the kernel's numbers", |metrics| {
        let component = |component| {
            let labels = [("container_name", cgroup.name()), ("component", component)];
            metrics.get("memledger_container_memory_component_bytes", &labels)
        };
        let usage = read("memory.usage_in_bytes", "memory.current");
        let shmem = stat("total_shmem", "shmem");
        let cache = stat("total_cache", "file").zip(shmem).map(|(cache, shmem)| cache - shmem);
        let inactive = stat("total_inactive_file", "inactive_file");
        let kernel = if is_v2() { stat("", "kernel") } else { read("memory.kmem.usage_in_bytes", "") };
        let pairs = [
            ("usage", lab.value(metrics, "usage"), usage),
            ("limit", lab.value(metrics, "limit"), read("memory.limit_in_bytes", "memory.max")),
            ("peak", lab.value(metrics, "peak"), read("memory.max_usage_in_bytes", "memory.peak")),
            ("working_set", lab.value(metrics, "working_set"), usage.zip(inactive).map(|(a, b)| a - b)),
            ("rss", lab.value(metrics, "rss"), stat("total_rss", "anon")),
            ("anon", component("anon"), stat("total_rss", "anon")),
            ("shmem", component("shmem"), shmem),
            ("file", component("file"), cache),
            ("kernel", component("kernel"), kernel),
            ("unreclaimable", lab.value(metrics, "unreclaimable"), Some(unreclaimable_bytes(cgroup))),
            ("swap", lab.value(metrics, "swap"), swap(cgroup)),
        ];
        let wrong: Vec<_> = pairs.iter().filter(|(_, shown, expected)| shown != expected).collect();
        if wrong.is_empty() { Ok(()) } else { Err(format!("{wrong:?}")) }
    });
    // the values are not all zero
    let values = lab.idle_values();
    for (name, mib) in [("anon", 24.0), ("shmem", 12.0), ("file", 36.0)] {
        let held = values[name];
        assert!(held >= mib * MIB - TOLERANCE && held <= (mib + 24.0) * MIB, "{name}: {held}");
    }
}

/// Returns the swap usage from the kernel's files, or `None` on a kernel without swap accounting.
fn swap(cgroup: &TestCgroup) -> Option<f64> {
    let bytes = if is_v2() {
        cgroup.text("memory.swap.current").map(|text| text.trim().parse().expect("a number"))
    } else {
        cgroup.stat("total_swap", "")
    };
    bytes.map(|bytes: u64| bytes as f64)
}

#[test]
fn swap_and_pressure_appear_only_where_the_kernel_has_them() {
    let lab = Lab::new("done('ready')");
    let metrics = lab.memledger.fresh_metrics();
    // nothing is swapped out here, so the value is 0 or absent
    assert_eq!(lab.value(&metrics, "swap"), swap(&lab.cgroup));
    let name = ("container_name", lab.cgroup.name());
    // v1 has no such file; a kernel without PSI has none, or one that cannot be read
    let container_has = is_v2() && lab.cgroup.text("memory.pressure").is_some();
    let host_has = std::fs::read_to_string("/proc/pressure/memory").is_ok();
    for state in ["waiting", "stalled"] {
        let family = |of: &str| format!("memledger_{of}_memory_pressure_{state}_seconds_total");
        assert_eq!(metrics.get(&family("container"), &[name]).is_some(), container_has, "{state}");
        assert_eq!(metrics.get(&family("host"), &[]).is_some(), host_has, "{state}");
    }
    assert_eq!(
        metrics.sum("memledger_collector_read_errors_total", &[]),
        0.0,
        "a missing file is not an error"
    );
}

#[test]
fn peaks_remain_after_memory_is_freed_and_container_ends() {
    let mut lab = Lab::new(
        "
done('ready')
area = private(64 * MIB)
touch(area, 0, 64 * MIB)
done()
area.close()
done()
",
    );
    let before = lab.idle_values();
    let unreclaimable = before["unreclaimable"];
    lab.python.step();
    lab.memledger.eventually("a peak of 64 MiB more", |metrics| {
        let peak = lab.value(metrics, "unreclaimable_peak").ok_or("no peak")? - unreclaimable;
        ((peak - 64.0 * MIB).abs() <= TOLERANCE).then_some(()).ok_or_else(|| format!("{peak}"))
    });
    lab.idle_values(); // includes counts that the kernel updates late
    let metrics = lab.memledger.metrics();
    let peaks = |lab: &Lab, metrics: &Metrics| {
        ["unreclaimable_peak", "peak"].map(|family| lab.value(metrics, family).expect("a peak"))
    };
    let held = peaks(&lab, &metrics);
    lab.python.step();
    lab.wait_for_change("freeing it", &before, &[]);
    let metrics = lab.memledger.metrics();
    // the process may have used a little more before it freed the memory; from then on usage stays far below
    let kept = peaks(&lab, &metrics);
    for (held, kept) in std::iter::zip(held, kept) {
        assert!((held..=held + TOLERANCE).contains(&kept), "{kept} after {held}");
    }
    let expected = lab.cgroup.number("memory.max_usage_in_bytes", "memory.peak") as f64;
    assert_eq!(kept[1], expected, "the kernel's own peak");
    assert!(expected >= before["usage"] + 64.0 * MIB - TOLERANCE, "{expected}");

    let Lab { memledger, python, cgroup } = lab;
    let name = cgroup.name().to_owned();
    drop(python);
    drop(cgroup);
    let labels = [("container_name", name.as_str())];
    memledger.eventually("the end of the container", |metrics| {
        let usage = metrics.get("memledger_container_memory_usage_bytes", &labels);
        usage.map_or(Ok(()), |usage| Err(format!("usage {usage}")))
    });
    let metrics = memledger.metrics();
    assert_eq!(metrics.get("memledger_container_memory_unreclaimable_peak_bytes", &labels), Some(kept[0]));
    assert_eq!(metrics.get("memledger_container_memory_peak_bytes", &labels), Some(expected));
    assert_eq!(
        metrics.get("memledger_container_memory_rss_bytes", &labels),
        None,
        "an ended container has no memory"
    );
}

/// Returns a value of a file of the cgroup with lines of a key and a number.
fn keyed(cgroup: &TestCgroup, file: &str, key: &str) -> Option<f64> {
    let text = cgroup.text(file)?;
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.parse().ok())
}

#[test]
fn cpu_time_is_that_of_cpu_stat() {
    let lab = Lab::new("print('ready')\nwhile True: pass");
    let name = ("container_name", lab.cgroup.name());
    let family = "memledger_container_cpu_seconds_total";
    if !is_v2() {
        // the cgroup is in the hierarchy of the memory controller only
        assert_eq!(lab.memledger.fresh_metrics().all(family, &[name]), Vec::<&_>::new());
        return;
    }
    let kernel = |key: &str| keyed(&lab.cgroup, "cpu.stat", key).expect("cpu.stat") / 1e6;
    lab.memledger.eventually("CPU time", |metrics| {
        match metrics.try_value(family, &[name, ("mode", "user")])? {
            0.0 => Err("none yet".to_owned()),
            _ => Ok(()),
        }
    });
    for (mode, key) in [("user", "user_usec"), ("system", "system_usec")] {
        let before = kernel(key);
        lab.memledger.eventually("a time that the kernel had meanwhile", |metrics| {
            let time = metrics.try_value(family, &[name, ("mode", mode)])?;
            let range = before..=kernel(key);
            if range.contains(&time) { Ok(()) } else { Err(format!("{mode}: {time} not in {range:?}")) }
        });
    }
}

#[test]
fn reclaim_counts_as_events_and_refaults_of_the_kernel() {
    let mut lab = Lab::new(
        "
done('ready')
file = tempfile.TemporaryFile(dir='/var/tmp', buffering=0)
for step in range(2):
    for _ in range(64):
        file.write(CHUNK)
    os.fsync(file.fileno())
    done()
file.seek(0)
while file.read(MIB):
    pass
done()
",
    );
    let name = ("container_name", lab.cgroup.name());
    let events = "memledger_container_memory_events_total";
    let refaults = "memledger_container_refaults_total";
    if !is_v2() {
        assert_eq!(lab.memledger.fresh_metrics().all(events, &[name]).len(), 0);
        lab.cgroup.limit(48 << 20);
        (0..3).for_each(|_| drop(lab.python.step()));
        let key = "total_workingset_refault_file";
        // older kernels do not count it there
        let counted = keyed(&lab.cgroup, "memory.stat", key).is_some();
        return lab.memledger.eventually("the refaults of the kernel", |metrics| {
            let (count, now) =
                (metrics.get(refaults, &[name, ("kind", "file")]), keyed(&lab.cgroup, "memory.stat", key));
            let is_equal = count == now && now.is_none_or(|now| now > 0.0) && now.is_some() == counted;
            is_equal.then_some(()).ok_or_else(|| format!("{count:?}, not {now:?}"))
        });
    }
    let set = |file: &str, text: &str| {
        std::fs::write(lab.cgroup.path.join(file), text).expect("the limit is set");
    };
    set("memory.high", "50331648");
    lab.memledger.eventually("memory.high", |metrics| match lab.value(metrics, "high") {
        Some(bytes) if bytes == 48.0 * MIB => Ok(()),
        bytes => Err(format!("{bytes:?}")),
    });
    lab.python.step();
    let set = |file: &str, text: &str| {
        std::fs::write(lab.cgroup.path.join(file), text).expect("the limit is set");
    };
    set("memory.high", "max");
    set("memory.max", "50331648");
    lab.python.step();
    lab.python.step();
    let kernel = [
        (events, "high", keyed(&lab.cgroup, "memory.events", "high")),
        (events, "max", keyed(&lab.cgroup, "memory.events", "max")),
        (refaults, "file", keyed(&lab.cgroup, "memory.stat", "workingset_refault_file")),
    ];
    assert!(kernel.iter().all(|(_, _, count)| count.is_some_and(|count| count > 0.0)), "{kernel:?}");
    // memory.stat lags by up to 2 s
    lab.memledger.eventually("the counts of the kernel", |metrics| {
        for (family, label, _) in kernel {
            let (file, key) = match label {
                "file" => ("memory.stat", "workingset_refault_file"),
                event => ("memory.events", event),
            };
            let label_name = if family == events { "event" } else { "kind" };
            let (count, now) =
                (metrics.try_value(family, &[name, (label_name, label)])?, keyed(&lab.cgroup, file, key));
            if Some(count) != now {
                return Err(format!("{family} {label}: {count}, not {now:?}"));
            }
        }
        Ok(())
    });
}

#[test]
fn mount_table_reports_each_change_once() {
    let program =
        "mount -t tmpfs tmpfs /mnt && echo mounted && read go && umount /mnt && echo gone && read go";
    // in a mount namespace of its own, which ends with the shell
    let mut shell = std::process::Command::new("unshare")
        .args(["--mount", "sh", "-c", &format!("echo ready; read go; {program}")])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("unshare starts");
    let mut input = shell.stdin.take().expect("piped");
    let mut output = std::io::BufReader::new(shell.stdout.take().expect("piped"));
    let mut line = |wanted: &str| {
        let mut line = String::new();
        std::io::BufRead::read_line(&mut output, &mut line).expect("a line");
        assert_eq!(line.trim(), wanted);
    };
    line("ready");
    let path = format!("/proc/{}/mountinfo", shell.id());
    let table = memledger::host::KernelFile::open(path.as_ref()).expect("mountinfo");
    assert!(!table.has_changed(), "nothing since it was opened");
    for wanted in ["mounted", "gone"] {
        std::io::Write::write_all(&mut input, b"\n").expect("the shell reads");
        line(wanted);
        assert!(table.has_changed(), "{wanted}");
        assert!(!table.has_changed(), "{wanted}: reported once");
    }
    drop(input);
    shell.wait().expect("the shell ends");
}
