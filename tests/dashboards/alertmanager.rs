//! A real Alertmanager with the shipped configuration.

use std::process::{Child, Command, Stdio};

use serde_json::json;

use crate::prometheus::provided;
use crate::support::{eventually, free_port};

/// Debian's program reads its templates from /usr/share, but its package is only unpacked: this mounts them over /usr/share for
/// this process only. `$0` is its path.
const WITH_TEMPLATES: &str =
    r#"mount -t overlay -o lowerdir="${0%/bin/*}/share":/usr/share none /usr/share && exec "$0" "$@""#;

/// Killed when dropped.
pub struct Alertmanager {
    child: Child,
    pub address: String,
    folder: tempfile::TempDir,
}

impl Alertmanager {
    pub fn start(binary: &str, config: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let address = format!("127.0.0.1:{}", free_port());
        let log = std::fs::File::create(folder.path().join("log")).expect("a log");
        let child = Command::new("unshare")
            .current_dir(folder.path())
            .args(["-m", "--propagation", "private", "/bin/sh", "-c", WITH_TEMPLATES, binary])
            .args(["--storage.path=data", "--cluster.listen-address="])
            .arg(format!("--config.file={config}"))
            .arg(format!("--web.listen-address={address}"))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("Alertmanager starts");
        let mut this = Self { child, address, folder };
        eventually("Alertmanager is ready", || {
            let ended = this.child.try_wait().expect("wait");
            let log = std::fs::read_to_string(this.folder.path().join("log")).unwrap_or_default();
            assert!(ended.is_none(), "Alertmanager ended: {log}");
            this.get("/-/ready").map(drop)
        });
        this
    }

    fn get(&self, path: &str) -> Result<String, String> {
        let url = format!("http://{}{path}", self.address);
        let mut response = ureq::get(url).call().map_err(|error| error.to_string())?;
        response.body_mut().read_to_string().map_err(|error| error.to_string())
    }

    /// Posts alerts, each as its labels.
    fn post(&self, alerts: &[serde_json::Value]) {
        let alerts: Vec<_> = alerts.iter().map(|labels| serde_json::json!({ "labels": labels })).collect();
        let body = serde_json::Value::from(alerts).to_string();
        let request = ureq::post(format!("http://{}/api/v2/alerts", self.address));
        request.header("Content-Type", "application/json").send(body).expect("alerts are accepted");
    }

    /// Returns the inhibited alerts, each as severity, container and GPU.
    fn inhibited(&self) -> Result<Vec<String>, String> {
        let text = self.get("/api/v2/alerts?active=false")?;
        let alerts: serde_json::Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        let labels = |alert: &serde_json::Value| {
            let names = ["severity", "container_name", "gpu_uuid"];
            names.iter().filter_map(|name| alert["labels"][name].as_str()).collect::<Vec<_>>().join(" ")
        };
        let mut found: Vec<_> = alerts.as_array().into_iter().flatten().map(labels).collect();
        found.sort();
        Ok(found)
    }
}

impl Drop for Alertmanager {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn severe_alert_inhibits_milder_ones_of_the_same_subject_only() {
    let Some(binary) = provided("MEMLEDGER_TEST_ALERTMANAGER") else { return };
    let alertmanager =
        Alertmanager::start(&binary, &super::in_repository("deploy/prometheus/alertmanager.yml"));
    let full = |severity: &str, container: &str| {
        json!({"alertname": "MemledgerContainerMemoryHigh", "job": "memledger", "instance": "h",
               "severity": severity, "container_name": container})
    };
    let ecc = |severity: &str, gpu: &str| {
        json!({"alertname": "MemledgerGpuEcc", "job": "memledger", "instance": "h", "severity": severity,
               "gpu_uuid": gpu})
    };
    alertmanager.post(&[
        full("critical", "a"),
        full("warning", "a"),
        full("info", "a"),
        full("warning", "b"),
        ecc("critical", "GPU-1"),
        ecc("warning", "GPU-1"),
        ecc("warning", "GPU-2"),
    ]);
    eventually("inhibited alerts", || match &alertmanager.inhibited()?[..] {
        [info, of_gpu, warning] if [info, of_gpu, warning] == ["info a", "warning GPU-1", "warning a"] => {
            Ok(())
        }
        other => Err(format!("{other:?}")),
    });
}
