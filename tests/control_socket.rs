//! The control socket: verbs that use it, who is refused, and what happens to its file.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;

use serde_json::Value;

use crate::events::{exit, store_with};
use crate::support::docker::{Engine, unique};
use crate::support::{Memledger, binary, eventually, run, run_on_ledger};

const ALONE: &[&str] =
    &["--docker.socket=", "--podman.socket=", "--container.include=^none$", "--no-web.enable-api"];

/// A memledger with a control socket in a folder of its own.
struct Controlled {
    memledger: Memledger,
    folder: tempfile::TempDir,
}

impl Controlled {
    fn start(wrapper: &[&str], flags: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listen = format!("--local.socket={}/control.sock", folder.path().display());
        let memledger = Memledger::start_through(wrapper, &[ALONE, &[&listen], flags].concat());
        let this = Self { memledger, folder };
        eventually("the control socket", || {
            UnixStream::connect(this.path()).map_err(|error| error.to_string())
        });
        this
    }

    fn path(&self) -> String {
        self.folder.path().join("control.sock").display().to_string()
    }

    /// Runs a verb with only the socket.
    fn verb(&self, words: &[&str]) -> (Option<i32>, String, String) {
        run_on_ledger(&[words, &["--state.path=", &format!("--local.socket={}", self.path())]].concat())
    }

    fn get(&self, path: &str) -> String {
        let mut stream = UnixStream::connect(self.path()).unwrap();
        // a connection that is rejected may be closed before its request is written
        let written = write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n");
        let mut response = Vec::new();
        match written.and(stream.read_to_end(&mut response).map(drop)) {
            Err(error) if response.is_empty() => error.to_string(),
            _ => String::from_utf8_lossy(&response).into_owned(),
        }
    }
}

#[test]
fn verbs_query_a_ledger_that_they_cannot_read() {
    let dir = tempfile::tempdir().unwrap();
    let stored = [exit(1, "train", 1e9), exit(2, "other one", 1e9 + 1.0), exit(3, "other one", 1e9 + 2.0)];
    drop(store_with(dir.path(), stored));
    let state = format!("--state.path={}", dir.path().display());
    let controlled = Controlled::start(&[], &[&state]);
    let (code, text, errors) = controlled.verb(&["events", "--json", "--limit=0"]);
    let ids: Vec<_> =
        text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["id"].clone()).collect();
    // kills of other tests may have come after them, more than the hundred that are listed otherwise
    assert!(code == Some(0) && ids.starts_with(&[1.into(), 2.into(), 3.into()]), "{ids:?} {errors}");
    let (_, table, _) = controlled.verb(&["events", "--container=other one", "--since=2001-01-01T00:00:00Z"]);
    assert!(table.contains("other one") && !table.contains("train"), "{table}");
    let (_, newest, errors) = controlled.verb(&["events", "--json", "--container=other one", "--limit=1"]);
    let newest: Value = serde_json::from_str(&newest).unwrap();
    assert!(newest["id"] == 3 && errors.contains("newest 1"), "{newest}{errors}");
    let (code, text, errors) = controlled.verb(&["why", "other one"]);
    assert!(code == Some(0) && text.starts_with("other one"), "{text}{errors}");
    assert!(controlled.verb(&["why", "--last", "--json"]).1.starts_with('{'));
    let (code, text, errors) = controlled.verb(&["why", "nobody"]);
    assert!(code == Some(1) && text.contains("known containers: other one, train"), "{text}{errors}");
    // a directory that a flag names is read, there or not, and nobody is asked
    let elsewhere = tempfile::tempdir().unwrap();
    let (path, socket) = (elsewhere.path().display(), controlled.path());
    let (code, text, errors) = run_on_ledger(&[
        "why",
        "train",
        &format!("--state.path={path}"),
        &format!("--local.socket={socket}"),
    ]);
    let told = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(code != Some(0) && told.contains("There is no ledger in"), "{text}{errors}");
    // as a variable it is the setting of the memledger that answers
    let variables =
        [("MEMLEDGER_STATE_PATH", path.to_string()), ("MEMLEDGER_OOM_KERNEL_LOG", "off".to_owned())];
    let asked = Command::new(binary())
        .args(["why", "train", &format!("--local.socket={socket}")])
        .envs(variables)
        .output()
        .expect("memledger runs");
    assert!(String::from_utf8_lossy(&asked.stdout).starts_with("train"), "{asked:?}");
    assert!(controlled.get("/api/v1/containers").starts_with("HTTP/1.0 200"));
    let (code, text, errors) = controlled.verb(&["release-gpu"]);
    assert!(code == Some(0) && text.contains("\"closed\": true"), "{text}{errors}");
    let (_, text, _) = controlled.verb(&["doctor"]);
    assert!(
        text.contains(&format!("{} answers (owner ", controlled.path())) && text.contains("mode 0660)"),
        "{text}"
    );
    let socket = controlled.path();
    controlled.memledger.signal("TERM");
    controlled.memledger.wait();
    assert!(!std::path::Path::new(&socket).exists(), "removed at the end");
    let (_, text, _) = run(&["doctor", "--state.path=", &format!("--local.socket={socket}")]);
    assert!(text.contains(&format!("no memledger listens on {socket}")), "{text}");
}

/// Returns the warnings about its control socket: a kill that another test causes is a warning too.
fn socket_warnings(memledger: &Memledger) -> Vec<String> {
    let log = memledger.log();
    let warnings =
        log.lines().filter(|line| line.contains("level=warn") && line.contains("no control socket"));
    warnings.map(str::to_owned).collect()
}

#[test]
fn live_socket_is_kept_and_a_stale_one_is_replaced() {
    let first = Controlled::start(&[], &[]);
    let listen = format!("--local.socket={}", first.path());
    let second = Memledger::start(&[ALONE, &[&listen]].concat());
    let [warning] = &socket_warnings(&second)[..] else { panic!("one warning: {}", second.log()) };
    assert!(
        warning.contains("another memledger listens on") && warning.contains("set another --local.socket"),
        "{warning}"
    );
    assert!(first.get("/-/ready").contains("memledger is ready"), "the first one still answers");
    drop(second);
    assert!(first.get("/-/ready").contains("memledger is ready"), "also after the end of the other");
    first.memledger.signal("KILL");
    first.memledger.wait();
    assert!(UnixStream::connect(first.folder.path().join("control.sock")).is_err(), "its file is left");
    let third = Memledger::start(&[ALONE, &[&listen]].concat());
    eventually("the new socket", || {
        UnixStream::connect(first.folder.path().join("control.sock")).map_err(|error| error.to_string())
    });
    assert_eq!(socket_warnings(&third), Vec::<String>::new());
}

#[test]
fn path_that_cannot_be_created_is_one_warning() {
    let memledger = Memledger::start(&[ALONE, &["--local.socket=/proc/nothing/control.sock"]].concat());
    let [warning] = &socket_warnings(&memledger)[..] else { panic!("one warning: {}", memledger.log()) };
    assert!(warning.contains("/proc/nothing/control.sock"), "{warning}");
}

#[test]
fn curl_uses_the_socket_as_documented() {
    let reports = tempfile::tempdir().unwrap();
    let reporter = format!("--reporter.directory={}", reports.path().display());
    let controlled = Controlled::start(&[], &[&reporter]);
    let path = controlled.path();
    let curl = |words: &[&str]| {
        let words = [&["-sS", "-w", "\n%{http_code}", "--unix-socket", &path], words].concat();
        let output = Command::new("curl").args(words).output().expect("curl runs");
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    let response = curl(&["http://localhost/api/v1/containers"]);
    assert!(response.starts_with('{') && response.ends_with("\n200"), "{response}");
    let response = curl(&["-X", "POST", "http://localhost/api/v1/containers/my-training/cleanup"]);
    assert!(
        response.contains("no container \"my-training\" is running") && response.ends_with("\n404"),
        "{response}"
    );
}

#[test]
fn connections_above_the_limit_and_rejections_get_a_response_and_are_counted() {
    let controlled = Controlled::start(&[], &[]);
    let mut connections: Vec<_> = (0..16).map(|_| UnixStream::connect(controlled.path()).unwrap()).collect();
    eventually("the limit", || match controlled.get("/-/ready") {
        response if response.starts_with("HTTP/1.0 503") && response.contains("too many connections") => {
            Ok(())
        }
        response => {
            if response.starts_with("HTTP/1.0 200") {
                connections.push(UnixStream::connect(controlled.path()).unwrap()); // one of before was still open
            }
            Err(response)
        }
    });
    eventually("the reason from a verb", || {
        let (code, text, errors) = controlled.verb(&["events"]);
        assert!(code == Some(0) || errors.contains("too many connections"), "{text}{errors}");
        if code == Some(0) {
            connections.push(UnixStream::connect(controlled.path()).unwrap());
            return Err(text);
        }
        Ok(())
    });
    drop(connections);
    eventually("a free place", || match controlled.get("/-/ready") {
        response if response.starts_with("HTTP/1.0 200") => Ok(()),
        response => Err(response),
    });
    let words = ["--pid", "--fork", "python3", "-c", QUERY, &controlled.path()];
    let refused = Command::new("unshare").args(words).output().expect("unshare runs");
    assert!(refused.stdout.starts_with(b"HTTP/1.0 403"), "{refused:?}");
    controlled.memledger.eventually("both are counted", |metrics| {
        let of = |reason| metrics.value("memledger_web_refused_total", &[("reason", reason)]);
        match (of("connections"), of("control_socket")) {
            (1.0.., 1.0) => Ok(()),
            counts => Err(format!("{counts:?}")),
        }
    });
}

/// What a process prints that queries the socket at its first argument.
pub(crate) const QUERY: &str = "import socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
s.sendall(b'POST /-/release-gpu HTTP/1.0\\r\\nHost: localhost\\r\\n\\r\\n')
print(s.makefile('rb').read().decode())";

#[test]
fn refuses_processes_of_nested_pid_namespaces() {
    let controlled = Controlled::start(&[], &[]);
    let response_to = |wrapper: &[&str]| {
        let path = controlled.path();
        let mut words = [wrapper, &["python3", "-c", QUERY, &path]].concat();
        let output = Command::new(words.remove(0)).args(words).output().expect("python3 runs");
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    let response = response_to(&["env"]);
    assert!(response.starts_with("HTTP/1.0 200"), "{response}");
    let response = response_to(&["unshare", "--pid", "--fork"]);
    assert!(
        response.starts_with("HTTP/1.0 403") && response.contains("belongs to a container"),
        "{response}"
    );
    eventually("the log", || match controlled.memledger.log() {
        log if log.contains("refused a client of the control socket") => Ok(()),
        log => Err(log),
    });
}

#[test]
fn refuses_processes_that_it_cannot_see() {
    let wrapper = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let controlled = Controlled::start(&wrapper, &[]);
    let response = controlled.get("/api/v1/containers");
    assert!(response.starts_with("HTTP/1.0 403") && response.contains("pid: host"), "{response}");
    let (code, text, errors) = controlled.verb(&["why", "train"]);
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(code == Some(3) && text.contains("hostPID: true"), "{text}{errors}");
}

#[test]
fn refuses_root_of_a_container_that_mounts_the_socket() {
    let Some(engine) = Engine::shared() else { return };
    let controlled = Controlled::start(&[], &[]);
    let mount = format!("--volume={}:/control", controlled.folder.path().display());
    // root with the host's namespaces and more capabilities is still a process of a container
    for flags in [vec![], vec!["--pid=host", "--cap-add=SYS_PTRACE", "--cgroupns=host"]] {
        let flags = [vec![mount.as_str()], flags].concat();
        let program = QUERY.replace("sys.argv[1]", "'/control/control.sock'") + "\nprint('ready')";
        let container = engine.run_python(&unique("control"), &flags, &program);
        let response = container.docker(&["logs"]);
        assert!(
            response.contains("403 Forbidden") && response.contains("belongs to a container"),
            "{flags:?}: {response}"
        );
    }
    assert!(controlled.get("/-/ready").contains("memledger is ready"), "this host is served");
}
