//! `ps` and `top` as people run them: a real memledger, real containers, a real terminal.

use std::path::Path;
use std::process::{Command, Stdio};

use fake_nvml::{FakeNvml, Process, State};
use serde_json::Value;

use crate::support::docker::{Container, Engine, unique};
use crate::support::{Memledger, binary, eventually, run};

const GIB: u64 = 1 << 30;
/// Holds 64 MiB that the kernel cannot take back.
const HOLDS: &str =
    "held = bytearray(b'x') * (64 << 20)\nprint('ready', flush=True)\nimport signal\nsignal.pause()";

/// A container on a GPU of the fake driver, and the flags with which memledger finds both.
struct Scene {
    container: Container,
    folder: tempfile::TempDir,
    fake: FakeNvml,
    engine: Engine,
}

impl Scene {
    fn start(engine: &Engine, what: &str) -> Self {
        let name = unique(what);
        let container = engine.run_python(&name, &["--memory=128m"], HOLDS);
        let pid: u32 = container.docker(&["inspect", "-f", "{{.State.Pid}}"]).parse().expect("a pid");
        let folder = tempfile::tempdir().unwrap();
        let mut state = State::with_gpus(1);
        state.gpus[0].memory.total = 80 * GIB;
        state.gpus[0].memory.used = 50 * GIB;
        state.gpus[0].processes = vec![Process::compute(pid, Some(40 * GIB))];
        let fake = FakeNvml::install(folder.path(), &state).unwrap();
        Self { container, folder, fake, engine: engine.clone() }
    }

    fn name(&self) -> &str {
        &self.container.name
    }

    /// Returns the flags of a command; `socket` is that of the service, if one is to be found.
    fn flags(&self, socket: &Path) -> Vec<String> {
        vec![
            self.engine.flag(),
            "--podman.socket=".to_owned(),
            format!("--gpu.nvml-library={}", self.fake.path().display()),
            format!("--local.socket={}", socket.display()),
            format!("--state.path={}/state", self.folder.path().display()),
        ]
    }

    fn ps(&self, socket: &Path, more: &[&str]) -> (String, String) {
        let flags = self.flags(socket);
        let words = std::iter::once("ps").chain(more.iter().copied()).chain(flags.iter().map(String::as_str));
        let (code, output, errors) = run(&words.collect::<Vec<_>>());
        assert_eq!(code, Some(0), "{output}{errors}");
        (output, errors)
    }
}

/// A terminal of a size that it keeps, and what runs in it.
struct Terminal {
    server: String,
}

impl Terminal {
    fn start(size: (u16, u16), command: &str) -> Self {
        let server = unique("tmux");
        let [width, height] = [size.0, size.1].map(|number| number.to_string());
        let this = Self { server };
        let shell = format!("{command}; echo ended with $?; exec sleep 1000");
        this.tmux(&["-f", "/dev/null", "new-session", "-d", "-x", &width, "-y", &height, "sh", "-c", &shell]);
        this
    }

    fn tmux(&self, arguments: &[&str]) -> String {
        let mut command = Command::new("tmux");
        command.args(["-L", &self.server]).args(arguments).env("LANG", "C.UTF-8").env_remove("TMUX");
        let output = command.stdin(Stdio::null()).output().expect("tmux");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn press(&self, key: &str) {
        self.tmux(&["send-keys", key]);
    }

    /// Waits until the screen shows all of these, and returns it.
    fn shows(&self, wanted: &[&str]) -> String {
        eventually(&format!("{wanted:?} on the screen"), || {
            let screen = self.tmux(&["capture-pane", "-p"]);
            if wanted.iter().all(|text| screen.contains(text)) { Ok(screen) } else { Err(screen) }
        })
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.tmux(&["kill-server"]);
    }
}

fn command_of_top(flags: &[String]) -> String {
    format!("{} top {}", binary().display(), flags.join(" "))
}

#[test]
fn ps_and_top_show_who_holds_what_of_a_service() {
    let Some(engine) = Engine::shared() else { return };
    let scene = Scene::start(&engine, "screens");
    let socket = scene.folder.path().join("control.sock");
    let flags = scene.flags(&socket);
    let filter = format!("--container.include=^{}$", scene.name());
    let flags: Vec<&str> =
        flags.iter().map(String::as_str).chain([filter.as_str(), "--reporter.directory="]).collect();
    let _memledger = Memledger::start(&flags);
    eventually("the control socket", || {
        std::os::unix::net::UnixStream::connect(&socket).map_err(|error| error.to_string())
    });
    let (table, errors) = eventually("the GPU", || {
        let (table, errors) = scene.ps(&socket, &[]);
        if table.contains("40.0 GiB") { Ok((table, errors)) } else { Err(table) }
    });
    let row = table.lines().find(|line| line.starts_with(scene.name())).unwrap_or_else(|| panic!("{table}"));
    assert!(row.contains("/ 128.0 MiB") && row.contains("40.0 GiB"), "{table}");
    assert!(
        table.contains(&format!("{} 40.0 GiB", scene.name())) && table.contains("HOST  memory "),
        "{table}"
    );
    assert_eq!(errors, "");
    let (json, _) = scene.ps(&socket, &["--json", "-p"]);
    let lines: Vec<Value> = json.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let kinds: Vec<_> = lines.iter().filter_map(|line| line["type"].as_str()).collect();
    assert_eq!(kinds, ["host", "gpu", "container"], "{json}");
    assert_eq!(lines[2]["processes"][0]["role"], "trainer", "{json}");
    assert!(
        lines[2]["unreclaimable_bytes"].as_f64() > Some(6e7) && lines[2]["gpu_bytes"] == 40.0 * GIB as f64,
        "{json}"
    );

    let flags: Vec<String> = scene.flags(&socket);
    let top = Terminal::start((100, 30), &command_of_top(&flags));
    let list = top.shows(&[scene.name(), "/ 128.0 MiB", "GPU 0", "HOST  memory", "q quit"]);
    assert!(list.contains('█'), "{list}");
    top.press("Enter");
    top.shows(&["roles", "1 trainer", "PROCESS", "headroom"]);
    top.press("w");
    top.shows(&[&format!("memledger why {}", scene.name()), "is running"]);
    top.press("Escape");
    top.shows(&["roles"]);
    top.tmux(&["resize-window", "-x", "70", "-y", "20"]);
    top.press("q");
    top.shows(&[&scene.name()[..8], "Enter details"]);
    top.press("q");
    top.shows(&["ended with 0"]);
}

/// The figures of `ps` that need a collector, as docs/commands.md has them, by the type of their line.
const FIGURES: [(&str, &[(&str, &str)]); 4] = [
    (
        "cgroup",
        &[("container", "unreclaimable_bytes"), ("container", "limit_bytes"), ("container", "cpu_cores")],
    ),
    ("host", &[("host", "memory_total_bytes"), ("host", "memory_available_bytes")]),
    ("process", &[("container", "processes")]),
    ("gpu", &[("gpu", "memory_total_bytes"), ("container", "gpu_bytes")]),
];

#[test]
fn collector_that_is_off_takes_its_own_figures_alone() {
    let Some(engine) = Engine::shared() else { return };
    let scene = Scene::start(&engine, "without");
    let filter = format!("--container.include=^{}$", scene.name());
    for off in FIGURES.iter().map(|(collector, _)| Some(*collector)).chain([None]) {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control.sock");
        let mut flags = scene.flags(&socket);
        flags.retain(|flag| !flag.starts_with("--state.path"));
        flags.extend([format!("--state.path={}/state", folder.path().display()), filter.clone()]);
        flags.push("--reporter.directory=".to_owned());
        flags.extend(off.map(|collector| format!("--no-collector.{collector}")));
        let _memledger = Memledger::start(&flags.iter().map(String::as_str).collect::<Vec<_>>());
        eventually(&format!("the figures without {off:?}"), || {
            let words = ["ps", "--json", "-p", &format!("--local.socket={}", socket.display())];
            let (code, json, errors) = run(&words);
            let lines: Vec<Value> = json.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
            let has = |(kind, figure): &(&str, &str)| {
                lines
                    .iter()
                    .any(|line| line["type"] == *kind && line.get(*figure).is_some_and(|it| !it.is_null()))
            };
            let is_right = FIGURES.iter().all(|(collector, figures)| {
                figures.iter().all(|figure| has(figure) != (off == Some(*collector)))
            });
            let is_listed = json.contains(scene.name()) && errors.is_empty() && code == Some(0);
            if is_right && is_listed { Ok(()) } else { Err(format!("{json}{errors}")) }
        });
    }
}

#[test]
fn ps_and_top_sample_themselves_where_no_service_answers() {
    let Some(engine) = Engine::shared() else { return };
    let scene = Scene::start(&engine, "alone");
    let socket = scene.folder.path().join("no.sock");
    let (table, errors) = scene.ps(&socket, &["--sort=memory"]);
    assert!(table.lines().any(|line| line.starts_with(scene.name()) && line.contains("40.0 GiB")), "{table}");
    assert!(errors.contains("no memledger serve answers here"), "{errors}");
    let flags = scene.flags(&socket);
    let command = format!("NO_COLOR=1 LC_ALL=C {}", command_of_top(&flags));
    let top = Terminal::start((160, 40), &command);
    top.press("/");
    top.shows(&["Enter keeps it"]);
    scene.name().chars().for_each(|key| top.press(&key.to_string()));
    top.press("Enter");
    let list = top.shows(&[scene.name(), "sampled by top itself", "a:"]);
    assert!(list.is_ascii(), "{list}");
    let pid = top.tmux(&["display-message", "-p", "#{pane_pid}"]);
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", pid.trim())).unwrap();
    assert!(
        Command::new("kill").args(["-TERM", children.trim()]).status().is_ok_and(|status| status.success())
    );
    top.shows(&["ended with 0"]);
}

#[test]
fn top_without_a_terminal_says_what_to_do() {
    let (code, output, errors) = run(&["top", "--local.socket="]);
    assert_eq!((code, output.as_str()), (Some(3), ""));
    assert!(errors.contains("needs a terminal") && errors.contains("memledger ps"), "{errors}");
    let (code, _, errors) = run(&["ps", "--sort=age"]);
    assert_eq!(code, Some(2));
    assert!(errors.contains("limit, memory, gpu, cpu, kills, name"), "{errors}");
}
