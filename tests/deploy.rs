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
use crate::support::{binary, eventually, holds_in_time};

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
    /// Builds the final stage around the binary under test.
    pub fn build(engine: &Engine) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let script = repository().join("deploy/image-root.sh");
        output_of(Command::new(script).arg(binary()).arg(folder.path().join("image")));
        // libraries that NVIDIA's libnvidia-ml.so.1 needs
        for library in ["libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"] {
            let found =
                output_of(Command::new("find").arg(folder.path().join("image")).args(["-name", library]));
            assert!(!found.is_empty(), "NVML cannot be loaded without {library}");
        }
        let dockerfile = std::fs::read_to_string(repository().join("deploy/Dockerfile")).unwrap();
        let (_, last) = dockerfile.split_once("\nFROM scratch\n").expect("a final stage from scratch");
        let copied = last.replace("COPY --from=build /image/ /", "COPY image/ /");
        assert!(copied != last && !copied.contains("RUN"), "the final stage copies /image and runs nothing");
        let name = format!("{}:1", unique("image"));
        // the label makes it an image of its own: removing one by its id must not take that of another test away
        let dockerfile = format!("FROM scratch\n{copied}\nLABEL memledger.test={name}\n");
        std::fs::write(folder.path().join("Dockerfile"), dockerfile).unwrap();
        let mut build = Command::new("docker");
        build.env("DOCKER_BUILDKIT", "0").env("DOCKER_HOST", format!("unix://{}", engine.socket.display()));
        output_of(build.args(["build", "--quiet", "--tag", &name]).arg(folder.path()));
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
    let report = exec(&["doctor"]).expect("the main job can run");
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
    // the control socket answers verbs in its own container, in the host's pid namespace
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
    assert_no_shell(&engine, &container);
}

/// Runs the commands that README and docs/serving.md name for a container without settings.
fn assert_access_as_documented(exec: &impl Fn(&[&str]) -> Result<String, String>, pid: &str) {
    assert!(exec(&["events", "--since=24h"]).is_ok());
    assert!(exec(&["why", "nobody"]).is_err(), "exit status 1: nothing is known");
    // over TCP, as through a published port
    let request = |method: &str, path: &str| {
        let url = format!("http://127.0.0.1:10853{path}");
        let words = ["-t", pid, "--net", "curl", "-sS", "-X", method, "-w", "\n%{http_code}", &url];
        output_of(Command::new("nsenter").args(words))
    };
    assert!(request("GET", "/metrics").ends_with("\n200"));
    let answer = request("GET", "/api/v1/containers");
    assert!(answer.ends_with("\n403") && answer.contains("--web.enable-api"), "{answer}");
    assert!(request("POST", "/-/release-gpu").ends_with("\n404"), "not without --web.enable-admin");
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
    let (code, _, complaint) = crate::support::run(&["healthcheck", &format!("--web.listen-address={port}")]);
    assert_eq!(code, Some(1));
    assert!(complaint.contains("/-/ready does not respond"), "{complaint}");
}
