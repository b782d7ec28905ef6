//! The names of the settings of memory limits.

use crate::diagnose::LimitSetter;
use crate::text::bytes;

/// Returns ` (--memory, mem_limit; now 44.0 GiB)`, the names of the setting and the limit, as far as known.
pub(super) fn names(setter: LimitSetter, now: Option<u64>) -> String {
    let names = match setter {
        LimitSetter::Kubernetes => Some("resources.limits.memory".to_owned()),
        LimitSetter::Systemd => Some("MemoryMax=".to_owned()),
        LimitSetter::Engine => Some("--memory, mem_limit".to_owned()),
        LimitSetter::Run => Some("memledger run --memory".to_owned()),
        LimitSetter::Unknown => None,
    };
    let now = now.map(|limit| format!("now {}", bytes(limit)));
    let words: Vec<_> = names.into_iter().chain(now).collect();
    if words.is_empty() { String::new() } else { format!(" ({})", words.join("; ")) }
}
