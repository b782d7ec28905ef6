//! The counts that never fall: of the host, and of each container's name. They outlive the events they were made of.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::{Deserialize, Serialize};

use super::desk::ContainerFigures;
use super::entries::{Name, Reason, Scope, Victim};
use super::store::{Changes, Contents};

/// Names that are remembered at most; those that nothing happened to for longest give way.
const MOST_NAMES: usize = 20_000;
const NAME_KEY: &str = "name:";

/// Counts of one name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OfName {
    kills: [[u64; 2]; 2],
    #[serde(skip_serializing_if = "Option::is_none")]
    last_kill: Option<f64>,
    exits: BTreeMap<String, u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_exit_code: Option<i64>,
    starts: u64,
    touched: f64,
}

/// Counts of the host, by their key in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Total {
    /// Every kill.
    Host,
    /// Processes outside containers.
    HostProcess,
    /// No evidence.
    Unattributed,
    /// No record.
    Gaps,
    /// Second lines.
    Duplicates,
}

impl Total {
    fn key(self) -> &'static str {
        match self {
            Total::Host => "host_oom_kills",
            Total::HostProcess => "host_process_oom_kills",
            Total::Unattributed => "oom_kills_unattributed",
            Total::Gaps => "oom_gaps",
            Total::Duplicates => "oom_duplicate_lines",
        }
    }
}

/// All counts.
#[derive(Debug, Default)]
pub struct Totals {
    host: BTreeMap<String, u64>,
    names: HashMap<Name, OfName>,
    changed: BTreeSet<Name>,
    host_changed: bool,
}

impl Totals {
    /// As they were stored.
    pub fn new(contents: &Contents) -> Self {
        let stored =
            contents.notes.iter().filter_map(|(key, text)| Some((key.strip_prefix(NAME_KEY)?, text)));
        let names = stored.filter_map(|(key, text)| Some((from_key(key)?, serde_json::from_str(text).ok()?)));
        Self { host: contents.totals.clone(), names: names.collect(), ..Self::default() }
    }

    /// Adds to a count of the host; takes away only what was added before anybody could see it.
    pub fn add(&mut self, total: Total, number: i64) {
        let count = self.host.entry(total.key().to_owned()).or_insert(0);
        *count = count.saturating_add_signed(number);
        self.host_changed = true;
    }

    /// A count of the host.
    pub fn get(&self, total: Total) -> u64 {
        self.host.get(total.key()).copied().unwrap_or(0)
    }

    fn of(&mut self, name: &Name, at: f64) -> &mut OfName {
        self.changed.insert(name.clone());
        let counts = self.names.entry(name.clone()).or_default();
        counts.touched = counts.touched.max(at);
        counts
    }

    /// A container of this name was killed in.
    pub fn killed(&mut self, name: &Name, victim: Victim, scope: Scope, at: f64) {
        let counts = self.of(name, at);
        counts.kills[victim as usize][scope as usize] += 1;
    }

    /// When a container of this name was last killed in; told before the rest is known of the kill.
    pub fn last_kill(&mut self, name: &Name, at: f64) {
        let counts = self.of(name, at);
        counts.last_kill = Some(counts.last_kill.map_or(at, |last| last.max(at)));
    }

    /// A container of this name began to run.
    pub fn started(&mut self, name: &Name, at: f64) {
        self.of(name, at).starts += 1;
    }

    /// A container of this name ended.
    pub fn ended(&mut self, name: &Name, reason: Reason, exit_code: Option<i64>, at: f64) {
        let counts = self.of(name, at);
        *counts.exits.entry(reason.label().to_owned()).or_insert(0) += 1;
        counts.last_exit_code = exit_code.or(counts.last_exit_code);
    }

    /// The figures of one name; all 0 where nothing ever happened.
    pub fn figures(&self, name: &Name) -> ContainerFigures {
        let counts = self.names.get(name).cloned().unwrap_or_default();
        ContainerFigures {
            name: name.clone(),
            kills: counts.kills,
            last_kill: counts.last_kill,
            exits: Reason::ALL.map(|reason| counts.exits.get(reason.label()).copied().unwrap_or(0)),
            last_exit_code: counts.last_exit_code,
            restarts: counts.starts.saturating_sub(1),
        }
    }

    /// Writes what changed. Names that nobody bears any more give way where there are too many, those without kills first.
    pub fn write(&mut self, changes: &mut Changes, is_borne: impl Fn(&Name) -> bool) {
        if std::mem::take(&mut self.host_changed) {
            changes.totals.extend(self.host.clone());
        }
        for name in std::mem::take(&mut self.changed) {
            let text = self.names.get(&name).and_then(|counts| serde_json::to_string(counts).ok());
            changes.notes.insert(key_of(&name), text);
        }
        if self.names.len() > MOST_NAMES {
            let mut by_age: Vec<_> = self
                .names
                .iter()
                .filter(|(name, _)| !is_borne(name))
                .map(|(name, counts)| ((counts.last_kill.is_some(), counts.touched), name.clone()))
                .collect();
            by_age.sort_by(|one, other| one.0.0.cmp(&other.0.0).then(one.0.1.total_cmp(&other.0.1)));
            for (_, name) in by_age.into_iter().take(MOST_NAMES / 10) {
                self.names.remove(&name);
                changes.notes.insert(key_of(&name), None);
            }
        }
    }
}

/// Namespace and pod cannot hold a slash.
fn key_of(name: &Name) -> String {
    format!("{NAME_KEY}{}/{}/{}", name.k8s_namespace_name, name.k8s_pod_name, name.container_name)
}

fn from_key(key: &str) -> Option<Name> {
    let mut parts = key.splitn(3, '/');
    let (namespace, pod, name) = (parts.next()?, parts.next()?, parts.next()?);
    Some(Name { k8s_namespace_name: namespace.into(), k8s_pod_name: pod.into(), container_name: name.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_go_on_where_the_store_has_them() {
        let name = Name { container_name: "train".into(), ..Name::default() };
        let mut totals = Totals::default();
        totals.add(Total::Host, 2);
        totals.add(Total::Host, -1);
        totals.started(&name, 1.0);
        totals.started(&name, 2.0);
        totals.killed(&name, Victim::Child, Scope::Host, 3.0);
        totals.ended(&name, Reason::OomHost, Some(137), 4.0);
        let mut changes = Changes::default();
        totals.write(&mut changes, |_| true);
        let notes = changes.notes.into_iter().filter_map(|(key, text)| Some((key, text?))).collect();
        let contents = Contents { totals: changes.totals, notes, ..Contents::default() };
        let again = Totals::new(&contents);
        assert_eq!(again.get(Total::Host), 1);
        assert_eq!(again.figures(&name), totals.figures(&name));
        let figures = again.figures(&name);
        assert_eq!((figures.restarts, figures.kills[1][1], figures.last_exit_code), (1, 1, Some(137)));
    }
    #[test]
    fn a_name_of_kubernetes_comes_back_from_its_key() {
        let name = Name {
            k8s_namespace_name: "ml".into(),
            k8s_pod_name: "train-0".into(),
            container_name: "a/b".into(),
        };
        assert_eq!(from_key(key_of(&name).strip_prefix(NAME_KEY).expect("the prefix")), Some(name));
    }

    #[test]
    fn of_too_many_names_those_that_nothing_happened_to_for_longest_give_way() {
        let name = |number: usize| Name { container_name: number.to_string().into(), ..Name::default() };
        let mut totals = Totals::default();
        for number in 0..=MOST_NAMES {
            totals.started(&name(number), number as f64);
        }
        let mut changes = Changes::default();
        totals.write(&mut changes, |_| false);
        assert_eq!(totals.names.len(), MOST_NAMES + 1 - MOST_NAMES / 10);
        assert_eq!(changes.notes[&key_of(&name(0))], None, "it is removed from the store too");
        assert!(changes.notes[&key_of(&name(MOST_NAMES))].is_some());
    }
}
