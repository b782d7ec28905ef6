//! Messages of reporting processes: one JSON object per packet.
//!
//! All of it is untrusted. Unknown types and unknown fields are ignored, so that an older memledger accepts a newer
//! client; everything else that is not as described in docs/reporter-protocol.md is an error, and the packet is dropped.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;

use super::stats::ReportRejection;
use crate::parse::cuda_oom::CudaOomText;
use crate::text::bounded as printable_label;

/// Maximum size of a packet in bytes.
pub const MAX_PACKET_BYTES: usize = crate::host::bounds::REPORTER_PACKET.max_bytes;
/// The protocol's version.
const VERSION: u64 = 1;
/// Maximum number of devices in a message and of a process; their numbers are below it.
pub const MAX_DEVICES: usize = 64;
/// Maximum local rank; it is a label value.
const MAX_RANK: u64 = 63;
/// Maximum length of a component and of an operation.
const MAX_NAME: usize = 64;
/// Maximum length of the path of a snapshot.
const MAX_PATH: usize = 256;
/// Maximum number of settings of a training.
pub const MAX_SETTINGS: usize = 18;
/// Maximum amount of memory, 1 PiB, and of every count: larger numbers have no exact place in a double.
const MAX_NUMBER: u64 = 1 << 50;
/// Maximum time that a message can have waited in its process, in milliseconds.
const MAX_AGO: u64 = 60_000;

/// A valid message.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// The first message of a connection.
    Hello(Hello),
    /// Memory of torch on each device.
    Sample(Sample),
    /// Memory within one operation of one component.
    Operation(TrackedOperation),
    /// Memory at points of the program, oldest first.
    Records(Vec<ReportedRecord>),
    /// Progress of the training.
    Step(Step),
    /// Settings of the training by name in lower case, as text.
    Settings(BTreeMap<Arc<str>, Arc<str>>),
    /// A CUDA out-of-memory error.
    Oom(OomMessage),
    /// What was reported of the GPUs so far is not of the training: a search for a batch size has ended.
    ForgetPeaks,
    /// The answer to a request to clean up.
    Cleaned(Cleaned),
    /// Of an unknown type, or of one that is not used yet.
    Ignored,
}

/// Who reports. Its identity is not in here: that is the kernel's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Rank among the processes of this host; 0 without a launcher.
    pub local_rank: u8,
    /// Device number of torch and UUID of each device; no UUID before torch 2.5.
    pub devices: Vec<(u32, Option<Arc<str>>)>,
}

/// Memory of torch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Messages that the client could not send since it started.
    pub lost: u64,
    /// Operations without a peak since it started: another one ran at the same time on the same device.
    pub overlapping: u64,
    /// Memory on each device.
    pub devices: Vec<TorchMemory>,
}

/// Memory of torch's allocator on one device, in bytes. A field that the allocator does not report is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct TorchMemory {
    /// Device number of torch in that process.
    pub i: u32,
    /// In tensors.
    pub alloc: Option<u64>,
    /// Highest `alloc`.
    pub alloc_peak: Option<u64>,
    /// Held by the allocator: tensors and its cache.
    pub res: Option<u64>,
    /// Highest `res`.
    pub res_peak: Option<u64>,
    /// Free parts of split blocks, which cannot be given back.
    pub split: Option<u64>,
    /// Out-of-memory errors so far.
    pub ooms: Option<u64>,
    /// Allocations that succeeded only after the cache was emptied, so far.
    pub retries: Option<u64>,
}

/// Memory at the end of an operation that the program tracks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrackedOperation {
    /// Part of the program, such as `model`.
    pub component: Arc<str>,
    /// What it did, such as `before_generate`.
    pub operation: Arc<str>,
    /// Resident memory of the process in bytes.
    pub rss: Option<u64>,
    /// Memory on each device.
    pub devices: Vec<TorchMemory>,
}

/// Memory at one point of the program: an entry of its `memory_usage.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportedRecord {
    /// Component and operation.
    pub pair: (Arc<str>, Arc<str>),
    /// How long ago it was made.
    pub ago: Duration,
    /// Resident memory, and of torch on all devices: allocated, its peak, reserved.
    pub bytes: [Option<u64>; 4],
}

/// Progress since the process started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Training steps.
    pub steps: u64,
    /// Training samples; `None` if the program does not count them.
    pub samples: Option<u64>,
}

/// A CUDA out-of-memory error of a process, or, without numbers, that the process ended by an earlier one. Sizes are in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OomMessage {
    /// Number of the error in its process. A second message with this number is about the same error.
    pub number: u64,
    /// Device number of torch in that process.
    pub device: Option<u32>,
    /// UUID of that device, if the process knows it.
    pub uuid: Option<Arc<str>>,
    /// The framework, if the error is known from its text.
    pub framework: Option<&'static str>,
    /// What was to be allocated.
    pub tried: Option<u64>,
    /// Memory of the device, or what the process may take of it.
    pub total: Option<u64>,
    /// Free memory of the device.
    pub free: Option<u64>,
    /// In tensors.
    pub allocated: Option<u64>,
    /// Held by the allocator.
    pub reserved: Option<u64>,
    /// Free parts of split blocks.
    pub inactive_split: Option<u64>,
    /// Component and operation of the program.
    pub operation: Option<(Arc<str>, Arc<str>)>,
    /// The program did not catch it.
    pub is_uncaught: bool,
    /// Errors before this one that have no message.
    pub skipped: u64,
    /// How long it waited in the process.
    pub ago: Duration,
    /// Where the process wrote PyTorch's history of allocations, in the container.
    pub snapshot: Option<Arc<str>>,
}

/// What came of a request to clean up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cleaned {
    /// Number of the request.
    pub id: u64,
    /// Bytes of torch's allocator on all devices, before and after, and the duration in milliseconds. `None`: it failed.
    pub outcome: Option<(u64, u64, u64)>,
}

impl OomMessage {
    /// Returns the error of a text, with its numbers.
    pub fn of_text(text: &CudaOomText) -> Self {
        Self {
            device: text.device.filter(|device| is_device(*device)),
            framework: Some(text.framework),
            tried: text.tried,
            total: text.total,
            free: text.free,
            allocated: text.allocated,
            reserved: text.reserved,
            ..Self::default()
        }
    }

    /// Returns true if it says only that the process ended by an error with a message of its own.
    pub fn is_only_uncaught(&self) -> bool {
        self.is_uncaught && self.is_update()
    }

    /// Returns true if it only adds to an error with a message of its own: that the process ended by it, or where its snapshot is.
    pub fn is_update(&self) -> bool {
        (self.is_uncaught || self.snapshot.is_some()) && self.framework.is_none() && self.tried.is_none()
    }
}

#[derive(Deserialize)]
struct RawType<'a> {
    #[serde(borrow)]
    t: Cow<'a, str>,
}

#[derive(Deserialize)]
struct RawHello {
    v: u64,
    local_rank: Option<u64>,
    #[serde(default)]
    devices: Vec<RawDevice>,
}

#[derive(Deserialize)]
struct RawDevice {
    i: u32,
    uuid: Option<String>,
}

#[derive(Deserialize)]
struct RawSample {
    #[serde(default)]
    lost: u64,
    #[serde(default)]
    overlapping: u64,
    #[serde(default)]
    dev: Vec<TorchMemory>,
}

#[derive(Deserialize)]
struct RawOperation {
    component: String,
    operation: String,
    rss: Option<u64>,
    #[serde(default)]
    dev: Vec<TorchMemory>,
}

#[derive(Deserialize)]
struct RawRecords {
    of: Vec<RawRecord>,
}

/// Component, operation, microseconds ago, and bytes.
type RawRecord = (String, String, u64, Option<u64>, Option<u64>, Option<u64>, Option<u64>);

#[derive(Deserialize)]
struct RawSettings {
    kv: BTreeMap<String, serde_json::Value>,
}

#[derive(Deserialize)]
struct RawOom {
    n: u64,
    i: Option<u32>,
    tried: Option<u64>,
    total: Option<u64>,
    free: Option<u64>,
    alloc: Option<u64>,
    res: Option<u64>,
    split: Option<u64>,
    uuid: Option<String>,
    operation: Option<(String, String)>,
    text: Option<String>,
    #[serde(default)]
    uncaught: bool,
    #[serde(default)]
    skipped: u64,
    #[serde(default)]
    ago_ms: u64,
    snapshot: Option<String>,
}

#[derive(Deserialize)]
struct RawCleaned {
    id: u64,
    #[serde(default)]
    failed: bool,
    #[serde(default)]
    ms: u64,
    #[serde(default)]
    dev: Vec<RawCleanedDevice>,
}

#[derive(Deserialize)]
struct RawCleanedDevice {
    before: u64,
    after: u64,
}

#[derive(Deserialize)]
struct RawStep {
    n: u64,
    samples: Option<u64>,
}

impl Message {
    /// Parses a packet.
    ///
    /// # Errors
    /// The reason for which the packet is rejected.
    pub fn parse(packet: &[u8]) -> Result<Self, ReportRejection> {
        let kind: RawType<'_> = parse(packet)?;
        match &*kind.t {
            "hello" => hello(parse(packet)?).map(Message::Hello),
            "sample" => {
                let RawSample { lost, overlapping, dev } = parse(packet)?;
                Ok(Message::Sample(Sample {
                    lost: bounded(lost)?,
                    overlapping: bounded(overlapping)?,
                    devices: devices(dev)?,
                }))
            }
            "operation" => {
                let RawOperation { component, operation, rss, dev } = parse(packet)?;
                let (component, operation) = (name(&component)?, name(&operation)?);
                let rss = rss.map(bounded).transpose()?;
                Ok(Message::Operation(TrackedOperation { component, operation, rss, devices: devices(dev)? }))
            }
            "records" => {
                let RawRecords { of } = parse(packet)?;
                of.into_iter().map(record).collect::<Result<_, _>>().map(Message::Records)
            }
            "step" => {
                let RawStep { n, samples } = parse(packet)?;
                Ok(Message::Step(Step { steps: bounded(n)?, samples: samples.map(bounded).transpose()? }))
            }
            "settings" => settings(parse(packet)?).map(Message::Settings),
            "oom" => oom(parse(packet)?).map(Message::Oom),
            "forget_peaks" => Ok(Message::ForgetPeaks),
            "cleaned" => cleaned(&parse(packet)?).map(Message::Cleaned),
            _ => Ok(Message::Ignored),
        }
    }
}

fn parse<'a, T: Deserialize<'a>>(packet: &'a [u8]) -> Result<T, ReportRejection> {
    serde_json::from_slice(packet).map_err(|_| ReportRejection::Malformed)
}

fn record(raw: RawRecord) -> Result<ReportedRecord, ReportRejection> {
    let (component, operation, ago_us, rss, allocated, peak, reserved) = raw;
    for bytes in [rss, allocated, peak, reserved].into_iter().flatten() {
        bounded(bytes)?;
    }
    Ok(ReportedRecord {
        pair: (name(&component)?, name(&operation)?),
        ago: Duration::from_micros(ago_us.min(1_000 * MAX_AGO)),
        bytes: [rss, allocated, peak, reserved],
    })
}

fn cleaned(raw: &RawCleaned) -> Result<Cleaned, ReportRejection> {
    if raw.dev.len() > MAX_DEVICES {
        return Err(ReportRejection::Malformed);
    }
    let sum = |of: fn(&RawCleanedDevice) -> u64| -> Result<u64, ReportRejection> {
        raw.dev.iter().map(|device| bounded(of(device))).sum()
    };
    let outcome = (sum(|device| device.before)?, sum(|device| device.after)?, bounded(raw.ms)?);
    Ok(Cleaned { id: bounded(raw.id)?, outcome: (!raw.failed).then_some(outcome) })
}

fn hello(raw: RawHello) -> Result<Hello, ReportRejection> {
    if raw.v != VERSION {
        return Err(ReportRejection::Version);
    }
    let local_rank = raw.local_rank.unwrap_or(0); // a program without a launcher has one rank
    let local_rank = u8::try_from(local_rank).ok().filter(|rank| u64::from(*rank) <= MAX_RANK);
    let local_rank = local_rank.ok_or(ReportRejection::Rank)?;
    if raw.devices.len() > MAX_DEVICES || !raw.devices.iter().all(|device| is_device(device.i)) {
        return Err(ReportRejection::Malformed);
    }
    let device = |device: RawDevice| Ok((device.i, uuid(device.uuid)?));
    let devices = raw.devices.into_iter().map(device).collect::<Result<_, _>>()?;
    Ok(Hello { local_rank, devices })
}

fn uuid(uuid: Option<String>) -> Result<Option<Arc<str>>, ReportRejection> {
    match uuid {
        Some(uuid) if uuid.len() > MAX_NAME || !uuid.bytes().all(is_name_byte) => {
            Err(ReportRejection::Malformed)
        }
        uuid => Ok(uuid.map(|uuid| normalized_uuid(&uuid))),
    }
}

fn settings(raw: RawSettings) -> Result<BTreeMap<Arc<str>, Arc<str>>, ReportRejection> {
    use serde_json::Value;
    if raw.kv.len() > MAX_SETTINGS {
        return Err(ReportRejection::Malformed);
    }
    let setting = |(key, value): (String, Value)| {
        let text = match value {
            Value::String(text) if text.chars().count() <= MAX_NAME => printable_label(&text),
            Value::Number(_) | Value::Bool(_) => value.to_string().into(),
            _ => return Err(ReportRejection::Malformed),
        };
        Ok((name(&key.to_ascii_lowercase())?, text))
    };
    raw.kv.into_iter().map(setting).collect()
}

fn oom(raw: RawOom) -> Result<OomMessage, ReportRejection> {
    let are_valid = [raw.n, raw.skipped].into_iter().all(|number| number <= MAX_NUMBER);
    // a wrong shape may ask for any number of bytes: the error is one all the same
    let known = |bytes: Option<u64>| bytes.filter(|bytes| *bytes <= MAX_NUMBER);
    if !are_valid || !raw.i.is_none_or(is_device) {
        return Err(ReportRejection::Malformed);
    }
    let text = raw.text.as_deref().map(|text| CudaOomText::find(text).unwrap_or_default());
    let of_text = text.as_ref().map(OomMessage::of_text).unwrap_or_default();
    let operation = raw.operation.map(|(component, operation)| Ok((name(&component)?, name(&operation)?)));
    Ok(OomMessage {
        number: raw.n,
        device: raw.i.or(of_text.device),
        framework: of_text.framework,
        tried: known(raw.tried).or(of_text.tried),
        total: known(raw.total).or(of_text.total),
        free: known(raw.free).or(of_text.free),
        allocated: known(raw.alloc).or(of_text.allocated),
        reserved: known(raw.res).or(of_text.reserved),
        inactive_split: known(raw.split),
        operation: operation.transpose()?,
        uuid: uuid(raw.uuid)?,
        is_uncaught: raw.uncaught,
        skipped: raw.skipped,
        ago: Duration::from_millis(raw.ago_ms.min(MAX_AGO)),
        snapshot: raw.snapshot.filter(|path| path.len() <= MAX_PATH).map(|path| printable_label(&path)),
    })
}

/// Returns a UUID without the prefix that NVML has and torch does not, in lowercase.
pub fn normalized_uuid(uuid: &str) -> Arc<str> {
    let bare = uuid.strip_prefix("GPU-").or_else(|| uuid.strip_prefix("MIG-")).unwrap_or(uuid);
    bare.to_ascii_lowercase().into()
}

fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"_.:-".contains(&byte)
}

/// Returns a name that is safe as a label value.
fn name(text: &str) -> Result<Arc<str>, ReportRejection> {
    let is_valid = (1..=MAX_NAME).contains(&text.len()) && text.bytes().all(is_name_byte);
    if is_valid { Ok(text.into()) } else { Err(ReportRejection::Name) }
}

fn is_device(number: u32) -> bool {
    usize::try_from(number).is_ok_and(|number| number < MAX_DEVICES)
}

fn bounded(number: u64) -> Result<u64, ReportRejection> {
    if number <= MAX_NUMBER { Ok(number) } else { Err(ReportRejection::Malformed) }
}

/// Returns the devices if each is listed once and no number is too large.
fn devices(devices: Vec<TorchMemory>) -> Result<Vec<TorchMemory>, ReportRejection> {
    let is_listed_once =
        |(at, device): (usize, &TorchMemory)| devices[..at].iter().all(|other| other.i != device.i);
    let numbers =
        |of: &TorchMemory| [of.alloc, of.alloc_peak, of.res, of.res_peak, of.split, of.ooms, of.retries];
    let mut numbers = devices.iter().flat_map(numbers).flatten();
    let is_valid = devices.len() <= MAX_DEVICES
        && numbers.all(|number| number <= MAX_NUMBER)
        && devices.iter().all(|device| is_device(device.i))
        && devices.iter().enumerate().all(is_listed_once);
    if is_valid { Ok(devices) } else { Err(ReportRejection::Malformed) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Message, ReportRejection> {
        Message::parse(text.as_bytes())
    }

    #[test]
    fn parses_each_message_of_the_protocol() {
        let hello = r#"{"v":1,"t":"hello","client":"0.1","torch":"2.9.1","backend":"native","rank":5,"local_rank":1,
            "devices":[{"i":0,"uuid":"GPU-AB-1"},{"i":1}]}"#;
        let devices = vec![(0, Some("ab-1".into())), (1, None)];
        assert_eq!(parse(hello), Ok(Message::Hello(Hello { local_rank: 1, devices })));
        let memory = TorchMemory { i: 0, alloc: Some(7), res: Some(9), ..TorchMemory::default() };
        let sample = r#"{"t":"sample","seq":7,"lost":2,"dev":[{"i":0,"alloc":7,"res":9,"later":"field"}]}"#;
        let parsed = |overlapping, devices| Ok(Message::Sample(Sample { lost: 2, overlapping, devices }));
        assert_eq!(parse(sample), parsed(0, vec![memory]));
        assert_eq!(parse(r#"{"t":"sample","lost":2,"overlapping":9}"#), parsed(9, vec![]));
        let step = r#"{"t":"step","n":3,"samples":96,"batch_size":32}"#;
        assert_eq!(parse(step), Ok(Message::Step(Step { steps: 3, samples: Some(96) })));
        let records = r#"{"t":"records","of":[["model","generate",2500000,7,5,null,9]]}"#;
        let bytes = [Some(7), Some(5), None, Some(9)];
        let pair = ("model".into(), "generate".into());
        let record = ReportedRecord { pair, ago: Duration::from_millis(2500), bytes };
        assert_eq!(parse(records), Ok(Message::Records(vec![record])));
        let unnamed = r#"{"t":"records","of":[["model","",0,null,null,null,null]]}"#;
        assert_eq!(parse(unnamed), Err(ReportRejection::Name));
        let huge = r#"{"t":"records","of":[["model","x",0,9223372036854775807,null,null,null]]}"#;
        assert_eq!(parse(huge), Err(ReportRejection::Malformed));
        let settings = r#"{"t":"settings","kv":{"LR":0.0003,"amp":true,"optimizer":"adamw"}}"#;
        let pairs = [("lr", "0.0003"), ("amp", "true"), ("optimizer", "adamw")];
        let pairs = pairs.map(|(name, value)| (name.into(), value.into()));
        assert_eq!(parse(settings), Ok(Message::Settings(pairs.into())));
        let oom = r#"{"t":"oom","n":2,"i":1,"tried":7,"total":9,"free":1,"alloc":5,"res":6,"split":1,"operation":["model","forward"],"uuid":"GPU-AB","skipped":3,"ago_ms":2000}"#;
        let numbers = OomMessage {
            number: 2,
            device: Some(1),
            tried: Some(7),
            total: Some(9),
            free: Some(1),
            allocated: Some(5),
            reserved: Some(6),
            inactive_split: Some(1),
            operation: Some(("model".into(), "forward".into())),
            uuid: Some("ab".into()),
            skipped: 3,
            ago: Duration::from_secs(2),
            ..OomMessage::default()
        };
        assert_eq!(parse(oom), Ok(Message::Oom(numbers)));
        let text = r#"{"t":"oom","n":1,"uncaught":true,"text":"CUDA out of memory. Tried to allocate 2.00 GiB and more"}"#;
        let of_text = OomMessage {
            number: 1,
            framework: Some("torch"),
            tried: Some(2 << 30),
            is_uncaught: true,
            ..OomMessage::default()
        };
        assert_eq!(parse(text), Ok(Message::Oom(of_text)));
        let cleaned = r#"{"t":"cleaned","id":3,"ms":41,"dev":[{"i":0,"before":4,"after":1},{"i":1,"before":5,"after":0}]}"#;
        assert_eq!(parse(cleaned), Ok(Message::Cleaned(Cleaned { id: 3, outcome: Some((9, 1, 41)) })));
        let failed = r#"{"t":"cleaned","id":3,"failed":true}"#;
        assert_eq!(parse(failed), Ok(Message::Cleaned(Cleaned { id: 3, outcome: None })));
        for ignored in [r#"{"t":"cleanup","id":1}"#, r#"{"t":""}"#] {
            assert_eq!(parse(ignored), Ok(Message::Ignored));
        }
    }

    #[test]
    fn rejects_each_kind_of_invalid_message_by_its_reason() {
        use ReportRejection::{Malformed, Name, Rank, Version};
        let deep = format!("{}1{}", "[".repeat(5_000), "]".repeat(5_000));
        let twice = r#"{"t":"sample","dev":[{"i":0,"alloc":1},{"i":0,"alloc":2}]}"#;
        let many = format!(r#"{{"t":"sample","dev":[{}]}}"#, vec![r#"{"i":0}"#; 65].join(","));
        for (text, reason) in [
            ("", Malformed),
            ("7", Malformed),
            ("{}", Malformed),
            (&deep, Malformed),
            (twice, Malformed),
            (&many, Malformed),
            (r#"{"t":"settings","kv":{"a":[]}}"#, Malformed),
            (r#"{"t":"cleaned"}"#, Malformed),
            (r#"{"t":"cleaned","id":1,"dev":[{"before":1125899906842625,"after":0}]}"#, Malformed),
            (r#"{"t":"settings","kv":{"a b":1}}"#, Name),
            (r#"{"t":"sample","dev":[{"i":-1}]}"#, Malformed),
            (r#"{"t":"sample","dev":[{"i":64}]}"#, Malformed),
            (r#"{"t":"hello","v":1,"devices":[{"i":64}]}"#, Malformed),
            (r#"{"t":"sample","dev":[{"i":0,"alloc":-5}]}"#, Malformed),
            (r#"{"t":"sample","dev":[{"i":0,"alloc":1.5}]}"#, Malformed),
            (r#"{"t":"sample","dev":[{"i":0,"alloc":18446744073709551615}]}"#, Malformed),
            (r#"{"t":"oom"}"#, Malformed),
            (r#"{"t":"oom","n":1,"i":64}"#, Malformed),
            (r#"{"t":"oom","n":1,"skipped":18446744073709551615}"#, Malformed),
            (r#"{"t":"oom","n":1,"uuid":"a b"}"#, Malformed),
            (r#"{"t":"oom","n":1,"operation":["a","b c"]}"#, Name),
            (r#"{"t":"hello","v":2}"#, Version),
            (r#"{"t":"hello","v":1,"local_rank":64}"#, Rank),
            (r#"{"t":"hello","v":1,"devices":[{"i":0,"uuid":"a\"b"}]}"#, Malformed),
            (r#"{"t":"operation","component":"","operation":"a"}"#, Name),
            (r#"{"t":"operation","component":"a b","operation":"a"}"#, Name),
            (r#"{"t":"operation","component":"a","operation":"x\"} 1\nother"}"#, Name),
            (r#"{"t":"operation","component":"a","operation":"ä"}"#, Name),
            (&format!(r#"{{"t":"operation","component":"a","operation":"{}"}}"#, "a".repeat(65)), Name),
        ] {
            assert_eq!(parse(text), Err(reason), "{text:.60}");
        }
    }
}
