//! HTTP: the newest snapshot, rendered at most once however many ask.
//!
//! Not here: sampling. A request never waits for the kernel or the driver.

mod landing;
mod published;

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

pub use published::Published;
use published::{Newest, NoSnapshot};

use crate::clock::Moment;
use crate::config::Config;
use crate::export::{json, prometheus};

/// A snapshot older than this, or than ten intervals, is not shown: sampling hangs.
const LONGEST_HANG: Duration = Duration::from_secs(30);

/// What the routes share.
#[derive(Debug)]
struct Shared {
    published: Arc<Published>,
    telemetry_path: String,
    enable_api: bool,
    max_requests: usize,
    stale_after: Duration,
    under_way: AtomicUsize,
}

impl Shared {
    fn newest(&self) -> Result<Arc<Newest>, NoSnapshot> {
        self.published.newest(Moment::now(), self.stale_after)
    }
}

impl IntoResponse for NoSnapshot {
    fn into_response(self) -> Response {
        (StatusCode::SERVICE_UNAVAILABLE, format!("{self}\n")).into_response()
    }
}

/// The routes.
pub fn router(config: &Config, published: Arc<Published>) -> Router {
    let shared = Arc::new(Shared {
        published,
        telemetry_path: config.telemetry_path.clone(),
        enable_api: config.enable_api,
        max_requests: config.max_requests,
        stale_after: LONGEST_HANG.max(config.sample_interval * 10),
        under_way: AtomicUsize::new(0),
    });
    let limited = Router::new()
        .route("/", get(landing_page))
        .route(&config.telemetry_path, get(metrics))
        .route("/api/v1/containers", get(containers))
        .layer(middleware::from_fn_with_state(Arc::clone(&shared), limit));
    // the health routes answer whatever goes on
    let health = Router::new().route("/-/healthy", get(healthy)).route("/-/ready", get(ready));
    limited.merge(health).with_state(shared)
}

/// Serves until `stop` resolves; requests under way may finish.
///
/// # Errors
/// The listener fails.
pub async fn serve(
    listener: tokio::net::TcpListener,
    router: Router,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let service = router.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, service).with_graceful_shutdown(stop).await
}

/// Answers 503 when too many requests are under way.
async fn limit(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    let before = shared.under_way.fetch_add(1, Ordering::Relaxed);
    let response = if shared.max_requests > 0 && before >= shared.max_requests {
        (StatusCode::SERVICE_UNAVAILABLE, "too many requests at once; see --web.max-requests\n")
            .into_response()
    } else {
        next.run(request).await
    };
    shared.under_way.fetch_sub(1, Ordering::Relaxed);
    response
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

async fn landing_page(State(shared): State<Arc<Shared>>) -> Response {
    let page = landing::page(&shared.telemetry_path, shared.newest());
    ([(header::CONTENT_TYPE, "text/html; charset=UTF-8")], page).into_response()
}

async fn metrics(State(shared): State<Arc<Shared>>, headers: HeaderMap) -> Response {
    let newest = match shared.newest() {
        Ok(newest) => newest,
        Err(reason) => return reason.into_response(),
    };
    let gzip = accepts_gzip(&headers);
    // rendering thousands of series takes milliseconds: not on a thread that answers others
    let rendered = tokio::task::spawn_blocking(move || newest.text(gzip)).await;
    let text: Bytes = match rendered {
        Ok(Ok(text)) => text,
        Ok(Err(error)) => return (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
        Err(error) => return (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    };
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

async fn containers(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
) -> Response {
    let local = peer.ip().to_canonical().is_loopback() && asks_for_loopback(&headers);
    if !shared.enable_api && !local {
        let text =
            "this lists processes and answers only on the loopback addresses; --web.enable-api opens it\n";
        return (StatusCode::FORBIDDEN, text).into_response();
    }
    match shared.newest() {
        Ok(newest) => {
            let body = json::containers(newest.snapshot());
            ([(header::CONTENT_TYPE, "application/json")], format!("{body:#}\n")).into_response()
        }
        Err(reason) => reason.into_response(),
    }
}

/// A web page of somebody else that had its name pointed at 127.0.0.1 sends that name as host: it gets nothing.
fn asks_for_loopback(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(header::HOST).and_then(|host| host.to_str().ok()) else { return true };
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>();
    name.eq_ignore_ascii_case("localhost")
        || address.is_ok_and(|address| address.to_canonical().is_loopback())
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
            assert_eq!(asks_for_loopback(&with(header::HOST, host)), is, "{host}");
        }
    }
}
