//! Deaths by a lack of memory that the kernel does not log, by what programs print: of GPU memory ([`CudaOomText`]), of shared memory, of memory
//! that was refused, of the program's own limit, of threads, and kills by monitors that act before the kernel does.
//!
//! [`TEXTS`] has each text with the program that prints it.

use std::sync::LazyLock;

use aho_corasick::AhoCorasick;
use regex::Regex;
use serde::{Deserialize, Serialize};

use super::cuda_oom::{self, CudaOomText, MAX_BYTES, any_of};

/// An error in a log.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LogError {
    /// GPU memory.
    Cuda(CudaOomText),
    /// Anything else.
    Host(HostErrorText),
}

/// What the text of an error says that is not one of GPU memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostErrorText {
    /// What it is.
    #[serde(flatten)]
    pub error: HostError,
    /// Of refused memory, the bytes that were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked_bytes: Option<u64>,
}

impl From<HostError> for HostErrorText {
    fn from(error: HostError) -> Self {
        Self { error, asked_bytes: None }
    }
}

/// An error in a log that is not one of GPU memory. In JSON `kind`, and `of`, where a kind has several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind", content = "of")]
pub enum HostError {
    /// Shared memory: `/dev/shm` was full.
    Shm,
    /// The kernel or a limit refused memory of the host to a program, which was not killed.
    Refused(RefusedMemory),
    /// A limit of the program's own was reached: the container may have had room.
    OwnLimit(ProgramLimit),
    /// A thread or a process was refused.
    Threads,
    /// A monitor killed a worker.
    Monitor(MemoryMonitor),
}

impl HostError {
    /// Returns what the error is of, in words.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Shm => "shared memory full",
            Self::Refused(_) => "memory was refused",
            Self::OwnLimit(_) => "a limit of the program's own",
            Self::Threads => "threads or processes were refused",
            Self::Monitor(_) => "killed by a monitor",
        }
    }
}

impl LogError {
    /// Returns the error on a host with a GPU or without one: where there is none, what may be of the host is.
    pub fn on_host(self, has_gpu: bool) -> Self {
        match self {
            Self::Cuda(text) if text.may_be_of_host() && !has_gpu => {
                Self::Host(HostErrorText { error: REFUSED, asked_bytes: text.tried })
            }
            other => other,
        }
    }
}

/// Memory that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusedMemory {
    /// Of the host, or beyond a limit of addresses.
    Any,
    /// Pinned memory of the host (`pin_memory`, `cudaHostAlloc`).
    Pinned,
    /// Memory that the CPU and the GPU share (Jetson).
    Shared,
    /// A program compared its need with the free memory, and did not begin.
    BeforeStart,
}

/// A limit of a program's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProgramLimit {
    /// The heap of Node.js.
    Node,
    /// The heap, or another part, of a JVM.
    Java,
    /// `memory_limit` of DuckDB.
    #[serde(rename = "duckdb")]
    DuckDb,
    /// The limits of ClickHouse.
    #[serde(rename = "clickhouse")]
    ClickHouse,
    /// `maxmemory` of a Redis that it uses.
    Redis,
    /// The heap of .NET.
    #[serde(rename = "dotnet")]
    DotNet,
    /// `mem.maxVSize` of R.
    R,
    /// `memory_limit` of PHP.
    Php,
}

/// A program that kills others for the memory they use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryMonitor {
    /// Ray's memory monitor.
    Ray,
    /// The nanny of a dask worker.
    Dask,
}

/// A text that a program prints: all of its parts are in one line, in this order.
#[derive(Clone, Copy)]
struct ErrorText {
    parts: &'static [&'static str],
    error: HostError,
    /// The program. With a version where it is recorded in tests/log-texts, or known from a report.
    seen: &'static str,
}

const fn text(parts: &'static [&'static str], error: HostError, seen: &'static str) -> ErrorText {
    ErrorText { parts, error, seen }
}

const REFUSED: HostError = HostError::Refused(RefusedMemory::Any);
const JAVA: HostError = HostError::OwnLimit(ProgramLimit::Java);
const NODE: HostError = HostError::OwnLimit(ProgramLimit::Node);

/// Texts of errors, in the order in which they are tried.
static TEXTS: &[ErrorText] = &[
    text(&["insufficient shared memory (shm)"], HostError::Shm, "torch 2"),
    text(&["is killed by signal: Bus error"], HostError::Shm, "torch 2, DataLoader"),
    text(&["ERROR: Unexpected bus error encountered in worker"], HostError::Shm, "torch 2, DataLoader"),
    text(&["unable to write to file </torch_"], HostError::Shm, "torch 1"),
    text(&["unable to resize file </torch_", "No space left on device"], HostError::Shm, "torch 2"),
    text(&["unable to allocate shared memory(shm) for file"], HostError::Shm, "torch 2.15"),
    text(&["No space left on device: '/dev/shm"], HostError::Shm, "CPython 3"),
    text(&["/dev/shm/", "No space left on device"], HostError::Shm, "NCCL 2.27"),
    text(&["while creating shared memory segment", "No space left on device"], HostError::Shm, "NCCL 2.27"),
    text(&["Call to posix_fallocate failed : No space left on device"], HostError::Shm, "NCCL 2.8"),
    // Ray names what it killed
    text(
        &["killed due to the node running low on memory"],
        HostError::Monitor(MemoryMonitor::Ray),
        "Ray 2.60",
    ),
    text(&["killed due to memory pressure (OOM)"], HostError::Monitor(MemoryMonitor::Ray), "Ray 2"),
    text(
        &["distributed.nanny", "exceeded ", "% memory budget"],
        HostError::Monitor(MemoryMonitor::Dask),
        "distributed 2026.8",
    ),
    // before the heap of Java: an OutOfMemoryError that is none of memory
    text(&["unable to create native thread"], HostError::Threads, "OpenJDK 17"),
    text(&["unable to create new native thread"], HostError::Threads, "OpenJDK 8"),
    text(&["Failed to start thread", "pthread_create failed (EAGAIN)"], HostError::Threads, "OpenJDK 17"),
    text(&["can't start new thread"], HostError::Threads, "CPython 3.11"),
    text(
        &["libgomp: Thread creation failed: Resource temporarily unavailable"],
        HostError::Threads,
        "gcc 12",
    ),
    text(&["pthread_create failed", "Resource temporarily unavailable"], HostError::Threads, "OpenBLAS"),
    text(&["creation via pthread_create() failed"], HostError::Threads, "tensorflow 2.21"),
    text(&["fork: Resource temporarily unavailable"], HostError::Threads, "bash 5.2"),
    text(&["fork failed: Resource temporarily unavailable"], HostError::Threads, "zsh"),
    text(&[": Cannot fork"], HostError::Threads, "dash 0.5"),
    text(&["failed to spawn thread", "code: 11"], HostError::Threads, "Rust 1.95"),
    text(&["failed to spawn thread", "Resource temporarily unavailable"], HostError::Threads, "Rust 1.95"),
    text(&["ThreadPoolBuildError", "code: 11"], HostError::Threads, "rayon 1"),
    text(&["OS can't spawn worker thread", "os error 11"], HostError::Threads, "tokio 1"),
    text(&["fork/exec ", ": resource temporarily unavailable"], HostError::Threads, "Go 1"),
    text(&["blas_thread_init: pthread_create"], HostError::Threads, "OpenBLAS 0.3"),
    text(&["OMP: Error #34"], HostError::Threads, "Intel OpenMP"),
    text(&["spawn EAGAIN"], HostError::Threads, "Node.js 20"),
    text(&["what():  Resource temporarily unavailable"], HostError::Threads, "g++ 12, std::thread"),
    text(&["failed to create new OS thread", "errno=11"], HostError::Threads, "Go 1"),
    text(&["can't create Thread: Resource temporarily unavailable"], HostError::Threads, "Ruby 3"),
    text(&["java.lang.OutOfMemoryError: Java heap space"], JAVA, "OpenJDK 17"),
    text(&["java.lang.OutOfMemoryError: GC overhead limit exceeded"], JAVA, "OpenJDK 17"),
    text(&["java.lang.OutOfMemoryError: Metaspace"], JAVA, "OpenJDK 17"),
    text(&["java.lang.OutOfMemoryError: Compressed class space"], JAVA, "OpenJDK 17"),
    text(&["java.lang.OutOfMemoryError: Direct buffer memory"], JAVA, "OpenJDK 11"),
    text(&["java.lang.OutOfMemoryError: Cannot reserve", "direct buffer memory"], JAVA, "OpenJDK 17"),
    text(&["java.lang.OutOfMemoryError: Requested array size exceeds VM limit"], JAVA, "OpenJDK 17"),
    text(
        &["fatal error: OutOfMemory encountered: Java heap space"],
        JAVA,
        "OpenJDK 17, CrashOnOutOfMemoryError",
    ),
    text(&["java.lang.OutOfMemoryError: PermGen space"], JAVA, "OpenJDK 7"),
    text(&["OutOfDirectMemoryError: failed to allocate"], JAVA, "Netty 4"),
    text(&["SparkOutOfMemoryError: "], JAVA, "Spark 3"),
    text(&["java.lang.OutOfMemoryError: Map failed"], REFUSED, "OpenJDK 17"),
    text(&["System.OutOfMemoryException"], HostError::OwnLimit(ProgramLimit::DotNet), ".NET 8"),
    text(&["Allocation failed - process out of memory"], NODE, "Node.js 8"),
    text(&["JavaScript heap out of memory"], NODE, "Node.js 20"),
    text(&["ERR_WORKER_OUT_OF_MEMORY"], NODE, "Node.js 20"),
    text(&["Worker terminated due to reaching memory limit"], NODE, "Node.js 20"),
    text(&["Out of Memory Error: ", "(bad allocation)"], REFUSED, "duckdb"),
    text(&["Out of Memory Error: ", "used)"], HostError::OwnLimit(ProgramLimit::DuckDb), "duckdb 2.0"),
    text(
        &["OutOfMemoryException: Out of Memory Error:"],
        HostError::OwnLimit(ProgramLimit::DuckDb),
        "duckdb 2.0",
    ),
    text(
        &["DB::Exception: ", "MEMORY_LIMIT_EXCEEDED"],
        HostError::OwnLimit(ProgramLimit::ClickHouse),
        "ClickHouse 24",
    ),
    text(&["DB::Exception: Memory limit ("], HostError::OwnLimit(ProgramLimit::ClickHouse), "ClickHouse 20"),
    text(
        &["OOM command not allowed when used memory >"],
        HostError::OwnLimit(ProgramLimit::Redis),
        "Redis 7",
    ),
    text(&["Allowed memory size of ", " bytes exhausted"], HostError::OwnLimit(ProgramLimit::Php), "PHP 8"),
    text(&["vector memory exhausted (limit reached?)"], HostError::OwnLimit(ProgramLimit::R), "R 4"),
    text(&["vector memory limit of ", "reached"], HostError::OwnLimit(ProgramLimit::R), "R 4.4"),
    text(&["Failed to create CoreCLR", "0x8007000E"], REFUSED, ".NET 8"),
    text(&["spawn ENOMEM"], REFUSED, "Node.js 20"),
    text(&["OutOfMemoryError()"], REFUSED, "Julia 1"),
    text(&["libgomp: Out of memory allocating"], REFUSED, "gcc 12"),
    text(&["NvMapMem", " error 12"], HostError::Refused(RefusedMemory::Shared), "JetPack 6"),
    text(
        &["model requires more system memory"],
        HostError::Refused(RefusedMemory::BeforeStart),
        "ollama 0.12",
    ),
    text(&["DefaultCPUAllocator: can't allocate memory"], REFUSED, "torch 2.15"),
    text(&["DefaultCPUAllocator: not enough memory"], REFUSED, "torch 2, Windows"),
    text(&["what():  std::bad_alloc"], REFUSED, "g++ 12"),
    text(&["instance of 'std::bad_alloc'"], REFUSED, "g++ 12"),
    text(&["exception of type std::bad_alloc"], REFUSED, "libc++"),
    text(&["Error: std::bad_alloc"], REFUSED, "lightgbm 4.7, faiss 1.15"),
    text(&["Cannot allocate memory"], REFUSED, "glibc 2.36"),
    text(&["cannot allocate memory"], REFUSED, "Go 1, of syscall"),
    text(&["fatal error: runtime: out of memory"], REFUSED, "Go 1"),
    text(&["runtime: out of memory: cannot allocate"], REFUSED, "Go 1"),
    text(&["_ArrayMemoryError: Unable to allocate"], REFUSED, "numpy 2.4"),
    text(&["MemoryError: Unable to allocate"], REFUSED, "numpy 1, pandas 2"),
    text(&["ArrowMemoryError: malloc of size", "failed"], REFUSED, "pyarrow 26"),
    text(&["RESOURCE_EXHAUSTED: Out of memory allocating", "bytes"], REFUSED, "jax 0.10 on the CPU"),
    text(&["OOM when allocating tensor", "device:CPU:"], REFUSED, "tensorflow 2.21 on the CPU"),
    text(&["memory allocation of ", " bytes failed"], REFUSED, "Rust 1.95"),
    text(&["cannot allocate vector of size"], REFUSED, "R 4.2"),
    text(&["Array buffer allocation failed"], REFUSED, "Node.js 20"),
    text(&["failed to map segment from shared object"], REFUSED, "glibc 2.36"),
    text(&["Could not reserve enough space for", "object heap"], REFUSED, "OpenJDK 17"),
    text(
        &["There is insufficient memory for the Java Runtime Environment to continue"],
        REFUSED,
        "OpenJDK 17",
    ),
    text(&["os::commit_memory", "errno=12"], REFUSED, "OpenJDK 17"),
];

/// Lines with these words are no error of memory, or one that a program survives.
const HARMLESS: [&str; 7] = [
    "in static TLS block",     // of the order in which libraries are loaded
    "Operation not permitted", // of a file system that is mounted noexec
    "Permission denied",
    "_MEI", // the same, of PyInstaller in /tmp
    "Unable to lock JVM Memory",
    "Can't save in background", // Redis goes on
    "retrying",
];

/// Returns the parts of each known text, what it is of, and which program prints it.
pub fn known_texts() -> impl Iterator<Item = (&'static [&'static str], &'static str, &'static str)> {
    TEXTS.iter().map(|known| (known.parts, known.error.kind(), known.seen))
}

/// Lines of a traceback above an error in which its cause is searched.
const LINES_BEFORE: u64 = 12;

/// Maximum number of lines of one error.
pub const MAX_LINES: usize = 10;

/// Words in a traceback by which it is known what an error below them is of.
const PINS: &str = "pin_memory(";
const PIN_THREAD: &str = "pin memory thread";
const SEMAPHORE: &str = "SemLock";
/// Words of errors that are known by what is around them.
const MEMORY_ERROR: &str = "MemoryError";
const NO_SPACE: &str = "[Errno 28] No space left on device";

/// Bytes of a text by which a line is selected.
const MAX_BEGIN: usize = 14;
/// All of these.
const AROUND: [&str; 5] = [PINS, PIN_THREAD, SEMAPHORE, MEMORY_ERROR, NO_SPACE];

/// A part of each known text, in their order, then [`AROUND`] and the words of GPU memory: most lines of a log have none.
static ANY_TEXT: LazyLock<AhoCorasick> = LazyLock::new(|| {
    // of several parts the longest is the rarest; its begin is enough, and takes less memory
    let longest = |known: &ErrorText| {
        let part = known.parts.iter().copied().max_by_key(|part| part.len())?;
        Some(&part[..part.floor_char_boundary(MAX_BEGIN)])
    };
    any_of(TEXTS.iter().filter_map(longest).chain(AROUND).chain(cuda_oom::WORDS))
});

/// Finds errors in the lines of a log, which it reads in order. It keeps none of them.
#[derive(Clone, Debug, Default)]
pub struct ErrorFinder {
    line: u64,
    /// Numbers of the last lines with [`PINS`], [`PIN_THREAD`] and [`SEMAPHORE`].
    last: [Option<u64>; 3],
}

impl ErrorFinder {
    /// Takes the next line, and returns the error that it is.
    pub fn find(&mut self, line: &str) -> Option<LogError> {
        let number = self.line;
        self.line += 1;
        if !ANY_TEXT.is_match(line) {
            return None;
        }
        let mut parts: Vec<usize> =
            ANY_TEXT.find_overlapping_iter(line).map(|found| found.pattern().as_usize()).collect();
        parts.sort_unstable();
        let may_be_cuda = parts.last().is_some_and(|last| *last >= TEXTS.len() + AROUND.len());
        let cuda = if may_be_cuda { CudaOomText::find(line) } else { None };
        let [is_pinning, is_in_pin_thread, is_semaphore] =
            self.last.map(|last| last.is_some_and(|last| number - last <= LINES_BEFORE));
        for (last, words) in std::iter::zip(&mut self.last, [PINS, PIN_THREAD, SEMAPHORE]) {
            if line.contains(words) {
                *last = Some(number);
            }
        }
        if let Some(found) = cuda {
            // the driver says the same of memory of the host
            let is_pinned =
                found.framework == "torch" && found.tried.is_none() && is_pinning && !is_in_pin_thread;
            return Some(match is_pinned {
                true => LogError::Host(HostError::Refused(RefusedMemory::Pinned).into()),
                false => LogError::Cuda(found),
            });
        }
        let mut possible = parts.iter().filter_map(|number| TEXTS.get(*number));
        if let Some(ErrorText { error, parts, .. }) =
            possible.find(|known| has_parts(line, known.parts)).copied()
        {
            let is_harmless = HARMLESS.iter().any(|words| line.contains(words));
            return (!is_harmless && !is_elsewhere(line, error))
                .then(|| LogError::Host(text_of(error, line, parts[0])));
        }
        if line.trim_end() == MEMORY_ERROR || line.starts_with("MemoryError:") {
            return Some(LogError::Host(text_of(REFUSED, line, MEMORY_ERROR)));
        }
        // a semaphore is a file in /dev/shm, which this text does not name
        (is_semaphore && line.contains(NO_SPACE)).then(|| LogError::Host(HostError::Shm.into()))
    }
}

/// Texts of refused memory in which no size is what was asked for.
const WITHOUT_SIZE: [&str; 3] = ["annot allocate memory", "bad_alloc", "ENOMEM"];

/// Returns what the line of an error says, which begins with this part.
fn text_of(error: HostError, line: &str, part: &str) -> HostErrorText {
    let is_sized = matches!(error, HostError::Refused(_))
        && (line.contains("commit_memory(") || !WITHOUT_SIZE.iter().any(|words| part.contains(words)));
    let begin = line.find("commit_memory(").or_else(|| line.find(part)).unwrap_or(0);
    HostErrorText { error, asked_bytes: is_sized.then(|| asked_bytes(&line[begin..])).flatten() }
}

/// A size in a text of refused memory: the first one is what was asked for. R's `Gb` are GiB.
static ASKED: LazyLock<Regex> = LazyLock::new(|| {
    #[allow(clippy::expect_used)] // a constant
    Regex::new(
        r"\b(?<number>[0-9]+(?:\.[0-9]*)?)[ -]?(?:bytes?|(?<unit>[KMGT])i?[Bb])\b|of size (?<size>[0-9]+)(?: failed|$)|commit_memory\(0x[0-9a-f]+, (?<committed>[0-9]+)",
    )
    .expect("a constant")
});

/// Returns the bytes that were asked for, by the text of an error.
fn asked_bytes(line: &str) -> Option<u64> {
    let found = ASKED.captures(line)?;
    let number = ["number", "size", "committed"].iter().find_map(|name| found.name(name))?;
    let unit = found.name("unit").map_or(0, |unit| "KMGT".find(unit.as_str()).map_or(0, |at| at as i32 + 1));
    let bytes = number.as_str().parse::<f64>().ok()? * 1024_f64.powi(unit);
    (bytes > 0.0 && bytes <= MAX_BYTES).then_some(bytes as u64)
}

/// Returns whether a full `/dev/shm` is only where a file was copied from: of a copy, the second path is the full one.
fn is_elsewhere(line: &str, error: HostError) -> bool {
    let copied = line.rsplit_once("' -> '").filter(|_| error == HostError::Shm);
    copied.is_some_and(|(_, to)| !to.contains("/dev/shm"))
}

/// Returns the errors in the lines of a log: the number of the line, and what it is.
pub fn find_errors(lines: &[&str]) -> Vec<(usize, LogError)> {
    let mut finder = ErrorFinder::default();
    let found = lines.iter().enumerate().filter_map(|(number, line)| {
        Some(match finder.find(line)? {
            LogError::Cuda(text) => (number, LogError::Cuda(with_next_lines(text, &lines[number..]))),
            error => (number, error),
        })
    });
    found.collect()
}

fn has_parts(line: &str, parts: &[&str]) -> bool {
    let mut rest = line;
    parts.iter().all(|part| match rest.find(part) {
        Some(at) => {
            rest = &rest[at + part.len()..];
            true
        }
        None => false,
    })
}

/// Returns the numbers of an error also from the lines behind its first one: cudaMallocAsync prints each on its own, and programs that
/// draw tracebacks wrap lines. `lines`: the line of the error, and those behind it.
pub fn with_next_lines<L: AsRef<str>>(found: CudaOomText, lines: &[L]) -> CudaOomText {
    if found.total.is_some() {
        return found;
    }
    let is_frame = |letter: char| letter.is_whitespace() || "\u{2502}|".contains(letter);
    // another error is not a part of this one
    let is_rest = |(number, line): &(usize, &str)| *number == 0 || CudaOomText::find(line).is_none();
    let rest = lines.iter().map(AsRef::as_ref).enumerate().take(MAX_LINES).take_while(is_rest);
    let next: Vec<&str> = rest.map(|(_, line)| line.trim_matches(is_frame)).collect();
    CudaOomText::find(&next.join(" ")).filter(|joined| joined.framework == found.framework).unwrap_or(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_on_further_lines_are_those_of_the_error() {
        let lines = [
            "torch.OutOfMemoryError: Allocation on device 1 would exceed allowed memory. (out of memory)",
            "Currently allocated     : 6.00 GiB",
            "Requested               : 320.00 MiB",
            "Device limit            : 24.00 GiB",
            "Free (according to CUDA): 2.00 MiB",
            "│ OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a      │",
            "│ total capacity of 12.00 GiB of which 1.00 GiB is free. Of the allocated memory    │",
            "│ 8.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but         │",
            "│ unallocated.                                                                      │",
        ];
        let numbers: Vec<_> = find_errors(&lines)
            .into_iter()
            .filter_map(|(number, error)| match error {
                LogError::Cuda(text) => Some((number, text.device, text.tried, text.total, text.allocated)),
                _ => None,
            })
            .collect();
        let (gib, mib) = (1 << 30, 1 << 20);
        assert_eq!(
            numbers,
            [
                (0, Some(1), Some(320 * mib), Some(24 * gib), Some(6 * gib)),
                (5, Some(0), Some(2 * gib), Some(12 * gib), Some(8 * gib)),
            ]
        );
    }

    #[test]
    fn each_kind_of_memory_has_its_texts() {
        let lines = [
            "epoch 3",
            "RuntimeError: DataLoader worker (pid 77) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory.",
            "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
            "RuntimeError: [enforce fail at alloc_cpu.cpp:73] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.",
            "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 12.00 GiB",
            "OSError: [Errno 12] Cannot allocate memory",
        ];
        let found: Vec<_> = find_errors(&lines)
            .into_iter()
            .map(|(number, error)| {
                (
                    number,
                    match error {
                        LogError::Cuda(_) => "cuda",
                        LogError::Host(text) => text.error.kind(),
                    },
                )
            })
            .collect();
        let expected = [
            (1, HostError::Shm.kind()),
            (2, HostError::Shm.kind()),
            (3, REFUSED.kind()),
            (4, HostError::Monitor(MemoryMonitor::Ray).kind()),
            (5, "cuda"),
            (6, REFUSED.kind()),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn refused_memory_has_the_bytes_that_were_asked_for() {
        for (line, bytes) in [
            (
                "MemoryError: Unable to allocate 74.5 GiB for an array with shape (10000000000,)",
                Some(79_993_765_888),
            ),
            ("memory allocation of 107374182400 bytes failed", Some(107_374_182_400)),
            ("ArrowMemoryError: malloc of size 107374182400 failed", Some(107_374_182_400)),
            ("runtime: out of memory: cannot allocate 4194304-byte block (8192 in use)", Some(4 << 20)),
            ("Error: cannot allocate vector of size 2.0 Gb", Some(2 << 30)),
            (
                "os::commit_memory(0x0000000600000000, 8589934592, 0) failed; error='Cannot allocate memory' (errno=12)",
                Some(8 << 30),
            ),
            ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000 bytes.", Some(4_000)),
            (
                "model requires more system memory (11.3 GiB) than is available (4.1 GiB)",
                Some(12_133_282_611),
            ),
            ("MemoryError: Unable to allocate 373. GiB for an array", Some(373 << 30)),
            ("model: 45%| 85.2MB/s]memory allocation of 80000000000 bytes failed", Some(80_000_000_000)),
            ("[worker rss=12.0 GB] OSError: [Errno 12] Cannot allocate memory", None),
            ("memory allocation of 99999999999999999999 bytes failed", None),
        ] {
            let Some((_, LogError::Host(text))) = find_errors(&[line]).pop() else { panic!("{line}") };
            assert_eq!(text.asked_bytes, bytes, "{line}");
        }
        let heap = "java.lang.OutOfMemoryError: Cannot reserve 4194304 bytes of direct buffer memory";
        assert_eq!(find_errors(&[heap]), [(0, LogError::Host(JAVA.into()))]);
    }

    #[test]
    fn line_that_is_only_like_an_error_stays_unclaimed() {
        for line in [
            "ImportError: /usr/lib/aarch64-linux-gnu/libgomp.so.1: cannot allocate memory in static TLS block",
            "libz.so.1: failed to map segment from shared object: Operation not permitted",
            "/tmp/_MEI01/libpython3.14.so.1.0: failed to map segment from shared object",
            "OSError: [Errno 28] No space left on device: '/dev/shm/ckpt.pt' -> '/data/ckpt.pt'",
            "caught std::bad_alloc, retrying with batch 16",
            "Unable to lock JVM Memory: error=12, reason=Cannot allocate memory",
            "# Can't save in background: fork: Cannot allocate memory",
            "Cannot fork repository a/b",
            "bash: fork: retry: Resource temporarily unavailable",
            "the code MEMORY_LIMIT_EXCEEDED is in the documentation",
            "BlockingIOError: [Errno 11] Resource temporarily unavailable",
            "MemoryErrors so far: 0",
            "MemoryError: Unable to allocate 3 GiB; retrying",
        ] {
            assert!(find_errors(&[line]).is_empty(), "{line}: {:?}", find_errors(&[line]));
        }
    }

    /// What real programs printed: the beginning of a file's name says what it is of.
    #[test]
    fn recorded_text_of_each_program_has_its_kind() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/log-texts");
        let (mut wrong, mut count) = (Vec::new(), 0);
        for file in std::fs::read_dir(folder).expect("the texts") {
            let path = file.expect("a file").path();
            let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
            let log = std::fs::read_to_string(&path).expect("a text");
            let lines: Vec<&str> = log.lines().collect();
            let last = find_errors(&lines).into_iter().next_back().map(|(_, error)| error);
            let host = match last {
                Some(LogError::Host(text)) => Some(text.error),
                _ => None,
            };
            let is_right = match name.split('-').next().unwrap_or_default() {
                "heap" | "limit" => matches!(host, Some(HostError::OwnLimit(_))),
                "monitor" | "dask" => matches!(host, Some(HostError::Monitor(_))),
                "none" => last.is_none(),
                // the text alone cannot be told from that of a limit of processes
                "refused" if name == "refused-mmap-locked" => last.is_none(),
                // where the host has no GPU
                "refused" if name == "refused-onnxruntime-cpu" => {
                    matches!(last, Some(LogError::Cuda(text)) if text.may_be_of_host())
                }
                "refused" | "jetson" | "ollama" | "pin" => {
                    matches!(host, Some(HostError::Refused(_)))
                }
                "shm" | "nccl" => host == Some(HostError::Shm),
                "threads" | "pids" => host == Some(HostError::Threads),
                "server" => matches!(last, Some(LogError::Cuda(_))),
                other => panic!("no kind has texts that begin with {other}"),
            };
            count += 1;
            wrong.extend((!is_right).then(|| format!("{name}: {last:?}")));
        }
        assert!(wrong.is_empty(), "{} of {count} texts: {wrong:#?}", wrong.len());
    }
}
