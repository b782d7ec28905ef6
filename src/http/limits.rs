//! Limits of connections and of requests: a semaphore for all clients, and a quarter of it for each client address. And the
//! rate limit, with a token bucket for each client address.
//!
//! This host takes nothing from the shared semaphore: it has a quarter of its own, so that its health checks are answered
//! however many other clients there are.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::clock::Timestamp;
use crate::config::web::Rate;

/// Maximum number of clients that have a token bucket of their own; further ones share one.
const MAX_BUCKETS: usize = 4_096;

/// Returns the key that limits count by: an IPv4 address, or the /64 network of an IPv6 address, since one host can use
/// all addresses of its network. All of 127.0.0.0/8 is one client, this host.
pub fn client_key(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        address if address.is_loopback() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(address) => IpAddr::V6((address.to_bits() >> 64 << 64).into()),
        other => other,
    }
}

/// A limit, shared by its clones.
#[derive(Clone, Debug)]
pub struct ClientLimit {
    all: Arc<Semaphore>,
    max_per_client: usize,
    /// Permits by client; never 0.
    held: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

impl ClientLimit {
    /// Returns a limit of `max` permits, a quarter of them for one client; 0 for no limit.
    pub fn new(max: usize) -> Self {
        let max = if max == 0 { Semaphore::MAX_PERMITS } else { max };
        Self::with_share(max, max.div_ceil(4))
    }

    /// Returns a limit of `max` permits, `max_per_client` of them for one client.
    pub fn with_share(max: usize, max_per_client: usize) -> Self {
        let all = Arc::new(Semaphore::new(max.min(Semaphore::MAX_PERMITS)));
        Self { all, max_per_client, held: Arc::default() }
    }

    /// Returns a permit for a client; `None` if there is none left, or the client holds its share.
    pub fn acquire(&self, client: IpAddr) -> Option<Permit> {
        let client = client_key(client);
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let count = held.get(&client).copied().unwrap_or(0);
        if count >= self.max_per_client {
            return None;
        }
        let shared = match client.is_loopback() {
            true => None,
            false => Some(Arc::clone(&self.all).try_acquire_owned().ok()?),
        };
        held.insert(client, count + 1);
        Some(Permit { limit: self.clone(), client, _shared: shared })
    }
}

/// A permit, released when dropped.
#[derive(Debug)]
pub struct Permit {
    limit: ClientLimit,
    client: IpAddr,
    _shared: Option<OwnedSemaphorePermit>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut held = self.limit.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = held.get_mut(&self.client) {
            *count -= 1;
            if *count == 0 {
                held.remove(&self.client);
            }
        }
    }
}

/// The rate limit: a token bucket for each client, the tokens left at a time.
#[derive(Debug, Default)]
pub struct RateLimiter(Mutex<HashMap<IpAddr, (f64, Timestamp)>>);

impl RateLimiter {
    /// Takes a token of this client; returns false if it has none.
    pub fn take_token(&self, client: IpAddr, rate: Rate, now: Timestamp) -> bool {
        let capacity = f64::from(rate.burst);
        let tokens = |(left, since): (f64, Timestamp)| {
            (left + now.since(since).as_secs_f64() / rate.interval.as_secs_f64()).min(capacity)
        };
        let mut buckets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut client = client_key(client);
        if !buckets.contains_key(&client) && buckets.len() >= MAX_BUCKETS {
            buckets.retain(|_, bucket| tokens(*bucket) < capacity); // a full bucket is as good as none
            if buckets.len() >= MAX_BUCKETS {
                client = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
            }
        }
        let left = buckets.get(&client).copied().map_or(capacity, tokens);
        let is_allowed = left >= 1.0;
        buckets.insert(client, (if is_allowed { left - 1.0 } else { left }, now));
        is_allowed
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn limits_all_clients_and_each_one() {
        let limit = ClientLimit::new(8);
        let at = |text: &str| limit.acquire(text.parse().unwrap());
        let mut first: Vec<_> = (0..2).map(|_| at("192.0.2.1").unwrap()).collect();
        assert!(at("::ffff:192.0.2.1").is_none(), "a quarter for one address");
        let network = (at("2001:db8:0:1::1"), at("2001:db8:0:1:ffff::9"));
        assert!(network.0.is_some() && at("2001:db8:0:1::7").is_none(), "a /64 is one client");
        let _others: Vec<_> = (2..6).map(|id| at(&format!("192.0.2.{id}")).unwrap()).collect();
        assert!(at("192.0.2.9").is_none(), "all permits are taken");
        let local = (at("127.0.0.1"), at("::ffff:127.0.0.2"));
        assert!(local.0.is_some() && local.1.is_some() && at("127.0.0.3").is_none(), "this host has its own");
        first.pop();
        assert!(at("192.0.2.9").is_some());
        drop(network);
        assert!(!limit.held.lock().unwrap().contains_key(&"2001:db8:0:1::".parse().unwrap()));
    }

    #[test]
    fn zero_means_no_limit() {
        let limit = ClientLimit::new(0);
        assert_eq!((0..1_000).filter_map(|_| limit.acquire([192, 0, 2, 7].into())).count(), 1_000);
    }

    #[test]
    fn each_client_has_a_token_bucket_that_refills_up_to_its_burst() {
        let limiter = RateLimiter::default();
        let rate = Rate { interval: Duration::from_secs(2), burst: 3 };
        let now = Timestamp::now();
        let admitted = |client: [u8; 4], seconds: u64| {
            let at = now.plus(Duration::from_secs(seconds));
            std::iter::repeat_with(|| limiter.take_token(client.into(), rate, at))
                .take_while(|ok| *ok)
                .count()
        };
        let ann = [192, 0, 2, 1];
        let counts = [0, 1, 2, 3, 7, 1_000].map(|seconds| admitted(ann, seconds));
        assert_eq!(counts, [3, 0, 1, 0, 2, 3]);
        assert_eq!(admitted([192, 0, 2, 2], 1_000), 3, "another address has its own");
    }

    #[test]
    fn clients_beyond_the_number_of_buckets_share_one() {
        let (limiter, now) = (RateLimiter::default(), Timestamp::now());
        let rate = Rate { interval: Duration::from_secs(60), burst: 1 };
        let take = |number: u32| limiter.take_token(Ipv4Addr::from(0x0a00_0000 + number).into(), rate, now);
        assert!((0..MAX_BUCKETS as u32).all(take));
        assert!(take(5_000) && !take(5_001), "they share one");
        assert_eq!(limiter.0.lock().unwrap().len(), MAX_BUCKETS + 1);
    }
}
