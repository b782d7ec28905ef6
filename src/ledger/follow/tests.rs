use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use futures_util::FutureExt;

use super::*;
use crate::events::{Kill, KillOwner, LedgerEvent};
use crate::ledger::store::{Store, WriteBatch};

const NAME: &str = "a sink";

/// A sink with scripted outcomes; without one, a batch is written.
#[derive(Debug, Default)]
struct ScriptedSink {
    outcomes: Vec<WriteOutcome>,
    batches: Vec<Vec<u64>>,
    up_to_date: u32,
    unreadable: u32,
}

impl Sink for ScriptedSink {
    type Batch = SettledEvents;

    fn reader(&self) -> impl FnOnce(&StoreReader, u64) -> ReadBatch<SettledEvents> + Send + 'static {
        read_events
    }

    async fn write(&mut self, settled: SettledEvents) -> WriteOutcome {
        self.batches.push(settled.events.iter().map(LedgerEvent::id).collect());
        self.outcomes.pop().unwrap_or(WriteOutcome::All)
    }

    fn up_to_date(&mut self) {
        self.up_to_date += 1;
    }

    fn ledger_unreadable(&mut self) {
        self.unreadable += 1;
    }
}

fn kill(id: u64, owner: KillOwner) -> LedgerEvent {
    LedgerEvent::OomKill(Kill { id, at: id as f64, owner, ..Kill::unknown() })
}

/// A store in memory, as its writer and its readers have it, with the follower of a sink.
struct Scene {
    store: Arc<Mutex<Store>>,
    followers: Followers,
    follower: Follower<ScriptedSink>,
}

impl Scene {
    fn new(outcomes: &[WriteOutcome]) -> Self {
        let sink = ScriptedSink { outcomes: outcomes.iter().rev().copied().collect(), ..Default::default() };
        let store = Arc::new(Mutex::new(Store::in_memory().unwrap()));
        let followers = Followers::default();
        followers.set_cursors(BTreeMap::new());
        Self { store, followers, follower: Follower::new(NAME, sink) }
    }

    fn commit(&self, events: impl IntoIterator<Item = LedgerEvent>) {
        let mut batch = WriteBatch::default();
        events.into_iter().for_each(|event| batch.put_event(event));
        self.store.lock().unwrap().commit(&batch).unwrap();
        self.followers.mark_written();
    }

    fn catch_up(&mut self) -> Duration {
        let reader = EventReader::Memory(Arc::clone(&self.store));
        let read = async |sink: &ScriptedSink, cursor| reader.read(|store| sink.reader()(store, cursor));
        self.follower.catch_up(&self.followers, read).now_or_never().expect("nothing waits")
    }

    fn cursor(&self) -> u64 {
        self.followers.cursor(NAME).unwrap()
    }
}

fn settled(ids: std::ops::RangeInclusive<u64>) -> impl Iterator<Item = LedgerEvent> {
    ids.map(|id| kill(id, KillOwner::Unattributed))
}

#[test]
fn batch_is_repeated_until_it_is_written() {
    let later = Duration::from_secs(7);
    let mut scene =
        Scene::new(&[WriteOutcome::Retry(later), WriteOutcome::UpTo(150), WriteOutcome::Retry(later)]);
    scene.commit(settled(1..=250));
    assert_eq!((scene.catch_up(), scene.cursor()), (later, 0), "nothing is acknowledged");
    assert_eq!((scene.catch_up(), scene.cursor()), (later, 150));
    assert_eq!((scene.catch_up(), scene.cursor()), (POLL_INTERVAL, 250));
    let ends = |batch: &Vec<u64>| (batch[0], batch[batch.len() - 1], batch.len());
    let batches: Vec<_> = scene.follower.sink.batches.iter().map(ends).collect();
    assert_eq!(batches, [(1, 200, 200), (1, 200, 200), (151, 250, 100), (151, 250, 100)]);
    assert_eq!(scene.follower.sink.up_to_date, 1);
    assert_eq!(scene.followers.take_acknowledged(), [(NAME.to_owned(), 250)].into());
}

#[test]
fn events_after_an_unsettled_one_wait_for_it() {
    let mut scene = Scene::new(&[]);
    scene.commit([kill(1, KillOwner::Host), kill(2, KillOwner::Pending), kill(3, KillOwner::Host)]);
    scene.catch_up();
    assert_eq!(scene.cursor(), 1);
    scene.catch_up();
    assert_eq!(scene.follower.sink.up_to_date, 1, "without a commit it reads nothing");
    scene.commit([kill(2, KillOwner::Host)]);
    scene.catch_up();
    assert_eq!(scene.follower.sink.batches, [vec![1], vec![2, 3]]);
}

#[test]
fn ledger_that_cannot_be_read_is_read_again() {
    let mut scene = Scene::new(&[]);
    scene.commit(settled(1..=1));
    let unreadable = async |_: &ScriptedSink, _| Err(StoreError::NoLedger { directory: "/gone".into() });
    for _ in 0..2 {
        let delay = scene.follower.catch_up(&scene.followers, unreadable).now_or_never();
        assert_eq!(delay, Some(UNREADABLE_RETRY_INTERVAL));
    }
    assert!(scene.follower.ledger.is_failing());
    scene.catch_up();
    assert!(!scene.follower.ledger.is_failing());
    let sink = &scene.follower.sink;
    assert_eq!((sink.unreadable, sink.up_to_date, &*sink.batches), (2, 1, &[vec![1]][..]));
}

#[test]
fn ledger_that_recovers_behind_a_dead_sink_has_recovered() {
    let dead = WriteOutcome::Retry(Duration::from_secs(7));
    let mut scene = Scene::new(&[dead, dead]);
    scene.commit(settled(1..=1));
    let unreadable = async |_: &ScriptedSink, _| Err(StoreError::NoLedger { directory: "/gone".into() });
    for _ in 0..2 {
        scene.follower.catch_up(&scene.followers, unreadable).now_or_never();
        assert!(scene.follower.ledger.is_failing());
        scene.catch_up();
        assert!(!scene.follower.ledger.is_failing(), "or the next outage would not be logged");
        assert_eq!((scene.cursor(), scene.follower.sink.up_to_date), (0, 0), "the sink has written nothing");
    }
    scene.catch_up();
    assert_eq!((scene.cursor(), scene.follower.sink.up_to_date), (1, 1));
}

#[test]
fn nothing_is_read_before_the_ledger_is_open() {
    let mut scene = Scene::new(&[]);
    scene.followers = Followers::default();
    scene.commit(settled(1..=1));
    scene.catch_up();
    assert!(scene.follower.sink.batches.is_empty());
    scene.followers.set_cursors([(NAME.to_owned(), 0)].into());
    scene.catch_up();
    assert_eq!(scene.follower.sink.batches, [[1]]);
}

#[test]
fn stop_request_ends_it_after_what_is_settled() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for is_dropped in [false, true] {
        let scene = Scene::new(&[]);
        scene.commit(settled(1..=3));
        let (sender, stop) = watch::channel(None);
        if is_dropped {
            drop(sender);
        } else {
            sender.send(Some(Timestamp::now())).unwrap();
        }
        let reader = EventReader::Memory(Arc::clone(&scene.store));
        runtime.block_on(scene.follower.run(&reader, &scene.followers, stop));
        assert_eq!(scene.followers.cursor(NAME), Some(3));
    }
}
