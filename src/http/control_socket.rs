//! The control socket: the API and the admin routes for verbs on this host, as HTTP on a Unix socket.
//!
//! The permissions of the socket decide who may use it. Beyond that a process of a container is refused whatever its user
//! is, because containers run as root and may mount the socket by mistake. Only memledger's own container is admitted. A run of
//! `memledger run` is no container here: it separates its processes from the host in nothing.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::future::Future;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use tokio::net::unix::SocketAddr;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::CurrentRoutes;
use super::access_control::{AccessControl, Peer};
use super::server::{
    ConnectionHandle, Rejection, accept_until, finish, reject_at_once, serve_http, serve_within,
};
use super::timeouts::{ConnectionClock, TimedStream};
use crate::clock::Timestamp;
use crate::config::LocalSettings;
use crate::host::groups::group_id;
use crate::host::{Dir, unix_peer};
use crate::parse::container_id;
use crate::parse::lines;
use crate::stats::http_stats::RejectReason;

/// Maximum open connections of admitted processes, and of refused ones that are served; further ones get their response at once.
const MAX_CONNECTIONS: usize = 16;
const MAX_REFUSED: usize = 4;
/// How often the same refusal is logged at most; each is counted.
const LOG_INTERVAL: Duration = Duration::from_secs(3600);

/// The listening socket. Its file is removed when this is dropped.
#[derive(Debug)]
pub struct ControlSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of its file.
    file: (u64, u64),
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        if std::fs::metadata(&self.path).is_ok_and(|file| (file.dev(), file.ino()) == self.file) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Creates the socket, and its directory if that is missing. A stale socket, on which no process listens, is replaced.
///
/// # Errors
/// What prevents it, with the path: another memledger that listens, another file, or the system's error.
pub fn bind(path: &Path, settings: &LocalSettings) -> Result<ControlSocket, String> {
    let failed = |what: &str, error: std::io::Error| format!("cannot {what} {}: {error}", path.display());
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let is_new = folder.is_some_and(|folder| !folder.exists());
    if let (Some(folder), true) = (folder, is_new) {
        let created = std::fs::DirBuilder::new().recursive(true).mode(0o750).create(folder);
        created.map_err(|error| failed("create the directory of", error))?;
    }
    match std::fs::symlink_metadata(path) {
        Err(_) => {} // bind reports what is wrong
        Ok(file) if !file.file_type().is_socket() => {
            return Err(format!("{} exists and is not a socket", path.display()));
        }
        Ok(_) if is_live(path).map_err(|error| failed("connect to", error))? => {
            return Err(format!("another memledger listens on {}", path.display()));
        }
        Ok(_) => std::fs::remove_file(path).map_err(|error| failed("replace", error))?,
    }
    let listener = UnixListener::bind(path).map_err(|error| failed("listen on", error))?;
    // made for the socket: by memledger, now or earlier, or by systemd; not one that all users share, such as /run
    let is_private = |folder: &&Path| {
        std::fs::metadata(folder).is_ok_and(|folder| {
            folder.uid() == rustix::process::geteuid().as_raw() && folder.mode() & 0o007 == 0
        })
    };
    let permit = || {
        std::fs::set_permissions(path, Permissions::from_mode(0o660))?;
        // without its group the socket serves its owner
        let Some(group) = settings.group.as_deref().and_then(known_group) else { return Ok(()) };
        let group = Some(group);
        chown(path, None, group)?;
        folder.filter(is_private).map_or(Ok(()), |folder| chown(folder, None, group))
    };
    permit().map_err(|error| failed("set group and permissions of", error))?;
    let file = std::fs::metadata(path).map_err(|error| failed("read", error))?;
    Ok(ControlSocket { listener, path: path.to_owned(), file: (file.dev(), file.ino()) })
}

/// Returns the number of a group; `None`, with a warning, if it is unknown.
fn known_group(group: &str) -> Option<u32> {
    let warn = |reason: String| {
        tracing::warn!(group, reason, "--local.group: only memledger's own user may use the control socket")
    };
    match group_id(group) {
        Ok(Some(number)) => Some(number),
        Ok(None) => {
            warn("there is no such group".to_owned());
            None
        }
        Err(error) => {
            warn(error.to_string());
            None
        }
    }
}

/// Returns whether a process listens on the socket. Does not wait for it.
fn is_live(path: &Path) -> std::io::Result<bool> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connected = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .and_then(|socket| connect(&socket, &SocketAddrUnix::new(path)?));
    match connected {
        Ok(()) | Err(Errno::AGAIN) => Ok(true), // its queue may be full
        // nothing listens; or it belongs to another user, who may have ended: then its directory decides whether it can be replaced
        Err(Errno::CONNREFUSED | Errno::NOENT | Errno::ACCESS) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Serves until `stop` resolves.
pub async fn serve_control_socket(
    socket: ControlSocket,
    routes: CurrentRoutes,
    access_control: Arc<AccessControl>,
    stop: impl Future<Output = ()> + Send + 'static,
) {
    let (admitted, refused) = (Semaphore::new(MAX_CONNECTIONS), Semaphore::new(MAX_REFUSED));
    let (admitted, refused) = (Arc::new(admitted), Arc::new(refused));
    let mut last_logged = BTreeMap::new();
    let start = |(stream, _): (UnixStream, SocketAddr), connections: &mut JoinSet<()>| {
        let admission = check_peer(&stream)
            .map_err(|text| (RejectReason::ControlSocket, Rejection { status: StatusCode::FORBIDDEN, text }))
            .and_then(|()| Arc::clone(&admitted).try_acquire_owned().map_err(|_| OVERFLOW));
        let (permit, rejection) = match admission {
            Ok(permit) => (permit, None),
            Err((reject, rejection)) => {
                access_control.count_rejected(reject);
                log_hourly(&mut last_logged, rejection.text);
                match Arc::clone(&refused).try_acquire_owned() {
                    Ok(permit) => (permit, Some(rejection)),
                    Err(_) => return reject_at_once(&stream, Some(rejection)),
                }
            }
        };
        let (clock, closing) = (ConnectionClock::new(), access_control.closing());
        let handle = ConnectionHandle {
            peer: Peer::control_socket(),
            clock: Arc::clone(&clock),
            routes: routes.clone(),
            access_control: Arc::clone(&access_control),
            generation: 0,
            rejection,
        };
        connections.spawn(async move {
            serve_within(rejection, serve_http(TimedStream::new(stream, &clock), handle, closing)).await;
            drop(permit);
        });
    };
    let connections = accept_until(stop, || socket.listener.accept(), start).await;
    drop(socket);
    finish(connections, &access_control).await;
}

/// The rejection of a connection above [`MAX_CONNECTIONS`].
const OVERFLOW: (RejectReason, Rejection) = (
    RejectReason::Connections,
    Rejection {
        status: StatusCode::SERVICE_UNAVAILABLE,
        text: "too many connections on the control socket; try again",
    },
);

/// Logs a refusal if the same one was not logged within [`LOG_INTERVAL`].
fn log_hourly(last: &mut BTreeMap<&'static str, Timestamp>, reason: &'static str) {
    let now = Timestamp::now();
    if last.get(reason).is_none_or(|last| now.since(*last) >= LOG_INTERVAL) {
        last.insert(reason, now);
        tracing::warn!(reason, "refused a client of the control socket");
    }
}

/// Checks the process that connected. It is the process itself and not another one with its pid, as far as it still runs
/// after the check.
fn check_peer(stream: &UnixStream) -> Result<(), &'static str> {
    const ENDED: &str = "forbidden: the process that connected has ended";
    let Some((pid, pidfd)) = unix_peer::connected_process(stream).map_err(|_| ENDED)? else {
        return Err(
            "forbidden: the process is not visible to memledger; give memledger the host's pid namespace (--pid=host, \
                    pid: host, hostPID: true), or run the verb in memledger's own container",
        );
    };
    let read = |process: &str, name| {
        let file = Dir::open(&Path::new("/proc").join(process))?.file(name)?;
        file.read_once(&mut Vec::new()).map(<[u8]>::to_vec)
    };
    let of_peer = |name| read(&pid.as_raw_nonzero().to_string(), name).map_err(|_| ENDED);
    let (cgroups, status) = (of_peer("cgroup")?, of_peer("status")?);
    let own = read("self", "cgroup").map_err(|_| "forbidden: memledger's own cgroup is unreadable")?;
    if unix_peer::has_ended(&pidfd) {
        return Err(ENDED);
    }
    if is_foreign_container(&own, &cgroups) || is_in_nested_pid_namespace(&status) {
        return Err(
            "forbidden: the process belongs to a container; the control socket is for the host and memledger's own container",
        );
    }
    Ok(())
}

/// Returns whether a process is in a container that memledger is not in, by the two files `/proc/PID/cgroup`.
fn is_foreign_container(own: &[u8], peer: &[u8]) -> bool {
    let ids = |cgroups: &[u8]| {
        let paths = lines(cgroups).filter_map(|line| line.splitn(3, |byte| *byte == b':').nth(2));
        let paths = paths.map(|path| String::from_utf8_lossy(path).into_owned());
        let ids = paths.map(|path| {
            let containers = container_id::in_path(&path).filter(|found| !found.runtime.is_run());
            containers.map(|found| found.id.to_owned()).collect()
        });
        ids.max_by_key(Vec::len).unwrap_or_default()
    };
    let (own, peer): (Vec<String>, Vec<String>) = (ids(own), ids(peer));
    !own.starts_with(&peer)
}

/// Returns whether a process is in a pid namespace below that of memledger, as in a container of any kind.
fn is_in_nested_pid_namespace(status: &[u8]) -> bool {
    let pids = lines(status).find_map(|line| line.strip_prefix(b"NSpid:"));
    pids.is_some_and(|pids| pids.split(u8::is_ascii_whitespace).filter(|pid| !pid.is_empty()).count() > 1)
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::io::{Read, Write};

    use super::*;
    use crate::http::test_server::config_of;

    fn settings(group: Option<&str>) -> LocalSettings {
        LocalSettings { socket: None, group: group.map(str::to_owned) }
    }

    fn on_runtime<T>(work: impl FnOnce() -> T) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        let _entered = runtime.enter();
        work()
    }

    #[test]
    fn replaces_a_stale_socket_and_no_other_file() {
        on_runtime(|| {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("new/control.sock");
            let first = bind(&path, &settings(None)).unwrap();
            let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
            assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o660, 0o750));
            let error = bind(&path, &settings(None)).unwrap_err();
            assert!(error.contains("another memledger listens on"), "{error}");
            drop(first);
            assert!(!path.exists(), "removed at the end");
            drop(std::os::unix::net::UnixListener::bind(&path).unwrap()); // its file stays
            let second = bind(&path, &settings(None)).unwrap();
            std::fs::remove_file(&path).unwrap();
            std::fs::write(&path, "").unwrap();
            drop(second);
            assert!(path.exists(), "another file of that name is not removed");
            assert!(bind(&path, &settings(None)).unwrap_err().contains("is not a socket"));
        });
    }

    #[test]
    fn group_may_enter_a_private_folder_that_was_there_and_no_shared_one() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("SKIPPED: only root gives a file to another group");
        }
        on_runtime(|| {
            let folder = tempfile::tempdir().unwrap();
            let (private, shared) = (folder.path().join("private"), folder.path().join("shared"));
            for (path, mode, group) in [(&private, 0o750, 12), (&shared, 0o755, 0)] {
                std::fs::create_dir(path).unwrap();
                std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
                let socket = bind(&path.join("control.sock"), &settings(Some("12"))).unwrap();
                assert_eq!(std::fs::metadata(path).unwrap().gid(), group, "{}", path.display());
                assert_eq!(std::fs::metadata(&socket.path).unwrap().gid(), 12);
            }
        });
    }

    /// Clients that have written a whole request before the first one is accepted: more than are served to be refused.
    #[test]
    fn client_above_the_limit_gets_its_whole_response() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let access_control = || AccessControl::new(&config_of(&[]), Arc::default()).unwrap();
        for round in 0..50 {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("control.sock");
            let socket = {
                let _entered = runtime.enter();
                bind(&path, &settings(None)).unwrap()
            };
            let connect = || std::os::unix::net::UnixStream::connect(&path).unwrap();
            let _admitted: Vec<_> = (0..MAX_CONNECTIONS).map(|_| connect()).collect();
            let clients: Vec<_> = (0..5 * MAX_REFUSED)
                .map(|_| {
                    let mut client = connect();
                    client.write_all(b"GET /-/ready HTTP/1.0\r\nHost: localhost\r\n\r\n").unwrap();
                    client
                })
                .collect();
            let routes = CurrentRoutes::new(axum::Router::new());
            let serving = serve_control_socket(socket, routes, Arc::new(access_control()), pending());
            let serving = runtime.spawn(serving);
            for (number, mut client) in clients.into_iter().enumerate() {
                let mut response = String::new();
                let read = client.read_to_string(&mut response);
                assert!(read.is_ok(), "client {number} of round {round}: {read:?} after {response:?}");
                assert!(response.starts_with("HTTP/1.0 503 "), "{response}");
                assert!(response.ends_with(&format!("{}\n", OVERFLOW.1.text)), "{response}");
            }
            serving.abort();
        }
    }

    #[test]
    fn unknown_group_leaves_the_socket_to_its_owner() {
        on_runtime(|| {
            let folder = tempfile::tempdir().unwrap();
            let socket = bind(&folder.path().join("a"), &settings(Some("no such group"))).unwrap();
            let file = std::fs::metadata(&socket.path).unwrap();
            assert_eq!((file.gid(), file.mode() & 0o777), (rustix::process::getegid().as_raw(), 0o660));
        });
    }

    #[test]
    fn only_containers_that_memledger_is_not_in_are_foreign() {
        let id = |digit: char| digit.to_string().repeat(64);
        let (a, b) = (id('a'), id('b'));
        let of = |path: &str| format!("0::{path}\n").into_bytes();
        let container = of(&format!("/docker/{a}"));
        let host = of("/user.slice/session-1.scope");
        assert!(!is_foreign_container(&host, &host));
        assert!(is_foreign_container(&host, &container));
        assert!(!is_foreign_container(&container, &container) && !is_foreign_container(&container, &host));
        assert!(is_foreign_container(&container, &of(&format!("/docker/{b}"))));
        let in_run = |above: &str| of(&format!("{above}/memledger-{}2d72756e.scope", &a[8..]));
        assert!(is_foreign_container(&host, &of(&format!("/memledger/{a}"))), "no run has such an id");
        assert!(!is_foreign_container(&host, &in_run("/user.slice")));
        assert!(is_foreign_container(&host, &in_run(&format!("/docker/{b}"))));
        assert!(
            is_foreign_container(&container, &of(&format!("/docker/{a}/docker/{b}"))),
            "a container in it"
        );
        // a cgroup namespace of memledger's own
        assert!(!is_foreign_container(&of("/"), &of("/../../system.slice/ssh.service")));
        assert!(is_foreign_container(&of("/"), &of(&format!("/../docker-{b}.scope"))));
        let v1 = format!("9:memory:/docker/{b}\n8:cpu:/docker/{b}\n0::/\n").into_bytes();
        assert!(is_foreign_container(&of("/"), &v1));
    }

    #[test]
    fn second_pid_means_a_nested_pid_namespace() {
        assert!(is_in_nested_pid_namespace(b"Name:\tsh\nNSpid:\t4711\t7\n"));
        assert!(!is_in_nested_pid_namespace(b"Name:\tsh\nNSpid:\t4711\n"));
        assert!(!is_in_nested_pid_namespace(b"Name:\tsh\n"), "a kernel without the line");
    }
}
