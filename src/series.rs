//! The rows of one cycle: what collectors, attribution and the ledger write, and what a snapshot is made of.
//!
//! A row names its family and its subject by number and keeps its labels in one shared vector, so that a cycle with
//! thousands of rows makes a handful of allocations. The label arity is checked by the compiler through
//! [`Family<S, N>`](crate::catalog::Family).

use std::sync::Arc;

use crate::catalog::{Container, ContainerGpu, Family, Global, Gpu, Id};

/// Stands for *no container* or *no GPU* in a [`Row`].
pub const NONE: u32 = u32::MAX;

/// One label value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Label {
    /// A value from the closed set of its family.
    Fixed(&'static str),
    /// A value that came from outside.
    Text(Arc<str>),
    /// A number such as a pid.
    Number(u64),
    /// A label whose name is settable too (the run settings).
    Named(Arc<str>, Arc<str>),
}

impl From<&'static str> for Label {
    fn from(value: &'static str) -> Self {
        Label::Fixed(value)
    }
}

impl From<&Arc<str>> for Label {
    fn from(value: &Arc<str>) -> Self {
        Label::Text(Arc::clone(value))
    }
}

/// One sample.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The family.
    pub family: Id,
    /// Index of the container in the snapshot, or [`NONE`].
    pub container: u32,
    /// Index of the GPU in the snapshot, or [`NONE`].
    pub gpu: u32,
    labels_at: u32,
    labels_len: u16,
    /// The value, in the family's base unit.
    pub value: f64,
}

/// The rows of one cycle, in the order they were written.
#[derive(Debug, Default)]
pub struct Series {
    rows: Vec<Row>,
    labels: Vec<Label>,
}

/// A place in [`Series`] to go back to when a collector fails half-way.
#[derive(Clone, Copy, Debug)]
pub struct Mark(usize, usize);

impl Series {
    /// Empty, with room for as many rows as the last cycle had.
    pub fn with_room_of(rows: usize, labels: usize) -> Self {
        Self { rows: Vec::with_capacity(rows), labels: Vec::with_capacity(labels) }
    }

    /// A sample that belongs to the host or to memledger itself.
    pub fn global<const N: usize>(&mut self, family: Family<Global, N>, labels: [Label; N], value: f64) {
        self.push(family.id, NONE, NONE, labels, value);
    }

    /// A sample of one container.
    pub fn container<const N: usize>(
        &mut self,
        family: Family<Container, N>,
        container: u32,
        labels: [Label; N],
        value: f64,
    ) {
        self.push(family.id, container, NONE, labels, value);
    }

    /// A sample of one container with labels whose names are settable, after the fixed ones.
    pub fn container_with<const N: usize>(
        &mut self,
        family: Family<Container, N>,
        container: u32,
        labels: [Label; N],
        settable: impl IntoIterator<Item = (Arc<str>, Arc<str>)>,
        value: f64,
    ) {
        self.push(family.id, container, NONE, labels, value);
        let before = self.labels.len();
        self.labels.extend(settable.into_iter().map(|(name, value)| Label::Named(name, value)));
        let added = self.labels.len() - before;
        if let Some(row) = self.rows.last_mut() {
            row.labels_len += added as u16;
        }
    }

    /// A sample of one GPU.
    pub fn gpu<const N: usize>(&mut self, family: Family<Gpu, N>, gpu: u32, labels: [Label; N], value: f64) {
        self.push(family.id, NONE, gpu, labels, value);
    }

    /// A sample of one container on one GPU. `container` may be [`NONE`] for processes of the host.
    pub fn container_gpu<const N: usize>(
        &mut self,
        family: Family<ContainerGpu, N>,
        container: u32,
        gpu: u32,
        labels: [Label; N],
        value: f64,
    ) {
        self.push(family.id, container, gpu, labels, value);
    }

    fn push<const N: usize>(&mut self, family: Id, container: u32, gpu: u32, labels: [Label; N], value: f64) {
        let labels_at = self.labels.len() as u32;
        self.labels.extend(labels);
        self.rows.push(Row { family, container, gpu, labels_at, labels_len: N as u16, value });
    }

    /// Where the series stand now.
    pub fn mark(&self) -> Mark {
        Mark(self.rows.len(), self.labels.len())
    }

    /// Takes back everything written since `mark`.
    pub fn back_to(&mut self, mark: Mark) {
        self.rows.truncate(mark.0);
        self.labels.truncate(mark.1);
    }

    /// How many rows and labels there are.
    pub fn len(&self) -> (usize, usize) {
        (self.rows.len(), self.labels.len())
    }

    /// True if nothing was written.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The rows.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The rows, to sort them or to drop some.
    pub fn rows_mut(&mut self) -> &mut Vec<Row> {
        &mut self.rows
    }

    /// The labels of a row of these series, in the order of its family's label names.
    pub fn labels(&self, row: &Row) -> &[Label] {
        labels_of(&self.labels, row)
    }

    /// Rows and labels apart, to work on the rows while their labels are read.
    pub fn split_mut(&mut self) -> (&mut Vec<Row>, &[Label]) {
        (&mut self.rows, &self.labels)
    }
}

/// The labels of `row` in the label vector of its series.
pub fn labels_of<'a>(labels: &'a [Label], row: &Row) -> &'a [Label] {
    let at = row.labels_at as usize;
    &labels[at..at + row.labels_len as usize]
}

/// Longest label value that is taken over from outside; the rest is cut off.
const LONGEST: usize = 256;

/// Text from outside as a label value of bounded length.
pub fn bounded(text: &str) -> Arc<str> {
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => text[..end].into(),
        None => text.into(),
    }
}

/// Bytes for people, in powers of 1024, as `docker stats` writes them.
pub fn human_bytes(bytes: f64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes;
    let mut unit = 0;
    while value.abs() >= 1024.0 && unit < UNITS.len() - 1 {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{value:.0} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_from_outside_is_cut_between_characters() {
        assert_eq!(bounded(&"ä".repeat(300)).chars().count(), LONGEST);
        assert_eq!(&*bounded("train"), "train");
    }
}
