//! Access control for all listeners: TLS, passwords, client certificates, rate and connection limits.
//!
//! `--web.config.file` and the files that it names are read again every second. An unusable configuration is logged once and
//! the previous one stays in use. The same holds for a change that would remove protection at run time, such as TLS or the
//! last user: a file that is being written is empty for a moment, and that must not open anything. To remove protection,
//! restart memledger.
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
use crate::config::web::{ClientAuth, TlsVersion};
use crate::config::{Config, ConfigError, HttpLimits};
use crate::stats::http_stats::{HttpStats, RejectReason};
use crate::text::error_chain;

/// How often the configuration files are read.
const RELOAD_INTERVAL: Duration = Duration::from_secs(1);

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
        matches!(self.client_auth(), ClientAuth::VerifyIfGiven | ClientAuth::RequireAndVerify)
    }

    fn limits_ciphers(&self) -> [bool; 2] {
        let tls = self.files.config.tls.as_ref();
        tls.map_or([false; 2], |tls| [!tls.cipher_suites.is_empty(), !tls.groups.is_empty()])
    }

    fn requires_password(&self) -> bool {
        !self.files.config.users.is_empty()
    }

    fn restricts_client_names(&self) -> bool {
        self.files.config.tls.as_ref().is_some_and(|tls| !tls.client_names.is_empty())
    }

    fn min_version(&self) -> Option<TlsVersion> {
        self.files.config.tls.as_ref().map(|tls| tls.lowest)
    }

    /// Returns which protection `newer` would remove; `None` if it removes none.
    fn weakened_by(&self, newer: &Self) -> Option<&'static str> {
        if self.tls.is_some() && newer.tls.is_none() {
            return Some("TLS would be turned off");
        }
        if self.requires_password() && !newer.requires_password() {
            return Some("passwords would no longer be required");
        }
        if self.client_auth().is_mandatory() && !newer.client_auth().is_mandatory() {
            return Some("client certificates would no longer be required");
        }
        if self.client_auth() == ClientAuth::RequireAndVerify && !newer.verifies_clients() {
            return Some("client certificates would no longer be verified");
        }
        if self.restricts_client_names() && !newer.restricts_client_names() {
            return Some("client certificates of any name would be accepted");
        }
        if self.min_version() > newer.min_version() {
            return Some("an older TLS version would be accepted");
        }
        if std::iter::zip(self.limits_ciphers(), newer.limits_ciphers()).any(|(old, new)| old && !new) {
            return Some("cipher suites or curves would no longer be limited");
        }
        let (old, new) = (self.files.config.rate, newer.files.config.rate);
        (old.is_some() && new.is_none()).then_some("rate_limit would be turned off")
    }
}

/// Admits connections and requests.
pub struct AccessControl {
    file: Option<PathBuf>,
    security: RwLock<Arc<SecurityConfig>>,
    stats: Arc<HttpStats>,
    basic_auth: BasicAuth,
    rate_limiter: RateLimiter,
    connection_limit: ClientLimit,
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
        if security.tls.is_none() && security.requires_password() && config.listen.iter().any(is_remote) {
            tracing::warn!(
                "basic authentication without TLS sends passwords in clear text: add tls_server_config to --web.config.file"
            );
        }
        Ok(Self {
            file: config.web_config.clone(),
            security: RwLock::new(Arc::new(security)),
            stats,
            basic_auth: BasicAuth::new()
                .map_err(|_| anyhow::anyhow!("cannot read random numbers from the kernel"))?,
            rate_limiter: RateLimiter::default(),
            connection_limit: ClientLimit::new(config.limits.connections),
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

    /// Returns a permit for a new connection; `None` if a limit is reached.
    pub fn admit_connection(&self, client: IpAddr) -> Option<Permit> {
        let permit = self.connection_limit.acquire(client);
        if permit.is_none() {
            self.count_rejected(RejectReason::Connections);
        }
        permit
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
        let mut last_error = String::new();
        loop {
            tokio::time::sleep(RELOAD_INTERVAL).await;
            let (this, path) = (Arc::clone(&self), file.clone());
            // reads may hang on a network file system
            let reloaded = tokio::task::spawn_blocking(move || this.reload_if_changed(&path)).await;
            match reloaded.unwrap_or_else(|error| Err(error.to_string())) {
                Ok(is_new) => {
                    if is_new || !last_error.is_empty() {
                        tracing::info!(file = %file.display(), "web configuration reloaded");
                    }
                    last_error.clear();
                    self.stats.set_config_in_use(true);
                }
                Err(error) => {
                    if error != last_error {
                        let message = "web configuration rejected; the previous one stays in use";
                        tracing::warn!(file = %file.display(), error, message);
                    }
                    last_error = error;
                    self.stats.set_config_in_use(false);
                }
            }
        }
    }

    /// Reads the files and applies a change. Returns whether there was one.
    fn reload_if_changed(&self, file: &Path) -> Result<bool, String> {
        let chain = |error: ConfigError| error_chain(&error);
        let files = ConfigFiles::read(file).map_err(chain)?;
        let old = self.security();
        if old.files == files {
            return Ok(false);
        }
        let mut newer = SecurityConfig::from_files(files, file).map_err(chain)?;
        if let Some(reason) = old.weakened_by(&newer) {
            return Err(format!("{reason}; restart memledger to apply it"));
        }
        let is_access_changed = !old.files.admits_same_clients(&newer.files);
        newer.generation = old.generation + u64::from(is_access_changed);
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
    use crate::config::web::WebConfig;

    fn with_tls(lines: &str) -> SecurityConfig {
        let text = format!("tls_server_config:\n  cert_file: c\n  key_file: k\n{lines}");
        let mut security = SecurityConfig::default();
        security.files.config = WebConfig::parse(Path::new("web.yml"), &text).unwrap();
        security
    }

    #[test]
    fn change_that_removes_protection_is_found() {
        let types = ["RequestClientCert", "RequireAnyClientCert"];
        let [request, any] = types.map(|kind| with_tls(&format!("  client_auth_type: {kind}\n")));
        let verified = |kind: &str| with_tls(&format!("  client_ca_file: a\n  client_auth_type: {kind}\n"));
        let (if_given, required) =
            (verified("VerifyClientCertIfGiven"), verified("RequireAndVerifyClientCert"));
        let none = with_tls("");
        for newer in [&none, &request, &if_given] {
            assert!(any.weakened_by(newer).is_some_and(|reason| reason.contains("required")));
            assert!(required.weakened_by(newer).is_some_and(|reason| reason.contains("required")));
        }
        assert!(required.weakened_by(&any).is_some_and(|reason| reason.contains("verified")));
        for (older, newer) in [(&any, &required), (&none, &any), (&request, &none), (&if_given, &none)] {
            assert_eq!(older.weakened_by(newer), None);
        }
        let ciphers = with_tls("  cipher_suites: [TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384]\n");
        let curves = with_tls("  curve_preferences: [X25519]\n");
        for limited in [&ciphers, &curves] {
            assert!(limited.weakened_by(&none).is_some_and(|reason| reason.contains("no longer be limited")));
        }
        assert_eq!(none.weakened_by(&ciphers), None);
    }
}
