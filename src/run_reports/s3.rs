//! Reports in a bucket of S3, MinIO or their like: an object for each file, below the name of the run.
//!
//! Requests are signed by rusty-s3, as URLs that are valid for some minutes; such a URL is a secret and is never logged.

use std::path::PathBuf;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1::SendRequest;
use rusty_s3::actions::{DeleteObject, PutObject};
use rusty_s3::{Bucket, Credentials, S3Action, UrlStyle};
use tokio::sync::Semaphore;
use url::{Host, Position, Url};

use super::bundle::ReportFile;
use super::credentials::{AwsVariables, CredentialSource, element};
use crate::config::ReportSettings;
use crate::config::report::{S3Addressing, S3Url, http_url};
use crate::connect::{Connector, RemoteServer};
use crate::host::bounds;
use crate::text::bounded;
use crate::text::error_chain;

/// Timeout of one request, and of a connection.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a signed URL is valid.
const URL_VALID_FOR: Duration = Duration::from_secs(300);
const USER_AGENT: &str = concat!("memledger/", env!("CARGO_PKG_VERSION"));
/// Name of the object of a check.
const CHECK_NAME: &str = ".memledger-check";
static FILE_PERMIT: Semaphore = Semaphore::const_new(1);

/// The bucket, and how to reach it.
#[derive(Clone, Debug)]
pub struct S3Settings {
    url: S3Url,
    /// `None`: AWS.
    endpoint: Option<Result<Url, String>>,
    region: Option<String>,
    addressing: S3Addressing,
    certificate: Option<PathBuf>,
    environment: AwsVariables,
}

impl S3Settings {
    /// Returns the settings of flags and standard variables; `None` without a bucket.
    pub fn new(settings: &ReportSettings) -> Option<Self> {
        Self::with(settings, AwsVariables::of_process())
    }

    fn with(settings: &ReportSettings, environment: AwsVariables) -> Option<Self> {
        let of_variable = |name: &str| {
            let text = environment.variable(name)?;
            Some(http_url(&text).map_err(|expected| format!("{name} must be {expected}")))
        };
        let endpoint = settings.s3_endpoint.clone().map(Ok);
        let endpoint = endpoint
            .or_else(|| of_variable("AWS_ENDPOINT_URL_S3"))
            .or_else(|| of_variable("AWS_ENDPOINT_URL"));
        let certificate = settings.s3_certificate.clone();
        Some(Self {
            url: settings.s3_url.clone()?,
            endpoint,
            region: settings.s3_region.clone(),
            addressing: settings.s3_addressing,
            certificate: certificate.or_else(|| environment.variable("AWS_CA_BUNDLE").map(PathBuf::from)),
            environment,
        })
    }

    /// Returns the bucket with the address of its server.
    fn bucket(&self) -> Result<Bucket, String> {
        let region = match &self.region {
            Some(region) => region.clone(),
            None => self.environment.region()?.unwrap_or_else(|| "us-east-1".to_owned()),
        };
        let endpoint = match &self.endpoint {
            Some(endpoint) => endpoint.clone()?,
            None => aws_endpoint("s3", &region)?,
        };
        let style = match self.addressing {
            S3Addressing::Path => UrlStyle::Path,
            S3Addressing::Virtual => UrlStyle::VirtualHost,
            // the certificates of AWS have no names of buckets with dots
            S3Addressing::Auto if self.endpoint.is_some() || self.url.bucket.contains('.') => UrlStyle::Path,
            S3Addressing::Auto => UrlStyle::VirtualHost,
        };
        Bucket::new(endpoint, style, self.url.bucket.clone(), region)
            .map_err(|error| format!("{error}; --report.s3-addressing=path has the bucket in the path"))
    }
}

/// Returns the address of a service of AWS.
pub fn aws_endpoint(service: &str, region: &str) -> Result<Url, String> {
    let domain = if region.starts_with("cn-") { "amazonaws.com.cn" } else { "amazonaws.com" };
    Url::parse(&format!("https://{service}.{region}.{domain}")).map_err(|error| error.to_string())
}

/// The bucket of the reports.
#[derive(Debug)]
pub struct S3Target {
    settings: S3Settings,
    credentials: CredentialSource,
}

impl S3Target {
    /// Creates a target that is not connected yet.
    pub fn new(settings: S3Settings) -> Self {
        let credentials = CredentialSource::new(settings.environment.clone(), settings.certificate.clone());
        Self { settings, credentials }
    }

    /// Returns the bucket and its server, without secrets.
    pub fn place(&self) -> String {
        match &self.settings.endpoint {
            Some(Ok(endpoint)) => format!("{} at {endpoint}", self.settings.url),
            Some(Err(_)) | None => self.settings.url.to_string(),
        }
    }

    /// Writes an object for each file, in this order; objects of the same names are replaced.
    ///
    /// # Errors
    /// A message for people. Some may have been written.
    pub async fn write(&mut self, folder: &str, files: Vec<ReportFile>) -> Result<(), String> {
        let (bucket, credentials) = self.sign_in().await?;
        let mut client = HttpClient::new(bucket.base_url(), self.settings.certificate.clone())?;
        for file in files {
            let key = self.settings.url.key(&format!("{folder}/{}", file.name));
            let url = PutObject::new(&bucket, Some(&credentials), &key).sign(URL_VALID_FOR);
            let sent = client.send(Method::PUT, &url, file.content_type, file.content.into()).await;
            if let Err(reason) = sent.and_then(|response| accepted(response, &key)) {
                self.credentials.forget_session(); // it may have been revoked
                return Err(reason);
            }
        }
        Ok(())
    }

    /// Writes an object and removes it.
    ///
    /// # Errors
    /// A message for people.
    pub async fn probe(&mut self) -> Result<String, String> {
        let (bucket, credentials) = self.sign_in().await?;
        let mut client = HttpClient::new(bucket.base_url(), self.settings.certificate.clone())?;
        let key = self.settings.url.key(CHECK_NAME);
        let put = PutObject::new(&bucket, Some(&credentials), &key).sign(URL_VALID_FOR);
        accepted(
            client.send(Method::PUT, &put, "text/plain", Bytes::from_static(b"memledger\n")).await?,
            &key,
        )?;
        let delete = DeleteObject::new(&bucket, Some(&credentials), &key).sign(URL_VALID_FOR);
        let deleted = client.send(Method::DELETE, &delete, "text/plain", Bytes::new()).await;
        Ok(match deleted {
            Ok((status, _)) if status.is_success() => "an object was written and removed".to_owned(),
            // reports need no right to remove
            Ok((status, _)) => {
                format!("{key} was written; it stays, because removing it was rejected: HTTP {status}")
            }
            Err(reason) => format!("{key} was written; removing it failed: {reason}"),
        })
    }

    async fn sign_in(&mut self) -> Result<(Bucket, Credentials), String> {
        let bucket = self.settings.bucket()?;
        let credentials = self.credentials.credentials(bucket.region()).await?;
        Ok((bucket, credentials))
    }
}

/// The status and the beginning of the body of a response.
pub type HttpResponse = (StatusCode, Bytes);

/// Sends requests to a server, over one connection as long as the server keeps it open.
#[derive(Debug)]
pub struct HttpClient {
    connector: Connector,
    authority: String,
    sender: Option<SendRequest<Full<Bytes>>>,
}

impl HttpClient {
    /// Creates a client for the server of a URL.
    ///
    /// # Errors
    /// The URL has no host.
    pub fn new(url: &Url, certificate: Option<PathBuf>) -> Result<Self, String> {
        let tls = url.scheme() == "https";
        let host = match url.host() {
            Some(Host::Domain(name)) => name.to_owned(),
            Some(Host::Ipv4(address)) => address.to_string(),
            Some(Host::Ipv6(address)) => address.to_string(),
            None => return Err("the URL has no host".to_owned()),
        };
        let port = url.port_or_known_default().unwrap_or(443);
        let authority = format!("{}:{port}", url.host_str().unwrap_or_default());
        let server = RemoteServer {
            tls,
            host,
            authority: authority.clone(),
            timeout: REQUEST_TIMEOUT,
            certificate,
            client: None,
            http2: false,
            settings: "--report.s3-certificate",
            file_permit: &FILE_PERMIT,
        };
        Ok(Self { connector: Connector::new(server), authority, sender: None })
    }

    /// Returns a connection on which a request can be sent: the one of the last request, if the server has not closed it.
    async fn sender(&mut self) -> Result<&mut SendRequest<Full<Bytes>>, String> {
        let is_open = match &mut self.sender {
            Some(sender) => sender.ready().await.is_ok(),
            None => false,
        };
        if !is_open {
            self.sender = None;
        }
        match &mut self.sender {
            Some(sender) => Ok(sender),
            none => Ok(none.insert(self.connector.connect_http1().await?)),
        }
    }

    /// Sends a request.
    ///
    /// # Errors
    /// No response arrived; a message for people without the URL, which is a secret.
    pub async fn send(
        &mut self,
        method: Method,
        url: &Url,
        content_type: &str,
        body: Bytes,
    ) -> Result<HttpResponse, String> {
        let request = Request::builder()
            .method(method)
            .uri(&url[Position::BeforePath..Position::AfterQuery])
            .header(header::HOST, &url[Position::BeforeHost..Position::AfterPort])
            .header(header::CONTENT_TYPE, content_type)
            .header(header::CONTENT_LENGTH, body.len())
            .header(header::USER_AGENT, USER_AGENT)
            .body(Full::new(body))
            .map_err(|error| error_chain(&error))?;
        let exchange = async {
            let sender = self.sender().await?;
            let response = sender.send_request(request).await.map_err(|error| error_chain(&error))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), bounds::S3_RESPONSE.max_bytes).collect().await;
            // the status decides: of a body that is too long, or cut off, nothing is needed
            Ok((status, body.map(|body| body.to_bytes()).unwrap_or_default()))
        };
        let result = match tokio::time::timeout(REQUEST_TIMEOUT, exchange).await {
            Ok(result) => result,
            Err(_) => Err(format!("no response within {REQUEST_TIMEOUT:?}")),
        };
        if result.is_err() {
            self.sender = None; // what comes next there is of this request
        }
        result.map_err(|reason: String| match reason.contains(&self.authority) {
            true => reason,
            false => format!("{}: {reason}", self.authority),
        })
    }
}

/// Returns an error unless the server has done what was requested.
fn accepted((status, body): HttpResponse, key: &str) -> Result<(), String> {
    if status.is_success() {
        return Ok(());
    }
    let body = String::from_utf8_lossy(&body);
    let advice = match element(&body, "Code").unwrap_or_default() {
        // of a signed URL, a wrong clock is this
        "AccessDenied" if body.contains("expired") || body.contains("not valid yet") => {
            "set the clock of this host"
        }
        "NoSuchBucket" => "create the bucket, or correct --report.s3-url",
        "AccessDenied" => "allow these credentials s3:PutObject there",
        "InvalidAccessKeyId" | "SignatureDoesNotMatch" | "ExpiredToken" | "InvalidToken" => {
            "check the credentials"
        }
        "AuthorizationHeaderMalformed" | "AuthorizationQueryParametersError" | "PermanentRedirect" => {
            "set --report.s3-region to the region of the bucket"
        }
        _ if status == StatusCode::FORBIDDEN => "check the credentials and their rights",
        _ if status.is_redirection() => {
            "set --report.s3-region and --report.s3-endpoint to those of the bucket"
        }
        _ if status.is_server_error() => "the server is at fault",
        _ => "is this a server of S3, and --report.s3-addressing right?",
    };
    Err(format!("{key} was rejected: {}; {advice}", rejection(status, &body)))
}

/// Returns why a request was rejected, as the server says.
pub fn rejection(status: StatusCode, body: &str) -> String {
    let said = ["Code", "Message"].map(|name| element(body, name).map(bounded));
    said.into_iter()
        .flatten()
        .filter(|text| !text.is_empty())
        .fold(format!("HTTP {status}"), |text, said| format!("{text}: {said}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(flags: &[(&str, &str)], variables: &[(&str, &str)]) -> S3Settings {
        let command = crate::config::arguments(clap::Command::new("memledger").no_binary_name(true));
        let flags = flags.iter().map(|(key, value)| format!("--report.{key}={value}"));
        let config = crate::config::Config::load(&command.get_matches_from(flags)).unwrap();
        S3Settings::with(&config.report, AwsVariables::of(variables)).unwrap()
    }

    #[test]
    fn bucket_is_addressed_as_its_server_needs_it() {
        let url = |flags: &[(&str, &str)], variables: &[(&str, &str)]| {
            settings(flags, variables).bucket().map(|bucket| bucket.base_url().to_string())
        };
        let reports = ("s3-url", "s3://reports/team");
        assert_eq!(url(&[reports], &[]).unwrap(), "https://reports.s3.us-east-1.amazonaws.com/");
        assert_eq!(
            url(&[reports], &[("AWS_REGION", "cn-north-1")]).unwrap(),
            "https://reports.s3.cn-north-1.amazonaws.com.cn/"
        );
        assert_eq!(
            url(&[("s3-url", "s3://a.b.c")], &[]).unwrap(),
            "https://s3.us-east-1.amazonaws.com/a.b.c/"
        );
        let minio = ("s3-endpoint", "http://minio:9000");
        assert_eq!(
            url(&[reports, minio], &[("AWS_ENDPOINT_URL_S3", "http://other")]).unwrap(),
            "http://minio:9000/reports/"
        );
        let variables = [("AWS_ENDPOINT_URL", "http://general"), ("AWS_ENDPOINT_URL_S3", "http://s3.here")];
        assert_eq!(url(&[reports], &variables).unwrap(), "http://s3.here/reports/");
        assert_eq!(
            url(&[reports, ("s3-addressing", "virtual")], &variables).unwrap(),
            "http://reports.s3.here/"
        );
        let wrong = url(&[reports], &[("AWS_ENDPOINT_URL", "minio:9000")]).unwrap_err();
        assert!(wrong.contains("AWS_ENDPOINT_URL must be"), "{wrong}");
        let on_address =
            url(&[reports, ("s3-endpoint", "http://127.0.0.1:1"), ("s3-addressing", "virtual")], &[]);
        assert!(on_address.unwrap_err().contains("--report.s3-addressing=path"));
    }

    #[test]
    fn rejection_has_the_reason_of_the_server_and_advice() {
        let body = "<Error><Code>NoSuchBucket</Code><Message>It is\u{1b}[2J not there</Message><StringToSign>secret</StringToSign></Error>";
        let text = accepted((StatusCode::NOT_FOUND, body.into()), "a/report.json").unwrap_err();
        assert!(text.contains("NoSuchBucket") && text.contains("create the bucket"), "{text}");
        assert!(!text.contains("secret") && !text.contains('\u{1b}'), "{text}");
        let text =
            accepted((StatusCode::SERVICE_UNAVAILABLE, Bytes::from_static(b"\xff\xfe")), "a").unwrap_err();
        assert_eq!(text, "a was rejected: HTTP 503 Service Unavailable; the server is at fault");
        let clock = "<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>";
        assert!(accepted((StatusCode::FORBIDDEN, clock.into()), "a").unwrap_err().contains("set the clock"));
    }
}
