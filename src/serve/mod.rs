//! HTTP: the newest snapshot, rendered at most once however many ask.
//!
//! Not here: sampling. A request never waits for the kernel or the driver.

mod answer;
mod connections;
mod door;
mod events;
mod frames;
mod landing;
#[cfg(any(test, fuzzing))]
pub mod laws;
mod parties;
mod passwords;
mod places;
mod published;
mod pulse;
mod release;
mod table;
mod tls;
mod watched;
mod why;

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};

pub use connections::{listen, serve};
use door::Caller;
pub use door::{Door, describe};
use places::{Place, Places, Taking};
use published::NoSnapshot;
pub use published::{Newest, Published};
use pulse::Pulse;

use crate::clock::Moment;
use crate::collect::front::Refusal;
use crate::collect::gpu::Control;
use crate::config::Config;
use crate::export::{json, prometheus};
use crate::ledger::store::Archive;

/// A snapshot older than this, or than ten intervals, is not shown: sampling hangs.
const LONGEST_HANG: Duration = Duration::from_secs(30);

/// Age from which on a snapshot is not shown any more.
pub fn stale_after(config: &Config) -> Duration {
    LONGEST_HANG.max(config.sample_interval * 10)
}

/// What the routes share.
struct Shared {
    published: Arc<Published>,
    /// The ledger, if there is one.
    archive: Option<Archive>,
    telemetry_path: String,
    enable_api: bool,
    stale_after: Duration,
    places: Arc<Places>,
    /// Held by who waits for the metrics to be rendered.
    rendering: tokio::sync::Mutex<()>,
    door: Arc<Door>,
    /// Makes the GPU collector let go of the driver, and for how long.
    gpu: (Arc<Control>, Duration),
}

impl Shared {
    fn newest(&self) -> Result<Arc<Newest>, NoSnapshot> {
        self.published.newest(Moment::now(), self.stale_after)
    }

    /// A place for this request; `None` if there is none, or it came through no connection.
    fn place(&self, request: &Request) -> Option<Place> {
        let caller = request.extensions().get::<Caller>()?;
        let pulse = request.extensions().get::<Arc<Pulse>>()?;
        match self.places.take(caller.address.ip(), pulse, Moment::now()) {
            Taking::Free(place) => Some(place),
            Taking::InPlaceOfAnother(place) => {
                self.door.refuse(Refusal::Requests);
                Some(place)
            }
            Taking::Full => {
                self.door.refuse(Refusal::Requests);
                None
            }
        }
    }
}

impl IntoResponse for NoSnapshot {
    fn into_response(self) -> Response {
        (StatusCode::SERVICE_UNAVAILABLE, format!("{self}\n")).into_response()
    }
}

/// The routes. Without a store, events are answered 503.
pub fn router(
    config: &Config,
    published: Arc<Published>,
    archive: Option<Archive>,
    control: Arc<Control>,
    door: &Arc<Door>,
) -> Router {
    let shared = Arc::new(Shared {
        published,
        archive,
        telemetry_path: config.telemetry_path.clone(),
        enable_api: config.enable_api,
        stale_after: stale_after(config),
        places: Places::new(config.limits.requests),
        rendering: tokio::sync::Mutex::default(),
        door: Arc::clone(door),
        gpu: (control, config.gpu.release_for),
    });
    let api = Router::new()
        .route("/api/v1/containers", get(containers))
        .route("/api/v1/events", get(events::route))
        .route("/api/v1/containers/{name}/why", get(why::route))
        .layer(middleware::from_fn_with_state(Arc::clone(&shared), guard_api));
    let admin = match config.enable_admin {
        true => Router::new()
            .route("/-/release-gpu", post(release::route))
            .layer(middleware::from_fn(guard_admin)),
        false => Router::new(),
    };
    let limited = Router::new()
        .route("/", get(landing_page))
        .route(&config.telemetry_path, get(metrics))
        .merge(api)
        .merge(admin)
        .layer(middleware::from_fn_with_state(Arc::clone(&shared), limit));
    // the health routes answer whatever goes on
    let health = Router::new().route("/-/healthy", get(healthy)).route("/-/ready", get(ready));
    limited.merge(health).with_state(shared)
}

/// Answers 503 when too many requests are under way, in all or from one address. A client that goes away drops this future at
/// any point, and its place with it; work on another thread, and the answer's body, keep the place until they are done.
async fn limit(State(shared): State<Arc<Shared>>, mut request: Request, next: Next) -> Response {
    let Some(place) = shared.place(&request) else {
        let text = "too many requests at once; see --web.max-requests\n";
        return (StatusCode::SERVICE_UNAVAILABLE, text).into_response();
    };
    request.extensions_mut().insert(Arc::clone(&place));
    let mut response = next.run(request).await;
    response.extensions_mut().insert(place);
    response
}

/// Runs what takes milliseconds with thousands of series off the threads that answer others.
async fn aside<T: Send + 'static>(
    place: Place,
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, Response> {
    let done = tokio::task::spawn_blocking(move || {
        let _place = place;
        work()
    });
    let done = done.await.map_err(|error| error.to_string()).flatten();
    done.map_err(|error| (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response())
}

async fn healthy() -> &'static str {
    "memledger is healthy.\n"
}

async fn ready(State(shared): State<Arc<Shared>>) -> Response {
    match shared.newest() {
        Ok(_) => "memledger is ready.\n".into_response(),
        Err(reason) => reason.into_response(),
    }
}

async fn landing_page(State(shared): State<Arc<Shared>>, Extension(place): Extension<Place>) -> Response {
    match aside(place, move || Ok(landing::page(&shared.telemetry_path, shared.newest()))).await {
        Ok(page) => ([(header::CONTENT_TYPE, "text/html; charset=UTF-8")], page).into_response(),
        Err(response) => response,
    }
}

async fn metrics(
    State(shared): State<Arc<Shared>>,
    Extension(place): Extension<Place>,
    headers: HeaderMap,
) -> Response {
    let newest = match shared.newest() {
        Ok(newest) => newest,
        Err(reason) => return reason.into_response(),
    };
    let gzip = accepts_gzip(&headers);
    // who comes meanwhile waits here and not on a thread: the allocator keeps for each thread what that took once
    let turn = shared.rendering.lock().await;
    let made = newest.made(gzip);
    let text: Bytes = match made {
        Some(Ok(text)) => text,
        _ => match aside(place, move || newest.text(gzip)).await {
            Ok(text) => text,
            Err(response) => return response,
        },
    };
    drop(turn);
    let mut response = Response::new(Body::from(text));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(prometheus::CONTENT_TYPE));
    headers.insert(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    if gzip {
        headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    response
}

/// True if the client takes gzip: named without `q=0`.
fn accepts_gzip(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|coding| {
        let mut parts = coding.split(';').map(str::trim);
        let named = parts.next().is_some_and(|name| name.eq_ignore_ascii_case("gzip"));
        let refused = parts.any(|part| part.strip_prefix("q=").is_some_and(|q| q.parse() == Ok(0.0_f32)));
        named && !refused
    })
}

/// Lets requests for `/api/v1` pass from those that are known and from this host only, unless it was opened: it lists
/// processes.
async fn guard_api(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    if !shared.enable_api && !is_known_or_local(&request) {
        let text = "this lists processes: it answers on the loopback addresses, or with a password of --web.config.file; \
                    --web.enable-api opens it\n";
        return (StatusCode::FORBIDDEN, text).into_response();
    }
    next.run(request).await
}

/// Lets requests that change what memledger does pass from those that are known and from this host only.
async fn guard_admin(request: Request, next: Next) -> Response {
    if !is_known_or_local(&request) {
        let text = "this changes what memledger does: it answers on the loopback addresses, or with a password of \
                    --web.config.file\n";
        return (StatusCode::FORBIDDEN, text).into_response();
    }
    next.run(request).await
}

fn is_known_or_local(request: &Request) -> bool {
    let Some(caller) = request.extensions().get::<Caller>() else { return false };
    let headers = request.headers();
    // HTTP/2, and HTTP/1 with a whole URL, name the host elsewhere
    let of_url = request.uri().authority().map(|authority| authority.as_str());
    let of_header = headers.get(header::HOST).map(|host| host.to_str().unwrap_or(""));
    let mut hosts = of_url.into_iter().chain(of_header).peekable();
    caller.is_known
        || caller.address.ip().to_canonical().is_loopback()
            && hosts.peek().is_some() // HTTP/1.0 may name none
            && hosts.all(is_loopback)
            && !was_passed_on(headers)
}

async fn containers(State(shared): State<Arc<Shared>>, Extension(place): Extension<Place>) -> Response {
    let newest = match shared.newest() {
        Ok(newest) => newest,
        Err(reason) => return reason.into_response(),
    };
    match aside(place, move || Ok(format!("{:#}\n", json::containers(newest.snapshot())))).await {
        Ok(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
        Err(response) => response,
    }
}

/// A web page of somebody else that had its name pointed at 127.0.0.1 sends that name as host: it gets nothing.
fn is_loopback(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>();
    name.eq_ignore_ascii_case("localhost")
        || address.is_ok_and(|address| address.to_canonical().is_loopback())
}

/// A proxy on this host connects from loopback whoever asks it; these are the headers by which it can be told.
fn was_passed_on(headers: &HeaderMap) -> bool {
    let by_a_proxy =
        |name: &str| matches!(name, "forwarded" | "via" | "x-real-ip") || name.starts_with("x-forwarded-");
    headers.keys().any(|name| by_a_proxy(name.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: header::HeaderName, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name, HeaderValue::from_str(value).unwrap())])
    }

    #[test]
    fn gzip_is_sent_only_to_those_who_take_it() {
        for (value, takes) in [
            ("gzip", true),
            ("deflate, GZIP;q=0.5", true),
            ("gzip;q=0", false),
            ("gzip; q=0.0", false),
            ("identity", false),
        ] {
            assert_eq!(accepts_gzip(&with(header::ACCEPT_ENCODING, value)), takes, "{value}");
        }
        assert!(!accepts_gzip(&HeaderMap::new()));
    }

    #[test]
    fn a_foreign_name_that_points_at_loopback_is_not_loopback() {
        for (host, is) in [
            ("localhost:10853", true),
            ("127.0.0.1", true),
            ("[::1]:10853", true),
            ("attacker.example:10853", false),
            ("10.0.0.1:10853", false),
        ] {
            assert_eq!(is_loopback(host), is, "{host}");
        }
    }
}
