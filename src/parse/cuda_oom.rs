//! Texts of errors of GPU memory, as frameworks print them. Only numbers are read: no part of a text is kept.
//!
//! | framework | texts of |
//! | --- | --- |
//! | `torch` | `OutOfMemoryError` of PyTorch 1.2 to 2.15, also with cudaMallocAsync and for XPU, and errors of CUDA, cuBLAS, cuDNN, cuFFT and Triton through it, which have no numbers |
//! | `jax` | XLA's `RESOURCE_EXHAUSTED`; not the allocator's warnings, which a program survives |
//! | `tensorflow` | `OOM when allocating tensor`, `ResourceExhaustedError`, errors of its driver |
//! | `vllm` | its refusals to start: free memory, cache blocks, KV cache |
//! | `sglang` | its refusal to start |
//! | `ggml` | `cudaMalloc failed` (llama.cpp, ollama and others) |
//! | `cupy` | `OutOfMemoryError` |
//! | `onnxruntime` | its arena and its CUDA provider |
//! | `tensorrt` | error codes of allocations |
//! | `nccl` | `Cuda failure 2 'out of memory'` |
//! | `numba`, `pycuda`, `rapids`, `xgboost`, `ctranslate2`, `faiss`, `paddle`, `julia` | their errors |
//! | `other` | an error with the words CUDA, HIP or GPU, and out of memory |

use std::sync::LazyLock;

use aho_corasick::{AhoCorasick, AhoCorasickBuilder, AhoCorasickKind};
use regex::{Captures, Regex};

/// A larger number of bytes is none: NVML's value for unknown memory is 2^64 bytes, and torch prints it.
pub const MAX_BYTES: f64 = (1_u64 << 50) as f64;

/// The numbers of a CUDA out-of-memory error, as far as its text has them.
///
/// Texts have two decimals of a unit, so a number of GiB is exact to 5 MiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaOomText {
    /// The framework that printed it: see above.
    pub framework: &'static str,
    /// Number of the device in the process.
    pub device: Option<u32>,
    /// Bytes that were to be allocated.
    pub tried: Option<u64>,
    /// Memory of the device, or what the process may take of it.
    pub total: Option<u64>,
    /// Free memory of the device.
    pub free: Option<u64>,
    /// Allocated by the framework.
    pub allocated: Option<u64>,
    /// Held by the framework: allocated, and its cache.
    pub reserved: Option<u64>,
}

/// A size with its unit, as a group with this name.
fn size(name: &str) -> String {
    format!(r"(?<{name}>[0-9.]+ (?:bytes|KiB|MiB|GiB|TiB))")
}

/// Words of warnings that a program survives, and of memory of the host.
const SURVIVED: [&str; 5] =
    ["is not a failure", "ran out of memory trying to allocate", "cudaHostAlloc", "cudaMallocHost", "pinned"];

/// A part of each text, in any case: most lines of a log have none of these.
pub const WORDS: [&str; 15] = [
    "out of memory",
    "out_of_memory",
    "out of_memory",
    "out_of memory",
    "OutOfMemory",
    "ALLOC_FAILED",
    "RESOURCE_EXHAUSTED",
    "OOM when allocating",
    "failed to allocate",
    "KV cache",
    "Not enough memory. Please",
    "memory on device",
    "memory for the cache blocks",
    "ErrorMemoryAllocation",
    "Out of GPU memory",
];

static ANY_WORD: LazyLock<AhoCorasick> = LazyLock::new(|| any_of(WORDS));

/// Returns what finds any of these texts, in any case, in one pass.
///
/// # Panics
/// They are too many for it: tens of thousands.
#[allow(clippy::expect_used)]
pub(super) fn any_of<'a>(texts: impl IntoIterator<Item = &'a str>) -> AhoCorasick {
    let mut builder = AhoCorasickBuilder::new();
    // the fastest of its kinds, and the largest: half a MiB for a hundred texts
    builder.ascii_case_insensitive(true).kind(Some(AhoCorasickKind::DFA)).build(texts).expect("constants")
}

/// A framework, and a pattern with groups named like the fields of [`CudaOomText`]; `unallocated` is the cache alone, `allowed` what the
/// process may take.
type Pattern = (&'static str, Regex);

static PATTERNS: LazyLock<Vec<Pattern>> = LazyLock::new(|| {
    let any = r"[0-9.]+ (?:bytes|KiB|MiB|GiB|TiB)";
    let [tried, total, free, allocated, reserved, unallocated, allowed] =
        ["tried", "total", "free", "allocated", "reserved", "unallocated", "allowed"].map(size);
    [
        // PyTorch up to 2.0
        (
            "torch",
            format!(
                r"(?:CUDA|HIP) out of memory\. Tried to allocate {tried} \(GPU (?<device>[0-9]+); {total} total capacity; {allocated} already allocated; {free} free; (?:{allowed} allowed; )?{reserved} reserved in total by PyTorch"
            ),
        ),
        // from 2.1, which spells `capacty`
        (
            "torch",
            format!(
                r"(?:CUDA|HIP) out of memory\. Tried to allocate {tried}\. GPU (?:(?<device>[0-9]+)|(?<code>[\x00-\x1f])) has a total capaci?ty of {total} of which {free} is free\. (?:(?:Including non-PyTorch memory, this process|Process [0-9]+) has {any} memory in use\. )*(?:{allowed} allowed; )?Of the allocated memory {allocated} is allocated by PyTorch, (?:with {any} allocated in private pools \(e\.g\., CUDA Graphs\), )?and {unallocated} is reserved by PyTorch but unallocated"
            ),
        ),
        // before 1.4
        (
            "torch",
            format!(
                r"CUDA out of memory\. Tried to allocate {tried} \(GPU (?<device>[0-9]+); {total} total capacity; {allocated} already allocated; {free} free; {unallocated} cached"
            ),
        ),
        (
            "torch",
            format!(
                r"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate {tried} \(GPU (?<device>[0-9]+); {total} total capacity; {allocated} already allocated; {reserved} reserved in total by PyTorch"
            ),
        ),
        ("torch", format!(r"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate {tried}")),
        // with cudaMallocAsync the numbers are on the next lines
        (
            "torch",
            format!(
                r"Allocation on device (?<device>[0-9]+) would exceed allowed memory\. \(out of memory\)(?: Currently allocated *: {allocated} Requested *: {tried} Device limit *: {total} Free \(according to CUDA\) *: {free})?"
            ),
        ),
        (
            "torch",
            r"OutOfMemoryError: Allocation on device|(?:CUDA|HIP|XPU) out of memory\. Tried to allocate more than|HIP error: hipErrorOutOfMemory|Triton Error \[CUDA\]: out of memory"
                .to_owned(),
        ),
        (
            "torch",
            r"(?:CUDA|HIP) (?:driver )?error: out of memory|CU(?:BLAS|DNN|FFT|SOLVER|SPARSE)_(?:STATUS_)?ALLOC_FAILED"
                .to_owned(),
        ),
        (
            "jax",
            r"RESOURCE_EXHAUSTED: Out of memory while trying to allocate (?<tried>[0-9.]+ ?(?:bytes|KiB|MiB|GiB|TiB))(?: with allocator \S+ on device (?<device>[0-9]+))?"
                .to_owned(),
        ),
        ("jax", r"Resource exhausted: Out of memory while trying to allocate (?<tried>[0-9]+ bytes)".to_owned()),
        (
            "jax",
            r"RESOURCE_EXHAUSTED: Failed to allocate request for [^(]{1,32}\((?<tried>[0-9]+)B\) on device ordinal (?<device>[0-9]+)"
                .to_owned(),
        ),
        (
            "tensorflow",
            r"OOM when allocating tensor with shape\[[0-9,]*\] and type \w+ on \S*GPU:(?<device>[0-9]+)".to_owned(),
        ),
        // without a device; the text goes on if it is one of the host
        ("tensorflow", r"OOM when allocating tensor with shape\[[0-9,]*\](?: ?$| ?[^ a])".to_owned()),
        (
            "tensorflow",
            r"ResourceExhaustedError: +failed to allocate memory|\bE [^\]]{0,200}cuda_(?:driver|executor)\.cc:[0-9]+\] failed to allocate [0-9.]+[KMGT]? \((?<tried>[0-9]+ bytes)\) from device"
                .to_owned(),
        ),
        ("tensorflow", r"Out of memory while trying to allocate (?<tried>[0-9]+ bytes)\. \[Op:".to_owned()),
        (
            "vllm",
            r"(?<tried>[0-9.]+ GiB) KV cache is needed, which is larger than the available KV cache memory \((?<free>[0-9.]+ GiB)\)"
                .to_owned(),
        ),
        (
            "vllm",
            r"is larger than the maximum number of tokens that can be stored in KV cache|CUDA out of memory occurred when warming up"
                .to_owned(),
        ),
        ("sglang", r"Not enough memory\. Please try to increase --mem-fraction-static".to_owned()),
        (
            "vllm",
            r"Free memory on device (?:cuda:(?<device>[0-9]+) )?\((?<free>[0-9.]+)/(?<total>[0-9.]+ GiB)\) on startup is less than"
                .to_owned(),
        ),
        ("vllm", r"No available memory for the cache blocks".to_owned()),
        (
            "ggml",
            format!(r"allocating {tried} on device (?<device>[0-9]+): cudaMalloc failed: out of memory"),
        ),
        (
            "ggml",
            r"cudaMalloc failed: out of memory|failed to allocate (?:CUDA|ROCm|Vulkan)[0-9]+ buffer of size (?<tried>[0-9]+)"
                .to_owned(),
        ),
        (
            "onnxruntime",
            r"BFCArena::AllocateRawInternal.{0,200}Failed to allocate memory for requested buffer of size (?<tried>[0-9]+)"
                .to_owned(),
        ),
        ("onnxruntime", r"CUDA failure 2: out of memory ; GPU=(?<device>[0-9]+)".to_owned()),
        (
            "tensorrt",
            r"\[TRT\].{0,200}(?:OutOfMemory \((?:Requested size was (?<tried>[0-9]+ bytes)|no further information)|Cuda Runtime \(out of memory\))|CUDA runtime error in .{0,80}out of memory"
                .to_owned(),
        ),
        ("nccl", r"[Cc]uda failure (?:2 )?'out of memory'".to_owned()),
        ("numba", r"CudaAPIError: .{0,80}CUDA_ERROR_OUT_OF_MEMORY".to_owned()),
        ("pycuda", r"cuMem\w*Alloc\w* failed: out of memory".to_owned()),
        ("xgboost", r"(?i)xgboost.{0,300}cudaErrorMemoryAllocation".to_owned()),
        ("rapids", r"std::bad_alloc: out_of_memory: CUDA error|\brmm\b.{0,200}cudaErrorMemoryAllocation".to_owned()),
        ("ctranslate2", r"CUDA failed with error out of memory".to_owned()),
        (
            "faiss",
            r"StandardGpuResources: alloc fail.{0,200}size (?<tried>[0-9]+) bytes \(cudaMalloc error out of memory".to_owned(),
        ),
        (
            "paddle",
            r"Out of memory error on GPU (?<device>[0-9]+)\. Cannot allocate (?<tried>[0-9.]+[KMGT]?B) memory".to_owned(),
        ),
        ("julia", format!(r"Out of GPU memory trying to allocate {tried}")),
        (
            "cupy",
            r"Out of memory allocating (?<tried>[0-9,]+) bytes \(allocated so far: (?<allocated>[0-9,]+) bytes"
                .to_owned(),
        ),
        // last: an error of which only the kind is known
        (
            "other",
            r"(?i)(?:error|exception|fatal)[a-z_]*\]? ?: .{0,200}(?:cuda|hip|rocm|gpu)[0-9a-z_]*[^0-9a-z_].{0,80}out[ _]of[ _]memory|cudaErrorMemoryAllocation(?::|\)| out)".to_owned(),
        ),
    ]
    .into_iter()
    .map(|(framework, pattern)| (framework, Regex::new(&pattern).expect("a constant")))
    .collect()
});

impl CudaOomText {
    /// Returns whether the text names no device, and is printed for memory of the host too: it is the GPU's only where there is one.
    pub fn may_be_of_host(&self) -> bool {
        self.framework == "onnxruntime" && self.device.is_none()
    }

    /// Returns the numbers of the first error in a text; `None` if it has none.
    pub fn find(text: &str) -> Option<Self> {
        if !ANY_WORD.is_match(text) || SURVIVED.iter().any(|words| text.contains(words)) {
            return None;
        }
        PATTERNS.iter().find_map(|(framework, pattern)| Some(Self::of(framework, &pattern.captures(text)?)))
    }

    fn of(framework: &'static str, found: &Captures<'_>) -> Self {
        let text = |name: &str| found.name(name).map(|group| group.as_str());
        let bytes = |name: &str| bytes(text(name)?);
        let allocated = bytes("allocated");
        let in_cache = bytes("unallocated").zip(allocated).map(|(cache, allocated)| cache + allocated);
        let free = match framework {
            // the unit follows the total
            "vllm" if text("total").is_some() => {
                text("free").and_then(|number| self::bytes(&format!("{number} GiB")))
            }
            _ => bytes("free"),
        };
        Self {
            framework,
            // PyTorch 2.2 prints the number of the device as a character
            device: text("device")
                .and_then(|number| number.parse().ok())
                .or_else(|| text("code").and_then(|code| code.bytes().next()).map(u32::from)),
            tried: bytes("tried"),
            total: bytes("allowed").or(bytes("total")),
            free,
            allocated,
            reserved: bytes("reserved").or(in_cache),
        }
    }
}

/// Returns the bytes of `2.00 GiB`, `1.5GiB`, `1,024` or `1024`; `None` for what no GPU has.
fn bytes(text: &str) -> Option<u64> {
    let end =
        text.find(|letter: char| !(letter.is_ascii_digit() || ",.".contains(letter))).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = match unit.trim_start() {
        "" | "bytes" => 1.0,
        "KiB" => 1024.0,
        "MiB" => 1024.0 * 1024.0,
        "GiB" => 1024.0 * 1024.0 * 1024.0,
        "TiB" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        // of Paddle, which means the binary ones
        "B" => 1.0,
        "KB" => 1024.0,
        "MB" => 1024.0 * 1024.0,
        "GB" => 1024.0 * 1024.0 * 1024.0,
        _ => return None,
    };
    let bytes = number.replace(',', "").parse::<f64>().ok()? * unit;
    (0.0..=MAX_BYTES).contains(&bytes).then_some(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn gib(count: f64) -> Option<u64> {
        Some((count * f64::from(1 << 30)) as u64)
    }

    /// Samples, composed after the sources of the frameworks and public reports, with their numbers: device, tried, total, free,
    /// allocated, reserved.
    #[test]
    fn each_text_has_its_numbers() {
        type Numbers = [Option<u64>; 6];
        let samples: [(&str, &str, Numbers); 22] = [
            (
                "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.93 GiB total capacity; 6.74 GiB already allocated; 16.31 MiB free; 6.95 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb",
                "torch",
                [Some(0), Some(20 * MIB), gib(7.93), Some((16.31 * MIB as f64) as u64), gib(6.74), gib(6.95)],
            ),
            (
                "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 3; 39.59 GiB total capacity; 30.10 GiB already allocated; 1.20 GiB free; 32.00 GiB allowed; 31.50 GiB reserved in total by PyTorch)",
                "torch",
                [Some(3), gib(2.0), gib(32.0), gib(1.2), gib(30.1), gib(31.5)],
            ),
            (
                "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacty of 23.69 GiB of which 46.81 MiB is free. Including non-PyTorch memory, this process has 23.63 GiB memory in use. Of the allocated memory 22.00 GiB is allocated by PyTorch, and 1.25 GiB is reserved by PyTorch but unallocated. If reserved but",
                "torch",
                [
                    Some(0),
                    Some(64 * MIB),
                    gib(23.69),
                    Some((46.81 * MIB as f64) as u64),
                    gib(22.0),
                    gib(23.25),
                ],
            ),
            (
                "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 1 has a total capacity of 79.25 GiB of which 512.00 MiB is free. Process 4242 has 40.00 GiB memory in use. Including non-PyTorch memory, this process has 38.00 GiB memory in use. 70.00 GiB allowed; Of the allocated memory 30.00 GiB is allocated by PyTorch, with 2.00 GiB allocated in private pools (e.g., CUDA Graphs), and 6.00 GiB is reserved by PyTorch but unallocated.",
                "torch",
                [Some(1), gib(1.5), gib(70.0), gib(0.5), gib(30.0), gib(36.0)],
            ),
            (
                // NVML's value for unknown memory
                "CUDA out of memory. Tried to allocate 512 bytes. GPU 0 has a total capacity of 8.00 GiB of which 0 bytes is free. Process 7 has 17179869184.00 GiB memory in use. Of the allocated memory 7.00 GiB is allocated by PyTorch, and 17179869184.00 GiB is reserved by PyTorch but unallocated.",
                "torch",
                [Some(0), Some(512), gib(8.0), Some(0), gib(7.0), None],
            ),
            (
                "CUDA out of memory. Tried to allocate 3.00 GiB and nothing else is known",
                "torch",
                [None, gib(3.0), None, None, None, None],
            ),
            (
                // from 2.9 on, in a container that cannot list the processes of the GPU
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.35 GiB. GPU 0 has a total capacity of 23.69 GiB of which 16.31 MiB is free. Of the allocated memory 19.24 GiB is allocated by PyTorch, and 3.32 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
                "torch",
                [
                    Some(0),
                    gib(1.35),
                    gib(23.69),
                    Some((16.31 * MIB as f64) as u64),
                    gib(19.24),
                    Some(gib(19.24).unwrap_or(0) + gib(3.32).unwrap_or(0)),
                ],
            ),
            (
                "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 63.98 GiB of which 1.00 GiB is free. Of the allocated memory 60.00 GiB is allocated by PyTorch, and 2.50 GiB is reserved by PyTorch but unallocated.",
                "torch",
                [Some(1), gib(2.0), gib(63.98), gib(1.0), gib(60.0), gib(62.5)],
            ),
            ("RuntimeError: HIP error: out of memory", "torch", [None; 6]),
            ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "torch", [None; 6]),
            ("RuntimeError: CUDA error: out of memory", "torch", [None; 6]),
            ("CUDA driver error: out of memory", "torch", [None; 6]),
            (
                "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
                "torch",
                [None; 6],
            ),
            (
                "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.",
                "jax",
                [None, gib(16.0), None, None, None, None],
            ),
            (
                "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.50GiB.",
                "jax",
                [None, gib(1.5), None, None, None, None],
            ),
            (
                "RESOURCE_EXHAUSTED: Failed to allocate request for 4.00GiB (4294967296B) on device ordinal 2",
                "jax",
                [Some(2), gib(4.0), None, None, None, None],
            ),
            (
                "OOM when allocating tensor with shape[64,512,512,3] and type float on /job:localhost/replica:0/task:0/device:GPU:1 by allocator GPU_1_bfc",
                "tensorflow",
                [Some(1), None, None, None, None, None],
            ),
            (
                "ValueError: Free memory on device cuda:0 (2.50/23.50 GiB) on startup is less than desired GPU memory utilization (0.9, 21.15 GiB).",
                "vllm",
                [Some(0), None, gib(23.5), gib(2.5), None, None],
            ),
            (
                "ValueError: Free memory on device (6.90/8.00 GiB) on startup is less than desired GPU memory utilization (0.9, 7.2 GiB).",
                "vllm",
                [None, None, gib(8.0), gib(6.9), None, None],
            ),
            (
                "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
                "vllm",
                [None; 6],
            ),
            (
                "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory",
                "ggml",
                [Some(0), gib(4.0), None, None, None, None],
            ),
            (
                "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 1,073,741,824 bytes (allocated so far: 5,368,709,120 bytes).",
                "cupy",
                [None, gib(1.0), None, None, gib(5.0), None],
            ),
        ];
        for (text, framework, numbers) in samples {
            let found = CudaOomText::find(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(found.framework, framework, "{text}");
            let of = [
                found.device.map(u64::from),
                found.tried,
                found.total,
                found.free,
                found.allocated,
                found.reserved,
            ];
            assert_eq!(of, numbers, "{text}");
        }
    }

    /// Errors as people post them; the name of a file begins with the framework.
    #[test]
    fn each_posted_error_has_its_framework() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda-texts");
        let mut wrong = vec![];
        for file in std::fs::read_dir(folder).unwrap() {
            let file = file.unwrap();
            let name = file.file_name().into_string().unwrap();
            let text = std::fs::read_to_string(file.path()).unwrap();
            let expected = match name.split(['-', '.']).next().unwrap() {
                "hip" => "torch",
                "ollama" => "ggml",
                "rmm" => "rapids",
                other => other,
            };
            let found: Vec<_> =
                text.lines().filter_map(CudaOomText::find).map(|found| found.framework).collect();
            if found.first() != Some(&expected) {
                wrong.push(format!("{name}: {found:?}"));
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
    }

    #[test]
    fn other_lines_are_none() {
        for text in [
            "",
            "training step 7: memory 22.1 GiB",
            // a warning of the allocator, which the program survives
            "Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.20GiB with freed_by_count=0. The caller indicates that this is not a failure",
            "Memory cgroup out of memory: Killed process 7 (python)",
            "Out of memory: Killed process 7 (python)",
            "RuntimeError: [enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory",
            // a report of vLLM, not a refusal
            "Free memory on device (23.19/23.69 GiB) on startup. Desired GPU memory utilization is (0.9, 21.32 GiB).",
            // memory of the host
            "RESOURCE_EXHAUSTED: Out of memory allocating 20029400304 bytes.",
            "OOM when allocating tensor with shape[16,19,19,1024] and type float on /job:localhost/replica:0/task:0/device:CPU:0 by allocator cpu",
            "2024-01-02: W external/xla/stream_executor/cuda/cuda_executor.cc:900] failed to allocate 1.51G (1617277696 bytes) from device: RESOURCE",
            "RuntimeError: cudaHostAlloc failed: out of memory (pinned host memory)",
            "Tip: use a smaller batch if CUDA runs out of memory",
            "config: retry_on_error=True: CUDA out of memory is retried",
            "set PYTORCH_CUDA_ALLOC_CONF to avoid CUDA fragmentation; see OOM notes",
        ] {
            assert_eq!(CudaOomText::find(text), None, "{text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_read_without_a_panic(text in "(CUDA out of memory\\. Tried to allocate |[0-9.,]{0,9} ?(GiB|bytes|B)|GPU |[a-z ]|\\PC){0,30}") {
            let _ = CudaOomText::find(&text);
        }
    }
}
