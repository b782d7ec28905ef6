//! The image and the compose files of `deploy/`.
//!
//! The image is the final stage of the shipped Dockerfile, which begins `FROM scratch` and so pulls nothing; its root is created by
//! the script that the build stage runs. A script checks the compose files, and the container runs with the options that correspond to
//! services.yml; `tests/packages` has Compose itself.

use std::path::Path;
use std::process::Command;

use fake_nvml::{FakeNvml, State};

use crate::prometheus::provided;
use crate::support::docker::{Container, Engine, unique};
use crate::support::{binary, eventually, holds_in_time, test_label};

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Runs a script that must succeed; returns its output.
fn output_of(command: &mut Command) -> String {
    let output = command.output().expect("it starts");
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{command:?}: {text}");
    text
}

/// The image, removed when dropped.
pub(crate) struct Image {
    pub engine: Engine,
    pub name: String,
}

impl Image {
    /// Builds the image of `make image` around the binary under test.
    pub fn build(engine: &Engine) -> Self {
        let name = format!("{}:1", unique("image"));
        let mut build = Command::new(repository().join("deploy/packages/image.sh"));
        build.env("DOCKER_HOST", format!("unix://{}", engine.socket.display()));
        // the label makes it an image of its own: removing one by its id must not take that of another test away
        output_of(build.arg(binary()).args([&name, &format!("memledger.test={name}"), &test_label()]));
        Self { engine: engine.clone(), name }
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // while its container is still being removed, `rmi` only takes the name away
        let Ok(id) = self.engine.try_docker(&["images", "-q", "--no-trunc", &self.name]) else { return };
        let _ = self.engine.try_docker(&["rmi", "-f", &self.name]);
        holds_in_time(|| {
            let _ = self.engine.try_docker(&["rmi", "-f", id.trim()]);
            self.engine.try_docker(&["image", "inspect", id.trim()]).is_err()
        });
    }
}

#[test]
fn compose_files_pin_images_publish_on_loopback_and_mount_existing_files() {
    let Some(python) = provided("MEMLEDGER_TEST_PYTHON") else { return };
    output_of(Command::new(python).arg("-B").arg(repository().join("tests/dashboards/compose.py")));
}

#[test]
fn image_has_the_libraries_that_nvml_needs() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("image");
    output_of(Command::new(repository().join("deploy/image-root.sh")).arg(binary()).arg(&root));
    for library in ["libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"] {
        let found = output_of(Command::new("find").arg(&root).args(["-name", library]));
        assert!(!found.is_empty(), "NVML cannot be loaded without {library}");
    }
}

#[test]
fn image_runs_with_the_options_of_compose_and_is_healthy() {
    let Some(python) = provided("MEMLEDGER_TEST_PYTHON") else { return };
    let Some(engine) = Engine::shared() else { return };
    let script = repository().join("tests/dashboards/compose.py");
    let flags = output_of(Command::new(python).arg("-B").arg(script).arg("flags"));
    // the NVIDIA runtime mounts the driver's library into /usr/lib64; here it is the fake library
    let driver = tempfile::tempdir().unwrap();
    FakeNvml::install(driver.path(), &State::with_gpus(2)).expect("the fake library is installed");
    let mount = format!("--volume={}:/usr/lib64:ro", driver.path().display());
    let flags: Vec<_> = flags.lines().chain(["--health-interval=1s", &mount]).collect();
    let image = Image::build(&engine);
    let of_image = Engine { image: image.name.clone(), ..engine.clone() };
    let container = of_image.run(&unique("memledger"), &flags, &[]);
    let exec =
        |words: &[&str]| engine.try_docker(&[&["exec", container.id.as_str(), "/memledger"], words].concat());
    eventually("its own health check", || exec(&["healthcheck"]));
    eventually("Docker's health check", || match container.inspect("{{.State.Health.Status}}").as_str() {
        "healthy" => Ok(()),
        other => Err(other.to_owned()),
    });
    // on a busy machine a check may take longer than its time-out
    let report = eventually("a report with all responses", || match exec(&["doctor"]) {
        Ok(report) if !report.contains("does not respond within") => Ok(report),
        Ok(report) | Err(report) => Err(report),
    });
    for source in [
        "cgroups",
        "/proc",
        "docker",
        "pid namespace",
        "CAP_SYS_PTRACE",
        "kernel log",
        "state path",
        "NVML",
        "control socket",
    ] {
        let line = report.lines().find(|line| {
            line.trim_start().strip_prefix("ok").is_some_and(|rest| rest.trim_start().starts_with(source))
        });
        assert!(line.is_some(), "{source} is not ok with what services.yml gives: {report}");
    }
    // the control socket serves verbs in its own container, in the host's pid namespace
    let report = exec(&["release-gpu"]).expect("the control socket");
    assert!(report.contains("\"closed\": true"), "{report}");
    assert!(exec(&["why", "nobody", "--state.path="]).is_err(), "exit status 1: nothing is known");
    let log = container.docker(&["logs"]);
    assert!(!log.contains("no control socket"), "{log}");
    let tls = exec(&["doctor", "--otlp.endpoint=https://127.0.0.1:1"]).expect("the main job can run");
    assert!(
        tls.contains("cannot connect to 127.0.0.1:1"),
        "TLS has certificate authorities in the image: {tls}"
    );
    assert_access_as_documented(&exec, container.inspect("{{.State.Pid}}").trim());
    assert_other_container_is_refused(&engine, &container);
    assert_no_shell(&engine, &container);
    drop(container);
    assert_api_can_be_allowed_as_documented(&of_image, &flags);
}

/// Runs the commands that docs/serving.md names for a container without settings.
fn assert_access_as_documented(exec: &impl Fn(&[&str]) -> Result<String, String>, pid: &str) {
    assert!(exec(&["events", "--since=24h"]).is_ok());
    assert!(exec(&["why", "nobody"]).is_err(), "exit status 1: nothing is known");
    let request = |method: &str, path: &str| tcp_request(pid, method, path);
    assert!(request("GET", "/metrics").ends_with("\n200"));
    let response = request("GET", "/api/v1/containers");
    assert!(response.ends_with("\n403") && response.contains("--web.enable-api"), "{response}");
    assert!(request("POST", "/-/release-gpu").ends_with("\n404"), "not without --web.enable-admin");
}

/// Mounts memledger's control socket into another container by mistake.
fn assert_other_container_is_refused(engine: &Engine, memledger: &Container) {
    let folder = format!("/proc/{}/root/run/memledger", memledger.inspect("{{.State.Pid}}").trim());
    let path = format!("{folder}/control.sock");
    let program =
        crate::control_socket::QUERY.replace("sys.argv[1]", &format!("{path:?}")) + "\nprint('ready')";
    // with the host's pids, and the right to follow them, it reaches the socket without a mount of its own
    let flags = ["--pid=host", "--cap-add=SYS_PTRACE", "--security-opt=apparmor=unconfined"];
    let other = engine.run_python(&unique("other"), &flags, &program);
    let response = other.docker(&["logs"]);
    assert!(response.contains("403 Forbidden") && response.contains("belongs to a container"), "{response}");
}

/// Requests a path over TCP, as through a published port, in the network of a container. Returns body and status.
fn tcp_request(pid: &str, method: &str, path: &str) -> String {
    let url = format!("http://127.0.0.1:10853{path}");
    let words = ["-t", pid, "--net", "curl", "-sS", "-X", method, "-w", "\n%{http_code}", &url];
    let output = Command::new("nsenter").args(words).output().expect("nsenter runs");
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

/// Allows the API as in docs/serving.md for Compose.
fn assert_api_can_be_allowed_as_documented(of_image: &Engine, flags: &[&str]) {
    let flags = [flags, &["--env=MEMLEDGER_WEB_ENABLE_API=true"]].concat();
    let container = of_image.run(&unique("api"), &flags, &[]);
    let pid = container.inspect("{{.State.Pid}}");
    eventually("the API", || match tcp_request(pid.trim(), "GET", "/api/v1/containers") {
        response if response.ends_with("\n200") => Ok(()),
        response => Err(response),
    });
}

fn assert_no_shell(engine: &Engine, container: &Container) {
    let shell = engine.try_docker(&["exec", &container.id, "/bin/sh", "-c", "true"]);
    assert!(shell.is_err(), "the image contains only memledger");
}

#[test]
fn health_check_fails_with_a_message_when_memledger_is_down() {
    // the end of a connection has a port where nothing listens, and which nothing else can take meanwhile
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = listener.local_addr().expect("its address");
    let connection = std::net::TcpStream::connect(address).expect("a connection");
    let port = connection.local_addr().expect("its other end");
    let (code, _, error) =
        crate::support::run(&["healthcheck", &format!("--web.listen-address={port}"), "--local.socket="]);
    assert_eq!(code, Some(1));
    assert!(error.contains("/-/ready does not respond"), "{error}");
}
