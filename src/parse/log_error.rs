//! Deaths by a lack of memory that the kernel does not log, by what programs print: of GPU memory ([`CudaOomText`]), of shared memory, of memory
//! that was refused, of the program's own limit, of threads, and kills by monitors that act before the kernel does.
//!
//! [`TEXTS`] has each text with the program that prints it.

use super::cuda_oom::CudaOomText;

/// An error in a log.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LogError {
    /// GPU memory.
    Cuda(CudaOomText),
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

impl LogError {
    /// Returns what the error is of, in words.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Cuda(_) => "GPU memory",
            Self::Shm => "shared memory full",
            Self::Refused(_) => "memory was refused",
            Self::OwnLimit(_) => "a limit of the program's own",
            Self::Threads => "threads or processes were refused",
            Self::Monitor(_) => "killed by a monitor",
        }
    }
}

/// Memory that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramLimit {
    /// The heap of Node.js.
    Node,
    /// The heap, or another part, of a JVM.
    Java,
    /// `memory_limit` of DuckDB.
    DuckDb,
    /// The limits of ClickHouse.
    ClickHouse,
    /// `maxmemory` of a Redis that it uses.
    Redis,
    /// The heap of .NET.
    DotNet,
    /// `mem.maxVSize` of R.
    R,
    /// `memory_limit` of PHP.
    Php,
}

/// A program that kills others for the memory they use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryMonitor {
    /// Ray's memory monitor.
    Ray,
    /// The nanny of a dask worker.
    Dask,
}

/// A text that a program prints: all of its parts are in one line, in this order.
struct ErrorText {
    parts: &'static [&'static str],
    error: LogError,
    /// The program. With a version where it is recorded in tests/log-texts, or known from a report.
    seen: &'static str,
}

const fn text(parts: &'static [&'static str], error: LogError, seen: &'static str) -> ErrorText {
    ErrorText { parts, error, seen }
}

const REFUSED: LogError = LogError::Refused(RefusedMemory::Any);
const JAVA: LogError = LogError::OwnLimit(ProgramLimit::Java);
const NODE: LogError = LogError::OwnLimit(ProgramLimit::Node);

/// Texts of errors, in the order in which they are tried.
static TEXTS: &[ErrorText] = &[
    text(&["insufficient shared memory (shm)"], LogError::Shm, "torch 2"),
    text(&["is killed by signal: Bus error"], LogError::Shm, "torch 2, DataLoader"),
    text(&["ERROR: Unexpected bus error encountered in worker"], LogError::Shm, "torch 2, DataLoader"),
    text(&["unable to write to file </torch_"], LogError::Shm, "torch 1"),
    text(&["unable to resize file </torch_", "No space left on device"], LogError::Shm, "torch 2"),
    text(&["unable to allocate shared memory(shm) for file"], LogError::Shm, "torch 2.15"),
    text(&["No space left on device: '/dev/shm"], LogError::Shm, "CPython 3"),
    text(&["/dev/shm/", "No space left on device"], LogError::Shm, "NCCL 2.27"),
    text(&["while creating shared memory segment", "No space left on device"], LogError::Shm, "NCCL 2.27"),
    text(&["Call to posix_fallocate failed : No space left on device"], LogError::Shm, "NCCL 2.8"),
    // Ray names what it killed
    text(
        &["killed due to the node running low on memory"],
        LogError::Monitor(MemoryMonitor::Ray),
        "Ray 2.60",
    ),
    text(&["killed due to memory pressure (OOM)"], LogError::Monitor(MemoryMonitor::Ray), "Ray 2"),
    text(
        &["distributed.nanny", "exceeded ", "% memory budget"],
        LogError::Monitor(MemoryMonitor::Dask),
        "distributed 2026.8",
    ),
    // before the heap of Java: an OutOfMemoryError that is none of memory
    text(&["unable to create native thread"], LogError::Threads, "OpenJDK 17"),
    text(&["unable to create new native thread"], LogError::Threads, "OpenJDK 8"),
    text(&["Failed to start thread", "pthread_create failed (EAGAIN)"], LogError::Threads, "OpenJDK 17"),
    text(&["can't start new thread"], LogError::Threads, "CPython 3.11"),
    text(&["libgomp: Thread creation failed: Resource temporarily unavailable"], LogError::Threads, "gcc 12"),
    text(&["pthread_create failed", "Resource temporarily unavailable"], LogError::Threads, "OpenBLAS"),
    text(&["creation via pthread_create() failed"], LogError::Threads, "tensorflow 2.21"),
    text(&["fork: Resource temporarily unavailable"], LogError::Threads, "bash 5.2"),
    text(&["fork failed: Resource temporarily unavailable"], LogError::Threads, "zsh"),
    text(&[": Cannot fork"], LogError::Threads, "dash 0.5"),
    text(&["failed to spawn thread", "code: 11"], LogError::Threads, "Rust 1.95"),
    text(&["failed to spawn thread", "Resource temporarily unavailable"], LogError::Threads, "Rust 1.95"),
    text(&["ThreadPoolBuildError", "code: 11"], LogError::Threads, "rayon 1"),
    text(&["OS can't spawn worker thread", "os error 11"], LogError::Threads, "tokio 1"),
    text(&["fork/exec ", ": resource temporarily unavailable"], LogError::Threads, "Go 1"),
    text(&["blas_thread_init: pthread_create"], LogError::Threads, "OpenBLAS 0.3"),
    text(&["OMP: Error #34"], LogError::Threads, "Intel OpenMP"),
    text(&["spawn EAGAIN"], LogError::Threads, "Node.js 20"),
    text(&["what():  Resource temporarily unavailable"], LogError::Threads, "g++ 12, std::thread"),
    text(&["failed to create new OS thread", "errno=11"], LogError::Threads, "Go 1"),
    text(&["can't create Thread: Resource temporarily unavailable"], LogError::Threads, "Ruby 3"),
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
    text(&["System.OutOfMemoryException"], LogError::OwnLimit(ProgramLimit::DotNet), ".NET 8"),
    text(&["Allocation failed - process out of memory"], NODE, "Node.js 8"),
    text(&["JavaScript heap out of memory"], NODE, "Node.js 20"),
    text(&["ERR_WORKER_OUT_OF_MEMORY"], NODE, "Node.js 20"),
    text(&["Worker terminated due to reaching memory limit"], NODE, "Node.js 20"),
    text(&["Out of Memory Error: ", "(bad allocation)"], REFUSED, "duckdb"),
    text(&["Out of Memory Error: ", "used)"], LogError::OwnLimit(ProgramLimit::DuckDb), "duckdb 2.0"),
    text(
        &["OutOfMemoryException: Out of Memory Error:"],
        LogError::OwnLimit(ProgramLimit::DuckDb),
        "duckdb 2.0",
    ),
    text(
        &["DB::Exception: ", "MEMORY_LIMIT_EXCEEDED"],
        LogError::OwnLimit(ProgramLimit::ClickHouse),
        "ClickHouse 24",
    ),
    text(&["DB::Exception: Memory limit ("], LogError::OwnLimit(ProgramLimit::ClickHouse), "ClickHouse 20"),
    text(&["OOM command not allowed when used memory >"], LogError::OwnLimit(ProgramLimit::Redis), "Redis 7"),
    text(&["Allowed memory size of ", " bytes exhausted"], LogError::OwnLimit(ProgramLimit::Php), "PHP 8"),
    text(&["vector memory exhausted (limit reached?)"], LogError::OwnLimit(ProgramLimit::R), "R 4"),
    text(&["vector memory limit of ", "reached"], LogError::OwnLimit(ProgramLimit::R), "R 4.4"),
    text(&["Failed to create CoreCLR", "0x8007000E"], REFUSED, ".NET 8"),
    text(&["spawn ENOMEM"], REFUSED, "Node.js 20"),
    text(&["OutOfMemoryError()"], REFUSED, "Julia 1"),
    text(&["libgomp: Out of memory allocating"], REFUSED, "gcc 12"),
    text(&["NvMapMem", " error 12"], LogError::Refused(RefusedMemory::Shared), "JetPack 6"),
    text(
        &["model requires more system memory"],
        LogError::Refused(RefusedMemory::BeforeStart),
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
const LINES_BEFORE: usize = 12;

/// Maximum number of lines of one error.
pub const MAX_LINES: usize = 10;

/// Returns the errors in the lines of a log: the number of the line, and what it is.
pub fn find_errors(lines: &[&str]) -> Vec<(usize, LogError)> {
    let of_line = |number: usize| {
        let line = lines[number];
        let has_before = |words: &str| {
            lines[number.saturating_sub(LINES_BEFORE)..number].iter().any(|before| before.contains(words))
        };
        let cuda = CudaOomText::find(line).map(|found| {
            // the driver says the same of memory of the host
            let is_pinned = found.framework == "torch"
                && found.tried.is_none()
                && has_before("pin_memory(")
                && !has_before("pin memory thread");
            match is_pinned {
                true => LogError::Refused(RefusedMemory::Pinned),
                false => LogError::Cuda(with_next_lines(found, &lines[number..])),
            }
        });
        let by_lines = || {
            if line.trim_end() == "MemoryError" || line.starts_with("MemoryError:") {
                return Some(REFUSED);
            }
            // a semaphore is a file in /dev/shm, which this text does not name
            let is_semaphore = line.contains("[Errno 28] No space left on device") && has_before("SemLock");
            is_semaphore.then_some(LogError::Shm)
        };
        let is_harmless = || HARMLESS.iter().any(|words| line.contains(words));
        // of a copy, the second path is the full one
        let is_elsewhere = |error: &LogError| {
            let copied = line.rsplit_once("' -> '").filter(|_| *error == LogError::Shm);
            copied.is_some_and(|(_, to)| !to.contains("/dev/shm"))
        };
        let known = || {
            let found = TEXTS.iter().find(|known| has_parts(line, known.parts)).map(|known| known.error)?;
            (!is_harmless() && !is_elsewhere(&found)).then_some(found)
        };
        cuda.or_else(known).or_else(by_lines)
    };
    (0..lines.len()).filter_map(|number| Some((number, of_line(number)?))).collect()
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
            .map(|(number, error)| (number, std::mem::discriminant(&error)))
            .collect();
        let kind = std::mem::discriminant::<LogError>;
        let expected = [
            (1, kind(&LogError::Shm)),
            (2, kind(&LogError::Shm)),
            (3, kind(&REFUSED)),
            (4, kind(&LogError::Monitor(MemoryMonitor::Ray))),
            (5, kind(&LogError::Cuda(CudaOomText::default()))),
            (6, kind(&REFUSED)),
        ];
        assert_eq!(found, expected);
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
            let is_right = match name.split('-').next().unwrap_or_default() {
                "heap" | "limit" => matches!(last, Some(LogError::OwnLimit(_))),
                "monitor" | "dask" => matches!(last, Some(LogError::Monitor(_))),
                "none" => last.is_none(),
                // the text alone cannot be told from that of a limit of processes
                "refused" if name == "refused-mmap-locked" => last.is_none(),
                // where the host has no GPU
                "refused" if name == "refused-onnxruntime-cpu" => {
                    matches!(last, Some(LogError::Cuda(text)) if text.may_be_of_host())
                }
                "refused" | "jetson" | "ollama" | "pin" => matches!(last, Some(LogError::Refused(_))),
                "shm" | "nccl" => last == Some(LogError::Shm),
                "threads" | "pids" => last == Some(LogError::Threads),
                "server" => matches!(last, Some(LogError::Cuda(_))),
                other => panic!("no kind has texts that begin with {other}"),
            };
            count += 1;
            wrong.extend((!is_right).then(|| format!("{name}: {last:?}")));
        }
        assert!(wrong.is_empty(), "{} of {count} texts: {wrong:#?}", wrong.len());
    }
}
