//! What is said of the samples before a kill.

use super::Noun;
use super::terms::{name, role_one, roles};
use crate::diagnose::{LargestHolder, UsageFinding};
use crate::text::{bytes, lasted};

/// Returns the sentence of a fact.
pub(super) fn finding(finding: &UsageFinding, noun: Noun) -> String {
    match finding {
        UsageFinding::Grew { from_bytes, to_bytes, seconds } => format!(
            "It grew from {} to {} in {}. If that goes on, a higher limit only delays it.",
            bytes(*from_bytes),
            bytes(*to_bytes),
            lasted(*seconds)
        ),
        UsageFinding::GrewSuddenly { bytes: held, seconds } => format!(
            "It held {} at the last sample and reached the limit within {}: sudden growth, not slow.",
            bytes(*held),
            lasted(seconds.ceil().max(1.0))
        ),
        UsageFinding::PageCache { bytes: file } => format!(
            "Page cache ({}) is not the cause: the kernel drops it before it kills.",
            bytes(*file)
        ),
        UsageFinding::Held { bytes: held, limit_bytes } => format!(
            "At the last sample it held {} of its limit of {} that the kernel could not drop.",
            bytes(*held),
            bytes(*limit_bytes)
        ),
        UsageFinding::WorkersHeld { role, processes, bytes: held, num_workers } => format!(
            "In {} {} held {}{}.",
            noun.this(),
            roles(*role, *processes),
            bytes(*held),
            num_workers.as_ref().map_or_else(String::new, |value| format!(" (NUM_WORKERS={})", name(value)))
        ),
        UsageFinding::LargestHolders { host_bytes, holders } => {
            let total =
                host_bytes.map_or_else(String::new, |total| format!(" of the machine's {}", bytes(total)));
            let list: Vec<_> = holders.iter().map(held).collect();
            format!("Largest holders{total} at the last sample: {}.", list.join(", "))
        }
        UsageFinding::HoldersNotSampled => {
            "The kernel logs processes, which share pages, but not what each container held: only samples of `memledger serve` show that, and \
             there is none of that time."
                .to_owned()
        }
        UsageFinding::Score { role, oom_score_adj, is_of_pod } => {
            let what = role.map_or("process", role_one);
            let who = if *is_of_pod { " Kubernetes sets it by the pod's QoS class." } else { "" };
            format!(
                "The {what} had oom_score_adj {oom_score_adj}: the kernel counts {oom_score_adj}/1000 of the memory more for it, so it dies before \
                 larger ones.{who}"
            )
        }
    }
}

fn held(holder: &LargestHolder) -> String {
    let mark = if holder.is_own { " (this one)" } else { "" };
    format!("{}{mark} {}", name(&holder.name), bytes(holder.unreclaimable_bytes))
}
