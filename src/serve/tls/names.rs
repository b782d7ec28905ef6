//! The alternative names of a certificate: DNS names, mail addresses, URIs, addresses.
//!
//! A walk of DER down to one extension (RFC 5280, 4.2.1.6), because what rustls brings tells neither mail addresses nor a
//! list of addresses, and a whole parser of X.509 would be twelve more crates. What is malformed has no names.

use std::net::{Ipv4Addr, Ipv6Addr};

const SEQUENCE: u8 = 0x30;
const OBJECT: u8 = 0x06;
const OCTETS: u8 = 0x04;
/// Extensions of a certificate's body.
const EXTENSIONS: u8 = 0xa3;
/// 2.5.29.17, subjectAltName.
const ALTERNATIVE_NAMES: &[u8] = &[0x55, 0x1d, 0x11];

/// The names of a certificate, each as text.
pub fn names(certificate: &[u8]) -> Vec<String> {
    extension(certificate).map(all).unwrap_or_default()
}

/// One element: tag, content, and what comes after it.
fn element(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&tag, rest) = bytes.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (length, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        0x81..=0x83 => {
            let (digits, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
            (digits.iter().fold(0, |length, digit| length << 8 | usize::from(*digit)), rest)
        }
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(length)?;
    Some((tag, content, rest))
}

/// The elements of a content.
fn elements(mut bytes: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    std::iter::from_fn(move || {
        let (tag, content, rest) = element(bytes)?;
        bytes = rest;
        Some((tag, content))
    })
}

/// The content of the extension with the names.
fn extension(certificate: &[u8]) -> Option<&[u8]> {
    let (_, certificate, _) = element(certificate)?;
    let (_, body, _) = element(certificate)?;
    let (_, extensions) = elements(body).find(|(tag, _)| *tag == EXTENSIONS)?;
    let (_, extensions, _) = element(extensions)?;
    let (_, found) = elements(extensions).find(|(_, extension)| {
        elements(extension).next().is_some_and(|(tag, id)| tag == OBJECT && id == ALTERNATIVE_NAMES)
    })?;
    let (_, value) = elements(found).find(|(tag, _)| *tag == OCTETS)?;
    let (tag, names, _) = element(value)?;
    (tag == SEQUENCE).then_some(names)
}

fn all(names: &[u8]) -> Vec<String> {
    elements(names)
        .filter_map(|(tag, content)| match tag {
            0x81 | 0x82 | 0x86 => Some(std::str::from_utf8(content).ok()?.to_owned()), // mail, DNS, URI
            0x87 => match content.len() {
                4 => Some(Ipv4Addr::from(<[u8; 4]>::try_from(content).ok()?).to_string()),
                _ => Some(Ipv6Addr::from(<[u8; 16]>::try_from(content).ok()?).to_string()),
            },
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, KeyPair, SanType};

    fn certificate(names: Vec<SanType>) -> Vec<u8> {
        let mut params = CertificateParams::default();
        params.subject_alt_names = names;
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().to_vec()
    }

    #[test]
    fn names_of_every_kind_are_found() {
        let made = certificate(vec![
            SanType::DnsName("prometheus.example".try_into().unwrap()),
            SanType::Rfc822Name("ann@example.org".try_into().unwrap()),
            SanType::URI("spiffe://cluster/prometheus".try_into().unwrap()),
            SanType::IpAddress("10.0.0.1".parse().unwrap()),
            SanType::IpAddress("2001:db8::1".parse().unwrap()),
            SanType::DnsName(format!("{}.example", "a".repeat(60)).try_into().unwrap()),
        ]);
        let found = names(&made);
        let short = [
            "prometheus.example",
            "ann@example.org",
            "spiffe://cluster/prometheus",
            "10.0.0.1",
            "2001:db8::1",
        ];
        assert_eq!(found[..5], short);
        assert_eq!(found[5].len(), 68);
        assert!(names(&certificate(vec![])).is_empty());
    }

    #[test]
    fn what_is_malformed_has_no_names_and_harms_nobody() {
        let made = certificate(vec![SanType::DnsName("a.example".try_into().unwrap())]);
        for end in 0..made.len() {
            assert!(names(&made[..end]).is_empty(), "cut at {end}");
        }
        let mut runner = proptest::test_runner::TestRunner::deterministic();
        let changes = (0..made.len(), proptest::num::u8::ANY);
        runner
            .run(&proptest::collection::vec(changes, 1..8), |changes| {
                let mut bytes = made.clone();
                changes.into_iter().for_each(|(place, byte)| bytes[place] = byte);
                names(&bytes);
                Ok(())
            })
            .unwrap();
    }
}
