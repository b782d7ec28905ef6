//! The settings of a run, from its labels and environment, its arguments, and its program.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::sample::RunSample;
use super::setting_names::KnownSetting;
use super::{MAX_SETTINGS, RunFigures};
use crate::config::GROUP_SETTING;
use crate::discover::Container;

impl RunFigures {
    /// Records the settings of one cycle. Returns true if some became known.
    pub(super) fn record_settings(&mut self, container: &Container, run: &RunSample) -> bool {
        let known = |figures: &Self| {
            figures.settings.len() + figures.arguments.len() + figures.reported_settings.len()
        };
        let known_before = known(self);
        for (name, value) in &container.spec.settings {
            // the settings of a run cannot change; those of a container are unknown until its runtime answers
            self.settings.entry(Arc::clone(name)).or_insert_with(|| Arc::clone(value));
        }
        if let Some((_, arguments)) = run.arguments.as_ref().filter(|_| self.arguments.is_empty()) {
            self.arguments = arguments.iter().cloned().collect();
        }
        self.record_reported_settings(run);
        known(self) > known_before
    }

    /// Returns these settings of labels and environment with those that the program reports, which precede them.
    pub fn settings_over(&self, others: &[(Arc<str>, Arc<str>)]) -> Vec<(Arc<str>, Arc<str>)> {
        let all: BTreeMap<_, _> = others.iter().cloned().collect();
        let arguments = self.unknown_arguments(&all);
        let others = others.iter().filter(|(name, _)| !self.reported_settings.contains_key(name)).cloned();
        let reported =
            self.reported_settings.iter().map(|(name, value)| (Arc::clone(name), Arc::clone(value)));
        others.chain(reported).chain(arguments).collect()
    }

    /// Returns the arguments that neither the program reports nor these settings have, also not by another name.
    pub(super) fn unknown_arguments(
        &self,
        settings: &BTreeMap<Arc<str>, Arc<str>>,
    ) -> BTreeMap<Arc<str>, Arc<str>> {
        let is_known = |name: &Arc<str>| {
            let by_name = [settings, &self.reported_settings].iter().any(|known| known.contains_key(name));
            let find =
                |known: KnownSetting| known.find(settings).or_else(|| known.find(&self.reported_settings));
            by_name || KnownSetting::of(name).and_then(find).is_some()
        };
        let unknown = self.arguments.iter().filter(|(name, _)| !is_known(name));
        unknown.map(|(name, value)| (Arc::clone(name), Arc::clone(value))).collect()
    }

    /// Records what one process reports: the first one of the lowest rank. A later one may be another program, such as an evaluation.
    pub(super) fn record_reported_settings(&mut self, run: &RunSample) {
        let Some(process) = run.settings_of else { return };
        if self.reported_by.is_some_and(|known| known < process) {
            return;
        }
        if self.reported_by.replace(process) != Some(process) {
            self.reported_settings.clear();
        }
        for (name, value) in run.settings.iter().filter(|(name, _)| ***name != *GROUP_SETTING) {
            if self.reported_settings.len() < MAX_SETTINGS || self.reported_settings.contains_key(name) {
                self.reported_settings.insert(Arc::clone(name), Arc::clone(value));
            }
        }
    }
}
