//! Events of the Docker API, as facts for the ledger.
//!
//! An event names the container, its image and its labels itself, so a container that lives for 20 ms has a name before
//! anything else is asked. Podman (seen: 4.3) says `remove` for `destroy`, gives every event an exit code that means
//! nothing but in `die`, and names no signal in `kill`.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use bollard::models::EventMessage;

use crate::clock::Moment;
use crate::config::Filter;
use crate::discover::registry::lasting_name;
use crate::discover::{ContainerId, Fact, Named, Record, What};
use crate::series::bounded;

/// The events that are asked for. `died` is Podman's own word for `die`.
pub const ASKED_FOR: [&str; 10] =
    ["create", "start", "die", "died", "destroy", "remove", "rename", "oom", "kill", "stop"];
/// Events that are remembered so that they are told once. Asking from a whole second repeats those of two seconds.
const REMEMBERED: usize = 4_096;

/// What an event is about.
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
pub struct Event {
    pub id: ContainerId,
    pub action: Action,
    /// Unix time.
    pub at: f64,
    nanos: Option<i64>,
    attributes: HashMap<String, String>,
}

impl Event {
    /// Reads an event; `None` if it is none of those asked for. `now` stands in where the event has no time.
    pub fn read(message: EventMessage, now: Moment) -> Option<Self> {
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
            id: ContainerId::new(&actor.id?),
            action,
            at: nanos.or(message.time.map(|time| time as f64)).unwrap_or(now.unix_seconds()),
            nanos: message.time_nano,
            attributes: actor.attributes.unwrap_or_default(),
        })
    }

    /// What the ledger is told. `open`: a run of this container has begun and its end was not told.
    pub fn fact(&self, runtime: &'static str, filter: &Filter, open: bool) -> Option<Fact> {
        let number = |key: &str| self.attributes.get(key).and_then(|value| value.parse().ok());
        let what = match self.action {
            Action::Create => What::Exists,
            Action::Start => What::Started,
            Action::Die => What::Ended {
                exit_code: number("exitCode").or_else(|| number("containerExitCode")),
                oom_flag: None,
            },
            // its end is overdue, and nobody can be asked any more
            Action::Remove if open => What::Ended { exit_code: None, oom_flag: None },
            Action::Remove => return None,
            Action::Rename => What::Renamed,
            Action::Oom => What::Oom,
            Action::Kill | Action::Stop => {
                What::Asked { signal: self.attributes.get("signal").and_then(|text| signal(text)) }
            }
        };
        Some(Fact { runtime, id: self.id.clone(), at: self.at, named: self.named(filter), what })
    }

    fn named(&self, filter: &Filter) -> Option<Named> {
        let image = self.attributes.get("image").map_or("", String::as_str);
        let name = self.attributes.get("name").filter(|name| !name.is_empty())?;
        Some(named(name, image, filter.labels_match(&self.attributes)))
    }

    /// The record of a run that nothing but this event tells of; `None` without a name.
    pub fn record(&self, runtime: &'static str, filter: &Filter) -> Option<Record> {
        let value = |key: &str| bounded(self.attributes.get(key).map_or("", String::as_str));
        let record = Record {
            id: self.id.clone(),
            runtime,
            name: value("name").trim_start_matches('/').to_owned(),
            pod: None,
            image: value("image"),
            compose_project: value("com.docker.compose.project"),
            compose_service: value("com.docker.compose.service"),
            settings: vec![],
            gpus: Arc::default(),
            started: Some(self.at),
            labels_match: filter.labels_match(&self.attributes),
        };
        (!record.name.is_empty()).then_some(record)
    }
}

/// Who a container is, for the ledger: under the name that stays.
pub fn named(name: &str, image: &str, labels_match: bool) -> Named {
    let name = bounded(lasting_name(name.trim_start_matches('/')));
    Named { name, pod: None, image: bounded(image), labels_match }
}

/// The number of a signal, from its number or its name with or without `SIG`; those of Linux on x86 and Arm.
fn signal(text: &str) -> Option<i32> {
    const NAMES: &[(&str, i32)] = &[
        ("HUP", libc::SIGHUP),
        ("INT", libc::SIGINT),
        ("QUIT", libc::SIGQUIT),
        ("ILL", libc::SIGILL),
        ("TRAP", libc::SIGTRAP),
        ("ABRT", libc::SIGABRT),
        ("BUS", libc::SIGBUS),
        ("FPE", libc::SIGFPE),
        ("KILL", libc::SIGKILL),
        ("USR1", libc::SIGUSR1),
        ("SEGV", libc::SIGSEGV),
        ("USR2", libc::SIGUSR2),
        ("PIPE", libc::SIGPIPE),
        ("ALRM", libc::SIGALRM),
        ("TERM", libc::SIGTERM),
        ("CHLD", libc::SIGCHLD),
        ("CONT", libc::SIGCONT),
        ("STOP", libc::SIGSTOP),
        ("TSTP", libc::SIGTSTP),
        ("TTIN", libc::SIGTTIN),
        ("TTOU", libc::SIGTTOU),
        ("URG", libc::SIGURG),
        ("XCPU", libc::SIGXCPU),
        ("XFSZ", libc::SIGXFSZ),
        ("VTALRM", libc::SIGVTALRM),
        ("PROF", libc::SIGPROF),
        ("WINCH", libc::SIGWINCH),
        ("IO", libc::SIGIO),
        ("PWR", libc::SIGPWR),
        ("SYS", libc::SIGSYS),
        ("RTMIN", 34), // the first that the C library leaves to programs; systemd is stopped by RTMIN+3
    ];
    if let Ok(number) = text.parse() {
        return Some(number).filter(|number| (1..=64).contains(number));
    }
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let (name, more) = match name.split_once('+') {
        Some((name @ "RTMIN", more)) => {
            (name, more.parse::<i32>().ok().filter(|more| (0..=30).contains(more))?)
        }
        _ => (name, 0),
    };
    NAMES.iter().find(|(known, _)| *known == name).map(|(_, number)| number + more)
}

/// Tells an event that was seen from one that was not. By the whole event and not by its time: clocks are set back.
#[derive(Debug, Default)]
pub struct Seen {
    order: VecDeque<u64>,
    known: HashSet<u64>,
}

impl Seen {
    /// True the first time. An event without an exact time is always new.
    pub fn is_new(&mut self, event: &Event) -> bool {
        let Some(nanos) = event.nanos else { return true };
        let mut hasher = DefaultHasher::new();
        (nanos, &event.id, event.action).hash(&mut hasher);
        let mark = hasher.finish();
        if !self.known.insert(mark) {
            return false;
        }
        self.order.push_back(mark);
        if self.order.len() > REMEMBERED
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

    /// An event as the API sends it, at these nanoseconds since 1970.
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

    /// As [`message`], read.
    pub fn event(id: &str, action: &str, nanos: i64, attributes: &[(&str, &str)]) -> Event {
        Event::read(message(id, action, nanos, attributes), Moment::now()).unwrap()
    }

    fn what(action: &str, attributes: &[(&str, &str)], open: bool) -> Option<What> {
        event("a", action, 1, attributes).fact("docker", &Filter::default(), open).map(|fact| fact.what)
    }

    #[test]
    fn an_event_names_its_container_by_the_name_that_stays() {
        let attributes = [
            ("name", "0123456789ab_train-1"),
            ("image", "i:1"),
            ("team", "speech"),
            ("containerExitCode", "0"),
        ];
        let filter = Filter { labels: vec![("team".into(), Some("vision".into()))], ..Filter::default() };
        let start = event("a", "start", 1_000_500_000_000, &attributes);
        let fact = start.fact("podman", &filter, false).unwrap();
        assert_eq!(
            (fact.runtime, fact.id.as_str(), fact.at, fact.what),
            ("podman", "a", 1_000.5, What::Started)
        );
        let named = fact.named.unwrap();
        assert_eq!((&*named.name, &*named.image), ("train-1", "i:1"));
        assert!(!named.labels_match, "told all the same, and marked");
        assert_eq!(event("a", "create", 1, &[]).fact("docker", &filter, false).unwrap().named, None);
    }

    #[test]
    fn an_end_has_its_exit_code_in_the_forms_of_docker_and_podman() {
        let ended = |exit_code| Some(What::Ended { exit_code, oom_flag: None });
        assert_eq!(what("die", &[("exitCode", "137")], true), ended(Some(137)));
        assert_eq!(what("die", &[("containerExitCode", "3"), ("exitCode", "3")], true), ended(Some(3)));
        assert_eq!(what("died", &[("containerExitCode", "3")], true), ended(Some(3)));
        assert_eq!(what("die", &[("exitCode", "?")], true), ended(None));
        // after its end a removal says nothing new; before, it is the end, and Podman's 0 is no exit code
        assert_eq!(what("destroy", &[], false), None);
        assert_eq!(what("remove", &[("containerExitCode", "0")], true), ended(None));
    }

    #[test]
    fn who_asked_for_which_signal_is_told_and_an_oom_and_a_new_name_too() {
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
                Some(What::Asked { signal: number }),
                "{text}"
            );
        }
        assert_eq!(what("kill", &[], true), Some(What::Asked { signal: None }), "Podman");
        assert_eq!(what("stop", &[], true), Some(What::Asked { signal: None }));
        assert_eq!(what("oom", &[], true), Some(What::Oom));
        assert_eq!(what("rename", &[("name", "b"), ("oldName", "/a")], true), Some(What::Renamed));
        assert!(Event::read(message("a", "exec_create: sh", 1, &[]), Moment::now()).is_none());
    }

    #[test]
    fn an_event_is_new_once_also_when_the_clock_was_set_back() {
        let mut seen = Seen::default();
        assert!(seen.is_new(&event("a", "die", 5, &[])));
        assert!(!seen.is_new(&event("a", "die", 5, &[])));
        assert!(seen.is_new(&event("b", "die", 5, &[])), "another container in the same nanosecond");
        assert!(seen.is_new(&event("a", "destroy", 5, &[])), "another event in the same nanosecond");
        assert!(seen.is_new(&event("a", "die", 4, &[])), "earlier, and never seen");
        for nanos in 10..10 + REMEMBERED as i64 {
            assert!(seen.is_new(&event("a", "oom", nanos, &[])));
        }
        assert_eq!((seen.known.len(), seen.order.len()), (REMEMBERED, REMEMBERED), "bounded");
    }
}
