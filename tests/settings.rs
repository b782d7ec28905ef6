//! `memledger config`, and the real binary with settings from flags, variables and a file.

use std::process::{Command, Output, Stdio};

use crate::support::{binary, run};

fn with_environment(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    Command::new(binary()).args(arguments).envs(variables.iter().copied()).output().expect("memledger runs")
}

#[test]
fn config_check_prints_every_error_and_no_secret() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("memledger.yaml");
    let path = file.to_str().unwrap();
    std::fs::write(
        &file,
        "sample.interval: soon\notlp:\n  headers: hunter2\n  endpont: x\nlog.level: loud\n",
    )
    .unwrap();
    // neither flags nor variables count: the file is checked
    let output = with_environment(&["config", "check", path], &[("MEMLEDGER_SAMPLE_INTERVAL", "1s")]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    for line in [1, 3, 4, 5] {
        assert_eq!(
            text.lines().filter(|error| error.starts_with(&format!("{path}:{line}: "))).count(),
            1,
            "{text}"
        );
    }
    assert!(text.ends_with(": 4 errors\n") && !text.contains("hunter2"), "{text}");

    let web = dir.path().join("web.yml");
    std::fs::write(&web, "basic_auth_users: {ann: hunter2}\n").unwrap();
    std::fs::write(&file, format!("web.config.file: {}\n", web.display())).unwrap();
    let (code, _, text) = run(&["config", "check", path]);
    assert_eq!(code, Some(1));
    assert!(text.contains("web.yml:1: the password hash of \"ann\"") && !text.contains("hunter2"), "{text}");

    std::fs::remove_file(&web).unwrap();
    let (code, _, text) = run(&["config", "check", path]);
    let missing = format!("cannot read the web configuration {}: No such file", web.display());
    assert!(code == Some(1) && text.contains(&missing), "{code:?} {text}");

    std::fs::write(&file, "sample.interval: 2s\n").unwrap();
    let (code, out, text) = run(&["config", "check", path]);
    assert_eq!((code, out), (Some(0), format!("{path}: no errors\n")), "{text}");
    let (code, _, text) = run(&["config", "check", "/nonexistent.yaml"]);
    assert_eq!(code, Some(3));
    assert!(text.contains("cannot read the settings file /nonexistent.yaml: No such file"), "{text}");
}

#[test]
fn config_show_names_the_origin_of_each_value_and_hides_secrets() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("memledger.yaml");
    std::fs::write(&file, "log.level: warn\notlp.headers: [authorization=hunter2]\n").unwrap();
    let flag = format!("--config.file={}", file.display());
    let variables = [
        ("MEMLEDGER_SAMPLE_INTERVAL", "2s"),
        ("MEMLEDGER_CRI_ENDPOINT", ""),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector.example:4318/hunter2?key=hunter2"),
        ("OTEL_EXPORTER_OTLP_LOGS_TIMEOUT", "1500"),
    ];
    let output = with_environment(&["config", "show", &flag, "--gpu.interval=3s", "--json"], &variables);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let all: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    let of = |key: &str| {
        all.iter().filter(|value| value["key"] == key).map(ToString::to_string).collect::<Vec<_>>()
    };
    let file = file.display();
    assert_eq!(of("gpu.interval"), [r#"{"key":"gpu.interval","origin":"--gpu.interval","values":["3s"]}"#]);
    assert_eq!(
        of("sample.interval"),
        [r#"{"key":"sample.interval","origin":"MEMLEDGER_SAMPLE_INTERVAL","values":["2s"]}"#]
    );
    assert_eq!(
        of("cri.endpoint"),
        [r#"{"key":"cri.endpoint","origin":"MEMLEDGER_CRI_ENDPOINT","values":[]}"#]
    );
    assert_eq!(of("log.level"), [format!(r#"{{"key":"log.level","origin":"{file}:1","values":["warn"]}}"#)]);
    assert_eq!(of("log.format"), [r#"{"key":"log.format","origin":"default","values":["logfmt"]}"#]);
    assert_eq!(
        of("otlp.headers"),
        [format!(r#"{{"key":"otlp.headers","origin":"{file}:2","values":null}}"#)]
    );
    let timeouts = of("otlp.timeout");
    assert!(timeouts.len() == 2 && timeouts[1].contains("OTEL_EXPORTER_OTLP_LOGS_TIMEOUT"), "{timeouts:?}");
    assert!(timeouts[1].contains(r#""signal":"logs","values":["1500ms"]"#), "{timeouts:?}");
    assert_eq!(of("otlp.endpoint").len(), 3, "its own, and that of each signal that is on: {text}");
    assert!(
        of("otlp.endpoint")
            .iter()
            .any(|value| value.contains(r#""values":["http://collector.example:4318"]"#)),
        "{text}"
    );
    assert!(!text.contains("hunter2"), "{text}");
    let (code, table, _) = run(&["config", "show", "--gpu.interval=3s"]);
    let row = table.lines().find(|line| line.starts_with("gpu.interval ")).unwrap();
    assert_eq!(
        (code, row.split_whitespace().collect::<Vec<_>>()),
        (Some(0), vec!["gpu.interval", "3s", "--gpu.interval"])
    );
    assert_eq!(run(&["config", "show", "--gpu.interval=soon"]).0, Some(2));
}

#[test]
fn config_show_shows_what_is_in_force() {
    let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector.example:4318");
    let show = |flags: &[&str], variables: &[(&str, &str)]| {
        let output = with_environment(&[&["config", "show"][..], flags].concat(), variables);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        let [table, errors] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        (table.lines().map(words).collect::<Vec<_>>(), errors)
    };
    let has = |table: &[String], line: &str| table.iter().any(|row| row == line);
    let (table, errors) =
        show(&[], &[endpoint, ("OTEL_LOGS_EXPORTER", "none"), ("OTEL_TRACES_EXPORTER", "x")]);
    assert!(has(&table, "otlp.metrics true default") && has(&table, "otlp.logs false OTEL_LOGS_EXPORTER"));
    assert!(!table.iter().any(|row| row.ends_with("(logs only)")), "nothing else is set for them: {table:?}");
    assert!(!errors.contains("OTEL_LOGS_EXPORTER"), "{errors}");
    let (table, errors) = show(&[], &[endpoint, ("OTEL_SDK_DISABLED", "true")]);
    for signal in ["metrics", "logs"] {
        assert!(has(&table, &format!("otlp.{signal} false OTEL_SDK_DISABLED")), "{table:?}");
    }
    assert!(errors.contains("OTEL_SDK_DISABLED=true: the OTLP export is off"), "{errors}");
    let (_, errors) = show(&[], &[endpoint, ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")]);
    assert!(errors.contains("OTEL_EXPORTER_OTLP_TIMEOUT is ignored"), "{errors}");
    let (table, _) = show(&["--no-collector.process"], &[]);
    for collector in ["process", "shm", "pss"] {
        assert!(has(&table, &format!("collector.{collector} false --no-collector.process")), "{table:?}");
    }
}

#[test]
fn traces_alone_are_no_outlet() {
    let flags = [
        "--web.listen-address=",
        "--otlp.endpoint=http://127.0.0.1:1",
        "--no-otlp.metrics",
        "--no-otlp.logs",
    ];
    let (code, _, text) = run(&[&["serve", "--otlp.traces"][..], &flags[..]].concat());
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("neither metrics nor events are exported"), "{text}");
}

#[test]
fn closed_standard_output_is_not_a_panic() {
    for verb in
        [&["doctor", "--state.path="][..], &["config", "show"], &["healthcheck", "--web.listen-address="]]
    {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output =
            Command::new(binary()).args(verb).stdout(Stdio::from(writer)).output().expect("memledger runs");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(matches!(output.status.code(), Some(0 | 1)) && !text.contains("panic"), "{verb:?}: {text}");
    }
}

#[test]
fn variable_that_is_not_utf8_is_rejected() {
    use std::os::unix::ffi::OsStrExt;
    let value = std::ffi::OsStr::from_bytes(b"1\xffs");
    let output =
        Command::new(binary()).arg("serve").env("MEMLEDGER_SAMPLE_INTERVAL", value).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("MEMLEDGER_SAMPLE_INTERVAL: "), "{text}");
}

#[test]
fn help_of_a_command_fits_a_screen_and_completions_are_small() {
    for (command, lines) in [
        ("ps", 44),
        ("why", 44),
        ("events", 44),
        ("runs", 44),
        ("advise", 44),
        ("cleanup", 44),
        ("serve", 60),
    ] {
        let output = with_environment(&[command, "--help"], &[("COLUMNS", "100")]);
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.lines().count() <= lines && text.contains("[env: MEMLEDGER_CONFIG_FILE]"), "{text}");
        assert!(text.contains("Example: "), "{text}");
        if command == "serve" {
            continue;
        }
        assert!(text.find("--json") < text.find("--config.file"), "its own options come first: {text}");
        assert!(text.contains("Exit status: 0 "), "{text}");
    }
    let output = with_environment(&["serve", "--help-all"], &[("COLUMNS", "100")]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains("--[no-]collector.gpu") && text.contains("[possible values: debug, info, warn, error]"),
        "{text}"
    );
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(run(&["package-files", folder.path().to_str().unwrap()]).0, Some(0));
    let completions: Vec<String> = ["memledger.bash", "_memledger", "memledger.fish"]
        .map(|name| std::fs::read_to_string(folder.path().join("completions").join(name)).unwrap())
        .into();
    assert!(completions.iter().map(String::len).sum::<usize>() < 100_000);
    for text in completions {
        for word in ["kernel-log", "no-collector.gpu", "otlp.endpoint", "logfmt"] {
            assert!(text.contains(word), "{word}");
        }
    }
}

#[test]
fn later_flag_replaces_an_earlier_one() {
    let (code, table, _) = run(&["config", "show", "--gpu.interval=3s", "--gpu.interval=5s"]);
    assert_eq!(code, Some(0));
    assert!(table.lines().any(|line| line.split_whitespace().take(2).eq(["gpu.interval", "5s"])), "{table}");
}

/// Runs memledger with another /etc, whose settings file has this text.
fn with_default_file(text: Option<&str>, arguments: &[&str]) -> Output {
    let etc = tempfile::tempdir().unwrap();
    if let Some(text) = text {
        std::fs::create_dir(etc.path().join("memledger")).unwrap();
        std::fs::write(etc.path().join("memledger/memledger.yml"), text).unwrap();
    }
    let script = "mount --bind \"$1\" /etc && shift && exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, "sh"]).arg(etc.path()).arg(binary()).args(arguments);
    command.output().expect("memledger runs")
}

#[test]
fn config_check_without_a_name_reads_the_default_file() {
    const DEFAULT: &str = "/etc/memledger/memledger.yml";
    let of = |output: Output| {
        let [out, errors] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        (output.status.code(), out + &errors)
    };
    let (code, text) = of(with_default_file(Some("sample.interval: 2s\n"), &["config", "check"]));
    assert_eq!((code, text), (Some(0), format!("{DEFAULT}: no errors\n")));
    let (code, text) = of(with_default_file(Some("sample.intervall: 2s\n"), &["config", "check"]));
    let says = "is not a known setting; did you mean sample.interval?";
    assert!(code == Some(1) && text.contains(&format!("{DEFAULT}:1: ")) && text.contains(says), "{text}");
    let (code, text) = of(with_default_file(None, &["config", "check"]));
    assert!(code == Some(3) && text.contains("No such file") && text.contains("name a FILE"), "{text}");

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("other.yml");
    std::fs::write(&file, "sample.interval: 2s\n").unwrap();
    let path = file.to_str().unwrap();
    for arguments in [&["config", "check", path][..], &["config", "check", "--config.file", path]] {
        let (code, text) = of(with_default_file(Some("wrong\n"), arguments));
        assert_eq!((code, text), (Some(0), format!("{path}: no errors\n")));
    }
    let by_variable = with_environment(&["config", "check"], &[("MEMLEDGER_CONFIG_FILE", path)]);
    assert_eq!(of(by_variable), (Some(0), format!("{path}: no errors\n")));
    assert_eq!(run(&["config", "check", "--config.file="]).0, Some(3), "there is none");
    assert_eq!(run(&["config", "check", path, "--config.file", path]).0, Some(2));
}

#[test]
fn mistyped_variable_is_named_wherever_settings_are_read() {
    let mistake = [("MEMLEDGER_WEB_LISTEN_ADRESS", ":1")];
    let says = "the environment variable MEMLEDGER_WEB_LISTEN_ADRESS is no setting and is ignored; did you mean MEMLEDGER_WEB_LISTEN_ADDRESS?";
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("memledger.yml");
    std::fs::write(&file, "sample.interval: 2s\n").unwrap();
    let check = ["config", "check", file.to_str().unwrap()];
    let nothing = ["serve", "--web.listen-address="]; // it ends at once
    for (arguments, code) in [
        (&check[..], 1),
        (&["config", "show"], 0),
        (&nothing, 2),
        (&["events", "--state.path=", "--local.socket=/nonexistent", "--limit=1"], 0),
    ] {
        let output = with_environment(arguments, &mistake);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {text}");
        assert_eq!(text.matches(says).count(), 1, "{arguments:?}: {text}");
    }
    let output = with_environment(&nothing, &mistake);
    let log = String::from_utf8_lossy(&output.stderr);
    let first = log.lines().next().unwrap_or_default();
    assert!(first.contains("level=warn") && first.contains(says), "the first line of the log: {log}");

    // those of a Service named memledger and of other parts of memledger are no mistakes
    let others = [
        ("MEMLEDGER_SERVICE_HOST", "10.0.0.1"),
        ("MEMLEDGER_SERVICE_PORT_METRICS", "10853"),
        ("MEMLEDGER_PORT", "tcp://10.0.0.1:10853"),
        ("MEMLEDGER_PORT_10853_TCP", "tcp://10.0.0.1:10853"),
        ("MEMLEDGER_DEBUG", "1"),
        ("MEMLEDGER_IMAGE", "x"),
        ("MEMLEDGER_TEST_RUN", "x"),
    ];
    for arguments in [&check[..], &["config", "show"], &nothing] {
        let output = with_environment(arguments, &others);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!text.contains("environment variable"), "{arguments:?}: {text}");
    }
    assert_eq!(with_environment(&check, &others).status.code(), Some(0));
    // one that is like no setting may be somebody's own
    let output = with_environment(&check, &[("MEMLEDGER_VERSION", "7")]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(0) && text.contains("MEMLEDGER_VERSION is no setting"), "{text}");
}

#[test]
fn times_of_the_command_line_are_local() {
    let unlisted = ["--state.path=", "--local.socket=/nonexistent"];
    for time in
        ["2026-11-28", "2026-11-28 16:00", "00:00", "00:00:00", "yesterday", "24h", "2026-11-28T16:00:00Z"]
    {
        let since = format!("--since={time}");
        let (code, _, text) = run(&[&["events", &since][..], &unlisted].concat());
        assert_eq!(code, Some(0), "{time}: {text}");
    }
    for verb in ["events", "runs"] {
        let (code, _, text) = run(&[&[verb, "--since=24"][..], &unlisted].concat());
        assert!(code == Some(2) && text.contains("a number needs a unit: 24m, 24h or 24d"), "{text}");
    }
}

#[test]
fn unknown_verb_exits_with_2_and_prints_the_command_that_is_meant() {
    for (line, meant) in [
        ("my-train", "memledger why my-train"),
        ("status", "memledger ps"),
        ("logs my-train", "memledger why my-train --logs"),
        ("version", "memledger -V"),
        ("-v", "memledger -V"),
        ("evnts", "memledger events"),
        ("serve --port 9000", "--web.listen-address"),
    ] {
        let (code, _, text) = run(&line.split(' ').collect::<Vec<_>>());
        assert!(code == Some(2) && text.contains(meant), "{line}: {code:?} {text}");
        assert!(!text.contains("--report.dir"), "{line}: {text}");
    }
}
