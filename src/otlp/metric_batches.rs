//! Converts a snapshot to OTLP data points, request by request.

use std::hash::{DefaultHasher, Hash, Hasher};

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value::StringValue;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Metric, NumberDataPoint, ResourceMetrics, ScopeMetrics, Sum,
};
use opentelemetry_proto::tonic::resource::v1::Resource;
use prost::Message;

use super::encoding::{MAX_BYTES, text};
use super::resource::scope;
use super::temporality::{CounterStates, Origins, PendingPoint};
use crate::catalog::{CounterOrigin, FamilyId, MetricKind};
use crate::export::otlp_naming;
use crate::export::prometheus::each_label;
use crate::series::{NONE, Row};
use crate::snapshot::Snapshot;

/// Bytes around a point: field numbers and lengths.
const ENVELOPE_BYTES: usize = 8;

/// Iterates over the requests of a snapshot.
#[derive(Debug)]
pub struct MetricBatches<'a> {
    snapshot: &'a Snapshot,
    resource: &'a Resource,
    origins: Origins,
    position: usize,
}

/// One request.
#[derive(Debug)]
pub struct MetricBatch {
    /// The encoded message.
    pub body: Vec<u8>,
    /// Data points in it.
    pub points: usize,
    /// To be passed to [`CounterStates::commit`] after the endpoint has accepted the request.
    pub counters: Vec<PendingPoint>,
    /// Points that were omitted because one alone is larger than a request may be.
    pub too_large: usize,
}

impl<'a> MetricBatches<'a> {
    /// Starts at the first point of a snapshot.
    pub fn new(snapshot: &'a Snapshot, resource: &'a Resource, origins: Origins) -> Self {
        Self { snapshot, resource, origins, position: 0 }
    }

    /// Returns how many points are left.
    pub fn remaining(&self) -> usize {
        self.snapshot.series.rows().len() - self.position
    }

    /// Encodes the next request; `None` at the end.
    pub fn next(&mut self, counters: &CounterStates) -> Option<MetricBatch> {
        let rows = self.snapshot.series.rows();
        if self.position == rows.len() {
            return None;
        }
        let mut batch = MetricBatch { body: vec![], points: 0, counters: vec![], too_large: 0 };
        let mut metrics: Vec<(FamilyId, Metric)> = vec![];
        let empty = self.resource.encoded_len() + scope().encoded_len() + 2 * ENVELOPE_BYTES;
        let mut size = empty;
        while let Some(row) = rows.get(self.position) {
            let (point, pending) = self.point(row, counters);
            let head = match metrics.last() {
                Some((family, _)) if *family == row.family => None,
                _ => Some(new_metric(row.family)),
            };
            let mut added = point.encoded_len() + ENVELOPE_BYTES;
            added += head.as_ref().map_or(0, |head| head.encoded_len() + ENVELOPE_BYTES);
            if empty + added > MAX_BYTES {
                batch.too_large += 1;
                self.position += 1;
                continue;
            }
            if size + added > MAX_BYTES {
                break;
            }
            self.position += 1;
            batch.counters.extend(pending);
            size += added;
            metrics.extend(head.map(|head| (row.family, head)));
            if let Some((_, metric)) = metrics.last_mut() {
                add_point(metric, point);
                batch.points += 1;
            }
        }
        batch.body = encode_request(self.resource, metrics.into_iter().map(|(_, metric)| metric).collect());
        Some(batch)
    }

    /// Converts a row to a point. Counters have a pending state too.
    fn point(&self, row: &Row, counters: &CounterStates) -> (NumberDataPoint, Option<PendingPoint>) {
        let now = self.snapshot.finished.unix_nanos();
        let mut point = NumberDataPoint {
            attributes: attributes(self.snapshot, row),
            time_unix_nano: now,
            value: Some(Value::AsDouble(row.value)),
            ..NumberDataPoint::default()
        };
        if row.family.desc().kind != MetricKind::Counter {
            return (point, None);
        }
        let origin = match row.family.desc().origin {
            CounterOrigin::Memledger => self.origins.memledger,
            CounterOrigin::Boot => self.origins.boot,
            // a name that appeared a minute ago was not counted before: a collector that makes deltas takes its first value as one
            CounterOrigin::Ledger => self
                .snapshot
                .series
                .counted_since(row.container)
                .map_or(self.origins.ledger, |since| (since * 1e9) as u64),
            CounterOrigin::Device => 0, // unknown, in OTLP
            CounterOrigin::Container => self.container_start(row).unwrap_or(self.origins.boot),
        };
        let (start, pending) = counters.start(key(row, &point.attributes), row.value, now, origin);
        point.start_time_unix_nano = start;
        (point, Some(pending))
    }

    /// Returns the start of the row's container, in Unix nanoseconds.
    fn container_start(&self, row: &Row) -> Option<u64> {
        let started =
            self.snapshot.containers.get(row.container as usize).filter(|_| row.container != NONE)?.started?;
        Some((started * 1e9) as u64)
    }
}

fn attributes(snapshot: &Snapshot, row: &Row) -> Vec<KeyValue> {
    let mut attributes = Vec::with_capacity(8);
    each_label(snapshot, row, |label, value| {
        attributes.push(text(otlp_naming::attribute(label), value));
        if label == "gpu_uuid" {
            attributes.push(text("hw.id", value));
        }
    });
    attributes
}

/// Identifies a counter across exports.
fn key(row: &Row, attributes: &[KeyValue]) -> u64 {
    let mut hasher = DefaultHasher::new();
    row.family.hash(&mut hasher);
    for attribute in attributes {
        attribute.key.hash(&mut hasher);
        if let Some(AnyValue { value: Some(StringValue(value)) }) = &attribute.value {
            value.hash(&mut hasher);
        }
    }
    hasher.finish()
}

/// Creates a metric without points.
fn new_metric(family: FamilyId) -> Metric {
    let (def, name) = (family.desc(), otlp_naming::of(family));
    let data = match def.kind {
        MetricKind::Gauge | MetricKind::Info => Data::Gauge(Gauge::default()),
        MetricKind::Counter => Data::Sum(Sum {
            data_points: vec![],
            aggregation_temporality: AggregationTemporality::Cumulative.into(),
            is_monotonic: true,
        }),
    };
    Metric {
        name: name.name.clone(),
        description: def.help.to_owned(),
        unit: name.unit.to_owned(),
        data: Some(data),
        ..Metric::default()
    }
}

fn add_point(metric: &mut Metric, point: NumberDataPoint) {
    match &mut metric.data {
        Some(Data::Gauge(gauge)) => gauge.data_points.push(point),
        Some(Data::Sum(sum)) => sum.data_points.push(point),
        _ => {}
    }
}

fn encode_request(resource: &Resource, metrics: Vec<Metric>) -> Vec<u8> {
    let scope_metrics = vec![ScopeMetrics { scope: Some(scope()), metrics, ..ScopeMetrics::default() }];
    let resource_metrics = vec![ResourceMetrics {
        resource: Some(resource.clone()),
        scope_metrics,
        ..ResourceMetrics::default()
    }];
    ExportMetricsServiceRequest { resource_metrics }.encode_to_vec()
}
