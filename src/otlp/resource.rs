//! The resource of all exports, by OpenTelemetry's semantic conventions.

use opentelemetry_proto::tonic::common::v1::{InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;

use super::encoding::text;

/// Facts about this host and this memledger.
#[derive(Clone, Debug, Default)]
pub struct ResourceInfo {
    /// The host's name; empty if unknown.
    pub name: String,
    /// The host's `/etc/machine-id`; empty if unknown.
    pub id: String,
    /// The name of the host, or of memledger's container where that of the host is unknown.
    pub instance: String,
    /// The port that memledger serves on; with `instance` it identifies this memledger.
    pub port: Option<u16>,
}

/// Builds the resource. Configured attributes win over detected ones.
pub fn resource(host: &ResourceInfo, set: &[(String, String)]) -> Resource {
    let instance = match host.port {
        Some(port) => format!("{}:{port}", host.instance),
        None => host.instance.clone(),
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
        // the last of several wins: receivers may reject duplicate keys
        if !set[at + 1..].iter().any(|(later, _)| later == key) {
            attributes.push(text(key, value));
        }
    }
    Resource { attributes, ..Resource::default() }
}

/// Returns the instrumentation scope: this program and its version.
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
    fn configured_attributes_win_and_unknown_ones_are_omitted() {
        let host = ResourceInfo {
            name: "gpu-7".to_owned(),
            id: String::new(),
            instance: "gpu-7".to_owned(),
            port: Some(10853),
        };
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
