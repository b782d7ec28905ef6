//! Out-of-memory errors in the log of a program: of GPU memory ([`CudaOomText`]), of shared memory, of the process's own, and kills by
//! monitors that act before the kernel does.

use super::cuda_oom::CudaOomText;

/// An error in a log.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LogError {
    /// GPU memory.
    Cuda(CudaOomText),
    /// Shared memory: `/dev/shm` was full.
    Shm,
    /// The kernel or a limit refused memory of the host to a program, which was not killed.
    HostAllocation,
    /// Ray's memory monitor killed a worker.
    RayMonitor,
}

/// Texts of errors, in the order in which they are tried.
const TEXTS: [(&str, LogError); 11] = [
    ("insufficient shared memory (shm)", LogError::Shm),
    ("is killed by signal: Bus error", LogError::Shm),
    ("ERROR: Unexpected bus error encountered in worker", LogError::Shm),
    ("unable to write to file </torch_", LogError::Shm),
    ("No space left on device: '/dev/shm", LogError::Shm),
    ("was killed due to the node running low on memory", LogError::RayMonitor),
    ("killed due to memory pressure (OOM)", LogError::RayMonitor),
    ("DefaultCPUAllocator: can't allocate memory", LogError::HostAllocation),
    ("DefaultCPUAllocator: not enough memory", LogError::HostAllocation),
    ("std::bad_alloc", LogError::HostAllocation),
    ("Cannot allocate memory", LogError::HostAllocation),
];

/// Maximum number of lines of one error.
pub const MAX_LINES: usize = 10;

/// Returns the errors in the lines of a log: the number of the line, and what it is.
pub fn find_errors(lines: &[&str]) -> Vec<(usize, LogError)> {
    let of_line = |number: usize| {
        let line = lines[number];
        let cuda =
            CudaOomText::find(line).map(|found| LogError::Cuda(with_next_lines(found, &lines[number..])));
        let known = || TEXTS.iter().find(|(text, _)| line.contains(text)).map(|(_, error)| *error);
        cuda.or_else(known)
    };
    (0..lines.len()).filter_map(|number| Some((number, of_line(number)?))).collect()
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
            (3, kind(&LogError::HostAllocation)),
            (4, kind(&LogError::RayMonitor)),
            (5, kind(&LogError::Cuda(CudaOomText::default()))),
            (6, kind(&LogError::HostAllocation)),
        ];
        assert_eq!(found, expected);
    }
}
