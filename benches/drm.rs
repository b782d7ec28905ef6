//! The cost of the search for processes that use a GPU of a DRM driver, on a host with many processes.
//!
//! `make bench` starts 1,000 real processes with 50 open files each, shows the reader a sysfs with one GPU, and takes its
//! time once a second. No process holds the GPU: that is the search's worst case, because nothing but the links of all
//! open files tells so. It writes the last part of docs/performance.md. Nothing here was measured with a real GPU.

mod document;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use memledger::collect::drm::DrmReader;
use memledger::host::HostPaths;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const PROCESSES: usize = 1_000;
const FILES: usize = 50;
const READINGS: usize = 20;

/// Children with so many open files, which end when their parent does.
const PROGRAM: &str = "
import os, sys
processes, files = int(sys.argv[1]), int(sys.argv[2])
ends, alive = os.pipe()
kept = [os.open('/dev/null', os.O_RDONLY) for _ in range(files - 4)]
for _ in range(processes - 1):
    if os.fork() == 0:
        os.close(alive)
        os.dup2(0, alive)
        os.read(ends, 1)
        os._exit(0)
print('ready', flush=True)
sys.stdin.read()
";

fn start() -> Outcome<Child> {
    let arguments = ["-c", PROGRAM, &PROCESSES.to_string(), &FILES.to_string()];
    let mut child =
        Command::new("python3").args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let stdout = child.stdout.take().ok_or("no output")?;
    BufReader::new(stdout).read_line(&mut String::new())?;
    Ok(child)
}

/// A sysfs with one GPU that has memory of its own.
fn sysfs(root: &Path) -> Outcome<()> {
    let device = root.join("class/drm/renderD128/device");
    std::fs::create_dir_all(&device)?;
    std::fs::write(device.join("uevent"), "DRIVER=amdgpu\nPCI_ID=1002:744C\nPCI_SLOT_NAME=0000:03:00.0\n")?;
    std::fs::write(device.join("mem_info_vram_total"), "25753026560\n")?;
    Ok(std::fs::write(device.join("mem_info_vram_used"), "1048576\n")?)
}

/// Processes and open files of this host, and the time to read all their links once.
#[allow(clippy::disallowed_methods)]
fn all_links() -> Outcome<(usize, usize, Duration)> {
    let began = Instant::now();
    let (mut processes, mut links) = (0, 0);
    for entry in std::fs::read_dir("/proc")? {
        let path = entry?.path();
        if path.file_name().is_none_or(|name| !name.as_encoded_bytes()[0].is_ascii_digit()) {
            continue;
        }
        processes += 1;
        for link in std::fs::read_dir(path.join("fd")).into_iter().flatten().flatten() {
            links += usize::from(std::fs::read_link(link.path()).is_ok());
        }
    }
    Ok((processes, links, began.elapsed()))
}

fn part() -> Outcome<String> {
    let root = tempfile::tempdir()?;
    sysfs(root.path())?;
    let mut children = start()?;
    let (processes, links, turn) = all_links()?;
    let mut reader =
        DrmReader::new(HostPaths { sys: root.path().to_path_buf(), ..HostPaths::default() }, false);
    let mut took = Vec::new();
    for _ in 0..=READINGS {
        let reading = reader.read()?.ok_or("no GPU was found")?;
        took.push(reading.took.as_secs_f64() * 1e3);
        std::thread::sleep(Duration::from_secs(1).saturating_sub(reading.took));
    }
    drop(children.stdin.take());
    children.wait()?;
    let first = took.remove(0);
    let mean = took.iter().sum::<f64>() / took.len() as f64;
    let worst = took.iter().copied().fold(0.0, f64::max);
    Ok(format!(
        "{}\n\n\
         The worst case of the search: {processes} processes with {links} open files, none of which is a GPU, and a GPU in \
         sysfs, so that all of them are looked at. To read all links once with a plain loop takes {:.0} ms.\n\n\
         | first reading ms | later readings, one a second: mean ms | worst ms | CPU % of one core |\n\
         | --- | --- | --- | --- |\n\
         | {first:.1} | {mean:.1} | {worst:.1} | {:.1} |\n\n\
         The search has a budget of 270 ms in the first reading and of 30 ms in later ones, on a thread of its own; the cycle \
         does not wait for it. What a real driver adds for each descriptor of a GPU was not measured: there was none.\n",
        document::HEADINGS[3],
        turn.as_secs_f64() * 1e3,
        mean / 10.0,
    ))
}

fn main() -> Outcome<()> {
    if document::is_test_listing() {
        return Ok(());
    }
    Ok(document::write(&part()?)?)
}
