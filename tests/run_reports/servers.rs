//! Servers of S3, and a relay in front of one that can fail.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use crate::prometheus::provided;
use crate::support::{eventually, free_port, terminate};

/// The credentials that s3s-fs accepts.
pub const KEYS: [&str; 2] = ["AWS_ACCESS_KEY_ID=reports", "AWS_SECRET_ACCESS_KEY=a+secret/of=reports"];
/// The bucket that exists.
pub const BUCKET: &str = "runs";

/// A server with a bucket. Killed when dropped.
pub struct Server {
    child: Child,
    pub port: u16,
    /// Where s3s-fs has its objects.
    root: Option<tempfile::TempDir>,
}

impl Server {
    /// Starts moto, which accepts any credentials. Prints the reason and returns `None` without Python.
    pub fn moto() -> Option<Self> {
        Self::start_moto(&[])
    }

    /// Starts moto with TLS.
    pub fn moto_with_tls(certificate: &Path, key: &Path) -> Option<Self> {
        let files = ["-s", "-c", certificate.to_str().unwrap(), "-k", key.to_str().unwrap()];
        Self::start_moto(&files)
    }

    fn start_moto(flags: &[&str]) -> Option<Self> {
        let moto = PathBuf::from(provided("MEMLEDGER_TEST_PYTHON")?).with_file_name("moto_server");
        let port = free_port();
        let mut command = Command::new(moto);
        command.args(["-H", "127.0.0.1", "-p", &port.to_string()]).args(flags);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("moto starts");
        let server = Self { child, port, root: None };
        server.await_port();
        if flags.is_empty() {
            ureq::put(format!("{}/{BUCKET}", server.url())).send_empty().expect("a bucket");
        }
        Some(server)
    }

    /// Starts s3s-fs, which checks signatures.
    pub fn s3s() -> Option<Self> {
        let program = provided("MEMLEDGER_TEST_S3S_FS")?;
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join(BUCKET)).unwrap();
        let port = free_port();
        let [key, secret] = KEYS.map(|variable| variable.split_once('=').unwrap().1);
        let mut command = Command::new(program);
        command.args([
            "--host",
            "127.0.0.1",
            "--port",
            &port.to_string(),
            "--access-key",
            key,
            "--secret-key",
            secret,
        ]);
        command.arg(root.path()).stdout(Stdio::null()).stderr(Stdio::null());
        let server = Self { child: command.spawn().expect("s3s-fs starts"), port, root: Some(root) };
        server.await_port();
        Some(server)
    }

    fn await_port(&self) {
        eventually("the server of S3", || {
            TcpStream::connect(("127.0.0.1", self.port)).map(drop).map_err(|error| error.to_string())
        });
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Returns the keys of all objects, sorted.
    pub fn keys(&self) -> Vec<String> {
        if let Some(root) = &self.root {
            let mut keys = Vec::new();
            files(&root.path().join(BUCKET), "", &mut keys);
            keys.sort();
            return keys;
        }
        let url = format!("{}/{BUCKET}?list-type=2", self.url());
        let text = ureq::get(url).call().unwrap().body_mut().read_to_string().unwrap();
        let keys = text.split("<Key>").skip(1).map(|part| part.split("</Key>").next().unwrap().to_owned());
        keys.collect()
    }

    /// Returns the content of an object.
    pub fn object(&self, key: &str) -> Vec<u8> {
        if let Some(root) = &self.root {
            return std::fs::read(root.path().join(BUCKET).join(key)).unwrap();
        }
        // moto checks no signature, but wants one
        let signed = "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=b";
        ureq::get(format!("{}/{BUCKET}/{}", self.url(), key.replace(' ', "%20")))
            .header("Authorization", signed)
            .call()
            .unwrap()
            .body_mut()
            .read_to_vec()
            .unwrap()
    }
}

/// Adds the files below a folder; those of s3s-fs itself begin with a dot.
fn files(folder: &Path, prefix: &str, keys: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        if entry.path().is_dir() {
            files(&entry.path(), &format!("{prefix}{name}/"), keys);
        } else if !name.starts_with('.') {
            keys.push(format!("{prefix}{name}"));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        terminate(&mut self.child);
    }
}

/// What becomes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// It is closed at once.
    Closed,
    /// The response is 503.
    Busy,
    /// The response is that of a server that does not allow the request.
    Denied,
    /// No response comes.
    Silent,
    /// It is closed in the middle of a request.
    Cut,
}

/// Bytes after which a connection is cut: within the page of a report, which is its second file.
const CUT_AFTER: usize = 1_500;

/// Accepts connections and passes them on to a server, until it fails.
pub struct Relay {
    pub port: u16,
    fault: Arc<Mutex<Fault>>,
    /// Connections that stay open without a response.
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Relay {
    pub fn start(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (fault, open) = (Arc::new(Mutex::new(Fault::None)), Arc::new(Mutex::new(Vec::new())));
        let relay = Self { port, fault: Arc::clone(&fault), open: Arc::clone(&open) };
        std::thread::spawn(move || {
            for connection in listener.incoming().map_while(Result::ok) {
                let now = *fault.lock().unwrap();
                match now {
                    Fault::Closed => drop(connection),
                    Fault::Silent => open.lock().unwrap().push(connection),
                    Fault::Busy | Fault::Denied => drop(std::thread::spawn(move || reject(connection, now))),
                    Fault::None | Fault::Cut => drop(std::thread::spawn(move || {
                        pass(connection, server, if now == Fault::Cut { CUT_AFTER } else { usize::MAX });
                    })),
                }
            }
        });
        relay
    }

    pub fn fail(&self, fault: Fault) {
        *self.fault.lock().unwrap() = fault;
        for connection in self.open.lock().unwrap().drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

fn reject(mut connection: TcpStream, fault: Fault) {
    let mut buffer = [0; 1 << 16];
    let _ = connection.read(&mut buffer);
    let (status, code) = match fault {
        Fault::Denied => ("403 Forbidden", "AccessDenied"),
        _ => ("503 Slow Down", "SlowDown"),
    };
    let body = format!("<Error><Code>{code}</Code><Message>No.</Message></Error>");
    let head = format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
    let _ = connection.write_all((head + &body).as_bytes());
    let _ = connection.shutdown(Shutdown::Write);
    while connection.read(&mut buffer).is_ok_and(|count| count > 0) {} // else the response may be lost
}

/// Passes a connection on, and cuts it after this many bytes of requests.
fn pass(mut client: TcpStream, server: u16, limit: usize) {
    let Ok(mut upstream) = TcpStream::connect(("127.0.0.1", server)) else { return };
    let (mut from, mut to) = (upstream.try_clone().unwrap(), client.try_clone().unwrap());
    let responses = std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
    });
    let mut buffer = [0; 1024];
    let mut passed = 0;
    while let Ok(count @ 1..) = client.read(&mut buffer) {
        passed += count;
        if passed > limit || upstream.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = upstream.shutdown(Shutdown::Both);
    let _ = client.shutdown(Shutdown::Both);
    let _ = responses.join();
}
