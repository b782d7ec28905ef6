use super::*;
use crate::config::{Config, arguments};

/// Loads settings from flags and variables.
fn load(flags: &[&str], variables: &[(&str, &str)]) -> (Option<OtlpSettings>, Vec<String>) {
    let command = arguments(clap::Command::new("memledger").no_binary_name(true));
    let matches = command.try_get_matches_from(flags).unwrap();
    let environment =
        |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
    let config = Config::load_with(&matches, &environment).unwrap();
    (config.otlp, config.otlp_ignored)
}

fn targets(settings: Option<OtlpSettings>) -> [Option<String>; 2] {
    let settings = settings.unwrap();
    [settings.metrics, settings.logs].map(|target| {
        let endpoint = target?.endpoint;
        Some(format!("{endpoint}{}", endpoint.path))
    })
}

#[test]
fn inserts_path_before_a_lone_query() {
    let path = |text| endpoint(text, false, false).map(|endpoint| endpoint.path);
    assert_eq!(path("https://collector?key=a"), Ok("/?key=a".to_owned()));
    assert_eq!(path("https://collector"), Ok("/".to_owned()));
}

#[test]
fn exports_nothing_without_an_endpoint() {
    assert!(load(&[], &[]).0.is_none());
    assert!(load(&["--otlp.protocol=grpc"], &[("OTEL_EXPORTER_OTLP_ENDPOINT", " ")]).0.is_none());
    let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318");
    assert!(load(&[], &[endpoint, ("OTEL_SDK_DISABLED", "TRUE")]).0.is_none());
    assert!(load(&[], &[endpoint, ("OTEL_SDK_DISABLED", "yes")]).0.is_some(), "only true is true");
    let disabled = [("OTEL_SDK_DISABLED", "true")];
    let (settings, ignored) = load(&["--otlp.endpoint=http://c:4318"], &disabled);
    assert!(settings.is_some() && ignored[0].contains("is ignored"), "a flag overrides: {ignored:?}");
    let none = [endpoint, ("OTEL_LOGS_EXPORTER", "none")];
    assert_eq!(targets(load(&[], &none).0), [Some("http://c:4318/v1/metrics".to_owned()), None]);
    assert!(targets(load(&["--otlp.logs"], &none).0)[1].is_some(), "a flag overrides");
    for (text, is_exported) in
        [("prometheus", false), ("console,none", false), ("console, OTLP", true), ("zipkin", true)]
    {
        let (settings, ignored) = load(&[], &[endpoint, ("OTEL_METRICS_EXPORTER", text)]);
        assert_eq!(targets(settings)[0].is_some(), is_exported, "{text}");
        assert_eq!(ignored.len(), usize::from(text == "zipkin"), "{ignored:?}");
    }
}

#[test]
fn uses_tokens_in_path_or_query_without_showing_them() {
    let base = ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://c/in/s3cr3t/?key=s3cr3t");
    let endpoint = load(&[], &[base]).0.unwrap().logs.unwrap().endpoint;
    assert_eq!(endpoint.path, "/in/s3cr3t/v1/logs?key=s3cr3t", "the query stays last");
    assert_eq!(endpoint.to_string(), "https://c:443");
}

#[test]
fn appends_signal_path_to_the_general_endpoint_only() {
    let base = ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://c:1/base/");
    let signal = ("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "http://d");
    let both = ["https://c:1/base/v1/metrics", "http://d:80/"].map(|text| Some(text.to_owned()));
    assert_eq!(targets(load(&[], &[base, signal]).0), both);
    let flag = ["http://[::1]:5/v1/metrics", "http://[::1]:5/v1/logs"].map(|text| Some(text.to_owned()));
    assert_eq!(targets(load(&["--otlp.endpoint=http://[::1]:5"], &[base, signal]).0), flag);
    let grpc = ["https://c:1", "http://d:80"].map(|text| Some(text.to_owned()));
    assert_eq!(targets(load(&["--otlp.protocol=grpc"], &[base, signal]).0), grpc, "gRPC has no path");
}

#[test]
fn grpc_accepts_host_and_port_with_tls_by_default() {
    let bare = [("OTEL_EXPORTER_OTLP_ENDPOINT", "c:4317"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")];
    assert_eq!(targets(load(&[], &bare).0)[0], Some("https://c:4317".to_owned()));
    let insecure = [bare[0], bare[1], ("OTEL_EXPORTER_OTLP_METRICS_INSECURE", "True")];
    let both = ["http://c:4317", "https://c:4317"].map(|text| Some(text.to_owned()));
    assert_eq!(targets(load(&[], &insecure).0), both);
    for text in ["0", "no", "1", "FALSE"] {
        let secure = [bare[0], bare[1], ("OTEL_EXPORTER_OTLP_INSECURE", text)];
        let (settings, ignored) = load(&[], &secure);
        assert_eq!(targets(settings)[0], Some("https://c:4317".to_owned()), "only true is true");
        assert!(ignored.is_empty(), "{ignored:?}");
    }
    let (settings, ignored) = load(&[], &bare[..1]);
    assert!(settings.is_none() && ignored[0].contains("a URL such as"), "HTTP needs a URL: {ignored:?}");
}

#[test]
fn signal_variables_override_and_invalid_ones_are_ignored() {
    let variables = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:1"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "1500"),
        ("OTEL_EXPORTER_OTLP_LOGS_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "250"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "brotli"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "A=b%2Cc, d = e"),
        ("OTEL_RESOURCE_ATTRIBUTES", "a=b,broken"),
        ("OTEL_EXPORTER_OTLP_INSECURE", "no"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "5000"),
    ];
    let (settings, ignored) = load(&[], &variables);
    let settings = settings.unwrap();
    let (metrics, logs) = (settings.metrics.unwrap(), settings.logs.unwrap());
    let ms = Duration::from_millis;
    assert_eq!((metrics.timeout, logs.timeout, settings.interval), (ms(250), ms(1500), ms(5000)));
    assert!(!metrics.gzip && settings.resource.is_empty());
    let headers: Vec<_> = logs.headers.iter().map(|(k, v)| (k.as_str(), v.to_str().unwrap())).collect();
    assert_eq!(headers, [("a", "b,c"), ("d", "e")]);
    for name in ["LOGS_TIMEOUT", "COMPRESSION", "RESOURCE_ATTRIBUTES"] {
        assert_eq!(ignored.iter().filter(|text| text.contains(name)).count(), 1, "{name}: {ignored:?}");
    }
    let flags = ["--otlp.timeout=3s", "--otlp.compression=gzip", "--otlp.headers=x=1,y=2"];
    let logs = load(&flags, &variables).0.unwrap().logs.unwrap();
    assert_eq!((logs.timeout, logs.gzip, logs.headers.len()), (ms(3000), true, 2), "a flag overrides");
}

fn error(flags: &[&str], variables: &[(&str, &str)]) -> Option<String> {
    let command = arguments(clap::Command::new("memledger").no_binary_name(true));
    let environment =
        |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
    let loaded = Config::load_with(&command.get_matches_from(flags), &environment);
    loaded.err().map(|error| error.to_string())
}

#[test]
fn rejects_a_key_without_its_certificate() {
    let error = error(&["--otlp.endpoint=https://c", "--otlp.client-key=/k"], &[]).unwrap();
    assert!(error.contains("set both or neither"), "{error}");
}

#[test]
fn wish_for_deltas_is_ignored_with_a_warning_where_metrics_are_exported() {
    let ignored =
        |flags: &[&str], text| load(flags, &[("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", text)]).1;
    let endpoint = "--otlp.endpoint=http://c";
    let warnings = ignored(&[endpoint], "Delta");
    assert!(
        matches!(&*warnings, [text] if text.contains("TEMPORALITY_PREFERENCE") && text.contains("cumulative_to_delta")),
        "{warnings:?}"
    );
    assert!(
        ignored(&[endpoint, "--no-otlp.metrics"], "delta").is_empty() && ignored(&[], "delta").is_empty(),
        "nothing is exported"
    );
    for other in ["cumulative", "lowmemory", ""] {
        assert!(ignored(&[endpoint], other).is_empty(), "{other}");
    }
}

#[test]
fn traces_are_off_unless_switched_on() {
    let endpoint = "--otlp.endpoint=http://c:4318";
    assert!(load(&[endpoint], &[]).0.unwrap().traces.is_none());
    assert!(load(&["--otlp.traces"], &[]).0.is_none(), "no endpoint");
    let settings = load(&[endpoint, "--otlp.traces"], &[("OTEL_TRACES_SAMPLER_ARG", "0.5")]).0.unwrap();
    assert_eq!((settings.traces.unwrap().endpoint.path.as_str(), settings.traces_ratio), ("/v1/traces", 0.5));
    let alone = load(&[endpoint, "--otlp.traces", "--no-otlp.metrics", "--no-otlp.logs"], &[]).0.unwrap();
    assert!(alone.metrics.is_none() && alone.logs.is_none() && alone.traces.is_some());
    for wrong in ["1.1", "-0.1", "NaN", "all"] {
        let text = error(&[endpoint, &format!("--otlp.traces-ratio={wrong}")], &[]).unwrap();
        assert!(text.contains("a number from 0 to 1"), "{text}");
    }
}
