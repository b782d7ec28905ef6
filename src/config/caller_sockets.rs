//! The engines of whoever starts a command: `DOCKER_HOST`, and the sockets in the caller's own runtime directory.
//!
//! An engine can say anything of its containers, and a user's engine is the user's. So a user reads the own ones, and root's; root and the
//! service read another user's only by `--docker.socket` or `--podman.socket`. A setting of these replaces what is found here.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::declare::Source;
use super::sources::{Environment, Layer, RawValue, Values};
use super::{ConfigError, Setting};

/// Variable with the engine that Docker's own commands use.
const DOCKER_HOST: &str = "DOCKER_HOST";
/// Variable with the runtime directory of the user's session.
const RUNTIME_DIR: &str = "XDG_RUNTIME_DIR";
/// The sockets in a user's runtime directory, by setting.
const IN_RUNTIME_DIR: [(&str, &str); 2] =
    [("docker.socket", "docker.sock"), ("podman.socket", "podman/podman.sock")];

/// Who starts the command.
pub struct Caller<'e> {
    /// The effective user.
    pub uid: u32,
    /// Where the runtime directories of all users are.
    pub users: &'e Path,
    /// The environment.
    pub environment: Environment<'e>,
}

/// The sentences about engines that are not read.
pub struct EngineNotices;

impl Source<Vec<String>> for EngineNotices {
    fn declare(self, _: &'static str, _: &mut Vec<Setting>) {}

    fn read(self, values: &Values<'_>) -> Result<Vec<String>, ConfigError> {
        Ok(values.notices.clone())
    }
}

/// Adds the caller's engines to the sockets that no setting has set. Returns a sentence for each engine that is not read.
pub fn add(values: &mut Values<'_>, caller: &Caller<'_>) -> Vec<String> {
    let is_unset =
        |values: &Values<'_>, key| values.of(key).iter().all(|given| given.layer == Layer::Default);
    let [docker, podman] = IN_RUNTIME_DIR.map(|(key, _)| is_unset(values, key));
    let mut notices = Vec::new();
    if docker {
        match of_docker_host(caller) {
            // it may be Podman's, which serves the same API
            Ok(Some(socket)) if socket.ends_with("podman.sock") && podman => {
                add_socket(values, "podman.socket", &socket, DOCKER_HOST);
            }
            Ok(Some(socket)) => add_socket(values, "docker.socket", &socket, DOCKER_HOST),
            Ok(None) => {}
            Err(notice) => notices.push(notice),
        }
    }
    for ((key, name), is_unset) in std::iter::zip(IN_RUNTIME_DIR, [docker, podman]) {
        let directory = (caller.environment)(RUNTIME_DIR).map(PathBuf::from);
        let own = directory.filter(|path| path.is_absolute()).map(|path| path.join(name));
        if let Some(own) = own.filter(|own| is_unset && owner_of_socket(own) == Some(caller.uid)) {
            add_socket(values, key, &own, RUNTIME_DIR);
        }
        notices.extend(of_sudo(caller, key, name).filter(|_| is_unset));
    }
    notices
}

/// Returns the socket in `DOCKER_HOST`, or why it is not read.
fn of_docker_host(caller: &Caller<'_>) -> Result<Option<PathBuf>, String> {
    let Some(host) = (caller.environment)(DOCKER_HOST).filter(|host| !host.is_empty()) else {
        return Ok(None);
    };
    let Some(path) = host.strip_prefix("unix://").filter(|path| path.starts_with('/')) else {
        // the rest may have a name or a password
        let kind =
            host.split_once("://").map_or("no unix:///PATH".to_owned(), |(kind, _)| format!("{kind}://"));
        return Err(format!(
            "DOCKER_HOST is {kind}, and is not used: memledger reads the engines of this host, by a Unix socket (DOCKER_HOST=unix:///PATH or --docker.socket=PATH)"
        ));
    };
    match owner_of_socket(Path::new(path)) {
        Some(owner) if owner != 0 && owner != caller.uid => Err(of_other_user("docker.socket", owner, path)),
        None if !is_made_by_caller(Path::new(path), caller) => Err(format!(
            "DOCKER_HOST={host} is not used, because another user can make that socket: --docker.socket={path} reads and trusts it"
        )),
        _ => Ok(Some(path.into())),
    }
}

/// Returns whether root and the caller alone can make a file that is not there: by the directories above it that are.
fn is_made_by_caller(path: &Path, caller: &Caller<'_>) -> bool {
    const OTHERS_WRITE: u32 = 0o022;
    let is_trusted = |uid: u32| uid == 0 || uid == caller.uid;
    // the directory of a user who is not logged in is not there yet
    let of_user =
        path.strip_prefix(caller.users).ok().and_then(|rest| rest.iter().next()?.to_str()?.parse().ok());
    let above = path.ancestors().skip(1).filter_map(|directory| std::fs::metadata(directory).ok());
    let is_safe = |found: std::fs::Metadata| is_trusted(found.uid()) && found.mode() & OTHERS_WRITE == 0;
    of_user.is_none_or(is_trusted) && above.into_iter().all(is_safe)
}

/// Returns the sentence about an engine of the user who has become root.
fn of_sudo(caller: &Caller<'_>, key: &str, name: &str) -> Option<String> {
    let user: u32 = (caller.environment)("SUDO_UID")?.parse().ok()?;
    let socket = caller.users.join(user.to_string()).join(name);
    let is_other = caller.uid == 0 && user != 0 && owner_of_socket(&socket).is_some();
    is_other.then(|| of_other_user(key, user, &socket.display().to_string()))
}

fn of_other_user(key: &str, user: u32, socket: &str) -> String {
    format!(
        "the engine of user {user} is not read, because a user's engine can say anything: --{key}={socket} reads and trusts it"
    )
}

fn owner_of_socket(path: &Path) -> Option<u32> {
    let file = std::fs::metadata(path).ok()?;
    file.file_type().is_socket().then(|| file.uid())
}

/// Adds a socket, unless it is there under this or another name.
fn add_socket(values: &mut Values<'_>, key: &'static str, socket: &Path, origin: &str) {
    let real = |path: &Path| std::fs::canonicalize(path).unwrap_or(path.to_path_buf());
    let all = IN_RUNTIME_DIR.iter().flat_map(|(key, _)| values.of(key));
    if all.into_iter().any(|given| real(Path::new(&given.text)) == real(socket)) {
        return;
    }
    let mut sockets = values.of(key).to_vec();
    let text = socket.display().to_string();
    sockets.push(RawValue { text, origin: origin.to_owned(), layer: Layer::Default });
    values.set(key, sockets);
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::os::unix::net::UnixListener;

    use super::*;

    /// A folder with sockets, and the settings of a command that is started with these flags and variables.
    struct Host {
        folder: tempfile::TempDir,
        _sockets: Vec<UnixListener>,
    }

    impl Host {
        fn new(sockets: &[&str]) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let open = |socket: &&str| {
                let path = folder.path().join(socket);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                UnixListener::bind(path).unwrap()
            };
            let _sockets = sockets.iter().map(open).collect();
            Self { folder, _sockets }
        }

        /// The user who runs the tests, and owns the sockets.
        fn owner(&self) -> u32 {
            std::fs::metadata(self.folder.path()).unwrap().uid()
        }

        /// Returns the sockets below the folder, and the notices. `DIR` in a variable is the folder.
        fn sockets(
            &self,
            uid: u32,
            flags: &[&str],
            variables: &[(&str, &str)],
        ) -> (Vec<String>, Vec<String>) {
            let root = self.folder.path().display().to_string();
            let variables: HashMap<_, _> =
                variables.iter().map(|(name, value)| (*name, value.replace("DIR", &root))).collect();
            let environment = |name: &str| variables.get(name).cloned();
            let matches = crate::config::tests::matches(flags);
            let mut values = Values::collect(Some(&matches), &environment, &[], Path::new("")).unwrap();
            let caller = Caller { uid, users: self.folder.path(), environment: &environment };
            let notices = add(&mut values, &caller);
            let of = |key: &str| {
                let found = values.of(key).iter().map(|given| given.text.replace(&root, "DIR"));
                found.map(|text| format!("{key} {text}")).collect::<Vec<_>>()
            };
            let all = [of("docker.socket"), of("podman.socket")].concat();
            let found = all.into_iter().filter(|text| text.contains("DIR")).collect();
            (found, notices.into_iter().map(|notice| notice.replace(&root, "DIR")).collect())
        }
    }

    #[test]
    fn finds_docker_host_and_the_callers_own_sockets() {
        let host = Host::new(&["docker.sock", "podman/podman.sock", "other.sock"]);
        let found = |variables| host.sockets(host.owner(), &[], variables).0;
        let own = ["docker.socket DIR/docker.sock", "podman.socket DIR/podman/podman.sock"];
        assert_eq!(found(&[("XDG_RUNTIME_DIR", "DIR")]), own);
        assert_eq!(found(&[]), [""; 0]);
        assert_eq!(found(&[("XDG_RUNTIME_DIR", "relative")]), [""; 0]);
        assert_eq!(found(&[("DOCKER_HOST", "unix://DIR/other.sock")]), ["docker.socket DIR/other.sock"]);
        assert_eq!(found(&[("DOCKER_HOST", "unix://DIR/podman/podman.sock")]), [own[1]]);
        let both = [("DOCKER_HOST", "unix://DIR/docker.sock"), ("XDG_RUNTIME_DIR", "DIR")];
        assert_eq!(found(&both), own, "each once");
    }

    #[test]
    fn missing_socket_is_used_where_no_other_user_can_make_it() {
        let host = Host::new(&["docker.sock"]);
        let of = |uid: u32, path: &str| host.sockets(uid, &[], &[("DOCKER_HOST", path)]);
        // the folder of the tests is below one that everyone may write to
        let (found, notices) = of(host.owner(), "unix://DIR/missing.sock");
        assert!(found.is_empty() && notices[0].contains("another user can make that socket"), "{notices:?}");
        let caller = Caller { uid: 0, users: Path::new("/run/user"), environment: &|_| None };
        assert!(
            is_made_by_caller(Path::new("/run/nowhere/docker.sock"), &caller),
            "why says that it is missing"
        );
        assert!(!is_made_by_caller(Path::new("/run/user/4294967/docker.sock"), &caller), "not logged in yet");
        assert!(!is_made_by_caller(Path::new("/tmp/docker.sock"), &caller));
    }

    #[test]
    fn setting_replaces_what_is_found() {
        let host = Host::new(&["docker.sock", "podman/podman.sock"]);
        let variables = [("XDG_RUNTIME_DIR", "DIR"), ("DOCKER_HOST", "tcp://other:2375")];
        let found = host.sockets(host.owner(), &["--docker.socket=/d", "--podman.socket="], &variables);
        assert_eq!(found, (vec![], vec![]));
        let by_variable = [("MEMLEDGER_DOCKER_SOCKET", "/d"), ("XDG_RUNTIME_DIR", "DIR")];
        let found = host.sockets(host.owner(), &[], &by_variable).0;
        assert_eq!(found, ["podman.socket DIR/podman/podman.sock"]);
    }

    #[test]
    fn engine_of_another_user_is_not_read() {
        let host = Host::new(&["docker.sock", "7/docker.sock", "7/podman/podman.sock"]);
        let other = host.owner() + 1;
        assert_eq!(host.sockets(other, &[], &[("XDG_RUNTIME_DIR", "DIR")]), (vec![], vec![]));
        if host.owner() != 0 {
            let (found, notices) = host.sockets(0, &[], &[("DOCKER_HOST", "unix://DIR/docker.sock")]);
            assert!(
                found.is_empty() && notices[0].contains("--docker.socket=DIR/docker.sock"),
                "{notices:?}"
            );
        }
        let (found, notices) = host.sockets(0, &[], &[("SUDO_UID", "7")]);
        assert_eq!((found.len(), notices.len()), (0, 2), "{notices:?}");
        assert!(notices[0].contains("user 7") && notices[0].contains("--docker.socket=DIR/7/docker.sock"));
        assert!(notices[1].contains("--podman.socket=DIR/7/podman/podman.sock"));
        assert_eq!(host.sockets(0, &[], &[("SUDO_UID", "8")]).1.len(), 0);
    }

    #[test]
    fn docker_host_that_is_no_socket_is_one_sentence() {
        let host = Host::new(&[]);
        for (value, says) in [
            ("tcp://user:secret@other:2375", "DOCKER_HOST is tcp://,"),
            ("ssh://user@other", "DOCKER_HOST is ssh://,"),
            ("unix://relative.sock", "DOCKER_HOST is unix://,"),
            ("/run/docker.sock", "DOCKER_HOST is no unix:///PATH,"),
        ] {
            let (found, notices) = host.sockets(host.owner(), &[], &[("DOCKER_HOST", value)]);
            assert_eq!((found.len(), notices.len()), (0, 1), "{notices:?}");
            assert!(notices[0].starts_with(says) && !notices[0].contains("secret"), "{notices:?}");
        }
    }
}
