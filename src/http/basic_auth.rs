//! Checks user names and passwords of basic authentication.
//!
//! bcrypt is slow on purpose. So checks run one at a time on a thread that serves no requests, and their outcomes are cached.
//! Concurrent requests with the same credentials share one check. The queue is short, with two checks per client address. An
//! attacker with wrong passwords thus never delays clients that are in the cache. Clients that are not, such as all of them
//! after a restart, can only be delayed by as many addresses as the queue is long.
//!
//! An unknown name costs a check too, with the highest cost of any user's hash. Where all hashes have the same cost, which is usual,
//! response times do not tell which names exist.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::hmac;
use ring::rand::SystemRandom;
use tokio::sync::{OnceCell, Semaphore};

use super::limits::ClientLimit;
use crate::config::web::PasswordHash;

/// Checks that may wait, in all and per client address. With the usual bcrypt costs, 10 to 12, the last one finishes within
/// the 10 s that a scrape may take.
const MAX_QUEUED: usize = 32;
const MAX_QUEUED_PER_CLIENT: usize = 2; // a pair of Prometheus behind one address, each with its own user
/// Cached outcomes: as many valid passwords as there can be users, and the newest invalid ones.
const MAX_CACHED_VALID: usize = 1_024;
const MAX_CACHED_INVALID: usize = 256;

/// The outcome of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthOutcome {
    /// The user exists and the password is right.
    Valid,
    /// No such user, or a wrong password.
    Invalid,
    /// The queue is full.
    Busy,
    /// The check panicked, which is a bug.
    Failed,
}

/// User name and password of a request.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    name: String,
    password: Vec<u8>,
}

impl Credentials {
    /// Parses the `Authorization` header; `None` if it is not well-formed basic authentication.
    pub fn parse(header: &[u8]) -> Option<Self> {
        let (scheme, rest) = header.split_at_checked(6)?;
        let encoded = rest.trim_ascii();
        let decoded = STANDARD.decode(encoded).ok().filter(|_| scheme.eq_ignore_ascii_case(b"basic "))?;
        let colon = decoded.iter().position(|byte| *byte == b':')?;
        let name = String::from_utf8_lossy(&decoded[..colon]).into_owned();
        Some(Self { name, password: decoded[colon + 1..].to_vec() })
    }
}

/// A digest of name, hash and password, under a key that only this process has.
type Digest = [u8; 32];

#[derive(Debug, Default)]
struct CachedCredentials {
    valid: HashSet<Digest>,
    invalid: VecDeque<Digest>,
}

impl CachedCredentials {
    fn outcome(&self, digest: &Digest) -> Option<AuthOutcome> {
        if self.valid.contains(digest) {
            return Some(AuthOutcome::Valid);
        }
        self.invalid.contains(digest).then_some(AuthOutcome::Invalid)
    }

    fn insert(&mut self, digest: Digest, is_valid: bool) {
        if is_valid {
            if self.valid.len() >= MAX_CACHED_VALID {
                self.valid.clear();
            }
            self.valid.insert(digest);
        } else {
            self.invalid.truncate(MAX_CACHED_INVALID - 1);
            self.invalid.push_front(digest);
        }
    }
}

/// Compares a password with a hash.
type Verify = fn(&[u8], &str) -> bool;

fn verify(password: &[u8], hash: &str) -> bool {
    bcrypt::verify(password, hash).unwrap_or(false)
}

/// The checks that requests wait for.
type ChecksInFlight = Mutex<HashMap<Digest, Arc<OnceCell<bool>>>>;

/// A request that waits for a check. The last one removes the check when it is dropped, which happens before the outcome is
/// known if its client disconnects or its response times out.
struct CheckWaiter<'a> {
    in_flight: &'a ChecksInFlight,
    digest: Digest,
    check: Arc<OnceCell<bool>>,
}

impl<'a> CheckWaiter<'a> {
    fn new(in_flight: &'a ChecksInFlight, digest: Digest) -> Self {
        let mut checks = in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        let check = Arc::clone(checks.entry(digest).or_default());
        Self { in_flight, digest, check }
    }
}

impl Drop for CheckWaiter<'_> {
    fn drop(&mut self) {
        let mut checks = self.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        // released under the lock: of two waiters that end at once, the second one is alone
        drop(std::mem::take(&mut self.check));
        if checks.get(&self.digest).is_some_and(|check| Arc::strong_count(check) == 1) {
            checks.remove(&self.digest);
        }
    }
}

/// Checks passwords and caches the outcomes.
#[derive(Debug)]
pub struct BasicAuth {
    key: hmac::Key,
    cache: Arc<Mutex<CachedCredentials>>,
    slot: Arc<Semaphore>,
    queue: ClientLimit,
    in_flight: ChecksInFlight,
    verify: Verify,
    /// bcrypt rounds run so far, for the tests.
    rounds: Arc<AtomicU64>,
}

impl BasicAuth {
    /// Creates an empty cache with a new key.
    ///
    /// # Errors
    /// The kernel returned no random numbers.
    pub fn new() -> Result<Self, ring::error::Unspecified> {
        Ok(Self {
            key: hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new())?,
            cache: Arc::default(),
            slot: Arc::new(Semaphore::new(1)),
            queue: ClientLimit::with_share(MAX_QUEUED, MAX_QUEUED_PER_CLIENT),
            in_flight: Mutex::default(),
            verify,
            rounds: Arc::default(),
        })
    }

    /// Checks the credentials of a client at this address.
    pub async fn check(
        &self,
        users: &BTreeMap<String, PasswordHash>,
        credentials: &Credentials,
        from: IpAddr,
    ) -> AuthOutcome {
        let hash = users.get(&credentials.name).cloned();
        let digest = self.digest(hash.as_ref(), credentials);
        if let Some(outcome) = self.cached_outcome(&digest) {
            return outcome;
        }
        let waiter = CheckWaiter::new(&self.in_flight, digest);
        let check = || self.run_check(users, hash, digest, credentials, from);
        match waiter.check.get_or_try_init(check).await {
            Ok(true) => AuthOutcome::Valid,
            Ok(false) => AuthOutcome::Invalid,
            Err(failed) => failed,
        }
    }

    /// Runs a check; the error is [`AuthOutcome::Busy`] or [`AuthOutcome::Failed`].
    async fn run_check(
        &self,
        users: &BTreeMap<String, PasswordHash>,
        hash: Option<PasswordHash>,
        digest: Digest,
        credentials: &Credentials,
        from: IpAddr,
    ) -> Result<bool, AuthOutcome> {
        let _queued = self.queue.acquire(from).ok_or(AuthOutcome::Busy)?;
        let slot = Arc::clone(&self.slot).acquire_owned().await.map_err(|_| AuthOutcome::Busy)?;
        // the check of a client that disconnected meanwhile ran to its end
        if let Some(outcome) = self.cached_outcome(&digest) {
            return Ok(outcome == AuthOutcome::Valid);
        }
        let cost = hash.as_ref().map_or_else(|| decoy_cost(users), PasswordHash::cost);
        let (password, cache, rounds) =
            (credentials.password.clone(), Arc::clone(&self.cache), Arc::clone(&self.rounds));
        let verify = self.verify;
        // runs to its end even if the client disconnects: its next attempt finds the outcome in the cache
        let checked = tokio::task::spawn_blocking(move || {
            let _slot = slot;
            let is_valid = match hash {
                Some(hash) => verify(&password, hash.as_str()),
                None => {
                    // only for the time that it takes
                    let _ = std::hint::black_box(bcrypt::hash_with_salt(&password, cost, [0; 16]));
                    false
                }
            };
            rounds.fetch_add(1 << cost, Ordering::Relaxed);
            cache.lock().unwrap_or_else(PoisonError::into_inner).insert(digest, is_valid);
            is_valid
        });
        checked.await.map_err(|_| AuthOutcome::Failed)
    }

    fn cached_outcome(&self, digest: &Digest) -> Option<AuthOutcome> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner).outcome(digest)
    }

    fn digest(&self, hash: Option<&PasswordHash>, credentials: &Credentials) -> Digest {
        let mut context = hmac::Context::with_key(&self.key);
        let hash = hash.map_or("", PasswordHash::as_str);
        for part in [credentials.name.as_bytes(), hash.as_bytes(), &credentials.password] {
            context.update(&part.len().to_le_bytes());
            context.update(part);
        }
        let mut digest = [0; 32];
        digest.copy_from_slice(context.sign().as_ref());
        digest
    }
}

/// Returns the bcrypt cost for an unknown name: the highest, so that no name is answered sooner because it is unknown.
fn decoy_cost(users: &BTreeMap<String, PasswordHash>) -> u32 {
    users.values().map(PasswordHash::cost).max().unwrap_or(4)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users(costs: &[(&str, u32)]) -> BTreeMap<String, PasswordHash> {
        let hash = |cost| PasswordHash::parse(&bcrypt::hash("secret", cost).unwrap()).unwrap();
        costs.iter().map(|(name, cost)| ((*name).to_owned(), hash(*cost))).collect()
    }

    fn credentials(name: &str, password: &str) -> Credentials {
        Credentials { name: name.to_owned(), password: password.as_bytes().to_vec() }
    }

    fn address(number: usize) -> IpAddr {
        IpAddr::from([192, 0, 2, number as u8])
    }

    /// Returns the outcome, and how many rounds the check took.
    async fn cost(
        basic_auth: &BasicAuth,
        users: &BTreeMap<String, PasswordHash>,
        credentials: &Credentials,
    ) -> (AuthOutcome, u64) {
        let before = basic_auth.rounds.load(Ordering::Relaxed);
        let outcome = basic_auth.check(users, credentials, address(1)).await;
        (outcome, basic_auth.rounds.load(Ordering::Relaxed) - before)
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
    }

    #[test]
    fn unknown_names_cost_as_much_as_known_ones() {
        let (basic_auth, users) = (BasicAuth::new().unwrap(), users(&[("ann", 5), ("bob", 5)]));
        runtime().block_on(async {
            for name in ["ann", "bob", "eve", "", "mallory"] {
                let wrong = credentials(name, "guess");
                assert_eq!(cost(&basic_auth, &users, &wrong).await, (AuthOutcome::Invalid, 32), "{name}");
                assert_eq!(
                    cost(&basic_auth, &users, &wrong).await,
                    (AuthOutcome::Invalid, 0),
                    "{name}: kept"
                );
            }
        });
    }

    #[test]
    fn check_of_a_client_that_disconnects_is_not_repeated_for_another() {
        let (basic_auth, users) = (Arc::new(BasicAuth::new().unwrap()), users(&[("ann", 8)]));
        runtime().block_on(async {
            let start = |number| {
                let (basic_auth, users) = (Arc::clone(&basic_auth), users.clone());
                tokio::spawn(async move {
                    basic_auth.check(&users, &credentials("ann", "secret"), address(number)).await
                })
            };
            let first = start(1);
            while basic_auth.slot.available_permits() > 0 {
                tokio::task::yield_now().await;
            }
            let waiters = || basic_auth.in_flight.lock().unwrap().values().map(Arc::strong_count).max();
            let second = start(2);
            while waiters().is_some_and(|count| count < 3) {
                tokio::task::yield_now().await;
            }
            first.abort();
            assert_eq!(second.await.unwrap(), AuthOutcome::Valid);
            assert_eq!(basic_auth.rounds.load(Ordering::Relaxed), 1 << 8);
        });
    }

    #[test]
    fn unknown_name_has_the_highest_cost_of_any_user() {
        let (basic_auth, users) = (BasicAuth::new().unwrap(), users(&[("ann", 4), ("bob", 6)]));
        runtime().block_on(async {
            for name in ["eve", "mallory"] {
                assert_eq!(
                    cost(&basic_auth, &users, &credentials(name, "a")).await,
                    (AuthOutcome::Invalid, 64),
                    "{name}"
                );
            }
        });
    }

    #[test]
    fn valid_password_is_cached_until_the_user_changes() {
        let (basic_auth, mut users) = (BasicAuth::new().unwrap(), users(&[("ann", 4)]));
        runtime().block_on(async {
            let right = credentials("ann", "secret");
            assert_eq!(cost(&basic_auth, &users, &right).await, (AuthOutcome::Valid, 16));
            assert_eq!(cost(&basic_auth, &users, &right).await, (AuthOutcome::Valid, 0));
            // any number of invalid ones does not evict it
            for number in 0..2 * MAX_CACHED_INVALID {
                let _ = basic_auth.check(&users, &credentials("ann", &number.to_string()), address(1)).await;
            }
            assert_eq!(cost(&basic_auth, &users, &right).await, (AuthOutcome::Valid, 0));
            assert_eq!(basic_auth.cache.lock().unwrap().invalid.len(), MAX_CACHED_INVALID);
            let other = PasswordHash::parse(&bcrypt::hash("other", 4).unwrap()).unwrap();
            users.insert("ann".to_owned(), other);
            assert_eq!(cost(&basic_auth, &users, &right).await, (AuthOutcome::Invalid, 16));
            users.clear();
            assert_eq!(basic_auth.check(&users, &right, address(1)).await, AuthOutcome::Invalid);
        });
    }

    /// Starts `count` guesses from the addresses of `from` and waits until `busy` of them are rejected.
    async fn guesses(
        basic_auth: &Arc<BasicAuth>,
        users: &BTreeMap<String, PasswordHash>,
        from: impl Fn(usize) -> usize,
        (count, busy): (usize, usize),
    ) -> tokio::task::JoinSet<AuthOutcome> {
        let mut guesses = tokio::task::JoinSet::new();
        for number in 0..count {
            let (basic_auth, users, from) = (Arc::clone(basic_auth), users.clone(), address(from(number)));
            let credentials = credentials("ann", &format!("{from}-{number}"));
            guesses.spawn(async move { basic_auth.check(&users, &credentials, from).await });
        }
        for _ in 0..busy {
            assert_eq!(guesses.join_next().await.unwrap().unwrap(), AuthOutcome::Busy);
        }
        guesses
    }

    #[test]
    fn queue_is_bounded_and_cached_credentials_skip_it() {
        let (basic_auth, users) = (Arc::new(BasicAuth::new().unwrap()), users(&[("ann", 4)]));
        runtime().block_on(async {
            let right = credentials("ann", "secret");
            assert_eq!(basic_auth.check(&users, &right, address(1)).await, AuthOutcome::Valid);
            let slot = Arc::clone(&basic_auth.slot).acquire_owned().await.unwrap();
            let mut waiting = guesses(&basic_auth, &users, |number| number, (MAX_QUEUED + 8, 8)).await;
            assert_eq!(basic_auth.check(&users, &right, address(1)).await, AuthOutcome::Valid);
            drop(slot);
            while let Some(outcome) = waiting.join_next().await {
                assert_eq!(outcome.unwrap(), AuthOutcome::Invalid);
            }
        });
    }

    #[test]
    fn guesses_from_one_address_leave_the_queue_to_others() {
        let (basic_auth, users) = (Arc::new(BasicAuth::new().unwrap()), users(&[("ann", 4)]));
        runtime().block_on(async {
            let slot = Arc::clone(&basic_auth.slot).acquire_owned().await.unwrap();
            let mut waiting = guesses(&basic_auth, &users, |_| 1, (40, 40 - MAX_QUEUED_PER_CLIENT)).await;
            let (theirs, of_ann) = (Arc::clone(&basic_auth), users.clone());
            let new = tokio::spawn(async move {
                theirs.check(&of_ann, &credentials("ann", "secret"), address(2)).await
            });
            drop(slot);
            assert_eq!(new.await.unwrap(), AuthOutcome::Valid, "an address without cached credentials");
            while let Some(outcome) = waiting.join_next().await {
                assert_eq!(outcome.unwrap(), AuthOutcome::Invalid);
            }
            let later = guesses(&basic_auth, &users, |_| 1, (1, 0)).await.join_all().await;
            assert_eq!(later, [AuthOutcome::Invalid], "the address may queue again");
        });
    }

    #[test]
    fn dropped_requests_leave_no_check_behind() {
        use futures_util::FutureExt;
        let (basic_auth, users) = (BasicAuth::new().unwrap(), users(&[("ann", 4)]));
        let in_flight = || basic_auth.in_flight.lock().unwrap().len();
        runtime().block_on(async {
            let slot = Arc::clone(&basic_auth.slot).acquire_owned().await.unwrap();
            let (one, other) = (credentials("ann", "one"), credentials("ann", "other"));
            let mut waiting: Vec<_> = (0..40)
                .map(|number| {
                    let guess = if number % 2 == 0 { &one } else { &other };
                    Box::pin(basic_auth.check(&users, guess, address(number)))
                })
                .collect();
            for check in &mut waiting {
                assert_eq!(check.as_mut().now_or_never(), None, "it waits");
            }
            assert_eq!(in_flight(), 2, "equal ones share a check");
            waiting.truncate(1);
            assert_eq!(in_flight(), 1, "that of the waiter that is left");
            drop(waiting);
            assert_eq!(in_flight(), 0);
            drop(slot);
            assert_eq!(basic_auth.check(&users, &one, address(1)).await, AuthOutcome::Invalid);
            assert_eq!(in_flight(), 0);
        });
    }

    #[test]
    fn panic_in_a_check_is_no_wrong_password() {
        let mut basic_auth = BasicAuth::new().unwrap();
        basic_auth.verify = |_, _| panic!("a bug");
        let (users, right) = (users(&[("ann", 4)]), credentials("ann", "secret"));
        runtime().block_on(async {
            assert_eq!(basic_auth.check(&users, &right, address(1)).await, AuthOutcome::Failed);
            basic_auth.verify = verify;
            assert_eq!(basic_auth.check(&users, &right, address(1)).await, AuthOutcome::Valid, "not cached");
        });
    }

    #[test]
    fn parses_only_well_formed_headers() {
        let read = |header: &str| {
            Credentials::parse(header.as_bytes()).map(|credentials| (credentials.name, credentials.password))
        };
        assert_eq!(read("Basic YW5uOnNlOmNyZXQ="), Some(("ann".to_owned(), b"se:cret".to_vec())));
        assert_eq!(read("basic   YW5uOg=="), Some(("ann".to_owned(), vec![])));
        for header in ["", "Basic", "Basic ", "Basic YW5u", "Bearer YW5uOg==", "Basic !", "Basié YW5uOg=="] {
            assert_eq!(read(header), None, "{header}");
        }
    }
}
