//! What a connection is doing, and for how long it may.
//!
//! Three times are kept. The head of a request must be there within a time of its first byte. An answer must have been read
//! within a time of its first byte, however steadily it is read, since until then it holds memory and a place of
//! `--web.max-requests`: no less than an idle connection has, so that who scrapes through a slow link can be given more. And a connection on which nothing is asked, or to which nothing can be written, ends after a while:
//! what a client sends without asking anything, such as HTTP/2's pings, does not count. hyper's own timeout of heads cannot
//! tell the first of these from a pause between two requests, which scrapers make.
//!
//! The task of the connection looks at the times whenever it runs, so that no change needs to wake it but one: the end of an
//! answer of HTTP/2, which another task may see after all was sent.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, ready};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::sleep;

use super::places::Place;
use crate::clock::Moment;
use crate::config::HttpLimits;

/// An answer has to be read within this, or `--web.idle-timeout` where that is longer; what the kernel has of it when the
/// connection ends, within this.
pub const LONGEST_ANSWER: Duration = Duration::from_secs(30);
/// An answer that went to the kernel less than this ago may be on its way still.
const ON_ITS_WAY: Duration = Duration::from_secs(5);
/// For so long a client whose connection ends may take to end it too, if nothing was sent to it lately.
const FAREWELL: Duration = Duration::from_secs(1);

/// The state of one connection.
#[derive(Debug)]
pub struct Pulse {
    state: Mutex<State>,
    /// Rings once another takes its place.
    evicted: Notify,
    /// Rings when an answer has ended.
    sent: Notify,
}

/// How much a connection on which nothing is under way is worth, the least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Worth {
    /// Whether it has had an answer that took a place: a stranger without a password has none.
    was_served: bool,
    /// Whether the kernel may have some of an answer still.
    is_sending: bool,
    /// When it asked last, or began.
    asked: Moment,
}

#[derive(Debug)]
struct State {
    /// Requests come one after the other, as in HTTP/1; otherwise in frames.
    in_turn: bool,
    /// When the last request began, or the connection.
    asked: Moment,
    /// When something moved last that counts.
    moved: Moment,
    /// Since when the head of a request is incomplete.
    head: Option<Moment>,
    /// Answers that are being made.
    making: usize,
    /// Answers of which hyper has not taken the end, and since when.
    sending: Vec<(u64, Moment)>,
    /// Since when one is being sent of which hyper holds the rest.
    unflushed: Option<Moment>,
    /// Places of such answers.
    held: Vec<Place>,
    answers: u64,
    /// One of these took a place.
    was_served: bool,
    /// Requests that must not be cut off.
    kept: usize,
    is_over: bool,
    /// What was not sent yet is not to be sent.
    is_cut: bool,
}

impl State {
    fn is_answering(&self) -> bool {
        self.making > 0 || self.is_sending()
    }

    fn is_sending(&self) -> bool {
        !self.sending.is_empty() || self.unflushed.is_some()
    }
}

impl Pulse {
    /// Of a connection that begins now, with a head that is awaited.
    pub fn new(now: Moment) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State {
                in_turn: true,
                asked: now,
                moved: now,
                head: Some(now),
                making: 0,
                sending: vec![],
                unflushed: None,
                held: vec![],
                answers: 0,
                was_served: false,
                kept: 0,
                is_over: false,
                is_cut: false,
            }),
            evicted: Notify::new(),
            sent: Notify::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The handshake is over, if there was one; HTTP begins.
    pub fn speaks(&self, in_turn: bool, now: Moment) {
        let mut state = self.state();
        state.in_turn = in_turn;
        (state.moved, state.head) = (now, Some(now));
    }

    /// Bytes came. In HTTP/1 they are of a head until a request begins.
    pub fn came(&self, now: Moment) {
        self.state().head.get_or_insert(now);
    }

    /// Frames came, of which the last is whole, and no header block is open; or not.
    pub fn came_in_frames(&self, is_whole: bool, now: Moment) {
        let mut state = self.state();
        state.head = if is_whole { None } else { state.head.or(Some(now)) };
    }

    /// Bytes of something went out. Of an answer, or they do not count.
    pub fn went(&self, now: Moment) {
        let mut state = self.state();
        if state.is_sending() {
            state.moved = now;
        }
    }

    /// All that hyper held went out.
    pub fn flushed(&self) {
        let mut state = self.state();
        state.unflushed = None;
        let held = std::mem::take(&mut state.held);
        drop(state); // a place looks at it when it is dropped
        drop(held);
    }

    /// The connection has ended: nothing goes out any more.
    pub fn end(&self) {
        self.state().is_over = true;
        self.flushed();
    }

    /// A request's head is complete; its answer is being made while the returned value lives.
    pub fn begin(self: &Arc<Self>, now: Moment) -> Making {
        let mut state = self.state();
        state.making += 1;
        (state.asked, state.moved) = (now, now);
        if state.in_turn {
            state.head = None;
        }
        Making(Arc::clone(self))
    }

    /// While the returned value lives, the connection is not closed to make room for another.
    pub fn keep(self: &Arc<Self>) -> Kept {
        self.state().kept += 1;
        Kept(Arc::clone(self))
    }

    /// How much it is worth; `None` while something is under way that must not be cut off.
    pub fn worth(&self, now: Moment) -> Option<Worth> {
        let state = self.state();
        (state.kept == 0 && !state.is_over).then(|| Worth {
            was_served: state.was_served,
            is_sending: state.answers > 0 && now.since(state.moved) < ON_ITS_WAY,
            asked: state.asked,
        })
    }

    /// Ends the connection, unless something is under way that must not be cut off. False if so.
    pub fn evict(&self) -> bool {
        let mut state = self.state();
        let may = state.kept == 0;
        if may {
            (state.is_over, state.is_cut) = (true, true);
            self.evicted.notify_one();
        }
        may
    }

    /// Ends the connection, whatever is under way.
    pub fn cut(&self) {
        let mut state = self.state();
        (state.is_over, state.is_cut) = (true, true);
        self.evicted.notify_one();
    }

    /// For how long the kernel may still send what it has, now that the connection ends.
    pub fn farewell(&self, now: Moment) -> Duration {
        let state = self.state();
        if state.answers == 0 {
            return FAREWELL;
        }
        LONGEST_ANSWER.saturating_sub(now.since(state.moved)).max(FAREWELL)
    }

    /// True if the kernel is not to send what it still holds: it would keep it for as long as a client that does not read
    /// likes.
    pub fn is_cut(&self) -> bool {
        self.state().is_cut
    }

    /// Resolves once another connection takes its place.
    pub async fn evicted(&self) {
        self.evicted.notified().await;
    }

    /// The time that is left, or why there is none.
    fn left(&self, now: Moment, limits: &HttpLimits) -> Result<Duration, &'static str> {
        let state = self.state();
        let left = |since, span: Duration, why| match now.since(since) {
            gone if gone < span => Ok(span - gone),
            _ => Err(why),
        };
        let mut least = limits.idle; // what ends elsewhere is seen then
        let mut is_head = false;
        if let Some(since) = state.head
            && !(state.in_turn && state.is_answering())
        {
            is_head = true;
            let since = if state.in_turn { since.max(state.moved) } else { since };
            least = least.min(left(since, limits.head, "the head of a request took too long")?);
        }
        if let Some(since) = state.sending.iter().map(|(_, since)| *since).chain(state.unflushed).min() {
            least = least.min(left(since, LONGEST_ANSWER.max(limits.idle), "an answer was read too slowly")?);
        }
        if state.making == 0 && !is_head {
            least = least.min(left(state.moved, limits.idle, "nothing moved for too long")?);
        }
        Ok(least)
    }

    /// Resolves, with the reason, once a time has passed. To be polled whenever the connection is.
    pub async fn overdue(&self, limits: &HttpLimits) -> &'static str {
        let mut timer = pin!(sleep(Duration::ZERO));
        let mut sent = pin!(self.sent.notified());
        poll_fn(|context| {
            while sent.as_mut().poll(context).is_ready() {
                sent.set(self.sent.notified());
                context.waker().wake_by_ref(); // the connection is polled, and tells of what was sent already
            }
            loop {
                match self.left(Moment::now(), limits) {
                    Err(why) => {
                        let mut state = self.state();
                        state.is_cut |= state.is_sending();
                        return Poll::Ready(why);
                    }
                    Ok(left) => timer.set(sleep(left)),
                }
                ready!(timer.as_mut().poll(context));
            }
        })
        .await
    }
}

/// An answer is being made.
#[derive(Debug)]
pub struct Making(Arc<Pulse>);

impl Making {
    /// It is made, and is sent while the returned value lives; its place is given back once it is sent.
    pub(super) fn made(self, place: Option<Place>, now: Moment) -> Sending {
        if let Some(place) = &place {
            place.sends(now);
        }
        let mut state = self.0.state();
        state.answers += 1;
        state.was_served |= place.is_some();
        let id = state.answers;
        state.sending.push((id, now));
        drop(state);
        Sending { pulse: Arc::clone(&self.0), place, id }
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.making -= 1;
        state.moved = Moment::now();
    }
}

/// An answer is being sent.
#[derive(Debug)]
pub struct Sending {
    pulse: Arc<Pulse>,
    place: Option<Place>,
    id: u64,
}

impl Drop for Sending {
    fn drop(&mut self) {
        let mut state = self.pulse.state();
        if let Some(place) = state.sending.iter().position(|(id, _)| *id == self.id) {
            let (_, since) = state.sending.swap_remove(place);
            state.unflushed = Some(state.unflushed.map_or(since, |other| other.min(since)));
        }
        state.moved = Moment::now();
        if !state.is_over {
            state.held.extend(self.place.take());
        }
        drop(state);
        self.pulse.sent.notify_one();
    }
}

/// The connection is not closed to make room for another.
#[derive(Debug)]
pub struct Kept(Arc<Pulse>);

impl Drop for Kept {
    fn drop(&mut self) {
        self.0.state().kept -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: HttpLimits = HttpLimits {
        requests: 1,
        connections: 1,
        head: Duration::from_secs(10),
        idle: Duration::from_secs(120),
    };

    fn at(pulse: &Pulse, start: Moment, seconds: u64) -> Result<Duration, &'static str> {
        pulse.left(start.plus(Duration::from_secs(seconds)), &LIMITS)
    }

    #[test]
    fn a_head_has_its_time_from_its_first_byte_and_not_anew_with_each() {
        let start = Moment::now();
        let pulse = Pulse::new(start);
        pulse.came(start.plus(Duration::from_secs(9)));
        assert_eq!(at(&pulse, start, 9), Ok(Duration::from_secs(1)));
        assert_eq!(at(&pulse, start, 10), Err("the head of a request took too long"));
        drop(pulse.begin(start).made(None, start));
        pulse.flushed();
        assert!(at(&pulse, start, 60).is_ok(), "a pause between two requests is none of a head");
        assert_eq!(at(&pulse, start, 122), Err("nothing moved for too long"));
    }

    #[test]
    fn an_answer_that_is_read_steadily_has_no_more_time_and_one_that_is_made_has_all() {
        let start = Moment::now();
        let pulse = Pulse::new(start);
        let making = pulse.begin(start);
        assert!(at(&pulse, start, 10_000).is_ok());
        let sending = making.made(None, start);
        pulse.went(start.plus(Duration::from_secs(29)));
        assert_eq!(at(&pulse, start, 119), Ok(Duration::from_secs(1)));
        assert_eq!(at(&pulse, start, 120), Err("an answer was read too slowly"));
        let short = HttpLimits { idle: Duration::from_secs(10), ..LIMITS };
        let after = |seconds| pulse.left(start.plus(Duration::from_secs(seconds)), &short);
        assert_eq!(after(29), Ok(Duration::from_secs(1)), "no less than 30 s");
        assert_eq!(after(30), Err("an answer was read too slowly"));
        drop(sending);
        assert_eq!(after(30), Err("an answer was read too slowly"), "hyper still has its end");
        pulse.flushed();
        assert!(at(&pulse, start, 30).is_ok());
    }

    #[test]
    fn what_is_sent_without_asking_anything_keeps_no_connection() {
        let start = Moment::now();
        let pulse = Pulse::new(start);
        pulse.speaks(false, start);
        for second in 0..120 {
            let now = start.plus(Duration::from_secs(second));
            pulse.came_in_frames(true, now);
            pulse.went(now);
        }
        assert_eq!(at(&pulse, start, 119), Ok(Duration::from_secs(1)));
        assert_eq!(at(&pulse, start, 120), Err("nothing moved for too long"));
        pulse.came_in_frames(false, start.plus(Duration::from_secs(100)));
        pulse.came_in_frames(false, start.plus(Duration::from_secs(109)));
        assert_eq!(at(&pulse, start, 110), Err("the head of a request took too long"));
    }

    #[test]
    fn what_is_under_way_is_not_cut_off() {
        let start = Moment::now();
        let pulse = Pulse::new(start);
        let kept = pulse.keep();
        assert!(pulse.worth(start).is_none() && !pulse.evict());
        drop(kept);
        assert!(pulse.worth(start).is_some() && pulse.evict());
        assert_eq!(pulse.worth(start), None, "it is over already");
    }

    #[test]
    fn what_the_kernel_has_of_an_answer_has_its_time_and_who_had_none_hardly_any() {
        let start = Moment::now();
        let pulse = Pulse::new(start);
        assert_eq!(pulse.farewell(start), FAREWELL);
        drop(pulse.begin(start).made(None, start));
        pulse.flushed();
        let now = Moment::now();
        assert!(pulse.farewell(now) > LONGEST_ANSWER / 2);
        assert!(pulse.worth(now) > pulse.worth(now.plus(ON_ITS_WAY)), "what may be on its way goes last");
        assert_eq!(pulse.farewell(Moment::now().plus(LONGEST_ANSWER)), FAREWELL);
    }

    #[test]
    fn an_answer_that_ends_on_another_task_wakes_the_connection() {
        struct Rings(std::sync::atomic::AtomicUsize);
        impl std::task::Wake for Rings {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let _entered = runtime.enter();
        let (rings, start) = (Arc::new(Rings(0.into())), Moment::now());
        let (waker, pulse) = (Arc::clone(&rings).into(), Pulse::new(start));
        let sending = pulse.begin(start).made(None, start);
        let mut overdue = pin!(pulse.overdue(&LIMITS));
        let mut context = std::task::Context::from_waker(&waker);
        assert!(overdue.as_mut().poll(&mut context).is_pending());
        let rung = || rings.0.load(std::sync::atomic::Ordering::Relaxed);
        let before = rung();
        drop(sending);
        assert_eq!(rung(), before + 1);
        assert!(overdue.as_mut().poll(&mut context).is_pending());
        assert_eq!(rung(), before + 2, "and the connection comes before this once more");
        assert!(overdue.as_mut().poll(&mut context).is_pending());
        assert_eq!(rung(), before + 2);
    }
}
