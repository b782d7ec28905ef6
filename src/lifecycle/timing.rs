//! The windows of time by which evidence of kills and ends is related: one table, each with its reason. Pure.
//!
//! A timeout says how long a decision waits for evidence, by the monotonic clock; a window says how far apart the times of two reports may
//! be, in seconds of Unix time. What must hold between them is in the test below. Explanations of the past (`diagnose`) use the same
//! ones, because they replay the same decisions.
//!
//! Not here: how often something is read, written or retried, which decides nothing.

use std::time::Duration;

// Clocks and reports of one moment

/// Largest difference between two clocks of the host at the same moment, in seconds: between a stamp of the kernel and
/// one of the runtime.
pub const CLOCK_TOLERANCE: f64 = 0.02;
/// Largest drift of the kernel log's clock, as a share of the elapsed time.
pub const MAX_DRIFT: f64 = 1e-4;
/// The kernel kills and counts a process at most this many seconds before it logs that.
pub const LOG_DELAY: f64 = 0.2;
/// A kill that is logged so many seconds after a start, where the run before ended just then, may be of that run: a verdict claims less
/// than a count.
pub const RECORD_DELAY: f64 = 0.5;
/// The kernel logs the kills of one `memory.oom.group` within this many seconds.
pub const GROUP_WINDOW: f64 = 3.0;
/// The start time of a process is exact to so many seconds, because the time of the boot is.
pub const START_RESOLUTION: f64 = 1.0;
/// Largest difference between two reports of the same start, in seconds.
pub const START_TOLERANCE: f64 = 1.0;
/// Runs with a shorter pause between them, in seconds, are confused by clocks and delays.
pub const MIN_PAUSE: f64 = 2.0;
/// A line of the kernel log whose drift is corrected was written at most so many seconds before or after that time.
pub const DRIFT_TOLERANCE: f64 = 1.0;

// Delays of runtimes and cycles

/// Largest disorder of a runtime's events, in seconds.
pub const MAX_DISORDER: f64 = 1.0;
/// A runtime reports an event this many seconds after it at most, as long as it is not overloaded.
pub const MAX_EVENT_DELAY: f64 = 10.0;
/// An event of a connected runtime arrives within this many seconds, also from a busy one.
pub const MAX_LIVE_EVENT_DELAY: f64 = 60.0;
/// The runtime's event of a start comes at most this many seconds after the time that it reports of it, and after its first process
/// began, which can be killed meanwhile.
pub const MAX_START_EVENT_DELAY: f64 = 5.0;
/// An engine that works reports an end at most this many seconds after the last process is gone.
pub const MAX_END_EVENT_DELAY: f64 = 10.0;
/// The runtime reports an OOM at most this many seconds after it happened.
pub const MAX_OOM_EVENT_DELAY: f64 = 1.5;
/// An exit that is reported within this many seconds after the ledger's first start may belong to an earlier kill.
pub const MAX_EXIT_DELAY: f64 = 1.0;
/// The runtime reports the end of a stop within this many seconds after the exit.
pub const STOP_REPORT_DELAY: f64 = 2.0;
/// A container that began so many seconds ago may not be listed yet.
pub const LISTING_DELAY: f64 = 1.0;
/// A container that is listed this many seconds after its assumed exit has not exited.
pub const REOPEN_AFTER: f64 = 10.0;
/// A killed process may be listed for this many seconds, until its memory is released.
pub const LISTED_AFTER_KILL: f64 = 2.0;
/// For how many seconds processes and memory are kept: a kill may get its owner that long after it.
pub const USAGE_KEPT: f64 = 2.0;
/// A victim that a cycle does not see any more is taken for gone so many seconds after the last one that saw it, at most.
pub const MAX_MISSED_DELAY: f64 = 5.0;
/// A runtime names its containers within this time.
pub const NAME_TIMEOUT: Duration = Duration::from_secs(60);

// How long a kill waits

/// How long a record may be missing before it counts as lost. The kernel increments the counter before it logs.
pub const RECORD_TIMEOUT: Duration = Duration::from_secs(1);
/// The runtimes' OOM events are not used before this, because they may be incomplete.
pub const RUNTIME_EVENT_DELAY: Duration = Duration::from_secs(2);
/// How long to wait for the runtime to report a new container, or the run that a kill ended; after that a container
/// without a name is labelled with its short id.
pub const RUNTIME_EVENT_TIMEOUT: Duration = Duration::from_secs(3);
/// After this, shortly before a kill becomes unattributed, the cgroups' counts are used for kills without a record even
/// if there are fewer counts than kills.
pub const FORCED_MATCH_AFTER: Duration = Duration::from_secs(9);
/// A kill without evidence becomes unattributed after this.
pub const ATTRIBUTION_TIMEOUT: Duration = Duration::from_secs(10);
/// A cgroup's count that nothing explains is discarded after this.
pub const COUNTER_TIMEOUT: Duration = Duration::from_secs(13);
/// How long a victim may take until it is gone: the kernel releases its memory, and the driver that of its GPUs.
pub const MAX_TEARDOWN: Duration = Duration::from_secs(120);
/// In a replay without cycles everything is settled so many seconds after the last evidence.
pub const SETTLED_AFTER: f64 = 30.0;
/// How long an unattributed kill may explain an exit that is reported later.
pub const UNATTRIBUTED_KEPT: Duration = Duration::from_secs(3600);
/// How long a late record can still fill a gap.
pub const LATE_RECORD_TIMEOUT: Duration = Duration::from_secs(600);

// How long an exit waits

/// How long to wait for the runtime's exit event once the kill is known to have ended the container.
pub const MAIN_EXIT_TIMEOUT: Duration = Duration::from_millis(500);
/// How long to wait for what Podman replies about a request, which its events lack.
pub const REQUEST_REPLY_TIMEOUT: Duration = Duration::from_millis(1_200);
/// How long the end of a run waits for the last messages of its processes, which are read within some hundredths of a second.
pub const LAST_REPORTS_TIMEOUT: Duration = Duration::from_secs(2);
/// How long to wait for an OOM kill. The kernel's record precedes the runtime's event; without the log, the counters
/// need a moment.
pub const EVIDENCE_TIMEOUT: Duration = Duration::from_secs(3);
/// How long to wait for the exit of a container after a kill in it: as long as [`EXIT_WINDOW`].
pub const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long an end with an error waits for its log. That of a run that no cycle saw is read from the next cycle on, which may be late on a
/// busy machine.
pub const LOG_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait for the message that the process ended by a CUDA error. It unwinds before, and may save its state.
pub const UNCAUGHT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait for the runtime's exit event of a container that has no processes any more, also after a kill in it: a busy runtime
/// reports it late.
pub const EXIT_EVENT_TIMEOUT: Duration = Duration::from_secs(15);
/// The same while the runtime is disconnected: it may reconnect and report the exit.
pub const RECONNECT_TIMEOUT: Duration = Duration::from_secs(600);
/// The same for containers without a runtime.
pub const NO_RUNTIME_TIMEOUT: Duration = Duration::from_secs(3);
/// How long after the next run was noticed an ended run is kept at least: its kills are decided by then.
pub const RUN_DECIDED_AFTER: Duration = Duration::from_secs(15);

// What an exit may follow from

/// How soon after a kill its container ends, where nothing delays it, in seconds.
pub const KILL_TO_EXIT: f64 = 0.25;
/// The same where the kernel first releases much memory. A larger difference shows that two clocks differ.
pub const EXIT_DELAY: f64 = 2.0;
/// A container whose first process exits with SIGKILL's status within this many seconds after a victim was gone was ended by that kill.
/// Reports of one run may be so much out of order.
pub const EXIT_WINDOW: f64 = 5.0;
/// A program may end with an error because of the kill of one of its processes so many seconds before.
pub const CAUSE_WINDOW: f64 = 300.0;
/// An exit at most this many seconds after a stop request that the program may handle is its answer: docker stop waits
/// as long.
pub const STOP_TIMEOUT: f64 = 10.0;
/// How many seconds before an exit a stop request still explains it.
pub const STOP_REQUEST_WINDOW: f64 = 600.0;
/// A program that catches a CUDA out-of-memory error and gives up ends within this many seconds.
pub const CUDA_OOM_WINDOW: f64 = 5.0;
/// The same for an error in the log, which does not say whether it was caught. A launcher needs some seconds to notice.
pub const LOG_OOM_WINDOW: f64 = 15.0;
/// An engine stamps the last line of a log at most so many seconds after the end of its run.
pub const LATE_LINE: f64 = 1.0;
/// A launcher ends within this many seconds after one of its processes ended by a CUDA out-of-memory error: it stops the others
/// first.
pub const UNCAUGHT_OOM_WINDOW: f64 = 120.0;
/// An error that ended a process so many seconds before the end of the run did not end the run, however long the process saved its state.
pub const MAX_UNCAUGHT_AGE: f64 = 900.0;
/// Readings of the GPUs of so long before an error show who held it: on a busy host the message of an error is read late.
pub const MAX_RECENT_AGE: Duration = Duration::from_secs(10);
/// Older readings say nothing about the minutes before an error.
pub const MAX_EARLIER_AGE: Duration = Duration::from_secs(360);
/// An error that is read in the log of a container on request is of its run if it was written so many seconds before its start or after
/// its end, at most.
pub const LOG_TOLERANCE: f64 = 5.0;
/// Such an error so many seconds before an end is no cause of it.
pub const MAX_LOGGED_AGE: f64 = 600.0;

#[cfg(test)]
mod tests {
    use super::*;

    trait Seconds {
        fn seconds(self) -> f64;
    }

    impl Seconds for f64 {
        fn seconds(self) -> f64 {
            self
        }
    }

    impl Seconds for Duration {
        fn seconds(self) -> f64 {
            self.as_secs_f64()
        }
    }

    /// Checks that each is less than the next one.
    macro_rules! is_ordered {
        ($($name:ident)<+) => {
            for pair in [$((stringify!($name), $name.seconds())),+].windows(2) {
                let [(less, least), (more, most)] = pair else { unreachable!() };
                assert!(least < most, "{less}, {least} s, has to be less than {more}, {most} s");
            }
        };
    }

    #[test]
    fn evidence_is_complete_before_a_decision_needs_it() {
        // a kill without a record exists as a gap before an exit stops waiting for it
        is_ordered!(RECORD_TIMEOUT < EVIDENCE_TIMEOUT);
        // the runtimes' OOM events have arrived when they are used, and an exit has waited for them
        is_ordered!(MAX_OOM_EVENT_DELAY < RUNTIME_EVENT_DELAY < EVIDENCE_TIMEOUT);
        is_ordered!(REQUEST_REPLY_TIMEOUT < EVIDENCE_TIMEOUT);
        is_ordered!(MAIN_EXIT_TIMEOUT < EVIDENCE_TIMEOUT < EXIT_TIMEOUT);
        is_ordered!(LAST_REPORTS_TIMEOUT < EXIT_TIMEOUT);
        // the run of a kill is known before the kill is settled as a child's
        is_ordered!(RUNTIME_EVENT_TIMEOUT < EXIT_TIMEOUT);
        assert_eq!(EXIT_TIMEOUT, Duration::from_secs_f64(EXIT_WINDOW), "waits for what is in the window");
    }

    #[test]
    fn kill_is_attributed_before_its_evidence_is_given_up() {
        is_ordered!(EXIT_TIMEOUT < FORCED_MATCH_AFTER < ATTRIBUTION_TIMEOUT < COUNTER_TIMEOUT < EXIT_EVENT_TIMEOUT);
        let noticed_late = ATTRIBUTION_TIMEOUT + RECORD_TIMEOUT;
        is_ordered!(noticed_late < COUNTER_TIMEOUT);
        // a run is kept until its kills are decided
        assert!(RUN_DECIDED_AFTER >= EXIT_EVENT_TIMEOUT && RUN_DECIDED_AFTER > COUNTER_TIMEOUT);
        is_ordered!(ATTRIBUTION_TIMEOUT < MAX_TEARDOWN < LATE_RECORD_TIMEOUT < UNATTRIBUTED_KEPT);
    }

    #[test]
    fn past_is_decided_when_a_catch_up_takes_it_for_decided() {
        let last_kill = ATTRIBUTION_TIMEOUT + EXIT_EVENT_TIMEOUT;
        is_ordered!(last_kill < SETTLED_AFTER);
    }

    #[test]
    fn exit_of_a_run_is_reported_before_it_is_assumed() {
        is_ordered!(MAX_END_EVENT_DELAY < EXIT_EVENT_TIMEOUT < RECONNECT_TIMEOUT);
        is_ordered!(NO_RUNTIME_TIMEOUT < EXIT_EVENT_TIMEOUT);
        is_ordered!(MAX_DISORDER < MAX_EVENT_DELAY < MAX_LIVE_EVENT_DELAY);
    }

    #[test]
    fn windows_of_one_moment_are_within_those_of_causes() {
        is_ordered!(CLOCK_TOLERANCE < LOG_DELAY < KILL_TO_EXIT < EXIT_DELAY < EXIT_WINDOW < CAUSE_WINDOW < STOP_REQUEST_WINDOW);
        is_ordered!(LOG_DELAY < RECORD_DELAY < EXIT_DELAY);
        is_ordered!(EXIT_WINDOW < STOP_TIMEOUT < STOP_REQUEST_WINDOW);
        is_ordered!(CUDA_OOM_WINDOW < LOG_OOM_WINDOW < UNCAUGHT_OOM_WINDOW < CAUSE_WINDOW < MAX_LOGGED_AGE < MAX_UNCAUGHT_AGE);
        is_ordered!(CLOCK_TOLERANCE < START_TOLERANCE < MIN_PAUSE < MAX_START_EVENT_DELAY);
        let kept = USAGE_KEPT + CLOCK_TOLERANCE; // a victim that is still listed is in it
        is_ordered!(LISTED_AFTER_KILL < kept);
    }
}
