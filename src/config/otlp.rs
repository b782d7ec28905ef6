//! Settings of the OTLP export: flags, and the standard variables of OpenTelemetry.
//!
//! A flag, its own variable and the file work as for every setting. Between them are the standard variables, by the
//! OpenTelemetry specification: the variable of one signal (`OTEL_EXPORTER_OTLP_LOGS_TIMEOUT`) overrides the general one, an
//! empty one is unset, and an invalid one is ignored and logged at start. The order of precedence: flag, `MEMLEDGER_`
//! variable, `OTEL_` variables, file, default. Nothing is exported unless an endpoint is set.

use std::path::PathBuf;
use std::time::Duration;

use axum::http::Uri;
use axum::http::header::{HeaderName, HeaderValue};
use percent_encoding::percent_decode_str;

use super::declare::{
    Setting, SettingGroup, Source, choice, duration, parse_duration, path, secret, setting, settings, switch,
    text,
};
use super::sources::{Layer, RawValue, Values, invalid};
use super::{ConfigError, setting as setting_of};

const MS: Duration = Duration::from_millis(1);
const HOUR: Duration = Duration::from_secs(3600);

settings! {
    /// The export as it is set by flags, variables and the file, for one signal or for all.
    struct OtlpFlags {
        /// URL to export metrics, events and traces to over OTLP, such as http://collector:4318. Without it, or one of OpenTelemetry's
        /// own variables, nothing is exported: see docs/otlp.md.
        endpoint: Option<String> = secret(text("otlp.endpoint", &[], |text| endpoint(text, true, false).map(|_| text.to_owned())));
        /// Protocol of OTLP. Collectors usually listen for gRPC on port 4317 and for HTTP on port 4318.
        grpc: bool = choice("otlp.protocol", &["http/protobuf"], &[("grpc", true), ("http/protobuf", false)]);
        /// Header sent with every request, KEY=VALUE, percent-encoded. Every user of the host can see flags: prefer the
        /// environment or the file.
        headers: Vec<(HeaderName, HeaderValue)> = secret(text("otlp.headers", &[], header));
        /// Compression of requests.
        gzip: bool = choice("otlp.compression", &["none"], &[("gzip", true), ("none", false)]);
        /// Time between two exports of metrics, 100ms to 24h.
        interval: Duration = duration("otlp.interval", &["60s"], 100 * MS, 24 * HOUR);
        /// Timeout of one request, 1ms to 1h.
        timeout: Duration = duration("otlp.timeout", &["10s"], MS, HOUR);
        /// PEM file of the trusted certificate authorities. Default: those of the host.
        certificate: Option<PathBuf> = path("otlp.certificate", &[]);
        /// PEM file of memledger's own certificate.
        client_certificate: Option<PathBuf> = path("otlp.client-certificate", &[]);
        /// PEM file of the key of memledger's own certificate.
        client_key: Option<PathBuf> = path("otlp.client-key", &[]);
        /// No TLS for a gRPC endpoint set as HOST:PORT. A URL has its own scheme.
        insecure: bool = switch("otlp.insecure", &["false"]);
        /// Export metrics if an endpoint is set.
        metrics: bool = switch("otlp.metrics", &["true"]);
        /// Export the ledger's events as log records if an endpoint is set.
        logs: bool = switch("otlp.logs", &["true"]);
        /// Export traces of memledger's own work if an endpoint is set: cycles, collectors, calls of runtimes, transactions of the
        /// ledger, readings of NVML, HTTP requests. See docs/otlp.md.
        traces: bool = switch("otlp.traces", &["false"]);
        /// Share of the traces that are recorded, 0 to 1.
        traces_ratio: f64 = setting("otlp.traces-ratio", ("RATIO", RATIO), &["0.1"], ratio);
        /// Timeout of the last export when memledger stops, 0s to 1h.
        shutdown_timeout: Duration = duration("otlp.shutdown-timeout", &["5s"], Duration::ZERO, HOUR);
    }
}

/// Settings of the OTLP export.
#[derive(Clone, Debug)]
pub struct OtlpSettings {
    /// The target of metrics; `None`: off.
    pub metrics: Option<OtlpTarget>,
    /// The target of events, as log records; `None`: off.
    pub logs: Option<OtlpTarget>,
    /// The target of traces; `None`: off.
    pub traces: Option<OtlpTarget>,
    /// Share of the traces that are recorded.
    pub traces_ratio: f64,
    /// Time between two exports of metrics.
    pub interval: Duration,
    /// Timeout of the last export when memledger stops.
    pub shutdown_timeout: Duration,
    /// Resource attributes from the environment, including `service.name` if it is set.
    pub resource: Vec<(String, String)>,
}

/// The target of one signal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtlpTarget {
    /// The server.
    pub endpoint: OtlpEndpoint,
    /// gRPC instead of HTTP with protobuf.
    pub grpc: bool,
    /// Headers of every request.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Compress requests with gzip.
    pub gzip: bool,
    /// Timeout of one request.
    pub timeout: Duration,
    /// PEM file of the trusted certificate authorities; `None`: those of the host.
    pub certificate: Option<PathBuf>,
    /// PEM files of memledger's own certificate and its key.
    pub client: Option<(PathBuf, PathBuf)>,
}

/// The address of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtlpEndpoint {
    /// Connect with TLS.
    pub tls: bool,
    /// The host name or address, without brackets.
    pub host: String,
    /// The port.
    pub port: u16,
    /// The path of the resource; unused by gRPC.
    pub path: String,
}

impl OtlpEndpoint {
    /// Appends a path; a query stays last.
    fn append(&mut self, path: &str) {
        let (base, query) = match self.path.split_once('?') {
            Some((base, query)) => (base, format!("?{query}")),
            None => (self.path.as_str(), String::new()),
        };
        self.path = format!("{}{path}{query}", base.trim_end_matches('/'));
    }

    /// Returns host and port in the form of a URL.
    pub fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

/// Omits path and query: for some receivers they contain a token.
impl std::fmt::Display for OtlpEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(f, "{scheme}://{}", self.authority())
    }
}

/// An exported signal.
#[derive(Clone, Copy, Debug)]
pub struct Signal {
    /// Its word in the standard variables.
    word: &'static str,
    /// Its path below a general endpoint, over HTTP.
    path: &'static str,
    /// Its switch.
    key: &'static str,
}

impl Signal {
    /// Returns its name.
    pub fn name(self) -> &'static str {
        self.key.trim_start_matches("otlp.")
    }
}

/// All signals.
pub const SIGNALS: [Signal; 3] = [METRICS, LOGS, TRACES];
const METRICS: Signal = Signal { word: "METRICS", path: "/v1/metrics", key: "otlp.metrics" };
const LOGS: Signal = Signal { word: "LOGS", path: "/v1/logs", key: "otlp.logs" };
const TRACES: Signal = Signal { word: "TRACES", path: "/v1/traces", key: "otlp.traces" };

/// Converts a standard variable to values of a setting.
type Convert = fn(&str) -> Result<Vec<String>, String>;

/// Settings with standard variables: the end of the variable's name for all signals and for one, or its whole name.
const STANDARD: &[(&str, &str, Convert)] = &[
    ("otlp.protocol", "PROTOCOL", as_is),
    ("otlp.insecure", "INSECURE", only_true),
    ("otlp.certificate", "CERTIFICATE", as_is),
    ("otlp.client-certificate", "CLIENT_CERTIFICATE", as_is),
    ("otlp.client-key", "CLIENT_KEY", as_is),
    ("otlp.headers", "HEADERS", list),
    ("otlp.compression", "COMPRESSION", as_is),
    ("otlp.timeout", "TIMEOUT", milliseconds),
    ("otlp.interval", "OTEL_METRIC_EXPORT_INTERVAL", milliseconds),
    ("otlp.traces-ratio", "OTEL_TRACES_SAMPLER_ARG", as_is),
];

/// The settings of the export.
pub struct Otlp;

impl Source<Option<OtlpSettings>> for Otlp {
    fn declare(self, _: &'static str, table: &mut Vec<Setting>) {
        OtlpFlags::declare(table);
    }

    fn read(self, values: &Values<'_>) -> Result<Option<OtlpSettings>, ConfigError> {
        Resolver { values, ignored: vec![] }.settings()
    }
}

/// The standard variables that are ignored, and why.
pub struct Ignored;

impl Source<Vec<String>> for Ignored {
    fn declare(self, _: &'static str, _: &mut Vec<Setting>) {}

    fn read(self, values: &Values<'_>) -> Result<Vec<String>, ConfigError> {
        let mut resolver = Resolver { values, ignored: vec![] };
        resolver.settings()?;
        Ok(resolver.ignored)
    }
}

/// Returns the signals that standard variables switch off: the key of each, and its value with its origin.
pub fn switched_off(values: &Values<'_>) -> Vec<(&'static str, RawValue)> {
    let mut resolver = Resolver { values, ignored: vec![] };
    let mut is_off = |signal: &Signal| {
        let is_on = values.text(signal.key) == "true";
        let exporter = format!("OTEL_{}_EXPORTER", signal.word);
        match () {
            () if is_on && resolver.is_disabled() => Some(DISABLED.to_owned()),
            () if is_on && !values.is_explicit(signal.key) && resolver.has_other_exporter(*signal) => {
                Some(exporter)
            }
            () => None,
        }
    };
    let off = |origin| RawValue { text: "false".to_owned(), origin, layer: Layer::Standard };
    SIGNALS.iter().filter_map(|signal| Some((signal.key, off(is_off(signal)?)))).collect()
}

/// Returns the settings of one signal that standard variables set: key, and value with its origin.
pub fn standard_values(values: &Values<'_>, signal: Signal) -> Vec<(&'static str, RawValue)> {
    if values.text(signal.key) != "true" {
        return vec![];
    }
    let signal_values = Resolver { values, ignored: vec![] }.values_of(signal);
    let keys = STANDARD.iter().map(|(key, ..)| *key).chain(["otlp.endpoint"]);
    let all = keys.flat_map(|key| signal_values.of(key).iter().map(move |given| (key, given.clone())));
    all.filter(|(_, given)| given.layer == Layer::Standard).collect()
}

/// Switches the SDKs of OpenTelemetry off.
const DISABLED: &str = "OTEL_SDK_DISABLED";

/// Merges the standard variables into the values.
struct Resolver<'v> {
    values: &'v Values<'v>,
    ignored: Vec<String>,
}

impl<'v> Resolver<'v> {
    fn settings(&mut self) -> Result<Option<OtlpSettings>, ConfigError> {
        let metrics = self.target(METRICS)?;
        let logs = self.target(LOGS)?;
        let traces = self.target(TRACES)?;
        let flags = OtlpFlags::read(&self.values_of(METRICS))?;
        let resource = self.resource();
        if self.is_disabled() && SIGNALS.iter().any(|signal| self.has_endpoint(*signal)) {
            self.ignored.push(format!("{DISABLED}=true: the OTLP export is off"));
        }
        if metrics.is_none() && logs.is_none() && traces.is_none() {
            return Ok(None);
        }
        if self.is_true(DISABLED) {
            self.ignored
                .push(format!("{DISABLED}=true is ignored: --otlp.endpoint or its own variable is set"));
        }
        if metrics.is_some() {
            self.check_temporality();
        }
        let OtlpFlags { interval, shutdown_timeout, traces_ratio, .. } = flags;
        Ok(Some(OtlpSettings { metrics, logs, traces, traces_ratio, interval, shutdown_timeout, resource }))
    }

    /// Counters are exported as totals: one that outlives a restart of memledger, or of a container that is seen late, has no
    /// right first delta. A collector sees both ends of an increase.
    fn check_temporality(&mut self) {
        let name = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE";
        if self.standard(name).is_some_and(|text| text.eq_ignore_ascii_case("delta")) {
            self.ignored.push(format!(
                "{name}=delta is ignored: totals are exported; for a backend that takes only deltas use the collector's processor \
                 cumulative_to_delta (docs/otlp.md)"
            ));
        }
    }

    /// Returns whether the export is off, whatever the signals are.
    fn is_disabled(&self) -> bool {
        self.is_true(DISABLED) && !self.values.is_explicit("otlp.endpoint")
    }

    fn is_true(&self, name: &str) -> bool {
        self.standard(name).is_some_and(|text| text.eq_ignore_ascii_case("true"))
    }

    fn has_endpoint(&mut self, signal: Signal) -> bool {
        self.values_of(signal).of("otlp.endpoint").iter().any(|given| !given.text.is_empty())
    }

    /// Returns the value of a standard variable; an empty one is unset.
    fn standard(&self, name: &str) -> Option<String> {
        (self.values.environment)(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    /// Notes an invalid standard variable. The text omits the value, which may be a secret.
    fn ignore(&mut self, name: &str, expected: &str) {
        let text = format!("{name} is ignored: its value is not valid; expected {expected}");
        if !self.ignored.contains(&text) {
            self.ignored.push(text);
        }
    }

    /// Returns the values for one signal: flags and own variables, then standard variables, then file and defaults.
    fn values_of(&mut self, signal: Signal) -> Values<'v> {
        let mut merged = self.values.clone();
        for (key, name, convert) in STANDARD {
            if self.values.is_explicit(key) {
                continue;
            }
            let names = match name.strip_prefix("OTEL_") {
                Some(_) => vec![(*name).to_owned()],
                None => variables(signal, name),
            };
            for name in names {
                let Some(text) = self.standard(&name) else { continue };
                match convert(&text).and_then(|texts| check(key, texts)) {
                    Ok(texts) => {
                        merged.set(key, standard_value(texts, &name));
                        break;
                    }
                    Err(expected) => self.ignore(&name, &expected),
                }
            }
        }
        if !self.values.is_explicit("otlp.endpoint") {
            let (grpc, insecure) =
                (merged.text("otlp.protocol") == "grpc", merged.text("otlp.insecure") == "true");
            for name in variables(signal, "ENDPOINT") {
                let Some(text) = self.standard(&name) else { continue };
                match endpoint(&text, grpc, insecure) {
                    Ok(_) => {
                        merged.set("otlp.endpoint", standard_value(vec![text], &name));
                        break;
                    }
                    Err(expected) => self.ignore(&name, &expected),
                }
            }
        }
        merged
    }

    fn target(&mut self, signal: Signal) -> Result<Option<OtlpTarget>, ConfigError> {
        let values = self.values_of(signal);
        let flags = OtlpFlags::read(&values)?;
        let is_on = Source::<bool>::read(switch(signal.key, &[]), &values)?;
        if !is_on || (!self.values.is_explicit(signal.key) && self.has_other_exporter(signal)) {
            return Ok(None);
        }
        let Some(given) = values.of("otlp.endpoint").iter().find(|given| !given.text.is_empty()) else {
            return Ok(None);
        };
        let mut endpoint = endpoint(&given.text, flags.grpc, flags.insecure)
            .map_err(|expected| invalid("otlp.endpoint", given, &expected))?;
        if flags.grpc {
            endpoint.path.clear();
        } else if given.origin != variables(signal, "ENDPOINT")[0] {
            endpoint.append(signal.path);
        }
        let client = match (flags.client_certificate, flags.client_key) {
            (None, None) => None,
            (Some(certificate), Some(key)) => Some((certificate, key)),
            _ => {
                return Err(ConfigError::Value {
                    origin: "--otlp.client-certificate, --otlp.client-key".to_owned(),
                    what: "set both or neither".to_owned(),
                });
            }
        };
        let OtlpFlags { grpc, headers, gzip, timeout, certificate, .. } = flags;
        Ok(Some(OtlpTarget { endpoint, grpc, headers, gzip, timeout, certificate, client }))
    }

    /// Returns true if the standard variable names exporters for this signal, and OTLP is not among them.
    fn has_other_exporter(&mut self, signal: Signal) -> bool {
        let name = format!("OTEL_{}_EXPORTER", signal.word);
        let Some(text) = self.standard(&name) else { return false };
        let text = text.to_ascii_lowercase();
        let words = || text.split(',').map(str::trim);
        if words().any(|word| word == "otlp") {
            return false;
        }
        let are_known = words().all(|word| ["none", "console", "logging", "prometheus"].contains(&word));
        if !are_known {
            self.ignore(&name, "otlp, or none, console, prometheus, which switch the OTLP export off");
        }
        are_known
    }

    fn resource(&mut self) -> Vec<(String, String)> {
        let name = "OTEL_RESOURCE_ATTRIBUTES";
        let mut attributes = match self.standard(name).map(|text| pairs(&text)).transpose() {
            Ok(attributes) => attributes.unwrap_or_default(),
            Err(expected) => {
                self.ignore(name, &expected); // the whole value, by the specification
                vec![]
            }
        };
        if let Some(service) = self.standard("OTEL_SERVICE_NAME") {
            attributes.retain(|(key, _)| key != "service.name");
            attributes.push(("service.name".to_owned(), service));
        }
        attributes
    }
}

/// Returns the standard variables of a setting: the one of the signal overrides the general one.
fn variables(signal: Signal, name: &str) -> Vec<String> {
    vec![format!("OTEL_EXPORTER_OTLP_{}_{name}", signal.word), format!("OTEL_EXPORTER_OTLP_{name}")]
}

fn standard_value(texts: Vec<String>, name: &str) -> Vec<RawValue> {
    let raw = |text| RawValue { text, origin: name.to_owned(), layer: Layer::Standard };
    texts.into_iter().map(raw).collect()
}

fn check(key: &str, texts: Vec<String>) -> Result<Vec<String>, String> {
    let setting = setting_of(key).ok_or_else(|| "a known setting".to_owned())?;
    texts.iter().try_for_each(|text| (setting.check)(text))?;
    Ok(texts)
}

fn as_is(text: &str) -> Result<Vec<String>, String> {
    Ok(vec![text.to_owned()])
}

/// By the specification, only true is true.
fn only_true(text: &str) -> Result<Vec<String>, String> {
    Ok(vec![text.eq_ignore_ascii_case("true").to_string()])
}

fn list(text: &str) -> Result<Vec<String>, String> {
    Ok(text.split(',').filter(|pair| !pair.trim().is_empty()).map(str::to_owned).collect())
}

fn milliseconds(text: &str) -> Result<Vec<String>, String> {
    let duration = text.parse::<u64>().ok().map(|number| format!("{number}ms"));
    let duration = duration.filter(|text| parse_duration(text).is_some_and(|span| !span.is_zero()));
    duration.map(|text| vec![text]).ok_or_else(|| "milliseconds, a whole number above 0".to_owned())
}

const RATIO: &str = "a number from 0 to 1";

fn ratio(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio)).ok_or_else(|| RATIO.to_owned())
}

/// Returns scheme, host and port of an endpoint.
pub fn authority(text: &str) -> Option<String> {
    let endpoint = endpoint(text, true, false).ok()?;
    let scheme = text.split_once("://").map(|(scheme, _)| format!("{scheme}://")).unwrap_or_default();
    Some(scheme + &endpoint.authority())
}

fn endpoint(text: &str, grpc: bool, insecure: bool) -> Result<OtlpEndpoint, String> {
    let expected = || {
        let bare = if grpc { ", or HOST:PORT" } else { "" };
        format!("a URL such as https://collector:4318{bare}, without user and password (--otlp.headers)")
    };
    let full = match text.split_once("://") {
        Some(_) => text.to_owned(),
        None if grpc => format!("{}://{text}", if insecure { "http" } else { "https" }),
        None => return Err(expected()),
    };
    let uri: Uri = full.parse().map_err(|_| expected())?;
    let tls = match uri.scheme_str() {
        Some("https") => true,
        Some("http") => false,
        _ => return Err(expected()),
    };
    let authority =
        uri.authority().filter(|authority| !authority.as_str().contains('@')).ok_or_else(expected)?;
    let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
    if host.is_empty() || authority.port().is_some() != authority.port_u16().is_some() {
        return Err(expected());
    }
    let port = authority.port_u16().unwrap_or(if tls { 443 } else { 80 });
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let slash = if path.starts_with('/') { "" } else { "/" }; // https://collector?key=value has only a query
    Ok(OtlpEndpoint { tls, host, port, path: format!("{slash}{path}") })
}

/// Parses `KEY=VALUE`, the value percent-encoded where it contains a comma or the like.
fn header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let expected = || "KEY=VALUE, the value percent-encoded where it contains a comma".to_owned();
    let (key, value) = pair(text).ok_or_else(expected)?;
    let name = HeaderName::from_bytes(key.to_ascii_lowercase().as_bytes()).map_err(|_| expected())?;
    let mut value = HeaderValue::from_str(&value).map_err(|_| expected())?;
    value.set_sensitive(true);
    Ok((name, value))
}

fn pairs(text: &str) -> Result<Vec<(String, String)>, String> {
    let parts = text.split(',').filter(|part| !part.trim().is_empty());
    let parsed: Option<Vec<_>> = parts.map(pair).collect();
    parsed
        .ok_or_else(|| "KEY=VALUE,KEY=VALUE, percent-encoded where a value contains a comma or =".to_owned())
}

fn pair(text: &str) -> Option<(String, String)> {
    let (key, value) = text.split_once('=')?;
    let key = key.trim();
    if key.is_empty() {
        None
    } else {
        Some((key.to_owned(), percent_decode_str(value.trim()).decode_utf8().ok()?.into_owned()))
    }
}

/// For [`super::invariants`]: a parsed endpoint has a host and a path, a parsed header can be sent.
#[cfg(any(test, fuzzing))]
pub(super) fn invariants(text: &str) {
    for (grpc, insecure) in [(false, false), (true, false), (true, true)] {
        if let Ok(OtlpEndpoint { host, path, .. }) = endpoint(text, grpc, insecure) {
            assert!(!host.is_empty() && path.starts_with('/'), "{host:?} {path:?} of {text:?}");
        }
    }
    if let Ok((name, value)) = header(text) {
        assert!(value.is_sensitive() && !name.as_str().bytes().any(|byte| byte.is_ascii_uppercase()));
    }
    if let Ok(pairs) = pairs(text) {
        assert!(pairs.iter().all(|(key, _)| !key.is_empty()) && pairs.len() <= text.split(',').count());
    }
}

#[cfg(test)]
mod tests;
