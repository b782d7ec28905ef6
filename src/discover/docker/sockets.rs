//! The sockets of one runtime: any number of them, also by a pattern, as for the engines of users (`/run/user/*/docker.sock`).

use std::collections::{HashSet, VecDeque};
use std::os::unix::fs::FileTypeExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::{DockerResumeState, RuntimeState, follow};
use crate::config::{Filter, RuntimeEndpoint};
use crate::discover::{ConnectionState, ContainerId};

/// Interval at which patterns are matched again.
const MATCH_INTERVAL: Duration = Duration::from_secs(5);
const MAX_MATCHES: usize = crate::host::bounds::RUNTIME_SOCKETS.max;

/// Resume states of sockets that are gone, oldest first. The daemon of a user removes its socket when it is restarted.
#[derive(Debug, Default)]
struct ResumeStates(VecDeque<(PathBuf, DockerResumeState)>);

impl ResumeStates {
    fn insert(&mut self, socket: PathBuf, resume: DockerResumeState) {
        if self.0.len() >= MAX_MATCHES {
            self.0.pop_front();
        }
        self.0.push_back((socket, resume));
    }

    fn remove(&mut self, socket: &Path) -> Option<DockerResumeState> {
        let position = self.0.iter().position(|(path, _)| path == socket)?;
        self.0.remove(position).map(|(_, resume)| resume)
    }
}

/// Follows all sockets of one runtime for ever. `open`: see [`DockerResumeState::new`]. `since`: returns the Unix time of the last event
/// of a socket that the ledger has.
pub async fn follow_all(
    endpoints: Vec<RuntimeEndpoint>,
    filter: Filter,
    source: Arc<RuntimeState>,
    since: impl Fn(&Path) -> Option<f64>,
    open: HashSet<ContainerId>,
) {
    let has_siblings = endpoints.len() > 1 || endpoints.iter().any(|endpoint| is_pattern(&endpoint.socket));
    let mut first = DockerResumeState { has_siblings, ..DockerResumeState::new(None, open) };
    let mut is_first = true;
    for endpoint in &endpoints {
        let guess =
            if is_pattern(&endpoint.socket) { ConnectionState::NoSocket } else { ConnectionState::Starting };
        source.set_connection_of(&endpoint.socket, guess);
    }
    let mut followed = HashSet::new();
    let mut resumable = ResumeStates::default();
    let mut tasks = FuturesUnordered::new();
    let mut has_warned = false;
    loop {
        for endpoint in &endpoints {
            let ends_with_socket = is_pattern(&endpoint.socket);
            for socket in matches_in_background(endpoint.socket.clone()).await {
                if followed.contains(&socket) {
                    continue;
                }
                if ends_with_socket && followed.len() >= MAX_MATCHES {
                    warn_once(&mut has_warned, &socket);
                    continue;
                }
                followed.insert(socket.clone());
                let endpoint = RuntimeEndpoint { runtime: endpoint.runtime, socket: socket.clone() };
                let resume = resumable.remove(&socket).unwrap_or_else(|| {
                    let since = since(&socket).filter(|_| is_first);
                    DockerResumeState { ends_with_socket, since, ..first.clone() }
                });
                let (filter, source) = (filter.clone(), Arc::clone(&source));
                tasks.push(async move {
                    let resume = follow(endpoint, filter, source, resume).await;
                    (socket, resume)
                });
            }
        }
        // the containers of the ledger are of engines that ran when memledger started
        (is_first, first) = (false, DockerResumeState { has_siblings, ..DockerResumeState::default() });
        let mut pause = std::pin::pin!(tokio::time::sleep(MATCH_INTERVAL));
        loop {
            tokio::select! {
                Some((socket, resume)) = tasks.next() => {
                    followed.remove(&socket);
                    resumable.insert(socket, resume);
                }
                () = &mut pause => break,
            }
        }
    }
}

fn warn_once(has_warned: &mut bool, socket: &Path) {
    if !std::mem::replace(has_warned, true) {
        tracing::warn!(socket = %socket.display(), "more than {MAX_MATCHES} sockets match; ignoring the others");
    }
}

/// Returns [`matches`], read on a blocking thread: a directory of the pattern may be on a slow file system.
async fn matches_in_background(pattern: PathBuf) -> Vec<PathBuf> {
    if !is_pattern(&pattern) {
        return vec![pattern];
    }
    tokio::task::spawn_blocking(move || matches(&pattern)).await.unwrap_or_default()
}

fn is_pattern(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().contains(&b'*')
}

/// Returns the sockets that a path with `*` in its components matches, without links; and a path without `*` itself.
pub fn matches(pattern: &Path) -> Vec<PathBuf> {
    if !is_pattern(pattern) {
        return vec![pattern.to_path_buf()];
    }
    let mut paths = vec![PathBuf::from("/")];
    for part in pattern.components().filter(|part| matches!(part, Component::Normal(_))) {
        let part = part.as_os_str();
        paths = match part.to_str().and_then(|part| part.split_once('*')) {
            Some((start, end)) => paths.iter().flat_map(|dir| entries(dir, start, end)).collect(),
            None => paths.into_iter().map(|path| path.join(part)).collect(),
        };
    }
    let is_socket = |path: &PathBuf| path.symlink_metadata().is_ok_and(|meta| meta.file_type().is_socket());
    paths.retain(is_socket);
    paths.sort();
    paths
}

/// Returns the entries of a directory whose names begin and end so.
fn entries(dir: &Path, start: &str, end: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let is_match = |name: &String| {
        name.len() >= start.len() + end.len() && name.starts_with(start) && name.ends_with(end)
    };
    names.filter(is_match).map(|name| dir.join(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Timestamp;
    use crate::discover::RuntimeKind;
    use std::os::unix::net::UnixListener;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

    #[test]
    fn keeps_resume_states_of_the_newest_sockets() {
        let mut states = ResumeStates::default();
        let path = |number: usize| PathBuf::from(format!("/run/user/{number}/docker.sock"));
        for number in 0..=MAX_MATCHES {
            states.insert(path(number), DockerResumeState::new(Some(number as f64), HashSet::new()));
        }
        assert!(states.remove(&path(0)).is_none(), "the oldest was dropped");
        assert_eq!(states.remove(&path(7)).and_then(|resume| resume.since), Some(7.0));
        assert!(states.remove(&path(7)).is_none());
    }

    /// Serves a daemon without containers, which has one event. Sends the target of each request for events.
    async fn serve(listener: tokio::net::UnixListener, event: String, targets: UnboundedSender<String>) {
        let mut streams = Vec::new(); // of events: they stay open
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = vec![0; 4096];
            let length = stream.read(&mut head).await.unwrap();
            let target = String::from_utf8_lossy(&head[..length]).split(' ').nth(1).unwrap_or("").to_owned();
            let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n";
            let has_events = target.contains("/events");
            let body = if has_events { &event } else { "[]" };
            stream.write_all(format!("{head}{body}\n").as_bytes()).await.unwrap();
            if has_events {
                streams.push(stream);
                targets.send(target).unwrap();
            }
        }
    }

    #[tokio::test]
    async fn socket_that_is_created_again_resumes_after_its_last_event() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("1000.sock");
        let last = Timestamp::now().unix_whole_seconds() - 1000;
        let event = format!(
            r#"{{"Type":"container","Action":"oom","Actor":{{"ID":"a"}},"time":{last},"timeNano":{last}000000000}}"#
        );
        let source = RuntimeState::new(RuntimeKind::Docker, Arc::default());
        let endpoint = RuntimeEndpoint { runtime: RuntimeKind::Docker, socket: folder.path().join("*.sock") };
        let (sender, mut targets) = unbounded_channel();
        let daemon = |path: &Path| {
            let listener = tokio::net::UnixListener::bind(path).unwrap();
            tokio::spawn(serve(listener, event.clone(), sender.clone()))
        };
        let first = daemon(&socket);
        let shared = Arc::clone(&source);
        let follow =
            tokio::spawn(follow_all(vec![endpoint], Filter::default(), shared, |_| None, HashSet::new()));
        assert!(!targets.recv().await.unwrap().contains(&format!("since={last}")));
        while source.drain_events().is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        std::fs::remove_file(&socket).unwrap();
        first.abort();
        while source.lock().sockets.contains_key(&socket) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let second = daemon(&socket);
        let target = targets.recv().await.unwrap();
        assert!(target.contains(&format!("since={last}")), "{target}");
        second.abort();
        follow.abort();
    }

    #[test]
    fn pattern_matches_sockets_and_no_links() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for user in ["1000", "1001", "1002", "x"] {
            std::fs::create_dir_all(path(user).join("podman")).unwrap();
        }
        let listeners = ["1000/podman/p.sock", "1001/podman/p.sock", "x/podman/p.sock"].map(path);
        let _open: Vec<_> = listeners.iter().map(|path| UnixListener::bind(path).unwrap()).collect();
        std::os::unix::fs::symlink(&listeners[0], path("1002/podman/p.sock")).unwrap();
        assert_eq!(matches(&path("1*/podman/p.sock")), listeners[..2]);
        assert_eq!(matches(&path("*/podman/*.sock")), listeners);
        assert_eq!(matches(&path("*/docker.sock")), [] as [PathBuf; 0]);
        assert_eq!(matches(&path("missing.sock")), [path("missing.sock")], "one that was set is waited for");
    }
}
