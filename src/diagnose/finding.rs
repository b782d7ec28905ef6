//! What was found beside the cause, and what to change: each kind with its data, which `why --json` has too.

use serde::{Serialize, Serializer};

use super::cause::Cause;
use super::container_log::{LogFinding, LogRemedy};
use super::cuda_oom::{CudaOomFinding, CudaOomRemedy};
use super::incident::{ExitIncident, Headline, KilledProcess, StopRequests, without_report};
use super::monitor::{MonitorFinding, MonitorRemedy};
use super::notice::NoticeRemedy;
use super::program::{ProgramFinding, ProgramRemedy};
use super::refusal::RefusalRemedy;
use super::remedy::LimitRemedy;
use super::report::ReportFinding;
use super::usage::UsageFinding;
use crate::discover::RuntimeKind;
use crate::events::{Kill, Role};
use crate::parse::start_error::StartError;

/// A fact beside the cause.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Finding {
    /// Of the run and its container.
    Run(RunFinding),
    /// Of the kernel's report at a kill.
    Report(ReportFinding),
    /// Of the samples before.
    Usage(UsageFinding),
    /// Of errors of GPU memory.
    CudaOom(CudaOomFinding),
    /// Of the container's log.
    Log(LogFinding),
    /// Of the program that was killed.
    Program(ProgramFinding),
    /// Of a memory monitor.
    Monitor(MonitorFinding),
}

/// A setting to change, or where to look.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Remedy {
    /// Of limits, the host, and ends.
    Limit(LimitRemedy),
    /// Against errors of GPU memory.
    CudaOom(CudaOomRemedy),
    /// Against an error in the container's log.
    Log(LogRemedy),
    /// Of a known program.
    Program(ProgramRemedy),
    /// Of a memory monitor.
    Monitor(MonitorRemedy),
    /// Of a program that reported a kill.
    Notice(NoticeRemedy),
    /// Against a refusal of the kernel.
    Refusal(RefusalRemedy),
    /// Against an error of a start.
    Start(StartRemedy),
    /// What a log lacks.
    Paste(PasteRemedy),
}

/// A piece of advice: a remedy, or a fact that leads to one.
#[derive(Clone, Debug, PartialEq)]
pub enum Recommendation {
    /// A fact.
    Finding(Finding),
    /// A remedy.
    Remedy(Remedy),
}

macro_rules! wrap {
    ($outer:ident: $($variant:ident($inner:ty)),+) => {
        $(impl From<$inner> for $outer {
            fn from(inner: $inner) -> Self {
                Self::$variant(inner)
            }
        }
        impl From<$inner> for Recommendation {
            fn from(inner: $inner) -> Self {
                Self::$outer(inner.into())
            }
        })+
    };
}

wrap!(Finding: Run(RunFinding), Report(ReportFinding), Usage(UsageFinding), CudaOom(CudaOomFinding), Log(LogFinding), Program(ProgramFinding), Monitor(MonitorFinding));
wrap!(Remedy: Limit(LimitRemedy), CudaOom(CudaOomRemedy), Log(LogRemedy), Program(ProgramRemedy), Monitor(MonitorRemedy), Notice(NoticeRemedy), Refusal(RefusalRemedy), Start(StartRemedy), Paste(PasteRemedy));

fn without_reports<S: Serializer>(kill: &Option<Box<Kill>>, serializer: S) -> Result<S::Ok, S::Error> {
    match kill {
        Some(kill) => without_report(kill, serializer),
        None => serializer.serialize_none(),
    }
}

/// What to do about a start that failed.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "remedy", rename_all = "snake_case")]
pub enum StartRemedy {
    /// What the error needs.
    FixStartError {
        /// The error.
        error: StartError,
    },
    /// A stop makes the runtime notice the end.
    StopLostContainer,
}

/// What a log from elsewhere lacks, and where that is.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "remedy", rename_all = "snake_case")]
pub enum PasteRemedy {
    /// It has only lines that were searched for: the whole report says more.
    WholeReport,
    /// It has no lines of priority info, which name the cgroup and the processes.
    LowerPriority,
    /// The kernel log of the node that events of Kubernetes name.
    KernelLogOfNode {
        /// The node.
        node: String,
        /// A pod that is restarted in these events.
        #[serde(skip_serializing_if = "Option::is_none")]
        restarted_pod: Option<String>,
    },
}

/// A fact of a run and its container.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "finding", rename_all = "snake_case")]
pub enum RunFinding {
    /// The run went on after the kill, and ended for another reason.
    EndedLater {
        /// The end.
        #[serde(flatten)]
        exit: ExitIncident,
        /// It was stopped, and may have hung until then.
        may_have_hung: bool,
    },
    /// It may also have been ended from outside.
    MayBeEndedFromOutside {
        /// What is known of stop requests.
        requests: StopRequests,
    },
    /// Processes were killed with it, because its cgroup is killed as a whole.
    KilledWithIt {
        /// How many.
        count: u64,
        /// Some of them.
        processes: Vec<KilledProcess>,
        /// There are more than these.
        is_cut: bool,
    },
    /// Other processes of the run were OOM-killed.
    OtherKills {
        /// How many.
        count: u64,
        /// There is one beside them, that the answer is about.
        #[serde(skip)]
        is_more: bool,
        /// The role of all of them.
        #[serde(skip_serializing_if = "Option::is_none")]
        role: Option<Role>,
        /// Unix time of the first; `None` if not all are known.
        #[serde(skip_serializing_if = "Option::is_none")]
        first_at: Option<f64>,
        /// Unix time of the last.
        last_at: f64,
        /// The only one, where the answer is about no kill.
        #[serde(skip_serializing_if = "Option::is_none", serialize_with = "without_reports")]
        kill: Option<Box<Kill>>,
    },
    /// The ledger counted kills that it does not list any more.
    CountedKills {
        /// How many.
        count: u64,
    },
    /// A process may have been killed of which only a flag or a count is left.
    UnreadKill {
        /// Its cgroup counted it; else the runtime's flag is set.
        is_counted: bool,
    },
    /// Its cgroup could not be read.
    WithoutCgroup,
    /// It runs again, and had an error of GPU memory.
    CudaOomSince {
        /// Unix time of the error.
        at: f64,
    },
    /// Other containers have its name.
    OthersOfThatName {
        /// How many.
        count: usize,
    },
    /// Another container of the same pod.
    OtherOfPod {
        /// Its pod and name.
        path: String,
        /// Its cause.
        cause: Cause,
        /// Its headline.
        #[serde(skip)]
        headline: Option<Headline>,
    },
    /// It was renamed after the event that was asked for.
    RenamedSince {
        /// The name that was asked for.
        wanted: String,
        /// Its name.
        name: String,
    },
    /// It was renamed before.
    Renamed {
        /// Its name.
        name: String,
        /// The name before.
        before: String,
    },
    /// Another container had the wanted name before.
    AnotherHadName {
        /// The path of that container.
        path: String,
    },
    /// A newer container of that name runs.
    NewerRuns {
        /// Its id.
        id: String,
    },
    /// Its runtime cannot be queried.
    RuntimeUnreachable,
    /// It uses so much memory now.
    Uses {
        /// Memory, page cache included.
        bytes: u64,
        /// Its limit.
        #[serde(skip_serializing_if = "Option::is_none")]
        limit_bytes: Option<u64>,
        /// Its OOM killer is switched off, and its processes wait.
        is_under_oom: bool,
        /// Share of the last 10 s in which all its processes waited, in percent.
        #[serde(skip_serializing_if = "Option::is_none")]
        stalled_percent: Option<f32>,
        /// What was taken from it and is read again, where that shows that it waits.
        #[serde(skip_serializing_if = "Option::is_none")]
        reread_bytes_per_second: Option<u64>,
    },
    /// Its restart policy has restarted it.
    Restarts {
        /// How often.
        count: u64,
    },
    /// It runs again.
    RunsAgain {
        /// Unix time of its start.
        since: f64,
    },
    /// Its last start failed.
    LastStartFailed {
        /// What the runtime says.
        error: String,
    },
    /// Its runtime says that it runs, and its first process does not exist.
    LostProcess {
        /// The runtime that lists it.
        runtime: RuntimeKind,
    },
    /// Only the ledger was read.
    OnlyLedger,
}
