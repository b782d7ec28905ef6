//! Traces of memledger's own work: which part of a slow cycle was slow.
//!
//! Code marks its work with the spans of `tracing`. With `--otlp.traces`, OpenTelemetry's SDK samples whole traces and gives their
//! spans to a bounded queue, which the exporter's thread empties. Without it there is neither a layer nor a queue, and a span costs
//! one comparison. `opentelemetry-otlp` encodes them, and sends by its hook for another HTTP client: connections, retries and losses are
//! those of metrics and log records, also over gRPC.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::Bytes;
use opentelemetry::trace::TracerProvider;
use opentelemetry::{Context, InstrumentationScope, KeyValue};
use opentelemetry_http::{HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{ExporterBuildError, Protocol, WithExportConfig, WithHttpConfig};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider, Span, SpanData, SpanExporter, SpanProcessor};
use tokio::sync::{Mutex, mpsc};
use tracing::Metadata;
use tracing_subscriber::filter::{LevelFilter, filter_fn};
use tracing_subscriber::{Layer, Registry};

use super::OtlpContext;
use super::response::RejectKind;
use super::retry::{DeliveryOutcome, RetryingExporter};
use crate::clock::Timestamp;
use crate::stats::otlp_stats::LossReason;
use crate::text::error_chain;

/// Maximum number of spans that wait; further ones are dropped and counted.
const MAX_QUEUED: usize = 2_048;
/// Maximum number of spans in one request, which has about 200 KB then.
const MAX_BATCH: usize = 512;
/// Time between two exports.
const EXPORT_INTERVAL: Duration = Duration::from_secs(5);
/// The hook has its own deadlines.
const UNLIMITED: Duration = Duration::from_secs(24 * 3600);

/// Spans that wait for the exporter.
#[derive(Debug)]
pub struct SpanQueue {
    spans: Mutex<mpsc::Receiver<SpanData>>,
    dropped: Arc<AtomicU64>,
}

/// The end of the queue at the SDK.
#[derive(Debug)]
struct SpanSender {
    sender: mpsc::Sender<SpanData>,
    dropped: Arc<AtomicU64>,
}

impl SpanProcessor for SpanSender {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if self.sender.try_send(span).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

/// Returns the layer that records spans of memledger, a share `ratio` of the traces, and the queue that gets them.
pub fn layer(ratio: f64) -> (impl Layer<Registry> + Send + Sync, SpanQueue) {
    let (sender, spans) = mpsc::channel(MAX_QUEUED);
    let dropped = Arc::new(AtomicU64::new(0));
    let processor = SpanSender { sender, dropped: Arc::clone(&dropped) };
    let sampler = Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(ratio)));
    let provider = SdkTracerProvider::builder().with_span_processor(processor).with_sampler(sampler).build();
    let scope = InstrumentationScope::builder("memledger").with_version(env!("CARGO_PKG_VERSION")).build();
    let layer = tracing_opentelemetry::layer()
        .with_location(false)
        .with_threads(false)
        .with_tracked_inactivity(false)
        .with_context_activation(false)
        .with_tracer(provider.tracer_with_scope(scope));
    let is_own = |metadata: &Metadata<'_>| metadata.is_span() && metadata.target().starts_with("memledger");
    let filter = filter_fn(is_own).with_max_level_hint(LevelFilter::INFO);
    (layer.with_filter(filter), SpanQueue { spans: Mutex::new(spans), dropped })
}

/// The connection to the endpoint, and what the spans that are sent next are.
#[derive(Debug)]
struct SpanDelivery {
    exporter: RetryingExporter,
    spans: u64,
    due: Timestamp,
}

impl SpanDelivery {
    /// Delivers one request; spans that are not accepted in time are lost and counted.
    async fn deliver(&mut self, body: &Bytes) {
        let (exporter, count) = (&mut self.exporter, self.spans);
        if exporter.is_disabled() || exporter.is_waiting_for_support() {
            return exporter.count(0, count, LossReason::Refused);
        }
        match exporter.deliver(body, self.due).await {
            DeliveryOutcome::Accepted(rejected) => {
                let rejected = rejected.min(count);
                exporter.count(count - rejected, rejected, LossReason::Refused);
                if rejected == 0 {
                    exporter.mark_healthy();
                }
            }
            DeliveryOutcome::Rejected(kind) => {
                if kind == RejectKind::Unsupported {
                    exporter.back_off_unsupported();
                }
                exporter.count(0, count, LossReason::Refused);
            }
            DeliveryOutcome::TimedOut => {
                exporter.report_failure();
                exporter.count(0, count, LossReason::Unreachable);
            }
        }
    }
}

/// The hook of OpenTelemetry's exporter. Each request is done with once it is delivered or lost.
#[derive(Clone, Debug)]
struct SpanTransport(Arc<Mutex<SpanDelivery>>);

impl HttpClient for SpanTransport {
    fn send_bytes<'a: 'f, 'f>(
        &'a self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'f>> {
        Box::pin(async move {
            self.0.lock().await.deliver(request.body()).await;
            Ok(Response::new(Bytes::new()))
        })
    }
}

/// Returns OpenTelemetry's exporter with this hook. What it would read from the environment is either set here or not used by the hook.
fn encoder(
    transport: SpanTransport,
    context: &OtlpContext,
) -> Result<impl SpanExporter + use<>, ExporterBuildError> {
    let mut encoder = opentelemetry_otlp::SpanExporter::builder()
        .with_http()
        .with_http_client(transport)
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint("http://endpoint/v1/traces")
        .with_timeout(UNLIMITED)
        .build()?;
    let text = |pair: &opentelemetry_proto::tonic::common::v1::KeyValue| match pair
        .value
        .as_ref()?
        .value
        .as_ref()?
    {
        Value::StringValue(text) => Some(KeyValue::new(pair.key.clone(), text.clone())),
        _ => None,
    };
    let attributes: Vec<_> = context.resource.attributes.iter().filter_map(text).collect();
    encoder.set_resource(&Resource::builder_empty().with_attributes(attributes).build());
    Ok(encoder)
}

/// Exports the queue until the stop request, and once more then.
pub(super) async fn run(context: &OtlpContext, exporter: RetryingExporter, queue: &SpanQueue) {
    let delivery = SpanDelivery { exporter, spans: 0, due: Timestamp::now() };
    let transport = SpanTransport(Arc::new(Mutex::new(delivery)));
    let encoder = match encoder(transport.clone(), context) {
        Ok(encoder) => encoder,
        Err(error) => return tracing::error!(error = error_chain(&error), "traces are not exported"),
    };
    let mut spans = queue.spans.lock().await;
    loop {
        transport.0.lock().await.exporter.sleep(EXPORT_INTERVAL).await;
        let is_stopping = transport.0.lock().await.exporter.is_stopping();
        let due = Timestamp::now().plus(EXPORT_INTERVAL);
        loop {
            let batch: Vec<_> = std::iter::from_fn(|| spans.try_recv().ok()).take(MAX_BATCH).collect();
            if batch.is_empty() {
                break;
            }
            let mut delivery = transport.0.lock().await;
            (delivery.spans, delivery.due) = (batch.len() as u64, due);
            drop(delivery); // the hook takes it
            if let Err(error) = encoder.export(batch).await {
                tracing::error!(error = error_chain(&error), "spans could not be encoded");
            }
        }
        let mut delivery = transport.0.lock().await;
        delivery.exporter.count(0, queue.dropped.swap(0, Ordering::Relaxed), LossReason::QueueFull);
        delivery.exporter.close();
        if is_stopping {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    fn record(ratio: f64, work: impl FnOnce()) -> SpanQueue {
        let (layer, queue) = layer(ratio);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), work);
        queue
    }

    fn received(queue: SpanQueue) -> Vec<SpanData> {
        let mut spans = queue.spans.into_inner();
        std::iter::from_fn(|| spans.try_recv().ok()).collect()
    }

    #[test]
    fn spans_of_one_cycle_are_one_trace() {
        let queue = record(1.0, || {
            let _cycle = tracing::info_span!("cycle").entered();
            tracing::info_span!("collect", collector = "host")
                .in_scope(|| tracing::warn!("a line of the log"));
            tracing::debug_span!("detail").in_scope(|| {});
            tracing::info_span!(target: "hyper", "connection").in_scope(|| {});
        });
        let spans = received(queue);
        let names: Vec<_> = spans.iter().map(|span| &*span.name).collect();
        assert_eq!(names, ["collect", "cycle"]);
        assert_eq!(spans[0].parent_span_id, spans[1].span_context.span_id());
        assert_eq!(spans[0].span_context.trace_id(), spans[1].span_context.trace_id());
        assert!(spans[0].events.is_empty(), "log lines are not repeated");
        let attributes: Vec<_> =
            spans[0].attributes.iter().map(|pair| format!("{}={}", pair.key, pair.value)).collect();
        assert!(attributes.contains(&"collector=host".to_owned()), "{attributes:?}");
    }

    #[test]
    fn queue_is_bounded_and_whole_traces_are_sampled() {
        let nested = || {
            let _cycle = tracing::info_span!("cycle").entered();
            tracing::info_span!("collect").in_scope(|| {});
        };
        let queue = record(1.0, || (0..2 * MAX_QUEUED).for_each(|_| nested()));
        assert_eq!(queue.dropped.load(Ordering::Relaxed), 3 * MAX_QUEUED as u64);
        assert_eq!(received(queue).len(), MAX_QUEUED);
        assert_eq!(received(record(0.0, nested)).len(), 0);
        let some = received(record(0.3, || (0..400).for_each(|_| nested())));
        let names = |name| some.iter().filter(|span| span.name == name).count();
        assert_eq!(names("cycle"), names("collect"));
        assert!((1..400).contains(&names("cycle")), "{}", some.len());
    }
}
