//! Memory of pods: all that is charged to a pod's cgroup, of which its containers have a part.
//!
//! The rest is the pause process, volumes in memory whose container was restarted, and what ended containers left. A pod is known by its
//! containers, so one of which none runs has no series.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::cycle::PodMemory;
use crate::catalog::*;
use crate::discover::Pod;
use crate::series::{Label, Series};

/// The pods of one cycle, by the paths of their cgroups.
#[derive(Debug, Default)]
pub struct PodMemories(HashMap<PathBuf, PodMemory>);

impl PodMemories {
    /// Adds the usage of a container to its pod. `cgroup`: usage and limit of the pod's own cgroup.
    pub fn add(&mut self, path: &Path, pod: &Arc<Pod>, cgroup: (u64, Option<u64>), container_usage: u64) {
        let (usage, limit) = cgroup;
        let new = || PodMemory { pod: Arc::clone(pod), usage, limit, containers: 0 };
        self.0.entry(path.to_path_buf()).or_insert_with(new).containers += container_usage;
    }

    /// Writes their series, and begins the next cycle. While a pod is replaced by another of its name, both are one. Returns them.
    pub fn write(&mut self, series: &mut Series) -> Vec<PodMemory> {
        let mut by_name: BTreeMap<(Arc<str>, Arc<str>), PodMemory> = BTreeMap::new();
        for (_, memory) in self.0.drain() {
            let name = (Arc::clone(&memory.pod.namespace), Arc::clone(&memory.pod.name));
            match by_name.entry(name) {
                Entry::Vacant(entry) => _ = entry.insert(memory),
                Entry::Occupied(mut entry) => {
                    let sum = entry.get_mut();
                    sum.usage += memory.usage;
                    sum.containers += memory.containers;
                    sum.limit = sum.limit.zip(memory.limit).map(|(one, other)| one.saturating_add(other));
                }
            }
        }
        let mut pods: Vec<PodMemory> = by_name.into_values().collect();
        for memory in &mut pods {
            memory.usage = memory.usage.max(memory.containers); // the files are not read at one instant
            let of_pod = || [Label::from(&memory.pod.namespace), Label::from(&memory.pod.name)];
            series.global(POD_MEMORY_USAGE, of_pod(), memory.usage as f64);
            if let Some(limit) = memory.limit {
                series.global(POD_MEMORY_LIMIT, of_pod(), limit as f64);
            }
            for (component, bytes) in [("containers", memory.containers), ("rest", memory.rest())] {
                let [namespace, name] = of_pod();
                let labels = [namespace, name, component.into()];
                series.global(POD_MEMORY_COMPONENT, labels, bytes as f64);
            }
        }
        pods
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_sum_to_the_usage_and_a_replaced_pod_is_one_series() {
        let pod = |name: &str| Arc::new(Pod { namespace: "ml".into(), name: name.into(), ..Pod::default() });
        let mut pods = PodMemories::default();
        let mut add =
            |path: &str, name: &str, cgroup, usage| pods.add(Path::new(path), &pod(name), cgroup, usage);
        add("pod1", "train-0", (100, Some(200)), 30);
        add("pod1", "train-0", (100, Some(200)), 20);
        // the same name again; the containers were read later, and have grown
        add("pod2", "web", (10, Some(50)), 12);
        add("pod3", "web", (7, None), 5);
        let mut series = Series::default();
        let found = pods.write(&mut series).into_iter();
        let found = found.map(|pod| (pod.pod.name.to_string(), pod.usage, pod.containers, pod.rest()));
        assert_eq!(
            found.collect::<Vec<_>>(),
            [("train-0".to_owned(), 100, 50, 50), ("web".to_owned(), 17, 17, 0)]
        );
        let text = |label: &Label| match label {
            Label::Fixed(text) => (*text).to_owned(),
            Label::Text(text) => text.to_string(),
            other => panic!("{other:?}"),
        };
        let rows = |family: FamilyId| -> Vec<(String, f64)> {
            let own = series.rows().iter().filter(|row| row.family == family);
            let labels = |row| series.labels(row).iter().map(text).collect::<Vec<_>>().join("/");
            own.map(|row| (labels(row), row.value)).collect()
        };
        let row = |labels: &str, value: f64| (labels.to_owned(), value);
        assert_eq!(rows(FamilyId::POD_MEMORY_USAGE), [row("ml/train-0", 100.0), row("ml/web", 17.0)]);
        assert_eq!(rows(FamilyId::POD_MEMORY_LIMIT), [row("ml/train-0", 200.0)], "one of them is unlimited");
        let parts = [
            row("ml/train-0/containers", 50.0),
            row("ml/train-0/rest", 50.0),
            row("ml/web/containers", 17.0),
            row("ml/web/rest", 0.0),
        ];
        assert_eq!(rows(FamilyId::POD_MEMORY_COMPONENT), parts);
        let mut next = Series::default();
        pods.write(&mut next);
        assert!(next.rows().is_empty(), "those of the cycle before are gone");
    }
}
