//! Where values come from: flags, the environment, the settings file, defaults, in this order of precedence.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};

use super::declare::Setting;
use super::file::FileValue;
use super::{ConfigError, SETTINGS, otlp, setting};

/// The flag and the variable of the settings file.
pub const CONFIG_FILE: (&str, &str) = ("config.file", "MEMLEDGER_CONFIG_FILE");

/// Reads an environment variable.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The kind of origin of a value, by ascending precedence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Layer {
    /// The default.
    Default,
    /// The settings file.
    File,
    /// A standard variable of OpenTelemetry.
    Standard,
    /// The setting's own environment variable.
    Variable,
    /// The flag.
    Flag,
}

/// A value as text, with its origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawValue {
    /// The text.
    pub text: String,
    /// Flag, variable, or file and line.
    pub origin: String,
    /// The kind of the origin.
    pub layer: Layer,
}

/// The values of all settings, before validation.
#[derive(Clone)]
pub struct Values<'e> {
    given: BTreeMap<&'static str, Vec<RawValue>>,
    /// The environment, for variables that are not memledger's own.
    pub environment: Environment<'e>,
}

/// Adds the flags of all settings to a command.
pub fn arguments(command: Command) -> Command {
    let file = Arg::new(CONFIG_FILE.0)
        .long(CONFIG_FILE.0)
        .value_name("PATH")
        .help(format!("Settings file (YAML); its keys are the flags' names. [env: {}]", CONFIG_FILE.1));
    SETTINGS.iter().fold(command.arg(file), |command, setting| {
        let flag =
            Arg::new(setting.key).long(setting.key).value_name(setting.placeholder).help(help(setting));
        let flag = flag.action(if setting.repeats { ArgAction::Append } else { ArgAction::Set });
        if !setting.is_switch {
            return command.arg(flag);
        }
        let off = format!("no-{}", setting.key);
        command
            .arg(flag.num_args(0..=1).default_missing_value("true").require_equals(true))
            .arg(Arg::new(off.clone()).long(off).action(ArgAction::SetTrue).hide(true))
    })
}

fn help(setting: &Setting) -> String {
    match setting.default {
        [] => setting.help.to_owned(),
        values => format!("{} [default: {}]", setting.help, values.join(",")),
    }
}

impl<'e> Values<'e> {
    /// Collects the values of all settings.
    ///
    /// # Errors
    /// A switch is set and unset by flags.
    pub fn collect(
        flags: Option<&ArgMatches>,
        environment: Environment<'e>,
        file: &[FileValue],
        path: &Path,
    ) -> Result<Self, ConfigError> {
        let mut values = BTreeMap::new();
        for setting in SETTINGS.iter() {
            let from_flag = flags.map(|flags| from_flag(setting, flags)).transpose()?.flatten();
            let found = from_flag
                .or_else(|| from_variable(setting, environment))
                .or_else(|| from_file(setting, file, path))
                .unwrap_or_else(|| {
                    raw_values(setting.default, &format!("default of --{}", setting.key), Layer::Default)
                });
            values.insert(setting.key, found);
        }
        let mut this = Self { given: values, environment };
        this.settle();
        Ok(this)
    }

    /// Switches off what other settings and the standard variables of OpenTelemetry switch off.
    fn settle(&mut self) {
        // they read the processes that this collector finds
        let off = self.of("collector.process").last().filter(|given| given.text == "false").cloned();
        for key in ["collector.shm", "collector.pss"] {
            if let Some(off) = &off {
                self.set(key, vec![off.clone()]);
            }
        }
        for (key, off) in otlp::switched_off(self) {
            self.set(key, vec![off]);
        }
    }

    /// Returns the values of a setting.
    pub fn of(&self, key: &str) -> &[RawValue] {
        self.given.get(key).map_or(&[], Vec::as_slice)
    }

    /// Returns the last value of a setting as text; empty if there is none.
    pub fn text(&self, key: &str) -> &str {
        self.of(key).last().map_or("", |given| given.text.as_str())
    }

    /// Replaces the values of a setting.
    pub fn set(&mut self, key: &'static str, values: Vec<RawValue>) {
        self.given.insert(key, values);
    }

    /// Returns true if the setting has its default value.
    pub fn is_default(&self, key: &str) -> bool {
        setting(key).is_some_and(|setting| {
            self.of(key).iter().map(|given| given.text.as_str()).eq(setting.default.iter().copied())
        })
    }

    /// Returns true if a flag or the setting's own variable sets it.
    pub fn is_explicit(&self, key: &str) -> bool {
        self.of(key).first().is_some_and(|given| given.layer >= Layer::Variable)
    }

    /// Parses the values of a setting; empty ones are none.
    pub fn parse<T>(
        &self,
        key: &str,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Result<Vec<T>, ConfigError> {
        let given = self.of(key).iter().filter(|given| !given.text.is_empty());
        given.map(|given| parse(&given.text).map_err(|expected| invalid(key, given, &expected))).collect()
    }

    /// Returns the error of an empty setting that needs a value.
    pub fn missing(&self, key: &str) -> ConfigError {
        let origin = self.of(key).first().map_or_else(|| format!("--{key}"), |given| given.origin.clone());
        let default = setting(key).map_or_else(String::new, |setting| setting.default.join(","));
        let what = format!("must not be empty; remove it for the default, {default}");
        ConfigError::Value { origin, what }
    }

    /// Returns all errors of a setting.
    pub fn errors(&self, setting: &Setting) -> Vec<ConfigError> {
        let given = self.of(setting.key).iter().filter(|given| !given.text.is_empty());
        let checked = given.clone().map(|given| (setting.check)(&given.text).map_err(|text| (given, text)));
        let mut errors: Vec<_> = checked
            .filter_map(Result::err)
            .map(|(given, expected)| invalid(setting.key, given, &expected))
            .collect();
        if given.count() == 0 && !setting.may_be_empty {
            errors.push(self.missing(setting.key));
        }
        errors
    }
}

/// Returns the error of an invalid value.
pub fn invalid(key: &str, given: &RawValue, expected: &str) -> ConfigError {
    let is_secret = setting(key).is_some_and(|setting| setting.secret);
    let text = if is_secret { "its value".to_owned() } else { format!("{:?}", given.text) };
    let what = format!("{text} is not valid; expected {expected}");
    ConfigError::Value { origin: given.origin.clone(), what }
}

fn raw_values<S: AsRef<str>>(texts: &[S], origin: &str, layer: Layer) -> Vec<RawValue> {
    let raw = |text: &S| RawValue { text: text.as_ref().to_owned(), origin: origin.to_owned(), layer };
    texts.iter().map(raw).collect()
}

fn from_flag(setting: &Setting, flags: &ArgMatches) -> Result<Option<Vec<RawValue>>, ConfigError> {
    let is_set = flags.value_source(setting.key) == Some(ValueSource::CommandLine);
    let off = format!("no-{}", setting.key);
    if setting.is_switch && flags.get_flag(&off) {
        if is_set {
            let what = format!("conflicts with --{}; remove one of them", setting.key);
            return Err(ConfigError::Value { origin: format!("--{off}"), what });
        }
        return Ok(Some(raw_values(&["false"], &format!("--{off}"), Layer::Flag)));
    }
    let texts = flags.get_many::<String>(setting.key).into_iter().flatten();
    let texts: Vec<_> = texts.flat_map(|text| setting.split(text)).collect();
    Ok(is_set.then(|| raw_values(&texts, &format!("--{}", setting.key), Layer::Flag)))
}

/// Returns those of these variables that have the prefix of a group of settings and are none, such as `MEMLEDGER_WEB_CONFIGFILE`.
pub fn unknown_variables(names: impl IntoIterator<Item = String>) -> Vec<String> {
    let known: BTreeSet<String> = SETTINGS.iter().map(Setting::variable).collect();
    let group = |setting: &Setting| Some(setting.key.split_once('.')?.0.to_ascii_uppercase());
    let groups: BTreeSet<_> = SETTINGS.iter().filter_map(group).collect();
    let is_unknown = |name: &String| {
        let group = name.strip_prefix("MEMLEDGER_").and_then(|rest| rest.split('_').next());
        group.is_some_and(|group| groups.contains(group)) && !known.contains(name) && name != CONFIG_FILE.1
    };
    names.into_iter().filter(is_unknown).collect()
}

fn from_variable(setting: &Setting, environment: Environment<'_>) -> Option<Vec<RawValue>> {
    let name = setting.variable();
    let text = environment(&name)?;
    Some(raw_values(&setting.split(&text), &name, Layer::Variable))
}

fn from_file(setting: &Setting, file: &[FileValue], path: &Path) -> Option<Vec<RawValue>> {
    let found = file.iter().filter(|found| found.key == setting.key);
    let values: Vec<_> = found
        .map(|found| RawValue {
            text: found.value.clone(),
            origin: format!("{}:{}: {}", path.display(), found.line, found.key),
            layer: Layer::File,
        })
        .collect();
    (!values.is_empty()).then_some(values)
}
