//! Invariants of the parsers of client input: passwords, queries. The property tests below and the fuzzer
//! (`fuzz/`) call the same function.

use super::basic_auth::Credentials;
use super::events::parse_query;

/// Parses the bytes as an `Authorization` header and a query string.
pub fn request(bytes: &[u8]) {
    let _ = Credentials::parse(bytes);
    let basic = [b"Basic ", bytes].concat();
    let _ = Credentials::parse(&basic);
    let text = String::from_utf8_lossy(bytes);
    match parse_query(&text, 1e9) {
        Ok(query) => {
            assert!(query.limit > 0 && query.since.is_none_or(f64::is_finite));
            assert!(query.container.is_none_or(|container| !container.is_empty()));
        }
        Err(wanted) => assert!(!wanted.is_empty() && !wanted.chars().any(char::is_control), "{wanted:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_keep_the_invariants(bytes: Vec<u8>) {
            request(&bytes);
        }

        #[test]
        fn any_query_keeps_the_invariants(pieces in proptest::collection::vec("(since|container|limit|x)=[ -~]{0,8}", 0..4)) {
            request(pieces.join("&").as_bytes());
        }
    }
}
