//! The check of the control socket.

use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use super::directory::{existing, owner_and_mode, writable};
use super::{Check, RESPONSE_TIMEOUT};
use crate::cli::control;
use crate::config::Config;

pub(super) const NAME: &str = "control socket";
const LOST: &str = "no release-gpu and cleanup on this host; why, events, runs, compare, report and advise only where they can read the ledger in --state.path";
const START: &str = "start `memledger serve`; if it runs, its log has the reason";

/// No process listens, or there is no such file.
const ABSENT: [ErrorKind; 3] = [ErrorKind::NotFound, ErrorKind::NotADirectory, ErrorKind::ConnectionRefused];

/// Checks whether a memledger answers on the control socket, or could create it.
pub fn run_check(config: &Config) -> Check {
    match &config.local.socket {
        Some(path) => check(path),
        None => {
            let fix = "--local.socket=/run/memledger/control.sock";
            Check::none(NAME, "off (--local.socket is empty)", LOST, fix)
        }
    }
}

fn check(path: &Path) -> Check {
    const DIRECTORY: &str = "make the directory writable for memledger's user (systemd: RuntimeDirectory=memledger; Docker: a \
                             tmpfs there), or set another --local.socket";
    let place = path.display();
    if std::fs::symlink_metadata(path).is_ok_and(|file| !file.file_type().is_socket()) {
        let found = format!("{place} is not a socket ({})", owner_and_mode(path));
        return Check::bad(NAME, found, LOST, "remove it, or set another --local.socket");
    }
    match control::exchange(path, "GET", "/-/healthy", "*/*", RESPONSE_TIMEOUT) {
        Ok((200, _)) => Check::good(NAME, format!("{place} answers ({})", owner_and_mode(path))),
        Ok((_, text)) => {
            let fix = "run the verb on the host, or in memledger's own container";
            Check::bad(NAME, format!("{place} refuses this process: {}", text.trim_end()), LOST, fix)
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            let folder = existing(path.parent().unwrap_or(path));
            let found = format!(
                "{place} is closed to this user ({} of {})",
                owner_and_mode(&folder),
                folder.display()
            );
            Check::bad(
                NAME,
                found,
                LOST,
                "sudo, or start memledger with --local.group=GROUP, a group of this user",
            )
        }
        Err(error) if ABSENT.contains(&error.kind()) => match writable(path.parent().unwrap_or(path), &[]) {
            Ok(()) => Check::none(NAME, format!("no memledger listens on {place}"), LOST, START),
            Err(why) => Check::bad(NAME, why, LOST, DIRECTORY),
        },
        Err(error) => Check::bad(NAME, format!("{place}: {error}"), LOST, "restart `memledger serve`"),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::cli::checks::CheckState;

    /// Checks a socket on which the next connection gets this response.
    fn check_answering(path: &Path, response: &'static str) -> Check {
        let listener = UnixListener::bind(path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut seen = [0; 1_024];
            let length = stream.read(&mut seen).unwrap();
            assert!(seen[..length].ends_with(b"\r\n\r\n"), "the request comes in one piece");
            stream.write_all(response.as_bytes()).unwrap();
        });
        let check = check(path);
        server.join().unwrap();
        check
    }

    #[test]
    fn finds_out_who_listens() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let missing = check(&path);
        assert!(missing.state == CheckState::None && missing.found.starts_with("no memledger listens on"));
        let healthy = check_answering(&path, "HTTP/1.0 200 OK\r\n\r\n");
        assert!(
            healthy.state == CheckState::Good && healthy.found.contains("answers (owner "),
            "{healthy:?}"
        );
        assert_eq!(check(&path).state, CheckState::None, "nobody listens any more");
        std::fs::remove_file(&path).unwrap();
        let refused = check_answering(&path, "HTTP/1.0 403 Forbidden\r\n\r\nforbidden: a container\n");
        assert!(
            refused.state == CheckState::Bad && refused.found.ends_with("forbidden: a container"),
            "{refused:?}"
        );
    }

    #[test]
    fn names_a_path_where_no_socket_can_be() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let taken = check(file.path());
        assert!(
            taken.state == CheckState::Bad && taken.found.contains("is not a socket (owner "),
            "{taken:?}"
        );
        let below = check(&file.path().join("control.sock"));
        assert!(below.state == CheckState::Bad && below.fix.contains("--local.socket"), "{below:?}");
    }
}
