//! Who is counted as one: an address of IPv4, or of IPv6 the network of a host.
//!
//! What there is little of is not for one of them alone.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, PoisonError};

/// The party of an address. A host has a whole /64 of IPv6 to choose from; this host has all of 127.0.0.0/8.
pub fn party(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        address if address.is_loopback() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(address) => IpAddr::V6((address.to_bits() >> 64 << 64).into()),
        other => other,
    }
}

/// How much each party holds.
#[derive(Clone, Debug, Default)]
pub struct Shares(Arc<Mutex<HashMap<IpAddr, usize>>>);

impl Shares {
    /// One more for the party of this address, unless it holds `most` already.
    pub fn take(&self, address: IpAddr, most: usize) -> Option<Share> {
        let party = party(address);
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = held.entry(party).or_default(); // never left at 0: `most` is not
        if *count >= most.max(1) {
            return None;
        }
        *count += 1;
        Some(Share { of: self.clone(), party })
    }
}

/// Given back when dropped.
#[derive(Debug)]
pub struct Share {
    of: Shares,
    party: IpAddr,
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut held = self.of.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = held.get_mut(&self.party) {
            *count -= 1;
            if *count == 0 {
                held.remove(&self.party);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_party_takes_its_share_and_leaves_the_rest() {
        let shares = Shares::default();
        let at = |text: &str| shares.take(text.parse().unwrap(), 2);
        let (first, _second) = (at("192.0.2.1"), at("::ffff:192.0.2.1"));
        assert!(first.is_some() && at("192.0.2.1").is_none());
        assert!(at("192.0.2.2").is_some());
        drop(first);
        assert!(at("192.0.2.1").is_some());
        let _network = (at("2001:db8:0:1::1"), at("2001:db8:0:1:ffff::9"));
        assert!(at("2001:db8:0:1::7").is_none() && at("2001:db8:0:2::7").is_some());
        let held = shares.0.lock().unwrap().len();
        assert_eq!(held, 2, "who holds nothing is forgotten");
    }
}
