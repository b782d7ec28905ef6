//! Pods of a real containerd over CRI: who they are, over their whole life, and how they die.
//!
//! No kubelet runs: the tests make sandboxes and containers as it does, under the cgroups that it would make.

use fake_nvml::{FakeNvml, MigDevice, State};
use memledger::config::CriSettings;
use memledger::discover::Link;
use memledger::discover::cri::{Found, find, messages};

use crate::support::cgroups::{TestCgroup, is_v2, new_id, root};
use crate::support::cri::{Containerd, Spec, Wanted};
use crate::support::docker::{Engine, assert_no_series_twice, signal, unique};
use crate::support::grpc::{Answer, Server};
use crate::support::metrics::Labels;
use crate::support::oom::{EXITS, KILLS, RESTARTS};
use crate::support::python::Python;
use crate::support::{Memledger, Metrics, binary, eventually_true};

const INFO: &str = "memledger_container_info";
const ALLOCATED: &str = "memledger_container_gpu_allocated";
const POD_INFO: &str = "memledger_container_pod_info";
const REQUEST: &str = "memledger_container_memory_request_bytes";
const USAGE: &str = "memledger_container_memory_usage_bytes";
const UP: &str = "memledger_runtime_up";
const CRI: &[(&str, &str)] = &[("runtime", "cri")];
const SLEEP: &[&str] = &["/busybox/busybox", "sleep", "100000"];

/// memledger that shows the pods of one containerd alone.
fn watch(containerd: &Containerd, namespace: &str, more: &[&str]) -> Memledger {
    let include = format!("--container.include=^{namespace}/");
    let flags = [&containerd.flag(), "--docker.socket=", "--podman.socket=", &include];
    Memledger::start(&[&flags[..], more].concat())
}

fn of<'a>(namespace: &'a str, pod: &'a str, name: &'a str) -> [(&'a str, &'a str); 3] {
    [("k8s_namespace_name", namespace), ("k8s_pod_name", pod), ("container_name", name)]
}

fn labels(metrics: &Metrics, family: &str, labels: &[(&str, &str)]) -> Result<Labels, String> {
    match metrics.all(family, labels)[..] {
        [(_, labels, _)] => Ok(labels.clone()),
        ref other => Err(format!("not one {family} {labels:?}: {other:?}")),
    }
}

/// Waits until the one container of an identity is this one.
fn eventually_is(memledger: &Memledger, me: &[(&str, &str)], id: &str) -> Metrics {
    memledger.eventually("the container", |metrics| {
        metrics.ask(USAGE, me)?;
        let info = labels(metrics, INFO, me)?;
        if info["container_id"] == id { Ok(metrics.clone()) } else { Err(format!("{info:?}")) }
    })
}

/// Waits until a counter of a container has this value.
fn eventually_counts(
    memledger: &Memledger,
    family: &str,
    me: &[(&str, &str)],
    label: (&str, &str),
    count: f64,
) {
    let series = [me, &[label]].concat();
    memledger.eventually(&format!("{count} {family} {label:?}"), |metrics| {
        let counted = metrics.sum(family, &series);
        if counted == count { Ok(()) } else { Err(format!("{:?}", metrics.all(family, me))) }
    });
}

#[test]
fn a_pod_is_shown_by_namespace_pod_and_container_and_its_pause_process_is_none() {
    let Some(containerd) = Containerd::start() else { return };
    let team = unique("team");
    let pod = containerd.pod(&Wanted {
        namespace: &team,
        name: "train-0",
        qos: "burstable/",
        labels: &[("app.kubernetes.io/name", "train"), ("secret", "s3cr3t")],
        annotations: &[("team/owner", "speech"), ("token", "s3cr3t"), ("kubernetes.io/config.source", "api")],
    });
    let env = [("BATCH_SIZE", "32"), ("HF_TOKEN", "s3cr3t")];
    let main = Spec { name: "main", command: SLEEP, env: &env, limit: 64 << 20, ..Spec::default() };
    let id = containerd.run(&pod, &main);
    let sidecar = containerd.run(&pod, &Spec { name: "log", command: SLEEP, ..Spec::default() });
    let flags = ["--cri.pod-labels=app.kubernetes.io/name,absent", "--cri.pod-annotations=team/owner"];
    let memledger = watch(&containerd, &team, &flags);
    let me = of(&team, "train-0", "main");
    let metrics = eventually_is(&memledger, &me, &id);
    eventually_is(&memledger, &of(&team, "train-0", "log"), &sidecar);
    assert_eq!(metrics.value(UP, CRI), 1.0);
    let info = labels(&metrics, INFO, &me).unwrap();
    assert_eq!((&*info["runtime"], &*info["image"]), ("cri", "docker.io/library/memledger-test:1"));
    let mut wanted = std::collections::BTreeMap::from(me);
    wanted.extend([("k8s_pod_uid", &*pod.uid), ("attempt", "0"), ("qos_class", "burstable")]);
    wanted.extend([("pod_source", "api"), ("label_app_kubernetes_io_name", "train")]);
    wanted.extend([("annotation_team_owner", "speech")]);
    let found = labels(&metrics, POD_INFO, &me).unwrap();
    let found: std::collections::BTreeMap<_, _> = found.iter().map(|(k, v)| (&**k, &**v)).collect();
    assert_eq!(found, wanted, "all of its labels");
    assert_eq!(labels(&metrics, "memledger_container_run_info", &me).unwrap()["batch_size"], "32");
    assert_eq!(metrics.value("memledger_container_memory_limit_bytes", &me), f64::from(64 << 20));
    assert_eq!(metrics.get(REQUEST, &me), None, "no node knows the request of a burstable pod");

    let pod = containerd.pod(&Wanted {
        namespace: &team,
        name: "etcd-node1",
        annotations: &[("kubernetes.io/config.source", "file")],
        ..Wanted::default()
    });
    let id = containerd.run(&pod, &Spec { name: "etcd", ..main });
    let me = of(&team, "etcd-node1", "etcd");
    let metrics = eventually_is(&memledger, &me, &id);
    let info = labels(&metrics, POD_INFO, &me).unwrap();
    assert_eq!((&*info["qos_class"], &*info["pod_source"]), ("guaranteed", "file"), "a static pod");
    assert_eq!(metrics.value(REQUEST, &me), f64::from(64 << 20));
    assert_eq!(metrics.value("memledger_containers", CRI), 3.0, "the pause processes are no containers");
    assert_no_series_twice(&metrics);
    for path in ["/metrics", "/api/v1/containers"] {
        assert!(!memledger.get(path).1.contains("s3cr3t"), "{path}");
    }
}

#[test]
fn a_container_that_is_killed_for_memory_restarts_as_the_same_and_so_does_its_pod_when_it_is_made_anew() {
    let Some(containerd) = Containerd::start() else { return };
    let team = unique("team");
    let wanted = Wanted { namespace: &team, name: "train-0", qos: "burstable/", ..Wanted::default() };
    let pod = containerd.pod(&wanted);
    let memledger = watch(&containerd, &team, &[]);
    let me = of(&team, "train-0", "main");
    let init = containerd.run(&pod, &Spec { name: "init", command: &["true"], ..Spec::default() });
    eventually_counts(&memledger, EXITS, &of(&team, "train-0", "init"), ("reason", "completed"), 1.0);
    let eats = Spec { name: "main", command: &["/hog", "eat"], limit: 32 << 20, ..Spec::default() };
    let first = containerd.run(&pod, &eats);
    eventually_counts(&memledger, EXITS, &me, ("reason", "oom_container"), 1.0);
    eventually_counts(&memledger, KILLS, &me, ("victim", "main"), 1.0);
    assert_eq!(memledger.metrics().value("memledger_container_last_exit_code", &me), 137.0);

    let second = containerd.run(&pod, &Spec { attempt: 1, command: SLEEP, ..eats });
    containerd.remove_container(&first);
    let metrics = eventually_is(&memledger, &me, &second);
    assert_eq!(labels(&metrics, POD_INFO, &me).unwrap()["attempt"], "1");
    assert_eq!(metrics.sum(KILLS, &me), 1.0, "it goes on");
    eventually_counts(&memledger, RESTARTS, &me, ("container_name", "main"), 1.0);
    containerd.stop_container(&second, 0);
    eventually_counts(&memledger, EXITS, &me, ("reason", "killed"), 1.0);
    containerd.remove(&pod.sandbox);

    let anew = containerd.pod(&wanted);
    let third = containerd.run(&anew, &Spec { command: SLEEP, ..eats });
    let metrics = eventually_is(&memledger, &me, &third);
    let info = labels(&metrics, POD_INFO, &me).unwrap();
    assert_eq!((&*info["k8s_pod_uid"], &*info["attempt"]), (&*anew.uid, "0"));
    eventually_counts(&memledger, RESTARTS, &me, ("container_name", "main"), 2.0);
    let metrics = memledger.fresh_metrics();
    assert_eq!((metrics.sum(KILLS, &me), metrics.sum(EXITS, &me)), (1.0, 2.0));
    assert_no_series_twice(&metrics);
    drop(init);

    let why = memledger.get(&format!("/api/v1/containers/{}/why", &first[..12]));
    let verdict: serde_json::Value = serde_json::from_str(&why.1).expect("JSON");
    assert_eq!(why.0, 200, "{}", why.1);
    assert!(verdict["cause"].as_str().is_some_and(|cause| cause.contains("limit")), "{}", why.1);
}

#[test]
fn a_kill_by_the_limit_of_the_pod_is_the_container_s_whose_process_was_killed() {
    let Some(containerd) = Containerd::start() else { return };
    let team = unique("team");
    let pod =
        containerd.pod(&Wanted { namespace: &team, name: "pair", qos: "burstable/", ..Wanted::default() });
    let file = if is_v2() { "memory.max" } else { "memory.limit_in_bytes" };
    std::fs::write(root().join(&pod.cgroup).join(file), (64 << 20).to_string()).expect("the pod's limit");
    let memledger = watch(&containerd, &team, &[]);
    let holds = Spec { name: "holds", command: &["/hog", "eat=8", "hold"], ..Spec::default() };
    containerd.run(&pod, &holds);
    let (holds, eats) = (of(&team, "pair", "holds"), of(&team, "pair", "eats"));
    memledger.eventually("the one that holds", |metrics| metrics.ask(USAGE, &holds));
    containerd.run(&pod, &Spec { name: "eats", command: &["/hog", "eat"], ..Spec::default() });
    eventually_counts(&memledger, EXITS, &eats, ("reason", "oom_container"), 1.0);
    eventually_counts(&memledger, KILLS, &eats, ("scope", "container"), 1.0);
    let metrics = memledger.fresh_metrics();
    assert_eq!(metrics.sum(KILLS, &holds), 0.0);
    let limit = metrics.value("memledger_container_memory_effective_limit_bytes", &holds);
    assert_eq!(limit, f64::from(64 << 20), "the pod's");
    assert_eq!(metrics.get("memledger_container_memory_limit_bytes", &holds), None);
}

#[test]
fn while_containerd_is_away_names_are_kept_and_an_end_is_told_when_it_is_back() {
    let Some(mut containerd) = Containerd::start() else { return };
    let team = unique("team");
    let pod =
        containerd.pod(&Wanted { namespace: &team, name: "job", qos: "besteffort/", ..Wanted::default() });
    let waits = ["sh", "-c", "trap 'exit 7' TERM; while :; do sleep 0.1; done"];
    let ends = containerd.run(&pod, &Spec { name: "ends", command: &waits, ..Spec::default() });
    let stays = containerd.run(&pod, &Spec { name: "stays", command: SLEEP, ..Spec::default() });
    let memledger = watch(&containerd, &team, &[]);
    let (end, stay) = (of(&team, "job", "ends"), of(&team, "job", "stays"));
    eventually_is(&memledger, &end, &ends);
    eventually_is(&memledger, &stay, &stays);
    containerd.stop();
    memledger.eventually("it is away", |metrics| match metrics.ask(UP, CRI)? {
        0.0 => Ok(()),
        up => Err(format!("{up}")),
    });
    let pids = std::fs::read_to_string(root().join(&pod.cgroup).join(&ends).join("cgroup.procs")).unwrap();
    let first: u32 = pids.lines().next().expect("a process").parse().expect("a pid");
    signal("TERM", first);
    eventually_true("its end", || !std::path::Path::new(&format!("/proc/{first}")).exists());
    let metrics = memledger.fresh_metrics();
    assert_eq!(labels(&metrics, INFO, &stay).unwrap()["container_id"], stays, "names are kept");
    containerd.launch();
    memledger.eventually("it is back", |metrics| match metrics.ask(UP, CRI)? {
        1.0 => Ok(()),
        up => Err(format!("{up}")),
    });
    eventually_counts(&memledger, EXITS, &end, ("reason", "error"), 1.0);
    let metrics = memledger.fresh_metrics();
    assert_eq!(metrics.value("memledger_container_last_exit_code", &end), 7.0);
    assert_eq!(metrics.sum(EXITS, &stay), 0.0);
    assert_eq!(metrics.sum(RESTARTS, &stay), 0.0, "the same run");
}

/// CRI-O cannot be had here. Its answers are written after its own documentation, in its own forms: names of cgroups,
/// `info`, a name for the image. The processes and their cgroups are real.
struct CriO {
    server: Server,
    containers: Vec<messages::Container>,
}

impl CriO {
    fn new() -> Self {
        let server = Server::new();
        let version =
            messages::VersionResponse { runtime_name: "cri-o".into(), runtime_version: "1.31.2".into() };
        server.tell(&method("Version"), &version);
        let this = Self { server, containers: vec![] };
        this.tell(&[]);
        this
    }

    fn flag(&self) -> String {
        format!("--cri.endpoint={}", self.server.socket.display())
    }

    fn tell(&self, sandboxes: &[messages::PodSandbox]) {
        let list = messages::ListContainersResponse { containers: self.containers.clone() };
        self.server.tell(&method("ListContainers"), &list);
        let items = sandboxes.to_vec();
        self.server.tell(&method("ListPodSandbox"), &messages::ListPodSandboxResponse { items });
    }

    fn sandbox(id: &str, namespace: &str, pod: &str) -> messages::PodSandbox {
        messages::PodSandbox {
            id: id.into(),
            metadata: Some(messages::PodSandboxMetadata {
                name: pod.into(),
                uid: "7d1c".into(),
                namespace: namespace.into(),
            }),
            ..Default::default()
        }
    }

    fn runs(&mut self, id: &str, sandbox: &str, name: &str) {
        self.containers.push(messages::Container {
            id: id.into(),
            pod_sandbox_id: sandbox.into(),
            metadata: Some(messages::ContainerMetadata { name: name.into(), attempt: 3 }),
            image: Some(messages::ImageSpec { image: "sha256:0123".into(), ..Default::default() }),
            state: messages::ContainerState::Running.into(),
            created_at: 1_700_000_000_000_000_000,
            ..Default::default()
        });
        let info = r#"{"sandboxID":"x","pid":1,"runtimeSpec":{"process":{"env":["PATH=/","NUM_WORKERS=4"]},
            "linux":{"resources":{"unified":{"memory.min":"1048576"}}}},"privileged":false}"#;
        self.server.tell(
            &method("ContainerStatus"),
            &messages::ContainerStatusResponse {
                status: Some(messages::ContainerStatus {
                    state: messages::ContainerState::Running.into(),
                    started_at: 1_700_000_001_000_000_000,
                    image: Some(messages::ImageSpec {
                        image: "registry.example/train:1".into(),
                        ..Default::default()
                    }),
                    ..Default::default()
                }),
                info: [("info".to_owned(), info.to_owned())].into(),
            },
        );
    }
}

fn method(name: &str) -> String {
    format!("/runtime.v1.RuntimeService/{name}")
}

fn crio_cgroup(pod: &str) -> TestCgroup {
    let id = new_id();
    let top = "memledger-tests/kubepods.slice/kubepods-besteffort.slice";
    TestCgroup::at(&format!("{top}/kubepods-besteffort-pod{pod}.slice/crio-{id}.scope"), &id)
}

#[test]
fn cri_o_s_answers_name_the_same_things_and_where_there_are_events_the_list_waits_for_them() {
    let team = unique("team");
    let mut crio = CriO::new();
    crio.server.answer(&method("GetContainerEvents"), Answer::Bell);
    let pause = crio_cgroup(&team);
    let cgroup = crio_cgroup(&team);
    let _processes = [&pause, &cgroup]
        .map(|cgroup| Python::start(cgroup, "import signal; print('ready'); signal.pause()"));
    let sandbox = CriO::sandbox(&pause.id, &team, "train-0");
    crio.tell(std::slice::from_ref(&sandbox));
    let flags = [
        &crio.flag(),
        "--docker.socket=",
        "--podman.socket=",
        &format!("--container.include=^{team}/|{}", pause.name()),
    ];
    let memledger = Memledger::start(&flags);
    let list = method("ListContainers");
    eventually_true("the first pause is over", || crio.server.asked(&list) >= 2);
    crio.runs(&cgroup.id, &pause.id, "main");
    crio.tell(&[sandbox]);
    let lists = crio.server.asked(&list);
    crio.server.ring();
    let me = of(&team, "train-0", "main");
    let metrics = eventually_is(&memledger, &me, &cgroup.id);
    assert_eq!(labels(&metrics, INFO, &me).unwrap()["image"], "registry.example/train:1");
    let info = labels(&metrics, POD_INFO, &me).unwrap();
    assert_eq!((&*info["attempt"], &*info["qos_class"]), ("3", "besteffort"));
    assert_eq!(labels(&metrics, "memledger_container_run_info", &me).unwrap()["num_workers"], "4");
    assert_eq!(metrics.value(REQUEST, &me), 1048576.0, "memory.min");
    assert_eq!(metrics.value("memledger_container_start_time_seconds", &me), 1_700_000_001.0);
    assert!(metrics.all(INFO, &[("container_name", pause.name())]).is_empty(), "a sandbox is none");
    for _ in 0..25 {
        memledger.fresh_metrics(); // five seconds in all: a list every second would be seen
    }
    let more = crio.server.asked(&list) - lists;
    assert!(more <= 2, "the list was taken {more} times");
}

#[test]
fn a_container_whose_status_is_never_told_holds_up_nobody_and_is_complete_as_soon_as_it_is_told() {
    const START: &str = "memledger_container_start_time_seconds";
    const TOLD: f64 = 1_700_000_001.0;
    let team = unique("team");
    let mut crio = CriO::new();
    let cgroups = [(); 3].map(|()| crio_cgroup(&team));
    let [hangs, other, later] = &cgroups;
    let _processes = cgroups
        .each_ref()
        .map(|cgroup| Python::start(cgroup, "import signal; print('ready'); signal.pause()"));
    let sandbox = [CriO::sandbox(&new_id(), &team, "train-0")];
    let pod = &sandbox[0].id;
    let (status, list) = (method("ContainerStatus"), method("ListContainers"));
    crio.server.answer_about(&status, &hangs.id, Some(Answer::Silence));
    crio.runs(&hangs.id, pod, "hangs");
    crio.runs(&other.id, pod, "other");
    crio.tell(&sandbox);
    let include = format!("--container.include=^{team}/");
    let memledger = Memledger::start(&[&crio.flag(), "--docker.socket=", "--podman.socket=", &include]);
    let is_complete = |name: &str| {
        let me = of(&team, "train-0", name);
        memledger.eventually("the start that is told", |metrics| match metrics.ask(START, &me)? {
            TOLD => Ok(()),
            start => Err(format!("{start}")),
        });
    };
    is_complete("other");
    let hanging = of(&team, "train-0", "hangs");
    // each pause between two lists is a second: ten seconds for one answer would show in this
    let lists = crio.server.asked(&list);
    let asked = crio.server.asked(&status);
    crio.runs(&later.id, pod, "later");
    crio.tell(&sandbox);
    is_complete("later");
    eventually_true("six lists", || crio.server.asked(&list) >= lists + 6);
    let more = crio.server.asked(&status) - asked;
    assert!((1..=4).contains(&more), "the new one, and the silent one seldom: asked {more} times");
    let metrics = memledger.fresh_metrics();
    let info = labels(&metrics, INFO, &hanging).unwrap();
    assert_eq!(info["container_id"], hangs.id, "the list names it");
    assert!(
        metrics.value(START, &hanging) > TOLD,
        "and its first process says since when, for nobody else does"
    );
    assert_eq!(metrics.sum(EXITS, &hanging), 0.0, "it runs");
    crio.server.answer_about(&status, &hangs.id, None);
    is_complete("hangs");
    let metrics = memledger.fresh_metrics();
    assert_eq!((metrics.sum(EXITS, &hanging), metrics.sum(RESTARTS, &hanging)), (0.0, 0.0), "the same run");
    assert_eq!(metrics.value(UP, CRI), 1.0);
}

#[test]
fn a_socket_that_nobody_named_and_that_has_no_pods_is_no_runtime_that_is_away() {
    let Some(containerd) = Containerd::start() else { return };
    let tokio = tokio::runtime::Runtime::new().expect("a runtime");
    let docker = std::path::PathBuf::from("/run/docker/containerd/containerd.sock");
    let no_cri = Server::new();
    let settings = |sockets: &[&std::path::Path], is_asked_for| CriSettings {
        sockets: sockets.iter().map(|socket| socket.to_path_buf()).collect(),
        is_asked_for,
        ..CriSettings::default()
    };
    let link = |sockets: &[&std::path::Path], is_asked_for| match tokio
        .block_on(find(&settings(sockets, is_asked_for)))
    {
        Found::Runtime(socket, _) => (Some(socket), Link::Up),
        Found::Nothing { link, .. } => (None, link),
    };
    let ours = containerd.socket();
    assert_eq!(link(&["/no/such.sock".as_ref()], false), (None, Link::NoSocket));
    assert_eq!(link(&["/no/such.sock".as_ref()], true), (None, Link::Down), "named, and not there");
    assert_eq!(link(&[&no_cri.socket], false), (None, Link::NoSocket));
    assert_eq!(link(&[&no_cri.socket], true), (None, Link::Down), "somebody said that it is one");
    assert_eq!(link(&[&ours], false), (None, Link::Idle));
    assert_eq!(link(&[&ours], true), (Some(ours.clone()), Link::Up));
    let team = unique("team");
    let pod = containerd.pod(&Wanted { namespace: &team, name: "first", ..Wanted::default() });
    assert_eq!(link(&[&no_cri.socket, &ours], false), (Some(ours.clone()), Link::Up), "it has pods now");
    if docker.exists() {
        assert_eq!(link(&[&docker, &ours], false).0, Some(ours.clone()), "not Docker's own containerd");
    }

    let flags = ["--docker.socket=", "--podman.socket=", "--cri.endpoint=/no/such.sock"];
    let memledger = Memledger::start(&flags);
    memledger.eventually("the socket is missed", |metrics| match metrics.ask(UP, CRI)? {
        0.0 => Ok(()),
        up => Err(format!("{up}")),
    });
    containerd.remove(&pod.sandbox);
}

#[test]
fn pods_are_shown_beside_docker_s_containers_each_of_them_once() {
    let (Some(containerd), Some(engine)) = (Containerd::start(), Engine::shared()) else { return };
    let team = unique("team");
    let pod =
        containerd.pod(&Wanted { namespace: &team, name: "train-0", qos: "burstable/", ..Wanted::default() });
    let id = containerd.run(&pod, &Spec { name: &team, command: SLEEP, ..Spec::default() });
    let container = engine.run(&team, &[], &["sleep", "1000"]);
    let ids = [&id, &container.id, &pod.sandbox].map(|id| id[..12].to_owned());
    let include = format!("--container.include=^({team}|{})$", ids.join("|"));
    let memledger = Memledger::start(&[&containerd.flag(), &engine.flag(), "--podman.socket=", &include]);
    let metrics = eventually_is(&memledger, &of(&team, "train-0", &team), &id);
    let all: Vec<_> =
        metrics.all(INFO, &[]).iter().map(|(_, labels, _)| labels["container_id"].clone()).collect();
    assert_eq!(all.len(), 2, "{all:?}");
    assert!(all.contains(&id) && all.contains(&container.id), "{all:?}");
    assert_eq!(
        metrics.all(USAGE, &[("container_name", &team)]).len(),
        2,
        "the same name in a pod is another"
    );
}

#[derive(Clone, PartialEq, prost::Message)]
struct Devices {
    #[prost(string, tag = "1")]
    resource: String,
    #[prost(string, repeated, tag = "2")]
    ids: Vec<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Holder {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, repeated, tag = "2")]
    devices: Vec<Devices>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Holders {
    #[prost(string, tag = "1")]
    pod: String,
    #[prost(string, tag = "2")]
    namespace: String,
    #[prost(message, repeated, tag = "3")]
    containers: Vec<Holder>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ListOfResources {
    #[prost(message, repeated, tag = "1")]
    pods: Vec<Holders>,
}

/// No kubelet runs here: its answer is written after its own interface. containerd, the pod and the dlopen are real.
#[test]
fn a_gpu_that_the_kubelet_gave_is_shown_beside_who_uses_it() {
    let Some(containerd) = Containerd::start() else { return };
    let team = unique("team");
    let pod = containerd.pod(&Wanted { namespace: &team, name: "train-0", ..Wanted::default() });
    let id = containerd.run(&pod, &Spec { name: "main", command: SLEEP, ..Spec::default() });
    let folder = tempfile::tempdir().expect("a folder");
    let mut state = State::with_gpus(3);
    for (gpu, minor) in std::iter::zip(&mut state.gpus, [5, 4, 9]) {
        gpu.minor = minor;
    }
    let parts = [(7, "MIG-a"), (8, "MIG-b")].map(|(gi, uuid)| MigDevice {
        gi,
        uuid: uuid.into(),
        ..MigDevice::default()
    });
    state.gpus[2].mig = Some(parts.into());
    let uuids = [&state.gpus[0].uuid, &state.gpus[1].uuid, &state.gpus[2].uuid];
    let library = FakeNvml::install(folder.path(), &state).expect("the fake library is installed");
    let kubelet = Server::new();
    let list = "/v1.PodResourcesLister/List";
    let gives = |id: &str| {
        let devices = vec![
            Devices { resource: "nvidia.com/gpu".into(), ids: vec![id.into()] },
            Devices { resource: "rdma/hca".into(), ids: vec!["mlx5_0".into()] },
        ];
        let containers = vec![Holder { name: "main".into(), devices }];
        let pods = vec![Holders { pod: "train-0".into(), namespace: team.clone(), containers }];
        kubelet.tell(list, &ListOfResources { pods });
    };
    gives(uuids[1]);
    let socket = format!("--kubelet.pod-resources={}", kubelet.socket.display());
    let nvml = format!("--gpu.nvml-library={}", library.path().display());
    let memledger = watch(&containerd, &team, &[&socket, &nvml]);
    let me = of(&team, "train-0", "main");
    eventually_is(&memledger, &me, &id);
    // later the kubelet may have given it another one, and GKE's plugin names the device file
    for (id, uuid, instance) in [
        (uuids[1].as_str(), uuids[1], ""),
        (uuids[0].as_str(), uuids[0], ""),
        ("nvidia4", uuids[1], ""),
        ("nvidia5/vgpu1", uuids[0], ""),
        ("nvidia9/gi7", uuids[2], "7"),
    ] {
        gives(id);
        memledger.eventually("what it was given", |metrics| {
            let given: Vec<_> =
                metrics.all(ALLOCATED, &[]).iter().map(|(_, labels, _)| labels.clone()).collect();
            match &given[..] {
                [labels]
                    if labels["gpu_uuid"] == *uuid
                        && labels.get("gpu_instance_id").map_or("", String::as_str) == instance =>
                {
                    assert_eq!(labels["k8s_pod_name"], "train-0");
                    Ok(())
                }
                other => Err(format!("{other:?}")),
            }
        });
    }
}

#[test]
fn in_a_pod_doctor_speaks_of_the_chart() {
    let doctor = |pod: bool| {
        let mut command = std::process::Command::new(binary());
        command.args(["doctor", "--cri.endpoint=/no/such.sock", "--state.path="]);
        if pod {
            command.env("KUBERNETES_SERVICE_HOST", "10.0.0.1");
        } else {
            command.env_remove("KUBERNETES_SERVICE_HOST");
        }
        String::from_utf8_lossy(&command.output().expect("doctor runs").stdout).into_owned()
    };
    let inside = doctor(true);
    for value in ["runtime.enabled: true", "podResources.enabled: true", "state.hostPath"] {
        assert!(inside.contains(&format!("in the values of the Helm chart: {value}")), "{value}: {inside}");
    }
    let outside = doctor(false);
    assert!(!outside.contains("Helm"), "{outside}");
}
