//! A snapshot as the data points of OTLP, request by request.

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

use super::counters::{Counters, Origins, Pending, Since, since};
use super::resource::scope;
use super::{MOST_BYTES, names, text};
use crate::catalog::{Id, Kind};
use crate::export::prometheus::each_label;
use crate::series::{NONE, Row};
use crate::snapshot::Snapshot;

/// Room for what stands around a point: field numbers and lengths.
const AROUND: usize = 8;

/// Goes through a snapshot.
#[derive(Debug)]
pub struct Points<'a> {
    snapshot: &'a Snapshot,
    resource: &'a Resource,
    origins: Origins,
    at: usize,
}

/// One request.
#[derive(Debug)]
pub struct Pushed {
    /// The message, encoded.
    pub body: Vec<u8>,
    /// Data points in it.
    pub points: usize,
    /// What to hand to [`Counters::taken`] once the endpoint has taken it.
    pub counters: Vec<Pending>,
    /// Points that were left out, because one alone is larger than a request may be.
    pub too_large: usize,
}

impl<'a> Points<'a> {
    /// All of a snapshot.
    pub fn new(snapshot: &'a Snapshot, resource: &'a Resource, origins: Origins) -> Self {
        Self { snapshot, resource, origins, at: 0 }
    }

    /// How many points are not made yet.
    pub fn rest(&self) -> usize {
        self.snapshot.series.rows().len() - self.at
    }

    /// The next request; `None` at the end.
    pub fn next(&mut self, counters: &Counters) -> Option<Pushed> {
        let rows = self.snapshot.series.rows();
        if self.at == rows.len() {
            return None;
        }
        let mut made = Pushed { body: vec![], points: 0, counters: vec![], too_large: 0 };
        let mut metrics: Vec<(Id, Metric)> = vec![];
        let empty = self.resource.encoded_len() + scope().encoded_len() + 2 * AROUND;
        let mut size = empty;
        while let Some(row) = rows.get(self.at) {
            let (point, pending) = self.point(row, counters);
            let head = match metrics.last() {
                Some((family, _)) if *family == row.family => None,
                _ => Some(metric(row.family, counters.is_delta())),
            };
            let mut more = point.as_ref().map_or(0, |point| point.encoded_len() + AROUND);
            more += head.as_ref().map_or(0, |head| head.encoded_len() + AROUND);
            if empty + more > MOST_BYTES {
                made.too_large += 1;
                self.at += 1;
                continue;
            }
            if size + more > MOST_BYTES {
                break;
            }
            self.at += 1;
            made.counters.extend(pending);
            let Some(point) = point else { continue };
            size += more;
            metrics.extend(head.map(|head| (row.family, head)));
            if let Some((_, metric)) = metrics.last_mut() {
                add(metric, point);
                made.points += 1;
            }
        }
        made.body = request(self.resource, metrics.into_iter().map(|(_, metric)| metric).collect());
        Some(made)
    }

    /// A row as a point; `None` for a delta that says nothing yet. Beside it, for a counter, what to hand back.
    fn point(&self, row: &Row, counters: &Counters) -> (Option<NumberDataPoint>, Option<Pending>) {
        let now = self.snapshot.finished.unix_nanos();
        let mut point = NumberDataPoint {
            attributes: attributes(self.snapshot, row),
            time_unix_nano: now,
            value: Some(Value::AsDouble(row.value)),
            ..NumberDataPoint::default()
        };
        if row.family.def().kind != Kind::Counter {
            return (Some(point), None);
        }
        let since = since(row.family);
        let origin = match since {
            Since::Memledger => self.origins.memledger,
            Since::Boot => self.origins.boot,
            Since::Ledger => self.origins.ledger,
            Since::Device => 0, // "not known" in OTLP
            Since::Container => self.started(row).unwrap_or(self.origins.boot),
        };
        let (told, pending) =
            counters.point(key(row, &point.attributes), row.value, now, origin.min(now), since);
        let told = told.map(|(start, value)| {
            point.start_time_unix_nano = start;
            point.value = Some(Value::AsDouble(value));
            point
        });
        (told, Some(pending))
    }

    /// When the container of a row started, in Unix nanoseconds.
    fn started(&self, row: &Row) -> Option<u64> {
        let started =
            self.snapshot.containers.get(row.container as usize).filter(|_| row.container != NONE)?.started?;
        Some((started * 1e9) as u64)
    }
}

fn attributes(snapshot: &Snapshot, row: &Row) -> Vec<KeyValue> {
    let mut attributes = Vec::with_capacity(8);
    each_label(snapshot, row, |label, value| {
        attributes.push(text(names::attribute(label), value));
        if label == "gpu_uuid" {
            attributes.push(text("hw.id", value));
        }
    });
    attributes
}

/// What a counter is known by from push to push.
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

/// A metric without points.
fn metric(family: Id, delta: bool) -> Metric {
    let (def, name) = (family.def(), names::of(family));
    let data = match def.kind {
        Kind::Gauge | Kind::Info => Data::Gauge(Gauge::default()),
        Kind::Counter => {
            let temporality =
                if delta { AggregationTemporality::Delta } else { AggregationTemporality::Cumulative };
            Data::Sum(Sum {
                data_points: vec![],
                aggregation_temporality: temporality.into(),
                is_monotonic: true,
            })
        }
    };
    Metric {
        name: name.name.clone(),
        description: def.help.to_owned(),
        unit: name.unit.to_owned(),
        data: Some(data),
        ..Metric::default()
    }
}

fn add(metric: &mut Metric, point: NumberDataPoint) {
    match &mut metric.data {
        Some(Data::Gauge(gauge)) => gauge.data_points.push(point),
        Some(Data::Sum(sum)) => sum.data_points.push(point),
        _ => {}
    }
}

fn request(resource: &Resource, metrics: Vec<Metric>) -> Vec<u8> {
    let scope_metrics = vec![ScopeMetrics { scope: Some(scope()), metrics, ..ScopeMetrics::default() }];
    let resource_metrics = vec![ResourceMetrics {
        resource: Some(resource.clone()),
        scope_metrics,
        ..ResourceMetrics::default()
    }];
    ExportMetricsServiceRequest { resource_metrics }.encode_to_vec()
}
