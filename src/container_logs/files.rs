//! Logs of pods, by the files that the kubelet's runtime writes: `TIME STREAM TAG TEXT`, where the tag is P in the middle of a line, else F.
//!
//! `DIRECTORY/NAMESPACE_POD_UID/CONTAINER/N.log`, where N is the container's number of restarts. The kubelet renames a file that has
//! become large, and the runtime begins another one.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncSeekExt};

use super::budget::LogBudget;
use super::lines::{LineBuffer, MAX_LINE};
use super::{LogEnd, LogFollower, ReadPosition};
use crate::clock::Timestamp;
use crate::discover::Pod;

/// Pause between two reads at the end of a file.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Bytes of one read.
const CHUNK: usize = 64 << 10;
/// Bytes before the text of a line.
const MAX_FIELDS: usize = 128;

/// An open log.
pub(super) struct LogFile {
    pub(super) file: File,
    inode: u64,
    raw: LineBuffer,
    out: LineBuffer,
    err: LineBuffer,
    chunk: Vec<u8>,
}

impl LogFollower {
    /// Follows the file until the container ends.
    pub(super) async fn read_file(&self, position: &mut ReadPosition) -> LogEnd {
        let Some(pod) = &self.container.spec.pod else {
            return LogEnd::Never("its pod is unknown".to_owned());
        };
        let path = path(&self.sources.pods, pod, &self.container.identity.name);
        let failed = |error: std::io::Error| LogEnd::Failed(format!("{}: {error}", path.display()));
        let mut log = match LogFile::open(path.clone()).await {
            Ok(log) => log,
            Err(error) => return failed(error),
        };
        if position.at.is_none() {
            *position = ReadPosition::new(Some(Timestamp::now().unix_seconds()));
            if let Err(error) = log.file.seek(std::io::SeekFrom::End(0)).await {
                return failed(error);
            }
        }
        let (mut skip, mut budget) = (position.skip(), LogBudget::new(&self.logs.budget));
        loop {
            let is_last = !self.is_running(); // what is written until now is all
            let newest = tokio::fs::symlink_metadata(&path).await.map_or(log.inode, |file| file.ino());
            loop {
                let mut last = Timestamp::now().unix_seconds();
                let read = log.read(|at, line| {
                    last = at;
                    if skip.is_new(at) {
                        position.advance(at);
                        self.add(at, line);
                    }
                });
                match read.await {
                    Err(error) => return failed(error),
                    Ok(0) => break,
                    Ok(bytes) if !budget.take(bytes, last).await => {
                        *position = ReadPosition::new(None);
                        return LogEnd::TooFast;
                    }
                    Ok(_) => {}
                }
            }
            if newest != log.inode {
                match LogFile::open(path.clone()).await {
                    Ok(next) => log = next,
                    Err(error) => return failed(error),
                }
            } else if is_last {
                return LogEnd::Complete;
            } else {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        }
    }
}

impl LogFile {
    /// Opens a plain file: a pod that may write to the node's logs could put anything there.
    pub(super) async fn open(path: PathBuf) -> std::io::Result<Self> {
        let opened = tokio::task::spawn_blocking(move || {
            let flags =
                OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
            let file = std::fs::File::from(rustix::fs::open(path, flags, Mode::empty())?);
            let metadata = file.metadata()?;
            let is_plain = metadata.is_file().then_some((file, metadata.ino()));
            is_plain.ok_or_else(|| std::io::Error::other("it is not a plain file"))
        });
        let (file, inode) = opened.await.map_err(std::io::Error::other)??;
        let [out, err] = std::array::from_fn(|_| LineBuffer::default());
        let raw = LineBuffer::of_records(MAX_LINE + MAX_FIELDS);
        Ok(Self { file: File::from_std(file), inode, raw, out, err, chunk: vec![0; CHUNK] })
    }

    /// Reads a part, and calls `each` with time and text of every line. Returns the number of bytes, 0 at the end.
    pub(super) async fn read(&mut self, mut each: impl FnMut(f64, &str) + Send) -> std::io::Result<usize> {
        let length = self.file.read(&mut self.chunk).await?;
        let (out, err) = (&mut self.out, &mut self.err);
        self.raw.add(&self.chunk[..length], |line| {
            let Some((at, stream, is_whole, text)) = fields(line) else { return };
            let buffer = if stream == "stderr" { &mut *err } else { &mut *out };
            buffer.add(text.as_bytes(), |line| each(at, line));
            if is_whole {
                buffer.end(|line| each(at, line));
            }
        });
        Ok(length)
    }
}

/// Returns the parts of a line: Unix time, stream, whether the text ends a line, and the text.
fn fields(line: &str) -> Option<(f64, &str, bool, &str)> {
    let mut parts = line.splitn(4, ' ');
    let time: jiff::Timestamp = parts.next()?.parse().ok()?;
    let (stream, tags, text) = (parts.next()?, parts.next()?, parts.next().unwrap_or(""));
    Some((time.as_nanosecond() as f64 / 1e9, stream, !tags.split(':').any(|tag| tag == "P"), text))
}

/// Returns the file of a container. Of two containers with one name one is shown with an addition after `@`.
pub(super) fn path(pods: &Path, pod: &Pod, container: &str) -> PathBuf {
    let folder = format!("{}_{}_{}", pod.namespace, pod.name, pod.uid);
    let name = container.split('@').next().unwrap_or_default();
    pods.join(folder).join(name).join(format!("{}.log", pod.attempt))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_a_line() {
        let (at, stream, is_whole, text) =
            fields("2026-11-23T10:00:00.5Z stderr F CUDA out of memory").unwrap();
        assert_eq!((at, stream, is_whole, text), (1_795_428_000.5, "stderr", true, "CUDA out of memory"));
        assert!(!fields("2026-11-23T10:00:00Z stdout P x").unwrap().2);
        assert!(!fields("2026-11-23T10:00:00Z stdout P:a x").unwrap().2);
        assert_eq!(fields("2026-11-23T10:00:00Z stdout F").map(|found| found.3), Some(""));
        assert_eq!(fields("no time stdout F x"), None);
    }

    fn on_runtime<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work)
    }

    #[test]
    fn parts_of_lines_are_joined_for_each_stream() {
        on_runtime(async {
            let folder = tempfile::tempdir().unwrap();
            let (time, path) = ("2026-11-23T10:00:00Z", folder.path().join("0.log"));
            let long = "x".repeat(MAX_LINE);
            let text = format!(
                "{time} stderr P CUDA out of \n{time} stdout F step 1\nhalf a line\n{time} stderr F memory\n{time} stdout P {long}\n\
                 {time} stdout F y\n{time} stdout F"
            );
            std::fs::write(&path, text).unwrap();
            let mut log = LogFile::open(path).await.unwrap();
            let mut lines = Vec::new();
            while log.read(|_, line| lines.push(line.to_owned())).await.unwrap() > 0 {}
            assert_eq!(lines, ["step 1", "CUDA out of memory", &long, "y"]);
        });
    }

    #[test]
    fn only_plain_files_are_opened() {
        on_runtime(async {
            let folder = tempfile::tempdir().unwrap();
            let (pipe, link) = (folder.path().join("pipe"), folder.path().join("link"));
            rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
            std::os::unix::fs::symlink("/etc/passwd", &link).unwrap();
            for path in [pipe, link, folder.path().to_owned()] {
                assert!(LogFile::open(path.clone()).await.is_err(), "{}", path.display());
            }
        });
    }

    #[test]
    fn path_is_that_of_the_kubelet() {
        let pod = Pod {
            namespace: "team".into(),
            name: "train-0".into(),
            uid: "u".into(),
            attempt: 3,
            ..Pod::default()
        };
        let found = path(Path::new("/var/log/pods"), &pod, "main@cri");
        assert_eq!(found, Path::new("/var/log/pods/team_train-0_u/main/3.log"));
    }
}
