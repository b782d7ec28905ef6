//! Converts events of the ledger to OTLP log records.
//!
//! A record has all fields of the event, as in the ledger and in `/api/v1/events`. Fields that the semantic conventions have
//! use their names; the others are prefixed with `memledger.`. `memledger.id` is the event's number, by which receivers can
//! recognize duplicates.

use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, ArrayValue, KeyValue, KeyValueList};
use opentelemetry_proto::tonic::logs::v1::{LogRecord, ResourceLogs, ScopeLogs, SeverityNumber};
use opentelemetry_proto::tonic::resource::v1::Resource;
use prost::Message;

use super::encoding::MAX_BYTES;
use super::resource::scope;
use crate::clock::Timestamp;
use crate::events::{ExitReason, LedgerEvent};
use crate::export::events::sentence;

/// Bytes around a record: field numbers and lengths.
const ENVELOPE_BYTES: usize = 16;

/// One request of log records.
#[derive(Debug)]
pub struct EventRecords {
    /// The encoded message; without records if the first event alone is too large.
    pub body: Vec<u8>,
    /// How many of the given events, from the first on, are in it or too large for any request.
    pub events: usize,
    /// How many of them are in it.
    pub records: usize,
}

impl EventRecords {
    /// Encodes as many events as fit into one request, at most `max_events`.
    pub fn new(events: &[LedgerEvent], max_events: usize, resource: &Resource, now: Timestamp) -> Self {
        let empty = resource.encoded_len() + scope().encoded_len() + 2 * ENVELOPE_BYTES;
        let (mut records, mut included, mut size) = (vec![], 0, empty);
        for event in events.iter().take(max_events) {
            let record = record(event, now);
            let added = record.encoded_len() + ENVELOPE_BYTES;
            if empty + added <= MAX_BYTES {
                if size + added > MAX_BYTES {
                    break;
                }
                size += added;
                records.push(record);
            }
            included += 1;
        }
        let count = records.len();
        let scope_logs =
            vec![ScopeLogs { scope: Some(scope()), log_records: records, ..ScopeLogs::default() }];
        let logs = ResourceLogs { resource: Some(resource.clone()), scope_logs, ..ResourceLogs::default() };
        let body = ExportLogsServiceRequest { resource_logs: vec![logs] }.encode_to_vec();
        Self { body, events: included, records: count }
    }
}

fn record(event: &LedgerEvent, now: Timestamp) -> LogRecord {
    let (name, severity) = match event {
        LedgerEvent::OomKill(_) => ("memledger.oom_kill", SeverityNumber::Error),
        LedgerEvent::Exit(exit) => {
            let wanted = matches!(exit.reason, Some(ExitReason::Completed | ExitReason::Stopped));
            ("memledger.exit", if wanted { SeverityNumber::Info } else { SeverityNumber::Warn })
        }
        LedgerEvent::GpuError(_) => ("memledger.gpu_error", SeverityNumber::Error),
        LedgerEvent::CudaOom(_) => ("memledger.cuda_oom", SeverityNumber::Error),
    };
    let fields = serde_json::to_value(event).unwrap_or_default();
    let fields = fields.as_object().into_iter().flatten();
    LogRecord {
        time_unix_nano: (event.at() * 1e9) as u64,
        observed_time_unix_nano: now.unix_nanos(),
        severity_number: severity.into(),
        severity_text: severity.as_str_name().trim_start_matches("SEVERITY_NUMBER_").to_owned(),
        body: Some(AnyValue { value: Some(Value::StringValue(sentence(event))) }),
        attributes: fields.filter_map(|(key, value)| pair(attribute(key), value)).collect(),
        event_name: name.to_owned(),
        ..LogRecord::default()
    }
}

/// Returns the attribute of an event's field.
fn attribute(field: &str) -> String {
    match field {
        "container_name" => "container.name".to_owned(),
        "container_id" => "container.id".to_owned(),
        "k8s_namespace_name" => "k8s.namespace.name".to_owned(),
        "k8s_pod_name" => "k8s.pod.name".to_owned(),
        "image" => "container.image.name".to_owned(),
        "runtime" => "container.runtime.name".to_owned(),
        "pid" => "process.pid".to_owned(),
        "gpu_uuid" => "hw.id".to_owned(),
        other => format!("memledger.{other}"),
    }
}

/// Converts a field; `None` for null.
fn pair(key: String, value: &serde_json::Value) -> Option<KeyValue> {
    Some(KeyValue { key, value: Some(any(value)?), ..KeyValue::default() })
}

fn any(value: &serde_json::Value) -> Option<AnyValue> {
    use serde_json::Value as Json;
    let value = match value {
        Json::Null => return None,
        Json::Bool(value) => Value::BoolValue(*value),
        Json::Number(number) => match number.as_i64() {
            Some(whole) => Value::IntValue(whole),
            None => Value::DoubleValue(number.as_f64()?),
        },
        Json::String(text) => Value::StringValue(text.clone()),
        Json::Array(values) => {
            Value::ArrayValue(ArrayValue { values: values.iter().filter_map(any).collect() })
        }
        Json::Object(fields) => {
            let values = fields.iter().filter_map(|(key, value)| pair(key.clone(), value)).collect();
            Value::KvlistValue(KeyValueList { values })
        }
    };
    Some(AnyValue { value: Some(value) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{Exit, ExitReason};

    #[test]
    fn reason_of_an_exit_is_that_of_its_event_and_of_metrics() {
        for reason in ExitReason::ALL {
            let exit = Exit { reason: Some(reason), ..Exit::default() };
            let record = record(&LedgerEvent::Exit(exit), Timestamp::now());
            let found = record.attributes.into_iter().find(|pair| pair.key == "memledger.reason");
            let wanted = Some(AnyValue { value: Some(Value::StringValue(reason.label().to_owned())) });
            assert_eq!(found.and_then(|pair| pair.value), wanted);
        }
    }
}
