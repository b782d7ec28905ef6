//! Listeners, their servers, and what is printed about them.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

use crate::cli::checks;
use crate::config::{Config, ConfigError, OtlpSettings};
use crate::gpu::DriverState;
use crate::http::{self, AccessControl, ControlSocket, CurrentRoutes};

/// Logs where data goes out, and which settings are ignored.
pub(super) fn log_settings(config: &Config, addresses: &[SocketAddr]) {
    for address in addresses {
        tracing::info!(%address, "listening");
    }
    if let (true, Some(otlp)) = (addresses.is_empty(), &config.otlp) {
        let exported = exported(otlp).join(", ");
        tracing::info!(
            "no HTTP listener: --web.listen-address is empty, only {exported} are exported, over OTLP"
        );
    }
    for notice in &config.engine_notices {
        tracing::warn!("{notice}");
    }
    for ignored in &config.otlp_ignored {
        tracing::warn!("{ignored}");
    }
}

/// Returns what is exported over OTLP.
fn exported(otlp: &OtlpSettings) -> Vec<&'static str> {
    let signals =
        [(&otlp.metrics, "metrics"), (&otlp.logs, "events"), (&otlp.traces, "traces of memledger itself")];
    signals.into_iter().filter(|(target, _)| target.is_some()).map(|(_, what)| what).collect()
}

/// Rejects settings that export nothing about the host.
pub(super) fn check_outlets(config: &Config) -> Result<(), ConfigError> {
    let has_otlp = config.otlp.as_ref().is_some_and(|otlp| otlp.metrics.is_some() || otlp.logs.is_some());
    if config.listen.is_empty() && !has_otlp {
        return Err(ConfigError::Value {
            origin: "--web.listen-address".to_owned(),
            what: "it is empty, and neither metrics nor events are exported over OTLP, so nothing would be exported; \
                   set an address such as :10853, or --otlp.endpoint"
                .to_owned(),
        });
    }
    Ok(())
}

/// Opens a listener per address.
pub(super) fn listen(addresses: &[SocketAddr]) -> anyhow::Result<Vec<TcpListener>> {
    let mut listeners = Vec::new();
    for address in addresses {
        let bound = match http::listen(*address) {
            // a host without IPv6: listen on all IPv4 addresses
            Err(error)
                if error.raw_os_error() == Some(rustix::io::Errno::AFNOSUPPORT.raw_os_error())
                    && address.ip().is_unspecified() =>
            {
                http::listen((std::net::Ipv4Addr::UNSPECIFIED, address.port()).into())
            }
            other => other,
        };
        let advice = match &bound {
            Err(error)
                if error.kind() == std::io::ErrorKind::AddrInUse && has_wildcard_of(addresses, *address) =>
            {
                ": another --web.listen-address has all addresses of that port; remove one of the two"
            }
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
                ": the address is in use by another program, perhaps another memledger; stop it or set another --web.listen-address"
            }
            _ => "",
        };
        listeners.push(bound.with_context(|| format!("cannot listen on {address}{advice}"))?);
    }
    Ok(listeners)
}

/// Returns whether one of these addresses and another one of that port cannot be listened on together.
fn has_wildcard_of(addresses: &[SocketAddr], address: SocketAddr) -> bool {
    let same_port = || addresses.iter().filter(|other| other.port() == address.port() && address.port() != 0);
    same_port().count() > 1 && same_port().any(|other| other.ip().is_unspecified())
}

/// The servers of all listeners.
pub(super) struct Servers {
    stop: watch::Sender<bool>,
    stopped: watch::Receiver<bool>,
    /// One task per server.
    pub(super) tasks: JoinSet<()>,
    routes: CurrentRoutes,
    access_control: Arc<AccessControl>,
}

impl Servers {
    /// Starts a server per listener, with these routes for now.
    pub(super) fn start(
        listeners: Vec<TcpListener>,
        router: axum::Router,
        access_control: Arc<AccessControl>,
    ) -> Self {
        let (stop, stopped) = watch::channel(false);
        let routes = CurrentRoutes::new(router);
        let mut this = Self { stop, stopped, tasks: JoinSet::new(), routes, access_control };
        for listener in listeners {
            let (routes, access_control) = (this.routes.clone(), Arc::clone(&this.access_control));
            this.tasks.spawn(http::serve(listener, routes, access_control, this.stop_signal()));
        }
        this
    }

    /// Returns what admits clients.
    pub(super) fn access_control(&self) -> &Arc<AccessControl> {
        &self.access_control
    }

    fn stop_signal(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut stopped = self.stopped.clone();
        async move { drop(stopped.wait_for(|stop| *stop).await) }
    }

    /// Serves these routes from now on, on the control socket too.
    pub(super) fn complete(&mut self, router: axum::Router, control_socket: Option<ControlSocket>) {
        self.routes.replace(router);
        if let Some(socket) = control_socket {
            let (routes, access_control) = (self.routes.clone(), Arc::clone(&self.access_control));
            self.tasks.spawn(http::serve_control_socket(socket, routes, access_control, self.stop_signal()));
        }
    }

    /// Stops accepting; requests in progress may finish.
    pub(super) fn stop(&self) {
        let _ = self.stop.send(true);
    }
}

/// Creates the control socket. A failure is only a warning: everything else works without it.
pub(super) fn bind_control_socket(config: &Config) -> Option<ControlSocket> {
    let path = config.local.socket.as_deref()?;
    match http::bind(path, &config.local) {
        Ok(socket) => {
            tracing::info!(path = %path.display(), "control socket ready");
            Some(socket)
        }
        Err(reason) => {
            let advice = "memledger's verbs on this host cannot query this process; set another --local.socket, or an empty one";
            tracing::warn!(reason, advice, "no control socket");
            None
        }
    }
}

/// Prints a summary after the first snapshot: what was found, what is missing, the URL of the metrics.
pub(super) async fn print_startup_summary(
    config: Config,
    addresses: Vec<SocketAddr>,
    first: Arc<Notify>,
    driver: Option<Arc<DriverState>>,
    access_control: Arc<AccessControl>,
) {
    first.notified().await;
    // the checks read files, which may hang
    let (runtime, telemetry_path) = (Handle::current(), config.telemetry_path.clone());
    let checks = tokio::task::spawn_blocking(move || {
        runtime.block_on(checks::run_checks(&config, checks::Verbosity::Short, driver.as_deref()))
    });
    let Ok(checks) = checks.await else { return };
    let mut text = checks::render(&checks, checks::Verbosity::Short);
    for address in addresses {
        let host =
            if address.ip().is_unspecified() { "localhost".to_owned() } else { address.ip().to_string() };
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        let (scheme, port) = (access_control.scheme(), address.port());
        text.push_str(&format!("\nMetrics: {scheme}://{host}:{port}{telemetry_path}\n"));
    }
    let _ = crate::cli::print(&format!("{text}\n")); // standard output may be closed
}
