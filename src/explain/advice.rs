//! Advice: which setting to change, its current value, and a better one if the figures give it.
//!
//! Every figure is read from the events or computed from them. Without figures the advice says where to look instead.
//! Page cache is never a cause: the kernel drops it before it kills.

use std::sync::Arc;

use super::limit::{LimitSetter, inside, limit_bytes, limit_of};
use super::place::CgroupPlace;
use super::text::{name, role_one, roles, signal_of, time};
use super::verdict::{SIGKILL, full_shm};
use super::{Cause, RunSummary, cuda_oom, program, report};
use crate::discover::RuntimeKind;
use crate::events::{
    ContainerRef, Identity, Kill, KillOwner, MemoryHolder, OUTSIDE_CONTAINERS, OomScope, PriorUsage,
    PssMissing, Role, RoleUsage, UsageSample,
};
use crate::runs::hit_limit::LimitPosition;
use crate::text::{bytes, lasted};

/// Share of a limit that is left free when a number of workers is computed: they grow, and the kernel needs some.
const FREE_SHARE: f64 = 0.1;
/// Shares that are less than this part of what a container held do not show what its processes held.
const MIN_EXPLAINED: f64 = 0.8;
/// Page cache above this share of the usage may look like the cause.
const MIN_CACHE_SHARE: f64 = 0.1;
/// Maximum number of pieces of advice.
const MAX_ADVICE: usize = 4;
/// Growth below this share of the usage is ignored.
const MIN_GROWTH: f64 = 0.05;

/// Returns the advice, the most promising first.
pub(super) fn of<'a>(cause: Cause, run: &RunSummary<'a>, lead: Option<&'a Kill>) -> Vec<String> {
    let mut proven = lead.map(|kill| report::of(kill, run)).unwrap_or_default();
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
        && let Some(line) = lead.and_then(program::advice)
    {
        advice.insert(0, line);
    }
    if cause == Cause::OomPanic {
        proven.clear(); // what the figures mean is in its advice
    }
    if let Some(kill) = lead {
        score(kill, run, &mut advice);
    }
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
fn by_cause<'a>(cause: Cause, run: &RunSummary<'a>, lead: Option<&'a Kill>, advice: &mut Vec<String>) {
    let before = run.before(lead).map(Arc::as_ref);
    match (cause, lead) {
        (Cause::OomSysrq, _) => {}
        (Cause::OomNodes, _) => nodes(advice),
        (Cause::OomHost | Cause::OomHostProcess, _) => host(run, lead, before, advice),
        (Cause::OomCgroupLimit, Some(kill)) => own_limit(kill, advice),
        (Cause::OomNoVictim, Some(kill)) => no_victim(kill, run, advice),
        (Cause::OomPanic, Some(kill)) => panicked(kill, advice),
        (Cause::OomParentLimit, Some(kill)) => parent(kill, run, before, advice),
        (Cause::OomLimitShm, Some(kill)) => shared(kill, run, before, advice),
        (
            Cause::OomLimitMain | Cause::OomLimitWorker | Cause::OomLimitWorkerThenExit | Cause::OomLimit,
            Some(kill),
        ) => {
            limit(kill, run, before, advice);
        }
        (Cause::OomUnnamed, Some(kill)) => unnamed(kill, run, before, advice),
        (Cause::OomLimitMain, None) => advice.push(raise_unknown(None, run)),
        (Cause::OomUnattributed, _) if run.log_time.is_some() => {}
        (Cause::OomFlagOnly, _) => {
            advice.push(raise_unknown(None, run));
            advice.push(format!("Read its last log lines: {}", logs(run)));
        }
        (Cause::OomUnattributed, _) => {
            advice.push(
                "Search the kernel log around that time: dmesg -T | grep -i -B40 'killed process'".to_owned(),
            );
        }
        (Cause::ShmFull, _) => shm_full(run, advice),
        (Cause::Stopped, _)
            if run.exit.and_then(|exit| exit.requested_signal()) == Some(SIGKILL)
                && !run.subject.is_run() =>
        {
            advice.push(RAISE_STOP_TIMEOUT.to_owned());
        }
        (Cause::KilledOutside, _) => killed_outside(run, advice),
        (Cause::CrashedSignal | Cause::EndedBySignal, _) => signal(run, advice),
        (Cause::ErrorExit, _) => error_exit(run, advice),
        (
            Cause::CudaOom
            | Cause::CudaOomFragmented
            | Cause::CudaOomOtherHolder
            | Cause::CudaOomOwnProcesses
            | Cause::CudaOomOwnShare
            | Cause::CudaOomSurvived,
            _,
        ) => cuda_oom::advice(run, advice),
        (Cause::Unknown, _) => {
            advice.extend(pod_events(&run.subject.identity));
            advice.push(format!("Read its last log lines, if it still exists: {}", logs(run)))
        }
        _ => {}
    }
}

/// Advises on the limit of a cgroup that is no container's.
fn own_limit(kill: &Kill, advice: &mut Vec<String>) {
    advice.push(CgroupPlace::of_limit(&kill.limit_cgroup).advice(&now(kill.limit_bytes)));
}

/// Returns ` (now 2.0 GiB)`; empty if it is unknown.
fn now(limit: Option<u64>) -> String {
    limit.map_or_else(String::new, |limit| format!(" (now {})", bytes(limit)))
}

fn no_victim<'a>(kill: &'a Kill, run: &RunSummary<'a>, advice: &mut Vec<String>) {
    if kill.scope == OomScope::Host {
        advice.push(
            "Let some processes be killed: an oom_score_adj above -1000 for all but the most important."
                .to_owned(),
        );
        return;
    }
    advice.push(
        "Let one of its processes be killed: an oom_score_adj above -1000 (docker run --oom-score-adj; a process inherits it), so that it \
         ends and is restarted in place of hanging."
            .to_owned(),
    );
    if limit_of(kill, run) == LimitPosition::Own {
        raise(kill, run, advice);
    } else {
        advice.push(CgroupPlace::of_limit(&kill.limit_cgroup).advice(&now(kill.limit_bytes)));
    }
}

fn panicked(kill: &Kill, advice: &mut Vec<String>) {
    let has = |words: &str| kill.evidence.iter().any(|line| line.text.contains(words));
    if !has("panic_on_oom") {
        advice.push(
            "Let some processes be killed: an oom_score_adj above -1000 for all but the most important (a process inherits it).".to_owned(),
        );
        return;
    }
    advice.push(
        "vm.panic_on_oom=0 lets the kernel kill a process in place of the machine; with 1 it panics unless the request was restricted to \
         some NUMA nodes or a cgroup, with 2 (compulsory) always."
            .to_owned(),
    );
    if let Some(report) = kill.report.as_deref().filter(|report| report.host)
        && let (Some(free), Some(all)) = (report.free_bytes, report.limit_bytes)
        && free > all / 20
    {
        advice.push(format!(
            "{} of {} were free, and not for this request: often because a program is restricted to NUMA nodes (numactl --membind, a cpuset), \
             else because it was for a certain zone or for contiguous pages.",
            bytes(free),
            bytes(all)
        ));
    }
}

fn error_exit(run: &RunSummary<'_>, advice: &mut Vec<String>) {
    advice.push(format!("Its log has the error: {}", logs(run)));
    advice.extend(Some(look_into_log(Some(run.subject))).filter(|line| !line.is_empty()));
}

/// Returns the advice to read the log of this container; empty if its name needs quoting in a shell.
pub(super) fn look_into_log(subject: Option<&ContainerRef>) -> String {
    let name = subject.map(|subject| subject.identity.short_path()).unwrap_or_default();
    let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"_.-/".contains(&b);
    let is_run = subject.is_some_and(ContainerRef::is_run);
    if is_run || name.is_empty() || name.starts_with('-') || !name.bytes().all(is_plain) {
        return String::new();
    }
    format!(
        "memledger why {name} --logs looks there for errors of GPU memory (CUDA), of shared memory and of allocations; unasked memledger reads no log."
    )
}

const RAISE_STOP_TIMEOUT: &str = "If it has to save its state first: raise the stop timeout (docker stop -t, Compose stop_grace_period), and \
     handle SIGTERM, which the first process of a container ignores unless it has a handler (docker run --init helps \
     programs without one).";

fn raise_unknown(kill: Option<&Kill>, run: &RunSummary<'_>) -> String {
    let setter = LimitSetter::of(run.subject, kill.map_or("", |kill| &kill.limit_cgroup));
    format!("Raise its memory limit{}, or reduce its memory use.", setter.limit(None))
}

fn unreclaimable(before: Option<&PriorUsage>) -> Option<u64> {
    before?.samples.last()?.unreclaimable_bytes
}

fn held_by(before: Option<&PriorUsage>, role: Role) -> Option<&RoleUsage> {
    before?.roles.iter().find(|held| held.role == role && held.processes > 0)
}

/// Returns the workers of each kind.
fn workers_of(before: Option<&PriorUsage>) -> impl Iterator<Item = &RoleUsage> {
    Role::WORKERS.into_iter().filter_map(move |role| held_by(before, role))
}

fn setting<'a>(before: Option<&'a PriorUsage>, key: &str) -> Option<&'a str> {
    let settings = &before?.settings;
    settings.iter().find(|(its, _)| its.eq_ignore_ascii_case(key)).map(|(_, value)| &**value)
}

/// Returns ` (now 8)`, the value of a setting; empty if it is unknown.
fn value_now(value: Option<&str>) -> String {
    value.map_or_else(String::new, |value| format!(" (now {})", name(value)))
}

/// Returns ` (now 8)`, the number of DataLoader workers that is set; empty if it is unknown.
fn workers_now(before: Option<&PriorUsage>) -> String {
    value_now(setting(before, "num_workers"))
}

fn limit<'a>(kill: &'a Kill, run: &RunSummary<'a>, before: Option<&PriorUsage>, advice: &mut Vec<String>) {
    let total = unreclaimable(before);
    let share = |held: &RoleUsage| {
        total.and_then(|total| Some(held.pss_bytes? >= total.div_ceil(2))).unwrap_or(false)
    };
    let trainers = held_by(before, Role::Trainer);
    // a loader can do without its only worker, other programs cannot
    let is_fewer_possible = |held: &&RoleUsage| held.role == Role::DataloaderWorker || held.processes > 1;
    // also where the trainer is the victim: fewer workers change nothing of the training
    let takes_much = |held: &RoleUsage| {
        total.and_then(|total| Some(held.pss_bytes? >= total.div_ceil(10))).unwrap_or(false)
    };
    let is_telling = |held: &&RoleUsage| {
        share(held) || kill.role == Some(held.role) || kill.role == Some(Role::Trainer) && takes_much(held)
    };
    for workers in workers_of(before).filter(is_fewer_possible).filter(is_telling) {
        fewer_workers(workers, kill, before, advice);
    }
    if let Some(trainers) = trainers.filter(|held| share(held)) {
        large_trainers(trainers, before, advice);
    }
    raise(kill, run, advice);
    growth(before, advice);
    sudden(kill, before, advice);
    page_cache(kill, before, advice);
}

/// Advises fewer workers, and how many would fit if that can be computed.
fn fewer_workers(workers: &RoleUsage, kill: &Kill, before: Option<&PriorUsage>, advice: &mut Vec<String>) {
    let count = workers.processes;
    let is_loader = workers.role == Role::DataloaderWorker;
    // other programs have settings of their own
    let now = setting(before, "num_workers").filter(|_| is_loader);
    let fewer = match workers.role {
        Role::Worker => program::fewer_workers(&kill.program),
        _ => format!("Fewer NUM_WORKERS{}", value_now(now)),
    };
    let held = roles(workers.role, count);
    let Some(pss) = workers.pss_bytes else {
        advice.push(format!(
            "{fewer}. {held} ran. What each holds alone is not known{}.",
            why_unmeasured(workers.pss_missing)
        ));
        return;
    };
    let each = pss / u64::from(count);
    let total = unreclaimable(before);
    if !do_shares_explain(before) {
        advice.push(format!(
            "{fewer}. {held} ran, with {} each (PSS) when that was last measured. All measured shares are {}{}, so how \
             many workers fit is not known.",
            bytes(each),
            bytes(shares(before)),
            total.map_or_else(String::new, |total| format!(" of the {} that it held", bytes(total)))
        ));
        return;
    }
    let of_all = total.map_or_else(String::new, |total| format!(" of {}", bytes(total)));
    let mut text = format!("{fewer}: {held} held {}{of_all}, {} each (PSS).", bytes(pss), bytes(each));
    if let (Some(limit), Some(total)) = (fitting_below(kill, before), total) {
        text.push_str(&fitting(limit, total, pss, (count, is_loader), now));
    }
    advice.push(text);
}

/// Says why a proportional share is not known; empty if that is not known either.
fn why_unmeasured(missing: Option<PssMissing>) -> &'static str {
    match missing {
        Some(PssMissing::NotYet) => {
            ": its proportional share (PSS) had not been measured yet (once per --pss.interval)"
        }
        Some(PssMissing::Permission) => {
            ": reading its proportional share (PSS) needs CAP_SYS_PTRACE, which memledger lacked"
        }
        Some(PssMissing::Expensive) => {
            ": its proportional share (PSS) was not read, because it would have waited too long for that"
        }
        Some(PssMissing::LowHeadroom) => {
            ": its proportional share (PSS) is not read while its container is near its limit"
        }
        None => "",
    }
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
    let Some(last) = before.and_then(|before| before.samples.last()) else { return false };
    let explained = shares(before).saturating_add(last.shmem_bytes.unwrap_or(0));
    last.unreclaimable_bytes.is_none_or(|total| explained as f64 >= MIN_EXPLAINED * total as f64)
}

fn fitting_below(kill: &Kill, before: Option<&PriorUsage>) -> Option<u64> {
    let last = before.and_then(|before| before.samples.last());
    kill.limit_bytes.or_else(|| last.and_then(|last| last.limit_bytes.or(last.effective_limit_bytes)))
}

/// Describes how many workers fit below a limit beside the rest; empty if the figures do not show it.
fn fitting(limit: u64, total: u64, pss: u64, (count, is_loader): (u32, bool), now: Option<&str>) -> String {
    // shares and total are measured at different times and may be inconsistent
    let Some(rest) = total.checked_sub(pss).filter(|_| pss > 0) else { return String::new() };
    let each = pss as f64 / f64::from(count);
    let room = limit as f64 * (1.0 - FREE_SHARE) - rest as f64;
    let fit = (room / each).floor().max(0.0) as u32;
    if fit >= count {
        return " By the last sample all of them fit: they grew after it, so how many fit is not known."
            .to_owned();
    }
    // NUM_WORKERS counts per data loader, and each rank has a loader
    let now =
        now.and_then(|now| now.parse::<u32>().ok()).filter(|now| *now > 0 && count.is_multiple_of(*now));
    let loaders = now.map_or(1, |now| count / now);
    if fit < loaders {
        let few = if fit == 0 { "Not one fits".to_owned() } else { format!("Only {fit} of them fit") };
        return format!(
            " {few} beside the other {}, a tenth of the limit kept free: {}a higher limit.",
            bytes(rest),
            if is_loader { "NUM_WORKERS=0, or " } else { "" }
        );
    }
    let text = format!(" With a tenth of the limit kept free {fit} fit");
    match now {
        Some(_) if loaders > 1 => {
            format!("{text}: NUM_WORKERS={} for each of {loaders} loaders.", fit / loaders)
        }
        Some(_) => format!("{text}: NUM_WORKERS={fit}."),
        None => format!("{text}."),
    }
}

fn large_trainers(trainers: &RoleUsage, before: Option<&PriorUsage>, advice: &mut Vec<String>) {
    let (Some(pss), Some(total)) = (trainers.pss_bytes, unreclaimable(before)) else { return };
    let held = roles(Role::Trainer, trainers.processes);
    let mut text = format!("Smaller trainers: {held} held {} of the {}", bytes(pss), bytes(total));
    if trainers.processes > 1 {
        let each = pss / u64::from(trainers.processes);
        let devices = setting(before, "num_devices")
            .map_or_else(String::new, |value| format!(" (NUM_DEVICES is {})", name(value)));
        text.push_str(&format!(", {} each{devices}: each rank holds its own copy", bytes(each)));
    }
    text.push_str(". Look for a data set or results kept in RAM.");
    if let Some(batch) = setting(before, "batch_size") {
        text.push_str(&format!(" BATCH_SIZE is {}.", name(batch)));
    }
    advice.push(text);
}

fn raise<'a>(kill: &'a Kill, run: &RunSummary<'a>, advice: &mut Vec<String>) {
    let verb = if advice.is_empty() { "Raise" } else { "Or raise" };
    advice.push(match limit_of(kill, run) {
        LimitPosition::Inside => format!(
            "{verb} the limit of {}, which was set inside the container{}.",
            inside(kill, run.subject),
            kill.limit_bytes.map_or_else(String::new, |limit| format!("; now {}", bytes(limit)))
        ),
        _ => {
            format!("{verb} {}. A kill does not show by how much.", limit_setting(kill, run))
        }
    });
}

/// Returns the names of the setting of the limit that was hit, and its value.
fn limit_setting(kill: &Kill, run: &RunSummary<'_>) -> String {
    let with_swap = kill.report.as_ref().is_some_and(|report| report.with_swap);
    match LimitSetter::of(run.subject, &kill.limit_cgroup) {
        LimitSetter::Engine if with_swap => {
            let now = kill.limit_bytes.map_or_else(String::new, |limit| format!("; now {}", bytes(limit)));
            format!("the limit of memory and swap together (--memory-swap, memswap_limit{now})")
        }
        setter => format!("the memory limit{}", setter.limit(kill.limit_bytes)),
    }
}

/// Mentions growth over the samples, which a higher limit only delays.
fn growth(before: Option<&PriorUsage>, advice: &mut Vec<String>) {
    let Some(before) = before else { return };
    let (Some(first), Some(last)) = (before.samples.first(), before.samples.last()) else { return };
    let (Some(from), Some(to)) = (first.unreclaimable_bytes, last.unreclaimable_bytes) else { return };
    let seconds = last.at - first.at;
    if seconds < 60.0 || (to.saturating_sub(from) as f64) < MIN_GROWTH * to as f64 {
        return;
    }
    advice.push(format!(
        "It grew from {} to {} in {}. If that goes on, a higher limit only delays it.",
        bytes(from),
        bytes(to),
        lasted(seconds)
    ));
}

/// Mentions growth after the last sample.
fn sudden(kill: &Kill, before: Option<&PriorUsage>, advice: &mut Vec<String>) {
    let Some(last) = before.and_then(|before| before.samples.last()) else { return };
    let (Some(held), Some(limit)) = (last.unreclaimable_bytes, kill.limit_bytes) else { return };
    let after = kill.at - last.at;
    if after >= 0.0 && held < limit.div_ceil(2) {
        advice.push(format!(
            "It held {} at the last sample and reached the limit within {}: sudden growth, not slow.",
            bytes(held),
            lasted(after.ceil().max(1.0))
        ));
    }
}

fn page_cache(kill: &Kill, before: Option<&PriorUsage>, advice: &mut Vec<String>) {
    if kill.report.is_some() {
        return; // it has the page cache at the kill
    }
    let Some(last) = before.and_then(|before| before.samples.last()) else { return };
    // a small cache needs no mention
    if let Some(file) =
        last.file_bytes.filter(|file| *file as f64 >= MIN_CACHE_SHARE * last.usage_bytes as f64)
    {
        advice.push(format!(
            "Page cache ({}) is not the cause: the kernel drops it before it kills.",
            bytes(file)
        ));
    }
}

fn shared(kill: &Kill, run: &RunSummary<'_>, before: Option<&PriorUsage>, advice: &mut Vec<String>) {
    let last = before.and_then(|before| before.samples.last());
    let held = last.and_then(|last| Some((last.shmem_bytes?, last.unreclaimable_bytes?)));
    if let (Some((shmem, total)), None) = (held, &kill.report) {
        advice.push(format!(
            "Less shared memory: {} of the {} that the kernel could not drop were shared memory or files on a tmpfs, \
             which count against the memory limit and stay until they are removed.",
            bytes(shmem),
            bytes(total)
        ));
    }
    if let Some((used, size)) = last.and_then(|last| Some((last.shm_used_bytes?, last.shm_size_bytes?))) {
        advice.push(format!(
            "In its /dev/shm lay {} of {}: batches that DataLoader workers hand over lie there, so fewer NUM_WORKERS{} or \
             a smaller prefetch_factor. A larger --shm-size does not help here.",
            bytes(used),
            bytes(size),
            workers_now(before)
        ));
    }
    advice.push(format!("Or raise {}.", limit_setting(kill, run)));
    page_cache(kill, before, advice);
}

fn parent<'a>(kill: &'a Kill, run: &RunSummary<'a>, before: Option<&PriorUsage>, advice: &mut Vec<String>) {
    let now = now(limit_bytes(kill, run));
    let place = CgroupPlace::of_limit_of(&kill.limit_cgroup, run.subject);
    if kill.limit_cgroup.is_empty() {
        advice.push(format!("Raise the limit of the cgroup above{now}, or start the container below another one (docker run --cgroup-parent)."));
    } else {
        advice.push(place.advice(&now));
    }
    if let CgroupPlace::NamedPod { .. } = place {
        advice.push(
            "All containers of the pod share that limit, and the kernel kills the largest process in it, whichever container grew: compare \
             them (memledger ps)."
                .to_owned(),
        );
    } else if !matches!(place, CgroupPlace::AllPods { .. }) {
        advice.push(
            "All containers below that cgroup share its limit, and the kernel kills the largest, not the one that grew: \
             give each a limit of its own, so that the one that grows is the one that is killed."
                .to_owned(),
        );
    }
    for (workers, pss) in workers_of(before).filter_map(|held| Some((held, held.pss_bytes?))) {
        let now = setting(before, "num_workers").filter(|_| workers.role == Role::DataloaderWorker);
        advice.push(format!(
            "In this container {} held {}{}.",
            roles(workers.role, workers.processes),
            bytes(pss),
            now.map_or_else(String::new, |v| format!(" (NUM_WORKERS={})", name(v)))
        ));
    }
}

fn host(run: &RunSummary<'_>, lead: Option<&Kill>, before: Option<&PriorUsage>, advice: &mut Vec<String>) {
    let own = &*run.subject.identity.name;
    let holders = before.map(|before| before.holders.as_slice()).unwrap_or_default();
    let Some(most) = holders.first() else {
        if run.log_time.is_some() {
            // a log from elsewhere: what to do there comes below
        } else if lead.is_none_or(|kill| kill.report.is_none()) {
            advice.push(
            "The holders of the memory are not recorded. To see them while it happens, rank containers by \
             memledger_container_memory_unreclaimable_bytes of `memledger serve`."
                .to_owned(),
        );
        } else if run.log_time.is_none() {
            advice.push(
                "The kernel logs processes, which share pages, but not what each container held: only samples of `memledger serve` \
                 show that, and there is none of that time."
                    .to_owned(),
            );
        }
        if lead.is_some_and(|kill| matches!(CgroupPlace::of(&kill.cgroup), CgroupPlace::Vm { .. })) {
            advice.push(
                "The memory of this host is that of its virtual machines: give their guests less in sum (qm set, virsh setmem), with room for \
                 QEMU and the system."
                    .to_owned(),
            );
        }
        if lead.is_none_or(has_containers) {
            advice
                .push("Give every container a memory limit whose sum leaves room for the system.".to_owned());
        }
        return;
    };
    if lead.is_none_or(|kill| kill.report.is_none()) {
        // else they are shown with the report
        advice.push(largest_holders(holders, before.and_then(|before| before.host_total_bytes), own));
    }
    let first_container = holders.iter().find(|holder| &*holder.name != OUTSIDE_CONTAINERS);
    if &*most.name == OUTSIDE_CONTAINERS {
        advice.push(
            "Most was used outside containers: ps -eo pid,rss,comm --sort=-rss | head shows the processes."
                .to_owned(),
        );
    }
    if let Some(largest) = first_container {
        let whom = if &*largest.name == own { "this container" } else { &*name(&largest.name) };
        let size =
            if &*most.name == OUTSIDE_CONTAINERS { "the largest container" } else { "the largest holder" };
        advice.push(format!(
            "Set a memory limit on {whom}, {size}, or lower its limit: docker run --memory, Compose mem_limit, memledger run --memory. \
             Then its growth affects itself, not other containers."
        ));
    }
    let its_role = lead.and_then(|kill| kill.role);
    if let Some((workers, pss)) = workers_of(before)
        .find(|held| Some(held.role) == its_role)
        .and_then(|held| Some((held, held.pss_bytes?)))
    {
        let fewer = match workers.role {
            Role::Worker => program::fewer_workers(lead.map_or("", |kill| &*kill.program)),
            _ => format!("Fewer NUM_WORKERS{}", workers_now(before)),
        };
        let held = roles(workers.role, workers.processes);
        advice.push(format!("{fewer} also save memory: {held} held {}.", bytes(pss)));
    }
}

/// Returns whether the host had a container at a kill, as far as that shows.
fn has_containers(kill: &Kill) -> bool {
    let rows = kill.report.iter().flat_map(|report| &report.processes);
    matches!(kill.owner, KillOwner::Container(_)) || rows.into_iter().any(|row| !row.container.is_empty())
}

fn largest_holders(holders: &[MemoryHolder], host_total: Option<u64>, own: &str) -> String {
    let total = host_total.map_or_else(String::new, |total| format!(" of the machine's {}", bytes(total)));
    let list: Vec<_> = holders.iter().map(|holder| held(holder, own)).collect();
    format!("Largest holders{total} at the last sample: {}.", list.join(", "))
}

fn nodes(advice: &mut Vec<String>) {
    advice.push(
        "Let it use more nodes: docker run --cpuset-mems, cpuset.mems of its cgroup; numactl --membind in its command, where \
         --preferred prefers a node and may use the others. Other nodes may have had free memory: numactl --hardware shows each."
            .to_owned(),
    );
    advice.push(
        "Or keep other programs from these nodes: the kernel kills the largest process there.".to_owned(),
    );
}

fn held(holder: &MemoryHolder, own: &str) -> String {
    let mark = if !own.is_empty() && &*holder.name == own { " (this one)" } else { "" };
    format!("{}{mark} {}", name(&holder.name), bytes(holder.unreclaimable_bytes))
}

fn unnamed(kill: &Kill, run: &RunSummary<'_>, before: Option<&PriorUsage>, advice: &mut Vec<String>) {
    if let Some(UsageSample { unreclaimable_bytes: Some(held), limit_bytes: Some(limit), .. }) =
        before.and_then(|before| before.samples.last())
    {
        advice.push(format!(
            "At the last sample it held {} of its limit of {} that the kernel could not drop.",
            bytes(*held),
            bytes(*limit)
        ));
    }
    advice.push(raise_unknown(Some(kill), run));
    advice.push(
        "So that records are not lost: let memledger read /dev/kmsg (CAP_SYSLOG; see `memledger doctor`), and \
         boot with a larger kernel log (log_buf_len=1M)."
            .to_owned(),
    );
}

fn shm_full(run: &RunSummary<'_>, advice: &mut Vec<String>) {
    if let Some((used, size)) = full_shm(run) {
        advice.push(format!(
            "A larger --shm-size (Compose shm_size; Kubernetes: an emptyDir of medium Memory on /dev/shm). It is {} \
             now, {} of it in use at the last sample. Or --ipc=host, which shares the host's.",
            bytes(size),
            bytes(used)
        ));
    }
    let before = run.before(None).map(Arc::as_ref);
    let workers = workers_now(before);
    advice.push(format!(
        "Or put less there: fewer NUM_WORKERS{workers}, a smaller prefetch_factor or batch, or \
         torch.multiprocessing.set_sharing_strategy('file_system')."
    ));
    advice
        .push(format!("Its log proves it with \"Bus error\" or \"No space left on device\": {}", logs(run)));
}

/// Returns where the reason of an end of a pod's container is that its node does not know; `None` outside Kubernetes.
fn pod_events(of: &Identity) -> Option<String> {
    let (namespace, pod) = (name(&of.k8s_namespace), name(&of.k8s_pod));
    (!of.k8s_pod.is_empty()).then(|| {
        format!(
            "In a pod most often a failed liveness probe, an eviction, or a deletion or a drain whose grace period ended, which look alike on the \
             node: kubectl get events -n {namespace} --field-selector involvedObject.name={pod} has which it was, for an hour."
        )
    })
}

fn killed_outside(run: &RunSummary<'_>, advice: &mut Vec<String>) {
    advice.extend(pod_events(&run.subject.identity));
    let (engine, units) = match run.subject.is_run() {
        true => ("", ""),
        false => ("docker stop after its timeout; ", " -u kubelet -u docker"),
    };
    advice.push(format!(
        "Other senders of SIGKILL: {engine}systemd-oomd and earlyoom, which kill on low memory before the kernel \
         does, without a kernel record; Ray's memory monitor; a batch system; a person with kill -9. A program that exits with code 137 by itself looks the \
         same."
    ));
    let at = run.exit.map_or_else(String::new, |exit| format!(" the logs of {}", time(exit.at)));
    advice.push(format!("Check{at}: journalctl -u systemd-oomd -u earlyoom{units}"));
}

fn signal(run: &RunSummary<'_>, advice: &mut Vec<String>) {
    match run.exit.and_then(|exit| signal_of(exit.exit_code)) {
        Some(7) => bus(run, advice),
        Some(6) => advice.push(
            "SIGABRT is how a program ends itself: a failed assertion, or a C++ exception such as std::bad_alloc. Its \
             last log lines show which."
                .to_owned(),
        ),
        // the first process of a pid namespace gets no SIGABRT from itself
        Some(11) if !run.subject.is_run() => advice.push(
            "As the status of a container's first process, 139 is either a fault in native code or abort(), which ends it in the same way: \
             Node.js at its heap limit, Rust and C++ whose memory was refused. The last log lines say so; after a fault dmesg has \"segfault at\" \
             with the library."
                .to_owned(),
        ),
        Some(11 | 4 | 5 | 8 | 31) => advice.push(
            "That is a fault in native code (an extension, a library, a driver), not a lack of memory; dmesg names the \
             library in a line with \"segfault at\" or \"trap\"."
                .to_owned(),
        ),
        _ if run.exit.is_some_and(|exit| exit.requests_known) => advice
            .push("It was not sent by the runtime, but by a person, a script, or the program itself.".to_owned()),
        _ => advice.push(
            "Look for who stopped it: a deletion or an eviction of its pod, a stop of the runtime, a person, or a script."
                .to_owned(),
        ),
    }
    advice.push(format!("Read its last log lines: {}", logs(run)));
}

fn bus(run: &RunSummary<'_>, advice: &mut Vec<String>) {
    let last = run.before(None).and_then(|before| before.samples.last());
    let size = last.and_then(|last| last.shm_size_bytes);
    let used = last.and_then(|last| last.shm_used_bytes);
    let now = match (size, used) {
        (Some(size), Some(used)) => {
            format!(" (now {}, {} of it in use at the last sample)", bytes(size), bytes(used))
        }
        (Some(size), None) => format!(" (now {}; its use is not known)", bytes(size)),
        _ => " (its size and use are not recorded)".to_owned(),
    };
    advice.push(format!(
        "SIGBUS with DataLoader workers is most often a full /dev/shm: try a larger --shm-size{now}, or --ipc=host. It \
         may fill up between two samples."
    ));
}

/// Explains the effect of an oom_score_adj that may have decided who was killed: where the kernel's table does not show it.
fn score(kill: &Kill, run: &RunSummary<'_>, advice: &mut Vec<String>) {
    let Some(adj) = kill.oom_score_adj.filter(|adj| *adj > 0) else { return };
    let has_table = kill.report.as_ref().is_some_and(|report| report.process_count.is_some());
    // Kubernetes sets one for all processes of a container, which decides nothing among them
    let is_pod = !run.subject.identity.k8s_pod.is_empty() || kill.cgroup.contains("kubepods");
    if has_table || (is_pod && kill.scope == OomScope::Container) {
        return;
    }
    let what = kill.role.filter(|role| *role != Role::Other).map_or("process", role_one);
    let who = if is_pod { " Kubernetes sets it by the pod's QoS class." } else { "" };
    advice.push(format!(
        "The {what} had oom_score_adj {adj}: the kernel counts {adj}/1000 of the memory more for it, so it dies before larger ones.{who}"
    ));
}

/// Returns the command that shows the container's log, with a name that needs no quoting in a shell.
fn logs(run: &RunSummary<'_>) -> String {
    let subject = run.subject;
    if subject.is_run() {
        return "what it wrote to its terminal or file; memledger keeps no output of a run".to_owned();
    }
    let plain = |text: &str| {
        !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
    };
    let pod = &*subject.identity.k8s_pod;
    let container = &*subject.identity.name;
    if plain(pod) && plain(container) && plain(&subject.identity.k8s_namespace) {
        let namespace = &subject.identity.k8s_namespace;
        return format!(
            "kubectl logs -n {namespace} {pod} -c {container} (with --previous if it has started again)"
        );
    }
    let tool = if subject.runtime == RuntimeKind::Podman { "podman" } else { "docker" };
    let short = subject.container_id.get(..12).unwrap_or(&subject.container_id);
    let which = if plain(short) { short } else { container };
    if plain(which) && !which.starts_with('-') {
        format!("{tool} logs --tail 50 {which}")
    } else {
        format!("{tool} logs")
    }
}
