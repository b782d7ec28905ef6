//! The answer of `memledger why` as JSON, the same from the command and from the API.

use serde::Serialize;

use super::{evidence, of_finding, of_remedy, title, what};
use crate::diagnose::live::Coverage;
use crate::diagnose::{Cause, Diagnosis, Finding, Recommendation, Remedy};
use crate::events::{Evidence, Kill, LedgerEvent};

/// An answer as one document.
#[derive(Serialize)]
pub struct WhyDocument<'a> {
    /// An end or a kill was found.
    found: bool,
    /// What is said in place of a diagnosis.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<&'a str>,
    #[serde(flatten)]
    said: Option<Said<'a>>,
    /// How far this host's sources reach; `None` if only the ledger was read.
    #[serde(skip_serializing_if = "Option::is_none")]
    coverage: Option<&'a Coverage>,
    /// Kills of which one may be meant; `None` if no name was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    kills_of_unknown_containers: Option<Vec<LedgerEvent>>,
}

/// A diagnosis and its words.
#[derive(Serialize)]
struct Said<'a> {
    headline: String,
    #[serde(flatten)]
    diagnosis: &'a Diagnosis,
    /// One sentence: what ended the container or killed a process of it, and when.
    what: String,
    /// Facts: beside the cause, then those that lead to a remedy.
    findings: Vec<WithText<'a, Finding>>,
    evidence: Vec<Evidence>,
    /// What to change, the most promising first.
    remedies: Vec<WithText<'a, Remedy>>,
}

/// A fact or a remedy as data, and its sentence.
#[derive(Serialize)]
struct WithText<'a, T> {
    #[serde(flatten)]
    data: &'a T,
    text: String,
}

impl<'a> WhyDocument<'a> {
    /// Answers with a diagnosis.
    pub fn of(diagnosis: &'a Diagnosis) -> Self {
        let facts = diagnosis.advice.iter().filter_map(|advice| match advice {
            Recommendation::Finding(finding) => Some(finding),
            Recommendation::Remedy(_) => None,
        });
        let remedies = diagnosis.advice.iter().filter_map(|advice| match advice {
            Recommendation::Remedy(remedy) => Some(remedy),
            Recommendation::Finding(_) => None,
        });
        let said = Said {
            headline: title(diagnosis),
            diagnosis,
            what: what(diagnosis),
            findings: diagnosis
                .findings
                .iter()
                .chain(facts)
                .map(|data| WithText { data, text: of_finding(data, diagnosis) })
                .collect(),
            evidence: evidence(diagnosis),
            remedies: remedies.map(|data| WithText { data, text: of_remedy(data, diagnosis) }).collect(),
        };
        let found = diagnosis.cause != Cause::Nothing;
        Self { found, message: None, said: Some(said), coverage: None, kills_of_unknown_containers: None }
    }

    /// Answers that nothing is known.
    pub fn unknown(message: &'a str) -> Self {
        Self {
            found: false,
            message: Some(message),
            said: None,
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
