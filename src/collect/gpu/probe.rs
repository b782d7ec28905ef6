//! One look at the driver, for `doctor`.

use std::sync::Arc;

use super::control::Control;
use super::health::Totals;
use super::nvml::library::Library;
use super::nvml::{Session, describe};
use super::owners::Owners;
use super::reading::{Pids, Reading};
use crate::config::GpuSettings;
use crate::host::Roots;

/// What one look finds.
#[derive(Clone, Debug)]
pub struct Probe {
    /// Version of the driver.
    pub driver_version: Option<Arc<str>>,
    /// GPUs that the driver counts.
    pub counted: usize,
    /// GPUs that answer.
    pub visible: usize,
    /// MIG instances.
    pub instances: usize,
    /// Processes that the driver names.
    pub named: usize,
    /// Whether their pids may be believed.
    pub pids: Pids,
    /// GPUs whose accounting mode is off and could be on.
    pub without_accounting: usize,
}

/// Opens the library, reads all devices once, and closes it. It may hang, as the driver may.
///
/// # Errors
/// Why the library cannot be loaded or initialised, in words.
pub fn probe(settings: &GpuSettings, roots: &Roots, cgroup_v1: bool) -> Result<Probe, String> {
    let words = |error| describe(&error);
    let nvml = Library::find(settings.library.as_deref()).open(&Control::default()).map_err(words)?;
    let mut session = Session::new(&nvml, settings.interval + settings.deadline);
    let mut owners = Owners::new(roots.clone(), cgroup_v1);
    let reading = session.read(roots, &mut owners, &mut Totals::new()).map_err(words)?.reading;
    Ok(Probe::of(&reading, &session))
}

impl Probe {
    /// What one reading of a session says.
    pub(super) fn of(reading: &Reading, session: &Session<'_>) -> Self {
        let instances = reading.devices.iter().filter(|device| device.instance_of.is_some()).count();
        Self {
            driver_version: reading.driver_version.clone(),
            counted: reading.counted,
            visible: reading.devices.len() - instances,
            instances,
            named: reading.devices.iter().flat_map(|device| &device.processes).flatten().count(),
            pids: reading.pids,
            without_accounting: session.without_accounting(),
        }
    }
}
