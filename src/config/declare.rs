//! How a setting is declared: once, with [`settings!`]. Field, flag, environment variable, key of the file, check, help,
//! `docs/config.md` and the chart's schema come from that declaration.

use std::collections::BTreeSet;
use std::marker::PhantomData;
use std::path::PathBuf;
use std::time::Duration;

use jiff::SpanRelativeTo;

use super::ConfigError;
use super::sources::Values;

/// Checks one value that is not empty; the error is what is expected.
pub type ValueCheck = Box<dyn Fn(&str) -> Result<(), String> + Send + Sync>;

/// One setting.
pub struct Setting {
    /// The flag without dashes, and the key in the file (dots may be nesting).
    pub key: &'static str,
    /// The placeholder of a value in the usage text.
    pub placeholder: &'static str,
    /// A valid value, in words.
    pub takes: String,
    /// The default values; none means *off* or *detected*.
    pub default: &'static [&'static str],
    /// May have several values: a repeated flag, a list in the file, commas in one text.
    pub repeats: bool,
    /// May be empty, which means *off*, *none* or *detected*.
    pub may_be_empty: bool,
    /// The value may contain a secret: errors do not repeat it.
    pub secret: bool,
    /// As a flag `--NAME` or `--no-NAME`.
    pub is_switch: bool,
    /// The words that it takes; empty if any.
    pub words: Vec<&'static str>,
    /// The help text.
    pub help: &'static str,
    /// Its check.
    pub check: ValueCheck,
}

impl Setting {
    /// Returns the environment variable of this setting.
    pub fn variable(&self) -> String {
        format!("MEMLEDGER_{}", self.key.replace(['.', '-'], "_").to_ascii_uppercase())
    }

    /// Splits one text into values, where the setting takes several.
    pub fn split<'t>(&self, text: &'t str) -> Vec<&'t str> {
        if self.repeats { text.split(',').collect() } else { vec![text] }
    }
}

/// Where a field of the settings comes from.
pub trait Source<Field>: Sized {
    /// Adds the declared settings to the table.
    fn declare(self, help: &'static str, table: &mut Vec<Setting>);
    /// Reads the field.
    fn read(self, values: &Values<'_>) -> Result<Field, ConfigError>;
}

/// A struct of settings, declared with [`settings!`].
pub trait SettingGroup: Sized {
    /// Adds its settings to the table.
    fn declare(table: &mut Vec<Setting>);
    /// Reads its fields.
    fn read(values: &Values<'_>) -> Result<Self, ConfigError>;
}

/// How many values a field takes.
pub trait Collect<T>: Sized {
    /// May have several values.
    const REPEATS: bool;
    /// May have none.
    const MAY_BE_EMPTY: bool;
    /// Returns the field; `None` if a value is missing.
    fn collect(values: Vec<T>) -> Option<Self>;
}

impl<T> Collect<T> for T {
    const REPEATS: bool = false;
    const MAY_BE_EMPTY: bool = false;
    fn collect(mut values: Vec<T>) -> Option<Self> {
        values.pop()
    }
}

impl<T> Collect<T> for Option<T> {
    const REPEATS: bool = false;
    const MAY_BE_EMPTY: bool = true;
    fn collect(mut values: Vec<T>) -> Option<Self> {
        Some(values.pop())
    }
}

impl<T> Collect<T> for Vec<T> {
    const REPEATS: bool = true;
    const MAY_BE_EMPTY: bool = true;
    fn collect(values: Vec<T>) -> Option<Self> {
        Some(values)
    }
}

/// A declared setting with its parser, whose error is what is expected.
pub struct Declared<T, F> {
    key: &'static str,
    placeholder: &'static str,
    takes: String,
    default: &'static [&'static str],
    secret: bool,
    words: Vec<&'static str>,
    parse: F,
    value: PhantomData<T>,
}

impl<T: 'static, F, Field> Source<Field> for Declared<T, F>
where
    F: Fn(&str) -> Result<T, String> + Send + Sync + 'static,
    Field: Collect<T>,
{
    fn declare(self, help: &'static str, table: &mut Vec<Setting>) {
        let parse = self.parse;
        table.push(Setting {
            key: self.key,
            placeholder: self.placeholder,
            takes: self.takes,
            default: self.default,
            repeats: Field::REPEATS,
            may_be_empty: Field::MAY_BE_EMPTY,
            secret: self.secret,
            is_switch: self.placeholder == SWITCH,
            words: self.words,
            help: help.trim(),
            check: Box::new(move |text| parse(text).map(drop)),
        });
    }

    fn read(self, values: &Values<'_>) -> Result<Field, ConfigError> {
        Field::collect(values.parse(self.key, self.parse)?).ok_or_else(|| values.missing(self.key))
    }
}

/// Fields of another group, converted.
pub struct IncludedGroup<G>(PhantomData<G>);

/// Includes another group.
pub fn group<G: SettingGroup>() -> IncludedGroup<G> {
    IncludedGroup(PhantomData)
}

impl<G: SettingGroup, Field: From<G>> Source<Field> for IncludedGroup<G> {
    fn declare(self, _: &'static str, table: &mut Vec<Setting>) {
        G::declare(table);
    }

    fn read(self, values: &Values<'_>) -> Result<Field, ConfigError> {
        G::read(values).map(Field::from)
    }
}

/// Whether a setting has another value than the default.
pub struct IsChanged(pub &'static str);

impl Source<bool> for IsChanged {
    fn declare(self, _: &'static str, _: &mut Vec<Setting>) {}

    fn read(self, values: &Values<'_>) -> Result<bool, ConfigError> {
        Ok(!values.is_default(self.0))
    }
}

/// Whether a flag sets a setting.
pub struct IsFlag(pub &'static str);

impl Source<bool> for IsFlag {
    fn declare(self, _: &'static str, _: &mut Vec<Setting>) {}

    fn read(self, values: &Values<'_>) -> Result<bool, ConfigError> {
        Ok(values.is_flag(self.0))
    }
}

/// The settings file that was read.
pub struct FileInUse;

impl Source<Option<PathBuf>> for FileInUse {
    fn declare(self, _: &'static str, _: &mut Vec<Setting>) {}

    fn read(self, values: &Values<'_>) -> Result<Option<PathBuf>, ConfigError> {
        Ok(values.file.clone())
    }
}

/// Switches that are on by default, with their help: the set of those that are on, without the part before the dot.
pub struct Switches(pub &'static [(&'static str, &'static str)]);

impl Source<BTreeSet<&'static str>> for Switches {
    fn declare(self, _: &'static str, table: &mut Vec<Setting>) {
        for (key, help) in self.0 {
            Source::<bool>::declare(switch(key, &["true"]), help, table);
        }
    }

    fn read(self, values: &Values<'_>) -> Result<BTreeSet<&'static str>, ConfigError> {
        let mut on = BTreeSet::new();
        for (key, _) in self.0 {
            if switch(key, &["true"]).read(values)? {
                on.insert(key.rsplit('.').next().unwrap_or(key));
            }
        }
        Ok(on)
    }
}

/// Declares structs of settings. The comment of a field is its help; its source is a setting, or another group.
macro_rules! settings {
    ($($(#[$about:meta])* struct $name:ident {
        $($(#[doc = $help:literal])+ $field:ident: $type:ty = $source:expr;)*
    })*) => { $(
        $(#[$about])*
        #[derive(Clone, Debug)]
        pub struct $name { $($(#[doc = $help])+ pub $field: $type,)* }

        impl SettingGroup for $name {
            fn declare(table: &mut Vec<Setting>) {
                $(Source::<$type>::declare($source, concat!($($help),+), table);)*
            }

            fn read(values: &Values<'_>) -> Result<Self, ConfigError> {
                Ok(Self { $($field: Source::<$type>::read($source, values)?,)* })
            }
        }
    )* };
}
pub(super) use settings;

/// The placeholder of paths of this host.
pub const PATH: &str = "PATH";
/// The placeholder of switches.
const SWITCH: &str = "BOOL";

/// Declares a setting of any type.
pub fn setting<T, F: Fn(&str) -> Result<T, String>>(
    key: &'static str,
    (placeholder, takes): (&'static str, impl Into<String>),
    default: &'static [&'static str],
    parse: F,
) -> Declared<T, F> {
    let (takes, secret, words, value) = (takes.into(), false, vec![], PhantomData);
    Declared { key, placeholder, takes, default, secret, words, parse, value }
}

/// Marks a value that errors must not repeat.
pub fn secret<T, F>(declared: Declared<T, F>) -> Declared<T, F> {
    Declared { secret: true, ..declared }
}

/// Declares a text with its own parser.
pub fn text<T, F: Fn(&str) -> Result<T, String>>(
    key: &'static str,
    default: &'static [&'static str],
    parse: F,
) -> Declared<T, F> {
    setting(key, ("TEXT", "text"), default, parse)
}

type Parsed<T> = Declared<T, fn(&str) -> Result<T, String>>;

/// Declares `true` or `false`.
pub fn switch(key: &'static str, default: &'static [&'static str]) -> Parsed<bool> {
    const TAKES: &str = "true or false";
    setting(key, (SWITCH, TAKES), default, |text| text.parse().map_err(|_| TAKES.to_owned()))
}

/// Declares a whole number.
pub fn count(key: &'static str, default: &'static [&'static str]) -> Parsed<usize> {
    const TAKES: &str = "a whole number";
    setting(key, ("N", TAKES), default, |text| text.parse().map_err(|_| TAKES.to_owned()))
}

/// Declares a file or directory.
pub fn path(key: &'static str, default: &'static [&'static str]) -> Parsed<PathBuf> {
    setting(key, (PATH, "a path"), default, |text| Ok(text.into()))
}

/// Declares one of some words.
pub fn choice<T: Copy + 'static>(
    key: &'static str,
    default: &'static [&'static str],
    words: &'static [(&'static str, T)],
) -> Declared<T, impl Fn(&str) -> Result<T, String> + use<T>> {
    let takes = || format!("one of {}", words.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(", "));
    let parse = move |text: &str| {
        words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value).ok_or_else(takes)
    };
    let declared = setting(key, ("WORD", takes()), default, parse);
    Declared { words: words.iter().map(|(word, _)| *word).collect(), ..declared }
}

const DURATION: &str = "a duration such as 200ms, 15s, 1h or 90d";

/// Declares a duration.
pub fn duration(
    key: &'static str,
    default: &'static [&'static str],
    min: Duration,
    max: Duration,
) -> Declared<Duration, impl Fn(&str) -> Result<Duration, String>> {
    setting(key, ("DURATION", DURATION), default, move |text| {
        let found = parse_duration(text).filter(|span| (min..=max).contains(span));
        found.ok_or_else(|| format!("{DURATION}, from {} to {}", words(min), words(max)))
    })
}

/// Declares a duration that may also be zero.
pub fn duration_or_zero(
    key: &'static str,
    default: &'static [&'static str],
    min: Duration,
    max: Duration,
) -> Declared<Duration, impl Fn(&str) -> Result<Duration, String>> {
    setting(key, ("DURATION", DURATION), default, move |text| {
        let found = parse_duration(text).filter(|span| span.is_zero() || (min..=max).contains(span));
        found.ok_or_else(|| format!("{DURATION}, from {} to {}, or 0s for none", words(min), words(max)))
    })
}

/// Parses a duration such as `1h 30m` or `7d`, where a day has 24 hours; `None` if it is invalid or negative.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let span = text.parse::<jiff::Span>().ok()?;
    span.to_duration(SpanRelativeTo::days_are_24_hours()).ok()?.try_into().ok()
}

/// Writes a duration as a setting takes it, in its largest whole unit.
fn words(duration: Duration) -> String {
    let millis = duration.as_millis();
    let units = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)];
    let unit = units.into_iter().find(|(_, size)| millis > 0 && millis.is_multiple_of(*size));
    unit.map_or_else(|| format!("{millis}ms"), |(name, size)| format!("{}{name}", millis / size))
}
