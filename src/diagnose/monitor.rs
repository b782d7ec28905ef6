//! What the journal has of memory monitors, which kill before the kernel does.

use serde::Serialize;

/// What a monitor did.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "finding", rename_all = "snake_case")]
pub enum MonitorFinding {
    /// systemd-oomd killed the container's cgroup.
    OomdKilledCgroup,
    /// earlyoom killed a process at that time, whose container is not known.
    EarlyoomKilledAProcess,
}

/// What to change after a kill by a monitor.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "remedy", rename_all = "snake_case")]
pub enum MonitorRemedy {
    /// What systemd-oomd watches, and when it acts.
    OomdSettings,
    /// Use less memory on the host, add swap, or limit the container.
    LessMemory,
}
