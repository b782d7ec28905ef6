//! The words for runs of `memledger run`: to the person who started one it is no container.

use super::Verdict;

/// What verdicts say of containers, and what they say of runs.
const WORDS: [(&str, &str); 4] = [
    ("the container", "the run"),
    ("The container", "The run"),
    ("this container", "this run"),
    ("the runtime", "memledger run"),
];

impl Verdict {
    /// Returns the heading.
    pub fn title(&self) -> String {
        let title = self.headline.as_deref().unwrap_or_else(|| self.cause.title());
        if self.subject.as_ref().is_some_and(|subject| subject.is_run()) {
            in_words_of_runs(title)
        } else {
            title.to_owned()
        }
    }
}

fn in_words_of_runs(text: &str) -> String {
    WORDS.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

/// Returns a verdict about a run in the words for runs; others as they are.
pub(super) fn adapt(mut verdict: Verdict) -> Verdict {
    if verdict.subject.as_ref().is_some_and(|subject| subject.is_run()) {
        let texts = std::iter::once(&mut verdict.what).chain(&mut verdict.also).chain(&mut verdict.advice);
        for text in texts {
            *text = in_words_of_runs(text);
        }
    }
    verdict
}
