//! The programs of private engines: those of this machine, or the newest, which `tests/setup/engines.sh` builds for `make test-engines`.

use std::path::PathBuf;
use std::process::Command;

use super::skip;

/// The programs with which a [`super::docker::PrivateEngine`] or a [`super::podman::Podman`] is started.
#[derive(Clone, Debug)]
pub struct Programs {
    /// The folder of the newest ones.
    folder: Option<PathBuf>,
}

impl Programs {
    /// Returns those of this machine.
    pub fn installed() -> Self {
        Self { folder: None }
    }

    /// Returns the newest; `None`, with the reason printed, where they are not built.
    pub fn newest() -> Option<Self> {
        let folder = std::env::var_os("MEMLEDGER_TEST_ENGINES").filter(|folder| !folder.is_empty());
        if folder.is_none() {
            skip(
                "MEMLEDGER_TEST_ENGINES is not set; `make test-engines` builds the newest engines and sets it",
            );
        }
        Some(Self { folder: Some(folder?.into()) })
    }

    /// Returns the folder of the newest ones; `None` of this machine's.
    pub fn folder(&self) -> Option<&std::path::Path> {
        self.folder.as_deref()
    }

    /// Returns what starts a program: its path if it is one of the newest, else its name.
    pub fn path(&self, name: &str) -> PathBuf {
        let path = self.folder.as_ref().map(|folder| folder.join(name));
        path.filter(|path| path.is_file()).unwrap_or_else(|| name.into())
    }

    /// Returns a command whose children find these programs first: dockerd starts containerd, containerd its shim, and that runc.
    pub fn command(&self, name: &str) -> Command {
        let mut command = Command::new(self.path(name));
        if let Some(folder) = &self.folder {
            let path = std::env::var_os("PATH").unwrap_or_default();
            let folders = std::iter::once(folder.clone()).chain(std::env::split_paths(&path));
            command.env("PATH", std::env::join_paths(folders).expect("no folder has a colon"));
        }
        command
    }

    /// Returns the configuration of dockerd. The newest runc is built without seccomp, which needs a library.
    pub fn daemon_json(&self) -> &'static str {
        if self.folder.is_some() { r#"{"seccomp-profile": "unconfined"}"# } else { "{}" }
    }
}
