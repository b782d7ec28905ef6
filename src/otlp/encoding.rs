//! The size limit and helpers that metrics and log records share.

use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};

/// Largest request, uncompressed. The default limit of receivers is 4 MiB; this stays well below it, and it bounds the
/// memory of an export.
pub const MAX_BYTES: usize = 1 << 20;

/// Returns an attribute with a text value.
pub fn text(key: &str, value: &str) -> KeyValue {
    let value = AnyValue { value: Some(Value::StringValue(value.to_owned())) };
    KeyValue { key: key.to_owned(), value: Some(value), ..KeyValue::default() }
}
