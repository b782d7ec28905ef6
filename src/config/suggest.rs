//! Names the setting that an unknown key, flag or variable stands for.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt;
use std::sync::LazyLock;

use regex::Regex;

use super::declare::Setting;
use super::sources::CONFIG_FILE;
use super::{SETTINGS, setting};
use crate::text::similar;

/// The prefix of the environment variables of settings.
const PREFIX: &str = "MEMLEDGER_";

/// What other exporters and tools call a setting, without separators.
const OTHER_NAMES: &[(&str, &str)] = &[
    ("port", "web.listen-address"),
    ("webport", "web.listen-address"),
    ("httpport", "web.listen-address"),
    ("listenport", "web.listen-address"),
    ("metricsport", "web.listen-address"),
    ("listen", "web.listen-address"),
    ("bind", "web.listen-address"),
    ("bindaddress", "web.listen-address"),
    ("addr", "web.listen-address"),
    ("address", "web.listen-address"),
    ("host", "web.listen-address"),
    ("metricspath", "web.telemetry-path"),
    ("conf", "config.file"),
    ("cfg", "config.file"),
    ("configuration", "config.file"),
    ("configpath", "config.file"),
    ("interval", "sample.interval"),
    ("refresh", "sample.interval"),
    ("scrapeinterval", "sample.interval"),
    ("pollinterval", "sample.interval"),
    ("sampleinterval", "sample.interval"),
    ("samplinginterval", "sample.interval"),
    ("level", "log.level"),
    ("verbose", "log.level"),
    ("verbosity", "log.level"),
    ("debug", "log.level"),
    ("data", "state.path"),
    ("datadir", "state.path"),
    ("statedir", "state.path"),
    ("storage", "state.path"),
    ("storagepath", "state.path"),
    ("database", "state.path"),
    ("db", "state.path"),
];

/// Variables that begin like those of settings and are others': of the Python client, the Compose files, the build and the tests.
const OTHER_VARIABLES: &[&str] = &[
    "DEBUG",
    "SNAPSHOT_DIRECTORY",
    "IMAGE",
    "PUBLISH_ADDRESS",
    "BIN",
    "V2HOST",
    "REVISION",
    "RUSTC",
    "SOURCE",
];

/// Returns those of these names, of settings or of flags, that an unknown one may stand for, the likeliest first.
pub fn meant<'n>(names: &[&'n str], unknown: &str) -> Vec<&'n str> {
    let plain: String = unknown.chars().filter(|c| c.is_ascii_alphanumeric()).collect();
    let elsewhere = OTHER_NAMES.iter().find(|(name, _)| plain.eq_ignore_ascii_case(name));
    let ours = elsewhere.and_then(|(_, key)| names.iter().find(|name| *name == key));
    ours.map_or_else(|| similar(names.iter().copied(), unknown), |name| vec![*name])
}

/// Returns the question that ends an error about an unknown name; empty if nothing is like it.
pub fn question(names: &[impl fmt::Display]) -> String {
    let names: Vec<_> = names.iter().map(ToString::to_string).collect();
    if names.is_empty() { String::new() } else { format!("; did you mean {}?", names.join(" or ")) }
}

/// Returns the keys of all settings and the beginnings that several have in common, for an unknown key of the file.
pub fn keys_and_groups() -> Vec<&'static str> {
    let dots = |key: &'static str| key.match_indices('.').map(move |(dot, _)| &key[..dot]);
    let groups: BTreeSet<_> = SETTINGS.iter().flat_map(|setting| dots(setting.key)).collect();
    SETTINGS.iter().map(|setting| setting.key).chain(groups).collect()
}

/// A variable that looks like one of a setting and is none, so that it is ignored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownVariable {
    name: String,
    meant: Vec<String>,
}

impl UnknownVariable {
    /// Returns true if it is like the variable of a setting: a mistake, and not somebody else's variable.
    pub fn is_mistake(&self) -> bool {
        !self.meant.is_empty()
    }
}

impl fmt::Display for UnknownVariable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // a name may have any bytes
        let name = self.name.escape_debug();
        write!(f, "the environment variable {name} is no setting and is ignored{}", question(&self.meant))
    }
}

/// Returns those of these environment variables that begin with `MEMLEDGER_`, or nearly so, and are neither a setting nor known to be others'.
///
/// The kubelet sets variables for each Service, also for one named `memledger` or `memledger-web`. They are known by their form.
pub fn unknown_variables(
    environment: impl IntoIterator<Item = (OsString, OsString)>,
) -> Vec<UnknownVariable> {
    let keys: Vec<_> = SETTINGS.iter().map(|setting| setting.key).chain([CONFIG_FILE.0]).collect();
    let variables: BTreeSet<String> =
        SETTINGS.iter().map(Setting::variable).chain([CONFIG_FILE.1.to_owned()]).collect();
    let unknown = |(name, value): (OsString, OsString)| {
        let name = name.to_string_lossy().into_owned();
        if variables.contains(&name) {
            return None;
        }
        let rest = rest(&name)?;
        if is_known(&rest, &value.to_string_lossy()) {
            return None;
        }
        let meant = meant(&keys, &rest).into_iter().map(variable_of).collect();
        let found = UnknownVariable { name, meant };
        // without the exact prefix only what is surely meant for memledger counts
        (found.name.starts_with(PREFIX) || found.is_mistake()).then_some(found)
    };
    let mut found: Vec<_> = environment.into_iter().filter_map(unknown).collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// Returns the environment variable of a key, `config.file` included.
fn variable_of(key: &str) -> String {
    setting(key).map_or_else(|| CONFIG_FILE.1.to_owned(), Setting::variable)
}

/// Returns the name of a variable without the prefix, which may be misspelled or in lower case.
fn rest(name: &str) -> Option<String> {
    if let Some(rest) = name.strip_prefix(PREFIX) {
        return Some(rest.to_owned());
    }
    let (program, rest) = name.split_once('_')?;
    let is_near = program.len() + 3 >= PREFIX.len() && !similar(["memledger"], program).is_empty();
    is_near.then(|| rest.to_ascii_uppercase())
}

/// Returns true for a variable of another part of memledger, of a test, or of the kubelet.
fn is_known(rest: &str, value: &str) -> bool {
    let is_of_tests = rest.split('_').next().is_some_and(|first| matches!(first, "TEST" | "TESTS"));
    OTHER_VARIABLES.contains(&rest) || is_of_tests || is_of_service(rest, value)
}

/// Returns true for the variables that the kubelet sets for a Service, and Docker for a link, whose names begin with `MEMLEDGER`.
fn is_of_service(rest: &str, value: &str) -> bool {
    static NAMES: LazyLock<Option<Regex>> = LazyLock::new(|| {
        let forms =
            ["SERVICE_HOST", "SERVICE_PORT(_[A-Z0-9_]+)?", "PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?"];
        Regex::new(&format!("^([A-Z0-9_]+_)?({})$", forms.join("|"))).ok()
    });
    // a port that a person sets is a number
    let is_url = || ["tcp://", "udp://", "sctp://"].iter().any(|scheme| value.starts_with(scheme));
    let is_port = rest == "PORT" || rest.ends_with("_PORT");
    (is_port && is_url()) || NAMES.as_ref().is_some_and(|names| names.is_match(rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unknown(variables: &[(&str, &str)]) -> Vec<String> {
        let environment = variables.iter().map(|(name, value)| (name.into(), value.into()));
        unknown_variables(environment).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn mistyped_variable_names_the_setting() {
        for (name, meant) in [
            ("MEMLEDGER_WEB_LISTEN_ADRESS", "MEMLEDGER_WEB_LISTEN_ADDRESS"),
            ("MEMLEDGER_WEB_CONFIGFILE", "MEMLEDGER_WEB_CONFIG_FILE"),
            ("MEMLEDGER_OTLP_HEADER", "MEMLEDGER_OTLP_HEADERS"),
            ("MEMLEDGER_LISTEN_ADDRESS", "MEMLEDGER_WEB_LISTEN_ADDRESS"),
            ("MEMLEDGER_PORT", "MEMLEDGER_WEB_LISTEN_ADDRESS"),
            ("MEMLEDGER_CONFIG", "MEMLEDGER_CONFIG_FILE"),
            ("MEMLEDGER_LOGLEVEL", "MEMLEDGER_LOG_LEVEL"),
            ("MEMLEDGER_COLECTOR_GPU", "MEMLEDGER_COLLECTOR_GPU"),
            ("MEMLEGER_STATE_PATH", "MEMLEDGER_STATE_PATH"),
            ("memledger_state_path", "MEMLEDGER_STATE_PATH"),
        ] {
            let said = format!(
                "the environment variable {name} is no setting and is ignored; did you mean {meant}?"
            );
            assert_eq!(unknown(&[(name, "9000")]), [said]);
        }
    }

    #[test]
    fn variable_like_no_setting_is_no_mistake() {
        let found = unknown_variables([("MEMLEDGER_VERSION".into(), "7".into())]);
        assert_eq!(found.len(), 1);
        assert!(!found[0].is_mistake());
        assert_eq!(
            found[0].to_string(),
            "the environment variable MEMLEDGER_VERSION is no setting and is ignored"
        );
        assert_eq!(
            unknown(&[("MEMLEDGER_\n", "")]),
            ["the environment variable MEMLEDGER_\\n is no setting and is ignored"]
        );
    }

    #[test]
    fn variables_of_settings_and_of_others_are_known() {
        for setting in SETTINGS.iter() {
            assert_eq!(unknown(&[(&setting.variable(), "x")]), [""; 0], "{}", setting.key);
        }
        for (name, value) in [
            ("MEMLEDGER_CONFIG_FILE", "x"),
            ("MEMLEDGER_DEBUG", "1"),
            ("MEMLEDGER_TEST_RUN", "1"),
            ("MEMLEDGER_TESTS_REQUIRED", "1"),
            // of the kubelet, for Services named memledger, memledger-web and memledgers
            ("MEMLEDGER_SERVICE_HOST", "10.0.0.1"),
            ("MEMLEDGER_SERVICE_PORT", "10853"),
            ("MEMLEDGER_SERVICE_PORT_WEB_CONFIG", "10853"),
            ("MEMLEDGER_PORT", "tcp://10.0.0.1:10853"),
            ("MEMLEDGER_PORT_10853_TCP", "tcp://10.0.0.1:10853"),
            ("MEMLEDGER_PORT_10853_TCP_PROTO", "tcp"),
            ("MEMLEDGER_PORT_10853_TCP_PORT", "10853"),
            ("MEMLEDGER_PORT_10853_TCP_ADDR", "10.0.0.1"),
            ("MEMLEDGER_WEB_SERVICE_HOST", "10.0.0.1"),
            ("MEMLEDGER_WEB_LISTEN_PORT", "tcp://10.0.0.1:10853"),
            ("MEMLEDGER_OTLP_PORT_4317_TCP_ADDR", "10.0.0.1"),
            ("MEMLEDGERS_SERVICE_HOST", "10.0.0.1"),
            // of other programs
            ("WEB_CONFIG", "x"),
            ("PATH", "/bin"),
            ("LEDGER_STATE_PATH", "x"),
            ("", "x"),
        ] {
            assert_eq!(unknown(&[(name, value)]), [""; 0], "{name}");
        }
    }

    /// Adds the variables that the text of the files below a folder names.
    fn add_variables_in(path: &std::path::Path, found: &mut BTreeSet<String>) {
        if path.is_dir() {
            for entry in std::fs::read_dir(path).unwrap() {
                add_variables_in(&entry.unwrap().path(), found);
            }
            return;
        }
        let Ok(text) = std::fs::read_to_string(path) else { return };
        let names = Regex::new("MEMLEDGER_[A-Z0-9_]+").unwrap();
        let names = names.find_iter(&text).map(|name| name.as_str());
        found.extend(names.filter(|name| !name.ends_with('_')).map(str::to_owned)); // those are prefixes
    }

    #[test]
    fn every_variable_that_memledger_ships_is_known() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut found = BTreeSet::new();
        for folder in [
            "deploy",
            "helm",
            "python/memledger_client",
            "dashboards",
            "tests/setup",
            "tests/support",
            "Makefile",
            "build.rs",
        ] {
            add_variables_in(&root.join(folder), &mut found);
        }
        assert!(found.len() > 20 && found.contains("MEMLEDGER_PUBLISH_ADDRESS"), "{found:?}");
        let unknown = unknown_variables(found.iter().map(|name| (name.into(), "x".into())));
        assert_eq!(unknown, [], "they are set beside memledger: add them to OTHER_VARIABLES");
    }

    #[test]
    fn setting_is_found_by_what_others_call_it() {
        let keys: Vec<_> = SETTINGS.iter().map(|setting| setting.key).chain([CONFIG_FILE.0]).collect();
        for (name, key) in OTHER_NAMES {
            assert!(keys.contains(key), "{name}: {key}");
        }
        for (unknown, likely) in [
            ("port", &["web.listen-address"][..]),
            ("Listen-Port", &["web.listen-address"]),
            ("interval", &["sample.interval"]),
            ("config", &["config.file"]),
            ("log-level", &["log.level"]),
            ("web.config", &["web.config.file"]),
            ("docker_socket", &["docker.socket"]),
            ("quux", &[]),
        ] {
            assert_eq!(meant(&keys, unknown), likely, "{unknown}");
        }
        assert_eq!(meant(&["since", "limit"], "port"), [""; 0], "the command does not take it");
    }
}
