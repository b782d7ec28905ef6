//! A running memledger and its ledger: checks of kills and exits, and of the host's total.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{DUPLICATES, EXITS, GAPS, HOST_KILLS, KILLS, SOURCE_UP, Scene, oom_kills};
use crate::support::docker::{Container, of};
use crate::support::{Memledger, Metrics, eventually};

/// The kills of a scene in the ledger.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// By container name.
    pub containers: BTreeMap<String, usize>,
    /// Of processes outside containers.
    pub host: usize,
    /// Unattributed.
    pub unattributed: usize,
    /// Pending.
    pub pending: usize,
}

impl Tally {
    pub fn sum(&self) -> usize {
        self.containers.values().sum::<usize>() + self.host + self.unattributed + self.pending
    }
}

/// A running memledger, with checks of kills and exits.
pub struct Ledger {
    pub memledger: Memledger,
    /// The kernel's count before and after its total began: at its start, or at that of the first one with its state.
    pub(super) began: (u64, u64),
}

impl Ledger {
    /// Returns a count of the host. The first pages of a start may not have it yet.
    pub fn count(&self, family: &str) -> f64 {
        self.memledger.eventually(family, |metrics| metrics.try_value(family, &[]))
    }

    /// Waits until `check` succeeds.
    pub fn eventually(&self, what: &str, mut check: impl FnMut(&Metrics) -> Result<(), String>) {
        self.memledger.eventually(what, |metrics| {
            check(metrics).map_err(|error| {
                let log = self.memledger.log();
                let from = log.lines().count().saturating_sub(12);
                format!("{error}; its log ends:\n{}", log.lines().skip(from).collect::<Vec<_>>().join("\n"))
            })
        });
    }

    /// Returns the kills of a container by victim, over all scopes; `None` while it has no such series.
    pub fn kills(metrics: &Metrics, name: &str, victim: &str) -> Option<f64> {
        let labels = [("container_name", name), ("victim", victim)];
        (!metrics.all(KILLS, &labels).is_empty()).then(|| metrics.sum(KILLS, &labels))
    }

    /// Waits until a container has exactly these counts, and checks that they stay.
    pub fn settles(&self, name: &str, main: usize, child: usize) {
        let right = |metrics: &Metrics| {
            let found = (Self::kills(metrics, name, "main"), Self::kills(metrics, name, "child"));
            let wanted = (Some(main as f64), Some(child as f64));
            (found == wanted).then_some(()).ok_or_else(|| format!("{name}: main, child {found:?}"))
        };
        self.eventually(&format!("{name}: {main} main and {child} child"), right);
        right(&self.memledger.fresh_metrics()).expect("a count stays");
    }

    /// Waits until it has a container without kills, and which process the runtime says is its first.
    pub fn knows(&self, container: &Container) {
        self.settles(&container.name, 0, 0);
        self.eventually("its first process", |metrics| container.is_inspected(metrics));
    }

    /// Like [`Ledger::settles`], with all kills in one scope.
    pub fn settles_in(&self, scope: &str, name: &str, main: usize, child: usize) {
        self.settles(name, main, child);
        let sum = self.memledger.metrics().sum(KILLS, &[("container_name", name), ("scope", scope)]);
        assert_eq!(sum, (main + child) as f64, "{name} in scope {scope}");
    }

    /// Waits until a container has exited so often for this reason, and for no other.
    pub fn ends(&self, name: &str, reason: &str, times: usize) {
        self.eventually(&format!("{name} has ended {times} times as {reason}"), |metrics| {
            let of_reason = metrics.sum(EXITS, &[("container_name", name), ("reason", reason)]);
            let all = metrics.all(EXITS, &of(name));
            let sum: f64 = all.iter().map(|(_, _, value)| value).sum();
            if of_reason == times as f64 && sum == of_reason { Ok(()) } else { Err(format!("{all:?}")) }
        });
    }

    /// Returns all events, oldest first.
    pub fn events(&self) -> Vec<Value> {
        let (status, text) = self.memledger.get("/api/v1/events?limit=10000");
        assert_eq!(status, 200, "{text}");
        let response: Value = serde_json::from_str(&text).expect("JSON");
        let all = response["events"].as_array().expect("a list").iter();
        all.filter(|event| event["before_counting"] != true).cloned().collect()
    }

    /// Returns the kills of processes with the scene's name.
    pub fn kills_of(&self, scene: &Scene) -> Vec<Value> {
        let ours = |event: &Value| event["type"] == "oom_kill" && event["process"] == scene.tag.as_str();
        self.events().into_iter().filter(ours).collect()
    }

    /// Returns the kills in the scene's containers.
    pub fn container_kills(&self, scene: &Scene) -> Vec<Value> {
        let is_in =
            |event: &Value| event["container_name"].as_str().is_some_and(|n| n.starts_with(&scene.name));
        self.events().into_iter().filter(|event| event["type"] == "oom_kill" && is_in(event)).collect()
    }

    /// Returns the current kills of the scene. Of a set of containers that lost one process each, the record of the
    /// scene may be in the event of a container of another test and vice versa: then the scene's container counts.
    pub fn tally(&self, scene: &Scene) -> Tally {
        let mut tally = Tally::default();
        let is_ours =
            |kill: &Value| kill["container_name"].as_str().is_some_and(|n| n.starts_with(&scene.name));
        let is_named = |kill: &Value| kill["process"] == scene.tag.as_str();
        for kill in self.events().into_iter().filter(|event| event["type"] == "oom_kill") {
            let exchanged = kill["method"] == "set" && is_ours(&kill) != is_named(&kill);
            if !if exchanged { is_ours(&kill) } else { is_named(&kill) } {
                continue;
            }
            match kill["owner"].as_str() {
                Some("container") => {
                    let name = kill["container_name"].as_str().expect("a name").to_owned();
                    *tally.containers.entry(name).or_default() += 1;
                }
                Some("host") => tally.host += 1,
                Some("unattributed") => tally.unattributed += 1,
                Some("pending") => tally.pending += 1,
                other => panic!("owner is {other:?}: {kill}"),
            }
        }
        tally
    }

    /// Waits until this many kills of the scene are in the ledger and none is pending.
    pub fn settled_tally(&self, scene: &Scene, count: usize) -> Tally {
        eventually("all kills settled", || {
            let tally = self.tally(scene);
            assert!(tally.sum() <= count, "too many: {tally:?}");
            let done = tally.sum() == count && tally.pending == 0;
            done.then_some(()).ok_or_else(|| format!("{tally:?}"))?;
            Ok(tally)
        })
    }

    /// Checks that all kills of the scene are in the ledger: every container has exactly its own, and no other has any.
    pub fn has_exact_counts(&self, scene: &Scene, truth: &BTreeMap<String, usize>) {
        let tally = self.settled_tally(scene, truth.values().sum());
        self.print_kills_without_owner(scene);
        let wanted = Tally { containers: truth.clone(), ..Tally::default() };
        assert_eq!(tally, wanted);
        for (name, count) in truth {
            self.settles(name, 1, count - 1);
        }
    }

    /// Prints the kills of the scene that have no owner, and then the exits of its containers, for the log of a test that fails.
    fn print_kills_without_owner(&self, scene: &Scene) {
        let is_exit = |event: &&Value| {
            event["type"] == "exit"
                && event["container_name"].as_str().is_some_and(|n| n.starts_with(&scene.name))
        };
        let mut kills = self.kills_of(scene);
        kills.retain(|kill| kill["owner"] != "container");
        if kills.is_empty() {
            return;
        }
        kills.iter().for_each(|kill| eprintln!("{kill}"));
        self.events().iter().filter(is_exit).for_each(|exit| {
            eprintln!(
                "{} {} {} {}",
                exit["at"], exit["container_name"], exit["reason"], exit["duration_seconds"]
            );
        });
    }

    /// Checks that all kills of the scene are in the ledger, and that no container has more than its own. Returns the
    /// number of unattributed kills.
    pub fn has_no_misattribution(&self, scene: &Scene, truth: &BTreeMap<String, usize>) -> usize {
        let tally = self.settled_tally(scene, truth.values().sum());
        self.print_kills_without_owner(scene);
        self.check_owners(&tally, truth)
    }

    /// Like [`Ledger::has_no_misattribution`], where the kernel may have overwritten records before they were read: those
    /// kills have no process. Only for a test with no other kills beside it. Returns the numbers of unattributed kills
    /// and of those without a record, of which there were `gaps` before.
    pub fn has_no_misattribution_but_gaps(
        &self,
        scene: &Scene,
        truth: &BTreeMap<String, usize>,
        gaps: f64,
    ) -> (usize, usize) {
        let count: usize = truth.values().sum();
        let (tally, gaps) = eventually("all kills settled, with or without a record", || {
            let gaps = (self.memledger.metrics().value(GAPS, &[]) - gaps) as usize;
            let tally = self.tally(scene);
            assert!(tally.sum() <= count, "too many: {tally:?}");
            let done = tally.pending == 0 && tally.sum() + gaps >= count;
            done.then_some(()).ok_or_else(|| format!("{tally:?}, {gaps} without a record, of {count}"))?;
            Ok((tally, gaps))
        });
        (self.check_owners(&tally, truth), gaps)
    }

    fn check_owners(&self, tally: &Tally, truth: &BTreeMap<String, usize>) -> usize {
        for (name, count) in &tally.containers {
            let own = truth.get(name).unwrap_or_else(|| panic!("{name} had no kill: {tally:?}"));
            assert!(count <= own, "{name} had {own}: {tally:?}");
        }
        assert_eq!(tally.host, 0, "{tally:?}");
        tally.unattributed
    }

    /// Waits until the host's total equals the kernel's count since it began. Both may increase during the scrape, so
    /// the total must be between the kernel's counts before and after it.
    pub fn matches_kernel_count(&self) {
        let (low, high) = self.began;
        eventually("the host's total is the kernel's", || {
            let before = oom_kills();
            let metrics = self.memledger.metrics();
            let after = oom_kills();
            let found = metrics.value(HOST_KILLS, &[]) + metrics.value(DUPLICATES, &[]);
            let (least, most) = (before.saturating_sub(high) as f64, (after - low) as f64);
            let fits = (least..=most).contains(&found);
            fits.then_some(()).ok_or_else(|| format!("{found} is not in {least}..={most}"))
        });
    }

    /// Returns `memledger_oom_source_up` of a source.
    pub fn source(&self, source: &str) -> Option<f64> {
        self.memledger.metrics().get(SOURCE_UP, &[("source", source)])
    }
}
