//! Which of the sources that this host does not have it could need: `doctor` names the others on one line.

use std::path::Path;

use super::{Check, CheckState, amdgpu, control_socket, gpu, pods, reporter, run_reports, runs};
use crate::config::{Config, setting};
use crate::discover::RuntimeKind;
use crate::host::in_pod;

/// The engines beside the kubelet's runtime.
const ENGINES: [&str; 2] = [RuntimeKind::Docker.as_str(), RuntimeKind::Podman.as_str()];
/// PCI vendor ids.
const NVIDIA: &str = "0x10de";
const AMD: &str = "0x1002";
/// The PCI class of displays and of accelerators of graphics, its first byte.
const DISPLAY: &str = "0x03";

/// Marks the checks of sources that this kind of host does not have and does not need: of other runtimes than its own, of GPUs that are not
/// there, of what is off unless a setting switches it on, and of what `serve` creates, where none runs.
pub fn mark_unneeded(checks: &mut [Check], config: &Config) {
    let is_good = |source: &str| {
        checks.iter().any(|check| {
            check.source == source
                && check.state == CheckState::Good
                && !check.found.starts_with(super::NO_MATCH)
        })
    };
    let is_used = |source: &str| {
        let is_there = |check: &Check| check.source == source && check.state == CheckState::Bad;
        is_good(source) || checks.iter().any(is_there)
    };
    let has_runtime = is_used(pods::NAME) || ENGINES.iter().any(|engine| is_used(engine));
    let serves = is_good(control_socket::NAME);
    let has_kubelet = in_pod() || Path::new("/var/lib/kubelet").exists();
    let host = Host { has_runtime, has_kubelet, serves };
    let unneeded: Vec<bool> = checks.iter().map(|check| !host.needs(check, config)).collect();
    for (check, is_unneeded) in checks.iter_mut().zip(unneeded) {
        check.needed = check.state != CheckState::None || !is_unneeded;
    }
}

/// What kind of host this is.
struct Host {
    /// A runtime's socket exists.
    has_runtime: bool,
    has_kubelet: bool,
    /// `memledger serve` runs here.
    serves: bool,
}

impl Host {
    /// Returns whether a source that is not there could be needed here.
    fn needs(&self, check: &Check, config: &Config) -> bool {
        match check.source {
            pods::NAME => self.has_kubelet || !self.has_runtime,
            name if ENGINES.contains(&name) => !self.has_runtime || is_configured(name, config),
            gpu::NAME => config.gpu.expected.is_some_and(|gpus| gpus > 0) || has_display(config, NVIDIA),
            amdgpu::NAME => has_display(config, AMD),
            run_reports::NAME | super::SERVING => false,
            reporter::NAME => self.serves && config.reporter.directory.is_some(),
            runs::NAME => self.serves && config.run.spool.is_some(),
            _ => true,
        }
    }
}

/// Returns true if the sockets of a runtime are not the default ones: a setting names them.
fn is_configured(runtime: &str, config: &Config) -> bool {
    let default = setting(&format!("{runtime}.socket")).map_or(&[][..], |setting| setting.default);
    let sockets = config.endpoints.iter().filter(|endpoint| endpoint.runtime.as_str() == runtime);
    !sockets.map(|endpoint| endpoint.socket.as_os_str()).eq(default.iter().map(std::ffi::OsStr::new))
}

/// Returns true if the host has a display controller of this vendor, also without a driver.
fn has_display(config: &Config, vendor: &str) -> bool {
    let read = |device: &Path, file: &str| std::fs::read_to_string(device.join(file)).unwrap_or_default();
    let devices =
        std::fs::read_dir(config.host_paths.sys.join("bus/pci/devices")).into_iter().flatten().flatten();
    devices
        .map(|device| device.path())
        .any(|device| read(&device, "vendor").trim() == vendor && read(&device, "class").starts_with(DISPLAY))
}

#[cfg(test)]
mod tests {
    use clap::Command;

    use super::*;
    use crate::config::arguments;

    /// Returns the sources that are named on one line, of these: good, missing, and not there.
    fn unneeded(
        flags: &[&str],
        good: &[&'static str],
        bad: &[&'static str],
        none: &[&'static str],
    ) -> Vec<&'static str> {
        let command = arguments(Command::new("memledger").no_binary_name(true));
        let config = Config::load(&command.get_matches_from(flags)).unwrap();
        let good = good.iter().map(|source| Check::good(source, "yes"));
        let bad = bad.iter().map(|source| Check::bad(source, "fails", "much", "mend it"));
        let none = none.iter().map(|source| Check::none(source, "no", "much", "get it"));
        let mut checks: Vec<_> = good.chain(bad).chain(none).collect();
        mark_unneeded(&mut checks, &config);
        checks.iter().filter(|check| !check.needed).map(|check| check.source).collect()
    }

    #[test]
    fn runtimes_beside_the_one_that_is_there_are_not_needed() {
        if in_pod() || Path::new("/var/lib/kubelet").exists() {
            return eprintln!("SKIPPED: this is a host of Kubernetes");
        }
        let all = ["cri", "docker", "podman"];
        assert_eq!(unneeded(&[], &["docker"], &[], &["cri", "podman"]), ["cri", "podman"]);
        assert_eq!(unneeded(&[], &[], &["docker"], &["cri", "podman"]), ["cri", "podman"]);
        assert_eq!(unneeded(&[], &["podman"], &[], &["cri", "docker"]), ["cri", "docker"]);
        assert_eq!(unneeded(&[], &[], &[], &all), [""; 0], "one of them could be needed");
        let flag = ["--podman.socket=/run/other.sock"];
        assert_eq!(unneeded(&flag, &["docker"], &[], &["cri", "podman"]), ["cri"], "a setting names it");
    }

    #[test]
    fn what_serve_creates_is_missing_only_where_it_runs() {
        let created = ["reports", "runs"];
        assert_eq!(unneeded(&[], &[], &[], &["control socket", "reports", "runs"]), created);
        assert_eq!(unneeded(&[], &["control socket"], &[], &created), [""; 0]);
        let off = ["--reporter.directory=", "--run.spool="];
        assert_eq!(unneeded(&off, &["control socket"], &[], &created), created);
    }

    #[test]
    fn gpus_are_needed_where_the_host_has_some() {
        let sys = tempfile::tempdir().unwrap();
        let flag = format!("--path.sysfs={}", sys.path().display());
        let gpus = ["NVML", "AMD GPUs"];
        assert_eq!(unneeded(&[&flag], &[], &[], &gpus), gpus);
        assert_eq!(unneeded(&[&flag, "--gpu.expected=8"], &[], &[], &gpus), ["AMD GPUs"]);
        let device = sys.path().join("bus/pci/devices/0000:01:00.0");
        std::fs::create_dir_all(&device).unwrap();
        std::fs::write(device.join("class"), "0x030200\n").unwrap();
        for (vendor, missing) in [("0x10de\n", "AMD GPUs"), ("0x1002\n", "NVML")] {
            std::fs::write(device.join("vendor"), vendor).unwrap();
            assert_eq!(unneeded(&[&flag], &[], &[], &gpus), [missing], "a driver is missing");
        }
        std::fs::write(device.join("class"), "0x020000\n").unwrap();
        assert_eq!(unneeded(&[&flag], &[], &[], &gpus), gpus, "a network card");
    }

    #[test]
    fn what_exists_or_fails_is_always_shown() {
        let off = ["run reports", "serving"];
        assert_eq!(
            unneeded(&[], &["cri", "serving"], &["podman", "NVML"], &["kernel log", "state path"]),
            [""; 0]
        );
        assert_eq!(unneeded(&[], &[], &[], &off), off);
    }
}
