//! The rows of one cycle, written by collectors, attribution and the ledger, for the exporters.
//!
//! A row refers to its family and subject by number and keeps its labels in one shared vector, so that a cycle with
//! thousands of rows needs only a few allocations. The compiler checks the number of labels through
//! [`Family<S, N>`](crate::catalog::Family).

use std::sync::Arc;

use crate::catalog::{Container, ContainerGpu, Family, FamilyId, Global, Gpu};

/// *No container* or *no GPU* in a [`Row`].
pub const NONE: u32 = u32::MAX;

/// One label value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Label {
    /// A value from the closed set of its family.
    Fixed(&'static str),
    /// A value from outside.
    Text(Arc<str>),
    /// A number such as a pid.
    Number(u64),
    /// A label with a configurable name (the run settings).
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
    pub family: FamilyId,
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
    /// By number of the container, the Unix time since which the ledger counts its name; 0 if that is not known.
    counted_since: Vec<f64>,
}

/// A position in [`Series`], to roll back to when a collector fails half-way.
#[derive(Clone, Copy, Debug)]
pub struct Mark(usize, usize);

impl Series {
    /// Creates an empty instance with capacity for this many rows and labels.
    pub fn with_capacity(rows: usize, labels: usize) -> Self {
        let (rows, labels) = (Vec::with_capacity(rows), Vec::with_capacity(labels));
        Self { rows, labels, ..Self::default() }
    }

    /// Sets since when the ledger counts the name of a container, a Unix time.
    pub fn set_counted_since(&mut self, container: u32, since: f64) {
        let number = container as usize;
        if self.counted_since.len() <= number {
            self.counted_since.resize(number + 1, 0.0);
        }
        self.counted_since[number] = since;
    }

    /// Returns since when the ledger counts the name of a container, a Unix time; `None` if that is not known.
    pub fn counted_since(&self, container: u32) -> Option<f64> {
        self.counted_since.get(container as usize).copied().filter(|since| *since > 0.0)
    }

    /// Adds a sample of the host or of memledger itself.
    pub fn global<const N: usize>(&mut self, family: Family<Global, N>, labels: [Label; N], value: f64) {
        self.push(family.id, NONE, NONE, labels, value);
    }

    /// Adds a sample of one container.
    pub fn container<const N: usize>(
        &mut self,
        family: Family<Container, N>,
        container: u32,
        labels: [Label; N],
        value: f64,
    ) {
        self.push(family.id, container, NONE, labels, value);
    }

    /// Adds a sample of one container that has labels with configurable names after the fixed ones.
    pub fn container_with<const N: usize>(
        &mut self,
        family: Family<Container, N>,
        container: u32,
        labels: [Label; N],
        configurable: impl IntoIterator<Item = (Arc<str>, Arc<str>)>,
        value: f64,
    ) {
        self.push(family.id, container, NONE, labels, value);
        let before = self.labels.len();
        self.labels.extend(configurable.into_iter().map(|(name, value)| Label::Named(name, value)));
        let added = self.labels.len() - before;
        if let Some(row) = self.rows.last_mut() {
            row.labels_len += added as u16;
        }
    }

    /// Adds a sample of one GPU.
    pub fn gpu<const N: usize>(&mut self, family: Family<Gpu, N>, gpu: u32, labels: [Label; N], value: f64) {
        self.push(family.id, NONE, gpu, labels, value);
    }

    /// Adds a sample of one container on one GPU. `container` is [`NONE`] for processes of the host.
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

    fn push<const N: usize>(
        &mut self,
        family: FamilyId,
        container: u32,
        gpu: u32,
        labels: [Label; N],
        value: f64,
    ) {
        let labels_at = self.labels.len() as u32;
        self.labels.extend(labels);
        self.rows.push(Row { family, container, gpu, labels_at, labels_len: N as u16, value });
    }

    /// Returns the current position.
    pub fn mark(&self) -> Mark {
        Mark(self.rows.len(), self.labels.len())
    }

    /// Removes everything written since `mark`.
    pub fn rollback(&mut self, mark: Mark) {
        self.rows.truncate(mark.0);
        self.labels.truncate(mark.1);
    }

    /// Returns the numbers of rows and labels.
    pub fn len(&self) -> (usize, usize) {
        (self.rows.len(), self.labels.len())
    }

    /// Returns true if nothing was written.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the rows.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Returns the labels of a row of these series, in the order of its family's label names.
    pub fn labels(&self, row: &Row) -> &[Label] {
        labels_of(&self.labels, row)
    }

    /// Returns rows and labels separately, to change rows while reading their labels.
    pub fn split_mut(&mut self) -> (&mut Vec<Row>, &[Label]) {
        (&mut self.rows, &self.labels)
    }
}

/// Returns the labels of `row` in the label vector of its series.
pub fn labels_of<'a>(labels: &'a [Label], row: &Row) -> &'a [Label] {
    let at = row.labels_at as usize;
    &labels[at..at + row.labels_len as usize]
}
