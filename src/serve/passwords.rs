//! Names and passwords of basic authentication.
//!
//! A check by bcrypt is slow on purpose. So it runs on a thread that answers nobody, one at a time, and its outcome is kept;
//! and few may wait, so that a stranger with wrong passwords holds up nobody who has asked before.
//!
//! Who guesses names learns nothing from the time: a name that is not known costs one check too, of a cost that some user's
//! hash has, always the same for one name.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::hmac;
use ring::rand::SystemRandom;
use tokio::sync::Semaphore;

use crate::config::web::PasswordHash;

/// Checks that may wait for their turn.
const WAITING: usize = 16;
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
            rounds: Arc::default(),
        })
    }

    /// Whether one of the users is meant, and the password is theirs.
    pub async fn check(&self, users: &BTreeMap<String, PasswordHash>, given: &Credentials) -> Outcome {
        let hash = users.get(&given.name).cloned();
        let tag = self.tag(hash.as_ref(), given);
        if let Some(outcome) = self.known(&tag) {
            return outcome;
        }
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
