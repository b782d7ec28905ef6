//! What a container is, as its runtime describes it.

use std::collections::HashMap;
use std::sync::Arc;

use super::{Identity, Pod};
use crate::config::{Filter, GROUP_SETTING, OwnerLabels, RunSettings, label_settings};
use crate::text::bounded;

/// What a container is, as the module of its runtime read it. The record, the inventory and the events of a container share it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ContainerSpec {
    /// The name, without the leading slash of the API; in a pod, the one in the pod's specification.
    pub name: Arc<str>,
    /// Its pod; `None` outside Kubernetes.
    pub pod: Option<Arc<Pod>>,
    /// The image reference that was requested; empty if unknown.
    pub image: Arc<str>,
    /// Compose project; empty without.
    pub compose_project: Arc<str>,
    /// Compose service; empty without.
    pub compose_service: Arc<str>,
    /// Run settings of its labels, and of the environment variables that a setting names: label name and value. Those of its environment
    /// only if they come from an inspect.
    pub settings: RunSettings,
    /// Labels that name its owner.
    pub owners: OwnerLabels,
    /// The user whose engine or run it is; `None` if that is not known.
    pub user: Option<u32>,
    /// Whether its labels pass `--container.label`.
    pub labels_match: bool,
    /// Whether its log is read, by `--container.logs` and its label.
    pub reads_log: bool,
}

impl ContainerSpec {
    /// Creates that of a container with these labels, outside Kubernetes. It has the Compose labels.
    pub fn labelled([name, image]: [&str; 2], labels: &HashMap<String, String>, filter: &Filter) -> Self {
        let label = |key: &str| bounded(labels.get(key).map_or("", String::as_str));
        Self {
            name: bounded(name.trim_start_matches('/')),
            image: bounded(image),
            compose_project: label("com.docker.compose.project"),
            compose_service: label("com.docker.compose.service"),
            settings: label_settings(labels),
            owners: filter.owners(labels),
            labels_match: filter.labels_match(labels),
            reads_log: filter.reads_log(labels),
            ..Self::default()
        }
    }

    /// Returns the identity under which the ledger knows it.
    pub fn identity(&self) -> Identity {
        Identity::canonical(&self.name, self.pod.as_deref())
    }

    /// Returns what makes the runs of a container with this identity comparable with others: its setting `group`; in a pod its namespace,
    /// Job or else pod, and name; its Compose project and service; `None` if that is its name.
    pub fn group(&self, identity: &Identity) -> Option<Arc<str>> {
        if let Some(group) = self.group_setting() {
            return Some(Arc::clone(group));
        }
        if !identity.k8s_pod.is_empty() {
            let job = self.pod.as_ref().map(|pod| &pod.job).filter(|job| !job.is_empty());
            let owner = job.unwrap_or(&identity.k8s_pod);
            return Some(bounded(&format!("{}/{owner}/{}", identity.k8s_namespace, identity.name)));
        }
        match (&*self.compose_project, &*self.compose_service) {
            ("", _) | (_, "") => None,
            (project, service) => Some(bounded(&format!("{project}/{service}"))),
        }
    }

    /// Returns the setting `group`.
    pub fn group_setting(&self) -> Option<&Arc<str>> {
        self.settings.iter().find(|(name, _)| **name == *GROUP_SETTING).map(|(_, group)| group)
    }

    /// Returns the settings but the group.
    pub fn own_settings(&self) -> impl Iterator<Item = &(Arc<str>, Arc<str>)> {
        self.settings.iter().filter(|(name, _)| **name != *GROUP_SETTING)
    }
}
