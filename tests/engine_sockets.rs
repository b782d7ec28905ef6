//! Which engines a command finds: `DOCKER_HOST`, the caller's own sockets, and what it says of those that it does not read.

use std::os::unix::fs::{chown, symlink};
use std::os::unix::net::UnixListener;
use std::process::Command;

use crate::support::docker::{Container, Engine, PrivateEngine, unique};
use crate::support::{binary, eventually, run};

const NO_LEDGER: &str = "--state.path=/nonexistent/ledger";
const NO_CRI: &str = "--cri.endpoint=";
const NO_PODMAN: &str = "--podman.socket=";

/// A container that has ended with exit code 3.
fn ended(engine: &Engine) -> Container {
    let container = engine.run(&unique("sockets"), &[], &["/busybox/sh", "-c", "exit 3"]);
    container.docker(&["wait"]);
    container
}

/// Runs a command without the variables of an engine but these; returns standard output and standard error.
fn run_as(words: &[&str], variables: &[(&str, &str)]) -> (String, String) {
    let mut command = Command::new(binary());
    for name in ["DOCKER_HOST", "XDG_RUNTIME_DIR", "SUDO_UID", "RUST_BACKTRACE"] {
        command.env_remove(name);
    }
    let output = command.args(words).envs(variables.iter().copied()).output().expect("memledger runs");
    let text =
        |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).split_whitespace().collect::<Vec<_>>().join(" ");
    (text(output.stdout), text(output.stderr))
}

#[test]
fn why_begins_with_the_socket_that_is_not_there() {
    let folder = tempfile::tempdir().expect("a folder");
    let missing = format!("--docker.socket={}", folder.path().join("none.sock").display());
    let (code, out, _) = run(&["why", "train", &missing, NO_PODMAN, NO_CRI, NO_LEDGER]);
    let says = format!(
        "The containers of docker are unknown: there is no socket at {}/none.sock",
        folder.path().display()
    );
    let text = out.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(code.is_some() && text.starts_with(&says), "{out}");
    assert!(text.contains("--docker.socket") && text.contains("Nothing is known about train"), "{out}");
    assert_eq!(text.matches(&says).count(), 1, "{out}");
    // its daemon has ended
    let socket = folder.path().join("ended.sock");
    drop(UnixListener::bind(&socket).expect("a socket"));
    let ended = format!("--docker.socket={}", socket.display());
    let (_, out, _) = run(&["why", "train", &ended, NO_PODMAN, NO_CRI, NO_LEDGER]);
    let text = out.split_whitespace().collect::<Vec<_>>().join(" ");
    let says = "The containers of docker are unknown: no process listens on ";
    assert!(text.starts_with(says) && text.contains("start the daemon"), "{out}");
}

#[test]
fn docker_host_and_the_callers_runtime_directory_name_engines() {
    let Some(shared) = Engine::shared() else { return };
    // an engine that is not at the default path
    let mut private = PrivateEngine::new();
    private.start();
    private.load_from(&shared);
    let engine = &private.engine;
    let container = ended(engine);
    let socket = engine.socket.display().to_string();
    let why = ["why", &*container.name, NO_CRI, NO_LEDGER];
    let folder = tempfile::tempdir().expect("a folder");
    symlink(&engine.socket, folder.path().join("docker.sock")).expect("a link");
    let directory = folder.path().to_str().expect("text");
    let host = format!("unix://{socket}");
    for variables in [[("DOCKER_HOST", &*host)], [("XDG_RUNTIME_DIR", directory)]] {
        eventually("a response of the engine", || match run_as(&why, &variables) {
            (out, _) if out.contains("ENDED WITH AN ERROR") => Ok(()),
            (out, err) => Err(format!("{variables:?}: {out}{err}")),
        });
    }
    for (value, says) in [
        ("tcp://user:secret@127.0.0.1:1", "DOCKER_HOST is tcp://,"),
        ("ssh://host", "DOCKER_HOST is ssh://,"),
    ] {
        for words in [&why[..], &["ps", NO_CRI, NO_PODMAN]] {
            let (out, err) = run_as(words, &[("DOCKER_HOST", value)]);
            assert_eq!(err.matches(says).count(), 1, "{words:?}: {out}{err}");
            assert!(!err.contains("secret") && !out.is_empty(), "{words:?}: {out}{err}");
        }
    }
    let missing = run_as(&why, &[("DOCKER_HOST", "unix:///nonexistent/docker.sock")]);
    assert!(missing.0.contains("there is no socket at /nonexistent/docker.sock"), "{missing:?}");
}

#[test]
fn root_reads_no_engine_of_a_user_unless_it_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("docker.sock");
    let _listener = UnixListener::bind(&socket).expect("a socket");
    chown(&socket, Some(3001), None).expect("root gives it away");
    let (directory, host) = (folder.path().to_str().expect("text"), format!("unix://{}", socket.display()));
    let why = ["why", "train", NO_PODMAN, NO_CRI, NO_LEDGER];
    let (_, err) = run_as(&why, &[("DOCKER_HOST", &host), ("XDG_RUNTIME_DIR", directory)]);
    assert!(err.contains("the engine of user 3001 is not read"), "{err}");
    assert!(err.contains(&format!("--docker.socket={}", socket.display())), "{err}");
    let named = format!("--docker.socket={}", socket.display());
    let (_, err) = run_as(&[&why[..], &[&named]].concat(), &[("DOCKER_HOST", &host)]);
    assert!(!err.contains("is not read"), "{err}");
}
