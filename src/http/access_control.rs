//! Access control for all listeners: TLS, passwords, client certificates, rate and connection limits.
//!
//! `--web.config.file` and the files that it names are read again every second. A valid change is applied as it is written, also one
//! that removes protection; an invalid one is logged once, and the configuration before it stays in use. What counts is what two reads in
//! a row agree on: a file that is being written is empty or incomplete for a moment, and that must not open anything.
//!
//! Each change to who is admitted starts a new generation of the configuration; connections of older generations are closed.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use rustls::ServerConfig;
use tokio::sync::watch;

use super::basic_auth::{AuthOutcome, BasicAuth, Credentials};
use super::limits::{ClientLimit, Permit, RateLimiter};
use super::tls::ConfigFiles;
use crate::clock::Timestamp;
use crate::config::web::ClientAuth;
use crate::config::{Config, ConfigError, HttpLimits};
use crate::host::Health;
use crate::stats::http_stats::{HttpStats, RejectReason};
use crate::text::error_chain;

/// How often the configuration files are read.
const RELOAD_INTERVAL: Duration = Duration::from_secs(1);
/// Reading them takes longer only where their file system hangs.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// Connections above the limit that are served to be rejected, of all clients and of one.
const MAX_REJECTED: usize = 32;
const MAX_REJECTED_PER_CLIENT: usize = 8;

/// A query that makes authorization panic, in unit tests only.
#[cfg(test)]
pub const PANIC_OF_TEST: &str = "panic-in-authorization";

/// The client of a request.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// Its address.
    pub client: IpAddr,
    /// Has presented a valid password, or a certificate of the clients' CA.
    pub is_authenticated: bool,
    /// A process of this host on the control socket.
    pub on_control_socket: bool,
}

impl Peer {
    /// Returns a client that has presented nothing yet.
    pub fn remote(client: IpAddr) -> Self {
        Self { client, is_authenticated: false, on_control_socket: false }
    }

    /// Returns a process of this host on the control socket.
    pub fn control_socket() -> Self {
        Self { client: Ipv4Addr::LOCALHOST.into(), is_authenticated: true, on_control_socket: true }
    }
}

/// The security settings in force.
#[derive(Default)]
pub struct SecurityConfig {
    files: ConfigFiles,
    /// TLS settings; `None` for plain HTTP.
    pub tls: Option<Arc<ServerConfig>>,
    headers: HeaderMap,
    /// Increases with each change to who is admitted.
    pub generation: u64,
}

impl SecurityConfig {
    fn from_files(files: ConfigFiles, file: &Path) -> Result<Self, ConfigError> {
        let tls = files.server_config(file)?;
        let headers = files.config.headers.iter().filter_map(|(name, value)| {
            let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
            Some((name, HeaderValue::from_str(value).ok()?))
        });
        Ok(Self { headers: headers.collect(), tls, files, generation: 0 })
    }

    /// Returns a summary for people.
    fn describe(&self) -> String {
        let users = match self.files.config.users.len() {
            0 => "no passwords".to_owned(),
            1 => "1 user".to_owned(),
            users => format!("{users} users"),
        };
        let tls = match (&self.tls, self.client_auth()) {
            (None, _) => "plain HTTP",
            (Some(_), ClientAuth::RequireAndVerify) => "TLS, client certificates verified",
            (Some(_), _) => "TLS",
        };
        format!("{tls}, {users}")
    }

    fn client_auth(&self) -> ClientAuth {
        self.files.config.tls.as_ref().map_or(ClientAuth::None, |tls| tls.client_auth)
    }

    /// Returns whether certificates that clients present are verified.
    pub fn verifies_clients(&self) -> bool {
        self.client_auth() != ClientAuth::None
    }

    fn warn_of_clear_text(&self, is_remote: bool) {
        if self.tls.is_none() && self.requires_password() && is_remote {
            tracing::warn!(
                "basic authentication without TLS sends passwords in clear text: add tls_server_config to --web.config.file"
            );
        }
    }

    fn requires_password(&self) -> bool {
        !self.files.config.users.is_empty()
    }
}

/// What the reads of the configuration files gave, one a second.
#[derive(Default)]
struct Reload {
    /// The last read; what it gave is not applied until the next one gives the same.
    last_read: Option<Result<ConfigFiles, String>>,
    health: Health,
}

/// Admits connections and requests.
pub struct AccessControl {
    file: Option<PathBuf>,
    security: RwLock<Arc<SecurityConfig>>,
    /// A listener can be reached from other hosts.
    is_remote: bool,
    stats: Arc<HttpStats>,
    basic_auth: BasicAuth,
    rate_limiter: RateLimiter,
    connection_limit: ClientLimit,
    rejected_connections: ClientLimit,
    /// Changes when open connections are to be closed.
    closing: watch::Sender<()>,
    /// Limits of each connection.
    pub limits: HttpLimits,
}

impl AccessControl {
    /// Creates the access control for these settings; rejections are counted in `stats`.
    ///
    /// # Errors
    /// `--web.config.file`, or a file that it names, is unusable.
    pub fn new(config: &Config, stats: Arc<HttpStats>) -> anyhow::Result<Self> {
        let security = match &config.web_config {
            Some(file) => SecurityConfig::from_files(ConfigFiles::read(file)?, file)?,
            None => SecurityConfig::default(),
        };
        if config.web_config.is_some() {
            stats.set_config_in_use(true);
        }
        let is_remote = |address: &SocketAddr| !address.ip().to_canonical().is_loopback();
        let is_remote = config.listen.iter().any(is_remote);
        security.warn_of_clear_text(is_remote);
        Ok(Self {
            file: config.web_config.clone(),
            security: RwLock::new(Arc::new(security)),
            is_remote,
            stats,
            basic_auth: BasicAuth::new()
                .map_err(|_| anyhow::anyhow!("cannot read random numbers from the kernel"))?,
            rate_limiter: RateLimiter::default(),
            connection_limit: ClientLimit::new(config.limits.connections),
            rejected_connections: ClientLimit::with_share(MAX_REJECTED, MAX_REJECTED_PER_CLIENT),
            closing: watch::Sender::new(()),
            limits: config.limits,
        })
    }

    /// Returns the settings in force.
    pub fn security(&self) -> Arc<SecurityConfig> {
        Arc::clone(&self.security.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns `http` or `https`.
    pub fn scheme(&self) -> &'static str {
        if self.security().tls.is_some() { "https" } else { "http" }
    }

    /// Counts a rejected connection or request.
    pub fn count_rejected(&self, reason: RejectReason) {
        self.stats.count_rejected(reason);
    }

    /// Returns a receiver that changes when open connections are to be closed.
    pub fn closing(&self) -> watch::Receiver<()> {
        self.closing.subscribe()
    }

    /// Closes open connections, after the response in progress.
    pub fn close_connections(&self) {
        self.closing.send_replace(());
    }

    /// Returns a permit for a new connection.
    ///
    /// # Errors
    /// A limit is reached. The permit is one to be rejected by, if there is one left.
    pub fn admit_connection(&self, client: IpAddr) -> Result<Permit, Option<Permit>> {
        self.connection_limit.acquire(client).ok_or_else(|| {
            self.count_rejected(RejectReason::Connections);
            self.rejected_connections.acquire(client)
        })
    }

    /// Authenticates a request and applies the rate limit. Returns the client, or the response that rejects the request.
    pub async fn authorize(
        &self,
        security: &SecurityConfig,
        peer: Peer,
        request: &Parts,
    ) -> Result<Peer, Response> {
        #[cfg(test)]
        assert_ne!(request.uri.query(), Some(PANIC_OF_TEST));
        // health routes are open to all and not rate-limited: probes have no password, and a flood must not fail them
        if is_health(request.uri.path()) || peer.on_control_socket {
            return Ok(peer);
        }
        let mut credentials = request.headers.get_all(header::AUTHORIZATION).iter();
        let credentials = match (credentials.next(), credentials.next()) {
            (Some(value), None) => Credentials::parse(value.as_bytes()),
            _ => None,
        };
        let users = &security.files.config.users;
        if let Some(rate) = security.files.config.rate
            && !self.rate_limiter.take_token(peer.client, rate, Timestamp::now())
        {
            self.count_rejected(RejectReason::Rate);
            return Err((StatusCode::TOO_MANY_REQUESTS, "rate_limit exceeded; retry later\n").into_response());
        }
        if !security.requires_password() {
            return Ok(peer);
        }
        let outcome = match credentials {
            Some(credentials) => self.basic_auth.check(users, &credentials, peer.client).await,
            None => AuthOutcome::Invalid,
        };
        match outcome {
            AuthOutcome::Valid => Ok(Peer { is_authenticated: true, ..peer }),
            AuthOutcome::Invalid => {
                self.count_rejected(RejectReason::Password);
                let challenge = [(header::WWW_AUTHENTICATE, "Basic realm=\"memledger\", charset=\"UTF-8\"")];
                let text = "authentication required: user name and password\n";
                Err((StatusCode::UNAUTHORIZED, challenge, text).into_response())
            }
            AuthOutcome::Failed => Err(super::server::internal_error()),
            AuthOutcome::Busy => {
                self.count_rejected(RejectReason::PasswordQueue);
                let text = "too many password checks are waiting; retry\n";
                Err((StatusCode::SERVICE_UNAVAILABLE, [(header::RETRY_AFTER, "1")], text).into_response())
            }
        }
    }

    /// Adds the configured headers to a response.
    pub fn add_headers(&self, security: &SecurityConfig, response: &mut Response) {
        for (name, value) in &security.headers {
            response.headers_mut().insert(name, value.clone());
        }
    }

    /// Reloads the configuration whenever its files change, for ever.
    pub async fn follow(self: Arc<Self>) {
        let Some(file) = self.file.clone() else { return };
        let mut reload = Reload::default();
        loop {
            tokio::time::sleep(RELOAD_INTERVAL).await;
            let path = file.clone();
            // reads may hang on a network file system
            let mut reading = tokio::task::spawn_blocking(move || ConfigFiles::read(&path));
            let read = match tokio::time::timeout(READ_TIMEOUT, &mut reading).await {
                Ok(read) => read,
                Err(_) => {
                    let error = "reading it takes long: its file system hangs".to_owned();
                    self.report_rejected(&file, error, &mut reload);
                    reading.await
                }
            };
            let read = read.map_err(|error| error.to_string());
            self.reload(&file, read.and_then(|read| read.map_err(|error| error_chain(&error))), &mut reload);
        }
    }

    /// Applies what was read of the files, once two reads in a row gave it.
    fn reload(&self, file: &Path, read: Result<ConfigFiles, String>, reload: &mut Reload) {
        if reload.last_read.as_ref() != Some(&read) {
            reload.last_read = Some(read);
            return;
        }
        match read.and_then(|files| self.apply(files, file)) {
            Ok(is_new) => {
                if reload.health.recovered() || is_new {
                    let access = self.security().describe();
                    tracing::info!(file = %file.display(), access, "web configuration reloaded");
                }
                self.stats.set_config_in_use(true);
            }
            Err(error) => self.report_rejected(file, error, reload),
        }
    }

    /// Logs an error once.
    fn report_rejected(&self, file: &Path, error: String, reload: &mut Reload) {
        if reload.health.failed_because(Timestamp::now(), &error) {
            let message = "web configuration rejected; the previous one stays in use";
            tracing::warn!(file = %file.display(), error, message);
        }
        self.stats.set_config_in_use(false);
    }

    /// Applies a configuration. Returns whether it differs from the one in use.
    fn apply(&self, files: ConfigFiles, file: &Path) -> Result<bool, String> {
        let old = self.security();
        if old.files == files {
            return Ok(false);
        }
        let mut newer = SecurityConfig::from_files(files, file).map_err(|error| error_chain(&error))?;
        let is_access_changed = !old.files.admits_same_clients(&newer.files);
        newer.generation = old.generation + u64::from(is_access_changed);
        newer.warn_of_clear_text(self.is_remote);
        *self.security.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(newer);
        if is_access_changed {
            self.close_connections();
        }
        Ok(true)
    }
}

/// Returns a summary of a web configuration, for people.
///
/// # Errors
/// The file, or one that it names, is unusable.
pub fn describe(file: &Path) -> Result<String, ConfigError> {
    SecurityConfig::from_files(ConfigFiles::read(file)?, file).map(|security| security.describe())
}

fn is_health(path: &str) -> bool {
    matches!(path, "/-/healthy" | "/-/ready")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::test_server::config_of;

    #[test]
    fn change_counts_once_two_reads_agree() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("web.yml");
        let users = format!("basic_auth_users:\n  ann: {}\n", bcrypt::hash("secret", 4).unwrap());
        std::fs::write(&file, &users).unwrap();
        let config = config_of(&[&format!("--web.config.file={}", file.display())]);
        let access_control = AccessControl::new(&config, Arc::default()).unwrap();
        let mut reload = Reload::default();
        let mut requires_password_after = |text: &str| {
            std::fs::write(&file, text).unwrap();
            let read = ConfigFiles::read(&file).map_err(|error| error_chain(&error));
            access_control.reload(&file, read, &mut reload);
            (access_control.security().requires_password(), reload.health.is_failing())
        };
        let (required, none) = ((true, false), (false, false));
        // empty for a moment, as it is being written; then incomplete
        for text in ["", &users[..40], &users, &users, ""] {
            assert_eq!(requires_password_after(text), required, "{text:?}");
        }
        assert_eq!(requires_password_after(""), none, "as it is written");
        for is_failing in [false, true] {
            assert_eq!(requires_password_after("basic_auth_users: [\n"), (false, is_failing));
        }
        assert!(!requires_password_after(&users).0);
        assert_eq!(requires_password_after(&users), required);
    }
}
