//! The hidden verb of the NVML process: calls the GPU driver for the memledger that started it, with few rights.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use rustix::process::{Resource, Rlimit, Signal, getrlimit, set_parent_process_death_signal, setrlimit};

use crate::gpu::driver_process;
use crate::host::{capabilities, signals};

/// Maximum size of private writable memory, so that a library that grows ends this process and not the container or the
/// service of memledger. Not the address space: drivers reserve far more of that than they use.
const MAX_DATA_BYTES: u64 = 96 << 20;

/// Maximum number of open files. The driver needs some dozens per GPU; libraries that it loads allocate for as many as the limit permits, and
/// container runtimes permit a million or more.
const MAX_OPEN_FILES: u64 = 1_024;

/// Serves the requests that arrive at standard input.
pub fn run() -> ExitCode {
    let restricted = restrict();
    let stream = std::io::stdin().as_fd().try_clone_to_owned().map(UnixStream::from);
    match restricted.and(stream) {
        Ok(stream) => {
            // an error means that memledger has ended, or ends this process
            let _ = driver_process::serve_requests(stream);
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("memledger: the NVML process cannot restrict itself: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Restricts this process to what the driver needs.
fn restrict() -> std::io::Result<()> {
    let _ = rustix::thread::set_name(c"memledger-nvml"); // for people who list processes
    signals::ignore_signals_of_parent();
    limit(Resource::Data, MAX_DATA_BYTES)?;
    limit(Resource::Nofile, MAX_OPEN_FILES)?;
    limit(Resource::Core, 0)?; // a crash loop must not fill a disk
    if let Err(error) = capabilities::drop_capabilities_of_nvml_process() {
        eprintln!("memledger: the NVML process keeps capabilities: {error}"); // as memledger itself does then
    }
    // last: a change of capabilities may reset it. If memledger has ended before, the socket is closed
    Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
}

/// Lowers a limit to `most`.
fn limit(resource: Resource, most: u64) -> std::io::Result<()> {
    let lower = |limit: Option<u64>| Some(limit.map_or(most, |limit| limit.min(most)));
    let limit = getrlimit(resource);
    Ok(setrlimit(resource, Rlimit { current: lower(limit.current), maximum: lower(limit.maximum) })?)
}
