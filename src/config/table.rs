//! The one table of settings. Flags, environment variables, keys of the file and `docs/config.md` are views of it.

/// What a setting holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Any text.
    Text,
    /// A file or directory.
    Path,
    /// `HOST:PORT`; without a host, all addresses.
    Address,
    /// A time such as `200ms`, `15s`, `1h`.
    Duration,
    /// A regular expression.
    Regex,
    /// `true` or `false`; as a flag `--NAME` or `--no-NAME`.
    Switch,
    /// A whole number.
    Count,
    /// Bytes, such as `64MiB`.
    Size,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A path of an HTTP resource.
    UrlPath,
}

impl Kind {
    /// What a value looks like, for help and for errors.
    pub fn describe(self) -> String {
        match self {
            Kind::Text => "text".into(),
            Kind::Path => "a path".into(),
            Kind::Address => "HOST:PORT or :PORT".into(),
            Kind::Duration => "a duration such as 200ms, 15s or 1h".into(),
            Kind::Regex => "a regular expression".into(),
            Kind::Switch => "true or false".into(),
            Kind::Count => "a whole number".into(),
            Kind::Size => "a size such as 512KiB, 64MiB or 1GiB".into(),
            Kind::Choice(words) => format!("one of {}", words.join(", ")),
            Kind::UrlPath => "a path such as /metrics".into(),
        }
    }

    /// The word that stands for a value in a usage line.
    pub fn placeholder(self) -> &'static str {
        match self {
            Kind::Text => "TEXT",
            Kind::Path => "PATH",
            Kind::Address => "ADDRESS",
            Kind::Duration => "DURATION",
            Kind::Regex => "REGEX",
            Kind::Switch => "BOOL",
            Kind::Count => "N",
            Kind::Size => "SIZE",
            Kind::Choice(_) => "WORD",
            Kind::UrlPath => "PATH",
        }
    }
}

/// One setting.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Flag without dashes, and key in the file (dots may be nesting).
    pub key: &'static str,
    /// What it holds.
    pub kind: Kind,
    /// Values that hold if it is not set; none at all means *off* or *found out*.
    pub default: &'static [&'static str],
    /// Whether it may be given more than once: as a flag again, in the file as a list, in the environment with commas.
    pub repeats: bool,
    /// Its value may be a secret or hold one: no error repeats it.
    pub secret: bool,
    /// One sentence for people.
    pub help: &'static str,
}

impl Setting {
    /// The environment variable of this setting.
    pub fn variable(&self) -> String {
        format!("MEMLEDGER_{}", self.key.replace(['.', '-'], "_").to_ascii_uppercase())
    }
}

const fn one(key: &'static str, kind: Kind, default: &'static [&'static str], help: &'static str) -> Setting {
    Setting { key, kind, default, repeats: false, secret: false, help }
}

const fn secret(setting: Setting) -> Setting {
    Setting { secret: true, ..setting }
}

const fn many(
    key: &'static str,
    kind: Kind,
    default: &'static [&'static str],
    help: &'static str,
) -> Setting {
    Setting { key, kind, default, repeats: true, secret: false, help }
}

/// All settings, in the order of the help.
pub static SETTINGS: &[Setting] = &[
    many("web.listen-address", Kind::Address, &[":10853"], "Address to serve on."),
    one("web.telemetry-path", Kind::UrlPath, &["/metrics"], "Path of the metrics."),
    one(
        "web.max-requests",
        Kind::Count,
        &["40"],
        "Requests served at once, each until its answer is sent; more are answered 503. 0: no limit.",
    ),
    one(
        "web.max-connections",
        Kind::Count,
        &["256"],
        "Connections open at once; for one more, one is closed on which nothing is under way. The last eighth is for this host alone. 0: no limit.",
    ),
    one(
        "web.header-timeout",
        Kind::Duration,
        &["10s"],
        "Time for a TLS handshake, and for the head of a request, 1s to 5m.",
    ),
    one(
        "web.idle-timeout",
        Kind::Duration,
        &["2m"],
        "A connection on which nothing is asked, or no answer moves, is closed after this, 1s to 1h.",
    ),
    one(
        "web.config.file",
        Kind::Path,
        &[],
        "TLS, passwords, headers and rate, as a YAML file in the format of Prometheus's exporters. Changes are taken up at run time. See docs/serving.md.",
    ),
    one(
        "web.enable-api",
        Kind::Switch,
        &["false"],
        "Answer /api/v1, which lists processes, from anywhere. Without it, only to who gave a password or a verified certificate, and on the loopback addresses, not through a proxy.",
    ),
    one(
        "web.enable-admin",
        Kind::Switch,
        &["false"],
        "Have POST /-/release-gpu, by which memledger lets go of the GPU driver: for who gave a password or a verified certificate, and on the loopback addresses, not through a proxy.",
    ),
    one(
        "sample.interval",
        Kind::Duration,
        &["1s"],
        "Pause between two samples, 100ms to 1h. Scraping does not sample.",
    ),
    one(
        "pss.interval",
        Kind::Duration,
        &["15s"],
        "Least pause between two readings of a process's proportional share, which is costly. At least 1s.",
    ),
    many(
        "cri.endpoint",
        Kind::Path,
        &[
            "/run/containerd/containerd.sock",
            "/run/crio/crio.sock",
            "/var/run/cri-dockerd.sock",
            "/run/k3s/containerd/containerd.sock",
            "/run/k0s/containerd.sock",
            "/var/snap/microk8s/common/run/containerd.sock",
        ],
        "Socket of the kubelet's container runtime (CRI). The first one that answers is used; of the default ones, the first that has pods. Empty: do not ask for pods.",
    ),
    many(
        "cri.pod-labels",
        Kind::Text,
        &[],
        "Labels of pods that become labels of memledger_container_pod_info: KEY as label_KEY, with _ for what cannot stand in a label's name.",
    ),
    many(
        "cri.pod-annotations",
        Kind::Text,
        &[],
        "Annotations of pods that become labels of memledger_container_pod_info: KEY as annotation_KEY. No other is ever read out.",
    ),
    one(
        "kubelet.pod-resources",
        Kind::Path,
        &["/var/lib/kubelet/pod-resources/kubelet.sock"],
        "The kubelet's socket that tells which GPU was given to which container of a pod. Empty: do not ask.",
    ),
    one("docker.socket", Kind::Path, &["/var/run/docker.sock"], "Docker's socket. Empty: do not ask Docker."),
    one(
        "podman.socket",
        Kind::Path,
        &["/run/podman/podman.sock"],
        "Podman's socket. Empty: do not ask Podman.",
    ),
    one(
        "container.include",
        Kind::Regex,
        &[],
        "Show only containers whose name matches somewhere; in a pod, NAMESPACE/POD/NAME may match too.",
    ),
    one(
        "container.exclude",
        Kind::Regex,
        &[],
        "Show no container whose name, or NAMESPACE/POD/NAME, matches somewhere. Wins over include.",
    ),
    many(
        "container.label",
        Kind::Text,
        &[],
        "Show only containers with this label, KEY or KEY=VALUE. If repeated, all must be there.",
    ),
    many(
        "container.settings",
        Kind::Text,
        &["BATCH_SIZE", "NUM_WORKERS", "NUM_DEVICES", "PRECISION", "ACCUM", "PYTORCH_CUDA_ALLOC_CONF"],
        "Environment variables of containers that become labels of memledger_container_run_info. No other is ever read out.",
    ),
    one(
        "container.keep-ended",
        Kind::Duration,
        &["1h"],
        "How long the info and peaks of a container are shown after its end.",
    ),
    one(
        "gpu.nvml-library",
        Kind::Path,
        &[],
        "Load this NVML library. Without it, the driver's own libnvidia-ml.so.1 is looked for.",
    ),
    one("gpu.interval", Kind::Duration, &["1s"], "Pause between two readings of the GPU driver, 50ms to 1h."),
    one(
        "gpu.sample-interval",
        Kind::Duration,
        &["200ms"],
        "Pause between two quick looks at GPU memory, for the peaks: 20ms to 1m. 0s: peaks are those of the readings.",
    ),
    one(
        "gpu.deadline",
        Kind::Duration,
        &["5s"],
        "Age at which an answer of the GPU driver is not shown any more. A driver may hang.",
    ),
    one(
        "gpu.expected",
        Kind::Count,
        &[],
        "How many GPUs NVIDIA's driver should have on this host, for memledger_gpus_expected. Without it, the most that were seen.",
    ),
    one(
        "gpu.release-for",
        Kind::Duration,
        &["5m"],
        "How long memledger lets go of the GPU driver on SIGUSR1 or POST /-/release-gpu, 1s to 24h.",
    ),
    one(
        "state.path",
        Kind::Path,
        &["/var/lib/memledger"],
        "Directory of the ledger of OOM kills and exits. Empty: keep it in memory, and forget it at the end.",
    ),
    one(
        "state.retention",
        Kind::Duration,
        &["2160h"],
        "How long events stay in the ledger, 1h to 87840h. The counters do not forget them.",
    ),
    one(
        "state.max-size",
        Kind::Size,
        &["64MiB"],
        "Size of the ledger beyond which the oldest events are removed. At least 1MiB.",
    ),
    one(
        "events.file",
        Kind::Path,
        &[],
        "Append each OOM kill and each exit to this file, as one line of JSON. The file may be moved away at any time.",
    ),
    one(
        "oom.kernel-log",
        Kind::Choice(&["auto", "device", "syslog", "off"]),
        &["auto"],
        "Where to read the kernel's messages: /dev/kmsg, syslog(2), or auto: the first of them that can be had.",
    ),
    one(
        "oom.runtime",
        Kind::Switch,
        &["true"],
        "Use what the container runtimes tell of ends and OOMs as evidence.",
    ),
    secret(one(
        "otlp.endpoint",
        Kind::Text,
        &[],
        "URL to push metrics and events to over OTLP, such as http://collector:4318. Without it, or one of OpenTelemetry's own variables, nothing is pushed: see docs/otlp.md.",
    )),
    one(
        "otlp.protocol",
        Kind::Choice(&["grpc", "http/protobuf"]),
        &["http/protobuf"],
        "How OTLP is spoken. Collectors usually listen for gRPC on port 4317 and for HTTP on port 4318.",
    ),
    secret(many(
        "otlp.headers",
        Kind::Text,
        &[],
        "Header sent with every request, KEY=VALUE, percent-encoded. A flag can be seen by everybody on the host: better the environment or the file.",
    )),
    one("otlp.compression", Kind::Choice(&["gzip", "none"]), &["none"], "Compression of what is pushed."),
    one("otlp.interval", Kind::Duration, &["60s"], "Pause between two pushes of metrics, 1s to 24h."),
    one("otlp.timeout", Kind::Duration, &["10s"], "How long one request may take, 1ms to 1h."),
    one(
        "otlp.temporality",
        Kind::Choice(&["cumulative", "delta", "lowmemory"]),
        &["cumulative"],
        "Counters as they stand, or as the growth since the last push. lowmemory is cumulative here.",
    ),
    one(
        "otlp.certificate",
        Kind::Path,
        &[],
        "PEM file of the certificate authorities that are trusted. Without it, those of the host.",
    ),
    one("otlp.client-certificate", Kind::Path, &[], "PEM file of memledger's own certificate."),
    one("otlp.client-key", Kind::Path, &[], "PEM file of the key of memledger's own certificate."),
    one(
        "otlp.insecure",
        Kind::Switch,
        &["false"],
        "No TLS for a gRPC endpoint that is given as HOST:PORT. A URL says itself whether there is TLS.",
    ),
    one("otlp.metrics", Kind::Switch, &["true"], "Push metrics where there is an endpoint."),
    one(
        "otlp.logs",
        Kind::Switch,
        &["true"],
        "Push the ledger's events as log records where there is an endpoint.",
    ),
    one(
        "otlp.shutdown-timeout",
        Kind::Duration,
        &["5s"],
        "How long the last push may take when memledger is stopped, 0s to 1h.",
    ),
    one("collector.own", Kind::Switch, &["true"], "memledger's own process: the process_* families."),
    one("collector.host", Kind::Switch, &["true"], "Memory of the host."),
    one("collector.cgroup", Kind::Switch, &["true"], "Memory of containers."),
    one(
        "collector.process",
        Kind::Switch,
        &["true"],
        "Processes of containers and their resident memory by role.",
    ),
    one("collector.shm", Kind::Switch, &["true"], "/dev/shm of containers. Needs the process collector."),
    one(
        "collector.pss",
        Kind::Switch,
        &["true"],
        "Proportional shares of memory by role. Needs the process collector.",
    ),
    one("collector.gpu", Kind::Switch, &["true"], "GPUs, through NVML."),
    one(
        "collector.drm",
        Kind::Switch,
        &["true"],
        "GPUs whose driver keeps the kernel's DRM statistics (amdgpu, i915, xe, nouveau and others). Looks at nothing where no such GPU is.",
    ),
    one("path.procfs", Kind::Path, &["/proc"], "The host's procfs."),
    one("path.sysfs", Kind::Path, &["/sys"], "The host's sysfs, for GPUs of DRM drivers."),
    one("path.cgroupfs", Kind::Path, &["/sys/fs/cgroup"], "The host's cgroup file systems."),
    one("path.devfs", Kind::Path, &["/dev"], "The host's /dev."),
    one(
        "log.level",
        Kind::Choice(&["debug", "info", "warn", "error"]),
        &["info"],
        "Least severity that is logged.",
    ),
    one(
        "log.format",
        Kind::Choice(&["logfmt", "json"]),
        &["logfmt"],
        "Form of the log, which goes to standard error.",
    ),
];

/// The setting of this key.
pub fn setting(key: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.key == key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn no_setting_stands_twice_under_any_name() {
        let mut seen = HashSet::new();
        for setting in SETTINGS {
            assert!(seen.insert(setting.key.to_owned()), "{}", setting.key);
            assert!(seen.insert(setting.variable()), "{}", setting.key);
            assert!(setting.help.ends_with('.'), "{}: help is a sentence", setting.key);
        }
    }
}
