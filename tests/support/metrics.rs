//! A scrape, parsed by a parser of the tests' own.

use std::collections::BTreeMap;

/// Labels of one series.
pub type Labels = BTreeMap<String, String>;

/// All series of one scrape.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    pub series: Vec<(String, Labels, f64)>,
}

impl Metrics {
    /// Parses the text format; fails on anything that is not.
    pub fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        Self { series: lines.map(parse_line).collect() }
    }

    /// Returns the series of a family that have at least these labels.
    pub fn all(&self, name: &str, labels: &[(&str, &str)]) -> Vec<&(String, Labels, f64)> {
        let carries =
            |found: &Labels| labels.iter().all(|(key, value)| found.get(*key).is_some_and(|v| v == value));
        self.series.iter().filter(|(found, of, _)| found == name && carries(of)).collect()
    }

    /// Returns the value of the one series of a family that has these labels; `None` if there is none.
    pub fn get(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let found = self.all(name, labels);
        assert!(found.len() < 2, "{name} {labels:?} is not one series: {found:?}");
        found.first().map(|(_, _, value)| *value)
    }

    /// Like [`Metrics::get`]; panics without the series.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.get(name, labels).unwrap_or_else(|| panic!("no {name} {labels:?}"))
    }

    /// Like [`Metrics::get`]; an error without the series, for checks that are polled.
    pub fn try_value(&self, name: &str, labels: &[(&str, &str)]) -> Result<f64, String> {
        self.get(name, labels).ok_or_else(|| format!("no {name} {labels:?}"))
    }

    /// Returns the sum of all series of a family that have these labels.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.all(name, labels).iter().map(|(_, _, value)| value).sum()
    }
}

fn parse_line(line: &str) -> (String, Labels, f64) {
    let name_end = line.find(['{', ' ']).unwrap_or_else(|| panic!("no value: {line}"));
    let (name, mut rest) = line.split_at(name_end);
    let mut labels = Labels::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        while !rest.starts_with('}') {
            let (key, after) = rest.split_once("=\"").unwrap_or_else(|| panic!("a label: {line}"));
            let mut value = String::new();
            let mut chars = after.char_indices();
            let end = loop {
                match chars.next() {
                    Some((at, '"')) => break at,
                    Some((_, '\\')) => match chars.next() {
                        Some((_, 'n')) => value.push('\n'),
                        Some((_, c @ ('\\' | '"'))) => value.push(c),
                        other => panic!("escape {other:?}: {line}"),
                    },
                    Some((_, c)) => value.push(c),
                    None => panic!("an open label value: {line}"),
                }
            };
            assert!(labels.insert(key.to_owned(), value).is_none(), "a label twice: {line}");
            rest = after[end + 1..].trim_start_matches(',');
        }
        rest = &rest[1..];
    }
    let value = rest.trim().parse().unwrap_or_else(|_| panic!("a number: {line}"));
    (name.to_owned(), labels, value)
}
