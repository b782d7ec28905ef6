//! Where values come from: flags, the environment, the settings file, defaults, in this order of precedence.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint};

use super::declare::{PATH, Setting};
use super::file::FileValue;
use super::{ConfigError, SETTINGS, otlp, setting};

/// The flag and the variable of the settings file.
pub const CONFIG_FILE: (&str, &str) = ("config.file", "MEMLEDGER_CONFIG_FILE");
/// The settings file that is read if it exists and no other is named.
pub const DEFAULT_FILE: &str = "/etc/memledger/memledger.yml";

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
    /// The settings file that was read.
    pub file: Option<PathBuf>,
    /// The environment, for variables that are not memledger's own.
    pub environment: Environment<'e>,
    /// Sentences about engines that are not read.
    pub notices: Vec<String>,
}

/// The settings that a command takes as flags. All others it takes from variables and the file alone.
#[derive(Clone, Copy, Debug)]
pub struct CommandSettings {
    /// Those in its help: keys, or beginnings of keys that end in a dot.
    shown: &'static [&'static str],
    /// Those that are seldom needed.
    hidden: &'static [&'static str],
}

impl CommandSettings {
    /// Of `serve`, and of commands that show what it would do.
    pub const SERVE: Self = Self { shown: &[""], hidden: &[] };
    /// Of commands that read the ledger.
    pub const LEDGER: Self = Self { shown: &["state.path", "local.socket"], hidden: &["log."] };
    /// Of commands that read the ledger and this host.
    pub const HOST: Self = Self {
        shown: &["state.path", "local.socket", "docker.socket", "podman.socket", "cri.endpoint"],
        hidden: &["cri.", "container.", "oom.", "path.", "log.", "run."],
    };
    /// Of commands that ask the memledger that runs, or sample this host.
    pub const SAMPLER: Self = Self {
        hidden: &["cri.", "container.", "oom.", "path.", "log.", "run.", "gpu.", "collector."],
        ..Self::HOST
    };
    /// Of `report`.
    pub const REPORT: Self =
        Self { shown: &["state.path", "local.socket"], hidden: &["report.", "path.", "log."] };
    /// Of `run`.
    pub const RUN: Self = Self {
        shown: &["run.spool", "reporter.directory"],
        hidden: &["container.settings", "path.", "log."],
    };
    /// Of commands that ask the memledger that runs.
    pub const CONTROL: Self = Self { shown: &["local.socket"], hidden: &["state.path", "log."] };
    /// Of `healthcheck`.
    pub const HEALTH: Self =
        Self { shown: &["local.socket", "web.listen-address"], hidden: &["web.config.file", "log."] };

    fn are_in(keys: &[&str], key: &str) -> bool {
        keys.iter().any(|it| *it == key || (it.is_empty() || it.ends_with('.')) && key.starts_with(it))
    }
}

/// Where the flags of a command are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlagForm {
    /// In help texts and man pages, where a switch is one line: `--[no-]NAME`.
    Help,
    /// In completions of shells, with a few words each.
    Completion,
}

/// The heading of settings in the help of a command.
const HEADING: &str = "Settings (also by variable or file, like all the others: docs/config.md)";

/// The settings that people set first. `--help` of commands that take all has these, `--help-all` the others too.
const FIRST: [&str; 9] = [
    "web.listen-address",
    "web.config.file",
    "sample.interval",
    "cri.endpoint",
    "docker.socket",
    "container.include",
    "container.logs",
    "state.path",
    "otlp.endpoint",
];

/// Adds the flags of all settings to a command.
pub fn arguments(command: Command) -> Command {
    arguments_of(command, CommandSettings::SERVE, FlagForm::Help)
}

/// Returns the flag of the settings file.
pub fn file_argument() -> Arg {
    Arg::new(CONFIG_FILE.0).long(CONFIG_FILE.0).value_name("PATH").value_hint(ValueHint::FilePath).help(
        format!(
            "Settings file (YAML); its keys are the flags' names. [default: {DEFAULT_FILE}] [env: {}]",
            CONFIG_FILE.1
        ),
    )
}

/// Adds the flags of those settings to a command that it takes.
pub fn arguments_of(command: Command, taken: CommandSettings, form: FlagForm) -> Command {
    let is_whole = taken.shown == [""];
    let command = command.arg(file_argument().help_heading(HEADING)).args_override_self(true);
    let command = match form {
        FlagForm::Help if is_whole => with_two_helps(command),
        FlagForm::Help | FlagForm::Completion => command,
    };
    SETTINGS.iter().fold(command, |command, setting| {
        let is_shown = CommandSettings::are_in(taken.shown, setting.key);
        let is_hidden = form == FlagForm::Help && CommandSettings::are_in(taken.hidden, setting.key);
        if !is_shown && !is_hidden {
            return command;
        }
        let is_rare = is_whole && form == FlagForm::Help && !FIRST.contains(&setting.key);
        let flag =
            flag(setting, form, is_whole).help_heading(HEADING).hide(!is_shown).hide_short_help(is_rare);
        match setting.is_switch {
            true => command.arg(flag).arg(off_flag(setting, form)),
            false => command.arg(flag),
        }
    })
}

/// Gives a command that takes all settings a help with the first of them, and one with all.
fn with_two_helps(command: Command) -> Command {
    let help = Arg::new("help").short('h').long("help").action(ArgAction::HelpShort);
    let all = Arg::new("help-all").long("help-all").action(ArgAction::HelpLong);
    let command = command.disable_help_flag(true);
    command.arg(help.help("Print help.")).arg(all.help("Print help with all settings."))
}

fn flag(setting: &Setting, form: FlagForm, is_whole: bool) -> Arg {
    let flag = Arg::new(setting.key).value_name(setting.placeholder).help(help(setting, form, is_whole));
    let flag = match (setting.is_switch, form) {
        (true, FlagForm::Help) => flag.long(format!("[no-]{}", setting.key)).alias(setting.key),
        _ => flag.long(setting.key),
    };
    let flag = match (setting.is_switch, setting.repeats) {
        (true, _) => flag.num_args(0..=1).default_missing_value("true").require_equals(true),
        (_, true) => flag.action(ArgAction::Append),
        _ => flag,
    };
    match setting.placeholder {
        PATH => flag.value_hint(ValueHint::AnyPath),
        _ if !setting.words.is_empty() => flag.value_parser(Words(setting.words.clone())),
        _ => flag,
    }
}

/// Shows the words of a setting in help texts and completions. The setting checks them itself, wherever they come from.
#[derive(Clone)]
struct Words(Vec<&'static str>);

impl TypedValueParser for Words {
    type Value = String;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.0.iter().map(PossibleValue::new)))
    }
}

fn off_flag(setting: &Setting, form: FlagForm) -> Arg {
    let off = format!("no-{}", setting.key);
    Arg::new(off.clone()).long(off).action(ArgAction::SetTrue).help("Off.").hide(form == FlagForm::Help)
}

/// Returns the help of a setting: all that is known of it for commands that take all of them, else its first sentence.
fn help(setting: &Setting, form: FlagForm, is_whole: bool) -> String {
    if form == FlagForm::Completion {
        return setting.help.split(['.', ':', ',']).next().unwrap_or_default().to_owned();
    }
    let first = setting.help.find(". ").map_or(setting.help, |end| &setting.help[..=end]);
    let default = match setting.default {
        [] => String::new(),
        [_, _, ..] if !is_whole => " [default: several]".to_owned(),
        values => format!(" [default: {}]", values.join(",")),
    };
    format!("{}{default} [env: {}]", if is_whole { setting.help } else { first }, setting.variable())
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
        let mut this = Self {
            given: values,
            file: Some(path.to_path_buf()).filter(|path| !path.as_os_str().is_empty()),
            environment,
            notices: vec![],
        };
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

    /// Returns true if a flag sets it.
    pub fn is_flag(&self, key: &str) -> bool {
        self.of(key).first().is_some_and(|given| given.layer == Layer::Flag)
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
    // a command does not take each setting as a flag
    let is_set = flags.try_contains_id(setting.key).unwrap_or(false);
    let off = format!("no-{}", setting.key);
    if setting.is_switch && flags.try_get_one(&off).ok().flatten() == Some(&true) {
        if is_set {
            let what = format!("conflicts with --{}; remove one of them", setting.key);
            return Err(ConfigError::Value { origin: format!("--{off}"), what });
        }
        return Ok(Some(raw_values(&["false"], &format!("--{off}"), Layer::Flag)));
    }
    if !is_set {
        return Ok(None);
    }
    let texts = flags.get_many::<String>(setting.key).into_iter().flatten();
    let texts: Vec<_> = texts.flat_map(|text| setting.split(text)).collect();
    Ok(Some(raw_values(&texts, &format!("--{}", setting.key), Layer::Flag)))
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
