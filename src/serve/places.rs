//! The places of requests, each held until its answer is sent.
//!
//! One party holds three quarters of them at most, this host too: what forwards on it, a proxy or a port-forward, asks for a
//! crowd. When all are taken, a newcomer gets the place of an answer that is being sent, and has been for a while: of the
//! party that holds the most, and more than the newcomer does, the oldest. So several who read slowly together keep nobody
//! out. An answer that is being made is never given up: its work is done on a thread that cannot be stopped.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::parties::party;
use super::pulse::{Kept, Pulse};
use crate::clock::Moment;

/// For so long an answer is sent in peace.
const PEACE: Duration = Duration::from_secs(2);

/// The places.
#[derive(Debug)]
pub struct Places {
    most: usize,
    /// Of these, for one party.
    of_one: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    next: u64,
    by_number: BTreeMap<u64, Holder>,
}

#[derive(Debug)]
struct Holder {
    party: IpAddr,
    pulse: Arc<Pulse>,
    /// Since when its answer is being sent.
    sending: Option<Moment>,
}

/// What became of a request.
#[derive(Debug)]
pub enum Taking {
    /// There was a place.
    Free(Place),
    /// Another's answer was cut off for it.
    InPlaceOfAnother(Place),
    /// There was none, and none that could be had.
    Full,
}

impl Places {
    /// So many; 0: no limit.
    pub fn new(most: usize) -> Arc<Self> {
        let most = if most == 0 { usize::MAX } else { most };
        Arc::new(Self { most, of_one: most - most / 4, taken: Mutex::default() })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a request from this address, on the connection of this pulse.
    pub fn take(self: &Arc<Self>, address: IpAddr, pulse: &Arc<Pulse>, now: Moment) -> Taking {
        let party = party(address);
        let mut taken = self.taken();
        let held = taken.held(party);
        let is_full = taken.by_number.len() >= self.most;
        if held >= self.of_one || is_full && !taken.make_room(held, now) {
            return Taking::Full;
        }
        let number = taken.next;
        taken.next += 1;
        taken.by_number.insert(number, Holder { party, pulse: Arc::clone(pulse), sending: None });
        drop(taken);
        let place = Arc::new(Held { places: Arc::clone(self), number, _kept: pulse.keep() });
        if is_full { Taking::InPlaceOfAnother(place) } else { Taking::Free(place) }
    }
}

impl Taken {
    fn held(&self, party: IpAddr) -> usize {
        self.by_number.values().filter(|holder| holder.party == party).count()
    }

    /// Cuts an answer off, of a party that holds more than `held`; false if there is none.
    fn make_room(&mut self, held: usize, now: Moment) -> bool {
        let slow = self.by_number.iter().filter_map(|(number, holder)| {
            let since = holder.sending.filter(|since| now.since(*since) >= PEACE)?;
            let theirs = self.held(holder.party);
            (theirs > held).then_some((Reverse(theirs), since, *number))
        });
        let Some((_, _, number)) = slow.min() else { return false };
        if let Some(holder) = self.by_number.remove(&number) {
            holder.pulse.cut();
        }
        true
    }
}

/// The place that a request takes until its answer is sent; given back when the last holder is dropped. Its connection is
/// not closed meanwhile to make room for another connection.
pub type Place = Arc<Held>;

/// A place, given back when dropped, if nobody has it already.
#[derive(Debug)]
pub struct Held {
    places: Arc<Places>,
    number: u64,
    _kept: Kept,
}

impl Held {
    /// Its answer is made, and is being sent from now on.
    pub fn sends(&self, now: Moment) {
        if let Some(holder) = self.places.taken().by_number.get_mut(&self.number) {
            holder.sending = Some(now);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.places.taken().by_number.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request from an address, and its connection.
    fn take(places: &Arc<Places>, address: &str, now: Moment) -> (Taking, Arc<Pulse>) {
        let pulse = Pulse::new(now);
        (places.take(address.parse().unwrap(), &pulse, now), pulse)
    }

    /// One that is being sent.
    fn sends(places: &Arc<Places>, address: &str, now: Moment) -> (Place, Arc<Pulse>) {
        let (Taking::Free(place), pulse) = take(places, address, now) else { panic!("no place was free") };
        place.sends(now);
        (place, pulse)
    }

    #[test]
    fn one_party_takes_three_quarters_and_this_host_no_more() {
        let (now, places) = (Moment::now(), Places::new(8));
        for near in [["127.0.0.1", "127.0.0.2"], ["192.0.2.7", "::ffff:192.0.2.7"]] {
            let held: Vec<_> = (0..6).map(|number| take(&places, near[number % 2], now)).collect();
            assert!(held.iter().all(|(taking, _)| matches!(taking, Taking::Free(_))));
            assert!(matches!(take(&places, near[0], now), (Taking::Full, _)));
            assert!(matches!(take(&places, "198.51.100.1", now), (Taking::Free(_), _)));
        }
        assert!(places.taken().by_number.is_empty(), "places come back");
    }

    #[test]
    fn several_who_read_slowly_together_keep_nobody_out() {
        let (now, places) = (Moment::now(), Places::new(4));
        let slow: Vec<_> = (0..3).map(|_| sends(&places, "198.51.100.1", now)).collect();
        let other = sends(&places, "198.51.100.2", now);
        assert!(matches!(take(&places, "192.0.2.7", now), (Taking::Full, _)), "they have a while in peace");
        let later = now.plus(PEACE);
        let (Taking::InPlaceOfAnother(place), pulse) = take(&places, "192.0.2.7", later) else {
            panic!("no room was made")
        };
        assert!(slow[0].1.is_cut() && !slow[1].1.is_cut() && !other.1.is_cut());
        place.sends(later);
        drop(slow); // the place that was lost is not given back twice
        assert_eq!(places.taken().by_number.len(), 2);
        assert!(!pulse.is_cut());
    }

    #[test]
    fn who_holds_as_many_gets_no_others_place_and_what_is_being_made_is_not_cut() {
        let (now, places) = (Moment::now(), Places::new(2));
        let held = [sends(&places, "192.0.2.1", now), sends(&places, "192.0.2.2", now)];
        let later = now.plus(PEACE);
        assert!(matches!(take(&places, "192.0.2.1", later), (Taking::Full, _)));
        let (Taking::InPlaceOfAnother(_made), _) = take(&places, "192.0.2.3", later) else {
            panic!("who has none comes in")
        };
        drop(held);
        let _making = take(&places, "192.0.2.4", later);
        let much_later = later.plus(PEACE * 10);
        assert!(matches!(take(&places, "192.0.2.5", much_later), (Taking::Full, _)));
    }
}
