//! What stands between the network and the routes, the same for all listeners: who may come in, how many, how often.
//!
//! `--web.config.file` is read again every second, with all that it names. What cannot be used is logged once and leaves
//! the last good settings in force. So does what would take away protection at run time, TLS or the last user: a file that
//! is being written is empty for a moment, and that must open nothing. To take it away, restart memledger.
//!
//! Each change of what lets somebody in makes a new edition of the rules; connections of an older one are closed.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use rustls::ServerConfig;
use tokio::sync::watch;

use super::passwords::{self, Credentials, Outcome, Passwords};
use super::table::{Seat, Seating, Table};
use super::tls::Material;
use crate::clock::Moment;
use crate::collect::front::{Front, Refusal};
use crate::config::web::{ClientAuth, Rate, TlsVersion};
use crate::config::{Config, ConfigError, HttpLimits};

/// How often the files are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// No route reads a body; a client that announces more than this is turned away.
const LARGEST_BODY_BYTES: u64 = 16 << 10;

/// Who asks.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// From where.
    pub address: SocketAddr,
    /// By a password of ours, or a certificate of the clients' CA.
    pub is_known: bool,
}

/// The settings in force.
pub struct Rules {
    material: Option<Material>,
    /// TLS; `None`: plain HTTP.
    pub tls: Option<Arc<ServerConfig>>,
    headers: HeaderMap,
    /// Grows with each change of what lets somebody in.
    pub edition: u64,
}

impl Rules {
    fn of(material: Material, file: &Path) -> Result<Self, ConfigError> {
        let tls = material.server(file)?;
        let headers = material.config.headers.iter().filter_map(|(name, value)| {
            let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
            Some((name, HeaderValue::from_str(value).ok()?))
        });
        Ok(Self { headers: headers.collect(), tls, material: Some(material), edition: 0 })
    }

    /// In words.
    fn describe(&self) -> String {
        let users = self.material.as_ref().map_or(0, |material| material.config.users.len());
        let users = match users {
            0 => "no passwords".to_owned(),
            1 => "1 user".to_owned(),
            users => format!("{users} users"),
        };
        let tls = match (&self.tls, self.requires_certificates()) {
            (None, _) => "plain HTTP",
            (Some(_), false) => "TLS",
            (Some(_), true) => "TLS, clients' certificates verified",
        };
        format!("{tls}, {users}")
    }

    /// Whether a certificate that a client shows was verified.
    pub fn verifies_clients(&self) -> bool {
        let tls = self.material.as_ref().and_then(|material| material.config.tls.as_ref());
        tls.is_some_and(|tls| {
            matches!(tls.client_auth, ClientAuth::VerifyIfGiven | ClientAuth::RequireAndVerify)
        })
    }

    fn asks_for_passwords(&self) -> bool {
        self.material.as_ref().is_some_and(|material| !material.config.users.is_empty())
    }

    fn requires_certificates(&self) -> bool {
        let tls = self.material.as_ref().and_then(|material| material.config.tls.as_ref());
        tls.is_some_and(|tls| tls.client_auth == ClientAuth::RequireAndVerify)
    }

    fn names_clients(&self) -> bool {
        let tls = self.material.as_ref().and_then(|material| material.config.tls.as_ref());
        tls.is_some_and(|tls| !tls.client_names.is_empty())
    }

    fn lowest_version(&self) -> Option<TlsVersion> {
        self.material.as_ref().and_then(|material| material.config.tls.as_ref()).map(|tls| tls.lowest)
    }

    /// Whether others are let in than by `newer`, or otherwise.
    fn lets_in_as(&self, newer: &Self) -> bool {
        match (&self.material, &newer.material) {
            (Some(old), Some(new)) => old.lets_in_as(new),
            (old, new) => old.is_none() == new.is_none(),
        }
    }

    /// What would be open without a restart; `None` if nothing.
    fn opens(&self, newer: &Self) -> Option<&'static str> {
        if self.tls.is_some() && newer.tls.is_none() {
            return Some("TLS would be off");
        }
        if self.asks_for_passwords() && !newer.asks_for_passwords() {
            return Some("nobody would be asked for a password");
        }
        if self.requires_certificates() && !newer.requires_certificates() {
            return Some("nobody would have to show a certificate");
        }
        if self.names_clients() && !newer.names_clients() {
            return Some("a certificate of any name would do");
        }
        if self.lowest_version() > newer.lowest_version() {
            return Some("an older version of TLS would do");
        }
        let is_bounded =
            |rules: &Self| rules.material.as_ref().is_some_and(|material| material.config.rate.is_some());
        (is_bounded(self) && !is_bounded(newer)).then_some("rate_limit would be off")
    }
}

/// How many requests may come now, and since when; `None` before the first.
type Bucket = Option<(f64, Moment)>;

/// The door.
pub struct Door {
    file: Option<PathBuf>,
    rules: RwLock<Arc<Rules>>,
    account: Arc<Front>,
    passwords: Passwords,
    /// Requests that may come now, and since when: of strangers, and of those whose password is known as right. Else a
    /// stranger's requests would be all that may come.
    buckets: [Mutex<Bucket>; 2],
    table: Arc<Table>,
    /// The edition of the rules in force.
    edition: watch::Sender<u64>,
    /// What connections bear.
    pub limits: HttpLimits,
}

impl Door {
    /// A door by these settings, which keeps this account.
    ///
    /// # Errors
    /// `--web.config.file`, or what it names, cannot be used.
    pub fn new(config: &Config, account: Arc<Front>) -> anyhow::Result<Self> {
        let rules = match &config.web_config {
            Some(file) => Rules::of(Material::read(file)?, file)?,
            None => Rules { material: None, tls: None, headers: HeaderMap::new(), edition: 0 },
        };
        if config.web_config.is_some() {
            account.file_is_in_use(true);
        }
        let is_far = |address: &SocketAddr| !address.ip().to_canonical().is_loopback();
        if rules.tls.is_none() && rules.asks_for_passwords() && config.listen.iter().any(is_far) {
            tracing::warn!("passwords are asked for without TLS: whoever sees the network sees them");
        }
        if let Some(enough) = too_few_connections(&config.limits) {
            tracing::warn!(
                enough,
                "--web.max-connections is so small that requests under way can hold all connections of other hosts: \
                 raise it, or lower --web.max-requests"
            );
        }
        Ok(Self {
            file: config.web_config.clone(),
            rules: RwLock::new(Arc::new(rules)),
            account,
            passwords: Passwords::new().map_err(|_| anyhow::anyhow!("the kernel gives no random numbers"))?,
            buckets: Default::default(),
            table: Table::new(config.limits.connections),
            edition: watch::Sender::new(0),
            limits: config.limits,
        })
    }

    /// The settings in force.
    pub fn rules(&self) -> Arc<Rules> {
        Arc::clone(&self.rules.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// `http` or `https`.
    pub fn scheme(&self) -> &'static str {
        if self.rules().tls.is_some() { "https" } else { "http" }
    }

    /// Counts what was turned away.
    pub fn refuse(&self, why: Refusal) {
        self.account.refuse(why);
    }

    /// The edition of the rules, and its changes.
    pub fn edition(&self) -> watch::Receiver<u64> {
        self.edition.subscribe()
    }

    /// A place for a connection, if there is one left or can be made.
    pub fn seat(&self, address: SocketAddr) -> Option<Seat> {
        match self.table.seat(address, Moment::now()) {
            Seating::Free(seat) => Some(seat),
            Seating::InPlaceOfAnother(seat) => {
                self.refuse(Refusal::Connections);
                Some(seat)
            }
            Seating::Full => {
                self.refuse(Refusal::Connections);
                None
            }
        }
    }

    /// Lets a request in, and says who asks; or the answer that turns it away.
    pub async fn admit(
        &self,
        rules: &Rules,
        caller: Caller,
        request: &Parts,
        body_bytes: u64,
    ) -> Result<Caller, Response> {
        if body_bytes > LARGEST_BODY_BYTES {
            return Err((StatusCode::PAYLOAD_TOO_LARGE, "no request needs a body\n").into_response());
        }
        // open to all, so that a probe needs no password; a flood of others does not stop them either
        let (Some(material), false) = (&rules.material, is_health(request.uri.path())) else {
            return Ok(caller);
        };
        let mut given = request.headers.get_all(header::AUTHORIZATION).iter();
        let given = match (given.next(), given.next()) {
            (Some(value), None) => Credentials::parse(value.as_bytes()),
            _ => None,
        };
        let users = &material.config.users;
        let is_right = given.as_ref().is_some_and(|given| self.passwords.is_known_as_right(users, given));
        if let Some(rate) = material.config.rate
            && !self.may_come(is_right, rate, Moment::now())
        {
            self.refuse(Refusal::Rate);
            return Err(
                (StatusCode::TOO_MANY_REQUESTS, "more often than rate_limit allows\n").into_response()
            );
        }
        if !rules.asks_for_passwords() {
            return Ok(caller);
        }
        let outcome = match given {
            Some(given) => self.passwords.check(users, &given, caller.address.ip()).await,
            None => Outcome::Wrong,
        };
        match outcome {
            Outcome::Right => Ok(Caller { is_known: true, ..caller }),
            Outcome::Wrong => {
                self.refuse(Refusal::Password);
                let asks = [(header::WWW_AUTHENTICATE, "Basic realm=\"memledger\", charset=\"UTF-8\"")];
                Err((StatusCode::UNAUTHORIZED, asks, "a name and a password are needed\n").into_response())
            }
            Outcome::Busy => {
                self.refuse(Refusal::PasswordQueue);
                let text = "too many passwords wait to be checked; try again\n";
                Err((StatusCode::SERVICE_UNAVAILABLE, [(header::RETRY_AFTER, "1")], text).into_response())
            }
        }
    }

    /// Adds the headers that every answer has.
    pub fn finish(&self, rules: &Rules, response: &mut Response) {
        for (name, value) in &rules.headers {
            response.headers_mut().insert(name, value.clone());
        }
    }

    fn may_come(&self, is_right: bool, rate: Rate, now: Moment) -> bool {
        let mut bucket = self.buckets[usize::from(is_right)].lock().unwrap_or_else(PoisonError::into_inner);
        let full = f64::from(rate.burst);
        let (left, since) = bucket.unwrap_or((full, now));
        let more = now.since(since).as_secs_f64() / rate.interval.as_secs_f64();
        let left = (left + more).min(full);
        let may = left >= 1.0;
        *bucket = Some((if may { left - 1.0 } else { left }, now));
        may
    }

    /// Takes up changes of the file and of what it names, for ever.
    pub async fn follow(self: Arc<Self>) {
        let Some(file) = self.file.clone() else { return };
        let mut complaint = String::new();
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let (this, path) = (Arc::clone(&self), file.clone());
            // a file system may hang
            let looked = tokio::task::spawn_blocking(move || this.look(&path)).await;
            match looked.unwrap_or_else(|error| Err(error.to_string())) {
                Ok(is_new) => {
                    if is_new || !complaint.is_empty() {
                        tracing::info!(file = %file.display(), "the web configuration is in use as it is now");
                    }
                    complaint.clear();
                    self.account.file_is_in_use(true);
                }
                Err(error) => {
                    if error != complaint {
                        let message = "the web configuration cannot be used; the last good one goes on";
                        tracing::warn!(file = %file.display(), error, message);
                    }
                    complaint = error;
                    self.account.file_is_in_use(false);
                }
            }
        }
    }

    /// Takes up a change, if there is one.
    fn look(&self, file: &Path) -> Result<bool, String> {
        let chain = |error: ConfigError| match std::error::Error::source(&error) {
            Some(cause) => format!("{error}: {cause}"),
            None => error.to_string(),
        };
        let material = Material::read(file).map_err(chain)?;
        let old = self.rules();
        if old.material.as_ref() == Some(&material) {
            return Ok(false);
        }
        let mut newer = Rules::of(material, file).map_err(chain)?;
        if let Some(what) = old.opens(&newer) {
            return Err(format!("{what}; to have it so, restart memledger"));
        }
        newer.edition = old.edition + u64::from(!old.lets_in_as(&newer));
        let edition = newer.edition;
        *self.rules.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(newer);
        self.edition.send_if_modified(|known| std::mem::replace(known, edition) != edition);
        Ok(true)
    }
}

/// What a web configuration comes to, in words.
///
/// # Errors
/// It, or what it names, cannot be used.
pub fn describe(file: &Path) -> Result<String, ConfigError> {
    Rules::of(Material::read(file)?, file).map(|rules| rules.describe())
}

/// Connections that would be enough for other hosts to find one whatever is under way; `None` if these are.
fn too_few_connections(limits: &HttpLimits) -> Option<usize> {
    let under_way = limits.requests + passwords::WAITING; // these are not closed for others
    let is_enough = |most: usize| most - most / 8 > under_way; // the last eighth is for this host
    let may_fail = limits.connections != 0 && limits.requests != 0 && !is_enough(limits.connections);
    may_fail.then(|| (under_way..).find(|most| is_enough(*most))).flatten()
}

fn is_health(path: &str) -> bool {
    matches!(path, "/-/healthy" | "/-/ready")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn door(flags: &[&str]) -> Door {
        let command = crate::config::arguments(clap::Command::new("memledger").no_binary_name(true));
        let config = Config::load(&command.get_matches_from(flags)).unwrap();
        Door::new(&config, Arc::default()).unwrap()
    }

    #[test]
    fn connections_that_requests_under_way_can_all_hold_are_too_few() {
        let of = |requests, connections| {
            too_few_connections(&HttpLimits { requests, connections, ..door(&[]).limits })
        };
        assert_eq!(of(40, 256), None, "the defaults are enough");
        assert_eq!((of(40, 0), of(0, 16)), (None, None), "no limit is not too small");
        assert_eq!(of(40, 32), of(40, 64));
        let enough = of(40, 32).expect("32 are too few");
        assert_eq!((of(40, enough), of(40, enough - 1)), (None, Some(enough)));
    }

    #[test]
    fn a_bucket_fills_with_time_and_not_above_its_rim() {
        let door = door(&[]);
        let rate = Rate { interval: Duration::from_secs(2), burst: 3 };
        let now = Moment::now();
        let at = |seconds: u64| now.plus(Duration::from_secs(seconds));
        let come = |seconds| {
            std::iter::repeat_with(|| door.may_come(false, rate, at(seconds))).take_while(|may| *may).count()
        };
        assert_eq!((come(0), come(1), come(2), come(3), come(7), come(1_000)), (3, 0, 1, 0, 2, 3));
        assert!(door.may_come(true, rate, at(1_000)), "and who is known has one of their own");
    }
}
