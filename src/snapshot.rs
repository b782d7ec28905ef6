//! One finished cycle: immutable, shared by `Arc`, rendered at most once.
//!
//! Finishing sorts the rows by family and subject, applies each family's cap, and makes sure that no series exists twice.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::attribute::Attributed;
use crate::catalog::{CATALOG, Id};
use crate::clock::Moment;
use crate::collect::gpu;
use crate::discover::Container;
use crate::series::{Series, labels_of};

/// One finished cycle.
#[derive(Debug)]
pub struct Snapshot {
    /// When it was finished.
    pub finished: Moment,
    /// Its samples, sorted by family, then by container and GPU.
    pub series: Series,
    /// Containers by the number in the rows: the running ones, then ended ones that are still shown.
    pub containers: Vec<Arc<Container>>,
    /// How many of them run.
    pub running: usize,
    /// GPUs by the number in the rows.
    pub gpus: Vec<Arc<gpu::Identity>>,
    /// Processes of containers, those of one container side by side.
    pub processes: Vec<Attributed>,
}

/// Series that a snapshot left out, by family.
pub type Dropped = BTreeMap<Id, u64>;

/// Sorts the rows, drops what is over a family's cap and what exists twice. Adds what was dropped to `dropped`.
pub fn finish(series: &mut Series, dropped: &mut Dropped) {
    let (rows, labels) = series.split_mut();
    // the cap keeps what was written first: a collector that has more writes the most important first
    let mut written = vec![0; CATALOG.len()];
    rows.retain(|row| {
        written[row.family as usize] += 1;
        let kept = written[row.family as usize] <= row.family.def().max_series;
        if !kept {
            *dropped.entry(row.family).or_insert(0) += 1;
        }
        kept
    });
    // stable, so that within one subject the order of writing stays
    rows.sort_by_key(|row| (row.family, row.container, row.gpu));
    let mut previous: Option<crate::series::Row> = None;
    let mut group_start = 0;
    let mut out = 0;
    for at in 0..rows.len() {
        let row = rows[at];
        if previous.is_none_or(|p| (p.family, p.container, p.gpu) != (row.family, row.container, row.gpu)) {
            group_start = out;
        }
        previous = Some(row);
        let twice =
            rows[group_start..out].iter().any(|other| labels_of(labels, other) == labels_of(labels, &row));
        debug_assert!(!twice, "{} was written twice", row.family.def().name);
        if twice {
            *dropped.entry(row.family).or_insert(0) += 1;
            continue;
        }
        rows[out] = row;
        out += 1;
    }
    rows.truncate(out);
}

impl Snapshot {
    /// The rows of one family.
    pub fn family(&self, family: Id) -> &[crate::series::Row] {
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
    fn rows_are_sorted_by_family_and_within_it_by_subject() {
        let mut series = Series::default();
        series.container(CONTAINER_MEMORY_USAGE, 1, [], 1.0);
        series.global(HOST_MEMORY_TOTAL, [], 2.0);
        series.container(CONTAINER_MEMORY_USAGE, 0, [], 3.0);
        finish(&mut series, &mut Dropped::new());
        assert_eq!(series.rows().iter().map(|row| row.value).collect::<Vec<_>>(), [2.0, 3.0, 1.0]);
    }

    #[test]
    fn what_is_over_the_cap_is_dropped_and_counted() {
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
        assert_eq!(dropped, Dropped::from([(Id::PROCESS_GPU_MEMORY, 44)]));
    }

    #[test]
    #[cfg_attr(debug_assertions, should_panic(expected = "written twice"))]
    fn no_series_exists_twice() {
        let mut series = Series::default();
        for value in [1.0, 2.0] {
            series.container(CONTAINER_MEMORY_COMPONENT, 7, ["anon".into()], value);
        }
        let mut dropped = Dropped::new();
        finish(&mut series, &mut dropped);
        assert_eq!((series.rows().len(), dropped.len()), (1, 1));
    }
}
