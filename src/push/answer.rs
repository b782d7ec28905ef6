//! What an endpoint answers, and what follows from it, as OTLP's specification has it.

use std::time::Duration;

use jiff::fmt::rfc2822;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceResponse;
use prost::Message;
use tonic::codegen::http::{HeaderMap, StatusCode, header};
use tonic::{Code, Status};

use crate::export::events::harmless;

/// Longest text of an endpoint that is told on.
const LONGEST: usize = 300;
/// Longest pause that an endpoint can ask for; more would be a way to silence a host.
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);

/// How one attempt ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It was taken, but for so many of its items.
    Taken {
        /// Items that the endpoint would not have.
        rejected: u64,
        /// What it says of them.
        message: String,
    },
    /// The same is not to be sent again.
    Refused {
        /// What is the matter with it.
        of: Refusal,
        /// For people.
        reason: String,
    },
    /// Try again, not before that time if one is given. It may be none at all; the pause between attempts is the sender's.
    Later {
        /// How long the endpoint wants to be left alone.
        after: Option<Duration>,
        /// For people.
        reason: String,
    },
}

/// What an endpoint has against a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// What is in it.
    Content,
    /// Its size.
    Size,
    /// Something that has nothing to do with this request: no right, no such path, a failure.
    Other,
}

/// `google.rpc.Status`, which says more about an error.
#[derive(Clone, PartialEq, Message)]
struct Details {
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<Detail>,
}

/// `google.protobuf.Any`.
#[derive(Clone, PartialEq, Message)]
struct Detail {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

/// `google.rpc.RetryInfo`.
#[derive(Clone, PartialEq, Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    delay: Option<Span>,
}

/// `google.protobuf.Duration`.
#[derive(Clone, PartialEq, Message)]
struct Span {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
}

/// From the body of an answer that is well. The answers for both signals look the same.
pub fn taken(body: &[u8]) -> Answer {
    let partial =
        ExportMetricsServiceResponse::decode(body).ok().and_then(|response| response.partial_success);
    let (rejected, message) =
        partial.map_or((0, String::new()), |partial| (partial.rejected_data_points, partial.error_message));
    Answer::Taken { rejected: u64::try_from(rejected).unwrap_or(0), message: short(&message) }
}

/// From gRPC's status.
pub fn of_status(status: &Status) -> Answer {
    let details = Details::decode(status.details()).unwrap_or_default();
    let retry = details.details.iter().find(|detail| detail.type_url.ends_with("/google.rpc.RetryInfo"));
    let after = retry.map(|retry| {
        let span = RetryInfo::decode(&*retry.value).unwrap_or_default().delay.unwrap_or_default();
        let seconds = u64::try_from(span.seconds).unwrap_or(0);
        Duration::new(seconds, u32::try_from(span.nanos).unwrap_or(0)).min(LONGEST_PAUSE)
    });
    let cause = std::error::Error::source(status);
    let reason = match cause {
        Some(cause) => super::chain(cause),
        None => format!("{:?}: {}", status.code(), short(status.message())),
    };
    let refused = |of| Answer::Refused { of, reason: reason.clone() };
    match status.code() {
        // not the endpoint's word, but that of the connection
        _ if cause.is_some() => Answer::Later { after: None, reason },
        Code::Cancelled
        | Code::DeadlineExceeded
        | Code::Aborted
        | Code::OutOfRange
        | Code::Unavailable
        | Code::DataLoss => Answer::Later { after, reason },
        Code::ResourceExhausted if after.is_some() => Answer::Later { after, reason },
        Code::ResourceExhausted => refused(Refusal::Size),
        Code::InvalidArgument => refused(Refusal::Content),
        _ => refused(Refusal::Other),
    }
}

/// From an answer over HTTP. `now`: in Unix seconds.
pub fn of_http(status: StatusCode, headers: &HeaderMap, body: &[u8], now: f64) -> Answer {
    if status.is_success() {
        return taken(body);
    }
    let told = Details::decode(body).map(|details| details.message).unwrap_or_default();
    let told = if told.is_empty() { String::from_utf8_lossy(body).into_owned() } else { told };
    let reason = match short(&told) {
        told if told.is_empty() => format!("HTTP {status}"),
        told => format!("HTTP {status}: {told}"),
    };
    let refused = |of| Answer::Refused { of, reason: reason.clone() };
    match status.as_u16() {
        429 | 502..=504 => {
            let value = headers.get(header::RETRY_AFTER).and_then(|value| value.to_str().ok());
            Answer::Later { after: value.and_then(|value| retry_after(value, now)), reason }
        }
        400 => refused(Refusal::Content),
        413 => refused(Refusal::Size),
        _ => refused(Refusal::Other),
    }
}

/// Seconds, or a date.
fn retry_after(value: &str, now: f64) -> Option<Duration> {
    let seconds = match value.trim().parse::<u64>() {
        Ok(seconds) => seconds as f64,
        Err(_) => rfc2822::parse(value.trim()).ok()?.timestamp().as_second() as f64 - now,
    };
    Duration::try_from_secs_f64(seconds.max(0.0)).ok().map(|span| span.min(LONGEST_PAUSE))
}

fn short(text: &str) -> String {
    harmless(&text.chars().take(LONGEST).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn http(status: u16, headers: &[(header::HeaderName, &str)]) -> Answer {
        let headers = headers.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect();
        of_http(StatusCode::from_u16(status).unwrap(), &headers, b"", 784_111_700.0)
    }

    fn after(answer: &Answer) -> Option<Duration> {
        match answer {
            Answer::Later { after, .. } => *after,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_endpoint_is_left_alone_as_long_as_it_asks() {
        let wish = |value| after(&http(429, &[(header::RETRY_AFTER, value)]));
        assert_eq!(wish("7"), Some(Duration::from_secs(7)));
        assert_eq!(wish("Sun, 06 Nov 1994 08:49:37 GMT"), Some(Duration::from_secs(77)));
        assert_eq!(wish("Sun, 06 Nov 1994 08:40:00 GMT"), Some(Duration::ZERO), "that has passed");
        assert_eq!(wish("99999999999"), Some(LONGEST_PAUSE));
        assert_eq!(wish("soon"), None);
        assert_eq!(after(&http(503, &[])), None);
    }

    #[test]
    fn only_what_the_specification_names_is_tried_again() {
        let refused = |answer| matches!(answer, Answer::Refused { .. });
        for status in [400, 401, 404, 413, 500, 301] {
            assert!(refused(http(status, &[])), "{status}");
        }
        assert!(refused(of_status(&Status::new(Code::ResourceExhausted, "too large"))));
        assert!(refused(of_status(&Status::new(Code::Unauthenticated, "who"))));
        let retry = RetryInfo { delay: Some(Span { seconds: 3, nanos: 0 }) };
        let detail = Detail {
            type_url: "type.googleapis.com/google.rpc.RetryInfo".to_owned(),
            value: retry.encode_to_vec(),
        };
        let details = Details { message: String::new(), details: vec![detail] }.encode_to_vec();
        let status = Status::with_details(Code::ResourceExhausted, "busy", details.into());
        assert_eq!(after(&of_status(&status)), Some(Duration::from_secs(3)));
        assert_eq!(after(&of_status(&Status::new(Code::Unavailable, ""))), None);
    }
}
