//! The HTTP server: metrics, API, health and admin routes. The newest snapshot is rendered once for all requests.
//!
//! Not here: sampling. A request never waits for the kernel or the driver.

mod access_control;
mod basic_auth;
mod cleanup;
mod control_socket;
mod events;
mod gpu_release;
mod index_page;
#[cfg(any(test, fuzzing))]
pub mod invariants;
mod limits;
mod overview;
mod pages;
mod query;
mod runs;
mod server;
mod snapshot_cache;
#[cfg(test)]
mod test_server;
mod timeouts;
mod tls;
mod why;

use std::fmt::Display;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};

use access_control::Peer;
pub use access_control::{AccessControl, describe};
pub use control_socket::{ControlSocket, bind, serve_control_socket};
pub use events::{MAX_EVENTS, MAX_IDS};
use limits::{ClientLimit, Permit};
pub use runs::MAX_RUNS;
pub use server::{HTTPS_REQUIRED, listen, serve};
use snapshot_cache::NoSnapshot;
pub use snapshot_cache::{RenderedSnapshot, SnapshotCache};

use tokio::sync::Semaphore;

use crate::clock::Timestamp;
use crate::config::Config;
use crate::discover::Container;
use crate::export::prometheus;
use crate::gpu::DriverState;
use crate::ledger::store::EventReader;
use crate::overview::{Details, Overview};
use crate::reporter::ReporterState;
use crate::stats::http_stats::RejectReason;
use crate::text::nearest;

/// Time that a cycle may take: if none has finished for longer than this and the interval, sampling hangs.
const MAX_CYCLE_TIME: Duration = Duration::from_secs(15);

/// Maximum number of concurrent reads of the ledger, each of which takes some MiB.
const MAX_LEDGER_READS: usize = 2;
/// Maximum number of requests that wait for a cleanup.
const MAX_CLEANUPS: usize = 8;
/// How long a request waits for a permit to read the ledger.
const LEDGER_READ_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns the age from which on a snapshot is no longer served.
pub fn stale_after(config: &Config) -> Duration {
    MAX_CYCLE_TIME + config.sample_interval
}

/// State that the routes share.
struct HttpState {
    snapshot_cache: Arc<SnapshotCache>,
    /// Reads the ledger; `None` until it is open.
    event_reader: Option<EventReader>,
    telemetry_path: String,
    enable_api: bool,
    enable_admin: bool,
    stale_after: Duration,
    /// Permits to read the ledger.
    ledger_reads: Arc<Semaphore>,
    /// Held while the metrics or the containers are rendered. Concurrent requests wait here rather than on blocking threads:
    /// the allocator retains memory for each thread.
    rendering: tokio::sync::Mutex<()>,
    /// Makes the GPU collector close the driver's library, and for how long.
    gpu: (Arc<DriverState>, Duration),
    /// Asks processes to clean up; `None` without the socket for them.
    reporter: Option<Arc<ReporterState>>,
    /// Permits to wait for a cleanup, fewer than the connections of the control socket.
    cleanups: Semaphore,
}

impl HttpState {
    fn newest(&self) -> Result<Arc<RenderedSnapshot>, NoSnapshot> {
        self.snapshot_cache.newest(Timestamp::now(), self.stale_after)
    }

    /// Returns the overview of the newest snapshot.
    fn overview(&self, details: Details<'_>) -> Result<Overview, NoSnapshot> {
        Ok(self.snapshot_cache.overview(self.newest()?.snapshot(), details))
    }

    /// Returns the containers that ran in the newest cycle.
    fn running_containers(&self) -> Result<Vec<Arc<Container>>, NoSnapshot> {
        let newest = self.newest()?;
        let snapshot = newest.snapshot();
        Ok(snapshot.containers.iter().take(snapshot.running).map(Arc::clone).collect())
    }

    /// Reads the ledger on a blocking thread, once a permit is available; 503 after [`LEDGER_READ_TIMEOUT`]. The thread
    /// holds only that permit: on a disk that hangs it never ends, and the request times out without it.
    async fn read_ledger<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Rejected> + Send + 'static,
    ) -> Result<T, Response> {
        let acquired = Arc::clone(&self.ledger_reads).acquire_owned();
        let Ok(Ok(permit)) = tokio::time::timeout(LEDGER_READ_TIMEOUT, acquired).await else {
            let text = "other requests are reading the ledger; try again\n";
            return Err((StatusCode::SERVICE_UNAVAILABLE, [(header::RETRY_AFTER, "1")], text).into_response());
        };
        let read = move || {
            let found = work();
            crate::host::heap::trim(); // records of many runs were parsed
            found
        };
        run_blocking(permit, read).await
    }
}

/// Returns the only running container that a name, in a pod also `POD/NAME`, or the beginning of an id means.
fn only_container<'a>(running: &'a [Arc<Container>], wanted: &str) -> Result<&'a Arc<Container>, Rejected> {
    let mut found: Vec<_> =
        running.iter().filter(|container| container.identity.matches_name(wanted)).collect();
    if found.is_empty() {
        found = running.iter().filter(|container| container.identity.is_of_pod(wanted)).collect();
    }
    if found.is_empty() && !wanted.is_empty() {
        found = running.iter().filter(|container| container.id.as_str().starts_with(wanted)).collect();
    }
    let paths = |containers: &[&Arc<Container>]| -> Vec<String> {
        containers.iter().map(|container| container.identity.path()).collect()
    };
    match found.as_slice() {
        [container] => Ok(container),
        [] => {
            let nearest = nearest(paths(&running.iter().collect::<Vec<_>>()), wanted);
            Err((StatusCode::NOT_FOUND, format!("no container {wanted:?} is running{nearest}\n")))
        }
        several => {
            let text = format!("{wanted:?} means several containers: {}\n", paths(several).join(", "));
            Err((StatusCode::CONFLICT, text))
        }
    }
}

/// A response that is no answer: its status, and its text with a line break.
type Rejected = (StatusCode, String);

/// The response to a request whose work failed.
fn failed(error: impl Display) -> Rejected {
    (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n"))
}

/// Responds with JSON.
fn json(body: impl Into<Body>) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body.into()).into_response()
}

/// The response to a request that reads the ledger, until that is open.
fn ledger_not_open() -> Response {
    let text = "the ledger is not open yet: its disk hangs, or another memledger still runs on it\n";
    (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
}

/// The response to a request with an invalid parameter.
fn bad_request(expected: String) -> Response {
    (StatusCode::BAD_REQUEST, expected + "\n").into_response()
}

impl IntoResponse for NoSnapshot {
    fn into_response(self) -> Response {
        (StatusCode::SERVICE_UNAVAILABLE, format!("{self}\n")).into_response()
    }
}

/// Builds the routes. While there is no ledger, those that read it respond 503.
pub fn router(
    config: &Config,
    snapshot_cache: Arc<SnapshotCache>,
    event_reader: Option<EventReader>,
    driver_state: Arc<DriverState>,
    reporter: Option<Arc<ReporterState>>,
    access_control: &Arc<AccessControl>,
) -> Router {
    let shared = Arc::new(HttpState {
        snapshot_cache,
        event_reader,
        telemetry_path: config.telemetry_path.clone(),
        enable_api: config.enable_api,
        enable_admin: config.enable_admin,
        stale_after: stale_after(config),
        ledger_reads: Arc::new(Semaphore::new(MAX_LEDGER_READS)),
        rendering: tokio::sync::Mutex::default(),
        gpu: (driver_state, config.gpu.release_for),
        reporter,
        cleanups: Semaphore::new(MAX_CLEANUPS),
    });
    let api = Router::new()
        .route("/api/v1/containers", get(containers))
        .route("/api/v1/overview", get(overview::route))
        .route("/api/v1/events", get(events::route))
        .route("/api/v1/runs", get(runs::list))
        .route("/api/v1/runs/{run}", get(runs::newest))
        .route("/api/v1/runs/{run}/advice", get(runs::advice))
        .route("/api/v1/containers/{name}/why", get(why::route))
        .route("/api/v1/why", get(why::last))
        .layer(middleware::from_fn_with_state(Arc::clone(&shared), guard_api));
    let admin = Router::new()
        .route("/-/release-gpu", post(gpu_release::route))
        .route("/api/v1/containers/{name}/cleanup", post(cleanup::route))
        .layer(middleware::from_fn_with_state(Arc::clone(&shared), guard_admin));
    let metrics = Router::new().route("/", get(landing_page)).route(&config.telemetry_path, get(metrics));
    let limited = |routes: Router<_>| {
        let limit = RequestLimit {
            permits: ClientLimit::new(config.limits.requests),
            access_control: Arc::clone(access_control),
        };
        routes.layer(middleware::from_fn_with_state(limit, limit_requests))
    };
    // the metrics have permits of their own, and health routes need none
    let health = Router::new().route("/-/healthy", get(healthy)).route("/-/ready", get(ready));
    limited(metrics).merge(limited(api.merge(admin))).merge(health).with_state(shared)
}

/// The routes that the listeners serve: without a ledger until it is open, as its disk may hang.
#[derive(Clone, Debug)]
pub struct CurrentRoutes(Arc<RwLock<Router>>);

impl CurrentRoutes {
    /// Begins with these routes.
    pub fn new(router: Router) -> Self {
        Self(Arc::new(RwLock::new(router)))
    }

    /// Replaces the routes, for open connections too.
    pub fn replace(&self, router: Router) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = router;
    }

    fn get(&self) -> Router {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The permit of a request, held until its response is sent and the work for it is done.
pub type RequestPermit = Arc<Permit>;

/// Limits the concurrent requests to some routes.
#[derive(Clone)]
struct RequestLimit {
    permits: ClientLimit,
    access_control: Arc<AccessControl>,
}

/// Responds 503 when too many requests are in progress, in all or from one client. A client that disconnects drops this future
/// at any point, and its permit with it; blocking tasks and the response body hold the permit until they are done.
async fn limit_requests(State(limit): State<RequestLimit>, mut request: Request, next: Next) -> Response {
    let peer = request.extensions().get::<Peer>();
    if peer.is_some_and(|peer| peer.on_control_socket) {
        return next.run(request).await; // its connections are few
    }
    let Some(permit) = peer.and_then(|peer| limit.permits.acquire(peer.client)).map(Arc::new) else {
        limit.access_control.count_rejected(RejectReason::Requests);
        let text = "too many requests in progress; see --web.max-requests\n";
        return (StatusCode::SERVICE_UNAVAILABLE, text).into_response();
    };
    request.extensions_mut().insert(Arc::clone(&permit));
    let mut response = next.run(request).await;
    response.extensions_mut().insert(permit);
    response
}

/// Runs work that takes milliseconds with thousands of series on a blocking thread. `held` is dropped when it is done. A panic
/// costs the request: its text is in the log only.
async fn run_blocking<T: Send + 'static>(
    held: impl Send + 'static,
    work: impl FnOnce() -> Result<T, Rejected> + Send + 'static,
) -> Result<T, Response> {
    let done = tokio::task::spawn_blocking(move || {
        let _held = held;
        work()
    });
    done.await.map_err(|_| server::internal_error())?.map_err(IntoResponse::into_response)
}

async fn healthy() -> &'static str {
    "memledger is healthy.\n"
}

async fn ready(State(shared): State<Arc<HttpState>>) -> Response {
    match shared.newest() {
        Ok(_) => "memledger is ready.\n".into_response(),
        Err(reason) => reason.into_response(),
    }
}

async fn landing_page(
    State(shared): State<Arc<HttpState>>,
    permit: Option<Extension<RequestPermit>>,
) -> Result<Response, Response> {
    let work = move || Ok(index_page::page(&shared.telemetry_path, shared.overview(Details::None)));
    Ok(Html(run_blocking(permit, work).await?).into_response())
}

async fn metrics(
    State(shared): State<Arc<HttpState>>,
    permit: Option<Extension<RequestPermit>>,
    headers: HeaderMap,
) -> Result<Response, Response> {
    let newest = shared.snapshot_cache.newest_or_partial(Timestamp::now(), shared.stale_after);
    let newest = newest.map_err(IntoResponse::into_response)?;
    let gzip = accepts(&headers, header::ACCEPT_ENCODING, "gzip");
    let turn = shared.rendering.lock().await;
    let text: Bytes = match newest.cached(gzip) {
        Some(Ok(text)) => text,
        _ => run_blocking(permit, move || newest.text(gzip).map_err(failed)).await?,
    };
    drop(turn);
    let mut response = Response::new(Body::from(text));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(prometheus::CONTENT_TYPE));
    headers.insert(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    if gzip {
        headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    Ok(response)
}

/// Returns whether an `Accept` header lists a value, and not with `q=0`. Wildcards do not count.
fn accepts(headers: &HeaderMap, header: HeaderName, wanted: &str) -> bool {
    let values = headers.get_all(header).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|listed| {
        let mut parts = listed.split(';').map(str::trim);
        let is_listed = parts.next().is_some_and(|name| name.eq_ignore_ascii_case(wanted));
        let is_excluded = parts.any(|part| part.strip_prefix("q=").is_some_and(|q| q.parse() == Ok(0.0_f32)));
        is_listed && !is_excluded
    })
}

/// Rejects requests for `/api/v1`, which names processes, unless they are authenticated or `--web.enable-api` is set. An
/// address is no authentication: any proxy or port-forward on this host connects from loopback.
async fn guard_api(State(shared): State<Arc<HttpState>>, request: Request, next: Next) -> Response {
    if !shared.enable_api && !is_authenticated(&request) {
        let text = "forbidden: the API names processes. Authenticate (--web.config.file), set --web.enable-api, or use the \
                    control socket (--local.socket), as memledger's verbs on this host do\n";
        return (StatusCode::FORBIDDEN, text).into_response();
    }
    next.run(request).await
}

/// Rejects requests to admin routes unless they are authenticated. Without `--web.enable-admin` the routes exist only on the
/// control socket.
async fn guard_admin(State(shared): State<Arc<HttpState>>, request: Request, next: Next) -> Response {
    let on_control_socket = request.extensions().get::<Peer>().is_some_and(|peer| peer.on_control_socket);
    if !shared.enable_admin && !on_control_socket {
        return StatusCode::NOT_FOUND.into_response();
    }
    if !is_authenticated(&request) {
        let text = "forbidden: admin routes need a password or a client certificate (--web.config.file), or the control \
                    socket (--local.socket)\n";
        return (StatusCode::FORBIDDEN, text).into_response();
    }
    if is_foreign_origin(request.headers()) {
        return (StatusCode::FORBIDDEN, "forbidden: the request comes from another web site\n")
            .into_response();
    }
    next.run(request).await
}

fn is_authenticated(request: &Request) -> bool {
    request.extensions().get::<Peer>().is_some_and(|peer| peer.is_authenticated)
}

/// Returns whether a page of another site made a browser send this: browsers set `Origin`, and send passwords along.
fn is_foreign_origin(headers: &HeaderMap) -> bool {
    let Some(origin) = headers.get(header::ORIGIN) else { return false };
    let site = origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|(_, site)| site);
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    site.is_none() || site != host
}

async fn containers(
    State(shared): State<Arc<HttpState>>,
    permit: Option<Extension<RequestPermit>>,
) -> Result<Response, Response> {
    let newest = shared.newest().map_err(IntoResponse::into_response)?;
    let turn = shared.rendering.lock().await;
    let body = match newest.cached_containers() {
        Some(body) => body,
        None => run_blocking(permit, move || Ok(newest.containers())).await?,
    };
    drop(turn);
    Ok(json(body))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: header::HeaderName, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name, HeaderValue::from_str(value).unwrap())])
    }

    #[test]
    fn accepts_only_what_is_listed() {
        let accepts =
            |value: &str| accepts(&with(header::ACCEPT_ENCODING, value), header::ACCEPT_ENCODING, "gzip");
        assert!(accepts("gzip") && accepts("deflate, GZIP;q=0.5"));
        for value in ["gzip;q=0", "gzip; q=0.0", "identity", "*", ""] {
            assert!(!accepts(value), "{value}");
        }
    }

    #[test]
    fn name_that_means_several_containers_is_refused() {
        let running = [Container::in_cgroup("abc1", "/1"), Container::in_cgroup("abd2", "/2")];
        assert_eq!(only_container(&running, "abd").unwrap().id.as_str(), "abd2");
        assert_eq!(only_container(&running, "ab").unwrap_err().0, StatusCode::CONFLICT);
        for wanted in ["", "x"] {
            assert_eq!(only_container(&running, wanted).unwrap_err().0, StatusCode::NOT_FOUND);
        }
    }

    #[test]
    fn text_of_a_panic_is_not_sent() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let response = runtime.block_on(async {
            let work = || -> Result<(), Rejected> { panic!("of /a/secret/path") };
            let response = run_blocking((), work).await.unwrap_err();
            axum::body::to_bytes(response.into_body(), 1_000).await.unwrap()
        });
        assert!(response.starts_with(b"the request failed, which is a bug"), "{response:?}");
    }

    #[test]
    fn origin_must_be_the_host_itself() {
        let of = |origin: &str| {
            let mut headers = with(header::ORIGIN, origin);
            headers.insert(header::HOST, HeaderValue::from_static("gpu7.example:10853"));
            is_foreign_origin(&headers)
        };
        assert!(!of("https://gpu7.example:10853") && !is_foreign_origin(&HeaderMap::new()));
        assert!(of("https://attacker.example") && of("null") && of("https://gpu7.example"));
    }
}
