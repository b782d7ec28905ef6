//! A real Podman service with its own socket and storage.

use std::process::{Command, Stdio};

use crate::support::cgroups::{parent, remove_tree_everywhere};
use crate::support::docker::unique;
use crate::support::{Memledger, eventually_true, holds_in_time, processes_naming, run, skip, test_label};

/// A service with its socket and storage, removed when dropped.
pub struct Podman {
    dir: tempfile::TempDir,
    /// What its cgroups are below, relative to the root of a hierarchy.
    cgroup: String,
    service: Option<std::process::Child>,
}

impl Podman {
    /// Starts the API service; `None`, with the reason printed, where there is no Podman.
    pub fn start() -> Option<Self> {
        if !std::path::Path::new("/usr/bin/podman").exists() {
            skip("no /usr/bin/podman; tests/setup/setup.sh installs it");
            return None;
        }
        let dir = tempfile::Builder::new().prefix("mlt-podman-").tempdir().expect("a folder");
        let cgroup = format!("{}/{}", parent(), unique("podman"));
        let mut podman = Self { dir, cgroup, service: None };
        let socket = format!("unix://{}", podman.socket());
        let mut service = podman.command(&["system", "service", "-t", "0", &socket]);
        podman.service = Some(service.stderr(Stdio::null()).spawn().expect("podman starts"));
        eventually_true("the socket", || std::path::Path::new(&podman.socket()).exists());
        let image = podman.dir.path().join("image.tar").display().to_string();
        let saved = Command::new("docker").args(["save", "memledger-test:1", "-o", &image]).status();
        assert!(saved.expect("docker runs").success());
        podman.ok(&["load", "-q", "-i", &image]);
        Some(podman)
    }

    pub fn socket(&self) -> String {
        self.dir.path().join("podman.sock").display().to_string()
    }

    /// Podman with its own root. runc and cgroupfs: crun rejects hybrid hosts, and systemd may not run here.
    fn command(&self, arguments: &[&str]) -> Command {
        let path = |name: &str| self.dir.path().join(name).display().to_string();
        let mut command = Command::new("/usr/bin/podman");
        command.args(["--root", &path("root"), "--runroot", &path("run"), "--tmpdir", &path("tmp")]);
        command.args(["--cgroup-manager", "cgroupfs", "--storage-driver", "vfs", "--runtime", "runc"]);
        command.args(arguments);
        command
    }

    /// Returns the standard output; panics on failure.
    pub fn ok(&self, arguments: &[&str]) -> String {
        let output = self.command(arguments).output().expect("podman runs");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// Runs a container, with ulimits for hosts where they cannot be raised.
    pub fn run(&self, name: &str, options: &[&str], seconds: &str) -> String {
        let fixed = ["run", "-d", "--name", name, "--network", "none", "--ulimit", "nofile=1024:1024"];
        let parent = format!("--cgroup-parent=/{}/libpod_parent", self.cgroup);
        let label = format!("--label={}", test_label());
        let command =
            [&*parent, &label, "--ulimit", "nproc=1024:1024", "memledger-test:1", "/busybox/sleep", seconds];
        self.ok(&[&fixed[..], options, &command[..]].concat())
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        let _ = self.command(&["rm", "-fa", "-t", "0"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
        if let Some(service) = &mut self.service {
            let _ = service.kill();
            let _ = service.wait();
        }
        // the monitor of each container starts one more podman, which makes its folders anew where they are gone
        holds_in_time(|| processes_naming(&self.dir.path().join("root")).is_empty());
        remove_tree_everywhere(&self.cgroup);
    }
}

#[test]
fn finds_containers_through_podman_socket() {
    let Some(podman) = Podman::start() else { return };
    let name = format!("pod-train-{}", std::process::id());
    let id = podman.run(&name, &["--memory", "128m", "-e", "BATCH_SIZE=8"], "300");
    let socket = format!("--podman.socket={}", podman.socket());
    let include = format!("--container.include=^pod-.*-{}$", std::process::id());
    let memledger = Memledger::start(&["--docker.socket=", &socket, &include]);
    let labels = [("container_name", name.as_str())];
    memledger.eventually("the container", |metrics| {
        metrics.try_value("memledger_container_memory_usage_bytes", &labels)?;
        metrics.try_value("memledger_container_run_info", &[labels[0], ("batch_size", "8")])?;
        metrics.try_value("memledger_container_processes", &[labels[0], ("role", "other")])
    });
    let metrics = memledger.metrics();
    assert_eq!(metrics.value("memledger_runtime_up", &[("runtime", "podman")]), 1.0);
    let info = [labels[0], ("runtime", "podman"), ("container_id", id.as_str())];
    assert_eq!(metrics.value("memledger_container_info", &info), 1.0);
    assert_eq!(metrics.value("memledger_container_memory_limit_bytes", &labels), f64::from(128 << 20));
    let running = metrics.value("memledger_containers", &[("runtime", "podman")]);
    assert_eq!(running, 1.0, "the monitor process is not a container");
    // another one, through events; it ends when it was seen
    let short = format!("pod-short-{}", std::process::id());
    podman.run(&short, &["--rm"], "300");
    memledger.eventually("the short-lived container", |m| {
        m.try_value("memledger_container_info", &[("container_name", &short)])
    });
    podman.ok(&["kill", &short]);
    memledger.eventually("its end", |metrics| {
        match metrics.get("memledger_containers", &[("runtime", "podman")]) {
            Some(1.0) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
    // names are kept while Podman is down
    let mut podman = podman;
    let mut service = podman.service.take().expect("started");
    service.kill().expect("killed");
    service.wait().expect("reaped");
    memledger.eventually("the lost connection", |metrics| {
        match metrics.get("memledger_runtime_up", &[("runtime", "podman")]) {
            Some(0.0) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
    assert!(memledger.fresh_metrics().get("memledger_container_memory_usage_bytes", &labels).is_some());
    let (code, doctor, _) = run(&["doctor", "--docker.socket=", &socket]);
    assert_eq!(code, Some(0));
    assert!(doctor.contains("MISSING  podman"), "the socket has no listener: {doctor}");
}
