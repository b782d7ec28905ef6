//! All settings, in the order of the help. Flags, environment variables, keys of the file, `docs/config.md` and the schema of
//! the chart are generated from these declarations.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use regex::Regex;
use tracing::Level;

use super::ConfigError;
use super::declare::{
    FileInUse, IsChanged, IsFlag, PATH, Setting, SettingGroup, Source, Switches, choice, count, duration,
    duration_or_zero, group, path, setting, settings, switch, text,
};
use super::otlp::OtlpSettings;
use super::report::ReportSettings;
use super::sources::Values;
use super::value_parsers::{
    PERCENT, SIZE_TAKES, address, label, label_key, percent, regex, size, unix_socket, url_path,
    variable_name,
};
use crate::catalog::COLLECTORS;
use crate::host::HostPaths;
use crate::parse::container_id::RuntimeKind;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

settings! {
    /// All settings, validated.
    struct Config {
        /// The settings file that was read.
        file: Option<PathBuf> = FileInUse;
        /// Address to listen on. Empty: no HTTP listener, for use with OTLP alone.
        listen: Vec<SocketAddr> = setting("web.listen-address", ("ADDRESS", "HOST:PORT or :PORT"), &[":10853"], address);
        /// Path of the metrics.
        telemetry_path: String = setting("web.telemetry-path", ("URL_PATH", "a path such as /metrics"), &["/metrics"], url_path);
        /// Limits of the HTTP server.
        limits: HttpLimits = group::<HttpLimits>();
        /// YAML file with TLS, passwords, headers and rate limit, in the format of Prometheus exporters. Changes are reloaded at
        /// run time. See docs/serving.md.
        web_config: Option<PathBuf> = path("web.config.file", &[]);
        /// Serve /api/v1, which names processes, to all clients. Without it, only to clients with a password or a verified
        /// certificate, and on the control socket.
        enable_api: bool = switch("web.enable-api", &["false"]);
        /// Serve POST /-/release-gpu, which makes memledger release the GPU driver, and POST
        /// /api/v1/containers/NAME/cleanup, to clients with a password or a verified certificate. The control socket has them
        /// without this.
        enable_admin: bool = switch("web.enable-admin", &["false"]);
        /// The control socket.
        local: LocalSettings = group::<LocalSettings>();
        /// Time between two samples, 100ms to 1h. Scrapes do not sample.
        sample_interval: Duration = duration("sample.interval", &["1s"], 100 * MS, HOUR);
        /// Minimum time between two reads of a process's proportional set size, for which the process waits up to 50 ms. At least 1s.
        pss_interval: Duration = duration("pss.interval", &["15s"], SECOND, DAY);
        /// Settings of the kubelet's container runtime.
        cri: CriSettings = group::<CriSettings>();
        /// Sockets of container runtimes.
        endpoints: Vec<RuntimeEndpoint> = group::<RuntimeSockets>();
        /// Sentences about engines of the caller that are not read.
        engine_notices: Vec<String> = super::caller_sockets::EngineNotices;
        /// Which containers and which of their settings are exported.
        filter: Filter = group::<Filter>();
        /// How long info and peaks of a container are exported after its end.
        keep_ended: Duration = duration("container.keep-ended", &["1h"], Duration::ZERO, 366 * DAY);
        /// Settings of the GPU collector.
        gpu: GpuSettings = group::<GpuSettings>();
        /// Settings of the view from inside.
        reporter: ReporterSettings = group::<ReporterSettings>();
        /// Settings of `memledger run`.
        run: RunCommandSettings = group::<RunCommandSettings>();
        /// Settings of persistent state.
        state: StateSettings = group::<StateSettings>();
        /// Where reports of ended runs are written.
        report: ReportSettings = group::<ReportSettings>();
        /// Settings of the sources of the OOM ledger.
        oom: OomSettings = group::<OomSettings>();
        /// The OTLP export; `None`: off.
        otlp: Option<OtlpSettings> = super::otlp::Otlp;
        /// Standard variables of OpenTelemetry that are ignored, and why.
        otlp_ignored: Vec<String> = super::otlp::Ignored;
        /// Enabled collectors.
        collectors: BTreeSet<&'static str> = Switches(COLLECTORS);
        /// Mount points of the host's file systems.
        host_paths: HostPaths = group::<PathSettings>();
        /// Minimum severity of log lines.
        log_level: Level = choice("log.level", &["info"], &[("debug", Level::DEBUG), ("info", Level::INFO), ("warn", Level::WARN), ("error", Level::ERROR)]);
        /// Format of the log, which goes to standard error.
        log_json: bool = choice("log.format", &["logfmt"], &[("logfmt", false), ("json", true)]);
    }

    /// Limits of the HTTP server.
    #[derive(Copy, PartialEq, Eq)]
    struct HttpLimits {
        /// Maximum concurrent requests for metrics, and as many for the API; a quarter of them for one client address. More
        /// are rejected with 503. 0: no limit.
        requests: usize = count("web.max-requests", &["40"]);
        /// Maximum open connections, a quarter of them for one client address; more get 503. This host has another quarter
        /// of its own. 0: no limit.
        connections: usize = count("web.max-connections", &["256"]);
        /// Timeout of a TLS handshake and of the headers of a request, 1s to 5m.
        head: Duration = duration("web.header-timeout", &["10s"], SECOND, 5 * MINUTE);
        /// Timeout of connections without a request, and, where it is above 30s, of reading a response, 1s to 1h.
        idle: Duration = duration("web.idle-timeout", &["2m"], SECOND, HOUR);
    }

    /// Settings of the control socket.
    #[derive(Default, PartialEq, Eq)]
    struct LocalSettings {
        /// Control socket for memledger's verbs on this host. Processes of other containers are refused. Empty: off.
        socket: Option<PathBuf> = path("local.socket", &["/run/memledger/control.sock"]);
        /// Group that may use the control socket, by name or number. Default: only memledger's own user.
        group: Option<String> = text("local.group", &[], |text| Ok(text.to_owned()));
    }

    /// Settings of the kubelet's container runtime, the source of pods.
    #[derive(Default, PartialEq, Eq)]
    struct CriSettings {
        /// Socket of the kubelet's container runtime (CRI). The first one that responds is used; of the default ones, the first
        /// that has pods. Empty: off.
        sockets: Vec<PathBuf> = setting("cri.endpoint", (PATH, "a path"), &[
            "/run/containerd/containerd.sock",
            "/run/crio/crio.sock",
            "/var/run/cri-dockerd.sock",
            "/run/k3s/containerd/containerd.sock",
            "/run/k0s/containerd.sock",
            "/var/snap/microk8s/common/run/containerd.sock",
        ], |text| Ok(unix_socket(text)));
        /// The sockets were set explicitly, so that one of them should respond. Otherwise they are guesses.
        is_explicit: bool = IsChanged("cri.endpoint");
        /// Labels of pods that become labels of memledger_container_pod_info: KEY as label_KEY, with _ for characters that are
        /// not allowed in a label name.
        labels: Vec<(String, Arc<str>)> = text("cri.pod-labels", &[], |text| label_key("label", text));
        /// Annotations of pods that become labels of memledger_container_pod_info: KEY as annotation_KEY. No others are
        /// exported.
        annotations: Vec<(String, Arc<str>)> = text("cri.pod-annotations", &[], |text| label_key("annotation", text));
        /// Directory of the kubelet's logs of containers, for --container.logs.
        pod_logs: PathBuf = path("cri.pod-logs", &["/var/log/pods"]);
        /// The kubelet's socket that lists the GPUs allocated to containers of pods. Not read while `--cri.endpoint` is empty.
        /// Empty: off.
        pod_resources: Option<PathBuf> = path("kubelet.pod-resources", &["/var/lib/kubelet/pod-resources/kubelet.sock"]);
    }

    /// The sockets of Docker and Podman.
    struct RuntimeSockets {
        /// Docker's socket; several for several engines. `*` stands for any part of a name, as in /run/user/*/docker.sock for
        /// the engines of users, which are then trusted: see SECURITY.md. At most 64 sockets that match are used. The
        /// service needs CAP_DAC_OVERRIDE for sockets of users. Where nothing sets it, also the socket in DOCKER_HOST (unix:// alone) and the
        /// caller's own docker.sock in XDG_RUNTIME_DIR; as root not those of other users. Empty: off.
        docker: Vec<PathBuf> = path("docker.socket", &["/var/run/docker.sock"]);
        /// Podman's socket; several and `*` as for Docker, such as /run/user/*/podman/podman.sock, and for the caller's own podman/podman.sock. Empty: off. A service that systemd starts for the socket keeps running while memledger is connected.
        podman: Vec<PathBuf> = path("podman.socket", &["/run/podman/podman.sock"]);
    }

    /// Selection of containers, of settings in their environment, and of logs.
    #[derive(Default)]
    struct Filter {
        /// Export only containers whose name, or in a pod NAMESPACE/POD/NAME, matches anywhere.
        include: Option<Regex> = setting("container.include", ("REGEX", "a regular expression"), &[], regex);
        /// Exclude containers whose name, or in a pod NAMESPACE/POD/NAME, matches anywhere. Overrides include.
        exclude: Option<Regex> = setting("container.exclude", ("REGEX", "a regular expression"), &[], regex);
        /// Export only containers with this label, KEY or KEY=VALUE. If repeated, all are required.
        labels: Vec<(String, Option<String>)> = text("container.label", &[], label);
        /// Logs of containers that are read for errors of memory (docs/cuda-oom.md, docs/deaths.md): of none; labelled: of those with the
        /// label memledger.logs=true; all: of those without memledger.logs=false. Only kinds and numbers are kept.
        logs: LogSelection = choice("container.logs", &["none"], &[
            ("none", LogSelection::None), ("labelled", LogSelection::Labelled), ("all", LogSelection::All),
        ]);
        /// Labels of containers, pods and runs that name their owner, for memledger_container_owner_info: KEY becomes label_KEY, and
        /// the first one that is set becomes `owner`, by which alerts can be routed. Empty: off.
        owner_labels: Vec<(String, Arc<str>)> = text("container.owner-labels", &[
            "team", "owner", "app.kubernetes.io/part-of", "com.docker.compose.project",
        ], |text| label_key("label", text));
        /// Environment variables of containers that become labels of memledger_container_run_info. No others are exported.
        settings: Vec<String> = text("container.settings", &["BATCH_SIZE", "NUM_WORKERS", "NUM_DEVICES", "PRECISION", "ACCUM", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"], variable_name);
    }

    /// Settings of the GPU collector.
    struct GpuSettings {
        /// NVML library to load. Default: the driver's own libnvidia-ml.so.1.
        library: Option<PathBuf> = path("gpu.nvml-library", &[]);
        /// Time between two full readings of the GPU driver, 50ms to 1h.
        interval: Duration = duration("gpu.interval", &["1s"], 50 * MS, HOUR);
        /// Time between two samples of GPU memory alone, for the peaks: 20ms to 1m. 0s: only full readings count.
        sample_interval: Duration = duration_or_zero("gpu.sample-interval", &["200ms"], 20 * MS, MINUTE);
        /// Maximum time for one reading of the GPU driver, which may hang; then its process is replaced. The first reading has 12
        /// times as long.
        deadline: Duration = duration("gpu.deadline", &["4s"], 100 * MS, DAY);
        /// Number of GPUs that NVIDIA's driver should have on this host, for memledger_gpus_expected. Default: the highest
        /// number within 7 days.
        expected: Option<usize> = count("gpu.expected", &[]);
        /// How long memledger releases the GPU driver on memledger release-gpu, SIGUSR1 or POST
        /// /-/release-gpu, 1s to 24h.
        release_for: Duration = duration("gpu.release-for", &["5m"], SECOND, DAY);
    }

    /// Settings of the view from inside.
    struct ReporterSettings {
        /// Directory for the socket of processes that report from inside, and the Python client; mount it read-only into
        /// containers. Empty: off. See docs/inside-view.md.
        directory: Option<PathBuf> = path("reporter.directory", &["/run/memledger-reporter"]);
        /// From this share of a GPU's memory on, ask reporting trainings to give unused memory of PyTorch back, where another
        /// process could use it, such as 85%. Empty: off. See docs/cleanup.md.
        auto_cleanup: Option<f64> = setting("reporter.auto-cleanup", ("PERCENT", PERCENT), &[], percent);
    }

    /// Settings of `memledger run`.
    #[derive(PartialEq, Eq)]
    struct RunCommandSettings {
        /// Directory in which memledger run keeps a record of each run for memledger serve. serve creates it for all users, as /tmp is;
        /// without it the records are below ~/.local/state. Empty: those alone. See docs/bare-hosts.md.
        spool: Option<PathBuf> = path("run.spool", &["/var/lib/memledger-runs"]);
    }

    /// Settings of persistent state.
    #[derive(PartialEq, Eq)]
    struct StateSettings {
        /// Directory of the ledger of OOM kills and exits. Empty: keep it in memory only, and lose it on exit.
        path: Option<PathBuf> = path("state.path", &["/var/lib/memledger"]);
        /// A flag names it: then verbs read it, whatever `memledger serve` runs.
        is_flag: bool = IsFlag("state.path");
        /// How long the ledger keeps events, 1h to 87840h; from a day after the boot on, before which the clock may be wrong. The counters keep counting them.
        retention: Duration = duration("state.retention", &["90d"], HOUR, 3660 * DAY);
        /// Maximum size of the ledger; beyond it the oldest events are removed. At least 1MiB.
        max_size_bytes: u64 = setting("state.max-size", ("SIZE", SIZE_TAKES), &["64MiB"], |text| size(text, 1 << 20));
    }

    /// Settings of the sources of the OOM ledger.
    #[derive(PartialEq, Eq)]
    struct OomSettings {
        /// Source of kernel messages: /dev/kmsg, syslog(2), or auto: the first of the two that is available.
        kernel_log: KernelLogChoice = choice("oom.kernel-log", &["auto"], &[
            ("auto", KernelLogChoice::Auto), ("device", KernelLogChoice::Device), ("syslog", KernelLogChoice::Syslog), ("off", KernelLogChoice::Off),
        ]);
        /// Use exits and OOM events of the container runtimes as evidence.
        runtime: bool = switch("oom.runtime", &["true"]);
    }

    /// Mount points of the host's file systems.
    struct PathSettings {
        /// The host's procfs.
        proc: PathBuf = path("path.procfs", &["/proc"]);
        /// The host's sysfs, for GPUs of AMD.
        sys: PathBuf = path("path.sysfs", &["/sys"]);
        /// The host's cgroup file systems.
        cgroup: PathBuf = path("path.cgroupfs", &["/sys/fs/cgroup"]);
        /// The host's /dev.
        dev: PathBuf = path("path.devfs", &["/dev"]);
    }
}

/// The API socket of a container runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeEndpoint {
    /// [`RuntimeKind::Docker`] or [`RuntimeKind::Podman`].
    pub runtime: RuntimeKind,
    /// The Unix socket, or a pattern with `*`.
    pub socket: PathBuf,
}

impl RuntimeEndpoint {
    /// Returns whether this is the socket that is used where nothing sets another one.
    pub fn is_default(&self) -> bool {
        let default = super::setting(&format!("{}.socket", self.runtime)).map(|setting| setting.default);
        default.is_some_and(|default| default.iter().any(|path| self.socket == Path::new(path)))
    }
}

/// The containers whose logs are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogSelection {
    /// None.
    #[default]
    None,
    /// Those with a label that says so.
    Labelled,
    /// All without a label that forbids it.
    All,
}

/// The source of kernel messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelLogChoice {
    /// `/dev/kmsg`, or syslog(2) if the device is unavailable.
    Auto,
    /// `/dev/kmsg` only.
    Device,
    /// syslog(2) only.
    Syslog,
    /// None.
    Off,
}

impl From<RuntimeSockets> for Vec<RuntimeEndpoint> {
    fn from(sockets: RuntimeSockets) -> Self {
        let all = [(RuntimeKind::Docker, sockets.docker), (RuntimeKind::Podman, sockets.podman)];
        let endpoints = all.into_iter().flat_map(|(runtime, sockets)| {
            sockets.into_iter().map(move |socket| RuntimeEndpoint { runtime, socket })
        });
        endpoints.collect()
    }
}

impl From<PathSettings> for HostPaths {
    fn from(PathSettings { proc, sys, cgroup, dev }: PathSettings) -> Self {
        Self { proc, sys, cgroup, dev }
    }
}
