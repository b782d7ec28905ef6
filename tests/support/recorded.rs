//! A recorded host of `tests/hosts`, unpacked, and memledger on it.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::Memledger;

/// A recorded host, unpacked.
pub struct Host {
    /// Where it lies.
    pub root: tempfile::TempDir,
    /// Containers in the recording, as its cgroups name them.
    pub containers: usize,
    pub processes: usize,
}

impl Host {
    /// The recording of this name in tests/hosts, which has so many containers.
    pub fn unpack(name: &str, containers: usize) -> Self {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/hosts/{name}.jsonl"));
        let text =
            std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let root = tempfile::tempdir().unwrap();
        let mut processes = 0;
        for line in text.lines() {
            let entry: Value = serde_json::from_str(line).expect("one JSON object a line");
            let path = root.path().join(entry["path"].as_str().expect("a path"));
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            processes += usize::from(path.ends_with("statm"));
            if entry["dir"] == Value::Bool(true) {
                std::fs::create_dir_all(&path).unwrap();
            } else if let Some(link) = entry["link"].as_str() {
                std::os::unix::fs::symlink(link, &path).unwrap();
            } else {
                let bytes = entry["text"].as_str().expect("a text").chars();
                let bytes: Vec<u8> = bytes.map(|c| u8::try_from(c).expect("Latin-1")).collect();
                std::fs::write(&path, bytes).unwrap();
            }
        }
        assert!(processes > 0, "{name} has processes");
        Self { root, containers, processes }
    }

    /// A place in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// A recorded host with so many containers more, some 25 series each: the second of its containers again and again,
    /// without processes.
    pub fn crowded(containers: usize) -> Self {
        let host = Self::unpack("v2-docker", 2);
        let slice = host.path("cgroup/system.slice");
        let scopes = std::fs::read_dir(&slice).unwrap().map(|entry| entry.unwrap().path());
        let is_limited = |scope: &Path| {
            std::fs::read_to_string(scope.join("memory.max"))
                .is_ok_and(|max| max.starts_with(char::is_numeric))
        };
        let model =
            scopes.filter(|path| path.is_dir()).find(|path| is_limited(path)).expect("one with a limit");
        for number in 0..containers {
            let copy = slice.join(format!("docker-{number:064x}.scope"));
            std::fs::create_dir(&copy).unwrap();
            for file in std::fs::read_dir(&model).unwrap().map(Result::unwrap) {
                std::fs::copy(file.path(), copy.join(file.file_name())).unwrap();
            }
            std::fs::write(copy.join("cgroup.procs"), "").unwrap();
        }
        host
    }

    /// memledger on this host. syslog(2) would return the log of the machine that runs the test.
    pub fn start(&self, flags: &[String]) -> Memledger {
        let none = ["--docker.socket=", "--podman.socket=", "--oom.kernel-log=off"];
        let mut all = none.map(str::to_owned).to_vec();
        for (flag, folder) in [("procfs", "proc"), ("sysfs", "sys"), ("cgroupfs", "cgroup"), ("devfs", "dev")]
        {
            all.push(format!("--path.{flag}={}", self.path(folder).display()));
        }
        all.extend_from_slice(flags);
        Memledger::start(&all.iter().map(String::as_str).collect::<Vec<_>>())
    }
}
