//! Eats memory in the ways that the tests of the OOM ledger ask for, until the kernel kills it.
//!
//! The arguments are steps, done in order; after the last one it ends with exit code 0:
//!
//! ```text
//! name=BYTES     calls itself so (15 bytes at most; \xHH is a byte); $HOG_NAME does it before the first step
//! score=N        its oom_score_adj
//! eat            takes memory until it is killed
//! eat=N          takes N MiB and keeps them
//! shm            as eat, into a file in /dev/shm: memory that no process maps
//! threads=N      N threads eat at the same time
//! seq=N:STEPS    N children one after another, each doing STEPS, which commas separate; waits for each
//! par=N:STEPS    N children at the same time; waits for all
//! spawn=N:STEPS  as par, without waiting
//! reap           waits for all that spawn started
//! churn=N        takes N MiB and gives them back, until one that spawn started has ended, and once more
//! say=TEXT       prints a line
//! wait=FILE      until the file is there
//! hold           for ever
//! abort          dies of a signal of its own
//! exit=CODE      ends
//! ```
//!
//! A child is this program started anew, not a fork, so that its memory is its own; `$HOG_EXE`, where set, is the path by
//! which it is started, since a process is called as its file until it says otherwise and may be killed before it does.
//! For every child that has ended a line `child PID CODE` is printed, `-9` for one that was killed.
//!
//! Linked statically (`tests/setup/setup.sh`), because containers and the cgroup v2 guest run it with no libraries of this
//! machine. std alone and no unsafe code: what has no call in std is done by writing to procfs.

#![deny(unsafe_code)]

use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode};
use std::time::Duration;

const MIB: usize = 1 << 20;

/// Takes so many MiB, or all there are; touches every page.
fn eat(mib: usize) -> Vec<Vec<u8>> {
    let mut kept = Vec::new();
    while kept.len() < mib {
        kept.push(std::hint::black_box(vec![1u8; MIB]));
    }
    kept
}

fn eat_shared() -> ! {
    let mut file = std::fs::File::create(format!("/dev/shm/hog-{}", std::process::id())).expect("a file");
    let block = vec![1u8; MIB];
    loop {
        if file.write_all(&block).is_err() {
            panic!("/dev/shm is full before the limit is reached: it needs a larger --shm-size");
        }
    }
}

fn eat_in_threads(count: usize) {
    let threads: Vec<_> = (0..count).map(|_| std::thread::spawn(|| eat(usize::MAX).len())).collect();
    for thread in threads {
        let _ = thread.join();
    }
}

/// `\xHH` in a text as the byte that it stands for.
fn bytes(text: &str) -> Vec<u8> {
    let mut parts = text.split("\\x");
    let mut out = parts.next().map(Vec::from).unwrap_or_default();
    for part in parts {
        let (digits, rest) = part.split_at(2);
        out.push(u8::from_str_radix(digits, 16).expect("two hexadecimal digits after \\x"));
        out.extend_from_slice(rest.as_bytes());
    }
    out
}

fn call_itself(name: &str) {
    std::fs::write("/proc/self/comm", bytes(name)).expect("the name is set");
}

/// Takes and gives back until one of these has ended, and once more.
fn churn(mib: usize, running: &mut [Child]) {
    let has_ended = |child: &mut Child| !matches!(child.try_wait(), Ok(None));
    while !running.iter_mut().any(has_ended) {
        drop(eat(mib));
    }
    drop(eat(mib));
}

/// `N:STEPS` as that many running children.
fn children(argument: &str, mut each: impl FnMut(Child)) {
    let (count, steps) = argument.split_once(':').expect("N:STEPS");
    let exe = std::env::var("HOG_EXE").unwrap_or_else(|_| "/proc/self/exe".to_owned());
    for _ in 0..number(count) {
        let child = Command::new(&exe).args(steps.split(',')).spawn();
        each(child.expect("a child starts"));
    }
}

fn reap(mut child: Child) {
    let status = child.wait().expect("it ends");
    let code = status.code().or(status.signal().map(|signal| -signal)).expect("an end");
    println!("child {} {code}", child.id());
}

fn number(text: &str) -> usize {
    text.parse().unwrap_or_else(|_| panic!("a number: {text}"))
}

fn wait_for(file: &str) {
    while !std::path::Path::new(file).exists() {
        std::thread::park_timeout(Duration::from_millis(5)); // poll
    }
}

fn main() -> ExitCode {
    if let Ok(name) = std::env::var("HOG_NAME") {
        call_itself(&name);
    }
    let mut kept = Vec::new();
    let mut running = Vec::new();
    for step in std::env::args().skip(1) {
        let (verb, argument) = step.split_once('=').unwrap_or((step.as_str(), ""));
        match verb {
            "name" => call_itself(argument),
            "score" => std::fs::write("/proc/self/oom_score_adj", argument).expect("the score is set"),
            "eat" if argument.is_empty() => kept.push(eat(usize::MAX)),
            "eat" => kept.push(eat(number(argument))),
            "shm" => eat_shared(),
            "threads" => eat_in_threads(number(argument)),
            "seq" => children(argument, reap),
            "par" => {
                let mut started = Vec::new();
                children(argument, |child| started.push(child));
                started.into_iter().for_each(reap);
            }
            "spawn" => children(argument, |child| running.push(child)),
            "churn" => churn(number(argument), &mut running),
            "reap" => running.drain(..).for_each(reap),
            "say" => println!("{argument}"),
            "wait" => wait_for(argument),
            "hold" => loop {
                std::thread::park();
            },
            "abort" => std::process::abort(),
            "exit" => return ExitCode::from(u8::try_from(number(argument)).expect("an exit code")),
            other => panic!("no such step: {other}"),
        }
    }
    std::hint::black_box(&kept);
    ExitCode::SUCCESS
}
