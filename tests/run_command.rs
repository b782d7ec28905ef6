//! `memledger run`: real commands in real cgroups, with and without `memledger serve`. Also in the cgroup v2 guest, where systemd makes
//! the cgroups.

use std::collections::HashSet;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use fake_nvml::{FakeNvml, Process, State};
use serde_json::Value;

use crate::support::cgroups::{remove_everywhere, root};
use crate::support::docker::unique;
use crate::support::{Memledger, binary, eventually, eventually_true, in_v2_guest, terminate};

/// A user without rights.
const NOBODY: &str = "65534";
/// Flags of a command that reads nothing but the runs and the kernel.
const NO_ENGINES: [&str; 3] = ["--docker.socket=", "--podman.socket=", "--cri.endpoint="];
/// A program that needs 200 MiB.
const HOG: &str = "b = bytearray(200 << 20)";
/// A training whose only worker needs 200 MiB, and which ends with an error without it.
const TRAINING: &str = "import multiprocessing\n\
    def work():\n    b = bytearray(200 << 20)\n\
    if __name__ == '__main__':\n    p = multiprocessing.Process(target=work)\n    p.start(); p.join()\n    raise SystemExit(p.exitcode != 0)";

/// Runs with a spool and a ledger of their own.
struct Runs {
    folder: tempfile::TempDir,
}

impl Runs {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        allow_kills();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn spool(&self) -> String {
        format!("--run.spool={}", self.path("spool").display())
    }

    /// Returns `memledger run` with these flags, and the command behind `--`.
    fn command(&self, flags: &[&str], command: &[&str]) -> Command {
        let mut run = Command::new(binary());
        run.args(["run", &self.spool(), "--reporter.directory="]).args(flags).arg("--").args(command);
        run.env_remove("RUST_BACKTRACE").stdin(Stdio::null());
        run
    }

    fn run(&self, flags: &[&str], command: &[&str]) -> Output {
        self.command(flags, command).output().unwrap()
    }

    fn start(&self, flags: &[&str], command: &[&str]) -> Started {
        Started(self.command(flags, command).stderr(Stdio::null()).spawn().unwrap())
    }

    fn state(&self) -> String {
        format!("--state.path={}", self.path("state").display())
    }

    fn serve(&self) -> Memledger {
        Memledger::start(&[&NO_ENGINES[..2], &[&self.spool(), &self.state()]].concat())
    }

    /// Returns the answer of `why`, once it is final.
    fn why(&self, name: &str) -> Value {
        eventually(name, || {
            let mut why = Command::new(binary());
            why.args(["why", name, "--json", "--local.socket=", &self.spool(), &self.state()])
                .args(NO_ENGINES);
            let output = why.output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let answer: Value =
                serde_json::from_str(&text).map_err(|error| format!("{error}: {output:?}"))?;
            let is_open = answer["what"].as_str().is_none_or(|what| what.contains("may still arrive"));
            if is_open { Err(text) } else { Ok(answer) }
        })
    }

    /// Returns the newest record of this name.
    fn record(&self, name: &str) -> Result<Value, String> {
        let records = records(&self.path("spool"));
        let newest = records.into_iter().rfind(|record| record["name"] == name);
        newest.ok_or_else(|| "no record".to_owned())
    }

    fn started(&self, name: &str) -> Value {
        eventually("the record of a started command", || self.record(name))
    }
}

/// In the guest tests have the oom_score_adj of its agent, whose processes cannot be killed.
fn allow_kills() {
    std::fs::write("/proc/self/oom_score_adj", "0").unwrap();
}

fn records(spool: &Path) -> Vec<Value> {
    let users = std::fs::read_dir(spool).into_iter().flatten().flatten();
    let files = users.flat_map(|user| std::fs::read_dir(user.path()).into_iter().flatten().flatten());
    let texts = files.filter(|file| file.path().extension().is_some_and(|it| it == "json"));
    let texts = texts.filter_map(|file| std::fs::read_to_string(file.path()).ok());
    let mut records: Vec<Value> = texts.filter_map(|text| serde_json::from_str(&text).ok()).collect();
    records.sort_by(|one, other| {
        one["started"].as_f64().unwrap().total_cmp(&other["started"].as_f64().unwrap())
    });
    records
}

/// A running `memledger run`.
struct Started(Child);

impl Started {
    fn signal(&self, name: &str) {
        assert!(
            Command::new("kill").args(["-s", name, &self.0.id().to_string()]).status().unwrap().success()
        );
    }

    fn exit_code(&mut self) -> Option<i32> {
        self.0.wait().unwrap().code()
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        terminate(&mut self.0);
    }
}

fn is_alive(pid: u64) -> bool {
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    state.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

#[test]
fn exit_status_input_and_output_are_those_of_the_command() {
    let runs = Runs::new();
    for flags in [&[][..], &["--no-cgroup"]] {
        for (command, code) in [
            (&["true"][..], Some(0)),
            (&["sh", "-c", "exit 7"], Some(7)),
            (&["sh", "-c", "kill -9 $$"], Some(137)),
            (&["sh", "-c", "kill -TERM $$"], Some(143)),
            (&["no-such-program"], Some(127)),
            (&["/etc/passwd"], Some(126)),
        ] {
            assert_eq!(runs.run(flags, command).status.code(), code, "{flags:?} {command:?}");
        }
        let mut child =
            runs.command(flags, &["cat"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(b"a line\n").unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), &*output.stdout), (Some(0), &b"a line\n"[..]));
        // as a shell would start it: no signal is blocked
        let masks = runs.run(flags, &["grep", "SigBlk", "/proc/self/status"]);
        assert!(String::from_utf8_lossy(&masks.stdout).ends_with("0000000000000000\n"), "{masks:?}");
    }
    // no cgroup of these runs is left
    for record in records(&runs.path("spool")) {
        let cgroup = root().join("memledger").join(record["id"].as_str().unwrap());
        assert!(!cgroup.exists(), "{}", cgroup.display());
    }
    for wrong in [&["run"][..], &["run", "--memory=3", "true"], &["run", "--name=a b", "true"]] {
        assert_eq!(
            Command::new(binary()).args(wrong).output().unwrap().status.code(),
            Some(125),
            "{wrong:?}"
        );
    }
}

#[test]
fn command_that_exceeds_its_limit_is_explained_without_a_service() {
    let runs = Runs::new();
    let name = unique("run");
    let output = runs.run(&["--memory=64M", "--name", &name], &["python3", "-c", HOG]);
    assert_eq!(output.status.code(), Some(137));
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(errors.contains(&format!("`memledger why {name}` explains it")), "{errors}");
    assert_eq!(runs.record(&name).unwrap()["end"]["oom_kills"], 1);
    let answer = runs.why(&name);
    assert_eq!(answer["cause"], "oom_limit_main", "{answer}");
    let what = answer["what"].as_str().unwrap();
    assert!(what.contains("because the run reached its memory limit of 64.0 MiB"), "{what}");
    assert!(answer["remedies"].to_string().contains("memledger run --memory; now 64.0 MiB"), "{answer}");
}

#[test]
fn worker_that_exceeds_the_limit_is_explained_without_a_service() {
    let runs = Runs::new();
    let name = unique("run");
    let output = runs.run(&["--memory=100M", "--name", &name], &["python3", "-c", TRAINING]);
    assert_eq!(output.status.code(), Some(1));
    let answer = runs.why(&name);
    assert!(answer["cause"].as_str().unwrap().starts_with("oom_limit_worker"), "{answer}");
}

#[test]
fn service_shows_runs_as_containers_and_keeps_their_records() {
    let runs = Runs::new();
    let [name, killed, late] = ["live", "killed", "late"].map(|what| unique(&format!("run-{what}")));
    let memledger = runs.serve();
    let labels = ["--label", "memledger.run.batch_size=32", "--memory=300M", "--name", &name];
    let program = "import sys; b = bytearray(50 << 20); sys.stdin.read()";
    let mut live = runs.command(&labels, &["python3", "-c", program]);
    let mut live = Started(live.stdin(Stdio::piped()).spawn().unwrap());
    let of = [("container_name", &*name)];
    memledger.eventually("memory and settings of the run", |metrics| {
        let used = metrics.try_value("memledger_container_memory_unreclaimable_bytes", &of)?;
        let is_set = metrics.get("memledger_container_run_info", &[of[0], ("batch_size", "32")]) == Some(1.0);
        let limit = metrics.try_value("memledger_container_memory_limit_bytes", &of)?;
        let runtime = metrics.get("memledger_container_info", &[of[0], ("runtime", "run")]) == Some(1.0);
        let is_it = used > f64::from(50 << 20) && limit == f64::from(300 << 20) && is_set && runtime;
        if is_it { Ok(()) } else { Err(format!("{used} {limit} {is_set} {runtime}")) }
    });
    assert_eq!(
        runs.run(&["--memory=64M", "--name", &killed], &["python3", "-c", HOG]).status.code(),
        Some(137)
    );
    memledger.eventually("the kill, and the exit by it", |metrics| {
        let of = ("container_name", &*killed);
        let kills = metrics.sum("memledger_container_oom_kills_total", &[of]);
        let exits = metrics.sum("memledger_container_exits_total", &[of, ("reason", "oom_container")]);
        if (kills, exits) == (1.0, 1.0) { Ok(()) } else { Err(format!("{kills} {exits}")) }
    });
    drop(live.0.stdin.take());
    assert_eq!(live.exit_code(), Some(0));
    memledger.eventually("the end of the run", |metrics| {
        let completed = [of[0], ("reason", "completed")];
        let exits = metrics.try_value("memledger_container_exits_total", &completed)?;
        if exits == 1.0 { Ok(()) } else { Err(exits.to_string()) }
    });
    drop(memledger);
    // while no service runs
    assert_eq!(runs.run(&["--name", &late], &["sh", "-c", "exit 3"]).status.code(), Some(3));
    let memledger = runs.serve();
    memledger.eventually("an exit of the time without a service, once", |metrics| {
        let all = [("container_name", &*late)];
        let exits = metrics.sum("memledger_container_exits_total", &all);
        let errors = metrics.sum("memledger_container_exits_total", &[all[0], ("reason", "error")]);
        if (exits, errors) == (1.0, 1.0) { Ok(()) } else { Err(format!("{exits} {errors}")) }
    });
    let list = Command::new(binary())
        .args(["runs", "--json", "--limit=0", "--local.socket=", &runs.state()])
        .output()
        .unwrap();
    let list = String::from_utf8_lossy(&list.stdout).into_owned();
    assert!([&name, &killed, &late].iter().all(|name| list.contains(&**name)), "{list}");
}

#[test]
fn stop_request_is_forwarded_and_explains_the_end() {
    let runs = Runs::new();
    let name = unique("run");
    let mut started = runs.start(&["--name", &name], &["sleep", "300"]);
    runs.started(&name);
    started.signal("TERM");
    assert_eq!(started.exit_code(), Some(143));
    let answer = runs.why(&name);
    assert_eq!(answer["cause"], "stopped", "{answer}");
    assert!(
        answer["what"].as_str().unwrap().contains("on a stop request to memledger run (SIGTERM)"),
        "{answer}"
    );
}

#[test]
fn ignored_hangup_stays_ignored_as_under_nohup() {
    let runs = Runs::new();
    let name = unique("run");
    let script =
        format!("trap '' HUP; exec {} run {} --name {name} -- sleep 300", binary().display(), runs.spool());
    let mut started =
        Started(Command::new("sh").args(["-c", &script]).stderr(Stdio::null()).spawn().unwrap());
    let command = runs.started(&name)["command"]["pid"].as_u64().unwrap();
    let ignored = eventually("the command", || {
        let status =
            std::fs::read_to_string(format!("/proc/{command}/status")).map_err(|error| error.to_string())?;
        let is_command = status.starts_with("Name:\tsleep\n");
        let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:\t")).map(str::to_owned);
        mask.filter(|_| is_command).ok_or(status)
    });
    assert_eq!(u64::from_str_radix(&ignored, 16).unwrap() & 1, 1, "{ignored}");
    started.signal("HUP");
    started.signal("TERM");
    assert_eq!(started.exit_code(), Some(143));
}

#[test]
fn killed_supervisor_leaves_the_command_and_an_unknown_end() {
    let runs = Runs::new();
    let name = unique("run");
    let memledger = runs.serve();
    let mut started = runs.start(&["--name", &name], &["sleep", "300"]);
    let record = runs.started(&name);
    let command = record["command"]["pid"].as_u64().unwrap();
    memledger.eventually("the run", |metrics| {
        metrics.try_value("memledger_container_info", &[("container_name", &*name)])
    });
    started.signal("KILL");
    assert_eq!(started.exit_code(), None);
    assert!(is_alive(command));
    let kill = Command::new("kill").arg(command.to_string()).status().unwrap();
    assert!(kill.success());
    eventually_true("the end of the command", || !is_alive(command));
    memledger.eventually("an end for an unknown reason", |metrics| {
        let unknown = [("container_name", &*name), ("reason", "unknown")];
        let exits = metrics.try_value("memledger_container_exits_total", &unknown)?;
        if exits == 1.0 { Ok(()) } else { Err(exits.to_string()) }
    });
    let id = record["id"].as_str().unwrap();
    eventually_true("its cgroup can be removed", || remove_everywhere(&Path::new("memledger").join(id)));
    assert_eq!(runs.record(&name).unwrap()["end"], Value::Null);
}

/// Returns what a shell script gives that has `$run` for `memledger run` with a spool of its own, and the name of the run.
fn script(runs: &Runs, name: &str, script: &str) -> Output {
    let run = format!("{} run {} --reporter.directory= --name {name} --", binary().display(), runs.spool());
    Command::new("sh").args(["-c", script]).env("run", run).stdin(Stdio::null()).output().unwrap()
}

#[test]
fn it_works_where_its_parent_has_changed_signals_or_closed_descriptors() {
    let runs = Runs::new();
    // the parent ignores SIGCHLD
    let ignoring = "import os, signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); words = os.environ['run'].split(); \
        os.execv(words[0], words + ['sh', '-c', 'exit 7'])";
    let ignored = script(&runs, "sigchld", &format!("exec python3 -c \"{ignoring}\""));
    assert_eq!(ignored.status.code(), Some(7), "{ignored:?}");
    // nobody reads what it writes
    let full = script(&runs, "full", "$run sh -c 'kill -9 $$' 2>/dev/full");
    assert_eq!(full.status.code(), Some(137), "{full:?}");
    let closed = script(&runs, "closed", "$run sh -c 'exit 4' <&- >&- 2>&-");
    assert_eq!(closed.status.code(), Some(4), "{closed:?}");
    // an alarm of before
    let alarm = "import os, signal; signal.alarm(1); words = os.environ['run'].split(); os.execv(words[0], words + ['sleep', '300'])";
    let alarm = script(&runs, "alarm", &format!("exec python3 -c \"{alarm}\""));
    assert_eq!(alarm.status.code(), Some(142), "{alarm:?}");
    // an interrupt that the shell ignores for commands in the background
    let background = "trap '' INT; $run sh -c 'kill -INT $PPID; exit 1'";
    assert_eq!(script(&runs, "background", background).status.code(), Some(1));
    assert_eq!(runs.why("background")["cause"], "error_exit");
}

#[test]
fn run_in_a_run_stays_in_its_limit() {
    let runs = Runs::new();
    let inner = format!("{} run {} --name inner -- python3 -c '{HOG}'", binary().display(), runs.spool());
    let output = runs.run(&["--memory=64M", "--name=outer"], &["sh", "-c", &inner]);
    assert_eq!(output.status.code(), Some(137));
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(errors.contains("this is in a run of memledger run, whose limit counts"), "{errors}");
    let limited = format!("{} run {} --memory 1G true", binary().display(), runs.spool());
    assert_eq!(runs.run(&[], &["sh", "-c", &limited]).status.code(), Some(125));
}

#[test]
fn runs_that_start_at_once_have_names_of_their_own() {
    let runs = Runs::new();
    let started: Vec<_> = (0..4).map(|_| runs.start(&["--name=sweep"], &["sleep", "300"])).collect();
    let names = eventually("four records", || {
        let names: HashSet<String> =
            records(&runs.path("spool")).iter().map(|run| run["name"].as_str().unwrap().to_owned()).collect();
        if names.len() == 4 { Ok(names) } else { Err(format!("{names:?}")) }
    });
    assert_eq!(names, ["sweep", "sweep-2", "sweep-3", "sweep-4"].map(str::to_owned).into());
    drop(started);
}

#[test]
fn user_cannot_speak_for_the_run_of_another() {
    let runs = Runs::new();
    let name = unique("run");
    let memledger = runs.serve();
    let mut started = runs.start(&["--name", &name], &["sleep", "300"]);
    let mut record = runs.started(&name);
    let of = [("container_name", &*name)];
    memledger.eventually("the run", |metrics| metrics.try_value("memledger_container_info", &of));
    // the record of root's run, with an end, in a directory of another user
    record["end"] = serde_json::json!({"at": record["started"], "exit_code": 0, "oom_kills": null});
    record["settings"] = serde_json::json!([["x\"} 1\nforged_metric{a", "b"]]);
    let directory = runs.path("spool").join(NOBODY);
    std::fs::create_dir(&directory).unwrap();
    let write = |id: &str, record: &Value| {
        let path = directory.join(format!("{id}.json"));
        std::fs::write(&path, serde_json::to_vec(record).unwrap()).unwrap();
        std::os::unix::fs::chown(&path, Some(65534), Some(65534)).unwrap();
    };
    std::os::unix::fs::chown(&directory, Some(65534), Some(65534)).unwrap();
    write(record["id"].as_str().unwrap(), &record);
    // and one of its own, with the pids of root's, which is read after it
    let own = format!("{}{:08x}2d72756e", "0".repeat(48), 65534);
    (record["id"], record["name"], record["end"]) = (own.as_str().into(), "forged".into(), Value::Null);
    write(&own, &record);
    memledger.eventually("the forged run, which has no process", |metrics| {
        let unknown = [("container_name", "forged"), ("reason", "unknown")];
        let exits = metrics.try_value("memledger_container_exits_total", &unknown)?;
        if exits == 1.0 { Ok(()) } else { Err(exits.to_string()) }
    });
    assert!(memledger.get("/metrics").1.lines().all(|line| !line.starts_with("forged_metric")));
    let metrics = memledger.fresh_metrics();
    assert_eq!(metrics.sum("memledger_container_exits_total", &of), 0.0);
    started.signal("TERM");
    assert_eq!(started.exit_code(), Some(143));
    memledger.eventually("the end of the run", |metrics| {
        let stopped = [of[0], ("reason", "stopped")];
        let exits = metrics.try_value("memledger_container_exits_total", &stopped)?;
        if exits == 1.0 { Ok(()) } else { Err(exits.to_string()) }
    });
}

#[test]
fn second_run_of_a_script_has_a_name_of_its_own() {
    let runs = Runs::new();
    let script = runs.path("train.sh");
    std::fs::write(&script, "exec sleep 300").unwrap();
    let command = ["sh", script.to_str().unwrap()];
    let _first = runs.start(&[], &command);
    runs.started("train");
    let _second = runs.start(&[], &command);
    runs.started("train-2");
}

#[test]
fn user_without_rights_gets_a_reason_and_can_do_without_a_cgroup() {
    let runs = Runs::new();
    let home = runs.path("home");
    std::fs::create_dir(&home).unwrap();
    std::fs::set_permissions(&home, std::fs::Permissions::from_mode(0o777)).unwrap();
    // the build directory may be closed to other users
    let program = home.join("memledger");
    std::fs::copy(binary(), &program).unwrap();
    let as_user = |spool: &Path, arguments: &[&str]| {
        let mut user = Command::new("setpriv");
        user.args(["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]).arg(&program).args(arguments);
        user.env("MEMLEDGER_RUN_SPOOL", spool)
            .env("HOME", &home)
            .env_remove("XDG_STATE_HOME")
            .current_dir("/");
        user.output().unwrap()
    };
    let (shared, missing) = (runs.path("spool"), runs.path("missing"));
    let refused = as_user(&missing, &["run", "--memory=1G", "--name=user", "true"]);
    assert_eq!(refused.status.code(), Some(125));
    let errors = String::from_utf8_lossy(&refused.stderr).into_owned();
    let advice = "Or run it without one: memledger run --no-cgroup -- COMMAND";
    assert!(errors.contains("the command cannot have a cgroup: ") && errors.contains(advice), "{errors}");
    // without a shared directory the record is the user's own; root's first run makes one for all
    let own = home.join(".local/state/memledger/runs");
    let run = ["run", "--no-cgroup", "--name=user", "sh", "-c", "exit 5"];
    assert_eq!(as_user(&missing, &run).status.code(), Some(5));
    assert_eq!((records(&own).len(), missing.exists()), (1, false));
    assert!(runs.run(&[], &["true"]).status.success());
    assert_eq!(as_user(&shared, &run).status.code(), Some(5));
    assert_eq!((records(&own).len(), records(&shared).len()), (1, 2));
    for spool in [&missing, &shared] {
        let why = as_user(spool, &["why", "user", "--state.path=", "--local.socket="]);
        let text = String::from_utf8_lossy(&why.stdout).into_owned();
        assert!(why.status.success() && text.contains("the run ended with exit code 5"), "{text}");
    }
}

/// A training with 4 GiB of tensors, which then needs more than the GPU has.
const CUDA_OOM: &str = "import sys, torch\ntorch.cuda.init()\ntorch.cuda.standin_allocate(4 << 30)\n\
    print('ready', flush=True)\nsys.stdin.readline()\ntorch.cuda.standin_allocate(20 << 30)";

#[test]
fn command_reports_from_inside_with_and_without_a_cgroup() {
    if in_v2_guest() {
        return eprintln!("SKIPPED: the guest has neither the fake driver nor the stand-in for torch");
    }
    let runs = Runs::new();
    let fake = FakeNvml::install(runs.folder.path(), &State::with_gpus(1)).unwrap();
    let reporter = format!("--reporter.directory={}", runs.path("reporter").display());
    let library = format!("--gpu.nvml-library={}", fake.path().display());
    let flags = [&*library, "--gpu.interval=100ms", &reporter, &runs.spool(), &runs.state()];
    let memledger = Memledger::start(&[&NO_ENGINES[..2], &flags].concat());
    for flags in [&[][..], &["--no-cgroup"]] {
        let name = unique("run");
        let mut command = Command::new(binary());
        command.args(["run", &runs.spool(), &reporter, "--name", &name]).args(flags);
        command.args(["--", "python3", "-c", CUDA_OOM]).stdin(Stdio::piped()).stderr(Stdio::null());
        command.env("PYTHONPATH", concat!(env!("CARGO_MANIFEST_DIR"), "/python/tests/standin"));
        command.env("STANDIN_GPUS", State::with_gpus(1).gpus[0].uuid.trim_start_matches("GPU-"));
        let mut started = Started(command.stdout(Stdio::null()).spawn().unwrap());
        let pid = runs.started(&name)["command"]["pid"].as_u64().unwrap();
        let mut state = State::with_gpus(1);
        state.gpus[0].memory.used = 5 << 30;
        state.gpus[0].processes = vec![Process::compute(pid as u32, Some(9 << 29))];
        fake.set(&state).unwrap();
        memledger.eventually("tensors, and with a cgroup the driver's figure", |metrics| {
            let of = ("container_name", &*name);
            let tensors =
                metrics.try_value("memledger_container_torch_allocated_bytes", &[of, ("rank", "0")])?;
            let used = metrics.get("memledger_container_gpu_memory_used_bytes", &[of]);
            let wanted = flags.is_empty().then_some((9_u64 << 29) as f64);
            if tensors == (4_u64 << 30) as f64 && used == wanted {
                Ok(())
            } else {
                Err(format!("{tensors} {used:?}"))
            }
        });
        started.0.stdin.take().unwrap().write_all(b"\n").unwrap();
        assert_eq!(started.exit_code(), Some(1));
        memledger.eventually("an exit by the error", |metrics| {
            let of = [("container_name", &*name), ("reason", "cuda_oom")];
            let exits = metrics.try_value("memledger_container_exits_total", &of)?;
            if exits == 1.0 { Ok(()) } else { Err(exits.to_string()) }
        });
        let cause = runs.why(&name)["cause"].as_str().unwrap().to_owned();
        assert!(cause.starts_with("cuda_oom"), "{cause}");
    }
}

/// A user with a systemd of its own, in the guest; `None` where users cannot have cgroups.
struct SystemdUser {
    uid: &'static str,
}

impl SystemdUser {
    fn start() -> Option<Self> {
        if !in_v2_guest() {
            eprintln!("SKIPPED: only the guest has cgroup v2 and systemd");
            return None;
        }
        allow_kills();
        let user = Self { uid: "1717" };
        let add = ["--uid", user.uid, "--create-home", "memledger-test"];
        assert!(Command::new("useradd").args(add).status().unwrap().success());
        assert!(
            Command::new("loginctl").args(["enable-linger", "memledger-test"]).status().unwrap().success()
        );
        let bus = format!("/run/user/{}/bus", user.uid);
        eventually_true("the user's bus", || Path::new(&bus).exists());
        Some(user)
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut user = Command::new("setpriv");
        user.args(["--reuid", self.uid, "--regid", self.uid, "--clear-groups"]).arg(binary()).args(arguments);
        user.env("MEMLEDGER_OOM_KERNEL_LOG", "off"); // as where only root may read it
        user.env("XDG_RUNTIME_DIR", format!("/run/user/{}", self.uid)).env("HOME", "/home/memledger-test");
        user.env("MEMLEDGER_RUN_SPOOL", "").current_dir("/").output().unwrap()
    }
}

impl Drop for SystemdUser {
    fn drop(&mut self) {
        let _ = Command::new("loginctl").args(["disable-linger", "memledger-test"]).status();
        let _ = Command::new("loginctl").args(["terminate-user", "memledger-test"]).status();
        let _ = Command::new("userdel").args(["--force", "--remove", "memledger-test"]).status();
    }
}

#[test]
fn user_with_systemd_gets_a_cgroup_with_a_limit() {
    let Some(user) = SystemdUser::start() else { return };
    let output = user.run(&["run", "--memory=64M", "--name=hog", "--", "python3", "-c", HOG]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(137), "{errors}");
    assert!(errors.contains("lost a process to the kernel's OOM killer"), "{errors}");
    let why = user.run(&["why", "hog", "--state.path=", "--local.socket="]);
    let text = String::from_utf8_lossy(&why.stdout).into_owned();
    assert!(text.contains("OUT OF MEMORY, without a record of the kill"), "{text}");
    assert!(text.contains("its cgroup counted an OOM kill"), "{text}");
    // a worker that is killed does not end the others
    let script = "python3 -c 'b = bytearray(200 << 20)'; echo $?; cat /proc/self/cgroup";
    let output = user.run(&["run", "--memory=64M", "--name=worker", "--", "sh", "-c", script]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.starts_with("137\n"), "{text}");
    assert!(text.contains("/user@1717.service/app.slice/memledger-"), "{text}");
}
