//! Files of one process: `stat`, `statm`, `cgroup`, `cmdline`. Bytes, because a process name may be invalid UTF-8.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{lines, number};

/// A flag of a process that is exiting, in the kernel's `linux/sched.h`.
const PF_EXITING: u64 = 0x4;

/// The fields of `/proc/PID/stat` that memledger uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    /// The name in parentheses, chosen by the process, at most 15 bytes.
    pub comm: Vec<u8>,
    /// One letter; `Z` is a zombie, also if only the first thread is one.
    pub state: u8,
    /// Pid of the parent.
    pub ppid: u32,
    /// It is exiting (`PF_EXITING`).
    pub is_exiting: bool,
    /// Threads that have not ended.
    pub threads: u64,
    /// Start in clock ticks since boot; together with the pid it identifies a process.
    pub start_ticks: u64,
}

impl Stat {
    /// Parses the file. The name may contain spaces, parentheses and newlines: it ends at the last `)`.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let open = text.iter().position(|&b| b == b'(')?;
        let close = text.iter().rposition(|&b| b == b')')?;
        let comm = text.get(open + 1..close)?.to_vec();
        let mut fields = text.get(close + 2..)?.split(|&b| b == b' ');
        let state = *fields.next()?.first()?;
        let ppid = u32::try_from(number(fields.next()?)?).ok()?;
        // proc(5) counts from 1: pid, comm, state, ppid, then 5 to 8; flags is 9, num_threads is 20, and starttime is 22
        let is_exiting = number(fields.nth(4)?)? & PF_EXITING != 0;
        let threads = number(fields.nth(10)?)?;
        let start_ticks = number(fields.nth(1)?)?;
        fields.next()?; // another field follows, so this one is not truncated
        Some(Self { comm, state, ppid, is_exiting, threads, start_ticks })
    }

    /// Returns whether all its threads have ended. The first one may have ended long before the others, which release the memory.
    pub fn has_ended(&self) -> bool {
        self.state == b'X' || self.state == b'Z' && self.threads <= 1
    }
}

/// Returns the resident pages, and those of them that are shared memory or pages of files, from `/proc/PID/statm`: its second and third
/// number.
pub fn resident_and_shared_pages(statm: &[u8]) -> Option<(u64, u64)> {
    let mut fields = statm.split(|&b| b == b' ');
    let (resident, shared) = (number(fields.nth(1)?)?, number(fields.next()?)?);
    fields.next().map(|_| (resident, shared)) // another field follows, so this one is not truncated
}

/// Returns the path of a process in the hierarchy that has the memory controller, from `/proc/PID/cgroup`.
///
/// `v1` selects the line of the v1 `memory` controller instead of the unified hierarchy, `0::`. There the kernel adds
/// ` (deleted)` to the path of a dead process whose cgroup was removed before the process was reaped; it is not part of the path.
pub fn cgroup_path(text: &[u8], v1: bool) -> Option<&[u8]> {
    lines(text).find_map(|line| {
        let mut parts = line.splitn(3, |&b| b == b':');
        let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let wanted = if v1 {
            controllers.split(|&b| b == b',').any(|name| name == b"memory")
        } else {
            number == b"0" && controllers.is_empty()
        };
        let path = if v1 { path } else { path.strip_suffix(b" (deleted)").unwrap_or(path) };
        wanted.then_some(path)
    })
}

/// Returns the arguments of `/proc/PID/cmdline`, without the empty one after the last NUL.
pub fn arguments(cmdline: &[u8]) -> impl Iterator<Item = &[u8]> {
    cmdline.strip_suffix(b"\0").unwrap_or(cmdline).split(|&b| b == 0)
}

/// Arguments of a training of which the number is kept, as far as its memory depends on them. Nothing else of a command line is: it may
/// contain secrets.
pub const ARGUMENT_SETTINGS: [&str; 25] = [
    "batch_size",
    "per_device_train_batch_size",
    "per_gpu_train_batch_size",
    "micro_batch_size",
    "batch",
    "bs",
    "accum",
    "gradient_accumulation_steps",
    "accumulate_grad_batches",
    "grad_accum",
    "grad_accum_steps",
    "accumulation_steps",
    "accum_steps",
    "num_workers",
    "dataloader_num_workers",
    "workers",
    "num_devices",
    "devices",
    "num_gpus",
    "seq_len",
    "seq_length",
    "max_seq_length",
    "max_length",
    "block_size",
    "image_size",
];
/// Maximum digits of such a number.
const MAX_DIGITS: usize = 9;

/// Settings by name in lower case.
pub type ArgumentSettings = Arc<[(Arc<str>, Arc<str>)]>;

/// Returns the numbers of a training among the arguments of a command line, as `--batch-size 32`, `--batch_size=32` or `data.batch_size=32`;
/// `None` if there is none. Of an argument that is given twice the last counts.
pub fn argument_settings(cmdline: &[u8]) -> Option<ArgumentSettings> {
    let mut found: BTreeMap<String, Arc<str>> = BTreeMap::new();
    let mut all = arguments(cmdline).skip(1).peekable();
    while let Some(argument) = all.next() {
        let Ok(text) = std::str::from_utf8(argument) else { continue };
        let (flag, value) = match text.split_once('=') {
            Some((flag, value)) => (flag, Some(value.as_bytes())),
            // a word without dashes is no name of the word after it
            None if text.starts_with('-') => (text, all.peek().copied()),
            None => continue,
        };
        let name = flag.trim_start_matches(['-', '+']).to_ascii_lowercase().replace('-', "_");
        let key = name.rsplit('.').next().unwrap_or(&name);
        let is_number =
            |value: &&[u8]| (1..=MAX_DIGITS).contains(&value.len()) && value.iter().all(u8::is_ascii_digit);
        if let Some(value) = value.filter(is_number).and_then(|value| std::str::from_utf8(value).ok())
            && ARGUMENT_SETTINGS.contains(&key)
        {
            found.insert(key.to_owned(), value.into());
        }
    }
    let found = found.into_iter().map(|(name, value)| (name.into(), value));
    Some(found.collect::<ArgumentSettings>()).filter(|found| !found.is_empty())
}

/// How Python's `multiprocessing` started a process, by its command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Launch {
    /// Another way, or a fork, which does not change the command line.
    Plain,
    /// A child of the start method `spawn`.
    Spawn,
    /// The fork server, or a child of it.
    ForkServer,
    /// The helper that cleans up semaphores and shared memory.
    ResourceTracker,
}

/// The role of a process, which `attribute` decides. Ordered by the names, as the keys of objects in JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// A worker of PyTorch's DataLoader.
    DataloaderWorker,
    /// Everything else, and everything uncertain.
    Other,
    /// A rank.
    Trainer,
    /// Another worker process: of multiprocessing, joblib, gunicorn, celery, Ray.
    Worker,
}

impl Role {
    /// All roles.
    pub const ALL: [Role; 4] = [Role::Trainer, Role::DataloaderWorker, Role::Worker, Role::Other];
    /// The roles of workers: of PyTorch's DataLoader, and others.
    pub const WORKERS: [Role; 2] = [Role::DataloaderWorker, Role::Worker];

    /// Returns the label value.
    pub const fn label(self) -> &'static str {
        match self {
            Role::Trainer => "trainer",
            Role::DataloaderWorker => "dataloader_worker",
            Role::Worker => "worker",
            Role::Other => "other",
        }
    }
}

/// A program that starts worker processes by a setting of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerProgram {
    /// Celery.
    Celery,
    /// Dask.
    Dask,
    /// gunicorn.
    Gunicorn,
    /// joblib, also below scikit-learn.
    Joblib,
    /// Ray.
    Ray,
    /// PySpark.
    Spark,
    /// uvicorn.
    Uvicorn,
}

impl WorkerProgram {
    /// All programs.
    pub const ALL: [Self; 7] =
        [Self::Celery, Self::Dask, Self::Gunicorn, Self::Joblib, Self::Ray, Self::Spark, Self::Uvicorn];

    /// Returns the name in events.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Celery => "celery",
            Self::Dask => "dask",
            Self::Gunicorn => "gunicorn",
            Self::Joblib => "joblib",
            Self::Ray => "ray",
            Self::Spark => "spark",
            Self::Uvicorn => "uvicorn",
        }
    }

    /// Returns the program of this name.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|program| program.name() == name)
    }

    /// Returns the program that a title or a Python command line names, and whether it is that of one of its workers.
    fn of(cmdline: &[u8], is_python: bool) -> Option<(Self, bool)> {
        if is_python {
            return Self::of_module(script(cmdline)?);
        }
        // a program that sets its title has that as its only argument
        let title = cmdline.strip_prefix(b"[").unwrap_or(cmdline);
        let titles = [
            (&b"celeryd:"[..], Self::Celery, &b"PoolWorker"[..]),
            (b"dask worker", Self::Dask, b""),
            (b"gunicorn: ", Self::Gunicorn, b"worker"),
            (b"ray::", Self::Ray, b""),
        ];
        let (_, program, worker) = titles.into_iter().find(|(begin, ..)| title.starts_with(begin))?;
        Some((program, worker.is_empty() || super::find(title, worker).is_some()))
    }

    /// The same by the name of the script or the module that Python runs.
    fn of_module(module: &[u8]) -> Option<(Self, bool)> {
        let names = [
            (&b"joblib.externals.loky"[..], Self::Joblib, true),
            (b"sklearn.externals.joblib", Self::Joblib, true),
            (b"pyspark.worker", Self::Spark, true),
            (b"distributed.cli.dask_worker", Self::Dask, true),
            (b"dask-worker", Self::Dask, true),
            (b"default_worker.py", Self::Ray, true),
            (b"celery", Self::Celery, false),
            (b"dask", Self::Dask, false),
            (b"gunicorn", Self::Gunicorn, false),
            (b"pyspark.daemon", Self::Spark, false),
            (b"uvicorn", Self::Uvicorn, false),
        ];
        let is_it = |name: &[u8]| {
            module.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"."))
        };
        let (_, program, is_worker) = names.into_iter().find(|(name, ..)| is_it(name))?;
        Some((program, is_worker))
    }
}

/// Returns the module that Python runs, or the name of its script; `None` for a text of code.
fn script(cmdline: &[u8]) -> Option<&[u8]> {
    let mut rest = arguments(cmdline).skip(1);
    loop {
        match rest.next()? {
            b"-m" => return rest.next(),
            b"-c" => return None,
            b"-W" | b"-X" => drop(rest.next()),
            option if option.starts_with(b"-") => {}
            script => return Some(base_name(script)),
        }
    }
}

fn base_name(path: &[u8]) -> &[u8] {
    path.rsplit(|&b| b == b'/').next().unwrap_or_default()
}

/// Properties of a command line. The line itself is never kept: it may contain secrets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Command {
    /// The program is a Python interpreter.
    pub python: bool,
    /// Its start method.
    pub launch: Launch,
    /// A known program that starts workers.
    pub program: Option<WorkerProgram>,
    /// The line is that of one of its workers. A fork has its parent's, so this need not be set.
    pub is_worker: bool,
}

impl Command {
    /// For an empty or unknown command line.
    pub const NONE: Command =
        Command { python: false, launch: Launch::Plain, program: None, is_worker: false };

    /// Reads a command line.
    pub fn of(cmdline: &[u8]) -> Self {
        let name = base_name(arguments(cmdline).next().unwrap_or_default());
        let python = name.starts_with(b"python") || name.starts_with(b"pypy");
        let has_argument = |text: &[u8]| arguments(cmdline).any(|argument| argument.starts_with(text));
        let launch = if !python {
            Launch::Plain
        } else if has_argument(b"from multiprocessing.spawn import")
            || has_argument(b"--multiprocessing-fork")
        {
            Launch::Spawn
        } else if has_argument(b"from multiprocessing.forkserver import") {
            Launch::ForkServer
        } else if has_argument(b"from multiprocessing.resource_tracker import")
            || has_argument(b"from multiprocessing.semaphore_tracker import")
        {
            Launch::ResourceTracker
        } else {
            Launch::Plain
        };
        let found = WorkerProgram::of(cmdline, python);
        let (program, is_worker) = found.map_or((None, false), |(program, worker)| (Some(program), worker));
        Self { python, launch, program, is_worker }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn roles_have_their_label_in_json_and_its_order() {
        assert_eq!(Role::ALL.map(|role| serde_json::to_value(role).unwrap()), Role::ALL.map(Role::label));
        let sorted = BTreeSet::from(Role::ALL);
        assert!(sorted.into_iter().is_sorted_by_key(Role::label));
    }

    #[test]
    fn numbers_of_a_training_are_found_among_its_arguments() {
        let found = |line: &str| {
            let line = line.replace(' ', "\0") + "\0";
            let found = argument_settings(line.as_bytes()).unwrap_or_default();
            found.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
        };
        for (line, wanted) in [
            ("python train.py --batch-size 32 --lr 1e-3 --workers 4", "batch_size=32 workers=4"),
            (
                "python -m train --per_device_train_batch_size=8 --max_length=512",
                "max_length=512 per_device_train_batch_size=8",
            ),
            ("torchrun train.py data.batch_size=64 +trainer.devices=2", "batch_size=64 devices=2"),
            ("python train.py --batch-size 32 --batch-size 16", "batch_size=16"),
            // no number, no value, another argument, a secret, and words without a flag
            ("python train.py --batch-size auto --batch_size --token=42 --api-key 7 batch_size 32", ""),
            ("python train.py --batch-size 1234567890", ""),
            ("batch_size=3", ""),
        ] {
            assert_eq!(found(line), wanted, "{line}");
        }
    }

    fn stat_line(comm: &[u8]) -> Vec<u8> {
        let mut line = b"4242 (".to_vec();
        line.extend_from_slice(comm);
        line.extend_from_slice(
            b") S 7 4242 4242 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 1000 200 rest\n",
        );
        line
    }

    #[test]
    fn process_has_ended_with_its_last_thread() {
        // recorded: the first thread had ended, and another one lived
        let line = |state: char, threads: u32| {
            format!(
                "28845 (python3) {state} 28804 28754 12059 0 -1 4227148 354 0 0 0 0 0 0 0 20 0 {threads} 0 2194966 0 0"
            )
        };
        for (state, threads, has_ended) in [('Z', 2, false), ('Z', 1, true), ('X', 1, true), ('S', 1, false)]
        {
            let stat = Stat::parse(line(state, threads).as_bytes()).expect("a whole line");
            assert_eq!((stat.has_ended(), stat.start_ticks), (has_ended, 2_194_966), "{state} {threads}");
        }
    }

    proptest! {
        #[test]
        fn name_cannot_fake_a_field(comm in proptest::collection::vec(any::<u8>(), 0..16)) {
            let stat = Stat::parse(&stat_line(&comm)).expect("a whole line");
            prop_assert_eq!(stat, Stat { comm, state: b'S', ppid: 7, is_exiting: false, threads: 1, start_ticks: 987_654 });
        }

        #[test]
        fn reads_any_cgroup_path(path in "/[^\n]{0,60}", unified in "/[^\n]{0,60}", number in 1_u8..20, company in "(cpu,)?memory(,hugetlb)?") {
            let text = format!("20:pids:/p\n{number}:{company}:{path}\n1:name=systemd:/s\n0::{unified}\n");
            prop_assert_eq!(cgroup_path(text.as_bytes(), true), Some(path.as_bytes()));
            prop_assert_eq!(cgroup_path(text.as_bytes(), false), Some(unified.as_bytes()));
        }

        #[test]
        fn reads_any_resident_pages(size: u64, resident: u64, shared: u64) {
            let text = format!("{size} {resident} {shared} 4 0 6 0\n");
            prop_assert_eq!(resident_and_shared_pages(text.as_bytes()), Some((resident, shared)));
        }

        #[test]
        fn reads_any_arguments(given in proptest::collection::vec("[^\0]{1,9}", 1..6)) {
            let line: String = given.iter().map(|argument| format!("{argument}\0")).collect();
            prop_assert!(arguments(line.as_bytes()).eq(given.iter().map(String::as_bytes)));
        }

        #[test]
        fn never_panics_on_any_bytes(bytes: Vec<u8>) {
            let _ = (Stat::parse(&bytes), resident_and_shared_pages(&bytes), cgroup_path(&bytes, true), arguments(&bytes).count(), argument_settings(&bytes));
        }
    }

    #[test]
    fn finds_memory_controller_alone_and_comounted() {
        let hybrid = b"12:cpu,cpuacct:/a\n4:memory:/docker/x\n1:name=systemd:/b\n0::/system.slice/x\n";
        assert_eq!(cgroup_path(hybrid, true), Some(&b"/docker/x"[..]));
        assert_eq!(cgroup_path(hybrid, false), Some(&b"/system.slice/x"[..]));
        assert_eq!(cgroup_path(b"3:memory,hugetlb:/with:colon\n", true), Some(&b"/with:colon"[..]));
        assert_eq!(cgroup_path(b"0::/only v2\n", true), None);
        assert_eq!(cgroup_path(b"0::/docker/x (deleted)\n", false), Some(&b"/docker/x"[..]));
        assert_eq!(
            cgroup_path(b"3:memory:/x (deleted)\n", true),
            Some(&b"/x (deleted)"[..]),
            "v1 adds nothing"
        );
    }

    #[test]
    fn recognizes_multiprocessing_by_command_line() {
        let of = |line: &[u8]| (Command::of(line).python, Command::of(line).launch);
        assert_eq!(of(b"/opt/venv/bin/python3.11\0train.py\0"), (true, Launch::Plain));
        assert_eq!(
            of(b"python\0-c\0from multiprocessing.spawn import spawn_main; spawn_main(5, pipe_handle=7)\0--multiprocessing-fork\0"),
            (true, Launch::Spawn)
        );
        assert_eq!(
            of(b"python\0-c\0from multiprocessing.forkserver import main; main(5, 6, ['__main__'])\0"),
            (true, Launch::ForkServer)
        );
        assert_eq!(
            of(b"python\0-c\0from multiprocessing.resource_tracker import main;main(3)\0"),
            (true, Launch::ResourceTracker)
        );
        assert_eq!(of(b"sh\0-c\0python train.py\0"), (false, Launch::Plain));
        assert_eq!(of(b"grep\0from multiprocessing.spawn import\0"), (false, Launch::Plain));
        assert_eq!(of(b""), (false, Launch::Plain), "a zombie or a kernel thread");
    }

    #[test]
    fn recognizes_programs_with_workers_and_the_workers() {
        use WorkerProgram::*;
        let of = |line: &str| {
            let command = Command::of((line.replace(' ', "\0") + "\0").as_bytes());
            (command.program, command.is_worker)
        };
        for (line, program, is_worker) in [
            ("/usr/bin/python3 /usr/local/bin/gunicorn -w 4 app:app", Some(Gunicorn), false),
            ("python -u -X dev -m gunicorn app:app", Some(Gunicorn), false),
            ("python3 /opt/venv/bin/celery -A app worker -c 4", Some(Celery), false),
            ("python -m uvicorn app:app --workers 4", Some(Uvicorn), false),
            ("python -m joblib.externals.loky.backend.popen_loky_posix --pipe 12", Some(Joblib), true),
            ("python3 -m pyspark.daemon pyspark.worker", Some(Spark), false),
            ("python /venv/ray/_private/workers/default_worker.py --node-ip=1", Some(Ray), true),
            // also of other programs: their own words
            ("python train.py gunicorn", None, false),
            ("python celery_train.py", None, false),
            ("python -m gunicornish app", None, false),
            ("sh -c gunicorn", None, false),
            ("", None, false),
        ] {
            assert_eq!(of(line), (program, is_worker), "{line}");
        }
        let title = |text: &str| {
            let command = Command::of(format!("{text}\0").as_bytes());
            (command.program, command.is_worker)
        };
        assert_eq!(title("ray::f"), (Some(Ray), true));
        assert_eq!(title("gunicorn: worker [app]"), (Some(Gunicorn), true));
        assert_eq!(title("gunicorn: master [app]"), (Some(Gunicorn), false));
        assert_eq!(title("[celeryd: celery@host:ForkPoolWorker-1]"), (Some(Celery), true));
        assert_eq!(title("dask worker [tcp://127.0.0.1:1]"), (Some(Dask), true));
        assert!(WorkerProgram::ALL.iter().all(|it| WorkerProgram::of_name(it.name()) == Some(*it)));
    }

    #[test]
    fn arguments_end_at_the_last_nul() {
        assert_eq!(arguments(b"python\0-c\0\0").collect::<Vec<_>>(), [&b"python"[..], b"-c", b""]);
        assert_eq!(arguments(b"setproctitle: x").collect::<Vec<_>>(), [&b"setproctitle: x"[..]]);
    }
}
