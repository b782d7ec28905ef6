//! What memledger may do, less what it does not need: capabilities are given up once it knows its settings.
//!
//! Capabilities belong to threads, and a thread hands its own on to those that it starts. So this comes before the first of
//! them. memledger executes nothing; what a GPU driver's library executes, `nvidia-modprobe`, is handed nothing and gains nothing.
//!
//! Not here: the user. Whoever starts memledger chooses it, and the runtimes' sockets are often root's.

use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};

/// What memledger uses, if it was given, by the kernel's names and numbers; SECURITY.md says each for what.
const USED: [(CapabilitySet, &str); 6] = [
    (CapabilitySet::CHOWN, "chown"), // SQLite gives its files beside a database of another user to that user
    (CapabilitySet::DAC_OVERRIDE, "dac_override"), // sockets and folders of other users, where it runs as root
    (CapabilitySet::DAC_READ_SEARCH, "dac_read_search"),
    (CapabilitySet::SYS_PTRACE, "sys_ptrace"),
    (CapabilitySet::SYS_NICE, "sys_nice"), // the thread that reads the kernel log comes before others
    (CapabilitySet::SYSLOG, "syslog"),
];
const LOW_PORT: (CapabilitySet, &str) = (CapabilitySet::NET_BIND_SERVICE, "net_bind_service");
/// The kernel's sets have 64 bits.
const MOST: u32 = 64;

/// Why capabilities could not be given up.
#[derive(Debug, thiserror::Error)]
#[error("{step}: the kernel or a system call filter refuses it")]
pub struct Refused {
    step: &'static str,
    source: Errno,
}

/// Gives up all capabilities but those that memledger uses and was given, in every set, and the right to gain others by
/// executing a file. Names those that are left. `for_low_port`: it will listen on a port below 1024.
///
/// To be called while there is one thread.
///
/// # Errors
/// The first step that was refused; the others were taken all the same.
pub fn give_up(for_low_port: bool) -> Result<String, Refused> {
    let used = USED.iter().chain(for_low_port.then_some(&LOW_PORT));
    let wanted = used.clone().fold(CapabilitySet::empty(), |all, (one, _)| all | *one);
    let because = |step| move |source| Refused { step, source };
    let given = capabilities(None).map_err(because("capabilities cannot be read"))?;
    // while CAP_SETPCAP may still be there
    let unbound = shrink_bounding_set(wanted, given.effective.contains(CapabilitySet::SETPCAP));
    let kept = given.permitted & wanted;
    let no_gain = set_no_new_privs(true).map_err(because("no_new_privs cannot be set"));
    let ambient = clear_ambient_capability_set().map_err(because("the ambient set cannot be emptied"));
    let sets = CapabilitySets {
        effective: given.effective & wanted,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    let set = set_capabilities(None, sets).map_err(because("capabilities cannot be given up"));
    unbound.map_err(because("the bounding set cannot be made smaller")).and(no_gain).and(ambient).and(set)?;
    let names: Vec<_> = used.filter(|(one, _)| kept.contains(*one)).map(|(_, name)| *name).collect();
    Ok(if names.is_empty() { "none".to_owned() } else { names.join(",") })
}

/// Without CAP_SETPCAP the bounding set stays as it is: it says what an executed file may gain, which is then nothing.
fn shrink_bounding_set(wanted: CapabilitySet, may: bool) -> Result<(), Errno> {
    if !may {
        return Ok(());
    }
    (0..MOST)
        .map(|number| CapabilitySet::from_bits_retain(1 << number))
        // an error: this kernel has no such capability
        .filter(|one| !wanted.contains(*one) && capability_is_in_bounding_set(*one) == Ok(true))
        .try_for_each(remove_capability_from_bounding_set)
}
