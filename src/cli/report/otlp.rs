//! Whether the endpoints of the push over OTLP take anything: each is sent a request with nothing in it.

use super::{ANSWER_WITHIN, Check};
use crate::config::Config;
use crate::push::{Signal, probe};

const ON_GRPC_PORT: &str =
    "4317 is the usual port of gRPC: give --otlp.protocol=grpc, or the port of HTTP, usually 4318";
const ON_HTTP_PORT: &str =
    "4318 is the usual port of HTTP: give --otlp.protocol=http/protobuf, or the port of gRPC, usually 4317";

/// One check per signal that has an endpoint, and per standard variable that is ignored.
pub async fn examine(config: &Config) -> Vec<Check> {
    let ignored = config.otlp_ignored.iter().map(|what| {
        let fix = "correct or unset the variable: see docs/otlp.md";
        let (name, lost) = ("OTLP settings", "what it was meant to set");
        if what.starts_with("OTEL_SDK_DISABLED") {
            return Check::none(name, what.clone(), "OTLP, on purpose", fix);
        }
        Check::bad(name, what.clone(), lost, fix)
    });
    let mut checks: Vec<_> = ignored.collect();
    let Some(settings) = &config.otlp else { return checks };
    for (name, signal, target, lost) in [
        ("OTLP metrics", Signal::Metrics, &settings.metrics, "no metrics at the endpoint"),
        ("OTLP logs", Signal::Logs, &settings.logs, "events wait in the ledger"),
    ] {
        let Some(target) = target else { continue };
        let place = format!("{} ({})", target.endpoint, if target.grpc { "grpc" } else { "http/protobuf" });
        checks.push(match probe(target, signal, ANSWER_WITHIN.min(target.timeout)).await {
            Ok(()) => Check::good(name, format!("{place} takes them")),
            Err(reason) => {
                let fix = match (target.endpoint.port, target.grpc) {
                    (4317, false) => ON_GRPC_PORT,
                    (4318, true) => ON_HTTP_PORT,
                    _ => "start the receiver, or see docs/otlp.md for what the settings mean",
                };
                Check::bad(name, format!("{place}: {reason}"), lost, fix)
            }
        });
    }
    checks
}
