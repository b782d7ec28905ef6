//! Real Python processes that a test controls by lines of their standard input and output.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use super::cgroups::TestCgroup;

/// A Python program that runs in a cgroup.
///
/// The program prints a line when a step is done and waits for a line before the next one.
pub struct Python {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Python {
    /// Starts a program in a cgroup. It enters the cgroup before its first line runs.
    pub fn start(cgroup: &TestCgroup, program: &str) -> Self {
        Self::command(cgroup, &["/usr/bin/python3", "-u", "-c", program])
    }

    /// Starts a command in a cgroup.
    pub fn command(cgroup: &TestCgroup, command: &[&str]) -> Self {
        // the shell enters the cgroup and becomes the command
        let script = r#"echo $$ > "$0/cgroup.procs" && exec "$@""#;
        let mut child = Command::new("/bin/sh")
            .args(["-c", script, cgroup.path.to_str().expect("text")])
            .args(command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("sh starts");
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, stdin, stdout }
    }

    /// Returns the pid of the first process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns true once the first process has ended.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("wait").is_some()
    }

    /// Waits for the program's next line, and returns it.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).expect("a line");
        assert!(!line.is_empty(), "the program ended");
        line.trim_end().to_owned()
    }

    /// Sends an input line.
    pub fn go(&mut self) {
        let stdin = self.stdin.as_mut().expect("open");
        stdin.write_all(b"\n").and_then(|()| stdin.flush()).expect("the program reads");
    }

    /// Sends an input line, and waits for the program's next line.
    pub fn step(&mut self) -> String {
        self.go();
        self.line()
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
