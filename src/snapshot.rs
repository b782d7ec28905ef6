//! One finished cycle: immutable, shared by `Arc`, rendered at most once.
//!
//! Finishing sorts the rows by family and subject, applies each family's maximum, and removes duplicate series.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::attribute::ContainerProcess;
use crate::catalog::{CATALOG, FamilyId};
use crate::clock::Timestamp;
use crate::collect::cycle::Cycle;
use crate::discover::Container;
use crate::gpu;
use crate::series::{Row, Series, labels_of};

/// One finished cycle.
#[derive(Debug)]
pub struct Snapshot {
    /// When the cycle finished.
    pub finished: Timestamp,
    /// Its samples, sorted by family, then by container and GPU.
    pub series: Series,
    /// Containers by the number in the rows: running ones, then ended ones that are still exported, then those of pods that do not
    /// run and have a GPU allocated.
    pub containers: Vec<Arc<Container>>,
    /// The number of running containers.
    pub running: usize,
    /// GPUs by the number in the rows.
    pub gpus: Vec<Arc<gpu::GpuIdentity>>,
    /// Processes of containers, grouped by container.
    pub processes: Vec<ContainerProcess>,
    /// For each running container whether all its processes are known; without it none are.
    pub processes_complete: Vec<bool>,
    /// What the cycle found, for screens; empty while no cycle finishes.
    pub cycle: Cycle,
    /// Unix time of the cycle that finished last.
    pub last_cycle: f64,
}

impl Snapshot {
    /// Returns a snapshot with these series alone.
    pub fn of_series(finished: Timestamp, series: Series) -> Self {
        Self {
            finished,
            series,
            containers: vec![],
            running: 0,
            gpus: vec![],
            processes: vec![],
            processes_complete: vec![],
            cycle: Cycle::default(),
            last_cycle: finished.unix_seconds(),
        }
    }
}

/// Number of series that snapshots left out, by family.
pub type Dropped = BTreeMap<FamilyId, u64>;

/// Sorts the rows and drops duplicates and the rows over a family's maximum. Adds the number of dropped rows to `dropped`.
pub fn finish(series: &mut Series, dropped: &mut Dropped) {
    let (rows, labels) = series.split_mut();
    // keeps the rows that were written first: collectors write the most important ones first
    let mut written = vec![0; CATALOG.len()];
    rows.retain(|row| {
        written[row.family as usize] += 1;
        let kept = written[row.family as usize] <= row.family.desc().max_series;
        if !kept {
            *dropped.entry(row.family).or_insert(0) += 1;
        }
        kept
    });
    group_by_family(rows);
    // stable: within one subject the order of writing stays
    rows.sort_by_key(|row| (row.family, row.container, row.gpu));
    let mut previous: Option<Row> = None;
    let mut group_start = 0;
    let mut out = 0;
    for at in 0..rows.len() {
        let row = rows[at];
        if previous.is_none_or(|p| (p.family, p.container, p.gpu) != (row.family, row.container, row.gpu)) {
            group_start = out;
        }
        previous = Some(row);
        let is_duplicate =
            rows[group_start..out].iter().any(|other| labels_of(labels, other) == labels_of(labels, &row));
        debug_assert!(!is_duplicate, "{} was written twice", row.family.desc().name);
        if is_duplicate {
            *dropped.entry(row.family).or_insert(0) += 1;
            continue;
        }
        rows[out] = row;
        out += 1;
    }
    rows.truncate(out);
}

/// Puts the rows of each family together. In the order of writing they are nearly sorted, so what remains to sort is little.
fn group_by_family(rows: &mut Vec<Row>) {
    let mut next = vec![0; CATALOG.len() + 1];
    for row in rows.iter() {
        next[row.family as usize + 1] += 1;
    }
    for family in 1..next.len() {
        next[family] += next[family - 1];
    }
    let mut grouped = rows.clone();
    for row in rows.iter() {
        let at = &mut next[row.family as usize];
        grouped[*at] = *row;
        *at += 1;
    }
    *rows = grouped;
}

impl Snapshot {
    /// Returns the processes of a container, or `None` if they are unknown.
    pub fn processes_of(&self, container: usize) -> Option<&[ContainerProcess]> {
        let is_complete = self.processes_complete.get(container).is_some_and(|complete| *complete);
        let from = self.processes.partition_point(|process| (process.container as usize) < container);
        let to = self.processes.partition_point(|process| process.container as usize <= container);
        is_complete.then(|| &self.processes[from..to])
    }

    /// Returns the rows of one family.
    pub fn family(&self, family: FamilyId) -> &[Row] {
        let rows = self.series.rows();
        let from = rows.partition_point(|row| row.family < family);
        let to = rows.partition_point(|row| row.family <= family);
        &rows[from..to]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::*;
    use crate::series::{Label, NONE};

    #[test]
    fn sorts_rows_by_family_then_subject() {
        let mut series = Series::default();
        series.container(CONTAINER_MEMORY_USAGE, 1, [], 1.0);
        series.global(HOST_MEMORY_TOTAL, [], 2.0);
        series.container(CONTAINER_MEMORY_USAGE, 0, [], 3.0);
        finish(&mut series, &mut Dropped::new());
        assert_eq!(series.rows().iter().map(|row| row.value).collect::<Vec<_>>(), [2.0, 3.0, 1.0]);
    }

    #[test]
    fn drops_and_counts_series_over_the_maximum() {
        let mut series = Series::default();
        for pid in 0..300 {
            series.container_gpu(
                PROCESS_GPU_MEMORY,
                NONE,
                0,
                [Label::Number(pid), "a".into(), "".into()],
                1.0,
            );
        }
        let mut dropped = Dropped::new();
        finish(&mut series, &mut dropped);
        assert_eq!(series.rows().len(), 256);
        assert_eq!(dropped, Dropped::from([(FamilyId::PROCESS_GPU_MEMORY, 44)]));
    }

    #[test]
    #[cfg_attr(debug_assertions, should_panic(expected = "written twice"))]
    fn drops_duplicate_series() {
        let mut series = Series::default();
        for value in [1.0, 2.0] {
            series.container(CONTAINER_MEMORY_COMPONENT, 7, ["anon".into()], value);
        }
        let mut dropped = Dropped::new();
        finish(&mut series, &mut dropped);
        assert_eq!((series.rows().len(), dropped.len()), (1, 1));
    }
}
