//! Who pushes: the attributes of the resource, by OpenTelemetry's semantic conventions.

use opentelemetry_proto::tonic::common::v1::{InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;

use super::text;

/// What is known of this host and this memledger.
#[derive(Clone, Debug, Default)]
pub struct Host {
    /// The host's name; empty if not known.
    pub name: String,
    /// `/etc/machine-id` of the host; empty if not known.
    pub id: String,
    /// The port that memledger serves on; with the name of the host it tells instances apart.
    pub port: Option<u16>,
}

/// The resource. What was set by hand wins.
pub fn resource(host: &Host, set: &[(String, String)]) -> Resource {
    let instance = match host.port {
        Some(port) => format!("{}:{port}", host.name),
        None => host.name.clone(),
    };
    let found = [
        ("service.name", "memledger"),
        ("service.version", env!("CARGO_PKG_VERSION")),
        ("service.instance.id", &instance),
        ("host.name", &host.name),
        ("host.id", &host.id),
    ];
    let is_set = |key: &str| set.iter().any(|(name, _)| name == key);
    let mut attributes: Vec<KeyValue> = vec![];
    for (key, value) in found.into_iter().filter(|(key, value)| !value.is_empty() && !is_set(key)) {
        attributes.push(text(key, value));
    }
    for (at, (key, value)) in set.iter().enumerate() {
        // the last of several wins: a receiver need not take a key twice
        if !set[at + 1..].iter().any(|(later, _)| later == key) {
            attributes.push(text(key, value));
        }
    }
    Resource { attributes, ..Resource::default() }
}

/// Who measured: this program and its version.
pub fn scope() -> InstrumentationScope {
    InstrumentationScope {
        name: "memledger".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..InstrumentationScope::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_set_by_hand_wins_and_what_is_not_known_is_left_out() {
        let host = Host { name: "gpu-7".to_owned(), id: String::new(), port: Some(10853) };
        let set = [("host.name", "a"), ("k8s.node.name", "n"), ("host.name", "b")];
        let set = set.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let keys: Vec<_> = resource(&host, &set).attributes.into_iter().map(|pair| pair.key).collect();
        let expected =
            ["service.name", "service.version", "service.instance.id", "k8s.node.name", "host.name"];
        assert_eq!(keys, expected);
        assert!(resource(&host, &set).attributes.contains(&text("host.name", "b")));
        assert!(resource(&host, &[]).attributes.contains(&text("service.instance.id", "gpu-7:10853")));
    }
}
