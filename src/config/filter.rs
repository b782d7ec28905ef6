//! Which containers to show, and which of their settings.

use std::collections::HashMap;
use std::sync::Arc;

use regex::Regex;

use crate::series::bounded;

/// The choice of containers and settings.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Only names that match, if set.
    pub include: Option<Regex>,
    /// No names that match, if set. Wins over `include`.
    pub exclude: Option<Regex>,
    /// Labels that must all be there: key, and value if one was given.
    pub labels: Vec<(String, Option<String>)>,
    /// Names of environment variables that become labels of the run info.
    pub settings: Vec<String>,
}

impl Filter {
    /// True if a container is shown that can be called by any of these names.
    pub fn shows(&self, names: &[&str]) -> bool {
        let matches = |regex: &Regex| names.iter().any(|name| regex.is_match(name));
        self.include.as_ref().is_none_or(matches) && !self.exclude.as_ref().is_some_and(matches)
    }

    /// True if the labels hold all that was asked for.
    pub fn labels_match(&self, labels: &HashMap<String, String>) -> bool {
        self.labels.iter().all(|(key, wanted)| match (labels.get(key), wanted) {
            (Some(value), Some(wanted)) => value == wanted,
            (found, _) => found.is_some(),
        })
    }

    /// The allow-listed part of an environment of `NAME=value` lines, as label name and value.
    ///
    /// Nothing else of the environment is ever kept: secrets live there.
    pub fn settings_of<'a>(
        &self,
        environment: impl IntoIterator<Item = &'a str>,
    ) -> Vec<(Arc<str>, Arc<str>)> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exclude_wins_over_include() {
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
    fn all_labels_asked_for_must_be_there() {
        let labels =
            HashMap::from([("team".to_owned(), "speech".to_owned()), ("gpu".to_owned(), String::new())]);
        let asked = |pairs: &[(&str, Option<&str>)]| Filter {
            labels: pairs.iter().map(|(key, value)| (key.to_string(), value.map(str::to_owned))).collect(),
            ..Filter::default()
        };
        assert!(asked(&[]).labels_match(&labels));
        assert!(asked(&[("team", None), ("gpu", None)]).labels_match(&labels));
        assert!(!asked(&[("team", Some("vision"))]).labels_match(&labels));
        assert!(!asked(&[("team", None), ("absent", None)]).labels_match(&labels));
    }

    #[test]
    fn only_allow_listed_variables_leave_the_environment() {
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
