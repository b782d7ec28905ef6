//! The newest Docker, containerd, Compose and Podman (`make test-engines`), which report kills and ends in other ways than Debian's.

use crate::support::docker::{Engine, PrivateEngine, unique};
use crate::support::engines::Programs;
use crate::support::eventually_true;
use crate::support::podman::Podman;

/// Starts a Docker engine of its own with the image of the tests.
fn docker(prepare: impl FnOnce(Programs) -> PrivateEngine) -> Option<PrivateEngine> {
    let (shared, programs) = (Engine::shared()?, Programs::newest()?);
    let mut private = prepare(programs);
    private.start();
    private.load_from(&shared);
    Some(private)
}

#[test]
fn docker_kills_renames_and_restarts_beside_its_containerd() {
    let beside = |programs| PrivateEngine::beside_containerd(programs, true);
    let Some(mut private) = docker(beside) else { return };
    let version = private.server_version().expect("it responds");
    assert!(version.starts_with("v2."), "the version of moby's module: {version}");
    let name = unique("newest");
    let stays = private.engine.run(&name, &[], &["sleep", "1000"]);
    let killed = private.engine.run(&format!("{name}-oom"), &["-m", "40m"], &["tail", "/dev/zero"]);
    eventually_true("its end", || killed.inspect("{{.State.Running}}") == "false");
    assert_eq!(killed.inspect("{{.State.OOMKilled}} {{.State.ExitCode}}"), "true 137");
    private.engine.docker(&["rename", &stays.id, &format!("{name}-new")]);
    let pid = stays.pid();
    private.crash();
    private.stop_containerd();
    private.start_containerd();
    private.start();
    assert_eq!((stays.pid(), stays.inspect("{{.Name}}")), (pid, format!("/{name}-new")), "live-restore");
}

#[test]
fn compose_starts_replicas() {
    let Some(private) = docker(PrivateEngine::of) else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let image = &private.engine.image;
    let services = format!(
        "services:\n  train:\n    image: {image}\n    command: sleep 1000\n    network_mode: none\n    deploy: {{replicas: 2}}\n"
    );
    std::fs::write(folder.path().join("compose.yaml"), services).expect("a file");
    let project = unique("compose");
    private.compose(folder.path(), &["-p", &project, "up", "-d", "--pull", "never"]);
    let names = private.engine.docker(&["ps", "--format", "{{.Names}}"]);
    let mut names: Vec<_> = names.lines().collect();
    names.sort_unstable();
    assert_eq!(names, [format!("{project}-train-1"), format!("{project}-train-2")]);
}

#[test]
fn podman_kills_and_restarts() {
    let (Some(_), Some(programs)) = (Engine::shared(), Programs::newest()) else { return };
    let podman = Podman::of(programs);
    assert!(podman.ok(&["--version"]).starts_with("podman version 5."));
    let killed = podman.run_command("killed", &["-m", "40m"], &["/busybox/tail", "/dev/zero"]);
    let state = |id: &str, what: &str| podman.ok(&["inspect", "-f", what, id]);
    eventually_true("its end", || state(&killed, "{{.State.Status}}") == "exited");
    assert_eq!(state(&killed, "{{.State.OOMKilled}} {{.State.ExitCode}}"), "true 137");
    let loops = podman.run_command("loops", &["--restart", "always"], &["/busybox/sh", "-c", "exit 4"]);
    eventually_true("a restart", || state(&loops, "{{.RestartCount}}") != "0");
    let parent = podman.cgroup_parent();
    podman.ok(&["pod", "create", "--name", "pod", "--network", "none", &parent]);
    podman.ok(&["pod", "start", "pod"]);
}
