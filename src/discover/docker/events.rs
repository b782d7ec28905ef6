//! Converts events of the Docker API into runtime events for the ledger.
//!
//! An event carries the name, image and labels of its container, so a container that lives for 20 ms has a name without another
//! request. Podman (observed: 4.3) sends `remove` instead of `destroy`, adds an exit code to every event that is only valid in
//! `die`, and omits the signal in `kill`.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use bollard::models::EventMessage;
use nix::sys::signal::Signal;

use crate::clock::Timestamp;
use crate::config::{Filter, GROUP_SETTING};
use crate::discover::{ContainerId, ContainerRecord, ContainerSpec, EventKind, RuntimeEvent, RuntimeKind};
use crate::host::bounds::CONTAINER_ID;

/// The subscribed event types. `died` is Podman's name for `die`.
pub const EVENT_TYPES: [&str; 10] =
    ["create", "start", "die", "died", "destroy", "remove", "rename", "oom", "kill", "stop"];
/// Number of remembered events, to drop duplicates: `since` has whole seconds, so events of two seconds are repeated.
const MAX_REMEMBERED: usize = 4_096;

/// The type of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    Create,
    Start,
    Die,
    Remove,
    Rename,
    Oom,
    Kill,
    Stop,
}

/// One event of a container.
#[derive(Debug)]
pub struct DockerEvent {
    pub id: ContainerId,
    pub action: Action,
    /// Unix time.
    pub at: f64,
    nanos: Option<i64>,
    attributes: HashMap<String, String>,
}

impl DockerEvent {
    /// Reads an event; `None` if it is of another type. `now` is used if the event has no time.
    pub fn read(message: EventMessage, now: Timestamp) -> Option<Self> {
        let actor = message.actor?;
        let action = match message.action?.as_str() {
            "create" => Action::Create,
            "start" => Action::Start,
            "die" | "died" => Action::Die,
            "destroy" | "remove" => Action::Remove,
            "rename" => Action::Rename,
            "oom" => Action::Oom,
            "kill" => Action::Kill,
            "stop" => Action::Stop,
            _ => return None,
        };
        let nanos = message.time_nano.map(|nanos| nanos as f64 / 1e9);
        Some(Self {
            id: ContainerId::new(&actor.id.filter(|id| id.len() <= CONTAINER_ID.max_bytes)?),
            action,
            at: nanos.or(message.time.map(|time| time as f64)).unwrap_or(now.unix_seconds()),
            nanos: message.time_nano,
            attributes: actor.attributes.unwrap_or_default(),
        })
    }

    /// Converts it for the ledger. `open`: a run of this container has begun, without an end so far.
    pub fn runtime_event(&self, runtime: RuntimeKind, filter: &Filter, open: bool) -> Option<RuntimeEvent> {
        let number = |key: &str| self.attributes.get(key).and_then(|value| value.parse().ok());
        let what = match self.action {
            Action::Create => EventKind::Exists,
            Action::Start => EventKind::Started,
            Action::Die => EventKind::Ended {
                exit_code: number("exitCode").or_else(|| number("containerExitCode")),
                oom_flag: None,
            },
            // the end of its run was missed, and it can no longer be inspected
            Action::Remove if open => EventKind::Ended { exit_code: None, oom_flag: None },
            Action::Remove => return None,
            Action::Rename => EventKind::Renamed,
            Action::Oom => EventKind::Oom,
            Action::Kill | Action::Stop => EventKind::SignalRequested {
                signal: self.attributes.get("signal").and_then(|text| signal(text)),
            },
        };
        let mut named = self.record(runtime, filter).map(|record| record.spec);
        if let (EventKind::Oom | EventKind::SignalRequested { .. }, Some(spec)) = (&what, &mut named) {
            // there may be many in one run
            Arc::make_mut(spec).settings.retain(|(name, _)| **name == *GROUP_SETTING);
        }
        let socket = Arc::default(); // set by the follower
        Some(RuntimeEvent { runtime, socket, id: self.id.clone(), at: self.at, named, what })
    }

    /// Creates the record of a run from this event alone; `None` without a name.
    pub fn record(&self, runtime: RuntimeKind, filter: &Filter) -> Option<ContainerRecord> {
        let texts = ["name", "image"].map(|key| self.attributes.get(key).map_or("", String::as_str));
        let spec = ContainerSpec::labelled(texts, &self.attributes, filter);
        let is_named = !spec.name.is_empty();
        let record = ContainerRecord::new(self.id.as_str(), runtime, spec);
        is_named.then_some(ContainerRecord { started: Some(self.at), ..record })
    }
}

/// Parses a signal from its number or its name with or without `SIG`; numbers of this machine's Linux.
fn signal(text: &str) -> Option<i32> {
    /// The first real-time signal that the C library does not use; systemd stops on RTMIN+3.
    const RTMIN: i32 = 34;
    if let Ok(number) = text.parse() {
        return Some(number).filter(|number| (1..=64).contains(number));
    }
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    match name.strip_prefix("RTMIN") {
        Some("") => Some(RTMIN),
        Some(above) => {
            let above: i32 = above.strip_prefix('+')?.parse().ok()?;
            (0..=30).contains(&above).then_some(RTMIN + above)
        }
        None => format!("SIG{name}").parse::<Signal>().ok().map(|signal| signal as i32),
    }
}

/// Detects duplicate events, by the whole event and not by its time, because clocks may be set back.
#[derive(Clone, Debug, Default)]
pub struct EventDedup {
    order: VecDeque<u64>,
    known: HashSet<u64>,
}

impl EventDedup {
    /// Returns true the first time. An event without an exact time is always new.
    pub fn is_new(&mut self, event: &DockerEvent) -> bool {
        let Some(nanos) = event.nanos else { return true };
        let mut hasher = DefaultHasher::new();
        (nanos, &event.id, event.action).hash(&mut hasher);
        let mark = hasher.finish();
        if !self.known.insert(mark) {
            return false;
        }
        self.order.push_back(mark);
        if self.order.len() > MAX_REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
        true
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use bollard::models::EventActor;

    /// An event in the API's form, at these nanoseconds since 1970.
    pub fn message(id: &str, action: &str, nanos: i64, attributes: &[(&str, &str)]) -> EventMessage {
        let attributes = attributes.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
        EventMessage {
            action: Some(action.into()),
            actor: Some(EventActor { id: Some(id.into()), attributes: Some(attributes) }),
            time: Some(nanos / 1_000_000_000),
            time_nano: Some(nanos),
            ..Default::default()
        }
    }

    /// As [`message`], parsed.
    pub fn event(id: &str, action: &str, nanos: i64, attributes: &[(&str, &str)]) -> DockerEvent {
        DockerEvent::read(message(id, action, nanos, attributes), Timestamp::now()).unwrap()
    }

    fn what(action: &str, attributes: &[(&str, &str)], open: bool) -> Option<EventKind> {
        event("a", action, 1, attributes)
            .runtime_event(RuntimeKind::Docker, &Filter::default(), open)
            .map(|runtime_event| runtime_event.what)
    }

    #[test]
    fn event_has_details_without_compose_prefix() {
        let attributes = [
            ("name", "0123456789ab_train-1"),
            ("image", "i:1"),
            ("team", "speech"),
            ("memledger.run.seed", "7"),
            ("memledger.run.group", "vision"),
            ("containerExitCode", "0"),
        ];
        let filter = Filter { labels: vec![("team".into(), Some("vision".into()))], ..Filter::default() };
        let start = event("a", "start", 1_000_500_000_000, &attributes);
        let runtime_event = start.runtime_event(RuntimeKind::Podman, &filter, false).unwrap();
        assert_eq!(
            (runtime_event.runtime, runtime_event.id.as_str(), runtime_event.at, runtime_event.what),
            (RuntimeKind::Podman, "a", 1_000.5, EventKind::Started)
        );
        let named = runtime_event.named.unwrap();
        assert_eq!((&*named.identity().name, &*named.image), ("train-1", "i:1"));
        assert!(!named.labels_match, "reported and marked");
        assert_eq!(named.group_setting().map(|group| &**group), Some("vision"));
        assert_eq!(named.settings, [("group".into(), "vision".into()), ("seed".into(), "7".into())]);
        let signal = event("a", "kill", 1, &attributes).runtime_event(RuntimeKind::Docker, &filter, true);
        assert_eq!(
            signal.unwrap().named.unwrap().settings,
            [("group".into(), "vision".into())],
            "there may be many"
        );
        assert_eq!(
            event("a", "create", 1, &[]).runtime_event(RuntimeKind::Docker, &filter, false).unwrap().named,
            None
        );
    }

    #[test]
    fn reads_exit_codes_of_docker_and_podman() {
        let ended = |exit_code| Some(EventKind::Ended { exit_code, oom_flag: None });
        assert_eq!(what("die", &[("exitCode", "137")], true), ended(Some(137)));
        assert_eq!(what("die", &[("containerExitCode", "3"), ("exitCode", "3")], true), ended(Some(3)));
        assert_eq!(what("died", &[("containerExitCode", "3")], true), ended(Some(3)));
        assert_eq!(what("die", &[("exitCode", "?")], true), ended(None));
        // after the end a removal is ignored; before it, it is the end, and Podman's 0 is not an exit code
        assert_eq!(what("destroy", &[], false), None);
        assert_eq!(what("remove", &[("containerExitCode", "0")], true), ended(None));
    }

    #[test]
    fn reads_signals_ooms_and_renames() {
        for (text, number) in [
            ("15", Some(15)),
            ("SIGTERM", Some(15)),
            ("term", Some(15)),
            ("SIGRTMIN+3", Some(37)),
            ("0", None),
            ("SIGNOTHING", None),
            ("KILL+1", None),
            ("", None),
        ] {
            assert_eq!(
                what("kill", &[("signal", text)], true),
                Some(EventKind::SignalRequested { signal: number }),
                "{text}"
            );
        }
        assert_eq!(what("kill", &[], true), Some(EventKind::SignalRequested { signal: None }), "Podman");
        assert_eq!(what("stop", &[], true), Some(EventKind::SignalRequested { signal: None }));
        assert_eq!(what("oom", &[], true), Some(EventKind::Oom));
        assert_eq!(what("rename", &[("name", "b"), ("oldName", "/a")], true), Some(EventKind::Renamed));
        assert!(DockerEvent::read(message("a", "exec_create: sh", 1, &[]), Timestamp::now()).is_none());
    }

    #[test]
    fn event_is_new_once_even_if_clock_was_set_back() {
        let mut seen = EventDedup::default();
        assert!(seen.is_new(&event("a", "die", 5, &[])));
        assert!(!seen.is_new(&event("a", "die", 5, &[])));
        assert!(seen.is_new(&event("b", "die", 5, &[])), "another container in the same nanosecond");
        assert!(seen.is_new(&event("a", "destroy", 5, &[])), "another event in the same nanosecond");
        assert!(seen.is_new(&event("a", "die", 4, &[])), "earlier, and new");
        for nanos in 10..10 + MAX_REMEMBERED as i64 {
            assert!(seen.is_new(&event("a", "oom", nanos, &[])));
        }
        assert_eq!((seen.known.len(), seen.order.len()), (MAX_REMEMBERED, MAX_REMEMBERED), "bounded");
    }
}
