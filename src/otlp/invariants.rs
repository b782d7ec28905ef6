//! Invariants of the response parsers: endpoints are not trusted. The property tests below and the fuzzer (`fuzz/`) call the
//! same function.

use std::time::Duration;

use tonic::codegen::http::{HeaderMap, HeaderValue, StatusCode, header};
use tonic::{Code, Status};

use super::response::{ExportResult, accepted, from_http, from_status};

/// Parses the bytes as body, header and details of a response, with various status codes.
pub fn response(bytes: &[u8]) {
    check(&accepted(bytes));
    let mut headers = HeaderMap::new();
    if let Ok(value) = HeaderValue::from_bytes(bytes) {
        headers.insert(header::RETRY_AFTER, value);
    }
    for status in [200, 400, 413, 429, 503, 500] {
        let Ok(status) = StatusCode::from_u16(status) else { continue };
        let result = from_http(status, &headers, bytes, 1e9);
        // without a content type only an empty response is one
        let is_delivery = status.is_success() && bytes.is_empty();
        assert_eq!(matches!(result, ExportResult::Accepted { .. }), is_delivery);
        assert_eq!(matches!(result, ExportResult::Retry { .. }), matches!(status.as_u16(), 429 | 503));
        check(&result);
    }
    let text = String::from_utf8_lossy(bytes);
    for code in [Code::Unavailable, Code::ResourceExhausted, Code::InvalidArgument, Code::Internal] {
        check(&from_status(&Status::with_details(code, text.clone(), bytes.to_vec().into())));
    }
}

/// Checks that log texts are single lines of limited length, and that no endpoint can silence a host.
fn check(result: &ExportResult) {
    let (text, after) = match result {
        ExportResult::Accepted { message, .. } => (message, None),
        ExportResult::Rejected { reason, .. } => (reason, None),
        ExportResult::Retry { after, reason } => (reason, *after),
    };
    assert!(text.len() <= 4096 && !text.chars().any(char::is_control), "{text:?}");
    assert!(after.is_none_or(|after| after <= Duration::from_secs(3600)), "{after:?}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_keep_the_invariants(bytes: Vec<u8>) {
            response(&bytes);
        }

        #[test]
        fn any_retry_after_keeps_the_invariants(text in "[0-9a-zA-Z,:. +-]{0,40}") {
            response(text.as_bytes());
        }

        #[test]
        fn parses_retry_after_in_seconds(seconds in 0_u64..=3600) {
            let headers = HeaderMap::from_iter([(header::RETRY_AFTER, HeaderValue::from(seconds))]);
            let found = from_http(StatusCode::TOO_MANY_REQUESTS, &headers, b"", 1e9);
            let ExportResult::Retry { after, .. } = found else { panic!("{found:?}") };
            prop_assert_eq!(after, Some(Duration::from_secs(seconds)));
        }
    }
}
