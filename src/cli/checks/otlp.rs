//! Checks the OTLP endpoints: sends an empty request to each.

use super::{Check, RESPONSE_TIMEOUT};
use crate::config::Config;
use crate::otlp::{OtlpSignal, ProbeFailure, probe};

const ON_GRPC_PORT: &str =
    "4317 is the usual port of gRPC: set --otlp.protocol=grpc, or the port of HTTP, usually 4318";
const ON_HTTP_PORT: &str =
    "4318 is the usual port of HTTP: set --otlp.protocol=http/protobuf, or the port of gRPC, usually 4317";

/// Returns one check per signal with an endpoint, and one per ignored standard variable.
pub async fn run_checks(config: &Config) -> Vec<Check> {
    let ignored = config.otlp_ignored.iter().map(|what| {
        let fix = "correct or unset the variable: see docs/otlp.md";
        let (name, lost) = ("OTLP settings", "the setting of that variable");
        if what.starts_with("OTEL_SDK_DISABLED") && config.otlp.is_none() {
            return Check::none(name, what.clone(), "OTLP, intentionally", fix);
        }
        Check::bad(name, what.clone(), lost, fix)
    });
    let mut checks: Vec<_> = ignored.collect();
    let Some(settings) = &config.otlp else { return checks };
    for (name, signal, target, lost) in [
        ("OTLP metrics", OtlpSignal::Metrics, &settings.metrics, "no metrics at the endpoint"),
        ("OTLP logs", OtlpSignal::Logs, &settings.logs, "events wait in the ledger"),
        ("OTLP traces", OtlpSignal::Traces, &settings.traces, "no traces of memledger's own work"),
    ] {
        let Some(target) = target else { continue };
        let place = format!("{} ({})", target.endpoint, if target.grpc { "grpc" } else { "http/protobuf" });
        checks.push(match probe(target, signal, RESPONSE_TIMEOUT.min(target.timeout)).await {
            Ok(()) => Check::good(name, format!("{place} accepts them")),
            Err(ProbeFailure { reason, advice }) => {
                let fix = match (target.endpoint.port, target.grpc, advice) {
                    (4317, false, _) => ON_GRPC_PORT,
                    (4318, true, _) => ON_HTTP_PORT,
                    (.., Some(advice)) => advice,
                    _ => "start the receiver, or see docs/otlp.md for the settings",
                };
                Check::bad(name, format!("{place}: {reason}"), lost, fix)
            }
        });
    }
    checks
}
