//! What holds of whatever a client sends: certificate, password, query. The property tests below and the fuzzer (`fuzz/`)
//! call the same function.

use super::events::asked;
use super::passwords::Credentials;
use super::tls::names::names;

/// The bytes are a certificate, the header `Authorization`, and the query of a URL.
pub fn request(bytes: &[u8]) {
    let found = names(bytes);
    assert!(found.iter().map(String::len).sum::<usize>() <= 40 * bytes.len(), "{found:?}");
    let _ = Credentials::parse(bytes);
    let basic = [b"Basic ", bytes].concat();
    let _ = Credentials::parse(&basic);
    let text = String::from_utf8_lossy(bytes);
    match asked(&text, 1e9) {
        Ok(query) => {
            assert!(query.most > 0 && query.since.is_none_or(f64::is_finite));
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
        fn the_laws_hold_for_any_bytes(bytes: Vec<u8>) {
            request(&bytes);
        }

        #[test]
        fn the_laws_hold_for_pieces_of_queries(pieces in proptest::collection::vec("(since|container|limit|x)=[ -~]{0,8}", 0..4)) {
            request(pieces.join("&").as_bytes());
        }
    }
}
