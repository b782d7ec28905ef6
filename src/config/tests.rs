use std::time::Duration;

use clap::Command;

use super::*;
use crate::parse::container_id::RuntimeKind;

fn load(flags: &[&str]) -> Result<Config, String> {
    let command = arguments(Command::new("memledger").no_binary_name(true));
    let matches = command.try_get_matches_from(flags).map_err(|error| error.to_string())?;
    Config::load(&matches).map_err(|error| error.to_string())
}

/// Returns the parsed arguments of a command with these flags.
pub(super) fn matches(flags: &[&str]) -> clap::ArgMatches {
    arguments(Command::new("memledger").no_binary_name(true)).get_matches_from(flags)
}

#[test]
fn defaults_are_valid() {
    let config = load(&[]).unwrap();
    assert_eq!(config.listen, ["[::]:10853".parse().unwrap()]);
    assert_eq!(config.sample_interval, Duration::from_secs(1));
    assert_eq!(config.filter.settings.len(), 7);
    assert_eq!(config.collectors.len(), 8);
}

#[test]
fn default_cri_endpoints_are_guesses() {
    let found = load(&[]).unwrap().cri;
    assert!(!found.is_explicit && found.sockets.len() == 6);
    let named = load(&["--cri.endpoint=unix:///run/a.sock", "--cri.pod-labels=app.kubernetes.io/name,team"]);
    let named = named.unwrap().cri;
    assert_eq!((named.sockets, named.is_explicit), (vec!["/run/a.sock".into()], true));
    assert_eq!(named.labels[0], ("app.kubernetes.io/name".into(), "label_app_kubernetes_io_name".into()));
    assert_eq!(load(&["--cri.endpoint="]).unwrap().cri.sockets, Vec::<PathBuf>::new());
}

#[test]
fn flag_overrides_file_and_file_overrides_default() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("memledger.yaml");
    std::fs::write(&path, "sample:\n  interval: 2s\npss.interval: 1m\ncollector.gpu: false\n").unwrap();
    let file = format!("--config.file={}", path.display());
    let config = load(&[&file, "--sample.interval=5s"]).unwrap();
    assert_eq!(config.sample_interval, Duration::from_secs(5));
    assert_eq!(config.pss_interval, Duration::from_secs(60));
    assert!(!config.collectors.contains("gpu"));
    std::fs::write(&path, "log.level: info\nsample.interval: soon\n").unwrap();
    let error = load(&[&file]).unwrap_err();
    assert!(error.contains("memledger.yaml:2: sample.interval: \"soon\" is not valid"), "{error}");
}

#[test]
fn default_file_is_read_if_no_other_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let [default, named] = ["memledger.yml", "other.yml"].map(|name| dir.path().join(name));
    std::fs::write(&default, "sample.interval: 2s\n").unwrap();
    std::fs::write(&named, "pss.interval: 1m\n").unwrap();
    let command = || arguments(Command::new("memledger").no_binary_name(true));
    let read = |flags: &[&str], variable: Option<&str>| {
        let environment = |name: &str| variable.filter(|_| name == CONFIG_FILE.1).map(str::to_owned);
        let values = values(&command().get_matches_from(flags), &environment, Some(default.clone())).unwrap();
        Config::read(&values).unwrap()
    };
    let config = read(&[], None);
    assert_eq!((config.sample_interval, config.file.as_ref()), (Duration::from_secs(2), Some(&default)));
    assert_eq!(read(&["--sample.interval=5s"], None).sample_interval, Duration::from_secs(5));
    let flag = format!("--config.file={}", named.display());
    for config in [read(&[&flag], None), read(&[], named.to_str())] {
        assert_eq!((config.sample_interval, config.file.as_ref()), (Duration::from_secs(1), Some(&named)));
    }
    for config in [read(&["--config.file="], None), read(&[], Some(""))] {
        assert_eq!((config.sample_interval, config.file), (Duration::from_secs(1), None));
    }
}

#[test]
fn help_of_serve_has_each_setting_and_commands_take_those_that_concern_them() {
    let help = |taken| {
        arguments_of(Command::new("why"), taken, FlagForm::Help)
            .term_width(100)
            .render_long_help()
            .to_string()
    };
    let of_serve = help(CommandSettings::SERVE);
    for setting in SETTINGS.iter() {
        let flag =
            if setting.is_switch { format!("--[no-]{}", setting.key) } else { format!("--{} ", setting.key) };
        assert!(of_serve.contains(&flag) && of_serve.contains(&setting.variable()), "{flag}");
    }
    let rejected = arguments_of(Command::new("why"), CommandSettings::HOST, FlagForm::Help)
        .try_get_matches_from(["why", "--web.max-requests=1"]);
    assert!(rejected.is_err(), "it means nothing there");
}

#[test]
fn rejects_invalid_values_with_what_is_expected() {
    for (flag, says) in [
        ("--sample.interval=1ms", "from 100ms"),
        ("--container.include=(", "regular expression"),
        ("--web.listen-address=nowhere", ":PORT"),
        ("--web.telemetry-path=/", "such as /metrics"),
        ("--log.level=loud", "debug, info, warn, error"),
        ("--container.label==x", "KEY=VALUE"),
        ("--container.settings=run", "not run"),
        ("--web.enable-api=perhaps", "true or false"),
        ("--web.max-requests=-1", "whole number"),
        ("--state.max-size=64", "such as 512KiB"),
        ("--state.max-size=512KiB", "at least 1.0 MiB"),
        ("--state.max-size=99999999999999GiB", "such as 512KiB"),
        ("--state.retention=1m", "from 1h to 3660d"),
        ("--oom.kernel-log=journal", "auto, device, syslog, off"),
        ("--cri.pod-labels=team,a b", "such as app.kubernetes.io/name"),
        ("--web.lisen-address=:1", "web.listen-address"),
    ] {
        let error = load(&[flag]).unwrap_err();
        assert!(error.contains(says), "{flag}: {error}");
    }
}

#[test]
fn errors_omit_secrets() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("memledger.yaml");
    std::fs::write(&path, "otlp.headers: hunter2\n").unwrap();
    for (flag, says) in [
        ("--otlp.headers=authorization hunter2".to_owned(), "--otlp.headers: its value is not valid"),
        ("--otlp.endpoint=http://me:hunter2@collector:4318".to_owned(), "without user and password"),
        (format!("--config.file={}", path.display()), "memledger.yaml:1: otlp.headers: its value"),
    ] {
        let error = load(&["--otlp.endpoint=http://c", &flag][usize::from(flag.contains("endpoint"))..]);
        let error = error.unwrap_err();
        assert!(error.contains(says) && !error.contains("hunter2"), "{flag}: {error}");
    }
}

#[test]
fn ledger_is_on_disk_unless_path_is_empty() {
    let config = load(&[]).unwrap();
    assert_eq!(
        config.state,
        StateSettings {
            is_flag: false,
            path: Some("/var/lib/memledger".into()),
            retention: Duration::from_secs(90 * 24 * 3600),
            max_size_bytes: 64 << 20,
        }
    );
    assert_eq!(config.oom, OomSettings { kernel_log: KernelLogChoice::Auto, runtime: true });
    let flags = ["--state.path=", "--state.max-size=1GiB", "--no-oom.runtime"];
    let config = load(&flags).unwrap();
    assert_eq!((config.state.path, config.state.max_size_bytes), (None, 1 << 30));
    assert!(!config.oom.runtime);
}

#[test]
fn switches_have_two_forms_and_shm_needs_processes() {
    assert!(load(&["--web.enable-api"]).unwrap().enable_api);
    assert!(!load(&["--no-collector.gpu"]).unwrap().collectors.contains("gpu"));
    assert!(!load(&["--collector.gpu=false"]).unwrap().collectors.contains("gpu"));
    let both = load(&["--collector.gpu", "--no-collector.gpu"]).unwrap_err();
    assert!(both.contains("--no-collector.gpu: conflicts with --collector.gpu"), "{both}");
    let without = load(&["--no-collector.process"]).unwrap().collectors;
    assert!(!without.contains("shm") && !without.contains("pss"));
    assert!(load(&["--docker.socket="]).unwrap().endpoints.iter().all(|e| e.runtime != RuntimeKind::Docker));
}

/// Loads settings with one setting empty, by each form of each source.
fn load_empty(setting: &Setting) -> Vec<(String, Result<Values<'static>, String>)> {
    let command = || arguments(Command::new("memledger").no_binary_name(true));
    let flag = format!("--{}=", setting.key);
    let flags = command().try_get_matches_from([&flag]).unwrap();
    let none = command().try_get_matches_from([""; 0]).unwrap();
    let mut all = vec![(flag, Values::collect(Some(&flags), &|_| None, &[], Path::new("")))];
    let name: &'static str = setting.variable().leak();
    let environment = Box::leak(Box::new(move |variable: &str| (variable == name).then(String::new)));
    all.push((format!("{name}=\"\""), Values::collect(Some(&none), environment, &[], Path::new(""))));
    let mut all: Vec<_> =
        all.into_iter().map(|(form, values)| (form, values.map_err(|error| error.to_string()))).collect();
    for empty in ["", "~", "null", "[]", "\"\"", "[\"\"]", "{}"] {
        let text = format!("{}: {empty}\n", setting.key);
        let (found, errors) = file::read_text(Path::new("m.yaml"), &text);
        let values = match errors.first() {
            Some(error) => Err(error.to_string()),
            None => Values::collect(None, &|_| None, &found, Path::new("m.yaml"))
                .map_err(|error| error.to_string()),
        };
        all.push((text, values));
    }
    all
}

#[test]
fn empty_value_of_every_setting_is_off_or_an_error_never_the_default() {
    assert!(SETTINGS.iter().filter(|setting| setting.repeats).count() >= 7);
    assert!(SETTINGS.iter().filter(|setting| !setting.may_be_empty).count() >= 30);
    for setting in SETTINGS.iter() {
        for (form, values) in load_empty(setting) {
            let file_form = form.split_once(": ").map(|(_, value)| value.trim());
            let is_null = matches!(file_form, Some("" | "~" | "null"));
            let is_list = matches!(file_form, Some("[]" | "[\"\"]"));
            let outcome = values.and_then(|values| match values.errors(setting).first() {
                Some(error) => Err(error.to_string()),
                None => Ok(values.parse(setting.key, |text| Ok(text.to_owned())).unwrap()),
            });
            match outcome {
                Err(error) if is_null => {
                    assert!(error.contains("m.yaml:1: ") && error.contains("write \"\" for empty"), "{error}")
                }
                Err(error) if file_form == Some("{}") || (is_list && !setting.repeats) => {
                    assert!(
                        error.contains("m.yaml:1: ") && error.contains(&setting.takes),
                        "{form}: {error}"
                    );
                }
                Err(error) => {
                    assert!(!setting.may_be_empty && error.contains("must not be empty"), "{form}: {error}");
                    let origin = form.split('=').next().unwrap();
                    assert!(error.starts_with(origin) || error.starts_with("m.yaml:1: "), "{form}: {error}");
                }
                Ok(texts) => {
                    assert!(setting.may_be_empty && texts.is_empty() && !is_null, "{form}: {texts:?}")
                }
            }
        }
    }
}

#[test]
fn keys_and_variables_are_unique() {
    let mut seen = std::collections::HashSet::new();
    for setting in SETTINGS.iter() {
        assert!(seen.insert(setting.key.to_owned()), "{}", setting.key);
        assert!(seen.insert(setting.variable()), "{}", setting.key);
        assert!(setting.help.ends_with('.'), "{}: help is a sentence", setting.key);
        for default in setting.default {
            assert_eq!((setting.check)(default), Ok(()), "{}", setting.key);
        }
    }
}

#[test]
fn variable_overrides_file_and_flag_overrides_variable() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.yaml");
    std::fs::write(&path, "gpu.interval: 2s\ncontainer.label: [a, 'b,c']\n").unwrap();
    let environment = |name: &str| match name {
        "MEMLEDGER_CONFIG_FILE" => Some(path.display().to_string()),
        "MEMLEDGER_GPU_INTERVAL" => Some("3s".to_owned()),
        "MEMLEDGER_CONTAINER_SETTINGS" => Some("A,B".to_owned()),
        "MEMLEDGER_OOM_RUNTIME" => Some("false".to_owned()),
        _ => None,
    };
    let load = |flags: &[&str]| {
        let command = arguments(Command::new("memledger").no_binary_name(true));
        Config::load_with(&command.get_matches_from(flags), &environment).unwrap()
    };
    let config = load(&[]);
    assert_eq!((config.gpu.interval, config.oom.runtime), (Duration::from_secs(3), false));
    assert_eq!(config.filter.settings, ["A", "B"]);
    assert_eq!(config.filter.labels.len(), 2, "a comma in a list of the file is part of the value");
    assert_eq!(load(&["--gpu.interval=4s", "--oom.runtime"]).gpu.interval, Duration::from_secs(4));
}

#[test]
fn check_of_a_file_returns_all_errors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.yaml");
    let text = "sample.interval: soon\nlog.level: loud\nweb:\n  lisen-address: x\notlp.headers: hunter2\ngpu.interval: \"\"\n";
    std::fs::write(&path, text).unwrap();
    let errors: Vec<_> = Config::check_file(&path).unwrap_err().iter().map(ToString::to_string).collect();
    let lines: Vec<_> = errors.iter().map(|error| error.split(':').nth(1).unwrap()).collect();
    assert_eq!(lines, ["4", "1", "6", "5", "2"], "{errors:#?}");
    assert!(!errors.concat().contains("hunter2"), "{errors:#?}");
    std::fs::write(&path, "otlp: {endpoint: \"https://c\", client-key: /k}\n").unwrap();
    assert!(Config::check_file(&path).unwrap_err()[0].to_string().contains("set both or neither"));
    std::fs::write(&path, "sample.interval: 2s\n").unwrap();
    assert_eq!(Config::check_file(&path).unwrap().sample_interval, Duration::from_secs(2));
}
