//! The demo (`deploy/demo`), run as a new user runs it, with a real Prometheus and a real Alertmanager.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use fake_nvml::{FakeNvml, State};
use serde_json::{Value, json};

use super::{in_repository, script};
use crate::prometheus::provided;
use crate::support::docker::{Engine, signal};
use crate::support::oom::hog;
use crate::support::{
    Metrics, binary, cgroups, eventually, eventually_true, processes_naming, run, terminate,
};

/// A demo on its own ports and in its own folder. Killed by SIGKILL when dropped; the next one removes what that leaves.
struct Demo {
    child: Child,
    folder: tempfile::TempDir,
}

/// The demo's command line with a status file and a log in this folder; `None`, with the reason printed, where something is
/// missing.
fn command(folder: &Path, log: &str) -> Option<Command> {
    let hog = hog()?;
    let driver = FakeNvml::install(folder, &State::default()).expect("the fake library is installed");
    let log = std::fs::File::create(folder.join(log)).expect("a log");
    let mut command = Command::new("/usr/bin/python3"); // its standard library is all that the demo needs
    command.args(["-B", &in_repository("deploy/demo")]);
    command.arg("--memledger").arg(binary()).arg("--nvml").arg(driver.path()).arg("--hog").arg(hog);
    command.stdin(Stdio::null()).stderr(log.try_clone().expect("a log")).stdout(log);
    Some(command)
}

impl Demo {
    /// Starts it with these flags; `None`, with the reason printed, where something is missing.
    fn start(flags: &[&str]) -> Option<Self> {
        let folder = tempfile::tempdir().expect("a folder");
        let mut command = command(folder.path(), "log")?;
        let child = command.arg("--status").arg(folder.path().join("status")).args(flags).spawn();
        Some(Self { child: child.expect("the demo starts"), folder })
    }

    fn status_file(&self) -> PathBuf {
        self.folder.path().join("status")
    }

    fn status(&self) -> Result<Value, String> {
        let text = std::fs::read_to_string(self.status_file()).map_err(|error| error.to_string())?;
        serde_json::from_str(&text).map_err(|error| error.to_string())
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Waits until it is playing; returns its status.
    fn playing(&self) -> Value {
        eventually("state playing", || match self.status()? {
            status if status["state"] == "playing" => Ok(status),
            status => Err(format!("{status}; {}", self.log())),
        })
    }

    /// Stops it by SIGTERM, as service managers do, and waits until it exits.
    fn end(mut self) {
        signal("TERM", self.child.id());
        let status = eventually("the end of the demo", || {
            self.child.try_wait().map_err(|error| error.to_string())?.ok_or_else(|| self.log())
        });
        assert!(status.success(), "{status}: {}", self.log());
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        terminate(&mut self.child);
        let mark = self.status().ok().and_then(|status| Some(status["mark"].as_str()?.to_owned()));
        let left = |mark: &str| std::env::temp_dir().join(mark).exists();
        if mark.is_some_and(|mark| left(&mark)) {
            // each demo clears up after those that were killed
            if let Some(mut next) = command(self.folder.path(), "clearing") {
                let _ = next.args(["--no-docker", "--minutes", "0"]).status();
            }
        }
    }
}

fn text(value: &Value) -> &str {
    value.as_str().expect("text")
}

/// Returns what exists of a demo, by its mark: containers, images, cgroups, mounts, the folder.
fn traces(engine: Option<&Engine>, mark: &str) -> Vec<String> {
    let mut found = Vec::new();
    if let Some(engine) = engine {
        let label = format!("label=memledger.demo={mark}");
        found.extend(engine.docker(&["ps", "-aq", "--filter", &label]).lines().map(str::to_owned));
        let image = format!("memledger-demo:{mark}");
        found.extend(engine.docker(&["images", "-q", &image]).lines().map(str::to_owned));
    }
    let mounts = std::fs::read_to_string("/proc/mounts").expect("mounts");
    found.extend(mounts.lines().filter(|line| line.contains(mark)).map(str::to_owned));
    for path in [cgroups::root().join(mark), std::env::temp_dir().join(mark)] {
        found.extend(path.exists().then(|| path.display().to_string()));
    }
    found
}

/// alerts.py must report a status that differs from what the demo did.
fn assert_alerts_check_finds_mutations(demo: &Demo) {
    let Some(python) = provided("MEMLEDGER_TEST_PYTHON") else { return };
    let with = |change: &dyn Fn(&mut Value)| {
        let mut status = demo.status().expect("the status");
        change(&mut status);
        status
    };
    let leak = "MemledgerContainerMemoryLeakSuspected";
    let mutations = [
        (with(&|s| s["expected"][0]["container_name"] = json!("nobody-1")), "has not fired"),
        (with(&|s| s["expected"][0]["container_name"] = json!("nobody-1")), "fired without a cause"),
        (with(&|s| drop(s["expected"].as_array_mut().expect("a list").remove(0))), "does not provoke it"),
        (with(&|s| s["not_played"][leak] = json!("a lie")), "the demo lists it as impossible"),
        (with(&|s| s["innocent"] = s["containers"].clone()), "for a container that must have no alerts"),
        (with(&|s| s["always"] = json!([])), "MemledgerWatchdog (none): the demo does not provoke it"),
    ];
    let file = demo.folder.path().join("mutated");
    for (status, expected) in mutations {
        std::fs::write(&file, status.to_string()).expect("written");
        let check = in_repository("tests/dashboards/alerts.py");
        let output = Command::new(&python)
            .args(["-B", &check, &file.display().to_string(), "--wait", "0"])
            .output()
            .expect("it runs");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(!output.status.success() && text.contains(expected), "{expected}: {text}");
    }
}

/// What the killed run of the demo's third training should have been set to: of two completed runs, each sample took 1 MiB.
const ADVICE: &str = "BATCH_SIZE=32 ACCUM=8 needs about 5";

/// Runs the verbs that the introduction proposes: `compare` shows both runs of one training, `advise` settings that fit.
fn assert_verbs_of_the_introduction_work(demo: &Demo) {
    let log = demo.log();
    let memledger = binary().display().to_string();
    let proposed = log.lines().filter_map(|line| line.trim().strip_prefix(&memledger));
    let proposed: Vec<Vec<&str>> = proposed.map(|line| line.split_whitespace().collect()).collect();
    assert!(proposed.len() >= 4, "{log}");
    for words in proposed {
        let (code, out, err) = run(&words);
        assert_eq!(code, Some(0), "{words:?}: {err}");
        if words[0] == "compare" {
            let sizes = out.lines().find(|line| line.starts_with("batch_size")).unwrap_or_default();
            assert_eq!(sizes.split_whitespace().collect::<Vec<_>>(), ["batch_size", "8", "16"], "{out}");
        }
        if words[0] == "advise" {
            assert!(out.contains(ADVICE), "{out}");
        }
    }
}

#[test]
fn every_alert_fires_and_resolves_and_every_panel_has_data() {
    for needed in ["MEMLEDGER_TEST_PROMETHEUS", "MEMLEDGER_TEST_ALERTMANAGER", "MEMLEDGER_TEST_PYTHON"] {
        if provided(needed).is_none() {
            return;
        }
    }
    let Some(engine) = Engine::shared() else { return };
    let Some(demo) = Demo::start(&["--rounds", "1"]) else { return };
    let mark = text(&demo.playing()["mark"]).to_owned();
    script("alerts.py", &[&demo.status_file().display().to_string(), "--wait", "600"]);
    assert_alerts_check_finds_mutations(&demo);
    let status = demo.status().expect("the status");
    let url = text(&status["prometheus"]);
    let since = status["since"].to_string();
    if let Some(output) = script("panels.py", &[url, "--since", &since, "--wait", "30"]) {
        eprintln!("{output}");
    }
    super::assert_panels_check_finds_mutations(url, &since);
    assert_verbs_of_the_introduction_work(&demo);
    assert!(demo.log().contains(ADVICE), "{}", demo.log());
    demo.end();
    assert_eq!(traces(Some(&engine), &mark), Vec::<String>::new());
}

#[test]
fn second_demo_is_independent_and_removes_what_a_killed_one_left() {
    let Some(engine) = Engine::shared() else { return };
    let Some(mut killed) = Demo::start(&[]) else { return };
    let first = killed.playing();
    let mark = text(&first["mark"]).to_owned();
    eventually_true("its first containers", || traces(Some(&engine), &mark).len() > 5);
    let Some(beside) = Demo::start(&[]) else { return };
    let second = beside.playing();
    assert!(!traces(Some(&engine), &mark).is_empty(), "a running demo is not touched: {}", beside.log());
    let names = |status: &Value| {
        status["containers"].as_array().expect("a list").iter().map(Value::to_string).collect::<Vec<_>>()
    };
    assert!(names(&first).iter().all(|name| !names(&second).contains(name)), "{first} {second}");
    let folder = std::env::temp_dir().join(&mark);
    killed.child.kill().expect("it is killed");
    killed.child.wait().expect("it ends");
    eventually_true("its programs exit with it", || processes_naming(&folder).is_empty());
    assert!(!traces(Some(&engine), &mark).is_empty(), "a killed demo leaves its containers");
    let Some(next) = Demo::start(&[]) else { return };
    eventually("the next demo removes them", || match traces(Some(&engine), &mark) {
        left if left.is_empty() => Ok(()),
        left => Err(format!("{left:?}; {}", next.log())),
    });
    for demo in [beside, next] {
        let mark = text(&demo.playing()["mark"]).to_owned();
        demo.end();
        assert_eq!(traces(Some(&engine), &mark), Vec::<String>::new());
    }
}

/// Docker creates a container although its client was not waited for.
#[test]
fn interrupt_waits_for_the_end_of_a_command_even_while_it_is_started() {
    let folder = tempfile::tempdir().expect("a folder");
    let program = r#"
import os, signal, subprocess, sys
import processes
fork = subprocess._fork_exec
def fork_and_interrupt(*words):
    pid = fork(*words)
    os.kill(os.getpid(), signal.SIGTERM)
    return pid
subprocess._fork_exec = fork_and_interrupt
processes.INTERRUPTS.watch()
try:
    processes.run("/bin/sh", "-c", 'sleep 0.5; touch "$0/done"', sys.argv[1])
except KeyboardInterrupt:
    print(sorted(os.listdir(sys.argv[1])))
"#;
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-B", "-c", program]).arg(folder.path()).env("PYTHONPATH", in_repository("deploy/demo"));
    let output = command.output().expect("python3");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "['done']", "{output:?}");
}

#[test]
fn demo_uses_cgroups_without_an_engine() {
    let Some(demo) = Demo::start(&["--no-docker"]) else { return };
    let status = demo.playing();
    let mark = text(&status["mark"]).to_owned();
    let mut alerts = status["expected"].as_array().expect("a list").iter().rev();
    let killed = alerts.find(|alert| alert["alertname"] == "MemledgerContainerOOMKilled");
    let name = text(&killed.expect("an expected kill")["container_name"]);
    let url = format!("{}/metrics", text(&status["memledger"]["gpu-host"]));
    eventually("a kill attributed to a container without a runtime", || {
        let mut response = ureq::get(&url).call().map_err(|error| error.to_string())?;
        let metrics =
            Metrics::parse(&response.body_mut().read_to_string().map_err(|error| error.to_string())?);
        metrics.try_value("memledger_container_last_oom_kill_timestamp_seconds", &[("container_name", name)])
    });
    demo.end();
    assert_eq!(traces(None, &mark), Vec::<String>::new());
}

#[test]
fn time_lapse_divides_only_durations_and_rejects_unknown_constructs() {
    script("lapse.py", &[]);
}
