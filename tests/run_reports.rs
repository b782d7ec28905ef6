//! Reports of runs in a directory, and in buckets of two servers that share no code with memledger or with one another: moto (Python) and
//! s3s-fs (Rust), which checks signatures. The runs are those of `memledger run`.

mod bucket;
mod directory;
mod servers;

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

pub(crate) use servers::KEYS;

use crate::support::docker::unique;
use crate::support::{Memledger, binary, eventually};

/// A host of its own: runs, a ledger, and reports.
pub(crate) struct Host {
    folder: tempfile::TempDir,
    /// Flags of the target.
    pub(crate) flags: Vec<String>,
    /// Variables with the credentials.
    variables: Vec<String>,
}

impl Host {
    pub(crate) fn new(flags: &[&str], variables: &[&str]) -> Self {
        std::fs::write("/proc/self/oom_score_adj", "0").unwrap(); // in the guest it is that of its agent
        let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        Self { folder: tempfile::tempdir().unwrap(), flags: owned(flags), variables: owned(variables) }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn spool(&self) -> String {
        format!("--run.spool={}", self.path("spool").display())
    }

    pub(crate) fn serve(&self, more: &[&str]) -> Memledger {
        let state = format!("--state.path={}", self.path("state").display());
        let spool = self.spool();
        let own = format!("--container.include=^mlt-{}-", std::process::id()); // not the cgroups of other tests
        let mut flags = vec!["--docker.socket=", "--podman.socket=", &spool, &state, &own];
        flags.extend(self.flags.iter().map(String::as_str).chain(more.iter().copied()));
        let mut wrapper = vec!["/usr/bin/env", "-u", "AWS_PROFILE"];
        wrapper.extend(self.variables.iter().map(String::as_str));
        Memledger::start_through(&wrapper, &flags)
    }

    /// Runs a command to its end, as a run. Returns its name.
    pub(crate) fn run(&self, flags: &[&str], command: &[&str]) -> String {
        let name = unique("report");
        let mut run = Command::new(binary());
        run.args(["run", &self.spool(), "--reporter.directory=", "--name", &name])
            .args(flags)
            .arg("--")
            .args(command);
        run.stdin(Stdio::null()).stderr(Stdio::null()).status().unwrap();
        name
    }

    /// Runs a verb on the ledger.
    fn verb(&self, arguments: &[&str]) -> Output {
        let state = format!("--state.path={}", self.path("state").display());
        let mut verb = Command::new(binary());
        verb.args(arguments).args(["--local.socket=", &state]);
        verb.output().unwrap()
    }

    /// Returns the result of `report --check`: whether it succeeded, and what it printed.
    fn check(&self) -> (bool, String) {
        let mut check = Command::new(binary());
        check.env_clear().envs(self.variables.iter().filter_map(|variable| variable.split_once('=')));
        let output = check.args(["report", "--check"]).args(&self.flags).output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&text).into_owned())
    }
}

/// Returns a value of the target.
pub(crate) fn value(memledger: &Memledger, family: &str, target: &str) -> Option<f64> {
    memledger.metrics().get(family, &[("target", target)])
}

/// Waits until this many reports are at the target.
fn await_written(memledger: &Memledger, target: &str, count: f64) {
    eventually("reports at the target", || {
        match value(memledger, "memledger_reports_written_total", target) {
            Some(written) if written == count => Ok(()),
            written => Err(format!("{written:?} of {count}: {}", memledger.log())),
        }
    });
}

fn json(text: &[u8]) -> Value {
    serde_json::from_slice(text).unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(text)))
}
