//! Drops the capabilities that memledger does not need, once its settings are known.
//!
//! Capabilities belong to threads, and a thread passes its own on to the threads that it starts. So this runs before
//! the first thread is started. memledger executes only itself, as the NVML process, which keeps still fewer;
//! `nvidia-modprobe`, which a GPU driver's library may execute, inherits nothing and gains nothing.
//!
//! The user is not changed here: whoever starts memledger chooses it, and the sockets of the runtimes often belong to
//! root.

use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};

/// The capabilities that memledger keeps if it has them, by kernel name and number; SECURITY.md explains each.
const USED: [(CapabilitySet, &str); 5] = [
    (CapabilitySet::CHOWN, "chown"), // SQLite changes the owner of its side files to the owner of the database
    (CapabilitySet::DAC_OVERRIDE, "dac_override"), // sockets and directories of other users, when running as root
    (CapabilitySet::SYS_PTRACE, "sys_ptrace"),
    (CapabilitySet::SYS_NICE, "sys_nice"), // priority of the thread that reads the kernel log
    (CapabilitySet::SYSLOG, "syslog"),
];
const LOW_PORT: (CapabilitySet, &str) = (CapabilitySet::NET_BIND_SERVICE, "net_bind_service");
/// A kernel capability set has 64 bits.
const CAPABILITY_BITS: u32 = 64;

/// Error from dropping capabilities.
#[derive(Debug, thiserror::Error)]
#[error("{step}: denied by the kernel or a seccomp filter")]
pub struct CapabilityError {
    step: &'static str,
    source: Errno,
}

/// Drops all capabilities except those that memledger uses and has, in every set, and the right to gain others by
/// executing a file. Returns the names of the remaining ones. `for_low_port`: memledger listens on a port below 1024.
///
/// Must be called while there is only one thread.
///
/// # Errors
/// Returns the first step that failed; the other steps are done all the same.
pub fn drop_capabilities(for_low_port: bool) -> Result<String, CapabilityError> {
    keep_only(USED.iter().chain(for_low_port.then_some(&LOW_PORT)))
}

/// Like [`drop_capabilities`], for the NVML process: it keeps the access to device nodes of other users.
///
/// # Errors
/// As [`drop_capabilities`].
pub fn drop_capabilities_of_nvml_process() -> Result<String, CapabilityError> {
    keep_only(USED.iter().filter(|(one, _)| *one == CapabilitySet::DAC_OVERRIDE))
}

fn keep_only<'a>(
    used: impl Iterator<Item = &'a (CapabilitySet, &'static str)> + Clone,
) -> Result<String, CapabilityError> {
    let wanted = used.clone().fold(CapabilitySet::empty(), |all, (one, _)| all | *one);
    let failed = |step: &'static str| move |source| CapabilityError { step, source };
    let current = capabilities(None).map_err(failed("reading capabilities failed"))?;
    // first: it needs CAP_SETPCAP, which is dropped below
    let unbound = shrink_bounding_set(wanted, current.effective.contains(CapabilitySet::SETPCAP));
    let kept = current.permitted & wanted;
    let no_gain = set_no_new_privs(true).map_err(failed("setting no_new_privs failed"));
    let ambient = clear_ambient_capability_set().map_err(failed("clearing the ambient set failed"));
    let sets = CapabilitySets {
        effective: current.effective & wanted,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    let set = set_capabilities(None, sets).map_err(failed("dropping capabilities failed"));
    unbound.map_err(failed("shrinking the bounding set failed")).and(no_gain).and(ambient).and(set)?;
    let names: Vec<_> = used.filter(|(one, _)| kept.contains(*one)).map(|(_, name)| *name).collect();
    Ok(if names.is_empty() { "none".to_owned() } else { names.join(",") })
}

/// Removes all other capabilities from the bounding set. Without CAP_SETPCAP the set stays as it is; it only limits
/// what an executed file may gain, which is nothing under no_new_privs.
fn shrink_bounding_set(wanted: CapabilitySet, has_setpcap: bool) -> Result<(), Errno> {
    if !has_setpcap {
        return Ok(());
    }
    (0..CAPABILITY_BITS)
        .map(|number| CapabilitySet::from_bits_retain(1 << number))
        // an error means that this kernel does not have the capability
        .filter(|one| !wanted.contains(*one) && capability_is_in_bounding_set(*one) == Ok(true))
        .try_for_each(remove_capability_from_bounding_set)
}
