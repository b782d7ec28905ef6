//! The places of connections. When all are taken, one on which nothing is under way is closed for the newcomer.
//!
//! It is one of the party that holds the most: a stranger who opens connections without end closes its own. A fixed number for
//! each address would have to be guessed, and would be met by everybody behind one proxy. Parties that hold few count as equal:
//! who scrapes on two connections is no crowd. Of these, one that had no answer yet goes first, so that of a flood from many
//! addresses a scraper is the last to suffer; then one whose answer the kernel has sent; then the one that has not asked for
//! longest.
//!
//! The last eighth is for this host, so that its health check comes through whatever the others do. What it holds beyond that
//! gives way as others' do: a container on the host's network is this host too.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::parties::party;
use super::pulse::Pulse;
use crate::clock::Moment;

/// The places.
#[derive(Debug)]
pub struct Table {
    most: usize,
    /// Of these, for this host alone.
    reserved: usize,
    /// So many are few: a sixteenth.
    few: usize,
    seated: Mutex<Seated>,
}

#[derive(Debug, Default)]
struct Seated {
    next: u64,
    by_number: BTreeMap<u64, (IpAddr, Arc<Pulse>)>,
}

/// What became of a newcomer.
#[derive(Debug)]
pub enum Seating {
    /// There was a place.
    Free(Seat),
    /// Another connection was closed for it.
    InPlaceOfAnother(Seat),
    /// On all others something is under way.
    Full,
}

impl Table {
    /// Of so many places; 0: no limit.
    pub fn new(most: usize) -> Arc<Self> {
        let (most, reserved) = if most == 0 { (usize::MAX, 0) } else { (most, most / 8) };
        Arc::new(Self { most, reserved, few: most / 16, seated: Mutex::default() })
    }

    fn seated(&self) -> MutexGuard<'_, Seated> {
        self.seated.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a connection from this address.
    pub fn seat(self: &Arc<Self>, address: SocketAddr, now: Moment) -> Seating {
        let party = party(address.ip());
        let room = if party.is_loopback() { self.most } else { self.most - self.reserved };
        let mut seated = self.seated();
        let is_full = seated.by_number.len() >= room;
        if is_full && !seated.make_room(party.is_loopback(), self, now) {
            return Seating::Full;
        }
        let (number, pulse) = (seated.next, Pulse::new(now));
        seated.next += 1;
        seated.by_number.insert(number, (party, Arc::clone(&pulse)));
        let seat = Seat { table: Arc::clone(self), number, pulse };
        if is_full { Seating::InPlaceOfAnother(seat) } else { Seating::Free(seat) }
    }
}

impl Seated {
    /// Closes a connection; false if there is none that may be closed. Those that are for this host give way to no other.
    fn make_room(&mut self, for_this_host: bool, table: &Table, now: Moment) -> bool {
        let mut held: HashMap<IpAddr, usize> = HashMap::new();
        for (party, _) in self.by_number.values() {
            *held.entry(*party).or_default() += 1;
        }
        let held = |party: &IpAddr| held.get(party).copied();
        let may_go = |party: &IpAddr| {
            for_this_host || !party.is_loopback() || held(party).is_some_and(|count| count > table.reserved)
        };
        loop {
            let candidates = self.by_number.iter().filter(|(_, (party, _))| may_go(party));
            let first = candidates.filter_map(|(number, (party, pulse))| {
                Some((Reverse(held(party).max(Some(table.few))), pulse.worth(now)?, *number))
            });
            let Some((_, _, number)) = first.min() else { return false };
            // it may have asked just now; then it is none of them any more
            if self.by_number.get(&number).is_some_and(|(_, pulse)| pulse.evict()) {
                self.by_number.remove(&number);
                return true;
            }
        }
    }
}

/// A place, given back when dropped, if nobody has it already.
#[derive(Debug)]
pub struct Seat {
    table: Arc<Table>,
    number: u64,
    /// Of the connection that has it.
    pub pulse: Arc<Pulse>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.table.seated().by_number.remove(&self.number);
        self.pulse.end();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::serve::places::{Places, Taking};

    /// A table, and what happens at it second by second.
    struct Room {
        table: Arc<Table>,
        now: Moment,
    }

    impl Room {
        fn new(most: usize) -> Self {
            Self { table: Table::new(most), now: Moment::now() }
        }

        fn seat(&mut self, address: &str) -> Seating {
            self.now = self.now.plus(Duration::from_secs(1));
            self.table.seat(SocketAddr::new(address.parse().unwrap(), 1), self.now)
        }

        fn free(&mut self, address: &str) -> Seat {
            match self.seat(address) {
                Seating::Free(seat) => seat,
                other => panic!("{other:?}"),
            }
        }
    }

    fn is_over(seat: &Seat) -> bool {
        seat.pulse.worth(Moment::now()).is_none()
    }

    #[test]
    fn the_last_eighth_is_for_this_host_and_none_of_it_gives_way_to_another() {
        let mut room = Room::new(16);
        let mut kept: Vec<_> = (0..14).map(|_| room.free("192.0.2.7")).collect();
        let guards: Vec<_> = kept.iter().map(|seat| seat.pulse.keep()).collect();
        assert!(matches!(room.seat("192.0.2.7"), Seating::Full));
        let near = (room.free("127.0.0.1"), room.free("::ffff:127.0.0.2"));
        assert!(matches!(room.seat("198.51.100.1"), Seating::Full), "this host keeps its own");
        drop(guards);
        assert!(matches!(room.seat("127.0.0.1"), Seating::InPlaceOfAnother(_)));
        assert!(is_over(&kept[0]) && !is_over(&near.0));
        kept.clear();
        room.free("192.0.2.7");
    }

    #[test]
    fn this_host_keeps_its_eighth_and_not_the_places_of_others() {
        let mut room = Room::new(16);
        let near: Vec<_> = (0..16).map(|number| room.free(["127.0.0.1", "127.0.0.2"][number % 2])).collect();
        let far: Vec<_> = (0..20).map(|number| room.seat(&format!("192.0.2.{number}"))).collect();
        assert!(far.iter().all(|seating| matches!(seating, Seating::InPlaceOfAnother(_))));
        assert_eq!(near.iter().filter(|seat| !is_over(seat)).count(), 2);
    }

    /// An answer that took a place, and is sent.
    fn is_served(seat: &Seat, now: Moment) {
        let Taking::Free(place) = Places::new(1).take(IpAddr::from([192, 0, 2, 9]), &seat.pulse, now) else {
            panic!("no place was free")
        };
        drop(seat.pulse.begin(now).made(Some(place), now));
        seat.pulse.flushed();
    }

    #[test]
    fn of_a_flood_from_many_addresses_those_go_first_that_had_no_answer_yet() {
        let mut room = Room::new(32);
        let scraper = [room.free("192.0.2.7"), room.free("192.0.2.7")];
        scraper.iter().for_each(|seat| is_served(seat, room.now));
        let flood: Vec<_> = (1..=26).map(|number| room.free(&format!("198.51.100.{number}"))).collect();
        let more: Vec<_> = (1..=26).map(|number| room.seat(&format!("203.0.113.{number}"))).collect();
        assert!(more.iter().all(|seating| matches!(seating, Seating::InPlaceOfAnother(_))));
        assert!(flood.iter().all(is_over));
        assert!(!scraper.iter().any(is_over), "nor is who has two connections a crowd");
    }

    #[test]
    fn a_flood_from_one_address_closes_its_own_connections_and_no_others() {
        let mut room = Room::new(16);
        let scraper = room.free("192.0.2.7");
        let flood: Vec<_> = (0..13).map(|_| room.free("198.51.100.1")).collect();
        let more: Vec<_> = (0..13).map(|_| room.seat("198.51.100.1")).collect();
        assert!(more.iter().all(|seating| matches!(seating, Seating::InPlaceOfAnother(_))));
        assert!(flood.iter().all(is_over) && !is_over(&scraper));
        assert!(
            matches!(room.seat("192.0.2.8"), Seating::InPlaceOfAnother(_)),
            "and who is new finds a place"
        );
        assert!(!is_over(&scraper));
    }

    #[test]
    fn of_many_addresses_the_one_that_has_not_asked_for_longest_goes_and_never_one_under_way() {
        let mut room = Room::new(8);
        let seats: Vec<_> = (1..=7).map(|number| room.free(&format!("192.0.2.{number}"))).collect();
        let _under_way = seats[0].pulse.keep();
        drop(seats[1].pulse.begin(room.now.plus(Duration::from_secs(1)))); // it asked again
        assert!(matches!(room.seat("192.0.2.100"), Seating::InPlaceOfAnother(_)));
        let gone: Vec<_> = (1..7).filter(|number| is_over(&seats[*number])).collect();
        assert_eq!(gone, [2]);
    }

    #[test]
    fn no_limit_is_none() {
        let mut room = Room::new(0);
        let seats: Vec<_> = (0..1_000).map(|_| room.free("192.0.2.7")).collect();
        drop(seats);
        assert!(room.table.seated().by_number.is_empty(), "places come back");
    }
}
