//! Settings: one declaration for each ([`settings`]), read from flags, environment and file, validated before anything starts.
//!
//! A flag overrides the environment, the environment overrides the file, the file overrides the default. Every error names
//! the origin of the value and what is allowed.

mod caller_sockets;
mod declare;
mod file;
mod filter;
pub use filter::{GROUP_SETTING, OwnerLabels, RunSettings, label_settings, merged};
#[cfg(any(test, fuzzing))]
pub mod invariants;
pub mod otlp;
pub mod pem;
pub mod report;
mod settings;
pub mod since;
mod sources;
mod suggest;
mod value_parsers;
pub mod web;
mod yaml;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use clap::ArgMatches;

use declare::SettingGroup;
pub use declare::{Setting, parse_duration};
pub use otlp::OtlpSettings;
pub use report::ReportSettings;
pub use settings::{
    Config, CriSettings, Filter, GpuSettings, HttpLimits, KernelLogChoice, LocalSettings, LogSelection,
    OomSettings, ReporterSettings, RunCommandSettings, RuntimeEndpoint, StateSettings,
};
use sources::{CONFIG_FILE, Layer, RawValue, Values};
pub use sources::{CommandSettings, DEFAULT_FILE, FlagForm, arguments, arguments_of, file_argument};
pub use suggest::{UnknownVariable, meant, unknown_variables};
pub use value_parsers::{label, size, variable_name};

/// All settings, in the order of the help.
pub static SETTINGS: LazyLock<Vec<Setting>> = LazyLock::new(|| {
    let mut table = vec![];
    Config::declare(&mut table);
    table
});

/// Returns the setting with this key.
pub fn setting(key: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.key == key)
}

/// An invalid setting, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file of settings is unreadable.
    #[error("cannot read {what} {path}")]
    Unreadable {
        /// What it is.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// An invalid entry of the settings file.
    #[error("{path}:{line}: {what}")]
    InFile {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// What is wrong, and what is allowed.
        what: String,
    },
    /// An invalid value.
    #[error("{origin}: {what}")]
    Value {
        /// Flag, variable, or file and line.
        origin: String,
        /// What is wrong, and what is allowed.
        what: String,
    },
}

/// The effective value of a setting.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct EffectiveValue {
    /// The key of the setting.
    pub key: &'static str,
    /// The values as text; `None` if they may contain a secret.
    pub values: Option<Vec<String>>,
    /// Flag, variable, file and line, or *default*.
    pub origin: String,
    /// The signal of OTLP that alone has this value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signal: Option<&'static str>,
}

impl Config {
    /// Reads the settings from parsed arguments, the environment, and the settings file.
    ///
    /// # Errors
    /// The first invalid setting.
    pub fn load(matches: &ArgMatches) -> Result<Self, ConfigError> {
        let mut values = values(matches, &variable, default_file())?;
        add_caller_sockets(&mut values);
        Self::read(&values)
    }

    /// The same for a command that serves nothing: without the right to read the default settings file it warns, and goes on without.
    ///
    /// # Errors
    /// The first invalid setting.
    pub fn load_for_query(matches: &ArgMatches) -> Result<Self, ConfigError> {
        let default = default_file().filter(|path| {
            let is_denied =
                std::fs::File::open(path).is_err_and(|error| error.kind() == ErrorKind::PermissionDenied);
            if is_denied {
                eprintln!(
                    "memledger: no right to read the settings in {}: defaults are used",
                    path.display()
                );
            }
            !is_denied
        });
        let mut values = values(matches, &variable, default)?;
        add_caller_sockets(&mut values);
        // a command without this flag reads no engine
        if matches.try_contains_id("docker.socket").is_ok() {
            values.notices.iter().for_each(|notice| eprintln!("memledger: {notice}"));
        }
        Self::read(&values)
    }

    /// Reads the settings without a default settings file.
    #[cfg(test)]
    fn load_with(matches: &ArgMatches, environment: sources::Environment<'_>) -> Result<Self, ConfigError> {
        Self::read(&values(matches, environment, None)?)
    }

    /// Returns the settings file that `serve` reads: of the flag, the variable, or the default one, whether or not it exists; `None` if the
    /// flag or the variable says that there is none.
    pub fn file_to_read(matches: &ArgMatches) -> Option<PathBuf> {
        named_file(matches, &variable, Some(PathBuf::from(DEFAULT_FILE)))
    }

    /// Reads a settings file alone, without flags and environment, and returns all errors in it.
    pub fn check_file(path: &Path) -> Result<Self, Vec<ConfigError>> {
        let (found, mut errors) = file::read(path);
        let values = Values::collect(None, &|_| None, &found, path).map_err(|error| vec![error])?;
        errors.extend(SETTINGS.iter().flat_map(|setting| values.errors(setting)));
        if errors.is_empty() { Self::read(&values).map_err(|error| vec![error]) } else { Err(errors) }
    }

    /// Returns all settings with their effective values and where each comes from, and the standard variables that are ignored, with
    /// the reason.
    ///
    /// # Errors
    /// The first invalid setting.
    pub fn effective_values(matches: &ArgMatches) -> Result<(Vec<EffectiveValue>, Vec<String>), ConfigError> {
        let mut values = values(matches, &variable, default_file())?;
        add_caller_sockets(&mut values);
        let ignored = Self::read(&values)?.otlp_ignored;
        let mut all: Vec<_> =
            SETTINGS.iter().map(|setting| effective(setting.key, values.of(setting.key), None)).collect();
        for signal in otlp::SIGNALS {
            let standard = otlp::standard_values(&values, signal);
            all.extend(
                standard
                    .iter()
                    .map(|(key, given)| effective(key, std::slice::from_ref(given), Some(signal.name()))),
            );
        }
        Ok((all, ignored))
    }
}

/// Reads an environment variable; one that is not UTF-8 keeps what can be shown, and is then rejected as a value.
fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|text| text.to_string_lossy().into_owned())
}

/// Adds the engines of the user who starts this process.
fn add_caller_sockets(values: &mut Values<'_>) {
    let (uid, users) = (rustix::process::geteuid().as_raw(), Path::new("/run/user"));
    values.notices =
        caller_sockets::add(values, &caller_sockets::Caller { uid, users, environment: &variable });
}

/// Returns the settings file that is read if none is named; `None` if it does not exist.
fn default_file() -> Option<PathBuf> {
    Some(PathBuf::from(DEFAULT_FILE)).filter(|path| path.try_exists().unwrap_or(true))
}

/// Returns the settings file of the flag or the variable, which may be none, else the default one.
fn named_file(
    matches: &ArgMatches,
    environment: sources::Environment<'_>,
    default: Option<PathBuf>,
) -> Option<PathBuf> {
    match matches.get_one::<String>(CONFIG_FILE.0).cloned().or_else(|| environment(CONFIG_FILE.1)) {
        Some(path) => Some(path).filter(|path| !path.is_empty()).map(PathBuf::from),
        None => default,
    }
}

fn values<'e>(
    matches: &ArgMatches,
    environment: sources::Environment<'e>,
    default: Option<PathBuf>,
) -> Result<Values<'e>, ConfigError> {
    let path = named_file(matches, environment, default);
    let (found, errors) = path.as_deref().map(file::read).unwrap_or_default();
    match errors.into_iter().next() {
        Some(error) => Err(error),
        None => Values::collect(Some(matches), environment, &found, path.as_deref().unwrap_or(Path::new(""))),
    }
}

fn effective(key: &'static str, given: &[RawValue], signal: Option<&'static str>) -> EffectiveValue {
    let is_secret = setting(key).is_some_and(|setting| setting.secret)
        && given.iter().any(|given| !given.text.is_empty());
    // what the log shows of it: its path and query may have a key
    let shown = if key == "otlp.endpoint" {
        given.iter().map(|given| otlp::authority(&given.text)).collect()
    } else {
        None
    };
    let texts = given.iter().map(|given| given.text.clone()).filter(|text| !text.is_empty());
    let origin = match given.first() {
        Some(given) if given.layer != Layer::Default => {
            given.origin.trim_end_matches(&format!(": {key}")).to_owned()
        }
        _ => "default".to_owned(),
    };
    let values = if is_secret { shown } else { Some(texts.collect()) };
    EffectiveValue { key, values, origin, signal }
}

#[cfg(test)]
mod tests;
