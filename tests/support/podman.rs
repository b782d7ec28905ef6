//! A Podman with a service, a socket and a storage of its own.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::cgroups::{parent, remove_tree_everywhere};
use super::docker::{unique, unmount_below};
use super::engines::Programs;
use super::{eventually_true, holds_in_time, processes_naming, skip, test_label};

/// A service with its socket and storage, removed when dropped.
pub struct Podman {
    dir: tempfile::TempDir,
    programs: Programs,
    /// What its cgroups are below, relative to the root of a hierarchy.
    cgroup: String,
    service: Option<Child>,
}

impl Podman {
    /// Starts the API service of Debian's Podman; `None`, with the reason printed, where there is no Podman.
    pub fn start() -> Option<Self> {
        if Path::new("/usr/bin/podman").exists() {
            return Some(Self::of(Programs::installed()));
        }
        skip("no /usr/bin/podman; tests/setup/setup.sh installs it");
        None
    }

    /// Starts the API service with these programs.
    pub fn of(programs: Programs) -> Self {
        let dir = tempfile::Builder::new().prefix("mlt-podman-").tempdir().expect("a folder");
        let cgroup = format!("{}/{}", parent(), unique("podman"));
        let mut podman = Self { dir, programs, cgroup, service: None };
        if let Some(folder) = podman.programs.folder() {
            // without seccomp, as its runc; events in a file, because journald may not run here
            let config = format!(
                "[engine]\nhelper_binaries_dir = [{:?}]\nevents_logger = \"file\"\n\
                 [containers]\nlog_driver = \"k8s-file\"\nseccomp_profile = \"unconfined\"\n\
                 [network]\nnetwork_config_dir = {:?}\n",
                folder.join("helpers"),
                podman.dir.path().join("networks")
            );
            std::fs::write(podman.dir.path().join("containers.conf"), config).expect("a file");
        }
        podman.start_service();
        let image = podman.dir.path().join("image.tar").display().to_string();
        let saved = Command::new("docker").args(["save", "memledger-test:1", "-o", &image]).status();
        assert!(saved.expect("docker runs").success());
        podman.ok(&["load", "-q", "-i", &image]);
        podman
    }

    /// Starts the API service, and waits until it listens.
    pub fn start_service(&mut self) {
        let _ = std::fs::remove_file(self.socket()); // of one that was killed
        let socket = format!("unix://{}", self.socket());
        let mut service = self.command(&["system", "service", "-t", "0", &socket]);
        self.service = Some(service.stderr(Stdio::null()).spawn().expect("podman starts"));
        // the file is there before it listens
        eventually_true("the socket", || UnixStream::connect(self.socket()).is_ok());
    }

    /// Kills the API service. The containers keep running, each with its monitor.
    pub fn kill_service(&mut self) {
        let mut service = self.service.take().expect("it runs");
        service.kill().and_then(|()| service.wait()).expect("the service is killed");
    }

    pub fn socket(&self) -> String {
        self.dir.path().join("podman.sock").display().to_string()
    }

    /// Podman with its own root. runc and cgroupfs: crun rejects hybrid hosts, and systemd may not run here.
    fn command(&self, arguments: &[&str]) -> Command {
        let path = |name: &str| self.dir.path().join(name).display().to_string();
        let mut command = match self.programs.folder() {
            Some(_) => self.programs.command("podman"),
            None => Command::new("/usr/bin/podman"),
        };
        if self.programs.folder().is_some() {
            command.env("CONTAINERS_CONF", path("containers.conf"));
            command.env("PODMAN_IGNORE_CGROUPSV1_WARNING", "1");
        }
        command.args(["--root", &path("root"), "--runroot", &path("run"), "--tmpdir", &path("tmp")]);
        command.args(["--cgroup-manager", "cgroupfs", "--storage-driver", "vfs"]);
        command.arg("--runtime").arg(self.programs.path("runc"));
        command.args(arguments);
        command
    }

    /// Returns the standard output, or the standard error of a command that fails.
    pub fn try_podman(&self, arguments: &[&str]) -> Result<String, String> {
        let output = self.command(arguments).output().map_err(|error| format!("podman: {error}"))?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// Like [`Podman::try_podman`]; panics on failure.
    pub fn ok(&self, arguments: &[&str]) -> String {
        self.try_podman(arguments).unwrap_or_else(|error| panic!("{arguments:?}: {error}"))
    }

    /// Returns the flag that puts a pod or a container where its cgroups are removed.
    pub fn cgroup_parent(&self) -> String {
        format!("--cgroup-parent=/{}/libpod_parent", self.cgroup)
    }

    /// Runs a container that sleeps.
    pub fn run(&self, name: &str, options: &[&str], seconds: &str) -> String {
        self.run_command(name, options, &["/busybox/sleep", seconds])
    }

    /// Runs a container, with ulimits for hosts where they cannot be raised, and returns its id.
    pub fn run_command(&self, name: &str, options: &[&str], command: &[&str]) -> String {
        let fixed = ["run", "-d", "--name", name, "--network", "none", "--ulimit", "nofile=1024:1024"];
        let parent = self.cgroup_parent();
        let label = format!("--label={}", test_label());
        let more = [&*parent, &*label, "--ulimit", "nproc=1024:1024"];
        self.ok(&[&fixed[..], options, &more, &["memledger-test:1"], command].concat())
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        for kind in [&["pod", "rm"][..], &["rm"]] {
            let _ = self.try_podman(&[kind, &["-fa", "-t", "0"]].concat());
        }
        if let Some(service) = &mut self.service {
            let _ = service.kill();
            let _ = service.wait();
        }
        // the monitor of each container starts one more podman, which makes its folders anew where they are gone
        holds_in_time(|| processes_naming(&self.dir.path().join("root")).is_empty());
        unmount_below(self.dir.path());
        remove_tree_everywhere(&self.cgroup);
    }
}
