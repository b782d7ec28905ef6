//! Names and passwords of basic authentication.
//!
//! A check by bcrypt is slow on purpose. So it runs on a thread that answers nobody, one at a time, and its outcome is kept;
//! and few may wait, of one address one, so that a stranger with wrong passwords holds up nobody who has asked before. Who has
//! not, such as everybody after a restart, can be held up by as many addresses as may wait, and by no fewer.
//!
//! Who guesses names learns nothing from the time: a name that is not known costs one check too, of a cost that some user's
//! hash has, always the same for one name.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::hmac;
use ring::rand::SystemRandom;
use tokio::sync::Semaphore;

use super::parties::Shares;
use crate::config::web::PasswordHash;

/// Checks that may wait for their turn, and of one address. At the usual cost, 10 to 12, the last one has its turn within the
/// 10 s that a scrape may take.
pub const WAITING: usize = 32;
const OF_ONE: usize = 1;
/// Outcomes that are kept: of right passwords as many as there can be users, of wrong ones the last.
const RIGHT: usize = 1_024;
const WRONG: usize = 256;

/// The outcome of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// This user has this password.
    Right,
    /// No such user, or not that password.
    Wrong,
    /// Too many wait to be checked.
    Busy,
}

/// What a request brings.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    name: String,
    password: Vec<u8>,
}

impl Credentials {
    /// Reads the header `Authorization`; `None` if it is none of basic authentication.
    pub fn parse(header: &[u8]) -> Option<Self> {
        let (scheme, rest) = header.split_at_checked(6)?;
        let encoded = rest.trim_ascii();
        let decoded = STANDARD.decode(encoded).ok().filter(|_| scheme.eq_ignore_ascii_case(b"basic "))?;
        let colon = decoded.iter().position(|byte| *byte == b':')?;
        let name = String::from_utf8_lossy(&decoded[..colon]).into_owned();
        Some(Self { name, password: decoded[colon + 1..].to_vec() })
    }
}

/// A digest of name, hash and password under a key that only this process has.
type Tag = [u8; 32];

#[derive(Debug, Default)]
struct Known {
    right: HashSet<Tag>,
    wrong: VecDeque<Tag>,
}

impl Known {
    fn outcome(&self, tag: &Tag) -> Option<Outcome> {
        if self.right.contains(tag) {
            return Some(Outcome::Right);
        }
        self.wrong.contains(tag).then_some(Outcome::Wrong)
    }

    fn keep(&mut self, tag: Tag, is_right: bool) {
        if is_right {
            if self.right.len() >= RIGHT {
                self.right.clear();
            }
            self.right.insert(tag);
        } else {
            self.wrong.truncate(WRONG - 1);
            self.wrong.push_front(tag);
        }
    }
}

/// Checks passwords.
#[derive(Debug)]
pub struct Passwords {
    key: hmac::Key,
    known: Arc<Mutex<Known>>,
    turn: Arc<Semaphore>,
    waiting: Semaphore,
    shares: Shares,
    /// Rounds of bcrypt that were run, for the tests.
    rounds: Arc<AtomicU64>,
}

impl Passwords {
    /// With nothing known.
    ///
    /// # Errors
    /// The kernel gives no random numbers.
    pub fn new() -> Result<Self, ring::error::Unspecified> {
        Ok(Self {
            key: hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new())?,
            known: Arc::default(),
            turn: Arc::new(Semaphore::new(1)),
            waiting: Semaphore::new(WAITING),
            shares: Shares::default(),
            rounds: Arc::default(),
        })
    }

    /// Whether one of the users is meant, and the password is theirs.
    pub async fn check(
        &self,
        users: &BTreeMap<String, PasswordHash>,
        given: &Credentials,
        from: IpAddr,
    ) -> Outcome {
        let hash = users.get(&given.name).cloned();
        let tag = self.tag(hash.as_ref(), given);
        if let Some(outcome) = self.known(&tag) {
            return outcome;
        }
        let Some(_share) = self.shares.take(from, OF_ONE) else { return Outcome::Busy };
        let Ok(_waiting) = self.waiting.try_acquire() else { return Outcome::Busy };
        let Ok(turn) = Arc::clone(&self.turn).acquire_owned().await else { return Outcome::Busy };
        if let Some(outcome) = self.known(&tag) {
            return outcome; // another request with the same came first
        }
        let cost = hash.as_ref().map_or_else(|| self.cost_for(users, &given.name), PasswordHash::cost);
        let (password, known, rounds) =
            (given.password.clone(), Arc::clone(&self.known), Arc::clone(&self.rounds));
        // not given up if the client is gone: the next time it asks the outcome is known
        let checked = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            let is_right = match hash {
                Some(hash) => bcrypt::verify(&password, hash.as_str()).unwrap_or(false),
                None => {
                    // for the time that it takes
                    let _ = std::hint::black_box(bcrypt::hash_with_salt(&password, cost, [0; 16]));
                    false
                }
            };
            rounds.fetch_add(1 << cost, Ordering::Relaxed);
            known.lock().unwrap_or_else(PoisonError::into_inner).keep(tag, is_right);
            is_right
        });
        match checked.await {
            Ok(true) => Outcome::Right,
            Ok(false) | Err(_) => Outcome::Wrong,
        }
    }

    /// Whether this was checked before, and is right. Costs no round.
    pub fn is_known_as_right(&self, users: &BTreeMap<String, PasswordHash>, given: &Credentials) -> bool {
        self.known(&self.tag(users.get(&given.name), given)) == Some(Outcome::Right)
    }

    fn known(&self, tag: &Tag) -> Option<Outcome> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).outcome(tag)
    }

    fn tag(&self, hash: Option<&PasswordHash>, given: &Credentials) -> Tag {
        let mut context = hmac::Context::with_key(&self.key);
        let hash = hash.map_or("", PasswordHash::as_str);
        for part in [given.name.as_bytes(), hash.as_bytes(), &given.password] {
            context.update(&part.len().to_le_bytes());
            context.update(part);
        }
        let mut tag = [0; 32];
        tag.copy_from_slice(context.sign().as_ref());
        tag
    }

    /// The cost for a name that is not known: that of some user.
    fn cost_for(&self, users: &BTreeMap<String, PasswordHash>, name: &str) -> u32 {
        let tag = hmac::sign(&self.key, name.as_bytes());
        let number = tag.as_ref().iter().take(4).fold(0, |number, byte| number << 8 | usize::from(*byte));
        users.values().nth(number % users.len().max(1)).map_or(4, PasswordHash::cost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users(costs: &[(&str, u32)]) -> BTreeMap<String, PasswordHash> {
        let hash = |cost| PasswordHash::parse(&bcrypt::hash("secret", cost).unwrap()).unwrap();
        costs.iter().map(|(name, cost)| ((*name).to_owned(), hash(*cost))).collect()
    }

    fn given(name: &str, password: &str) -> Credentials {
        Credentials { name: name.to_owned(), password: password.as_bytes().to_vec() }
    }

    fn address(number: usize) -> IpAddr {
        IpAddr::from([192, 0, 2, number as u8])
    }

    /// The outcome, and how many rounds it cost.
    async fn cost(
        passwords: &Passwords,
        users: &BTreeMap<String, PasswordHash>,
        given: &Credentials,
    ) -> (Outcome, u64) {
        let before = passwords.rounds.load(Ordering::Relaxed);
        let outcome = passwords.check(users, given, address(1)).await;
        (outcome, passwords.rounds.load(Ordering::Relaxed) - before)
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
    }

    #[test]
    fn a_name_that_is_not_known_costs_as_much_as_one_that_is() {
        let (passwords, users) = (Passwords::new().unwrap(), users(&[("ann", 5), ("bob", 5)]));
        runtime().block_on(async {
            for name in ["ann", "bob", "eve", "", "mallory"] {
                let wrong = given(name, "guess");
                assert_eq!(cost(&passwords, &users, &wrong).await, (Outcome::Wrong, 32), "{name}");
                assert_eq!(cost(&passwords, &users, &wrong).await, (Outcome::Wrong, 0), "{name}: kept");
            }
        });
    }

    #[test]
    fn where_costs_differ_a_name_that_is_not_known_costs_what_some_user_does_always_the_same() {
        let (passwords, users) = (Passwords::new().unwrap(), users(&[("ann", 4), ("bob", 6)]));
        runtime().block_on(async {
            let mut seen = HashSet::new();
            for number in 0..40 {
                let name = format!("eve{number}");
                let (_, first) = cost(&passwords, &users, &given(&name, "a")).await;
                let (_, second) = cost(&passwords, &users, &given(&name, "b")).await;
                assert_eq!(first, second, "{name}");
                seen.insert(first);
            }
            assert_eq!(seen, HashSet::from([16, 64]));
        });
    }

    #[test]
    fn a_right_password_costs_once_and_no_longer_than_the_user_has_it() {
        let (passwords, mut users) = (Passwords::new().unwrap(), users(&[("ann", 4)]));
        runtime().block_on(async {
            let right = given("ann", "secret");
            assert_eq!(cost(&passwords, &users, &right).await, (Outcome::Right, 16));
            assert_eq!(cost(&passwords, &users, &right).await, (Outcome::Right, 0));
            // wrong ones, however many, do not make it forgotten
            for number in 0..2 * WRONG {
                let _ = passwords.check(&users, &given("ann", &number.to_string()), address(1)).await;
            }
            assert_eq!(cost(&passwords, &users, &right).await, (Outcome::Right, 0));
            assert_eq!(passwords.known.lock().unwrap().wrong.len(), WRONG);
            let other = PasswordHash::parse(&bcrypt::hash("other", 4).unwrap()).unwrap();
            users.insert("ann".to_owned(), other);
            assert_eq!(cost(&passwords, &users, &right).await, (Outcome::Wrong, 16));
            users.clear();
            assert_eq!(passwords.check(&users, &right, address(1)).await, Outcome::Wrong);
        });
    }

    /// Guesses that come while a check takes its time: those of which number from which address, and how many are turned away.
    async fn guesses(
        passwords: &Arc<Passwords>,
        users: &BTreeMap<String, PasswordHash>,
        from: impl Fn(usize) -> usize,
        (count, busy): (usize, usize),
    ) -> tokio::task::JoinSet<Outcome> {
        let mut guesses = tokio::task::JoinSet::new();
        for number in 0..count {
            let (passwords, users, from) = (Arc::clone(passwords), users.clone(), address(from(number)));
            let given = given("ann", &format!("{from}-{number}"));
            guesses.spawn(async move { passwords.check(&users, &given, from).await });
        }
        for _ in 0..busy {
            assert_eq!(guesses.join_next().await.unwrap().unwrap(), Outcome::Busy);
        }
        guesses
    }

    #[test]
    fn few_wait_and_who_is_known_waits_for_nobody() {
        let (passwords, users) = (Arc::new(Passwords::new().unwrap()), users(&[("ann", 4)]));
        runtime().block_on(async {
            let right = given("ann", "secret");
            assert_eq!(passwords.check(&users, &right, address(1)).await, Outcome::Right);
            let turn = Arc::clone(&passwords.turn).acquire_owned().await.unwrap();
            let mut waiting = guesses(&passwords, &users, |number| number, (WAITING + 8, 8)).await;
            assert_eq!(passwords.check(&users, &right, address(1)).await, Outcome::Right);
            drop(turn);
            while let Some(outcome) = waiting.join_next().await {
                assert_eq!(outcome.unwrap(), Outcome::Wrong);
            }
        });
    }

    #[test]
    fn who_guesses_from_one_address_keeps_nobody_elsewhere_from_the_queue() {
        let (passwords, users) = (Arc::new(Passwords::new().unwrap()), users(&[("ann", 4)]));
        runtime().block_on(async {
            let turn = Arc::clone(&passwords.turn).acquire_owned().await.unwrap();
            let mut waiting = guesses(&passwords, &users, |_| 1, (40, 40 - OF_ONE)).await;
            let (theirs, of_ann) = (Arc::clone(&passwords), users.clone());
            let new =
                tokio::spawn(async move { theirs.check(&of_ann, &given("ann", "secret"), address(2)).await });
            drop(turn);
            assert_eq!(new.await.unwrap(), Outcome::Right, "who was never here before");
            while let Some(outcome) = waiting.join_next().await {
                assert_eq!(outcome.unwrap(), Outcome::Wrong);
            }
            let later = guesses(&passwords, &users, |_| 1, (1, 0)).await.join_all().await;
            assert_eq!(later, [Outcome::Wrong], "shares come back");
        });
    }

    #[test]
    fn only_well_formed_headers_are_read() {
        let read =
            |header: &str| Credentials::parse(header.as_bytes()).map(|given| (given.name, given.password));
        assert_eq!(read("Basic YW5uOnNlOmNyZXQ="), Some(("ann".to_owned(), b"se:cret".to_vec())));
        assert_eq!(read("basic   YW5uOg=="), Some(("ann".to_owned(), vec![])));
        for header in ["", "Basic", "Basic ", "Basic YW5u", "Bearer YW5uOg==", "Basic !", "Basié YW5uOg=="] {
            assert_eq!(read(header), None, "{header}");
        }
    }
}
