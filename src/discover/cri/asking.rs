//! Questions about single containers: who is asked, how many at once, and who is waited for.
//!
//! A runtime answers within milliseconds. But one container whose shim hangs can keep its own status from ever being told,
//! and the names of all others shall not wait for it: a list waits [`LIST_WAITS`] for the answers to what it asked first, and
//! what comes later belongs to a later list. Who did not answer is asked again ever more seldom, on places of its own.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::Semaphore;

use super::client::CriError;
use super::messages::ContainerStatusResponse;
use super::{LIST_EVERY, RUNTIME};
use crate::clock::Moment;

/// A list waits so long for its answers. With the pause between lists it stays below the time for which a new container is
/// held back until it has a name (`registry::NAME_GRACE`).
const LIST_WAITS: Duration = Duration::from_secs(1);
/// Questions under way at once: of those that are asked for the first time, and of those that did not answer before.
const PLACES: (usize, usize) = (16, 4);
/// Time for an answer: to the first question, for others wait for its place; and to those that follow. A node that is short of
/// memory or of its disk's time takes some seconds to answer for anybody.
const ANSWER_WITHIN: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(10));
/// Who did not answer is asked again after the pause between lists, then after twice as long, and so on to this.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// An answer about one container; `None` if it is gone.
pub type Answer = Result<Option<ContainerStatusResponse>, CriError>;

/// A question under way, which ends with its answer.
type UnderWay = Pin<Box<dyn Future<Output = (String, bool, Answer)> + Send>>;

/// Who did not answer.
#[derive(Debug)]
struct Silence {
    /// What it was asked; another question is asked at once.
    verbose: bool,
    times: u32,
    until: Moment,
}

/// The questions of one connection.
#[derive(Debug)]
pub struct Questions {
    under_way: FuturesUnordered<UnderWay>,
    /// Who is asked now; whether the present list waits for it.
    asked: HashMap<String, bool>,
    silent: HashMap<String, Silence>,
    answers: HashMap<String, Answer>,
    places: (Arc<Semaphore>, Arc<Semaphore>),
}

impl Default for Questions {
    fn default() -> Self {
        Self {
            under_way: FuturesUnordered::new(),
            asked: HashMap::new(),
            silent: HashMap::new(),
            answers: HashMap::new(),
            places: (Arc::new(Semaphore::new(PLACES.0)), Arc::new(Semaphore::new(PLACES.1))),
        }
    }
}

impl Questions {
    /// Asks about a container, if that is due. `verbose`: with what it was started with. `question` ends within the time that it
    /// is given, by an error if there is no answer.
    pub fn ask<Q>(&mut self, id: &str, verbose: bool, now: Moment, question: impl FnOnce(Duration) -> Q)
    where
        Q: Future<Output = Result<ContainerStatusResponse, CriError>> + Send + 'static,
    {
        let silence = self.silent.get(id).filter(|silence| silence.verbose == verbose);
        let rests = silence.is_some_and(|silence| silence.until > now);
        if rests || self.asked.contains_key(id) || self.answers.contains_key(id) {
            return;
        }
        let is_first = silence.is_none();
        let (places, within) =
            if is_first { (&self.places.0, ANSWER_WITHIN.0) } else { (&self.places.1, ANSWER_WITHIN.1) };
        let (places, question) = (Arc::clone(places), question(within));
        let id = id.to_owned();
        self.asked.insert(id.clone(), is_first);
        self.under_way.push(Box::pin(async move {
            let _place = places.acquire().await;
            let answer = match question.await {
                Ok(answer) => Ok(Some(answer)),
                Err(error) if error.is_gone() => Ok(None),
                Err(error) => Err(error),
            };
            (id, verbose, answer)
        }));
    }

    /// Waits for those who were asked for the first time; not for long.
    pub async fn wait(&mut self) {
        let mut patience = std::pin::pin!(tokio::time::sleep(LIST_WAITS));
        while self.asked.values().any(|is_waited_for| *is_waited_for) {
            tokio::select! {
                () = self.next() => {}
                () = &mut patience => {
                    self.asked.values_mut().for_each(|is_waited_for| *is_waited_for = false);
                }
            }
        }
    }

    /// Waits for one more answer; returns at once where nobody is asked.
    pub async fn next(&mut self) {
        let Some((id, verbose, answer)) = self.under_way.next().await else { return };
        self.asked.remove(&id);
        match &answer {
            Ok(_) => {
                self.silent.remove(&id);
            }
            Err(error) => {
                tracing::debug!(runtime = RUNTIME, id, %error, "cannot ask about a container; asking again later");
                let before = self.silent.get(&id).filter(|silence| silence.verbose == verbose);
                let times = before.map_or(0, |silence| silence.times.saturating_add(1));
                let pause = LIST_EVERY.0.saturating_mul(1 << times.min(16)).min(LONGEST_PAUSE);
                self.silent.insert(id.clone(), Silence { verbose, times, until: Moment::now().plus(pause) });
            }
        }
        self.answers.insert(id, answer);
    }

    /// The answers so far. Nobody else than `wanted` need be asked again.
    pub fn take(&mut self, wanted: &HashSet<String>) -> HashMap<String, Answer> {
        self.silent.retain(|id, _| wanted.contains(id));
        std::mem::take(&mut self.answers)
    }

    /// Somebody is asked now.
    pub fn are_under_way(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// Time until somebody who did not answer is to be asked again; `None` if there is none who is not asked now.
    pub fn rest(&self, now: Moment) -> Option<Duration> {
        let resting = self.silent.iter().filter(|(id, _)| !self.asked.contains_key(*id));
        resting.map(|(_, silence)| silence.until.since(now)).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(taken: &HashMap<String, Answer>) -> Vec<(&str, bool)> {
        let mut answers: Vec<_> = taken.iter().map(|(id, answer)| (&**id, answer.is_ok())).collect();
        answers.sort_unstable();
        answers
    }

    async fn answered() -> Result<ContainerStatusResponse, CriError> {
        Ok(ContainerStatusResponse::default())
    }

    /// Given up.
    async fn silence() -> Result<ContainerStatusResponse, CriError> {
        Err(CriError::Silent("ContainerStatus", Duration::ZERO))
    }

    fn wanted(ids: &[&str]) -> HashSet<String> {
        ids.iter().map(|id| id.to_string()).collect()
    }

    #[tokio::test]
    async fn a_list_waits_for_nobody_who_is_silent() {
        let (mut questions, now) = (Questions::default(), Moment::now());
        questions.ask("a", true, now, |_| answered());
        questions.ask("b", true, now, |_| std::future::pending());
        questions.wait().await;
        assert_eq!(answers(&questions.take(&wanted(&["a", "b"]))), [("a", true)]);
        assert!(questions.are_under_way(), "it may still answer");
        questions.ask("b", true, now, |_| answered());
        questions.wait().await;
        assert!(
            questions.take(&wanted(&["b"])).is_empty(),
            "nobody is asked twice at once, nor waited for twice"
        );
    }

    #[tokio::test]
    async fn who_was_silent_is_asked_again_ever_more_seldom_and_at_once_about_something_else() {
        let (mut questions, mut now) = (Questions::default(), Moment::now());
        let mut pauses = vec![];
        for _ in 0..8 {
            questions.ask("b", true, now, |_| silence());
            questions.next().await;
            assert_eq!(answers(&questions.take(&wanted(&["b"]))), [("b", false)]);
            let until = questions.silent["b"].until;
            pauses.push(until.since(Moment::now()).as_secs_f64().round());
            questions.ask("b", true, Moment::now(), |_| answered());
            assert!(!questions.are_under_way() && questions.rest(now).is_some(), "it has its rest");
            now = until;
        }
        assert_eq!(pauses, [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]);
        questions.ask("b", false, Moment::now(), |_| answered());
        questions.wait().await;
        assert_eq!(answers(&questions.take(&wanted(&["b"]))), [("b", true)], "its end is another question");
        assert!(questions.rest(now).is_none());
        questions.ask("c", true, Moment::now(), |_| silence());
        questions.next().await;
        questions.take(&wanted(&[]));
        assert!(questions.rest(now).is_none(), "it is not there any more");
    }

    #[tokio::test]
    async fn who_was_silent_before_takes_no_place_of_others_and_no_list_waits_for_him() {
        let (mut questions, now) = (Questions::default(), Moment::now());
        let silent: Vec<_> = (0..PLACES.0).map(|number| format!("s{number}")).collect();
        for id in &silent {
            questions.ask(id, true, now, |_| silence());
        }
        questions.wait().await;
        assert_eq!(questions.take(&silent.iter().cloned().collect()).len(), PLACES.0);
        let later = now.plus(Duration::from_secs(60));
        for id in &silent {
            questions.ask(id, true, later, |_| std::future::pending());
        }
        questions.ask("a", true, later, |_| answered());
        questions.wait().await;
        assert_eq!(answers(&questions.take(&wanted(&["a"]))), [("a", true)]);
    }

    #[tokio::test]
    async fn the_first_answer_must_come_soon_and_a_later_one_may_take_as_long_as_any_other() {
        let (mut questions, now) = (Questions::default(), Moment::now());
        let mut given = vec![];
        for _ in 0..3 {
            let silent = questions.silent.get("b").map_or(now, |silence| silence.until);
            questions.ask("b", true, silent, |within| {
                given.push(within.as_secs());
                silence()
            });
            questions.next().await;
            questions.take(&wanted(&["b"]));
        }
        questions.ask("b", false, now, |within| {
            given.push(within.as_secs());
            silence()
        });
        assert_eq!(given, [2, 10, 10, 2], "its end is another question");
    }

    #[tokio::test]
    async fn a_list_comes_for_who_is_silent_when_he_is_to_be_asked_again_and_not_while_he_is() {
        let (mut questions, now) = (Questions::default(), Moment::now());
        assert_eq!(questions.rest(now), None);
        for _ in 0..6 {
            let until = questions.silent.get("b").map_or(now, |silence| silence.until);
            questions.ask("b", true, until, |_| silence());
            questions.next().await;
            questions.take(&wanted(&["b"]));
        }
        assert!(
            questions.rest(Moment::now()).is_some_and(|rest| rest > LIST_EVERY.1),
            "{:?}",
            questions.rest(now)
        );
        let until = questions.silent["b"].until;
        questions.ask("b", true, until, |_| std::future::pending());
        assert_eq!((questions.rest(until), questions.are_under_way()), (None, true));
    }
}
