//! Access control for all listeners: TLS, passwords, client certificates, rate and connection limits.
//!
//! `--web.config.file` and the files that it names are read again every second. What narrows access is applied from every file that can
//! be parsed: users that are gone or have another password, another CA, other names. What would remove protection at run time is not,
//! such as no TLS or no users: a file that is being written is empty for a moment, and that must not open anything. Then, and where a
//! certificate is unusable, the protection that was there stays in use for the rest, which is logged once. After the last user is gone no
//! password is valid. To remove protection, restart memledger.
//!
//! Each change to who is admitted starts a new generation of the configuration; connections of older generations are closed.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
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
/// Reading them takes longer only where their file system hangs.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

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
    /// The last user was removed at run time: passwords are required, and none is valid.
    is_locked: bool,
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
        Ok(Self { headers: headers.collect(), tls, files, is_locked: false, generation: 0 })
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

    fn limits_ciphers(&self) -> [bool; 2] {
        let tls = self.files.config.tls.as_ref();
        tls.map_or([false; 2], |tls| [!tls.cipher_suites.is_empty(), !tls.groups.is_empty()])
    }

    fn requires_password(&self) -> bool {
        self.is_locked || !self.files.config.users.is_empty()
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

/// Returns these files with the protection of the older ones wherever it is weaker: TLS and its parts, and the rate limit. Users are
/// those of the newer ones.
fn narrowed(older: &ConfigFiles, mut newer: ConfigFiles) -> ConfigFiles {
    match (&older.config.tls, &mut newer.config.tls) {
        (Some(_), None) => newer.take_tls(older),
        (Some(old), Some(new)) => {
            if old.client_auth.is_mandatory() && !new.client_auth.is_mandatory() {
                new.client_auth = old.client_auth;
                if new.client_ca.is_none() {
                    new.client_ca = old.client_ca.clone();
                    newer.client_ca = older.client_ca.clone();
                }
            }
            if new.client_names.is_empty() {
                new.client_names = old.client_names.clone();
            }
            if new.cipher_suites.is_empty() {
                new.cipher_suites = old.cipher_suites.clone();
            }
            if new.groups.is_empty() {
                new.groups = old.groups.clone();
            }
            new.lowest = new.lowest.max(old.lowest);
            new.highest = new.highest.max(new.lowest);
        }
        (None, _) => {}
    }
    newer.config.rate = newer.config.rate.or(older.config.rate);
    newer
}

/// A change of the configuration that is not applied as it is.
struct RejectedChange {
    reason: String,
    /// What is applied of it; `None` if the file cannot be parsed.
    instead: Option<Box<ConfigFiles>>,
}

impl From<ConfigError> for RejectedChange {
    fn from(error: ConfigError) -> Self {
        Self { reason: error_chain(&error), instead: None }
    }
}

/// Admits connections and requests.
pub struct AccessControl {
    file: Option<PathBuf>,
    security: RwLock<Arc<SecurityConfig>>,
    /// Why the last read of the files was rejected.
    last_rejection: Mutex<String>,
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
            last_rejection: Mutex::default(),
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
            let mut reload = tokio::task::spawn_blocking(move || this.reload_if_changed(&path));
            let reloaded = match tokio::time::timeout(READ_TIMEOUT, &mut reload).await {
                Ok(reloaded) => reloaded,
                Err(_) => {
                    self.report_rejected(
                        &file,
                        "reading it takes long: its file system hangs".to_owned(),
                        &mut last_error,
                    );
                    reload.await
                }
            };
            match reloaded.unwrap_or_else(|error| Err(error.to_string())) {
                Ok(is_new) => {
                    if is_new || !last_error.is_empty() {
                        tracing::info!(file = %file.display(), "web configuration reloaded");
                    }
                    last_error.clear();
                    self.stats.set_config_in_use(true);
                }
                Err(error) => self.report_rejected(&file, error, &mut last_error),
            }
        }
    }

    /// Logs an error once.
    fn report_rejected(&self, file: &Path, error: String, last_error: &mut String) {
        if error != *last_error {
            let message = "web configuration rejected; the previous one stays in use, without users that the new one has not";
            tracing::warn!(file = %file.display(), error, message);
        }
        *last_error = error;
        self.stats.set_config_in_use(false);
    }

    /// Reads the files and applies a change. Returns whether there was one.
    fn reload_if_changed(&self, file: &Path) -> Result<bool, String> {
        let old = self.security();
        match self.changed(&old, file) {
            Ok(newer) => {
                self.is_settled(""); // the next rejection may be of a file that is being written
                let is_new = newer.is_some();
                newer.into_iter().for_each(|newer| self.apply(&old, newer));
                Ok(is_new)
            }
            Err(RejectedChange { reason, instead }) => {
                if let Some(files) = instead.filter(|_| self.is_settled(&reason)) {
                    let newer =
                        SecurityConfig::from_files(*files, file).map_err(|error| error_chain(&error))?;
                    let is_locked = old.requires_password() && newer.files.config.users.is_empty();
                    if newer.files != old.files || is_locked != old.is_locked {
                        self.apply(&old, SecurityConfig { is_locked, ..newer });
                    }
                }
                Err(reason)
            }
        }
    }

    /// Returns whether the last read had the same error: a file that is being written is complete at the next one.
    fn is_settled(&self, reason: &str) -> bool {
        let mut last = self.last_rejection.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = *last == reason;
        reason.clone_into(&mut last);
        is_same
    }

    /// Returns the configuration of the files; `None` if they are those in use.
    fn changed(&self, old: &SecurityConfig, file: &Path) -> Result<Option<SecurityConfig>, RejectedChange> {
        let config = ConfigFiles::parse(file)?;
        // without the certificates of the new file, those in use serve the users that are left
        let with_old_certificates = |error: ConfigError| {
            let mut files = old.files.clone();
            let left = config.users.iter().filter(|(name, _)| old.files.config.users.contains_key(*name));
            files.config.users = left.map(|(name, hash)| (name.clone(), hash.clone())).collect();
            RejectedChange { reason: error_chain(&error), instead: Some(Box::new(files)) }
        };
        let files = ConfigFiles::with_certificates(config.clone(), file).map_err(with_old_certificates)?;
        if old.files == files && !old.is_locked {
            return Ok(None);
        }
        let newer = SecurityConfig::from_files(files.clone(), file).map_err(with_old_certificates)?;
        match old.weakened_by(&newer) {
            None => Ok(Some(newer)),
            Some(reason) => Err(RejectedChange {
                reason: format!("{reason}; restart memledger to apply it"),
                instead: Some(Box::new(narrowed(&old.files, files))),
            }),
        }
    }

    fn apply(&self, old: &SecurityConfig, mut newer: SecurityConfig) {
        let is_access_changed =
            !old.files.admits_same_clients(&newer.files) || old.is_locked != newer.is_locked;
        newer.generation = old.generation + u64::from(is_access_changed);
        *self.security.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(newer);
        if is_access_changed {
            self.close_connections();
        }
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
        let none = with_tls("");
        let verified = |kind: &str| with_tls(&format!("  client_ca_file: a\n  client_auth_type: {kind}\n"));
        let (if_given, required) =
            (verified("VerifyClientCertIfGiven"), verified("RequireAndVerifyClientCert"));
        for newer in [&none, &if_given] {
            assert!(required.weakened_by(newer).is_some_and(|reason| reason.contains("required")));
        }
        for (older, newer) in [(&none, &required), (&if_given, &required), (&if_given, &none)] {
            assert_eq!(older.weakened_by(newer), None);
        }
        let ciphers = with_tls("  cipher_suites: [TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384]\n");
        let curves = with_tls("  curve_preferences: [X25519]\n");
        for limited in [&ciphers, &curves] {
            assert!(limited.weakened_by(&none).is_some_and(|reason| reason.contains("no longer be limited")));
        }
        assert_eq!(none.weakened_by(&ciphers), None);
    }

    #[test]
    fn limited_ciphers_or_curves_close_connections() {
        let none = with_tls("");
        for limited in
            ["  cipher_suites: [TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384]\n", "  curve_preferences: [X25519]\n"]
        {
            assert!(!none.files.admits_same_clients(&with_tls(limited).files), "{limited}");
        }
        assert!(none.files.admits_same_clients(&with_tls("").files));
    }

    #[test]
    fn what_is_applied_of_a_weaker_file_is_never_weaker() {
        let strict = with_tls(
            "  client_ca_file: a\n  client_auth_type: RequireAndVerifyClientCert\n  client_allowed_sans: [ann]\n  min_version: TLS13\n  \
             curve_preferences: [X25519]\nrate_limit: {interval: 1s, burst: 5}\n",
        );
        for weaker in [
            "",
            "  max_version: TLS12\n",
            "  client_ca_file: b\n  client_auth_type: VerifyClientCertIfGiven\n",
        ] {
            let newer = with_tls(weaker);
            assert!(strict.weakened_by(&newer).is_some());
            let applied = SecurityConfig {
                files: narrowed(&strict.files, newer.files.clone()),
                ..SecurityConfig::default()
            };
            assert_eq!(strict.weakened_by(&applied), None, "{weaker}");
        }
        let of_plain = SecurityConfig::default();
        let applied = narrowed(&strict.files, of_plain.files);
        assert_eq!(applied.config.tls, strict.files.config.tls);
        let renewed = with_tls("  client_ca_file: b\n  client_auth_type: RequireAndVerifyClientCert\n");
        let applied = narrowed(&strict.files, renewed.files.clone()).config.tls.unwrap();
        assert_eq!(applied.client_ca, renewed.files.config.tls.unwrap().client_ca, "its CA admits fewer");
        assert_eq!(applied.client_names, ["ann"]);
    }
}
