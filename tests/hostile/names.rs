//! Names, labels and settings of 64 KiB of control characters. Unprivileged; the labels are those of a real Docker container.

use super::{AttackTest, Attacker, has_memory};
use crate::support::docker::{Engine, of, unique};

/// Returns 64 KiB of characters that may break a terminal, a log or a parser; no NUL, which a command line cannot contain.
fn hostile_text(is_allowed: impl Fn(char) -> bool) -> String {
    let characters =
        "\u{1}\u{7}\u{8}\t\n\u{b}\r\u{1b}[2J\u{7f}\u{80}\u{9b}\u{202e}\u{2028}\u{feff}\u{fffd}\"\\{}=,";
    let mut all = characters.chars().filter(|character| is_allowed(*character)).cycle();
    let mut text = String::new();
    while text.len() < 64 << 10 {
        text.extend(all.next());
    }
    text
}

/// Asserts that responses and log lines are short and have no control characters.
fn assert_sanitized(test: &AttackTest) {
    for path in ["/metrics", "/", "/api/v1/containers"] {
        let (status, text) = test.memledger.get(path);
        assert_eq!(status, 200, "{path}");
        assert!(text.len() < 1 << 20, "{path}: {} bytes", text.len());
    }
    for (name, labels, _) in &test.memledger.metrics().series {
        for (label, value) in labels {
            assert!(value.chars().count() <= 256, "{name} {label}: {} characters", value.chars().count());
            assert!(!value.chars().any(char::is_control), "{name} {label}: {value:?}");
        }
    }
    test.memledger.api();
    let log = test.memledger.log();
    let line = log.lines().find(|line| line.chars().any(char::is_control) || line.len() > 2_000);
    assert_eq!(line, None);
}

#[test]
fn control_characters_of_process_names_are_escaped() {
    let mut attacker = Attacker::limited(64);
    let mut test = AttackTest::new(&[attacker.name()], &[]);
    assert_eq!(attacker.run(include_str!("names.py"), &[]), "ready");
    test.run(|metrics| {
        has_memory(metrics, attacker.name())?;
        let processes = metrics.sum("memledger_container_processes", &of(attacker.name()));
        (processes == 3.0).then_some(()).ok_or_else(|| format!("{processes} processes"))
    });
    assert_sanitized(&test);
    let (_, text) = test.memledger.get("/api/v1/containers");
    let api: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    for container in api["containers"].as_array().expect("a list") {
        for process in container["processes"].as_array().expect("a list") {
            let name = process["name"].as_str().expect("a name");
            assert!(!name.chars().any(char::is_control), "{name:?}");
        }
    }
}

#[test]
fn labels_and_settings_of_64_kib_are_truncated() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("labels");
    let text = hostile_text(|_| true);
    let key = hostile_text(|character| !character.is_whitespace() && character != '=');
    let flags = [
        format!("--label=com.docker.compose.project={text}"),
        format!("--label=com.docker.compose.service={text}"),
        format!("--label={key}=x"),
        format!("--env=PYTORCH_CUDA_ALLOC_CONF={text}"),
        format!("--env=MEMLEDGER_TEST={text}"),
    ];
    let flags: Vec<_> = flags.iter().map(String::as_str).collect();
    let container = engine.run(&name, &flags, &["sleep", "1000"]);
    let socket = engine.flag();
    let mut test = AttackTest::new(&[&name, container.short_id()], &[&socket]);
    test.run(|metrics| has_memory(metrics, &name));
    assert_sanitized(&test);
}
