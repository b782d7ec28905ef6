//! The credentials of S3, by the standard variables and files of AWS.
//!
//! In this order: `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY` (with `AWS_SESSION_TOKEN`); a web identity token
//! (`AWS_WEB_IDENTITY_TOKEN_FILE` and `AWS_ROLE_ARN`), which the token service exchanges; the profile `AWS_PROFILE` in
//! `AWS_SHARED_CREDENTIALS_FILE` and `AWS_CONFIG_FILE`, by default in `~/.aws`. Files are read again for each report, so that renewed
//! credentials are used. Not here: the metadata services of virtual machines and of containers.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::http::Method;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use rusty_s3::Credentials;
use url::Url;

use super::s3::{HttpClient, aws_endpoint, rejection};
use crate::clock::Timestamp;
use crate::config::report::http_url;
use crate::host::bounds;

/// Temporary credentials are replaced this long before they expire.
const RENEW_BEFORE: Duration = Duration::from_secs(300);
/// How long temporary credentials are valid, in seconds.
const SESSION_SECONDS: u64 = 3600;
const MISSING: &str = "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SHARED_CREDENTIALS_FILE, or \
                       AWS_WEB_IDENTITY_TOKEN_FILE and AWS_ROLE_ARN, in the environment of memledger";

/// The standard variables. Its debug form has only their names.
#[derive(Clone, Default)]
pub struct AwsVariables(BTreeMap<String, String>);

impl std::fmt::Debug for AwsVariables {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl AwsVariables {
    /// Returns the standard variables of this process.
    pub fn of_process() -> Self {
        let is_needed = |name: &str| name.starts_with("AWS_") || name == "HOME";
        let all = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok().filter(|name| is_needed(name))?, value.into_string().ok()?))
        });
        Self(all.filter(|(_, value)| !value.trim().is_empty()).collect())
    }

    #[cfg(test)]
    pub fn of(variables: &[(&str, &str)]) -> Self {
        Self(variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
    }

    /// Returns a variable; one that is empty is unset.
    pub fn variable(&self, name: &str) -> Option<String> {
        self.0.get(name).cloned()
    }

    /// Returns the region that variables or the profile set.
    ///
    /// # Errors
    /// A file is unreadable; a message for people.
    pub fn region(&self) -> Result<Option<String>, String> {
        let variable = self.variable("AWS_REGION").or_else(|| self.variable("AWS_DEFAULT_REGION"));
        let region = match variable {
            Some(region) => Some(region),
            None => self.profile()?.remove("region"),
        };
        let check = |region: String| {
            crate::config::report::region(&region)
                .map_err(|expected| format!("AWS_REGION or the profile's region must be {expected}"))
        };
        region.map(check).transpose()
    }

    /// Returns the settings of the profile in both files.
    fn profile(&self) -> Result<BTreeMap<String, String>, String> {
        let name = self.variable("AWS_PROFILE").unwrap_or_else(|| "default".to_owned());
        let of_home = |file: &str| self.variable("HOME").map(|home| Path::new(&home).join(".aws").join(file));
        let mut values = BTreeMap::new();
        for (variable, file) in
            [("AWS_CONFIG_FILE", "config"), ("AWS_SHARED_CREDENTIALS_FILE", "credentials")]
        {
            let (path, is_named) = match self.variable(variable) {
                Some(path) => (PathBuf::from(path), true),
                None => match of_home(file) {
                    Some(path) => (path, false),
                    None => continue,
                },
            };
            match read(&path) {
                Ok(text) => values.extend(section(&text, &name)),
                Err(error) if is_named => {
                    return Err(format!("{variable}: cannot read {}: {error}", path.display()));
                }
                Err(_) => {} // a home that the service's sandbox hides
            }
        }
        Ok(values)
    }
}

/// Reads a file of bounded size.
fn read(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(bounds::AWS_FILE.max_bytes as u64).read_to_string(&mut text)?;
    Ok(text)
}

/// Returns the settings of a profile: `[name]`, in the file of settings `[profile name]`. Nested settings are omitted.
fn section(text: &str, profile: &str) -> BTreeMap<String, String> {
    let mut is_wanted = false;
    let mut values = BTreeMap::new();
    for line in text.lines() {
        if let Some(name) = line.trim().strip_prefix('[').and_then(|rest| rest.split(']').next()) {
            let name = name.trim();
            is_wanted = name.strip_prefix("profile ").map_or(name, str::trim) == profile;
        } else if is_wanted
            && !line.starts_with([' ', '\t', '#', ';'])
            && let Some((key, value)) = line.split_once('=')
        {
            values.insert(key.trim().to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    values
}

/// Finds credentials for each report.
#[derive(Debug)]
pub struct CredentialSource {
    environment: AwsVariables,
    certificate: Option<PathBuf>,
    /// Temporary ones, and when they are to be replaced.
    session: Option<(Credentials, Timestamp)>,
}

impl CredentialSource {
    /// Creates a source; `certificate` is for the token service.
    pub fn new(environment: AwsVariables, certificate: Option<PathBuf>) -> Self {
        Self { environment, certificate, session: None }
    }

    /// Requests new temporary credentials next time.
    pub fn forget_session(&mut self) {
        self.session = None;
    }

    /// Returns valid credentials.
    ///
    /// # Errors
    /// There are none; a message for people.
    pub async fn credentials(&mut self, region: &str) -> Result<Credentials, String> {
        let variable = |name: &str| self.environment.variable(name);
        let keys = |key: Option<String>, secret: Option<String>, token: Option<String>| {
            let (key, secret) = (key?, secret?);
            Some(match token {
                Some(token) => Credentials::new_with_token(key, secret, token),
                None => Credentials::new(key, secret),
            })
        };
        let of_variables = keys(
            variable("AWS_ACCESS_KEY_ID"),
            variable("AWS_SECRET_ACCESS_KEY"),
            variable("AWS_SESSION_TOKEN"),
        );
        if let Some(credentials) = of_variables {
            return Ok(credentials);
        }
        if let (Some(file), Some(role)) = (variable("AWS_WEB_IDENTITY_TOKEN_FILE"), variable("AWS_ROLE_ARN"))
        {
            return self.session(Path::new(&file), &role, region).await;
        }
        let mut profile = self.environment.profile()?;
        let mut value = |key: &str| profile.remove(key).filter(|value| !value.is_empty());
        let of_profile =
            keys(value("aws_access_key_id"), value("aws_secret_access_key"), value("aws_session_token"));
        of_profile.ok_or_else(|| MISSING.to_owned())
    }

    /// Returns temporary credentials, from the token service if those known are about to expire.
    async fn session(&mut self, file: &Path, role: &str, region: &str) -> Result<Credentials, String> {
        let now = Timestamp::now();
        if let Some((credentials, until)) = &self.session
            && now < *until
        {
            return Ok(credentials.clone());
        }
        let failed = |reason: String| format!("AssumeRoleWithWebIdentity failed: {reason}");
        let token = read(file).map_err(|error| failed(format!("cannot read {}: {error}", file.display())))?;
        let url = self.token_service(region).map_err(failed)?;
        let session_name =
            self.environment.variable("AWS_ROLE_SESSION_NAME").unwrap_or_else(|| "memledger".to_owned());
        let duration = SESSION_SECONDS.to_string();
        let fields = [
            ("Action", "AssumeRoleWithWebIdentity"),
            ("Version", "2011-06-15"),
            ("DurationSeconds", &duration),
            ("RoleSessionName", &session_name),
            ("RoleArn", role),
            ("WebIdentityToken", token.trim()),
        ];
        let encoded = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
        let form: Vec<_> = fields.iter().map(|(key, value)| format!("{key}={}", encoded(value))).collect();
        let mut client = HttpClient::new(&url, self.certificate.clone()).map_err(failed)?;
        let kind = "application/x-www-form-urlencoded";
        let (status, body) =
            client.send(Method::POST, &url, kind, form.join("&").into()).await.map_err(failed)?;
        if !status.is_success() {
            let advice = "check the token, and that the role trusts its issuer";
            return Err(failed(format!("{}; {advice}", rejection(status, &String::from_utf8_lossy(&body)))));
        }
        let body = String::from_utf8_lossy(&body);
        let part = |name| element(&body, name).filter(|text| !text.is_empty());
        let parts = (part("AccessKeyId"), part("SecretAccessKey"), part("SessionToken"));
        let (Some(key), Some(secret), Some(token)) = parts else {
            return Err(failed("its response has no credentials".to_owned()));
        };
        let credentials = Credentials::new_with_token(key, secret, token);
        let until = now.plus(Duration::from_secs(SESSION_SECONDS) - RENEW_BEFORE);
        self.session = Some((credentials.clone(), until));
        Ok(credentials)
    }

    fn token_service(&self, region: &str) -> Result<Url, String> {
        for name in ["AWS_ENDPOINT_URL_STS", "AWS_ENDPOINT_URL"] {
            if let Some(text) = self.environment.variable(name) {
                return http_url(&text).map_err(|expected| format!("{name} must be {expected}"));
            }
        }
        aws_endpoint("sts", region)
    }
}

/// Returns the text of the first element of this name in the XML of a response of AWS, where values need no escapes.
pub fn element<'x>(xml: &'x str, name: &str) -> Option<&'x str> {
    let (_, rest) = xml.split_once(&format!("<{name}>"))?;
    rest.split_once(&format!("</{name}>")).map(|(text, _)| text.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn found(variables: &[(&str, &str)]) -> Result<(String, String, Option<String>), String> {
        let mut source = CredentialSource::new(AwsVariables::of(variables), None);
        let found = source.credentials("us-east-1").await?;
        Ok((found.key().to_owned(), found.secret().to_owned(), found.token().map(str::to_owned)))
    }

    #[tokio::test]
    async fn variables_come_before_files_and_the_profile_is_chosen() {
        let dir = tempfile::tempdir().unwrap();
        let aws = dir.path().join(".aws");
        std::fs::create_dir(&aws).unwrap();
        let credentials = "[default]\naws_access_key_id = D\naws_secret_access_key=d=+/\n\n[lab]\n# aws_access_key_id = X\n\
                           aws_access_key_id=L\naws_secret_access_key = l\naws_session_token = t\n";
        std::fs::write(aws.join("credentials"), credentials).unwrap();
        std::fs::write(aws.join("config"), "[profile lab]\nregion = eu-west-3\ns3 =\n  region = no\n")
            .unwrap();
        let home = ("HOME", dir.path().to_str().unwrap());
        let of = |key: &str, secret: &str, token: Option<&str>| {
            Ok((key.into(), secret.into(), token.map(str::to_owned)))
        };
        assert_eq!(found(&[home]).await, of("D", "d=+/", None));
        assert_eq!(found(&[home, ("AWS_PROFILE", "lab")]).await, of("L", "l", Some("t")));
        let keys = [("AWS_ACCESS_KEY_ID", "V"), ("AWS_SECRET_ACCESS_KEY", "v")];
        assert_eq!(found(&[home, keys[0], keys[1]]).await, of("V", "v", None));
        let region = |variables: &[(&str, &str)]| AwsVariables::of(variables).region().unwrap();
        assert_eq!(region(&[home, ("AWS_PROFILE", "lab")]).as_deref(), Some("eu-west-3"));
        assert_eq!(region(&[home, ("AWS_PROFILE", "lab"), ("AWS_REGION", "x-1")]).as_deref(), Some("x-1"));
        assert_eq!(region(&[home]), None);
    }

    #[tokio::test]
    async fn missing_credentials_are_an_error_with_advice() {
        let error = found(&[("AWS_ACCESS_KEY_ID", "only")]).await.unwrap_err();
        assert!(error.contains("AWS_SECRET_ACCESS_KEY"), "{error}");
        let error = found(&[("AWS_SHARED_CREDENTIALS_FILE", "/none/here")]).await.unwrap_err();
        assert!(error.contains("AWS_SHARED_CREDENTIALS_FILE: cannot read /none/here"), "{error}");
        let web = [("AWS_WEB_IDENTITY_TOKEN_FILE", "/none/token"), ("AWS_ROLE_ARN", "arn:aws:iam::1:role/r")];
        let error = found(&web).await.unwrap_err();
        assert!(error.contains("cannot read /none/token"), "{error}");
    }

    #[test]
    fn debug_form_has_no_secret() {
        let environment = AwsVariables::of(&[("AWS_SECRET_ACCESS_KEY", "s3cr3t")]);
        let source = CredentialSource::new(environment, None);
        assert!(!format!("{source:?}").contains("s3cr3t"));
    }

    #[test]
    fn element_is_found_in_xml() {
        let xml = "<A><Credentials><AccessKeyId>K</AccessKeyId>\n<SessionToken> t== </SessionToken></Credentials></A>";
        assert_eq!((element(xml, "AccessKeyId"), element(xml, "SessionToken")), (Some("K"), Some("t==")));
        assert_eq!((element(xml, "Code"), element("<Code>cut", "Code")), (None, None));
    }
}
