//! Parses the responses of endpoints and decides about retries, as the OTLP specification requires.

use std::time::Duration;

use jiff::fmt::rfc2822;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceResponse;
use prost::Message;
use tonic::codegen::http::{HeaderMap, StatusCode, header};
use tonic::{Code, Status};

use crate::stats::otlp_stats::OtlpSignal;
use crate::text::{error_chain, first_chars, sanitize_for_terminal};

/// Longest text of an endpoint that is logged, in characters.
const MAX_REASON_CHARS: usize = 300;
/// Longest delay that an endpoint can request; without a limit it could silence a host.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(3600);

/// The outcome of one attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExportResult {
    /// The request was accepted, except for rejected items.
    Accepted {
        /// Number of rejected items.
        rejected: u64,
        /// The endpoint's message about them.
        message: String,
    },
    /// The request was rejected and must not be retried.
    Rejected {
        /// Kind of the rejection.
        kind: RejectKind,
        /// A message for people.
        reason: String,
    },
    /// The request may be retried. The endpoint's delay may be zero; the exporter applies its own back-off.
    Retry {
        /// Delay that the endpoint requested.
        after: Option<Duration>,
        /// A message for people.
        reason: String,
    },
}

/// Why an endpoint rejected a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectKind {
    /// Its content.
    Content,
    /// Its size.
    Size,
    /// Its signal, or its path: the endpoint is no receiver of this signal.
    Unsupported,
    /// A reason apart from this request: not authorized, a failure.
    Other,
}

/// Returns what to do where an endpoint is no receiver of a signal. Prometheus and VictoriaMetrics receive metrics alone.
pub fn unsupported_advice(signal: OtlpSignal) -> &'static str {
    match signal {
        OtlpSignal::Metrics => {
            "correct the path of the endpoint: http://HOST:9090/api/v1/otlp for Prometheus, with its receiver enabled, \
             http://HOST:8428/opentelemetry for VictoriaMetrics"
        }
        OtlpSignal::Logs => {
            "this receiver takes no logs, as Prometheus (404) and VictoriaMetrics (400): set --no-otlp.logs, or another \
             endpoint for logs by OTEL_EXPORTER_OTLP_LOGS_ENDPOINT; events stay in the ledger"
        }
        OtlpSignal::Traces => "this receiver takes no traces: leave out --otlp.traces",
    }
}

/// `google.rpc.Status`, the details of an error.
#[derive(Clone, PartialEq, Message)]
struct RpcStatus {
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<ProtoAny>,
}

/// `google.protobuf.Any`.
#[derive(Clone, PartialEq, Message)]
struct ProtoAny {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

/// `google.rpc.RetryInfo`.
#[derive(Clone, PartialEq, Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    delay: Option<ProtoDuration>,
}

/// `google.protobuf.Duration`.
#[derive(Clone, PartialEq, Message)]
struct ProtoDuration {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
}

/// Parses the body of a successful response, which has the same form for all signals. An empty body is a valid one.
pub fn accepted(body: &[u8]) -> ExportResult {
    let Ok(response) = ExportMetricsServiceResponse::decode(body) else {
        return not_otlp("its body cannot be decoded");
    };
    let (rejected, message) = response
        .partial_success
        .map_or((0, String::new()), |partial| (partial.rejected_data_points, partial.error_message));
    ExportResult::Accepted { rejected: u64::try_from(rejected).unwrap_or(0), message: sanitize(&message) }
}

/// Returns the result for a successful response of something else than an OTLP receiver, such as the login page of an ingress:
/// nothing was delivered.
fn not_otlp(why: &str) -> ExportResult {
    let reason = format!("not an OTLP response: {why}; is the URL that of an OTLP receiver?");
    ExportResult::Rejected { kind: RejectKind::Other, reason }
}

/// Returns the result for a response that is longer than [`super::client`] reads. Smaller requests get shorter responses.
pub fn too_long() -> ExportResult {
    let reason = "the response is too long; retrying with smaller requests where possible".to_owned();
    ExportResult::Rejected { kind: RejectKind::Size, reason }
}

/// Converts a gRPC status.
pub fn from_status(status: &Status) -> ExportResult {
    let details = RpcStatus::decode(status.details()).unwrap_or_default();
    let retry = details.details.iter().find(|detail| detail.type_url.ends_with("/google.rpc.RetryInfo"));
    let after = retry.map(|retry| {
        let span = RetryInfo::decode(&*retry.value).unwrap_or_default().delay.unwrap_or_default();
        let seconds = u64::try_from(span.seconds).unwrap_or(0);
        Duration::new(seconds, u32::try_from(span.nanos).unwrap_or(0)).min(MAX_RETRY_DELAY)
    });
    let cause = std::error::Error::source(status);
    let reason = match cause {
        Some(cause) => error_chain(cause),
        None => format!("{:?}: {}", status.code(), sanitize(status.message())),
    };
    let reject = |kind| ExportResult::Rejected { kind, reason: reason.clone() };
    match status.code() {
        // tonic's own status, for a response beyond the limit
        Code::OutOfRange if status.message().contains("decoded message length too large") => too_long(),
        // an error of the connection, not a status of the endpoint
        _ if cause.is_some() => ExportResult::Retry { after: None, reason },
        Code::Cancelled
        | Code::DeadlineExceeded
        | Code::Aborted
        | Code::OutOfRange
        | Code::Unavailable
        | Code::DataLoss => ExportResult::Retry { after, reason },
        Code::ResourceExhausted if after.is_some() => ExportResult::Retry { after, reason },
        Code::ResourceExhausted => reject(RejectKind::Size),
        Code::InvalidArgument => reject(RejectKind::Content),
        Code::Unimplemented => reject(RejectKind::Unsupported),
        _ => reject(RejectKind::Other),
    }
}

/// Converts an HTTP response. `now` is in Unix seconds.
pub fn from_http(status: StatusCode, headers: &HeaderMap, body: &[u8], now: f64) -> ExportResult {
    if status.is_success() {
        let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
        let kind = kind.split(';').next().unwrap_or("").trim();
        // 204 and other empty responses have no type
        if kind.eq_ignore_ascii_case("application/x-protobuf") || (kind.is_empty() && body.is_empty()) {
            return accepted(body);
        }
        return not_otlp(&format!("HTTP {status} with content type {:?}", sanitize(kind)));
    }
    let message = RpcStatus::decode(body).map(|details| details.message).unwrap_or_default();
    let message = if message.is_empty() { String::from_utf8_lossy(body).into_owned() } else { message };
    let reason = match sanitize(&message) {
        message if message.is_empty() => format!("HTTP {status}"),
        message => format!("HTTP {status}: {message}"),
    };
    let reject = |kind| ExportResult::Rejected { kind, reason: reason.clone() };
    match status.as_u16() {
        429 | 502..=504 => {
            let value = headers.get(header::RETRY_AFTER).and_then(|value| value.to_str().ok());
            ExportResult::Retry { after: value.and_then(|value| retry_after(value, now)), reason }
        }
        // VictoriaMetrics' response to each path that it has not
        400 if message.contains("unsupported path") => reject(RejectKind::Unsupported),
        400 => reject(RejectKind::Content),
        404 | 405 | 501 => reject(RejectKind::Unsupported),
        413 => reject(RejectKind::Size),
        _ => reject(RejectKind::Other),
    }
}

/// Parses `Retry-After`: seconds, or a date.
fn retry_after(value: &str, now: f64) -> Option<Duration> {
    let seconds = match value.trim().parse::<u64>() {
        Ok(seconds) => seconds as f64,
        Err(_) => rfc2822::parse(value.trim()).ok()?.timestamp().as_second() as f64 - now,
    };
    Duration::try_from_secs_f64(seconds.max(0.0)).ok().map(|span| span.min(MAX_RETRY_DELAY))
}

fn sanitize(text: &str) -> String {
    sanitize_for_terminal(first_chars(text, MAX_REASON_CHARS))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn http(status: u16, headers: &[(header::HeaderName, &str)]) -> ExportResult {
        let headers = headers.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect();
        from_http(StatusCode::from_u16(status).unwrap(), &headers, b"", 784_111_700.0)
    }

    fn after(answer: &ExportResult) -> Option<Duration> {
        match answer {
            ExportResult::Retry { after, .. } => *after,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn parses_retry_after() {
        let delay = |value| after(&http(429, &[(header::RETRY_AFTER, value)]));
        assert_eq!(delay("7"), Some(Duration::from_secs(7)));
        assert_eq!(delay("Sun, 06 Nov 1994 08:49:37 GMT"), Some(Duration::from_secs(77)));
        assert_eq!(delay("Sun, 06 Nov 1994 08:40:00 GMT"), Some(Duration::ZERO), "in the past");
        assert_eq!(delay("99999999999"), Some(MAX_RETRY_DELAY));
        assert_eq!(delay("soon"), None);
        assert_eq!(after(&http(503, &[])), None);
    }

    #[test]
    fn only_an_otlp_response_is_a_delivery() {
        let is_accepted = |status, kind: Option<&str>, body: &[u8]| {
            let headers = kind.map(|kind| (header::CONTENT_TYPE, kind.parse().unwrap()));
            let status = StatusCode::from_u16(status).unwrap();
            matches!(
                from_http(status, &headers.into_iter().collect(), body, 0.0),
                ExportResult::Accepted { .. }
            )
        };
        let protobuf = Some("application/x-protobuf");
        assert!(
            is_accepted(200, protobuf, b"") && is_accepted(202, Some("Application/X-Protobuf; a=b"), b"")
        );
        assert!(is_accepted(204, None, b""), "some receivers respond without content");
        assert!(!is_accepted(200, Some("text/html"), b"") && !is_accepted(200, None, b"<html>"));
        assert!(!is_accepted(200, protobuf, b"<html>") && !is_accepted(200, Some("application/json"), b"{}"));
        assert!(!matches!(accepted(b"<html>"), ExportResult::Accepted { .. }), "over gRPC too");
    }

    #[test]
    fn recognizes_receivers_without_a_signal() {
        let kind = |result| match result {
            ExportResult::Rejected { kind, .. } => kind,
            other => panic!("{other:?}"),
        };
        let of_http = |status, body: &str| {
            let status = StatusCode::from_u16(status).unwrap();
            kind(from_http(status, &HeaderMap::new(), body.as_bytes(), 0.0))
        };
        assert_eq!(of_http(404, "404 page not found\n"), RejectKind::Unsupported, "Prometheus");
        let path = "remoteAddr: \"127.0.0.1:1\"; requestURI: /opentelemetry/v1/logs; \
                    unsupported path requested: \"/opentelemetry/v1/logs\"";
        assert_eq!(of_http(400, path), RejectKind::Unsupported, "VictoriaMetrics");
        assert_eq!(of_http(400, "invalid timestamp"), RejectKind::Content);
        assert_eq!(of_http(401, "404 page not found"), RejectKind::Other);
        let without = Status::new(Code::Unimplemented, "unknown service LogsService");
        assert_eq!(
            kind(from_status(&without)),
            RejectKind::Unsupported,
            "a collector without a pipeline of logs"
        );
    }

    #[test]
    fn retries_only_what_the_specification_allows() {
        let is_rejected = |result| matches!(result, ExportResult::Rejected { .. });
        for status in [400, 401, 404, 413, 500, 301] {
            assert!(is_rejected(http(status, &[])), "{status}");
        }
        assert!(is_rejected(from_status(&Status::new(Code::ResourceExhausted, "too large"))));
        assert!(is_rejected(from_status(&Status::new(Code::Unauthenticated, "who"))));
        let retry = RetryInfo { delay: Some(ProtoDuration { seconds: 3, nanos: 0 }) };
        let detail = ProtoAny {
            type_url: "type.googleapis.com/google.rpc.RetryInfo".to_owned(),
            value: retry.encode_to_vec(),
        };
        let details = RpcStatus { message: String::new(), details: vec![detail] }.encode_to_vec();
        let status = Status::with_details(Code::ResourceExhausted, "busy", details.into());
        assert_eq!(after(&from_status(&status)), Some(Duration::from_secs(3)));
        assert_eq!(after(&from_status(&Status::new(Code::Unavailable, ""))), None);
    }
}
