//! Which processes hold a descriptor of a graphics device.
//!
//! Nothing lists them but the links in `/proc/PID/fd`, one system call each; on a large host there are many, and one process
//! may have a million. So what is known to be a GPU's descriptor is read at every reading, and all others are looked at in
//! turn, a part of each process at a time, as the time budget of a reading allows: those of processes that hold a GPU, which
//! may have opened another one; new processes; and the rest, each at most every two seconds. No process can take the time of
//! the others: a device that is opened late is seen that much later.
//!
//! Reading has a budget too. Where it does not suffice, the cgroups with the fewest descriptors come first, and processes
//! that were not read whole have no figure.
//!
//! A device that a container was given under a path outside `/dev/dri` is not seen, and its memory stays unattributed.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound::{Excluded, Included, Unbounded};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use super::books::{Descriptor, Key};
use super::holder::{Holder, Listing};
use crate::clock::Moment;
use crate::collect::gpu::Owner;
use crate::host::{Dir, ReadError, Roots};

/// How much time the parts of a reading may take.
#[derive(Clone, Copy, Debug)]
struct Budget {
    /// The search in the first reading, and in each one after it.
    search: (Duration, Duration),
    /// New devices of processes that hold some already.
    more: Duration,
    /// What the driver tells of the known ones.
    read: Duration,
    /// A process that holds no GPU, or may not be looked at, is looked at again after this.
    again: Duration,
}

impl Default for Budget {
    fn default() -> Self {
        let ms = Duration::from_millis;
        Self { search: (ms(250), ms(20)), more: ms(10), read: ms(150), again: ms(2_000) }
    }
}

/// The end of a budget.
#[derive(Clone, Copy, Debug)]
pub struct Until {
    began: Moment,
    budget: Duration,
}

impl Until {
    fn now(budget: Duration) -> Self {
        Self { began: Moment::now(), budget }
    }

    /// True once the time is spent.
    pub fn is_over(&self) -> bool {
        Moment::now().since(self.began) >= self.budget
    }
}

/// What is remembered between two readings.
#[derive(Debug, Default)]
pub struct Search {
    holders: BTreeMap<u32, Holder>,
    /// Processes of which no descriptor of a GPU is known.
    others: HashMap<u32, Other>,
    /// Processes that may not be looked at, and when that was seen. A pid may be another's by now, and a process may be
    /// readable after an exec, so these too are looked at again.
    denied: HashMap<u32, Moment>,
    /// The last pid that was looked at in its turn.
    cursor: u32,
    /// The last holder that was looked at for more devices.
    holders_cursor: u32,
    begun: bool,
    buffer: Vec<u8>,
    budget: Budget,
}

/// A process of which no descriptor of a GPU is known.
#[derive(Clone, Copy, Debug)]
struct Other {
    seen: Moment,
    /// Where to go on in its list; 0 if that was gone through.
    place: u64,
}

/// What one reading found.
#[derive(Debug, Default)]
pub struct Found {
    /// Descriptors of graphics devices, each with the name of its node as its process sees it.
    pub descriptors: Vec<(String, Descriptor)>,
    /// Who the holders are.
    pub owners: HashMap<Key, Owner>,
    /// Holders whose work passes the engines' statistics by.
    pub computing: BTreeSet<Key>,
    /// Holders of which only a part could be read, and the nodes of theirs that are known.
    pub in_part: BTreeMap<Key, BTreeSet<String>>,
    /// Processes whose descriptors could be read, and could not for want of permission.
    pub readable: usize,
    /// See `readable`.
    pub denied: usize,
    /// Failed readings.
    pub faults: Vec<&'static str>,
}

impl Search {
    /// Looks for holders, and reads all that are known.
    ///
    /// # Errors
    /// The processes cannot be listed.
    pub fn round(&mut self, roots: &Roots, cgroup_v1: bool) -> Result<Found, ReadError> {
        let pids = self.pids(roots)?;
        self.holders.retain(|pid, _| pids.contains(pid));
        self.others.retain(|pid, _| pids.contains(pid));
        self.denied.retain(|pid, _| pids.contains(pid));
        let mut faults = Vec::new();
        self.look_for_more(&mut faults);
        self.look_around(roots, cgroup_v1, &pids, &mut faults);
        let mut found = self.known();
        found.faults.append(&mut faults);
        found.readable = self.others.len() + self.holders.len();
        found.denied = self.denied.len();
        Ok(found)
    }

    /// Reads all known holders once more.
    pub fn known(&mut self) -> Found {
        let mut found = Found::default();
        let until = Until::now(self.budget.read);
        for pid in self.reading_order() {
            let Some(holder) = self.holders.get_mut(&pid) else { continue };
            let read = holder.read(&mut found, until, &mut self.buffer);
            if !matches!(read, Ok(true)) {
                self.holders.remove(&pid); // looked at as a new process is, in the next reading
            }
            found.faults.extend(read.err().and_then(|error| error.fault_reason()));
        }
        found
    }

    /// The holders, those of the cgroups with the fewest descriptors first.
    fn reading_order(&self) -> Vec<u32> {
        let mut of_cgroups: HashMap<&str, usize> = HashMap::new();
        for holder in self.holders.values() {
            *of_cgroups.entry(holder.cgroup()).or_default() += holder.count();
        }
        let weight = |holder: &Holder| (of_cgroups.get(&**holder.cgroup()).copied(), holder.count());
        let mut order: Vec<_> = self.holders.iter().map(|(pid, holder)| (weight(holder), *pid)).collect();
        order.sort_unstable();
        order.into_iter().map(|(_, pid)| pid).collect()
    }

    fn pids(&mut self, roots: &Roots) -> Result<BTreeSet<u32>, ReadError> {
        let mut pids = BTreeSet::new();
        Dir::open(&roots.proc)?.for_each(&mut self.buffer, |name, _| {
            let number = crate::parse::number(name.as_bytes());
            pids.extend(number.and_then(|pid| u32::try_from(pid).ok()));
        })?;
        Ok(pids)
    }

    /// Looks for more devices of the holders, in their turn.
    fn look_for_more(&mut self, faults: &mut Vec<&'static str>) {
        let until = Until::now(self.budget.more);
        let after = self.holders.range((Excluded(self.holders_cursor), Unbounded));
        let before = self.holders.range((Unbounded, Included(self.holders_cursor)));
        let order: Vec<u32> = after.chain(before).map(|(pid, _)| *pid).collect();
        for pid in order {
            if until.is_over() {
                return;
            }
            self.holders_cursor = pid;
            let Some(holder) = self.holders.get_mut(&pid) else { continue };
            if let Err(error) = holder.look_for_more(&mut self.buffer) {
                faults.extend(error.fault_reason());
                self.holders.remove(&pid);
            }
        }
    }

    /// Looks at processes that are not known to hold a GPU: half of the time at new ones, then at all in their turn.
    fn look_around(
        &mut self,
        roots: &Roots,
        cgroup_v1: bool,
        pids: &BTreeSet<u32>,
        faults: &mut Vec<&'static str>,
    ) {
        let budget = if self.begun { self.budget.search.1 } else { self.budget.search.0 };
        self.begun = true;
        let (half, whole) = (Until::now(budget / 2), Until::now(budget));
        let is_known = |search: &Self, pid: u32| {
            search.holders.contains_key(&pid)
                || search.others.contains_key(&pid)
                || search.denied.contains_key(&pid)
        };
        for pid in pids.iter().copied().filter(|pid| !is_known(self, *pid)).collect::<Vec<_>>() {
            if half.is_over() {
                break;
            }
            self.look_at(roots, cgroup_v1, pid, faults);
        }
        let after = pids.range((Excluded(self.cursor), Unbounded));
        for pid in after.chain(pids.range(..=self.cursor)).copied() {
            if whole.is_over() {
                return;
            }
            self.cursor = pid;
            if !self.holders.contains_key(&pid) && self.is_due(pid) {
                self.look_at(roots, cgroup_v1, pid, faults);
            }
        }
    }

    fn is_due(&self, pid: u32) -> bool {
        let in_part = self.others.get(&pid).is_some_and(|other| other.place != 0);
        let seen = self.others.get(&pid).map(|other| other.seen).or(self.denied.get(&pid).copied());
        in_part || seen.is_none_or(|seen| Moment::now().since(seen) >= self.budget.again)
    }

    fn look_at(&mut self, roots: &Roots, cgroup_v1: bool, pid: u32, faults: &mut Vec<&'static str>) {
        let mut listing = Listing::from(self.others.get(&pid).map_or(0, |other| other.place));
        let from_start = listing.place == 0;
        let looked = Dir::open(&roots.process(pid)).and_then(|dir| {
            let ended = listing.go_on(&dir, &mut self.buffer)?;
            if !listing.found_any() {
                return Ok(None);
            }
            let whole = from_start && ended;
            Holder::of(dir, pid, cgroup_v1, &listing, whole, &mut self.buffer).map(Some)
        });
        let (seen, place) = (Moment::now(), listing.place);
        self.others.remove(&pid);
        let was_denied = self.denied.remove(&pid).is_some();
        match looked {
            Ok(Some(holder)) => drop(self.holders.insert(pid, holder)),
            Ok(None) => {
                self.others.insert(pid, Other { seen, place });
            }
            Err(error) if error.is_gone() => {
                self.others.insert(pid, Other { seen, place: 0 });
            }
            Err(error) if error.fault_reason() == Some("permission") => {
                self.denied.insert(pid, seen);
                // counted once for each process, not at each look
                faults.extend((!was_denied).then_some("permission"));
            }
            Err(error) => faults.extend(error.fault_reason()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse::drm::Client;

    /// A procfs in a folder.
    struct Host(tempfile::TempDir);

    /// The fdinfo of a client.
    fn client(id: u32) -> String {
        format!(
            "pos:\t0\ndrm-driver:\tamdgpu\ndrm-pdev:\t0000:03:00.0\ndrm-client-id:\t{id}\ndrm-resident-vram:\t5\n"
        )
    }

    impl Host {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn roots(&self) -> Roots {
            Roots { proc: self.0.path().to_path_buf(), ..Roots::default() }
        }

        /// A process with these descriptors: number, target, and fdinfo.
        fn process(&self, pid: u32, comm: &str, descriptors: &[(u32, &str, &str)]) {
            let folder = self.0.path().join(pid.to_string());
            let _ = std::fs::remove_dir_all(&folder);
            for below in ["fd", "fdinfo"] {
                std::fs::create_dir_all(folder.join(below)).unwrap();
            }
            let zeros = "0 ".repeat(17);
            std::fs::write(folder.join("stat"), format!("{pid} ({comm}) S 1 {zeros}{pid}00 0\n")).unwrap();
            std::fs::write(folder.join("cgroup"), "0::/docker/abc\n").unwrap();
            for (number, target, info) in descriptors {
                std::os::unix::fs::symlink(target, folder.join(format!("fd/{number}"))).unwrap();
                std::fs::write(folder.join(format!("fdinfo/{number}")), info).unwrap();
            }
        }
    }

    /// Pid of the holder, node and id of each descriptor.
    fn told(found: &Found) -> Vec<(u32, &str, String)> {
        assert_eq!(found.faults, Vec::<&str>::new());
        let id =
            |client: &Client| String::from_utf8_lossy(client.id.as_deref().unwrap_or_default()).into_owned();
        let mut all: Vec<_> =
            found.descriptors.iter().map(|(node, d)| (d.holder.pid, &**node, id(&d.client))).collect();
        all.sort();
        all
    }

    #[test]
    fn holders_are_found_among_all_processes_and_only_their_devices_are_read() {
        let host = Host::new();
        host.process(5, "sh", &[(0, "/dev/null", "pos: 0\n"), (1, "pipe:[7]", ""), (2, "/dev/driver", "")]);
        host.process(
            7,
            "train) R 1",
            &[
                (3, "/dev/dri/renderD128", &client(1)),
                (4, "/dev/kfd", "pos: 0\n"),
                (9, "/dev/dri/card0", &client(2)),
            ],
        );
        host.process(8, "top", &[(3, "/dev/dri/renderD128 (deleted)", "pos: 0\n")]);
        std::fs::create_dir(host.0.path().join("sys")).unwrap();
        let mut search = Search::default();
        let found = search.round(&host.roots(), false).unwrap();
        assert_eq!(told(&found), [(7, "card0", "2".into()), (7, "renderD128", "1".into())]);
        let key = Key { start_ticks: 700, pid: 7 };
        let owner = Owner { start_ticks: 700, comm: "train) R 1".into(), cgroup: "/docker/abc".into() };
        assert_eq!(found.owners.get(&key), Some(&owner));
        assert_eq!(found.computing, BTreeSet::from([key]));
        assert_eq!((found.readable, found.denied), (3, 0));
    }

    #[test]
    fn a_holder_is_read_each_time_and_forgotten_when_it_closes_its_device_or_ends() {
        let host = Host::new();
        host.process(7, "train", &[(3, "/dev/dri/renderD128", &client(1))]);
        let mut search = Search::default();
        assert_eq!(told(&search.round(&host.roots(), false).unwrap()).len(), 1);
        std::fs::write(host.0.path().join("7/fdinfo/3"), client(4)).unwrap();
        assert_eq!(told(&search.known()), [(7, "renderD128", "4".into())]);
        std::fs::remove_file(host.0.path().join("7/fd/3")).unwrap();
        assert_eq!(told(&search.known()), []);
        host.process(8, "train", &[(3, "/dev/dri/renderD128", &client(5))]);
        assert_eq!(told(&search.round(&host.roots(), false).unwrap()), [(8, "renderD128", "5".into())]);
        std::fs::remove_dir_all(host.0.path().join("8")).unwrap();
        assert_eq!(told(&search.round(&host.roots(), false).unwrap()), []);
    }

    impl Search {
        /// One that has no time for anything but what it knows.
        fn in_a_hurry(&mut self) {
            let none = Duration::ZERO;
            self.budget = Budget { search: (none, none), more: none, ..self.budget };
        }
    }

    /// Descriptors that are no devices.
    fn files(count: u32) -> Vec<(u32, &'static str, &'static str)> {
        (0..count).map(|number| (number, "/dev/null", "")).collect()
    }

    #[test]
    fn a_known_device_is_read_without_a_look_at_the_other_descriptors() {
        let host = Host::new();
        let text = client(1);
        let many: Vec<_> = files(9_000).into_iter().chain([(9_000, "/dev/dri/renderD128", &*text)]).collect();
        host.process(7, "train", &many);
        let mut search = Search::default();
        let rounds = (0..20).map(|_| search.round(&host.roots(), false).unwrap());
        let found: Vec<_> = rounds.take_while(|found| found.owners.is_empty()).collect();
        assert!(found.len() < 10, "it goes on where it stopped");
        search.in_a_hurry();
        let found = search.round(&host.roots(), false).unwrap();
        assert_eq!(told(&found), [(7, "renderD128", "1".into())]);
        assert_eq!(found.in_part.len(), 1, "it may hold more than what was seen so far");
        search.budget = Budget::default();
        for _ in 0..4 {
            search.round(&host.roots(), false).unwrap();
        }
        assert_eq!(search.known().in_part, BTreeMap::new());
    }

    #[test]
    fn processes_with_very_many_descriptors_do_not_hide_another_one() {
        let host = Host::new();
        let text = client(1);
        for pid in 1..6 {
            let gpu = (20_000, "/dev/dri/renderD128", "pos: 0\n");
            host.process(pid, "hoard", &[&files(10_000)[..], &[gpu]].concat());
        }
        host.process(9, "train", &[(3, "/dev/dri/renderD128", &text)]);
        let mut search = Search { begun: true, ..Search::default() }; // with the short budget
        search.budget.again = Duration::ZERO;
        let mut rounds = 0;
        while !search.round(&host.roots(), false).unwrap().owners.keys().any(|key| key.pid == 9) {
            rounds += 1;
            assert!(rounds < 20);
        }
        for _ in 0..3 {
            let began = Moment::now();
            assert_eq!(told(&search.round(&host.roots(), false).unwrap()), [(9, "renderD128", "1".into())]);
            let took = Moment::now().since(began);
            assert!(took < Duration::from_millis(500), "{took:?}");
        }
    }

    #[test]
    fn a_device_that_a_holder_opens_late_is_found_and_one_that_it_closes_is_forgotten() {
        let host = Host::new();
        host.process(7, "train", &[(3, "/dev/dri/renderD128", &client(1))]);
        let mut search = Search::default();
        search.round(&host.roots(), false).unwrap();
        std::os::unix::fs::symlink("/dev/dri/renderD129", host.0.path().join("7/fd/5")).unwrap();
        std::fs::write(host.0.path().join("7/fdinfo/5"), client(2)).unwrap();
        let both = [(7, "renderD128", "1".into()), (7, "renderD129", "2".into())];
        assert_eq!(told(&search.round(&host.roots(), false).unwrap()), both);
        std::fs::remove_file(host.0.path().join("7/fd/3")).unwrap();
        std::os::unix::fs::symlink("/dev/null", host.0.path().join("7/fd/3")).unwrap();
        assert_eq!(told(&search.known()), [(7, "renderD129", "2".into())], "its number is another file's");
    }

    #[test]
    fn a_process_with_more_devices_than_are_read_is_read_in_part_and_that_is_a_fault() {
        let host = Host::new();
        let text = client(1);
        let devices: Vec<_> = (0..600).map(|number| (number, "/dev/dri/card0", &*text)).collect();
        host.process(7, "train", &devices);
        host.process(8, "train", &[(3, "/dev/dri/card0", &client(2))]);
        let found = Search::default().round(&host.roots(), false).unwrap();
        let key = Key { start_ticks: 700, pid: 7 };
        assert_eq!(found.in_part, BTreeMap::from([(key, BTreeSet::from(["card0".to_owned()]))]));
        assert_eq!(found.faults, ["io"]);
        assert_eq!(found.descriptors.len(), crate::collect::drm::holder::MOST_CLIENTS + 1);
    }

    #[test]
    fn who_is_not_read_for_want_of_time_is_read_in_part_and_that_is_a_fault() {
        let host = Host::new();
        host.process(7, "train", &[(3, "/dev/dri/card0", &client(1))]);
        let mut search = Search::default();
        search.budget.read = Duration::ZERO;
        let found = search.round(&host.roots(), false).unwrap();
        assert_eq!((found.in_part.len(), found.owners.len(), found.descriptors.len()), (1, 1, 0));
        assert_eq!(found.faults, ["io"]);
    }

    #[test]
    fn the_cgroup_with_the_most_devices_waits_for_the_others() {
        let host = Host::new();
        let text = client(1);
        for (pid, devices, cgroup) in [(5, 2, "hoard"), (6, 2, "hoard"), (7, 3, "train"), (8, 1, "one")] {
            let devices: Vec<_> = (0..devices).map(|number| (number, "/dev/dri/card0", &*text)).collect();
            host.process(pid, "python3", &devices);
            std::fs::write(host.0.path().join(format!("{pid}/cgroup")), format!("0::/{cgroup}\n")).unwrap();
        }
        let mut search = Search::default();
        search.round(&host.roots(), false).unwrap();
        assert_eq!(search.reading_order(), [8, 7, 5, 6]);
    }

    #[test]
    fn a_pid_that_could_not_be_looked_at_is_looked_at_again() {
        let host = Host::new();
        host.process(7, "train", &[(3, "/dev/dri/card0", &client(1))]);
        let mut search = Search::default();
        search.denied.insert(7, Moment::now());
        let found = search.round(&host.roots(), false).unwrap();
        assert_eq!((told(&found), found.denied), (vec![], 1), "not at once");
        search.budget.again = Duration::ZERO;
        let found = search.round(&host.roots(), false).unwrap();
        assert_eq!((told(&found), found.denied), (vec![(7, "card0", "1".into())], 0));
    }

    #[test]
    fn a_process_whose_pid_is_anothers_by_now_is_read_no_more() {
        let host = Host::new();
        host.process(7, "train", &[(3, "/dev/dri/renderD128", &client(1))]);
        let mut search = Search::default();
        search.round(&host.roots(), false).unwrap();
        // the folder is another one under the same name, as with a pid
        host.process(7, "other", &[(3, "/dev/dri/renderD128", &client(2))]);
        let found = search.known();
        assert_eq!(found.descriptors.len(), 0);
        let found = search.round(&host.roots(), false).unwrap();
        assert_eq!(told(&found), [(7, "renderD128", "2".into())]);
    }
}
