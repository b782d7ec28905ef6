//! The words of `memledger why`: a diagnosis in English. What happened and what to try is decided before: here are sentences, their nouns,
//! singular and plural, and which figures a sentence has.

mod answer;
mod coverage;
mod cuda_oom;
mod document;
mod headline;
mod incident;
mod limit;
mod log_error;
mod notice;
mod place;
mod program;
mod refusal;
mod remedy;
mod report;
mod run;
pub mod screen;
mod start_error;
mod terms;
mod usage;

use crate::diagnose::{Diagnosis, Finding, Recommendation, Remedy, StartRemedy};
use crate::events::Evidence;
pub use answer::{
    NEWEST_OF_HOST, NoKillInLog, first_of_several, kills_of_unknown_containers, log_is_cut, no_kill_in_log,
    omitted_kills, reversed_is_cut, unread_kill, utf16_is_cut,
};
pub use coverage::{CoverageHint, coverage_hints, missing_ledger, missing_runtimes};
pub use document::WhyDocument;
pub use run::not_found;
pub use terms::{roles, short_ids, time};

/// What the person who asks calls what ended: to the one who started a run of `memledger run` it is no container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Noun {
    Container,
    Run,
}

impl Noun {
    fn of(diagnosis: &Diagnosis) -> Self {
        match diagnosis.subject.as_ref().is_some_and(|subject| subject.is_run()) {
            true => Self::Run,
            false => Self::Container,
        }
    }

    fn the(self) -> &'static str {
        match self {
            Self::Container => "the container",
            Self::Run => "the run",
        }
    }

    fn this(self) -> &'static str {
        match self {
            Self::Container => "this container",
            Self::Run => "this run",
        }
    }

    fn runtime(self) -> &'static str {
        match self {
            Self::Container => "the runtime",
            Self::Run => "memledger run",
        }
    }
}

/// Returns the headline.
pub fn title(diagnosis: &Diagnosis) -> String {
    let runtime = diagnosis.subject.as_ref().map(|subject| subject.runtime).unwrap_or_default();
    headline::title(diagnosis.cause, diagnosis.headline.as_ref(), Noun::of(diagnosis), runtime)
}

/// Returns the sentence that says what happened.
pub fn what(diagnosis: &Diagnosis) -> String {
    incident::what(diagnosis, Noun::of(diagnosis))
}

/// Returns the facts beside the cause, one line each.
pub fn findings(diagnosis: &Diagnosis) -> Vec<String> {
    diagnosis.findings.iter().map(|finding| of_finding(finding, diagnosis)).collect()
}

/// Returns the evidence, the numbers of an error of GPU memory first.
pub fn evidence(diagnosis: &Diagnosis) -> Vec<Evidence> {
    let gpu = diagnosis.gpu.as_deref().map(cuda_oom::evidence).unwrap_or_default();
    gpu.into_iter().chain(diagnosis.evidence.iter().cloned()).collect()
}

/// Returns the advice, one line each, the most promising first.
pub fn advice(diagnosis: &Diagnosis) -> Vec<String> {
    diagnosis.advice.iter().map(|advice| of_advice(advice, diagnosis)).collect()
}

fn of_advice(advice: &Recommendation, diagnosis: &Diagnosis) -> String {
    match advice {
        Recommendation::Finding(finding) => of_finding(finding, diagnosis),
        Recommendation::Remedy(remedy) => of_remedy(remedy, diagnosis),
    }
}

fn of_finding(finding: &Finding, diagnosis: &Diagnosis) -> String {
    let noun = Noun::of(diagnosis);
    match finding {
        Finding::Run(finding) => run::finding(finding, diagnosis, noun),
        Finding::Report(finding) => report::report(finding),
        Finding::Usage(finding) => usage::finding(finding, noun),
        Finding::CudaOom(finding) => cuda_oom::finding(finding),
        Finding::Log(finding) => log_error::finding(finding, noun),
        Finding::Program(finding) => program::finding(finding),
        Finding::Monitor(finding) => notice::monitor_finding(finding, noun),
    }
}

fn of_remedy(remedy: &Remedy, diagnosis: &Diagnosis) -> String {
    let noun = Noun::of(diagnosis);
    match remedy {
        Remedy::Limit(remedy) => remedy::remedy(remedy, noun),
        Remedy::CudaOom(remedy) => cuda_oom::remedy(remedy, noun),
        Remedy::Log(remedy) => log_error::remedy(remedy, noun),
        Remedy::Program(remedy) => program::remedy(remedy),
        Remedy::Monitor(remedy) => notice::monitor_remedy(remedy, noun),
        Remedy::Notice(remedy) => notice::remedy(remedy),
        Remedy::Refusal(remedy) => refusal::remedy(remedy),
        Remedy::Start(StartRemedy::FixStartError { error }) => {
            start_error::fix_start_error(*error).to_owned()
        }
        Remedy::Start(StartRemedy::StopLostContainer) => {
            let runtime = diagnosis.subject.as_ref().map(|subject| subject.runtime).unwrap_or_default();
            let called =
                diagnosis.subject.as_ref().map_or_else(String::new, |it| terms::name(&it.identity.name));
            format!(
                "{runtime} stop {called} makes {runtime} notice the end; the exit code 0 that it reports then is not that of the program."
            )
        }
        Remedy::Paste(remedy) => remedy::paste(remedy),
    }
}
