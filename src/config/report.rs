//! Settings of the reports of runs: a directory, and a bucket of S3 or its like.

use std::path::PathBuf;

use url::Url;

use super::ConfigError;
use super::declare::{Setting, SettingGroup, Source, choice, count, path, setting, settings, text};
use super::sources::Values;
use super::value_parsers::{SIZE_TAKES, size};

settings! {
    /// Where reports of ended runs are written.
    #[derive(PartialEq, Eq)]
    struct ReportSettings {
        /// Directory that gets a folder for each run that has ended, with its report as a page, as JSON and as memory_usage.json.
        /// See docs/runs.md.
        dir: Option<PathBuf> = path("report.dir", &[]);
        /// Maximum number of folders in the directory; the oldest are removed.
        dir_max_runs: usize = count("report.dir-max-runs", &["1000"]);
        /// Maximum size of all folders in the directory; the oldest are removed. At least 1MiB.
        dir_max_size_bytes: u64 = setting("report.dir-max-size", ("SIZE", SIZE_TAKES), &["1GiB"], |text| size(text, 1 << 20));
        /// Bucket that gets the same files for each run that has ended, such as s3://bucket/prefix. Credentials come from the
        /// standard variables and files of AWS. See docs/runs.md.
        s3_url: Option<S3Url> = text("report.s3-url", &[], S3Url::parse);
        /// URL of the server, such as http://minio:9000. Default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, else AWS.
        s3_endpoint: Option<Url> = text("report.s3-endpoint", &[], http_url);
        /// Region. Default: AWS_REGION, AWS_DEFAULT_REGION, that of the profile, else us-east-1.
        s3_region: Option<String> = text("report.s3-region", &[], region);
        /// Where the name of the bucket stands: in the path, as MinIO needs it, or in the name of the host, as AWS wants it. auto: in the
        /// path where an endpoint is set.
        s3_addressing: S3Addressing = choice("report.s3-addressing", &["auto"], &[
            ("auto", S3Addressing::Auto), ("path", S3Addressing::Path), ("virtual", S3Addressing::Virtual),
        ]);
        /// PEM file of the trusted certificate authorities. Default: AWS_CA_BUNDLE, else those of the host.
        s3_certificate: Option<PathBuf> = path("report.s3-certificate", &[]);
    }
}

/// A bucket, and what precedes the names of its objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct S3Url {
    /// Name of the bucket.
    pub bucket: String,
    /// Without slashes at its ends; empty: the objects are at the top.
    pub prefix: String,
}

impl S3Url {
    /// Longest prefix in bytes: keys have at most 1,024.
    const MAX_PREFIX_BYTES: usize = 512;

    fn parse(text: &str) -> Result<Self, String> {
        let expected = || "s3://BUCKET or s3://BUCKET/PREFIX".to_owned();
        let (bucket, prefix) =
            text.strip_prefix("s3://").ok_or_else(expected)?.split_once('/').unwrap_or((&text[5..], ""));
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
        let is_bucket =
            (3..=63).contains(&bucket.len()) && bucket.bytes().all(is_name) && bucket.as_bytes()[0] != b'.';
        if !is_bucket {
            return Err(expected());
        }
        let prefix = prefix.trim_matches('/');
        // a URL resolves these, and names without control characters are all that tools can list
        let is_part = |part: &str| !matches!(part, "" | "." | "..") && !part.chars().any(char::is_control);
        if prefix.len() > Self::MAX_PREFIX_BYTES || !(prefix.is_empty() || prefix.split('/').all(is_part)) {
            return Err(format!(
                "{} with a prefix of at most {} bytes, without . and ..",
                expected(),
                Self::MAX_PREFIX_BYTES
            ));
        }
        Ok(Self { bucket: bucket.to_owned(), prefix: prefix.to_owned() })
    }

    /// Returns the key of an object with this name.
    pub fn key(&self, name: &str) -> String {
        if self.prefix.is_empty() { name.to_owned() } else { format!("{}/{name}", self.prefix) }
    }
}

impl std::fmt::Display for S3Url {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "s3://{}", self.bucket)?;
        if self.prefix.is_empty() { Ok(()) } else { write!(f, "/{}", self.prefix) }
    }
}

/// Where the name of the bucket stands in the URL of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum S3Addressing {
    /// In the path where an endpoint is set, else in the name of the host.
    Auto,
    /// In the path.
    Path,
    /// In the name of the host.
    Virtual,
}

/// Parses the URL of a server.
///
/// # Errors
/// What is expected.
pub fn http_url(text: &str) -> Result<Url, String> {
    let expected = "a URL such as https://minio:9000, without user name, query and fragment";
    let url = Url::parse(text).map_err(|_| expected)?;
    let is_plain = url.username().is_empty()
        && url.password().is_none()
        && url.query().is_none()
        && url.fragment().is_none();
    let is_http = matches!(url.scheme(), "http" | "https") && url.has_host();
    if is_plain && is_http { Ok(url) } else { Err(expected.to_owned()) }
}

/// Parses the name of a region.
///
/// # Errors
/// What is expected.
pub fn region(text: &str) -> Result<String, String> {
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    let is_region = (1..=64).contains(&text.len()) && text.bytes().all(is_name);
    if is_region { Ok(text.to_owned()) } else { Err("a region such as eu-central-1".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_and_prefix_make_keys() {
        let url = S3Url::parse("s3://models/team a/memory/").unwrap();
        assert_eq!(
            (url.bucket.as_str(), url.key("x/report.json").as_str()),
            ("models", "team a/memory/x/report.json")
        );
        assert_eq!(url.to_string(), "s3://models/team a/memory");
        assert_eq!(S3Url::parse("s3://models").unwrap().key("x"), "x");
        for wrong in [
            "models",
            "s3://",
            "s3://a",
            "s3:///x",
            "s3://b/../c",
            "s3://buck/a//b",
            "s3://buck?x/y",
            "https://buck/x",
        ] {
            assert!(S3Url::parse(wrong).is_err(), "{wrong}");
        }
        assert!(S3Url::parse(&format!("s3://bucket/{}", "x".repeat(600))).is_err());
    }

    #[test]
    fn endpoint_has_no_secret() {
        assert!(http_url("http://minio:9000").is_ok() && http_url("https://gateway/s3/").is_ok());
        for wrong in
            ["minio:9000", "ftp://minio", "http://user:secret@minio", "http://minio/?token=x", "http://"]
        {
            assert!(http_url(wrong).is_err(), "{wrong}");
        }
    }
}
