//! The answer of `memledger why` as JSON, the same from the command and from the API.

use serde::Serialize;

use super::live::Coverage;
use super::{Cause, Verdict};
use crate::events::{Kill, LedgerEvent};

/// An answer as one document.
#[derive(Serialize)]
pub struct WhyDocument<'a> {
    /// An end or a kill was found.
    pub found: bool,
    /// What is said instead of a verdict.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<&'a str>,
    /// The headline of the verdict.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub headline: Option<String>,
    /// The verdict; its fields are those of the answer.
    #[serde(flatten)]
    pub verdict: Option<&'a Verdict>,
    /// How far this host's sources reach; `None` if only the ledger was read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub coverage: Option<&'a Coverage>,
    /// Kills of which one may be meant; `None` if no name was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kills_of_unknown_containers: Option<Vec<LedgerEvent>>,
}

impl<'a> WhyDocument<'a> {
    /// Answers with a verdict.
    pub fn verdict(verdict: &'a Verdict) -> Self {
        let found = verdict.cause != Cause::Nothing;
        Self {
            found,
            message: None,
            headline: Some(verdict.title()),
            verdict: Some(verdict),
            coverage: None,
            kills_of_unknown_containers: None,
        }
    }

    /// Answers that nothing is known.
    pub fn unknown(message: &'a str) -> Self {
        Self {
            found: false,
            message: Some(message),
            headline: None,
            verdict: None,
            coverage: None,
            kills_of_unknown_containers: None,
        }
    }

    /// Adds what this host knows beside the ledger.
    pub fn with_host(self, coverage: &'a Coverage, kills: Option<&[Kill]>) -> Self {
        let events = |kills: &[Kill]| kills.iter().cloned().map(LedgerEvent::OomKill).collect();
        Self { coverage: Some(coverage), kills_of_unknown_containers: kills.map(events), ..self }
    }

    /// Returns it as one document.
    ///
    /// # Errors
    /// It cannot be written as JSON.
    pub fn to_json(&self) -> serde_json::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }
}
