//! Advice on a cause: which facts lead to which setting. Every figure is read from the events or computed from them.
//!
//! Page cache is never a cause: the kernel drops it before it kills.

use std::sync::Arc;

use super::Diagnosis;
use super::cause::Cause;
use super::container_log::LogRemedy;
use super::finding::{Finding, Recommendation, Remedy};
use super::limit::{LimitSetter, inside, limit_bytes, limit_of};
use super::place::CgroupPlace;
use super::remedy::{
    LimitRemedy, LimitSetting, OutputPlace, OutputPurpose, WorkerFit, WorkerSetting, WorkerShare, Workers,
};
use super::report::ReportFinding;
use super::usage::{LargestHolder, UsageFinding, growth, newest_sample, page_cache, sudden};
use super::verdict::{SIGKILL, full_shm};
use super::{RunSummary, cuda_oom, program, report, signal_of};
use crate::discover::RuntimeKind;
use crate::events::{
    ContainerRef, Identity, Kill, KillOwner, OUTSIDE_CONTAINERS, OomScope, PriorUsage, Role, RoleUsage,
};
use crate::parse::kernel_log::NoKill;
use crate::parse::process::WorkerProgram;
use crate::runs::hit_limit::LimitPosition;

/// Share of a limit that is left free when a number of workers is computed: they grow, and the kernel needs some.
const FREE_SHARE: f64 = 0.1;
/// Shares that are less than this part of what a container held do not show what its processes held.
const MIN_EXPLAINED: f64 = 0.8;
/// Maximum number of pieces of advice.
const MAX_ADVICE: usize = 4;

/// Returns the advice, the most promising first.
pub(super) fn of<'a>(cause: Cause, run: &RunSummary<'a>, lead: Option<&'a Kill>) -> Vec<Recommendation> {
    let mut proven: Vec<Recommendation> =
        lead.map(|kill| report::of(kill, run)).into_iter().flatten().map(Recommendation::from).collect();
    let mut advice = Vec::new();
    // what programs held is no help where something else filled the host
    let is_host = matches!(cause, Cause::OomHost | Cause::OomHostProcess);
    let has_programs = !is_host || !lead.is_some_and(report::is_host_without_programs);
    if has_programs {
        by_cause(cause, run, lead, &mut advice);
    }
    let is_of_programs = matches!(
        cause,
        Cause::OomLimitMain
            | Cause::OomLimitWorker
            | Cause::OomLimitWorkerThenExit
            | Cause::OomLimit
            | Cause::OomParentLimit
            | Cause::OomCgroupLimit
            | Cause::OomHost
            | Cause::OomHostProcess
    );
    if is_of_programs
        && has_programs
        && let Some(remedy) = lead.and_then(program::advice)
    {
        advice.insert(0, remedy.into());
    }
    if cause == Cause::OomPanic {
        proven.clear(); // what the figures mean is in its advice
    }
    advice.extend(lead.and_then(|kill| score(kill, run)).map(Recommendation::from));
    // both kinds, and neither alone
    proven.truncate(MAX_ADVICE.saturating_sub(advice.len()).max(1));
    advice.truncate(MAX_ADVICE - proven.len());
    // on a host the other containers come first
    if is_host {
        advice.extend(proven)
    } else {
        advice.splice(0..0, proven).for_each(drop)
    }
    advice
}

/// Adds the advice on a cause.
fn by_cause<'a>(
    cause: Cause,
    run: &RunSummary<'a>,
    lead: Option<&'a Kill>,
    advice: &mut Vec<Recommendation>,
) {
    let before = run.before(lead).map(Arc::as_ref);
    let mut add = |remedy: LimitRemedy| advice.push(remedy.into());
    match (cause, lead) {
        (Cause::OomSysrq, _) => {}
        (Cause::OomNodes, _) => {
            add(LimitRemedy::MoreNodes);
            add(LimitRemedy::FewerProgramsOnNodes);
        }
        (Cause::OomHost | Cause::OomHostProcess, _) => host(run, lead, before, advice),
        (Cause::OomCgroupLimit, Some(kill)) => add(raise_place(kill, kill.limit_bytes)),
        (Cause::OomNoVictim, Some(kill)) => no_victim(kill, run, advice),
        (Cause::OomPanic, Some(kill)) => panicked(kill, run, advice),
        (Cause::OomParentLimit, Some(kill)) => parent(kill, run, before, advice),
        (Cause::OomLimitShm, Some(kill)) => shared(kill, run, before, advice),
        (
            Cause::OomLimitMain | Cause::OomLimitWorker | Cause::OomLimitWorkerThenExit | Cause::OomLimit,
            Some(kill),
        ) => {
            limit(kill, run, before, advice);
        }
        (Cause::OomUnnamed, Some(kill)) => unnamed(kill, run, before, advice),
        (Cause::OomLimitMain, None) => add(raise_unknown(None, run)),
        (Cause::OomUnattributed, _) if run.log_time.is_some() => {}
        (Cause::OomFlagOnly, _) => {
            add(raise_unknown(None, run));
            add(read_output(OutputPurpose::LastLines, run));
        }
        (Cause::OomUnattributed, _) => add(LimitRemedy::SearchKernelLog),
        (Cause::ShmFull, _) => shm_full(run, advice),
        (Cause::Stopped, _)
            if run.exit.and_then(|exit| exit.requested_signal()) == Some(SIGKILL)
                && !run.subject.is_run() =>
        {
            add(LimitRemedy::RaiseStopTimeout);
        }
        (Cause::KilledOutside, _) => {
            let is_run = run.subject.is_run();
            advice.extend(pod_events(&run.subject.identity).map(Recommendation::from));
            advice.push(LimitRemedy::FindSender { is_run }.into());
            advice.push(LimitRemedy::ReadJournal { at: run.exit.map(|exit| exit.at), is_run }.into());
        }
        (Cause::CrashedSignal | Cause::EndedBySignal, _) => signal(run, advice),
        (Cause::ErrorExit, _) => {
            add(read_output(OutputPurpose::Error, run));
            advice.extend(look_into_log(Some(run.subject)).map(Recommendation::from));
        }
        (
            Cause::CudaOom
            | Cause::CudaOomFragmented
            | Cause::CudaOomOtherHolder
            | Cause::CudaOomOwnProcesses
            | Cause::CudaOomOwnShare
            | Cause::CudaOomSurvived,
            _,
        ) => advice.extend(cuda_oom::advice(run).into_iter().map(Recommendation::from)),
        (Cause::Unknown, _) => {
            advice.extend(pod_events(&run.subject.identity).map(Recommendation::from));
            advice.push(read_output(OutputPurpose::LastLinesIfExists, run).into());
        }
        _ => {}
    }
}

/// Returns the remedy for the limit of a cgroup that is no container's.
fn raise_place(kill: &Kill, limit_bytes: Option<u64>) -> LimitRemedy {
    LimitRemedy::RaisePlace { place: CgroupPlace::of_limit(&kill.limit_cgroup), limit_bytes }
}

fn no_victim<'a>(kill: &'a Kill, run: &RunSummary<'a>, advice: &mut Vec<Recommendation>) {
    if kill.scope == OomScope::Host {
        advice.push(LimitRemedy::LetProcessesBeKilled.into());
        return;
    }
    advice.push(LimitRemedy::LetItsProcessBeKilled.into());
    let raised = match limit_of(kill, run) {
        LimitPosition::Own => raise(kill, run, advice),
        _ => raise_place(kill, kill.limit_bytes),
    };
    advice.push(raised.into());
}

fn panicked(kill: &Kill, run: &RunSummary<'_>, advice: &mut Vec<Recommendation>) {
    if run.no_kill == Some(NoKill::PanicNoVictim) {
        advice.push(LimitRemedy::LetProcessesBeKilled.into());
        return;
    }
    advice.push(LimitRemedy::NoPanicOnOom.into());
    if let Some(report) = kill.report.as_deref().filter(|report| report.host)
        && let (Some(free_bytes), Some(host_bytes)) = (report.free_bytes, report.limit_bytes)
        && free_bytes > host_bytes / 20
    {
        advice.push(ReportFinding::FreeAtPanic { free_bytes, host_bytes }.into());
    }
}

/// Returns the advice to read the log of this container; `None` if its name needs quoting in a shell.
fn look_into_log(subject: Option<&ContainerRef>) -> Option<LogRemedy> {
    let container = subject?.identity.short_path();
    let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"_.-/".contains(&b);
    let is_run = subject.is_some_and(ContainerRef::is_run);
    let is_named =
        !is_run && !container.is_empty() && !container.starts_with('-') && container.bytes().all(is_plain);
    is_named.then_some(LogRemedy::ReadLog { container })
}

fn raise_unknown(kill: Option<&Kill>, run: &RunSummary<'_>) -> LimitRemedy {
    LimitRemedy::RaiseOrUseLess {
        setter: LimitSetter::of(run.subject, kill.map_or("", |kill| &kill.limit_cgroup)),
    }
}

fn unreclaimable(before: Option<&PriorUsage>) -> Option<u64> {
    newest_sample(before)?.unreclaimable_bytes
}

fn held_by(before: Option<&PriorUsage>, role: Role) -> Option<&RoleUsage> {
    before?.roles.iter().find(|held| held.role == role && held.processes > 0)
}

/// Returns the workers of each kind.
fn workers_of(before: Option<&PriorUsage>) -> impl Iterator<Item = &RoleUsage> {
    Role::WORKERS.into_iter().filter_map(move |role| held_by(before, role))
}

fn setting(before: Option<&PriorUsage>, key: &str) -> Option<String> {
    let settings = &before?.settings;
    settings.iter().find(|(its, _)| its.eq_ignore_ascii_case(key)).map(|(_, value)| value.to_string())
}

/// Returns the number of DataLoader workers that is set.
pub(super) fn num_workers(before: Option<&PriorUsage>) -> Option<String> {
    setting(before, "num_workers")
}

fn limit<'a>(
    kill: &'a Kill,
    run: &RunSummary<'a>,
    before: Option<&PriorUsage>,
    advice: &mut Vec<Recommendation>,
) {
    let total = unreclaimable(before);
    let share = |held: &RoleUsage| {
        total.and_then(|total| Some(held.pss_bytes? >= total.div_ceil(2))).unwrap_or(false)
    };
    // a loader can do without its only worker, other programs cannot
    let is_fewer_possible = |held: &&RoleUsage| held.role == Role::DataloaderWorker || held.processes > 1;
    // also where the trainer is the victim: fewer workers change nothing of the training
    let takes_much = |held: &RoleUsage| {
        total.and_then(|total| Some(held.pss_bytes? >= total.div_ceil(10))).unwrap_or(false)
    };
    let is_telling = |held: &&RoleUsage| {
        share(held) || kill.role == Some(held.role) || kill.role == Some(Role::Trainer) && takes_much(held)
    };
    let workers = workers_of(before).filter(is_fewer_possible).filter(is_telling);
    advice.extend(workers.map(|workers| fewer_workers(workers, kill, before).into()));
    let trainers = held_by(before, Role::Trainer).filter(|held| share(held));
    advice.extend(trainers.and_then(|trainers| large_trainers(trainers, before)).map(Recommendation::from));
    advice.push(raise(kill, run, advice).into());
    let facts = [growth(before), sudden(kill, before), page_cache(kill, before)];
    advice.extend(facts.into_iter().flatten().map(Recommendation::from));
}

/// Returns these workers: other programs than loaders have settings of their own.
fn workers(held: &RoleUsage, kill: Option<&Kill>, before: Option<&PriorUsage>) -> Workers {
    Workers {
        role: held.role,
        program: kill
            .and_then(|kill| WorkerProgram::of_name(&kill.program))
            .filter(|_| held.role == Role::Worker),
        processes: held.processes,
        num_workers: num_workers(before).filter(|_| held.role == Role::DataloaderWorker),
    }
}

/// Advises fewer workers, and how many would fit if that can be computed.
fn fewer_workers(held: &RoleUsage, kill: &Kill, before: Option<&PriorUsage>) -> LimitRemedy {
    let workers = workers(held, Some(kill), before);
    let held_bytes = unreclaimable(before);
    let share = match held.pss_bytes.map(|pss| (pss, pss / u64::from(held.processes))) {
        None => WorkerShare::Unmeasured { missing: held.pss_missing },
        Some((_, each_bytes)) if !do_shares_explain(before) => {
            WorkerShare::Unexplained { each_bytes, all_bytes: shares(before), held_bytes }
        }
        Some((pss_bytes, each_bytes)) => {
            let fit = fitting_below(kill, before).zip(held_bytes);
            let fit = fit.and_then(|(limit, total)| fitting(limit, total, pss_bytes, &workers));
            WorkerShare::Measured { pss_bytes, held_bytes, each_bytes, fit }
        }
    };
    LimitRemedy::FewerWorkers { workers, share }
}

/// Returns the sum of the shares that are known.
fn shares(before: Option<&PriorUsage>) -> u64 {
    before
        .iter()
        .flat_map(|before| &before.roles)
        .filter_map(|role| role.pss_bytes)
        .fold(0, u64::saturating_add)
}

/// Returns whether the shares of the processes explain what the container held at the last sample. They are measured less often, and
/// not at all while a container has little memory left; and not all may be known.
fn do_shares_explain(before: Option<&PriorUsage>) -> bool {
    let Some(last) = newest_sample(before) else { return false };
    let explained = shares(before).saturating_add(last.shmem_bytes.unwrap_or(0));
    last.unreclaimable_bytes.is_none_or(|total| explained as f64 >= MIN_EXPLAINED * total as f64)
}

fn fitting_below(kill: &Kill, before: Option<&PriorUsage>) -> Option<u64> {
    let last = newest_sample(before);
    kill.limit_bytes.or_else(|| last.and_then(|last| last.limit_bytes.or(last.effective_limit_bytes)))
}

/// Returns how many workers fit below a limit beside the rest; `None` if the figures do not show it.
fn fitting(limit: u64, total: u64, pss: u64, workers: &Workers) -> Option<WorkerFit> {
    // shares and total are measured at different times and may be inconsistent
    let rest = total.checked_sub(pss).filter(|_| pss > 0)?;
    let count = workers.processes;
    let each = pss as f64 / f64::from(count);
    let room = limit as f64 * (1.0 - FREE_SHARE) - rest as f64;
    let fit = (room / each).floor().max(0.0) as u32;
    if fit >= count {
        return Some(WorkerFit::All);
    }
    // NUM_WORKERS counts per data loader, and each rank has a loader
    let now = workers.num_workers.as_ref().and_then(|now| now.parse::<u32>().ok());
    let now = now.filter(|now| *now > 0 && count.is_multiple_of(*now));
    let loaders = now.map_or(1, |now| count / now);
    Some(match fit < loaders {
        true => WorkerFit::TooFew { fitting_processes: fit, others_bytes: rest },
        false => WorkerFit::Some {
            fitting_processes: fit,
            setting: now.map(|_| WorkerSetting { fitting_num_workers: fit / loaders, loaders }),
        },
    })
}

fn large_trainers(trainers: &RoleUsage, before: Option<&PriorUsage>) -> Option<LimitRemedy> {
    Some(LimitRemedy::SmallerTrainers {
        processes: trainers.processes,
        pss_bytes: trainers.pss_bytes?,
        held_bytes: unreclaimable(before)?,
        num_devices: setting(before, "num_devices"),
        batch_size: setting(before, "batch_size"),
    })
}

/// Returns the remedy of a higher limit, after these.
fn raise<'a>(kill: &'a Kill, run: &RunSummary<'a>, advice: &[Recommendation]) -> LimitRemedy {
    let is_alternative = !advice.is_empty();
    match limit_of(kill, run) {
        LimitPosition::Inside => LimitRemedy::RaiseInside {
            cgroup: inside(kill, run.subject).to_owned(),
            limit_bytes: kill.limit_bytes,
            is_alternative,
        },
        _ => LimitRemedy::Raise { limit: limit_setting(kill, run), is_alternative },
    }
}

/// Returns how the limit that was hit is set, and its value.
fn limit_setting(kill: &Kill, run: &RunSummary<'_>) -> LimitSetting {
    LimitSetting {
        setter: LimitSetter::of(run.subject, &kill.limit_cgroup),
        limit_bytes: kill.limit_bytes,
        with_swap: kill.report.as_ref().is_some_and(|report| report.with_swap),
    }
}

fn shared(kill: &Kill, run: &RunSummary<'_>, before: Option<&PriorUsage>, advice: &mut Vec<Recommendation>) {
    let last = newest_sample(before);
    let held = last.and_then(|last| Some((last.shmem_bytes?, last.unreclaimable_bytes?)));
    if let (Some((shmem_bytes, held_bytes)), None) = (held, &kill.report) {
        advice.push(LimitRemedy::LessSharedMemory { shmem_bytes, held_bytes }.into());
    }
    if let Some((used_bytes, size_bytes)) =
        last.and_then(|last| Some((last.shm_used_bytes?, last.shm_size_bytes?)))
    {
        let num_workers = num_workers(before);
        advice.push(LimitRemedy::LessInDevShm { used_bytes, size_bytes, num_workers }.into());
    }
    advice.push(LimitRemedy::RaiseForSharedMemory { limit: limit_setting(kill, run) }.into());
    advice.extend(page_cache(kill, before).map(Recommendation::from));
}

fn parent<'a>(
    kill: &'a Kill,
    run: &RunSummary<'a>,
    before: Option<&PriorUsage>,
    advice: &mut Vec<Recommendation>,
) {
    let limit_bytes = limit_bytes(kill, run);
    let place = CgroupPlace::of_limit_of(&kill.limit_cgroup, run.subject);
    let shared_by = match place {
        CgroupPlace::NamedPod { .. } => Some(LimitRemedy::ComparePodContainers),
        CgroupPlace::AllPods { .. } => None,
        _ => Some(LimitRemedy::LimitEachBelow),
    };
    advice.push(match kill.limit_cgroup.is_empty() {
        true => LimitRemedy::RaiseAbove { limit_bytes }.into(),
        false => LimitRemedy::RaisePlace { place, limit_bytes }.into(),
    });
    advice.extend(shared_by.map(Recommendation::from));
    for (held, bytes) in workers_of(before).filter_map(|held| Some((held, held.pss_bytes?))) {
        let Workers { role, processes, num_workers, .. } = workers(held, None, before);
        advice.push(UsageFinding::WorkersHeld { role, processes, bytes, num_workers }.into());
    }
}

fn host(
    run: &RunSummary<'_>,
    lead: Option<&Kill>,
    before: Option<&PriorUsage>,
    advice: &mut Vec<Recommendation>,
) {
    let own = &*run.subject.identity.name;
    let holders = before.map(|before| before.holders.as_slice()).unwrap_or_default();
    let Some(most) = holders.first() else {
        if run.log_time.is_some() {
            // a log from elsewhere: what to do there comes below
        } else if lead.is_none_or(|kill| kill.report.is_none()) {
            advice.push(LimitRemedy::RankContainers.into());
        } else {
            advice.push(UsageFinding::HoldersNotSampled.into());
        }
        if lead.is_some_and(|kill| matches!(CgroupPlace::of(&kill.cgroup), CgroupPlace::Vm { .. })) {
            advice.push(LimitRemedy::SmallerGuests.into());
        }
        if lead.is_none_or(has_containers) {
            advice.push(LimitRemedy::LimitEveryContainer.into());
        }
        return;
    };
    if lead.is_none_or(|kill| kill.report.is_none()) {
        // else they are shown with the report
        let host_bytes = before.and_then(|before| before.host_total_bytes);
        advice.push(
            UsageFinding::LargestHolders {
                host_bytes,
                holders: holders.iter().map(|it| LargestHolder::of(it, own)).collect(),
            }
            .into(),
        );
    }
    let is_outside = &*most.name == OUTSIDE_CONTAINERS;
    if is_outside {
        advice.push(LimitRemedy::RankHostProcesses.into());
    }
    if let Some(largest) = holders.iter().find(|holder| &*holder.name != OUTSIDE_CONTAINERS) {
        let container = (&*largest.name != own).then(|| largest.name.to_string());
        advice.push(LimitRemedy::LimitLargest { container, is_largest_holder: !is_outside }.into());
    }
    let its_role = lead.and_then(|kill| kill.role);
    if let Some((held, pss_bytes)) = workers_of(before)
        .find(|held| Some(held.role) == its_role)
        .and_then(|held| Some((held, held.pss_bytes?)))
    {
        advice
            .push(LimitRemedy::FewerWorkersOfHost { workers: workers(held, lead, before), pss_bytes }.into());
    }
}

/// Returns whether the host had a container at a kill, as far as that shows.
fn has_containers(kill: &Kill) -> bool {
    let rows = kill.report.iter().flat_map(|report| &report.processes);
    matches!(kill.owner, KillOwner::Container(_)) || rows.into_iter().any(|row| !row.container.is_empty())
}

fn unnamed(kill: &Kill, run: &RunSummary<'_>, before: Option<&PriorUsage>, advice: &mut Vec<Recommendation>) {
    let held = newest_sample(before).and_then(|last| Some((last.unreclaimable_bytes?, last.limit_bytes?)));
    advice.extend(held.map(|(bytes, limit_bytes)| UsageFinding::Held { bytes, limit_bytes }.into()));
    advice.push(raise_unknown(Some(kill), run).into());
    advice.push(LimitRemedy::KeepKernelLog.into());
}

fn shm_full(run: &RunSummary<'_>, advice: &mut Vec<Recommendation>) {
    if let Some(shm) = full_shm(run) {
        let (used_bytes, size_bytes) = (shm.used_bytes, shm.size_bytes);
        advice.push(LimitRemedy::LargerDevShm { used_bytes, size_bytes }.into());
    }
    let num_workers = num_workers(run.before(None).map(Arc::as_ref));
    advice.push(LimitRemedy::LessInFullDevShm { num_workers }.into());
    advice.push(read_output(OutputPurpose::FullDevShm, run).into());
}

/// Returns where the reason of an end of a pod's container is that its node does not know; `None` outside Kubernetes.
fn pod_events(of: &Identity) -> Option<LimitRemedy> {
    let (namespace, pod) = (of.k8s_namespace.to_string(), of.k8s_pod.to_string());
    (!pod.is_empty()).then_some(LimitRemedy::ReadPodEvents { namespace, pod })
}

fn signal(run: &RunSummary<'_>, advice: &mut Vec<Recommendation>) {
    let last = newest_sample(run.before(None).map(Arc::as_ref));
    advice.push(
        match run.exit.and_then(|exit| signal_of(exit.exit_code)) {
            Some(7) => LimitRemedy::TryLargerDevShm {
                used_bytes: last.and_then(|last| last.shm_used_bytes),
                size_bytes: last.and_then(|last| last.shm_size_bytes),
            },
            Some(6) => LimitRemedy::FindAbort,
            // the first process of a pid namespace gets no SIGABRT from itself
            Some(11) if !run.subject.is_run() => LimitRemedy::FindFaultOrAbort,
            Some(11 | 4 | 5 | 8 | 31) => LimitRemedy::FindFault,
            _ if run.exit.is_some_and(|exit| exit.requests_known) => LimitRemedy::FindSenderOfSignal,
            _ => LimitRemedy::FindWhoStoppedIt,
        }
        .into(),
    );
    advice.push(read_output(OutputPurpose::LastLines, run).into());
}

/// Returns an oom_score_adj that may have decided who was killed: where the kernel's table does not show it.
fn score(kill: &Kill, run: &RunSummary<'_>) -> Option<UsageFinding> {
    let oom_score_adj = kill.oom_score_adj.filter(|adj| *adj > 0)?;
    let has_table = kill.report.as_ref().is_some_and(|report| report.process_count.is_some());
    // Kubernetes sets one for all processes of a container, which decides nothing among them
    let is_of_pod = !run.subject.identity.k8s_pod.is_empty() || kill.cgroup.contains("kubepods");
    if has_table || (is_of_pod && kill.scope == OomScope::Container) {
        return None;
    }
    let role = kill.role.filter(|role| *role != Role::Other);
    Some(UsageFinding::Score { role, oom_score_adj, is_of_pod })
}

/// Returns where the container's log is, with a name that needs no quoting in a shell.
fn read_output(purpose: OutputPurpose, run: &RunSummary<'_>) -> LimitRemedy {
    let subject = run.subject;
    let plain = |text: &str| {
        !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
    };
    let Identity { k8s_namespace, k8s_pod, name } = &subject.identity;
    let output = if subject.is_run() {
        OutputPlace::Terminal
    } else if [k8s_namespace, k8s_pod, name].into_iter().all(|part| plain(part)) {
        let (namespace, pod, container) = (k8s_namespace.to_string(), k8s_pod.to_string(), name.to_string());
        OutputPlace::Pod { namespace, pod, container }
    } else {
        let command = if subject.runtime == RuntimeKind::Podman { "podman" } else { "docker" };
        let short = subject.container_id.get(..12).unwrap_or(&subject.container_id);
        let which = if plain(short) { short } else { name };
        let container = (plain(which) && !which.starts_with('-')).then(|| which.to_owned());
        OutputPlace::Container { command, container }
    };
    LimitRemedy::ReadOutput { purpose, output }
}

/// Adds what the settings of a container say that still exists, where no sample had them: how many DataLoader workers are set.
pub fn add_settings(diagnosis: &mut Diagnosis, settings: &[(Arc<str>, Arc<str>)]) {
    let set = settings.iter().find(|(name, _)| name.eq_ignore_ascii_case("num_workers"));
    let Some(set) = set.map(|(_, value)| value.to_string()) else { return };
    let slots: Vec<&mut Option<String>> = diagnosis.advice.iter_mut().filter_map(num_workers_of).collect();
    let names_workers = !slots.is_empty();
    for slot in slots {
        slot.get_or_insert_with(|| set.clone());
    }
    let is_number = set.parse::<u32>().is_ok_and(|count| count > 0);
    let ranges = diagnosis.report.iter().flat_map(|report| &report.roles);
    let workers =
        ranges.into_iter().find(|range| range.role == Role::DataloaderWorker && range.processes > 0);
    let is_raise = |advice: &Recommendation| {
        matches!(advice, Recommendation::Remedy(Remedy::Limit(LimitRemedy::Raise { .. })))
    };
    let at = diagnosis.advice.iter().position(is_raise);
    let Some((workers, at)) = workers.zip(at).filter(|_| is_number && !names_workers) else { return };
    let remedy = LimitRemedy::FewerWorkersOfTable {
        num_workers: set,
        processes: workers.processes,
        min_rss_bytes: workers.min_rss_bytes,
        max_rss_bytes: workers.max_rss_bytes,
    };
    if let Recommendation::Remedy(Remedy::Limit(LimitRemedy::Raise { is_alternative, .. })) =
        &mut diagnosis.advice[at]
    {
        *is_alternative = true;
    }
    diagnosis.advice.insert(at, remedy.into());
    // a fact less, the least telling, and no remedy
    let is_fact = |advice: &Recommendation| matches!(advice, Recommendation::Finding(_));
    if diagnosis.advice.len() > MAX_ADVICE
        && let Some(last) = diagnosis.advice.iter().rposition(is_fact)
    {
        diagnosis.advice.remove(last);
    }
}

/// Returns the number of DataLoader workers in a piece of advice on them.
fn num_workers_of(advice: &mut Recommendation) -> Option<&mut Option<String>> {
    match advice {
        Recommendation::Finding(
            Finding::Report(ReportFinding::AlikeProcesses {
                role: Some(Role::DataloaderWorker),
                num_workers,
                ..
            })
            | Finding::Usage(UsageFinding::WorkersHeld { role: Role::DataloaderWorker, num_workers, .. }),
        ) => Some(num_workers),
        Recommendation::Remedy(Remedy::Limit(remedy)) => match remedy {
            LimitRemedy::FewerWorkers { workers, .. } | LimitRemedy::FewerWorkersOfHost { workers, .. } => {
                Some(&mut workers.num_workers).filter(|_| workers.role == Role::DataloaderWorker)
            }
            LimitRemedy::LessInDevShm { num_workers, .. } | LimitRemedy::LessInFullDevShm { num_workers } => {
                Some(num_workers)
            }
            _ => None,
        },
        _ => None,
    }
}
