//! A real Alertmanager with the shipped configuration.

use std::process::{Child, Command, Stdio};

use crate::support::eventually;

/// Debian's program reads its templates from /usr/share, where its package, which is only unpacked, would put them: laid over
/// /usr/share for this process alone. `$0` is its path.
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
        // it cannot tell which port it got, so a free one is looked for; if another takes it, it ends and we fail
        let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port");
        let log = std::fs::File::create(folder.path().join("log")).expect("a log");
        let child = Command::new("unshare")
            .current_dir(folder.path())
            .args(["-m", "--propagation", "private", "/bin/sh", "-c", WITH_TEMPLATES, binary])
            .args(["--storage.path=data", "--cluster.listen-address="])
            .arg(format!("--config.file={config}"))
            .arg(format!("--web.listen-address={port}"))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("Alertmanager starts");
        let mut this = Self { child, address: port.to_string(), folder };
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

    /// The receivers that an alert of this name went to.
    pub fn receivers(&self, alert: &str) -> Result<Vec<String>, String> {
        let text = self.get("/api/v2/alerts")?;
        let alerts: serde_json::Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        let alerts = alerts.as_array().ok_or_else(|| text.clone())?;
        let of_name = alerts.iter().filter(|each| each["labels"]["alertname"] == alert);
        let receivers = of_name.flat_map(|each| each["receivers"].as_array().into_iter().flatten());
        Ok(receivers.filter_map(|receiver| receiver["name"].as_str().map(str::to_owned)).collect())
    }
}

impl Drop for Alertmanager {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
