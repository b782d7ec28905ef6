//! Settings of the OTLP push: flags, and the standard variables of OpenTelemetry.
//!
//! A flag, its own variable and the file work as for every setting. In between stand the standard variables, as the
//! OpenTelemetry specification has them: that of one signal (`OTEL_EXPORTER_OTLP_LOGS_TIMEOUT`) wins over the general one,
//! an empty one is not set, and one that cannot be used is ignored and said at start. The order is: flag, `MEMLEDGER_`
//! variable, `OTEL_` variables, file, default. Nothing is pushed unless an endpoint is given.

use std::cell::RefCell;
use std::path::PathBuf;
use std::time::Duration;

use axum::http::Uri;
use axum::http::header::{HeaderName, HeaderValue};

use super::percent::decoded;
use super::table::{Kind, setting};
use super::{ConfigError, Given, Values, switch};

/// Settings of the push; there are none where nothing is pushed.
#[derive(Clone, Debug)]
pub struct OtlpSettings {
    /// Where metrics go; `None`: nowhere.
    pub metrics: Option<Target>,
    /// Where events go, as log records; `None`: nowhere.
    pub logs: Option<Target>,
    /// Pause between two pushes of metrics.
    pub interval: Duration,
    /// Counters are sent as the growth since the last push, and not as they stand.
    pub delta: bool,
    /// How long the last push may take at the end.
    pub shutdown_timeout: Duration,
    /// Attributes of the resource from the environment, `service.name` among them if it was set.
    pub resource: Vec<(String, String)>,
}

/// Where one signal goes, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Whom to connect to.
    pub endpoint: Endpoint,
    /// gRPC, or else HTTP with protobuf.
    pub grpc: bool,
    /// Sent with every request.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Requests are compressed.
    pub gzip: bool,
    /// How long one request may take.
    pub timeout: Duration,
    /// PEM file of the authorities that are trusted; `None`: those of the host.
    pub certificate: Option<PathBuf>,
    /// PEM files of memledger's own certificate and its key.
    pub client: Option<(PathBuf, PathBuf)>,
}

/// A place on the network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// With TLS.
    pub tls: bool,
    /// Name or address, without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
    /// Path of the resource; of no meaning to gRPC.
    pub path: String,
}

impl Endpoint {
    /// Host and port, as they stand in a URL.
    pub fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

/// Without path and query: some receivers have their token there.
impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(f, "{scheme}://{}", self.authority())
    }
}

/// What is pushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Signal {
    Metrics,
    Logs,
}

impl Signal {
    /// As it stands in the standard variables.
    fn word(self) -> &'static str {
        match self {
            Signal::Metrics => "METRICS",
            Signal::Logs => "LOGS",
        }
    }

    fn path(self) -> &'static str {
        match self {
            Signal::Metrics => "/v1/metrics",
            Signal::Logs => "/v1/logs",
        }
    }
}

/// Where the settings come from.
struct Sources<'a> {
    values: &'a Values,
    environment: &'a dyn Fn(&str) -> Option<String>,
    ignored: RefCell<Vec<String>>,
}

/// Reads the settings. Beside them, the standard variables that cannot be used, each with what is wanted.
///
/// # Errors
/// A flag, its variable or the file has a value that cannot be used.
pub(super) fn settings(
    values: &Values,
    environment: &dyn Fn(&str) -> Option<String>,
) -> Result<(Option<OtlpSettings>, Vec<String>), ConfigError> {
    let sources = Sources { values, environment, ignored: RefCell::default() };
    let settings = sources.settings()?;
    Ok((settings, sources.ignored.into_inner()))
}

impl Sources<'_> {
    fn settings(&self) -> Result<Option<OtlpSettings>, ConfigError> {
        let (metrics, logs) = (self.target(Signal::Metrics)?, self.target(Signal::Logs)?);
        let range = |key, least, most| self.values.duration(key, least..=most);
        let (second, hour) = (Duration::from_secs(1), Duration::from_secs(3600));
        let all = OtlpSettings {
            metrics,
            logs,
            interval: self.pick(
                "otlp.interval",
                &["OTEL_METRIC_EXPORT_INTERVAL".to_owned()],
                || range("otlp.interval", second, hour * 24),
                |text| milliseconds(text).map(|interval| interval.max(Duration::from_millis(100))),
            )?,
            delta: self.pick(
                "otlp.temporality",
                &["OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE".to_owned()],
                || self.values.one("otlp.temporality", delta),
                delta,
            )?,
            shutdown_timeout: range("otlp.shutdown-timeout", Duration::ZERO, hour)?,
            resource: self.resource(),
        };
        if all.metrics.is_none() && all.logs.is_none() {
            return Ok(None);
        }
        if self.standard("OTEL_SDK_DISABLED").is_some_and(|text| text.eq_ignore_ascii_case("true")) {
            self.ignored.borrow_mut().push("OTEL_SDK_DISABLED=true: nothing is pushed over OTLP".to_owned());
            return Ok(None);
        }
        Ok(Some(all))
    }

    /// A standard variable; an empty one is not set.
    fn standard(&self, name: &str) -> Option<String> {
        (self.environment)(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    /// What was given as a flag or by its own variable.
    fn by_hand(&self, key: &'static str) -> Option<&Given> {
        let given = self.values.0.get(key)?.first()?;
        let own = setting(key)?.variable();
        (given.origin.starts_with("--") || given.origin == own).then_some(given)
    }

    /// The flag or its variable, else the first standard variable that can be used, else file and default.
    fn pick<T>(
        &self,
        key: &'static str,
        names: &[String],
        own: impl Fn() -> Result<T, ConfigError>,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Result<T, ConfigError> {
        if self.by_hand(key).is_some() {
            return own();
        }
        for name in names {
            let Some(text) = self.standard(name) else { continue };
            match parse(&text) {
                Ok(value) => return Ok(value),
                Err(wanted) => self.ignore(name, &wanted),
            }
        }
        own()
    }

    /// The value is left out: it may be a secret.
    fn ignore(&self, name: &str, wanted: &str) {
        let text = format!("{name} cannot be used and is ignored; wanted is {wanted}");
        let mut ignored = self.ignored.borrow_mut();
        if !ignored.contains(&text) {
            ignored.push(text);
        }
    }

    fn target(&self, signal: Signal) -> Result<Option<Target>, ConfigError> {
        let key = if signal == Signal::Metrics { "otlp.metrics" } else { "otlp.logs" };
        if !self.values.one(key, switch)? || (self.by_hand(key).is_none() && self.is_elsewhere(signal)) {
            return Ok(None);
        }
        let names = |what: &str| {
            let general = format!("OTEL_EXPORTER_OTLP_{what}");
            [format!("OTEL_EXPORTER_OTLP_{}_{what}", signal.word()), general]
        };
        let one = |key, what: &str, parse: fn(&str) -> Result<bool, String>| {
            self.pick(key, &names(what), || self.values.one(key, parse), parse)
        };
        let path = |key, what: &str| {
            let own = || self.values.optional(key, |text| Ok(PathBuf::from(text)));
            self.pick(key, &names(what), own, |text| Ok(Some(PathBuf::from(text))))
        };
        let grpc = one("otlp.protocol", "PROTOCOL", grpc)?;
        // as the specification has it: only true is true
        let own = || self.values.one("otlp.insecure", switch);
        let insecure = self
            .pick("otlp.insecure", &names("INSECURE"), own, |text| Ok(text.eq_ignore_ascii_case("true")))?;
        let Some(endpoint) = self.endpoint(signal, grpc, insecure)? else { return Ok(None) };
        let (certificate, key) =
            (path("otlp.client-certificate", "CLIENT_CERTIFICATE")?, path("otlp.client-key", "CLIENT_KEY")?);
        let client = match (certificate, key) {
            (None, None) => None,
            (Some(certificate), Some(key)) => Some((certificate, key)),
            _ => {
                return Err(ConfigError::Value {
                    origin: "--otlp.client-certificate, --otlp.client-key".to_owned(),
                    what: "give both or neither".to_owned(),
                });
            }
        };
        let timeout = Duration::from_millis(1)..=Duration::from_secs(3600);
        Ok(Some(Target {
            endpoint,
            grpc,
            headers: self.pick(
                "otlp.headers",
                &names("HEADERS"),
                || self.values.each("otlp.headers", header),
                |text| text.split(',').filter(|pair| !pair.trim().is_empty()).map(header).collect(),
            )?,
            gzip: one("otlp.compression", "COMPRESSION", gzip)?,
            timeout: self.pick(
                "otlp.timeout",
                &names("TIMEOUT"),
                || self.values.duration("otlp.timeout", timeout.clone()),
                milliseconds,
            )?,
            certificate: path("otlp.certificate", "CERTIFICATE")?,
            client,
        }))
    }

    /// Whether the standard variable names exporters for this signal, and OTLP is not among them.
    fn is_elsewhere(&self, signal: Signal) -> bool {
        let name = format!("OTEL_{}_EXPORTER", signal.word());
        let Some(text) = self.standard(&name) else { return false };
        let text = text.to_ascii_lowercase();
        let words = || text.split(',').map(str::trim);
        if words().any(|word| word == "otlp") {
            return false;
        }
        let are_known = words().all(|word| ["none", "console", "logging", "prometheus"].contains(&word));
        if !are_known {
            self.ignore(&name, "otlp, or none, console, prometheus, with which nothing is pushed");
        }
        are_known
    }

    /// The general endpoint is the beginning of a URL, to which HTTP adds the signal's path; that of a signal is used as
    /// it is.
    fn endpoint(&self, signal: Signal, grpc: bool, insecure: bool) -> Result<Option<Endpoint>, ConfigError> {
        let read = |text: &str| endpoint(text, grpc, insecure);
        let below = |mut endpoint: Endpoint| {
            let (base, query) = match endpoint.path.split_once('?') {
                Some((base, query)) => (base, format!("?{query}")),
                None => (endpoint.path.as_str(), String::new()),
            };
            let base = base.trim_end_matches('/');
            endpoint.path = if grpc { String::new() } else { format!("{base}{}{query}", signal.path()) };
            endpoint
        };
        let general = || Ok(self.values.optional("otlp.endpoint", read)?.map(below));
        if self.by_hand("otlp.endpoint").is_some() {
            return general();
        }
        let own = format!("OTEL_EXPORTER_OTLP_{}_ENDPOINT", signal.word());
        if let Some(text) = self.standard(&own) {
            match read(&text) {
                Ok(mut endpoint) => {
                    if grpc {
                        endpoint.path.clear();
                    }
                    return Ok(Some(endpoint));
                }
                Err(wanted) => self.ignore(&own, &wanted),
            }
        }
        let common = ["OTEL_EXPORTER_OTLP_ENDPOINT".to_owned()];
        self.pick("otlp.endpoint", &common, general, |text| Ok(Some(below(read(text)?))))
    }

    fn resource(&self) -> Vec<(String, String)> {
        let name = "OTEL_RESOURCE_ATTRIBUTES";
        let mut attributes = match self.standard(name).map(|text| pairs(&text)).transpose() {
            Ok(attributes) => attributes.unwrap_or_default(),
            Err(wanted) => {
                self.ignore(name, &wanted); // all of it, as the specification has it
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

fn milliseconds(text: &str) -> Result<Duration, String> {
    let parsed = text.parse::<u64>().ok().filter(|ms| (1..=86_400_000).contains(ms));
    parsed.map(Duration::from_millis).ok_or_else(|| "milliseconds, a whole number above 0".to_owned())
}

fn grpc(text: &str) -> Result<bool, String> {
    match text {
        "grpc" => Ok(true),
        "http/protobuf" => Ok(false),
        _ => Err(Kind::Choice(&["grpc", "http/protobuf"]).describe()),
    }
}

fn gzip(text: &str) -> Result<bool, String> {
    match text {
        "gzip" => Ok(true),
        "none" => Ok(false),
        _ => Err(Kind::Choice(&["gzip", "none"]).describe()),
    }
}

/// All our counters are of the kind that `lowmemory` leaves cumulative.
fn delta(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "cumulative" | "lowmemory" => Ok(false),
        "delta" => Ok(true),
        _ => Err(Kind::Choice(&["cumulative", "delta", "lowmemory"]).describe()),
    }
}

fn endpoint(text: &str, grpc: bool, insecure: bool) -> Result<Endpoint, String> {
    let wanted = || {
        let bare = if grpc { ", or HOST:PORT" } else { "" };
        format!("a URL such as https://collector:4318{bare}, without user and password (--otlp.headers)")
    };
    let full = match text.split_once("://") {
        Some(_) => text.to_owned(),
        None if grpc => format!("{}://{text}", if insecure { "http" } else { "https" }),
        None => return Err(wanted()),
    };
    let uri: Uri = full.parse().map_err(|_| wanted())?;
    let tls = match uri.scheme_str() {
        Some("https") => true,
        Some("http") => false,
        _ => return Err(wanted()),
    };
    let authority =
        uri.authority().filter(|authority| !authority.as_str().contains('@')).ok_or_else(wanted)?;
    let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
    if host.is_empty() || authority.port().is_some() != authority.port_u16().is_some() {
        return Err(wanted());
    }
    let port = authority.port_u16().unwrap_or(if tls { 443 } else { 80 });
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let slash = if path.starts_with('/') { "" } else { "/" }; // https://collector?key=value has a query alone
    Ok(Endpoint { tls, host, port, path: format!("{slash}{path}") })
}

/// `KEY=VALUE`, the value percent-encoded where it holds a comma or the like.
fn header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let wanted = || "KEY=VALUE, the value percent-encoded where it holds a comma".to_owned();
    let (key, value) = pair(text).ok_or_else(wanted)?;
    let name = HeaderName::from_bytes(key.to_ascii_lowercase().as_bytes()).map_err(|_| wanted())?;
    let mut value = HeaderValue::from_str(&value).map_err(|_| wanted())?;
    value.set_sensitive(true);
    Ok((name, value))
}

fn pairs(text: &str) -> Result<Vec<(String, String)>, String> {
    let parts = text.split(',').filter(|part| !part.trim().is_empty());
    let parsed: Option<Vec<_>> = parts.map(pair).collect();
    parsed.ok_or_else(|| "KEY=VALUE,KEY=VALUE, percent-encoded where a value holds a comma or =".to_owned())
}

fn pair(text: &str) -> Option<(String, String)> {
    let (key, value) = text.split_once('=')?;
    let key = key.trim();
    if key.is_empty() { None } else { Some((key.to_owned(), decoded(value.trim())?)) }
}

/// For [`super::laws`]: what is understood of a value can be connected to and sent.
#[cfg(any(test, fuzzing))]
pub(super) fn law(text: &str) {
    for (grpc, insecure) in [(false, false), (true, false), (true, true)] {
        if let Ok(Endpoint { host, path, .. }) = endpoint(text, grpc, insecure) {
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
mod tests {
    use super::*;
    use crate::config::{Config, arguments};

    /// Settings from flags and variables.
    fn load(flags: &[&str], variables: &[(&str, &str)]) -> (Option<OtlpSettings>, Vec<String>) {
        let command = arguments(clap::Command::new("memledger").no_binary_name(true));
        let matches = command.try_get_matches_from(flags).unwrap();
        let values = Config::values(&matches).unwrap();
        let environment =
            |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        settings(&values, &environment).unwrap()
    }

    fn places(settings: Option<OtlpSettings>) -> [Option<String>; 2] {
        let settings = settings.unwrap();
        [settings.metrics, settings.logs].map(|target| {
            let endpoint = target?.endpoint;
            Some(format!("{endpoint}{}", endpoint.path))
        })
    }

    #[test]
    fn an_endpoint_with_a_query_alone_has_a_path_before_it() {
        let path = |text| endpoint(text, false, false).map(|endpoint| endpoint.path);
        assert_eq!(path("https://collector?key=a"), Ok("/?key=a".to_owned()));
        assert_eq!(path("https://collector"), Ok("/".to_owned()));
    }

    #[test]
    fn nothing_is_pushed_without_an_endpoint() {
        assert!(load(&[], &[]).0.is_none());
        assert!(load(&["--otlp.protocol=grpc"], &[("OTEL_EXPORTER_OTLP_ENDPOINT", " ")]).0.is_none());
        let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318");
        assert!(load(&[], &[endpoint, ("OTEL_SDK_DISABLED", "TRUE")]).0.is_none());
        assert!(load(&[], &[endpoint, ("OTEL_SDK_DISABLED", "yes")]).0.is_some(), "only true is true");
        let none = [endpoint, ("OTEL_LOGS_EXPORTER", "none")];
        assert_eq!(places(load(&[], &none).0), [Some("http://c:4318/v1/metrics".to_owned()), None]);
        assert!(places(load(&["--otlp.logs"], &none).0)[1].is_some(), "a flag wins");
        for (text, is_pushed) in
            [("prometheus", false), ("console,none", false), ("console, OTLP", true), ("zipkin", true)]
        {
            let (settings, ignored) = load(&[], &[endpoint, ("OTEL_METRICS_EXPORTER", text)]);
            assert_eq!(places(settings)[0].is_some(), is_pushed, "{text}");
            assert_eq!(ignored.len(), usize::from(text == "zipkin"), "{ignored:?}");
        }
    }

    #[test]
    fn a_token_in_a_path_or_a_query_is_used_and_not_shown() {
        let base = ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://c/in/s3cr3t/?key=s3cr3t");
        let endpoint = load(&[], &[base]).0.unwrap().logs.unwrap().endpoint;
        assert_eq!(endpoint.path, "/in/s3cr3t/v1/logs?key=s3cr3t", "the query stays the last");
        assert_eq!(endpoint.to_string(), "https://c:443");
    }

    #[test]
    fn the_general_endpoint_is_a_beginning_and_that_of_a_signal_is_used_as_it_is() {
        let base = ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://c:1/base/");
        let signal = ("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "http://d");
        let both = ["https://c:1/base/v1/metrics", "http://d:80/"].map(|text| Some(text.to_owned()));
        assert_eq!(places(load(&[], &[base, signal]).0), both);
        let flag = ["http://[::1]:5/v1/metrics", "http://[::1]:5/v1/logs"].map(|text| Some(text.to_owned()));
        assert_eq!(places(load(&["--otlp.endpoint=http://[::1]:5"], &[base, signal]).0), flag);
        let grpc = ["https://c:1", "http://d:80"].map(|text| Some(text.to_owned()));
        assert_eq!(places(load(&["--otlp.protocol=grpc"], &[base, signal]).0), grpc, "gRPC has no path");
    }

    #[test]
    fn grpc_takes_host_and_port_with_tls_unless_told_otherwise() {
        let bare = [("OTEL_EXPORTER_OTLP_ENDPOINT", "c:4317"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")];
        assert_eq!(places(load(&[], &bare).0)[0], Some("https://c:4317".to_owned()));
        let insecure = [bare[0], bare[1], ("OTEL_EXPORTER_OTLP_METRICS_INSECURE", "True")];
        let both = ["http://c:4317", "https://c:4317"].map(|text| Some(text.to_owned()));
        assert_eq!(places(load(&[], &insecure).0), both);
        for text in ["0", "no", "1", "FALSE"] {
            let secure = [bare[0], bare[1], ("OTEL_EXPORTER_OTLP_INSECURE", text)];
            let (settings, ignored) = load(&[], &secure);
            assert_eq!(places(settings)[0], Some("https://c:4317".to_owned()), "only true is true");
            assert!(ignored.is_empty(), "{ignored:?}");
        }
        let (settings, ignored) = load(&[], &bare[..1]);
        assert!(settings.is_none() && ignored[0].contains("a URL such as"), "HTTP wants a URL: {ignored:?}");
    }

    #[test]
    fn that_of_a_signal_wins_and_what_cannot_be_used_is_ignored_and_said() {
        let variables = [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:1"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "1500"),
            ("OTEL_EXPORTER_OTLP_LOGS_TIMEOUT", "soon"),
            ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "250"),
            ("OTEL_EXPORTER_OTLP_COMPRESSION", "brotli"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "A=b%2Cc, d = e"),
            ("OTEL_RESOURCE_ATTRIBUTES", "a=b,broken"),
            ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "Delta"),
            ("OTEL_METRIC_EXPORT_INTERVAL", "5000"),
        ];
        let (settings, ignored) = load(&[], &variables);
        let settings = settings.unwrap();
        let (metrics, logs) = (settings.metrics.unwrap(), settings.logs.unwrap());
        let ms = Duration::from_millis;
        assert_eq!((metrics.timeout, logs.timeout, settings.interval), (ms(250), ms(1500), ms(5000)));
        assert!(!metrics.gzip && settings.delta && settings.resource.is_empty());
        let headers: Vec<_> = logs.headers.iter().map(|(k, v)| (k.as_str(), v.to_str().unwrap())).collect();
        assert_eq!(headers, [("a", "b,c"), ("d", "e")]);
        for name in ["LOGS_TIMEOUT", "COMPRESSION", "RESOURCE_ATTRIBUTES"] {
            assert_eq!(ignored.iter().filter(|text| text.contains(name)).count(), 1, "{name}: {ignored:?}");
        }
        let flags = ["--otlp.timeout=3s", "--otlp.compression=gzip", "--otlp.headers=x=1,y=2"];
        let logs = load(&flags, &variables).0.unwrap().logs.unwrap();
        assert_eq!((logs.timeout, logs.gzip, logs.headers.len()), (ms(3000), true, 2), "a flag wins");
    }

    #[test]
    fn a_key_without_its_certificate_is_refused() {
        let flags = ["--otlp.endpoint=https://c", "--otlp.client-key=/k"];
        let command = arguments(clap::Command::new("memledger").no_binary_name(true));
        let error = Config::load(&command.get_matches_from(flags)).unwrap_err().to_string();
        assert!(error.contains("give both or neither"), "{error}");
    }
}
