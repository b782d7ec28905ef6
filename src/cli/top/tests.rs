//! The screens, drawn into memory and compared with `tests/screens`: `UPDATE=1` writes them anew.

use std::collections::BTreeMap;
use std::path::Path;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::draw::draw;
use super::state::{KeyAction, ScreenState};
use super::theme::Theme;
use crate::cli::overview_source::NewestKills;
use crate::discover::RuntimeKind;
use crate::events::{LedgerEvent, Role};
use crate::overview::history::Track;
use crate::overview::{ContainerUse, GpuOverview, HostUse, Overview, ProcessUse, Sort, table};

const MIB: f64 = (1 << 20) as f64;
const GIB: f64 = (1 << 30) as f64;
/// Noon of a day in UTC.
const NOW: f64 = 1_795_780_800.0;

const UNICODE: Theme = Theme { has_color: true, has_blocks: true };
const ASCII: Theme = Theme { has_color: false, has_blocks: false };

fn container(name: &str, used: f64, limit: f64) -> ContainerUse {
    ContainerUse {
        name: name.to_owned(),
        id: format!("{name:0>64}"),
        runtime: RuntimeKind::Docker,
        started: Some(NOW - 12.0 * 3600.0),
        unreclaimable_bytes: Some(used * GIB),
        limit_bytes: Some(limit * GIB),
        headroom_bytes: Some((limit - used) * GIB),
        limit_ratio: Some(used / limit),
        cpu_cores: Some(1.5),
        ..ContainerUse::default()
    }
}

/// A host with a training that grows, one that uses two GPUs, and a notebook.
fn overview() -> Overview {
    let mut track = Track::new(5.0);
    for second in (0..3600).step_by(5).filter(|second| !(1500..1800).contains(second)) {
        let used = 20.0 + f64::from(second) / 200.0;
        track.add(NOW - 3600.0 + f64::from(second), Some(used * GIB), Some(14.2 * GIB));
    }
    let piper = ContainerUse {
        growth_bytes_per_second: Some(GIB / 1200.0),
        seconds_to_limit: Some(5.8 * 1200.0),
        role_bytes: BTreeMap::from([("trainer".into(), 30.0 * GIB), ("dataloader_worker".into(), 8.2 * GIB)]),
        processes_by_role: BTreeMap::from([("trainer".into(), 1.0), ("dataloader_worker".into(), 4.0)]),
        gpu_bytes: Some(14.2 * GIB),
        gpus: BTreeMap::from([("0".into(), 14.2 * GIB)]),
        gpu_utilization_ratio: Some(0.93),
        gpu_holder_bytes: BTreeMap::from([("tensors".into(), 10.0 * GIB), ("torch_cache".into(), 4.2 * GIB)]),
        oom_kills: Some(2.0),
        last_oom_kill: Some(NOW - 180.0),
        history: Some(track),
        processes: Some(vec![
            ProcessUse {
                pid: 4711,
                name: "python".into(),
                role: Role::Trainer,
                rss_bytes: 31 << 30,
                pss_bytes: Some(30 << 30),
                gpu_bytes: Some(14 << 30),
            },
            ProcessUse {
                pid: 4712,
                name: "pt_data_worker".into(),
                role: Role::DataloaderWorker,
                rss_bytes: 3 << 30,
                pss_bytes: None,
                gpu_bytes: None,
            },
        ]),
        ..container("piper1-gpl-train-1", 38.2, 44.0)
    };
    let llama = ContainerUse {
        gpu_bytes: Some(96.0 * GIB),
        gpus: BTreeMap::from([("0".into(), 40.0 * GIB), ("1".into(), 56.0 * GIB)]),
        gpu_utilization_ratio: Some(0.4),
        ..container("team-a/llama-7b-finetune-0/trainer", 61.0, 128.0)
    };
    let gpu = |index: &str, used: f64, holders: &[(&str, f64)]| GpuOverview {
        gpu: index.to_owned(),
        model: "NVIDIA H100 80GB HBM3".into(),
        memory_total_bytes: Some(80.0 * GIB),
        memory_used_bytes: Some(used * GIB),
        utilization_ratio: Some(0.97),
        unattributed_bytes: Some(200.0 * MIB),
        holders: holders.iter().map(|(name, bytes)| ((*name).to_owned(), bytes * GIB)).collect(),
        ..GpuOverview::default()
    };
    Overview {
        at: NOW,
        host: HostUse {
            memory_total_bytes: Some(125.6 * GIB),
            memory_available_bytes: Some(13.3 * GIB),
            swap_total_bytes: Some(8.0 * GIB),
            swap_used_bytes: Some(0.5 * GIB),
            memory_waiting_ratio: Some(0.02),
            oom_kills: Some(2.0),
        },
        gpus: vec![
            gpu("0", 54.4, &[("team-a/llama-7b-finetune-0/trainer", 40.0), ("piper1-gpl-train-1", 14.2)]),
            gpu("1", 56.2, &[("team-a/llama-7b-finetune-0/trainer", 56.0)]),
        ],
        containers: vec![container("notebook", 1.0, 16.0), llama, piper],
        ..Overview::default()
    }
}

fn kill() -> LedgerEvent {
    serde_json::from_value(serde_json::json!({
        "type": "oom_kill", "id": 1, "at": NOW - 180.0, "boot_id": "b", "process": "pt_data_worker", "pid": 4713, "owner": "container",
        "container_name": "piper1-gpl-train-1", "container_id": "c", "role": "dataloader_worker", "victim": "child", "number": 2,
        "scope": "container", "anon_bytes": 3_221_225_472_u64, "method": "kmsg", "evidence": [],
    }))
    .expect("an event")
}

fn state(theme: Theme) -> ScreenState {
    let mut state = ScreenState::new("gpu7".into(), true, Sort::Limit, theme);
    state.set_overview(Ok(overview()));
    state.kills = Some(NewestKills { events: vec![kill()], is_incomplete: false });
    state
}

fn press(state: &mut ScreenState, keys: &[KeyCode]) -> Vec<KeyAction> {
    keys.iter().map(|code| state.press(KeyEvent::new(*code, KeyModifiers::NONE))).collect()
}

fn screen(state: &ScreenState, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal");
    terminal.draw(|frame| draw(frame, state)).expect("a frame");
    let buffer = terminal.backend().buffer();
    let lines = (0..height).map(|y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>());
    // the time is that of this machine's zone
    lines.map(|line| line.trim_end().to_owned() + "\n").collect::<String>().replacen(
        &super::draw::time(NOW),
        "12:00:00",
        1,
    )
}

fn assert_is(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/screens/{name}.txt"));
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, text).expect("written");
    }
    let wanted = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(text == wanted, "{name} differs from {}; UPDATE=1 writes it anew:\n{text}", path.display());
}

#[test]
fn list_shows_who_is_next_and_who_was_killed() {
    for (name, theme, width, height) in
        [("list-80x24", UNICODE, 80, 24), ("list-160x20", UNICODE, 160, 20), ("list-ascii", ASCII, 100, 20)]
    {
        assert_is(name, &screen(&state(theme), width, height));
    }
    assert_is("list-20x6", &screen(&state(UNICODE), 20, 6));
}

#[test]
fn container_has_its_roles_processes_and_last_hour() {
    for (name, theme) in [("container", UNICODE), ("container-ascii", ASCII)] {
        let mut state = state(theme);
        press(&mut state, &[KeyCode::Enter]);
        assert!(state.container().is_some_and(|id| id.ends_with("piper1-gpl-train-1")));
        assert_is(name, &screen(&state, 100, 24));
    }
}

#[test]
fn table_of_ps_is_that_of_the_list() {
    let mut overview = overview();
    overview.containers.sort_by(|one, other| Sort::Limit.compare(one, other));
    for container in &mut overview.containers {
        (container.history, container.processes) = (None, None);
    }
    assert_is("ps", &table::text(&overview, 100));
    assert!(table::text(&overview, 100).lines().all(|line| line.chars().count() <= 100));
    assert_eq!(
        table::text(&Overview::default(), 80),
        "No container is running.\n\nHOST  memory - / - (-), swap - / -\n"
    );
}

#[test]
fn keys_select_filter_sort_and_run_commands() {
    let mut state = state(UNICODE);
    let names = |state: &ScreenState| {
        state.containers().iter().map(|container| container.name.clone()).collect::<Vec<_>>()
    };
    const LLAMA: &str = "team-a/llama-7b-finetune-0/trainer";
    assert_eq!(names(&state), ["piper1-gpl-train-1", LLAMA, "notebook"]);
    let started = press(&mut state, &[KeyCode::Down, KeyCode::Char('w')]);
    let llama = (LLAMA.to_owned(), state.containers()[1].id.clone());
    assert_eq!(started[1], KeyAction::RunCommand("why", Some(llama)));
    state.set_output(&format!("memledger why {LLAMA}"), &["a line"; 50].join("\n"));
    press(&mut state, &[KeyCode::End, KeyCode::Up]);
    assert!(screen(&state, 40, 10).contains("a line"));
    press(&mut state, &[KeyCode::Esc, KeyCode::Char('s'), KeyCode::Char('s')]);
    assert_eq!((state.sort_word(), names(&state)[0].as_str()), ("gpu", LLAMA));
    press(&mut state, &[KeyCode::Char('/'), KeyCode::Char('B'), KeyCode::Char('q'), KeyCode::Backspace]);
    press(&mut state, &[KeyCode::Char('o'), KeyCode::Backspace, KeyCode::Enter]);
    assert_eq!((names(&state), state.filter.as_str()), (vec![LLAMA.to_owned(), "notebook".to_owned()], "B"));
    press(&mut state, &[KeyCode::Esc, KeyCode::Enter, KeyCode::Char('?')]);
    assert!(screen(&state, 100, 20).contains("sort by: nearest to the limit"));
    let back = [KeyCode::Char('q'), KeyCode::Char('q')];
    press(&mut state, &back);
    assert_eq!(press(&mut state, &[KeyCode::Char('q')]), [KeyAction::Quit]);
}

#[test]
fn output_that_comes_late_stays_away() {
    let mut state = state(UNICODE);
    let first = press(&mut state, &[KeyCode::Char('W'), KeyCode::Esc, KeyCode::Char('W')]);
    // one at a time
    assert_eq!((&first[0], &first[2]), (&KeyAction::RunCommand("why", None), &KeyAction::None));
    let list = screen(&state, 80, 24);
    state.set_output("memledger why", "a late line");
    assert_eq!(screen(&state, 80, 24), list);
    assert_eq!(press(&mut state, &[KeyCode::Char('W')]), [KeyAction::RunCommand("why", None)]);
}

#[test]
fn processes_of_a_container_scroll() {
    let mut state = state(UNICODE);
    press(&mut state, &[KeyCode::Enter, KeyCode::Down, KeyCode::Down]);
    let text = screen(&state, 100, 24);
    assert!(text.contains("pt_data_worker") && !text.contains("python  "), "{text}");
}

#[test]
fn what_is_missing_is_said() {
    let mut state = ScreenState::new("gpu7".into(), false, Sort::Limit, UNICODE);
    assert!(screen(&state, 100, 10).contains("Taking two samples..."));
    state.set_overview(Err("no memledger serve responds".into()));
    assert!(screen(&state, 100, 10).contains("no memledger serve responds"));
    state.set_overview(Ok(Overview { at: NOW, ..Overview::default() }));
    state.kills = Some(NewestKills { events: vec![], is_incomplete: true });
    let text = screen(&state, 120, 10);
    assert!(text.contains("No container is running.") && text.contains("sampled by top itself"), "{text}");
    assert!(text.contains("No OOM kill is known; not all of the last 24 hours can be read"), "{text}");
    let mut selected = super::tests::state(UNICODE);
    press(&mut selected, &[KeyCode::Enter]);
    selected.set_overview(Ok(Overview { at: NOW, ..Overview::default() }));
    assert!(screen(&selected, 100, 10).contains("It does not run any more."));
}

#[test]
fn hostile_names_stay_text_and_many_containers_are_drawn() {
    let mut state = state(UNICODE);
    let name = |number: usize| format!("\u{1b}[2J\u{7}<b>{number}\u{202e}évil\nline");
    let many: Vec<ContainerUse> =
        (0..500).map(|number| container(&name(number), 1.0, 2.0 + number as f64)).collect();
    state.set_overview(Ok(Overview { containers: many, ..overview() }));
    press(&mut state, &[KeyCode::End]);
    let text = screen(&state, 120, 40);
    assert!(!text.chars().any(|each| each.is_control() && each != '\n'), "{text:?}");
    assert!(text.contains("500 containers") && text.contains("<b>499"), "{text}");
}
