//! Settings: one table ([`table`]), read from flags, environment and file, checked before anything starts.
//!
//! A flag wins over the environment, the environment over the file, the file over the default. Every error names where
//! the value came from and what is allowed there.

pub mod file;
pub mod filter;
#[cfg(any(test, fuzzing))]
pub mod laws;
pub mod otlp;
pub mod percent;
pub mod since;
pub mod table;
mod text;
pub mod web;
mod yaml;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};

use crate::host::Roots;
pub use filter::Filter;
pub use otlp::OtlpSettings;
use table::{Kind, SETTINGS, Setting};
use text::*;

/// Everything that can be set, checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where to serve.
    pub listen: Vec<SocketAddr>,
    /// Path of the metrics.
    pub telemetry_path: String,
    /// What the HTTP side bears.
    pub limits: HttpLimits,
    /// TLS, passwords, headers and rate.
    pub web_config: Option<PathBuf>,
    /// Answer `/api/v1` from anywhere.
    pub enable_api: bool,
    /// Have the routes that change what memledger does.
    pub enable_admin: bool,
    /// Pause between two samples.
    pub sample_interval: Duration,
    /// Least pause between two readings of a proportional share.
    pub pss_interval: Duration,
    /// Sockets of container runtimes.
    pub endpoints: Vec<Endpoint>,
    /// The kubelet's container runtime.
    pub cri: CriSettings,
    /// Which containers and which of their settings are shown.
    pub filter: Filter,
    /// How long an ended container is shown.
    pub keep_ended: Duration,
    /// The GPU collector.
    pub gpu: GpuSettings,
    /// What must outlive memledger.
    pub state: StateSettings,
    /// Sources of the ledger of OOM kills.
    pub oom: OomSettings,
    /// The push over OTLP; `None`: nothing is pushed.
    pub otlp: Option<OtlpSettings>,
    /// Standard variables of OpenTelemetry that cannot be used, and what is wanted.
    pub otlp_ignored: Vec<String>,
    /// Collectors that are switched on.
    pub collectors: BTreeSet<&'static str>,
    /// Where the host's file systems are.
    pub roots: Roots,
    /// Least severity that is logged.
    pub log_level: tracing::Level,
    /// Log as JSON.
    pub log_json: bool,
}

/// What the HTTP side bears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HttpLimits {
    /// Requests served at once; 0 is no limit.
    pub requests: usize,
    /// Connections open at once; 0 is no limit.
    pub connections: usize,
    /// Time for a TLS handshake, and for the head of a request.
    pub head: Duration,
    /// Time after which a connection on which nothing moves is closed.
    pub idle: Duration,
}

/// Where a runtime listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// `docker` or `podman`.
    pub runtime: &'static str,
    /// The Unix socket.
    pub socket: PathBuf,
}

/// The kubelet's container runtime, which is asked for pods.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CriSettings {
    /// Unix sockets, tried in this order. Empty: it is not asked.
    pub sockets: Vec<PathBuf>,
    /// Somebody named the sockets: then one of them should answer. Else they are places where one may be.
    pub is_asked_for: bool,
    /// Labels of pods that are shown, and the label names that they are shown by.
    pub labels: Vec<(String, Arc<str>)>,
    /// The same of annotations.
    pub annotations: Vec<(String, Arc<str>)>,
    /// The kubelet's own socket, which tells of devices; empty: it is not asked.
    pub pod_resources: PathBuf,
}

/// Settings of the GPU collector.
#[derive(Clone, Debug)]
pub struct GpuSettings {
    /// The library to load; the driver's own name if none is set.
    pub library: Option<PathBuf>,
    /// Pause between two readings.
    pub interval: Duration,
    /// Pause between two quick looks at memory; zero: there are none.
    pub sample_interval: Duration,
    /// An answer older than this is not shown.
    pub deadline: Duration,
    /// How many GPUs there should be.
    pub expected: Option<usize>,
    /// How long the driver is let go when that is asked for.
    pub release_for: Duration,
}

/// Settings of what must outlive memledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateSettings {
    /// Directory of the ledger; `None`: it is kept in memory.
    pub path: Option<PathBuf>,
    /// How long events stay in it.
    pub retention: Duration,
    /// Bytes beyond which the oldest events are removed.
    pub max_size_bytes: u64,
    /// File to which events are appended as lines of JSON.
    pub events_file: Option<PathBuf>,
}

/// Settings of the sources of the ledger of OOM kills.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OomSettings {
    /// Where the kernel's messages are read.
    pub kernel_log: KernelLogChoice,
    /// Whether what the runtimes tell is used.
    pub runtime: bool,
}

/// Where the kernel's messages are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelLogChoice {
    /// From the device, else by syslog(2).
    Auto,
    /// From `/dev/kmsg` only.
    Device,
    /// By syslog(2) only.
    Syslog,
    /// Not at all.
    Off,
}

/// A setting that cannot be used, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The settings file cannot be read.
    #[error("cannot read the settings file {path}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Something in the settings file is wrong.
    #[error("{path}:{line}: {what}")]
    InFile {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong, and what is allowed.
        what: String,
    },
    /// A value cannot be used.
    #[error("{origin}: {what}")]
    Value {
        /// Flag, variable, or file and line.
        origin: String,
        /// What is wrong, and what is allowed.
        what: String,
    },
}

/// A value as text, with where it came from.
#[derive(Clone, Debug)]
struct Given {
    text: String,
    origin: String,
}

/// The values of all settings, before they are checked.
struct Values(BTreeMap<&'static str, Vec<Given>>);

/// Adds the flags of all settings to a command.
pub fn arguments(command: Command) -> Command {
    let file = Arg::new("config.file")
        .long("config.file")
        .value_name("PATH")
        .env("MEMLEDGER_CONFIG_FILE")
        .help("Settings file (YAML); its keys are the flags' names.");
    SETTINGS.iter().fold(command.arg(file), |command, setting| match setting.kind {
        Kind::Switch => {
            command.arg(flag(setting).num_args(0..=1).default_missing_value("true").require_equals(true)).arg(
                Arg::new(format!("no-{}", setting.key))
                    .long(format!("no-{}", setting.key))
                    .action(ArgAction::SetTrue)
                    .hide(true),
            )
        }
        _ => command.arg(flag(setting)),
    })
}

fn flag(setting: &'static Setting) -> Arg {
    let default = match setting.default {
        [] => String::new(),
        values => format!(" [default: {}]", values.join(",")),
    };
    let arg = Arg::new(setting.key)
        .long(setting.key)
        .value_name(setting.kind.placeholder())
        .env(setting.variable())
        .hide_env(true)
        .help(format!("{}{default}", setting.help));
    if setting.repeats {
        arg.action(ArgAction::Append).value_delimiter(',')
    } else {
        arg.action(ArgAction::Set)
    }
}

impl Config {
    /// Reads the settings from parsed arguments, their environment, and the file that they name.
    ///
    /// # Errors
    /// The first setting that cannot be used.
    pub fn load(matches: &ArgMatches) -> Result<Self, ConfigError> {
        Self::check(&Self::values(matches)?)
    }

    fn values(matches: &ArgMatches) -> Result<Values, ConfigError> {
        let file = matches.get_one::<String>("config.file").map(PathBuf::from);
        let from_file = file.as_deref().map(file::read).transpose()?.unwrap_or_default();
        let mut values = BTreeMap::new();
        for setting in SETTINGS {
            values.insert(setting.key, given(setting, matches, file.as_deref(), &from_file)?);
        }
        Ok(Values(values))
    }

    fn check(values: &Values) -> Result<Self, ConfigError> {
        let duration = |key, range| values.duration(key, range);
        let (ms, hour) = (Duration::from_millis, Duration::from_secs(3600));
        let endpoint = |runtime, key| {
            let socket = values.path(key)?;
            Ok((!socket.as_os_str().is_empty()).then_some(Endpoint { runtime, socket }))
        };
        let (otlp, otlp_ignored) = otlp::settings(values, &|name| std::env::var(name).ok())?;
        let endpoints = [endpoint("docker", "docker.socket")?, endpoint("podman", "podman.socket")?];
        Ok(Self {
            listen: values.each("web.listen-address", address)?,
            telemetry_path: values.one("web.telemetry-path", url_path)?,
            limits: HttpLimits {
                requests: values.one("web.max-requests", count)?,
                connections: values.one("web.max-connections", count)?,
                head: duration("web.header-timeout", ms(1000)..=hour / 12)?,
                idle: duration("web.idle-timeout", ms(1000)..=hour)?,
            },
            web_config: values.optional("web.config.file", |text| Ok(PathBuf::from(text)))?,
            enable_api: values.one("web.enable-api", switch)?,
            enable_admin: values.one("web.enable-admin", switch)?,
            sample_interval: duration("sample.interval", ms(100)..=hour)?,
            pss_interval: duration("pss.interval", ms(1000)..=hour * 24)?,
            endpoints: endpoints.into_iter().flatten().collect(),
            cri: CriSettings {
                sockets: values.each("cri.endpoint", |text| Ok(unix_socket(text)))?,
                is_asked_for: !values.is_default("cri.endpoint"),
                labels: values.each("cri.pod-labels", |text| pod_key("label", text))?,
                annotations: values.each("cri.pod-annotations", |text| pod_key("annotation", text))?,
                pod_resources: values.path("kubelet.pod-resources")?,
            },
            filter: Filter {
                include: values.optional("container.include", regex)?,
                exclude: values.optional("container.exclude", regex)?,
                labels: values.each("container.label", label)?,
                settings: values.each("container.settings", variable_name)?,
            },
            keep_ended: duration("container.keep-ended", Duration::ZERO..=hour * 24 * 366)?,
            gpu: GpuSettings {
                library: values.optional("gpu.nvml-library", |text| Ok(PathBuf::from(text)))?,
                interval: duration("gpu.interval", ms(50)..=hour)?,
                sample_interval: values.one("gpu.sample-interval", sample_interval)?,
                deadline: duration("gpu.deadline", ms(100)..=hour * 24)?,
                expected: values.optional("gpu.expected", count)?,
                release_for: duration("gpu.release-for", ms(1000)..=hour * 24)?,
            },
            state: StateSettings {
                path: values.optional("state.path", |text| Ok(PathBuf::from(text)))?,
                retention: duration("state.retention", hour..=hour * 24 * 366 * 10)?,
                max_size_bytes: values.one("state.max-size", |text| size(text, 1 << 20))?,
                events_file: values.optional("events.file", |text| Ok(PathBuf::from(text)))?,
            },
            oom: OomSettings {
                kernel_log: values.one("oom.kernel-log", kernel_log)?,
                runtime: values.one("oom.runtime", switch)?,
            },
            otlp,
            otlp_ignored,
            collectors: values.collectors()?,
            roots: Roots {
                proc: values.path("path.procfs")?,
                sys: values.path("path.sysfs")?,
                cgroup: values.path("path.cgroupfs")?,
                dev: values.path("path.devfs")?,
            },
            log_level: values.one("log.level", |text| {
                text.parse().map_err(|_| Kind::Choice(&["debug", "info", "warn", "error"]).describe())
            })?,
            log_json: values.one("log.format", |text| match text {
                "logfmt" => Ok(false),
                "json" => Ok(true),
                _ => Err(Kind::Choice(&["logfmt", "json"]).describe()),
            })?,
        })
    }
}

fn given(
    setting: &'static Setting,
    matches: &ArgMatches,
    file: Option<&Path>,
    from_file: &[file::Found],
) -> Result<Vec<Given>, ConfigError> {
    let source = matches.value_source(setting.key);
    let off = format!("no-{}", setting.key);
    if setting.kind == Kind::Switch && matches.get_flag(&off) {
        // not left to the parser, for which the environment's value would contradict too
        if source == Some(ValueSource::CommandLine) {
            return Err(ConfigError::Value {
                origin: format!("--{off}"),
                what: format!("give either it or --{}", setting.key),
            });
        }
        return Ok(vec![Given { text: "false".into(), origin: format!("--{off}") }]);
    }
    let origin = match source {
        Some(ValueSource::CommandLine) => Some(format!("--{}", setting.key)),
        Some(ValueSource::EnvVariable) => Some(setting.variable()),
        _ => None,
    };
    if let Some(origin) = origin {
        let texts = matches.get_many::<String>(setting.key).into_iter().flatten();
        return Ok(texts.map(|text| Given { text: text.clone(), origin: origin.clone() }).collect());
    }
    let path = file.unwrap_or(Path::new("")).display();
    let found = from_file.iter().filter(|found| found.key == setting.key);
    let found: Vec<_> = found
        .map(|found| Given {
            text: found.value.clone(),
            origin: format!("{path}:{}: {}", found.line, found.key),
        })
        .collect();
    if !found.is_empty() {
        return Ok(found);
    }
    let origin = format!("default of --{}", setting.key);
    let default = setting.default.iter();
    Ok(default.map(|text| Given { text: text.to_string(), origin: origin.clone() }).collect())
}

impl Values {
    fn each<T>(&self, key: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, ConfigError> {
        let given = self.0.get(key).into_iter().flatten().filter(|given| !given.text.is_empty());
        let secret = table::setting(key).is_some_and(|setting| setting.secret);
        given
            .map(|given| {
                parse(&given.text).map_err(|wanted| {
                    let text = if secret { "its value".to_owned() } else { format!("{:?}", given.text) };
                    let what = format!("{text} cannot be used; wanted is {wanted}");
                    ConfigError::Value { origin: given.origin.clone(), what }
                })
            })
            .collect()
    }

    /// Nobody set it.
    fn is_default(&self, key: &str) -> bool {
        let texts = self.0.get(key).into_iter().flatten().map(|given| given.text.as_str());
        table::setting(key).is_some_and(|setting| texts.eq(setting.default.iter().copied()))
    }

    fn optional<T>(
        &self,
        key: &str,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Result<Option<T>, ConfigError> {
        Ok(self.each(key, parse)?.pop())
    }

    fn one<T>(&self, key: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<T, ConfigError> {
        self.optional(key, parse)?.ok_or_else(|| ConfigError::Value {
            origin: format!("--{key}"),
            what: "it must not be empty".to_owned(),
        })
    }

    /// A path, which may be empty.
    fn path(&self, key: &str) -> Result<PathBuf, ConfigError> {
        Ok(self.optional(key, |text| Ok(PathBuf::from(text)))?.unwrap_or_default())
    }

    fn duration(
        &self,
        key: &str,
        range: std::ops::RangeInclusive<Duration>,
    ) -> Result<Duration, ConfigError> {
        self.one(key, |text| {
            let parsed = text.parse::<jiff::SignedDuration>().ok().and_then(|d| Duration::try_from(d).ok());
            parsed.filter(|duration| range.contains(duration)).ok_or_else(|| {
                let (from, to) = (range.start(), range.end());
                format!("{}, from {from:?} to {to:?}", Kind::Duration.describe())
            })
        })
    }

    fn collectors(&self) -> Result<BTreeSet<&'static str>, ConfigError> {
        let mut on = BTreeSet::new();
        for setting in SETTINGS {
            if let Some(name) = setting.key.strip_prefix("collector.")
                && self.one(setting.key, switch)?
            {
                on.insert(name);
            }
        }
        for needs_processes in ["shm", "pss"] {
            if !on.contains("process") {
                on.remove(needs_processes);
            }
        }
        Ok(on)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(flags: &[&str]) -> Result<Config, String> {
        let command = arguments(Command::new("memledger").no_binary_name(true));
        let matches = command.try_get_matches_from(flags).map_err(|error| error.to_string())?;
        Config::load(&matches).map_err(|error| error.to_string())
    }

    #[test]
    fn the_defaults_are_usable() {
        let config = load(&[]).unwrap();
        assert_eq!(config.listen, ["[::]:10853".parse().unwrap()]);
        assert_eq!(config.sample_interval, Duration::from_secs(1));
        assert_eq!(config.filter.settings.len(), 6);
        assert_eq!(config.collectors.len(), 8);
    }

    #[test]
    fn the_kubelets_runtime_is_looked_for_unless_somebody_names_it() {
        let found = load(&[]).unwrap().cri;
        assert!(!found.is_asked_for && found.sockets.len() == 6);
        let named =
            load(&["--cri.endpoint=unix:///run/a.sock", "--cri.pod-labels=app.kubernetes.io/name,team"]);
        let named = named.unwrap().cri;
        assert_eq!((named.sockets, named.is_asked_for), (vec!["/run/a.sock".into()], true));
        assert_eq!(named.labels[0], ("app.kubernetes.io/name".into(), "label_app_kubernetes_io_name".into()));
        assert_eq!(load(&["--cri.endpoint="]).unwrap().cri.sockets, Vec::<PathBuf>::new());
    }

    #[test]
    fn a_flag_wins_over_the_file_and_the_file_over_the_default() {
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
        assert!(error.contains("memledger.yaml:2: sample.interval: \"soon\" cannot be used"), "{error}");
    }

    #[test]
    fn what_cannot_be_used_is_refused_and_says_what_can() {
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
            ("--state.retention=90d", "from 3600s"),
            ("--oom.kernel-log=journal", "auto, device, syslog, off"),
            ("--cri.pod-labels=team,a b", "such as app.kubernetes.io/name"),
            ("--web.lisen-address=:1", "web.listen-address"),
        ] {
            let error = load(&[flag]).unwrap_err();
            assert!(error.contains(says), "{flag}: {error}");
        }
    }

    #[test]
    fn what_may_be_a_secret_is_not_repeated() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("memledger.yaml");
        std::fs::write(&path, "otlp.headers: hunter2\n").unwrap();
        for (flag, says) in [
            ("--otlp.headers=authorization hunter2".to_owned(), "--otlp.headers: its value cannot be used"),
            ("--otlp.endpoint=http://me:hunter2@collector:4318".to_owned(), "without user and password"),
            (format!("--config.file={}", path.display()), "memledger.yaml:1: otlp.headers: its value"),
        ] {
            let error = load(&["--otlp.endpoint=http://c", &flag][usize::from(flag.contains("endpoint"))..]);
            let error = error.unwrap_err();
            assert!(error.contains(says) && !error.contains("hunter2"), "{flag}: {error}");
        }
    }

    #[test]
    fn the_ledger_is_on_disk_unless_its_path_is_empty() {
        let config = load(&[]).unwrap();
        assert_eq!(
            config.state,
            StateSettings {
                path: Some("/var/lib/memledger".into()),
                retention: Duration::from_secs(90 * 24 * 3600),
                max_size_bytes: 64 << 20,
                events_file: None,
            }
        );
        assert_eq!(config.oom, OomSettings { kernel_log: KernelLogChoice::Auto, runtime: true });
        let flags = ["--state.path=", "--state.max-size=1GiB", "--events.file=/e", "--no-oom.runtime"];
        let config = load(&flags).unwrap();
        assert_eq!((config.state.path, config.state.max_size_bytes), (None, 1 << 30));
        assert_eq!(config.state.events_file, Some("/e".into()));
        assert!(!config.oom.runtime);
    }

    #[test]
    fn switches_have_two_forms_and_shm_goes_with_processes() {
        assert!(load(&["--web.enable-api"]).unwrap().enable_api);
        assert!(!load(&["--no-collector.gpu"]).unwrap().collectors.contains("gpu"));
        assert!(!load(&["--collector.gpu=false"]).unwrap().collectors.contains("gpu"));
        let both = load(&["--collector.gpu", "--no-collector.gpu"]).unwrap_err();
        assert!(both.contains("--no-collector.gpu: give either it or --collector.gpu"), "{both}");
        let without = load(&["--no-collector.process"]).unwrap().collectors;
        assert!(!without.contains("shm") && !without.contains("pss"));
        assert!(load(&["--docker.socket="]).unwrap().endpoints.iter().all(|e| e.runtime != "docker"));
    }
}
