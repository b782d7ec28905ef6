//! OTLP: a snapshot as metrics, the ledger's events as log records. Pure functions that lead to the bytes of requests.
//!
//! The messages are those of `opentelemetry-proto`, filled from the catalog; the SDK's instruments do not lie in between,
//! for the reasons in docs/decisions/0019. A push of a large host is cut into several requests, made one after the other:
//! only one is in memory at a time.
//!
//! Not here: connections, time and retries (`push`).

mod counters;
mod logs;
pub mod names;
mod points;
mod resource;

use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};

pub use counters::{Counters, Origins, Pending};
pub use logs::Logs;
pub use points::{Points, Pushed};
pub use resource::{Host, resource};

/// A request is cut before it is larger than this, uncompressed. Receivers take 4 MiB unless told otherwise; this leaves
/// room, and it is what a push holds in memory.
pub const MOST_BYTES: usize = 1 << 20;

/// An attribute that is text.
fn text(key: &str, value: &str) -> KeyValue {
    let value = AnyValue { value: Some(Value::StringValue(value.to_owned())) };
    KeyValue { key: key.to_owned(), value: Some(value), ..KeyValue::default() }
}
