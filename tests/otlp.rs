//! OTLP export to receivers that share no code with memledger: Python's grpcio with the protocol's own messages
//! (`otlp/receiver.py`), and rotel, a collector.

mod addresses;
mod events;
mod faults;
mod many;
mod parity;
mod settings;
mod traces;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;

use serde_json::{Value, json};

use crate::prometheus::provided;
use crate::support::Memledger;

/// A host without containers, so that a test sees only its own.
const EMPTY: &[&str] = &["--docker.socket=", "--podman.socket=", "--container.include=^none$"];

/// The receiver. Killed when dropped.
pub(crate) struct Receiver {
    child: Child,
    pipes: Mutex<(ChildStdin, BufReader<ChildStdout>)>,
    grpc: u64,
    http: u64,
}

impl Receiver {
    /// Starts one without TLS; prints the reason and returns `None` without Python.
    pub(crate) fn start() -> Option<Self> {
        Self::with_tls(&[])
    }

    /// Starts one with these files: certificate, key and CA of clients.
    fn with_tls(files: &[&str]) -> Option<Self> {
        let python = provided("MEMLEDGER_TEST_PYTHON")?;
        let mut child = Command::new(python)
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/otlp/receiver.py"))
            .args(files)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the receiver starts");
        let pipes = (child.stdin.take().expect("piped"), BufReader::new(child.stdout.take().expect("piped")));
        let mut this = Self { child, pipes: Mutex::new(pipes), grpc: 0, http: 0 };
        let ports = this.response();
        (this.grpc, this.http) = (ports["grpc"].as_u64().unwrap(), ports["http"].as_u64().unwrap());
        Some(this)
    }

    fn response(&self) -> Value {
        let mut line = String::new();
        self.pipes.lock().unwrap().1.read_line(&mut line).expect("a line");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    fn command(&self, command: &Value) -> Value {
        writeln!(self.pipes.lock().unwrap().0, "{command}").expect("the receiver reads");
        self.response()
    }

    /// Sets its behaviour from now on.
    fn behave(&self, how: Value) {
        let mut command = how;
        command["do"] = json!("behave");
        self.command(&command);
    }

    /// Returns what it received since the last call.
    fn take(&self) -> Value {
        self.command(&json!({"do": "take"}))
    }

    fn stop(&self) {
        self.command(&json!({"do": "stop"}));
    }

    fn start_again(&self) {
        self.command(&json!({"do": "start"}));
    }

    /// Returns flags that export to it.
    pub(crate) fn flags(&self, grpc: bool) -> Vec<String> {
        let (protocol, port) = if grpc { ("grpc", self.grpc) } else { ("http/protobuf", self.http) };
        vec![
            format!("--otlp.endpoint=http://localhost:{port}"),
            format!("--otlp.protocol={protocol}"),
            "--otlp.interval=1s".to_owned(),
        ]
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts memledger with these flags.
fn memledger(first: &[&str], second: &[String], third: &[&str]) -> Memledger {
    let second: Vec<_> = second.iter().map(String::as_str).collect();
    Memledger::start(&[first, &second, third].concat())
}

/// Returns a list in a response of the receiver.
fn list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value[name].as_array().expect("a list")
}
