//! Renders the Prometheus text exposition, format 0.0.4, with the encoder of the `prometheus` crate.

use prometheus::proto::{Counter, Gauge, LabelPair, Metric, MetricFamily, MetricType};
use prometheus::{Encoder, TextEncoder};

use crate::catalog::{MetricKind, MetricScope};
use crate::series::{Label, NONE, Row};
use crate::snapshot::Snapshot;

/// The content type of [`render`]'s text.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Renders a snapshot family by family, because the encoder's form of a row takes several times the memory of its text.
///
/// # Errors
/// The encoder rejects a family; the rules of the catalog make that impossible, and a test renders every family.
pub fn render(snapshot: &Snapshot) -> Result<Vec<u8>, prometheus::Error> {
    let mut text = Vec::with_capacity(snapshot.series.rows().len() * 160);
    for rows in snapshot.series.rows().chunk_by(|a, b| a.family == b.family) {
        TextEncoder::new().encode(&[family(snapshot, rows)], &mut text)?;
    }
    Ok(text)
}

fn family(snapshot: &Snapshot, rows: &[Row]) -> MetricFamily {
    let def = rows[0].family.desc();
    let mut family = MetricFamily::default();
    family.set_name(def.name.to_owned());
    family.set_help(def.help.to_owned());
    let counter = def.kind == MetricKind::Counter;
    family.set_field_type(if counter { MetricType::COUNTER } else { MetricType::GAUGE });
    let metrics = rows.iter().map(|row| {
        let mut metric = Metric::from_label(labels(snapshot, row));
        if counter {
            let mut value = Counter::default();
            value.set_value(row.value);
            metric.set_counter(value);
        } else {
            let mut value = Gauge::default();
            value.set_value(row.value);
            metric.set_gauge(value);
        }
        metric
    });
    family.set_metric(metrics.collect());
    family
}

fn labels(snapshot: &Snapshot, row: &Row) -> Vec<LabelPair> {
    let mut pairs = Vec::with_capacity(8);
    each_label(snapshot, row, |name, value| {
        let mut pair = LabelPair::default();
        pair.set_name(name.to_owned());
        pair.set_value(value.to_owned());
        pairs.push(pair);
    });
    pairs
}

/// Calls `each` with name and value of every label of a row, those of its subject first. Empty values are omitted.
pub fn each_label(snapshot: &Snapshot, row: &Row, mut each: impl FnMut(&str, &str)) {
    let def = row.family.desc();
    let mut each = |name: &str, value: &str| {
        if !value.is_empty() {
            each(name, value);
        }
    };
    if matches!(def.scope, MetricScope::Container | MetricScope::ContainerGpu) && row.container != NONE {
        let identity = &snapshot.containers[row.container as usize].identity;
        let values = [&identity.k8s_namespace, &identity.k8s_pod, &identity.name];
        std::iter::zip(MetricScope::Container.labels(), values).for_each(|(name, value)| each(name, value));
    }
    if matches!(def.scope, MetricScope::Gpu | MetricScope::ContainerGpu) {
        let values = snapshot.gpus[row.gpu as usize].labels();
        std::iter::zip(MetricScope::Gpu.labels(), values).for_each(|(name, value)| each(name, value));
    }
    let mut names = def.labels.iter();
    for label in snapshot.series.labels(row) {
        match label {
            Label::Named(name, value) => each(name, value),
            other => {
                let name = names.next().copied().unwrap_or("label");
                match other {
                    Label::Fixed(value) => each(name, value),
                    Label::Text(value) => each(name, value),
                    Label::Number(value) => each(name, &value.to_string()),
                    Label::Named(..) => {}
                }
            }
        }
    }
}
