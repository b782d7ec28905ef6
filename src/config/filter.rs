//! Selects the containers to export, and the settings in their environment.

use std::collections::HashMap;
use std::sync::Arc;

use regex::Regex;

use super::settings::{Filter, LogSelection};
use super::value_parsers::variable_name;
use crate::text::bounded;

/// Labels with this prefix are settings of a run.
const SETTING_PREFIX: &str = "memledger.run.";
/// Name of the setting that names the group of a run.
pub const GROUP_SETTING: &str = "group";
/// Label that selects a container for `--container.logs`: `true` or `false`.
const LOG_LABEL: &str = "memledger.logs";
/// Maximum number of such labels of a container, and bytes of the name of one.
const MAX_LABEL_SETTINGS: usize = 16;
const MAX_NAME: usize = 64;

/// Settings of a run: label name and value, by name.
pub type RunSettings = Vec<(Arc<str>, Arc<str>)>;

/// The labels that name the owner of a container: name of the metric label and value; the first one is the owner.
pub type OwnerLabels = Vec<(Arc<str>, Arc<str>)>;

impl Filter {
    /// Returns true if a container with any of these names is exported.
    pub fn shows(&self, names: &[&str]) -> bool {
        let matches = |regex: &Regex| names.iter().any(|name| regex.is_match(name));
        self.include.as_ref().is_none_or(matches) && !self.exclude.as_ref().is_some_and(matches)
    }

    /// Returns true if the labels contain all required ones.
    pub fn labels_match(&self, labels: &HashMap<String, String>) -> bool {
        self.labels.iter().all(|(key, required)| match (labels.get(key), required) {
            (Some(value), Some(required)) => value == required,
            (found, _) => found.is_some(),
        })
    }

    /// Returns the labels that name the owner of a container: name of the metric label and value, in the order of the setting.
    pub fn owners(&self, labels: &HashMap<String, String>) -> OwnerLabels {
        let mut found = OwnerLabels::new();
        for (key, name) in &self.owner_labels {
            let value = labels.get(key).map_or("", |value| value.trim());
            if !value.is_empty() && found.iter().all(|(other, _)| other != name) {
                found.push((Arc::clone(name), bounded(value)));
            }
        }
        found
    }

    /// Returns whether the log of a container with these labels is read.
    pub fn reads_log(&self, labels: &HashMap<String, String>) -> bool {
        let choice = labels.get(LOG_LABEL).map(String::as_str);
        match self.logs {
            LogSelection::None => false,
            LogSelection::Labelled => choice == Some("true"),
            LogSelection::All => choice != Some("false"),
        }
    }

    /// Returns the allow-listed variables of an environment of `NAME=value` lines, as label names and values.
    ///
    /// Nothing else of the environment is kept: it may contain secrets.
    pub fn settings_of<'a>(&self, environment: impl IntoIterator<Item = &'a str>) -> RunSettings {
        let mut found: Vec<_> = environment
            .into_iter()
            .filter_map(|line| line.split_once('='))
            .filter(|(name, value)| !value.is_empty() && self.settings.iter().any(|allowed| allowed == name))
            .map(|(name, value)| (name.to_ascii_lowercase().into(), bounded(value)))
            .collect();
        found.sort();
        found.dedup_by(|later, first| later.0 == first.0);
        found
    }
}

/// Returns the settings among the labels of a container or a pod: `memledger.run.KEY=VALUE`, as label names and values. Keys that
/// cannot be label names are ignored.
pub fn label_settings(labels: &HashMap<String, String>) -> RunSettings {
    let setting = |(key, value): (&String, &String)| {
        let name = variable_name(key.strip_prefix(SETTING_PREFIX)?).ok()?;
        let is_short = name.len() <= MAX_NAME && !value.is_empty();
        is_short.then(|| (name.to_ascii_lowercase().into(), bounded(value)))
    };
    let mut found: RunSettings = labels.iter().filter_map(setting).collect();
    found.sort();
    found.dedup_by(|later, first| later.0 == first.0);
    // the group is not among those that are cut off
    let group = found.iter().position(|(name, _)| **name == *GROUP_SETTING).map(|at| found.remove(at));
    found.truncate(MAX_LABEL_SETTINGS - usize::from(group.is_some()));
    merged(found, group.into_iter().collect())
}

/// Adds settings to those that come before them.
pub fn merged(mut first: RunSettings, more: RunSettings) -> RunSettings {
    first.extend(more);
    first.sort_by(|one, other| one.0.cmp(&other.0));
    first.dedup_by(|later, first| later.0 == first.0);
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_labels_come_before_those_of_the_environment() {
        let labels = [
            ("memledger.run.BATCH_SIZE", "64"),
            ("memledger.run.group", "vision"),
            ("memledger.run.run", "reserved"),
            ("memledger.run.container_name", "reserved"),
            ("memledger.run.bad-name", "1"),
            ("memledger.run.empty", ""),
            ("other", "1"),
        ];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let filter = Filter { settings: vec!["BATCH_SIZE".into(), "ACCUM".into()], ..Filter::default() };
        let found = merged(label_settings(&labels.into()), filter.settings_of(["BATCH_SIZE=32", "ACCUM=2"]));
        let found: Vec<_> = found.iter().map(|(name, value)| (&**name, &**value)).collect();
        assert_eq!(found, [("accum", "2"), ("batch_size", "64"), ("group", "vision")]);
    }

    #[test]
    fn logs_are_read_only_where_a_label_says_so() {
        let reads = |logs, label: Option<&str>| {
            let labels = label.map(|value| (LOG_LABEL.to_owned(), value.to_owned()));
            Filter { logs, ..Filter::default() }.reads_log(&labels.into_iter().collect())
        };
        assert!(!reads(LogSelection::None, Some("true")));
        assert!(reads(LogSelection::Labelled, Some("true")));
        assert!(!reads(LogSelection::Labelled, None) && !reads(LogSelection::Labelled, Some("1")));
        assert!(reads(LogSelection::All, None) && !reads(LogSelection::All, Some("false")));
    }

    #[test]
    fn exclude_overrides_include() {
        let filter = Filter {
            include: Some(Regex::new("^piper").unwrap()),
            exclude: Some(Regex::new("-debug$").unwrap()),
            ..Filter::default()
        };
        assert!(filter.shows(&["piper1-gpl-train-1"]));
        assert!(!filter.shows(&["piper1-debug"]));
        assert!(!filter.shows(&["postgres"]));
    }

    #[test]
    fn owner_is_the_first_configured_label_that_is_set() {
        let names = ["team", "owner", "a.b", "a-b"]
            .map(|key| super::super::value_parsers::label_key("label", key).unwrap());
        let filter = Filter { owner_labels: names.into(), ..Filter::default() };
        let owners = |labels: &[(&str, &str)]| {
            let labels = labels.iter().map(|(key, value)| (key.to_string(), value.to_string()));
            let owners = filter.owners(&labels.collect());
            owners.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(owners(&[("owner", "anna"), ("team", "vision")]), "label_team=vision label_owner=anna");
        assert_eq!(owners(&[("owner", "anna"), ("team", " ")]), "label_owner=anna", "an empty one is none");
        assert_eq!(owners(&[("a-b", "1"), ("a.b", "2")]), "label_a_b=2", "one label of each name");
        assert_eq!(owners(&[("other", "x")]), "");
    }

    #[test]
    fn requires_all_configured_labels() {
        let labels =
            HashMap::from([("team".to_owned(), "speech".to_owned()), ("gpu".to_owned(), String::new())]);
        let filter = |pairs: &[(&str, Option<&str>)]| Filter {
            labels: pairs.iter().map(|(key, value)| (key.to_string(), value.map(str::to_owned))).collect(),
            ..Filter::default()
        };
        assert!(filter(&[]).labels_match(&labels));
        assert!(filter(&[("team", None), ("gpu", None)]).labels_match(&labels));
        assert!(!filter(&[("team", Some("vision"))]).labels_match(&labels));
        assert!(!filter(&[("team", None), ("absent", None)]).labels_match(&labels));
    }

    #[test]
    fn extracts_allow_listed_variables_only() {
        let filter = Filter { settings: vec!["BATCH_SIZE".into(), "ACCUM".into()], ..Filter::default() };
        let found = filter.settings_of([
            "AWS_SECRET_ACCESS_KEY=x",
            "BATCH_SIZE=32",
            "batch_size=1",
            "ACCUM=",
            "PATH",
        ]);
        assert_eq!(found, [("batch_size".into(), "32".into())]);
    }
}
