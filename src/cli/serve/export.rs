//! Starts the export over OTLP.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context;

use crate::clock::Timestamp;
use crate::config::Config;
use crate::http::{SnapshotCache, stale_after};
use crate::ledger::exchange::SharedState;
use crate::ledger::store::EventReader;
use crate::otlp::traces::SpanQueue;
use crate::otlp::{self, Origins, OtlpExporter, resource};

/// Starts the OTLP exporter; `None` if none is configured.
pub(super) fn start_exporter(
    config: &Config,
    snapshot_cache: &Arc<SnapshotCache>,
    shared_state: Arc<SharedState>,
    event_reader: Option<EventReader>,
    spans: Option<SpanQueue>,
) -> anyhow::Result<Option<OtlpExporter>> {
    let Some(settings) = &config.otlp else { return Ok(None) };
    let host =
        otlp::resource_detection::host(&config.host_paths, config.listen.first().map(SocketAddr::port));
    if host.name.is_empty() && !settings.resource.iter().any(|(key, _)| key == "host.name") {
        tracing::warn!(
            "OTLP: the host's name is unreadable from this container, so host.name is missing; \
             set OTEL_RESOURCE_ATTRIBUTES=host.name=NAME"
        );
    }
    let boot = config.host_paths.boot_time().unwrap_or_default(); // 0 means *unknown* in OTLP
    let now = Timestamp::now().unix_nanos();
    let shared = otlp::OtlpContext {
        snapshot_cache: Arc::clone(snapshot_cache),
        stale_after: stale_after(config),
        shared_state,
        event_reader,
        cursor_name: otlp::cursor_name(settings),
        resource: resource(&host, &settings.resource),
        origins: Origins { memledger: now, boot: boot * 1_000_000_000, ..Origins::default() },
        otlp_stats: Arc::default(),
        spans,
    };
    let targets = [("metrics", &settings.metrics), ("logs", &settings.logs), ("traces", &settings.traces)];
    for (signal, target) in targets {
        if let Some(target) = target {
            let protocol = if target.grpc { "grpc" } else { "http/protobuf" };
            tracing::info!(signal, endpoint = %target.endpoint, protocol, "exporting over OTLP");
        }
    }
    Ok(Some(OtlpExporter::start(settings.clone(), shared).context("the OTLP thread failed to start")?))
}
