//! What becomes of panics, each of which is a bug.
//!
//! A panic in a collector, a read, a request or an export costs that one: it is caught there. A panic in a thread or task
//! without which the figures would be stale or incomplete for ever ends memledger with [`STATUS`], and systemd, Docker or
//! Kubernetes starts it again. Each panic is logged, and counted for `memledger_panics_total`.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::FutureExt;

/// The exit status after a panic in an essential thread or task: *internal software error* in sysexits.h.
pub const STATUS: i32 = 70;

static PANICS: AtomicU64 = AtomicU64::new(0);

/// Logs and counts each panic from now on, also those that are caught.
pub fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        let place = panic.location().map(ToString::to_string);
        let thread = std::thread::current();
        let backtrace = Backtrace::capture();
        let backtrace = (backtrace.status() == BacktraceStatus::Captured).then(|| backtrace.to_string());
        let (thread, reason) = (thread.name(), panic.payload_as_str());
        tracing::error!(place, thread, reason, backtrace, "panic, which is a bug in memledger");
    }));
}

/// Returns the number of panics so far.
pub fn count() -> u64 {
    PANICS.load(Ordering::Relaxed)
}

/// Runs the body of an essential thread. A panic in it ends memledger.
pub fn run_essential<T>(name: &str, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| end(name))
}

/// Runs an essential task. A panic in it ends memledger.
pub async fn essential<T>(name: &str, task: impl Future<Output = T>) -> T {
    AssertUnwindSafe(task).catch_unwind().await.unwrap_or_else(|_| end(name))
}

#[allow(clippy::disallowed_methods, reason = "main may wait for the very part that panicked")]
fn end(name: &str) -> ! {
    tracing::error!(
        part = name,
        status = STATUS,
        "memledger cannot go on without the part that panicked; exiting, to be started again by systemd, Docker or Kubernetes"
    );
    std::process::exit(STATUS)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Set in the processes that the test starts, to what panics in them.
    const PART: &str = "MEMLEDGER_TEST_PANICS_IN";

    #[test]
    fn panic_in_an_essential_part_ends_the_process() {
        let fail = || assert_eq!(1, 2, "a bug");
        match std::env::var(PART).as_deref() {
            Ok("thread") => {
                std::thread::spawn(move || run_essential("thread", fail)).join().unwrap();
            }
            Ok("task") => {
                let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
                runtime.block_on(async {
                    tokio::spawn(essential("task", async move { fail() })).await.unwrap()
                });
            }
            _ => {
                for part in ["thread", "task"] {
                    let test = "host::panics::tests::panic_in_an_essential_part_ends_the_process";
                    let mut child = Command::new(std::env::current_exe().unwrap());
                    let output = child.args(["--exact", test]).env(PART, part).output().unwrap();
                    assert_eq!(output.status.code(), Some(STATUS), "{part}: {output:?}");
                }
            }
        }
    }
}
