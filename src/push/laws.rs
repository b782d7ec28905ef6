//! What holds of whatever an endpoint answers: it may be anybody. The property tests below and the fuzzer (`fuzz/`) call
//! the same function.

use std::time::Duration;

use tonic::codegen::http::{HeaderMap, HeaderValue, StatusCode, header};
use tonic::{Code, Status};

use super::answer::{Answer, of_http, of_status, taken};

/// The bytes are body, header and details of an answer, of every status.
pub fn answer(bytes: &[u8]) {
    holds(&taken(bytes));
    let mut headers = HeaderMap::new();
    if let Ok(value) = HeaderValue::from_bytes(bytes) {
        headers.insert(header::RETRY_AFTER, value);
    }
    for status in [200, 400, 413, 429, 503, 500] {
        let Ok(status) = StatusCode::from_u16(status) else { continue };
        let answer = of_http(status, &headers, bytes, 1e9);
        assert_eq!(matches!(answer, Answer::Taken { .. }), status.is_success());
        assert_eq!(matches!(answer, Answer::Later { .. }), matches!(status.as_u16(), 429 | 503));
        holds(&answer);
    }
    let text = String::from_utf8_lossy(bytes);
    for code in [Code::Unavailable, Code::ResourceExhausted, Code::InvalidArgument, Code::Internal] {
        holds(&of_status(&Status::with_details(code, text.clone(), bytes.to_vec().into())));
    }
}

/// What goes into a log line is one line of bounded length, and no endpoint silences a host.
fn holds(answer: &Answer) {
    let (said, after) = match answer {
        Answer::Taken { message, .. } => (message, None),
        Answer::Refused { reason, .. } => (reason, None),
        Answer::Later { after, reason } => (reason, *after),
    };
    assert!(said.len() <= 4096 && !said.chars().any(char::is_control), "{said:?}");
    assert!(after.is_none_or(|after| after <= Duration::from_secs(3600)), "{after:?}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_laws_hold_for_any_bytes(bytes: Vec<u8>) {
            answer(&bytes);
        }

        #[test]
        fn the_laws_hold_for_anything_that_looks_like_a_time(text in "[0-9a-zA-Z,:. +-]{0,40}") {
            answer(text.as_bytes());
        }

        #[test]
        fn a_pause_in_seconds_comes_back(seconds in 0_u64..=3600) {
            let headers = HeaderMap::from_iter([(header::RETRY_AFTER, HeaderValue::from(seconds))]);
            let found = of_http(StatusCode::TOO_MANY_REQUESTS, &headers, b"", 1e9);
            let Answer::Later { after, .. } = found else { panic!("{found:?}") };
            prop_assert_eq!(after, Some(Duration::from_secs(seconds)));
        }
    }
}
