//! `tests/leftovers.sh`: it names what the tests left behind, and nothing of anybody else.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::support::cgroups::{TestCgroup, remove_tree_everywhere, root};
use crate::support::docker::{Engine, unique};
use crate::support::{OwnedChild, in_v2_guest};

/// A run of tests that does not exist, with its folder.
struct Run {
    folder: tempfile::TempDir,
    id: String,
    engine: Engine,
}

impl Run {
    fn new(engine: &Engine) -> Self {
        let folder = tempfile::Builder::new().prefix("mlt-left-").tempdir().expect("a folder");
        let run = Self { folder, id: format!("r{}xfeed", std::process::id()), engine: engine.clone() };
        assert!(run.script("before").status.success());
        run
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn script(&self, verb: &str) -> Output {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/leftovers.sh");
        let mut command = Command::new(script);
        command.arg(verb).arg(self.path()).args((verb != "before").then_some(&self.id));
        // of this test everything lasts
        command.env("LEFTOVERS_WAIT", "0").env_remove("MEMLEDGER_TEST_RUN");
        command.env("DOCKER_HOST", format!("unix://{}", self.engine.socket.display()));
        command.output().expect("the script runs")
    }

    /// Returns the kinds of what the run left, in order, each once, and the whole list.
    fn left(&self) -> (Vec<String>, String) {
        let output = self.script("after");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.success(), text.is_empty(), "{output:?}");
        let kind = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
        let mut kinds: Vec<_> = text.lines().map(kind).collect();
        kinds.dedup();
        (kinds, text)
    }

    fn label(&self) -> String {
        format!("memledger.test.run={}", self.id)
    }

    /// Builds an image of one file that is not that of another test.
    fn build(&self, name: &str, label: &str) {
        let context = self.path().join("context");
        std::fs::create_dir_all(&context).expect("a folder");
        std::fs::write(context.join("Dockerfile"), "FROM scratch\nCOPY Dockerfile /\n").expect("a file");
        let label = format!("--label={label}");
        let own = format!("--label=memledger.test={name}");
        let context = context.to_str().expect("text");
        self.engine.docker(&["build", "--quiet", "--network=none", &label, &own, "--tag", name, context]);
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.script("remove");
        remove_tree_everywhere(&format!("memledger-tests-{}", self.id));
    }
}

/// A volume and an image with a label, removed when dropped.
struct Named<'a>(&'a Engine, String);

impl Drop for Named<'_> {
    fn drop(&mut self) {
        let _ = self.0.try_docker(&["volume", "rm", "-f", &self.1]);
        let _ = self.0.try_docker(&["rmi", "-f", &self.1]);
    }
}

#[test]
fn only_what_the_run_left_is_named_and_removed() {
    assert!(!in_v2_guest());
    let Some(engine) = Engine::shared() else { return };
    let run = Run::new(&engine);

    // of somebody else, whose run has another id: a container, a volume, an image, a cgroup with a process, a mount, a process, a file
    let stranger = unique("stranger");
    let _container = engine.run(&stranger, &[], &["/busybox/sleep", "600"]);
    let named = Named(&engine, stranger.clone());
    engine.docker(&["volume", "create", &stranger]);
    run.build(&stranger, "memledger.test.run=somebody");
    let cgroup = TestCgroup::container();
    let sleep = |id: &str| {
        let mut sleep = Command::new("sleep");
        sleep.arg("600").env("MEMLEDGER_TEST_RUN", id).stdin(Stdio::null());
        OwnedChild(sleep.spawn().expect("sleep starts"))
    };
    let others = sleep("somebody");
    cgroup.add(others.0.id());
    let elsewhere = Mount::new(tempfile::Builder::new().prefix("mlt-left-").tempdir().expect("a folder"));
    assert_eq!(run.left(), (vec![], String::new()), "nothing of others is a leftover");

    // what a test of this run could leave
    let name = format!("mlt-{}-left", run.id);
    let labelled = unique("labelled");
    engine.docker(&["create", "--name", &labelled, "--label", &run.label(), &engine.image, "true"]);
    engine.docker(&["create", "--name", &name, &engine.image, "true"]); // as of Compose and of packages
    engine.docker(&["volume", "create", "--label", &run.label(), &labelled]);
    let _volume_and_image = Named(&engine, labelled.clone());
    run.build(&labelled, &run.label());
    let own = root().join(format!("memledger-tests-{}/{}", run.id, cgroup.id));
    std::fs::create_dir_all(&own).expect("a cgroup");
    let mut process = sleep(&run.id);
    let place = run.path().join("tmp/mount");
    std::fs::create_dir(&place).expect("a folder");
    let mounted = Command::new("mount").args(["-t", "tmpfs", "none"]).arg(&place).status();
    assert!(mounted.expect("mount runs").success());

    let (kinds, text) = run.left();
    assert_eq!(kinds, ["container", "image", "volume", "cgroup", "mount", "process", "file"], "{text}");
    for expected in [&labelled, &name, &own.display().to_string(), &place.display().to_string()] {
        assert!(text.contains(expected.as_str()), "{expected}: {text}");
    }
    assert!(!text.contains(&stranger) && !text.contains(&elsewhere.0.path().display().to_string()), "{text}");

    assert!(run.script("remove").status.success());
    process.0.wait().expect("it was killed");
    let (kinds, text) = run.left();
    assert_eq!(kinds, ["file"], "{text}");
    for kept in [
        &["inspect", stranger.as_str()][..],
        &["volume", "inspect", &stranger],
        &["image", "inspect", &stranger],
    ] {
        engine.docker(kept);
    }
    assert!(cgroup.pids().contains(&others.0.id()));
    drop(named);
}

/// A mount in a folder, removed when dropped.
struct Mount(tempfile::TempDir);

impl Mount {
    fn new(folder: tempfile::TempDir) -> Self {
        let mounted = Command::new("mount").args(["-t", "tmpfs", "none"]).arg(folder.path()).status();
        assert!(mounted.expect("mount runs").success());
        Self(folder)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}
