//! Selects the containers to export, and the settings in their environment.

use std::collections::HashMap;
use std::sync::Arc;

use regex::Regex;

use super::settings::Filter;
use crate::series::bounded;

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

    /// Returns the allow-listed variables of an environment of `NAME=value` lines, as label names and values.
    ///
    /// Nothing else of the environment is kept: it may contain secrets.
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
