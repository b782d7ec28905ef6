//! Eats memory in the ways that the tests of the OOM ledger and the demo (`deploy/demo`) need, until the kernel kills
//! it.
//!
//! The arguments are steps that run in order; after the last one it exits with code 0:
//!
//! ```text
//! name=BYTES     sets its name (15 bytes at most; \xHH is a byte); $HOG_NAME sets it before the first step
//! score=N        sets its oom_score_adj
//! eat            allocates memory until it is killed
//! eat=N          allocates N MiB and keeps them
//! grow=N:MS      like eat=N, with a pause of so many milliseconds after each MiB
//! free           frees the memory of eat=N and grow=N
//! shm            like eat, into a file in /dev/shm: memory that no process maps
//! shm=N          writes N MiB into a file in /dev/shm
//! threads=N      N threads eat at the same time
//! seq=N:STEPS    N children one after another, each doing STEPS, which commas separate; waits for each, and for its
//!                memory
//! par=N:STEPS    N children that begin together, each rather killed than this process; waits for all, and for their
//!                memory
//! spawn=N:STEPS  N children, each of which begins at once; does not wait
//! reap           waits for all children of spawn
//! together       waits until the parent lets its children begin: par=N:STEPS begins with it
//! churn=N        allocates and frees N MiB until a child of spawn has exited, and once more
//! say=TEXT       prints a line
//! wait=FILE      waits until the file exists
//! pause=MS       waits for so many milliseconds
//! again          restarts with the first step
//! hold           waits until it is killed
//! abort          ends by a signal of its own
//! exit=CODE      exits
//! ```
//!
//! A child is this program executed again, not a fork, so that its memory is its own; `$HOG_EXE`, if set, is the path
//! by which it is started, because a process has the name of its file until it sets another one, and may be killed
//! before. For every child that has exited a line `child PID CODE` is printed, with `-9` for one that was killed.
//!
//! Linked statically (`tests/setup/setup.sh`), because containers and the cgroup v2 guest run it without the libraries
//! of this machine. It uses only std and no unsafe code: operations without a call in std are done by writing to
//! procfs.

#![deny(unsafe_code)]

use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::Duration;

const MIB: usize = 1 << 20;

/// Who is killed first; inherited by children.
const SCORE: &str = "/proc/self/oom_score_adj";

/// Allocates so many MiB, or all there are; touches every page.
fn eat(mib: usize) -> Vec<Vec<u8>> {
    let mut kept = Vec::new();
    while kept.len() < mib {
        kept.push(std::hint::black_box(vec![1u8; MIB]));
    }
    kept
}

fn grow(mib: usize, millis: usize) -> Vec<Vec<u8>> {
    let mut kept = Vec::new();
    while kept.len() < mib {
        kept.extend(eat(1));
        pause(millis);
    }
    kept
}

fn pause(millis: usize) {
    std::thread::sleep(Duration::from_millis(millis as u64));
}

fn eat_shared(mib: usize) {
    let mut file = std::fs::File::create(format!("/dev/shm/hog-{}", std::process::id())).expect("a file");
    let block = vec![1u8; MIB];
    for _ in 0..mib {
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

/// Replaces `\xHH` in a text by that byte.
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

/// Allocates and frees until one of these has exited, and once more.
fn churn(mib: usize, running: &mut [Child]) {
    let has_ended = |child: &mut Child| !matches!(child.try_wait(), Ok(None));
    while !running.iter_mut().any(has_ended) {
        drop(eat(mib));
    }
    drop(eat(mib));
}

/// Starts the children of `N:STEPS`.
fn children(argument: &str, each: impl FnMut(Child)) {
    let (count, steps) = argument.split_once(':').expect("N:STEPS");
    (0..number(count)).map(|_| spawned(steps, Stdio::inherit())).for_each(each);
}

fn spawned(steps: &str, stdin: Stdio) -> Child {
    let exe = std::env::var("HOG_EXE").unwrap_or_else(|_| "/proc/self/exe".to_owned());
    Command::new(exe).args(steps.split(',')).stdin(stdin).spawn().expect("a child starts")
}

/// Starts the children of `N:STEPS` together and waits for all of them.
///
/// While one is killed, this process neither starts another one nor prints: that takes memory, and when all children are
/// exiting, the kernel would kill this process for it.
fn in_parallel(argument: &str) {
    let (count, steps) = argument.split_once(':').expect("N:STEPS");
    let steps = format!("together,{steps}");
    let score = std::fs::read_to_string(SCORE).expect("the score is read");
    set_score("900"); // children inherit it
    let mut started: Vec<Child> = (0..number(count)).map(|_| spawned(&steps, Stdio::piped())).collect();
    set_score(score.trim());
    started.iter_mut().for_each(|child| drop(child.stdin.take()));
    let ended: Vec<_> =
        started.into_iter().map(|mut child| (child.id(), child.wait().expect("it ends"))).collect();
    wait_for_memory();
    ended.into_iter().for_each(|(pid, status)| report(pid, status));
}

fn wait_for_parent() {
    let _ = std::io::stdin().read(&mut [0]).expect("the end of the standard input");
}

fn set_score(score: &str) {
    std::fs::write(SCORE, score).expect("the score is set");
}

/// Waits up to a second until the memory of a killed child is freed: a reader of its figures can delay that, and the
/// kernel would kill this process for the next one.
fn wait_for_memory() {
    let number = |file: &str| -> Option<u64> {
        std::fs::read_to_string(format!("/sys/fs/cgroup/{file}")).ok()?.trim().parse().ok()
    };
    let either = |v1: &str, v2: &str| number(v1).or_else(|| number(v2));
    for _ in 0..1000 {
        let used = either("memory/memory.usage_in_bytes", "memory.current");
        let limit = either("memory/memory.limit_in_bytes", "memory.max");
        if used.zip(limit).is_none_or(|(used, limit)| used < limit / 2) {
            return;
        }
        pause(1);
    }
}

fn reap(mut child: Child) {
    let status = child.wait().expect("it ends");
    report(child.id(), status);
}

fn report(pid: u32, status: ExitStatus) {
    let code = status.code().or(status.signal().map(|signal| -signal)).expect("an end");
    println!("child {pid} {code}");
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
    let steps: Vec<String> = std::env::args().skip(1).collect();
    let mut next = 0;
    while let Some(step) = steps.get(next) {
        next += 1;
        let (verb, argument) = step.split_once('=').unwrap_or((step, ""));
        match verb {
            "name" => call_itself(argument),
            "score" => set_score(argument),
            "eat" if argument.is_empty() => kept.push(eat(usize::MAX)),
            "eat" => kept.push(eat(number(argument))),
            "grow" => {
                let (mib, millis) = argument.split_once(':').expect("N:MS");
                kept.push(grow(number(mib), number(millis)));
            }
            "free" => kept.clear(),
            "shm" if argument.is_empty() => eat_shared(usize::MAX),
            "shm" => eat_shared(number(argument)),
            "threads" => eat_in_threads(number(argument)),
            "seq" => children(argument, |mut child| {
                let status = child.wait().expect("it ends");
                wait_for_memory(); // before it prints, which takes memory
                report(child.id(), status);
            }),
            "par" => in_parallel(argument),
            "together" => wait_for_parent(),
            "spawn" => children(argument, |child| running.push(child)),
            "churn" => churn(number(argument), &mut running),
            "reap" => running.drain(..).for_each(reap),
            "say" => println!("{argument}"),
            "wait" => wait_for(argument),
            "pause" => pause(number(argument)),
            "again" => next = 0,
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
