//! Pods of a real containerd over CRI: their identity over their whole life, and their ends.
//!
//! No kubelet runs: the tests create sandboxes and containers as it does, under the cgroups that it would create.

use std::collections::BTreeSet;

use fake_nvml::{FakeNvml, MigDevice, State};
use jiff::Timestamp;
use memledger::config::CriSettings;
use memledger::discover::ConnectionState;
use memledger::discover::cri::{SocketSearch, find, messages};

use crate::support::cgroups::{TestCgroup, is_v2, new_id, parent, root};
use crate::support::cri::{ContainerSpec, Containerd, PodSpec};
use crate::support::docker::{Engine, assert_no_series_twice, signal, unique};
use crate::support::grpc::{Response, Server};
use crate::support::metrics::Labels;
use crate::support::oom::{EXITS, KILLS, RESTARTS};
use crate::support::processes::ProcessRef;
use crate::support::python::Python;
use crate::support::{Memledger, Metrics, binary, eventually_true, run};

const INFO: &str = "memledger_container_info";
const ALLOCATED: &str = "memledger_container_gpu_allocated";
const POD_INFO: &str = "memledger_container_pod_info";
const RUN_INFO: &str = "memledger_container_run_info";
const REQUEST: &str = "memledger_container_memory_request_bytes";
const USAGE: &str = "memledger_container_memory_usage_bytes";
const UP: &str = "memledger_runtime_up";
const CRI: &[(&str, &str)] = &[("runtime", "cri")];
const SLEEP: &[&str] = &["/busybox/busybox", "sleep", "100000"];

/// Starts memledger for the pods of one containerd only.
fn start_memledger(containerd: &Containerd, namespace: &str, more: &[&str]) -> Memledger {
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

/// Waits until the container of an identity has this id.
fn eventually_is(memledger: &Memledger, me: &[(&str, &str)], id: &str) -> Metrics {
    memledger.eventually("the container", |metrics| {
        metrics.try_value(USAGE, me)?;
        let info = labels(metrics, INFO, me)?;
        if info["container_id"] == id { Ok(metrics.clone()) } else { Err(format!("{info:?}")) }
    })
}

/// Like [`eventually_is`], once the runtime has also reported the container's status, which has this setting: on a busy machine a
/// container is shown before, with the data of the list only.
fn eventually_is_complete(memledger: &Memledger, me: &[(&str, &str)], id: &str, setting: &str) -> Metrics {
    memledger.eventually("its status", |metrics| {
        metrics.try_value(USAGE, me)?;
        let (info, run) = (labels(metrics, INFO, me)?, labels(metrics, RUN_INFO, me)?);
        let is_complete = info["container_id"] == id && run.contains_key(setting);
        if is_complete { Ok(metrics.clone()) } else { Err(format!("{info:?} {run:?}")) }
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
fn shows_pods_without_their_pause_processes() {
    let Some(containerd) = Containerd::start() else { return };
    let team = unique("team");
    let pod = containerd.pod(&PodSpec {
        namespace: &team,
        name: "train-0",
        qos: "burstable/",
        labels: &[
            ("app.kubernetes.io/name", "train"),
            ("secret", "s3cr3t"),
            ("batch.kubernetes.io/job-name", "sweep-7"),
            ("memledger.run.optimizer", "adamw"),
        ],
        annotations: &[("team/owner", "speech"), ("token", "s3cr3t"), ("kubernetes.io/config.source", "api")],
    });
    let env = [("BATCH_SIZE", "32"), ("HF_TOKEN", "s3cr3t")];
    let main = ContainerSpec {
        name: "main",
        command: SLEEP,
        env: &env,
        limit: 64 << 20,
        ..ContainerSpec::default()
    };
    let id = containerd.run(&pod, &main);
    let sidecar =
        containerd.run(&pod, &ContainerSpec { name: "log", command: SLEEP, ..ContainerSpec::default() });
    let flags = [
        "--cri.pod-labels=app.kubernetes.io/name,absent",
        "--cri.pod-annotations=team/owner",
        "--container.owner-labels=absent,app.kubernetes.io/name",
    ];
    let memledger = start_memledger(&containerd, &team, &flags);
    let me = of(&team, "train-0", "main");
    let metrics = eventually_is_complete(&memledger, &me, &id, "batch_size");
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
    let owner = &labels(&metrics, "memledger_container_owner_info", &me).unwrap()["owner"];
    assert_eq!(owner, "train", "the first one of the pod's labels that is set");
    let run = labels(&metrics, RUN_INFO, &me).unwrap();
    assert_eq!((&*run["batch_size"], &*run["optimizer"]), ("32", "adamw"));
    assert_eq!(run["settings"], "batch_size=32 optimizer=adamw");
    assert_eq!(run["group"], format!("{team}/sweep-7/main"), "by the Job that made the pod");
    assert_eq!(metrics.value("memledger_container_memory_limit_bytes", &me), f64::from(64 << 20));
    assert_eq!(metrics.get(REQUEST, &me), None, "the request of a burstable pod is unknown on the node");

    let pod = containerd.pod(&PodSpec {
        namespace: &team,
        name: "etcd-node1",
        annotations: &[("kubernetes.io/config.source", "file")],
        ..PodSpec::default()
    });
    let id = containerd.run(&pod, &ContainerSpec { name: "etcd", ..main });
    let me = of(&team, "etcd-node1", "etcd");
    let metrics = eventually_is_complete(&memledger, &me, &id, "batch_size");
    let info = labels(&metrics, POD_INFO, &me).unwrap();
    assert_eq!((&*info["qos_class"], &*info["pod_source"]), ("guaranteed", "file"), "a static pod");
    assert_eq!(labels(&metrics, RUN_INFO, &me).unwrap()["group"], format!("{team}/etcd-node1/etcd"));
    assert_eq!(metrics.value(REQUEST, &me), f64::from(64 << 20));
    assert_eq!(metrics.value("memledger_containers", CRI), 3.0, "pause processes are not containers");
    assert_no_series_twice(&metrics);
    for path in ["/metrics", "/api/v1/containers"] {
        assert!(!memledger.get(path).1.contains("s3cr3t"), "{path}");
    }
}

/// Two pods of a Job: their containers have the same name, and their batches differ. One of another team has that name, too.
#[test]
fn verbs_group_the_pods_of_a_job() {
    let Some(containerd) = Containerd::start() else { return };
    let team = unique("team");
    let folder = tempfile::tempdir().unwrap();
    let state = format!("--state.path={}", folder.path().display());
    let memledger =
        start_memledger(&containerd, &team, &[&state, "--local.socket=", "--sample.interval=250ms"]);
    for (pod, job, batch) in
        [("train-0", "sweep-7", "32"), ("train-1", "sweep-7", "64"), ("train-2", "other", "8")]
    {
        let labels = [("batch.kubernetes.io/job-name", job)];
        let pod_of_job =
            containerd.pod(&PodSpec { namespace: &team, name: pod, labels: &labels, ..PodSpec::default() });
        let env = [("BATCH_SIZE", batch), ("NUM_WORKERS", "0")];
        let eats: &[&str] = &["/hog", "eat=24", "hold"];
        let spec = ContainerSpec {
            name: "main",
            command: eats,
            env: &env,
            limit: 64 << 20,
            ..ContainerSpec::default()
        };
        let id = containerd.run(&pod_of_job, &spec);
        let me = of(&team, pod, "main");
        eventually_is_complete(&memledger, &me, &id, "batch_size");
        containerd.stop_container(&id, 0); // the runtime reports no reason
        eventually_counts(&memledger, EXITS, &me, ("reason", "killed"), 1.0);
    }
    let verb = |words: &[&str]| {
        let (code, out, err) = run(&[words, &[&state, "--local.socket="]].concat());
        (code, out + &err)
    };
    let group = format!("{team}/sweep-7/main");
    let (code, runs) = verb(&["runs", &group]);
    assert!(code == Some(0) && runs.lines().count() == 3, "{runs}");
    assert!(
        runs.contains("POD/CONTAINER") && runs.contains("train-0/main") && runs.contains("train-1/main"),
        "{runs}"
    );
    assert!(runs.lines().all(|line| line.chars().count() <= 100), "{runs}");
    let (code, compared) = verb(&["compare", &group]);
    assert!(code == Some(0), "{compared}");
    let line =
        |what: &str| compared.lines().find(|line| line.starts_with(what)).unwrap_or_default().to_owned();
    assert_eq!(line("pod ").split_whitespace().collect::<Vec<_>>(), ["pod", "train-0", "train-1"]);
    assert_eq!(line("batch_size").split_whitespace().collect::<Vec<_>>(), ["batch_size", "32", "64"]);
    let (code, advice) = verb(&["advise", &group]);
    assert!(code == Some(0) && advice.starts_with(&group), "{advice}");
    let (code, advice) = verb(&["advise", "train-1/main"]);
    assert!(code == Some(0) && advice.starts_with(&group), "a pod of it: {advice}");
    let (code, error) = verb(&["report", "main"]);
    assert!(code == Some(3) && error.contains("is the name of containers of 2 groups"), "{error}");
}

#[test]
fn killed_container_and_re_created_pod_keep_their_identity() {
    let Some(containerd) = Containerd::start() else { return };
    let team = unique("team");
    let wanted = PodSpec { namespace: &team, name: "train-0", qos: "burstable/", ..PodSpec::default() };
    let pod = containerd.pod(&wanted);
    let memledger = start_memledger(&containerd, &team, &[]);
    let me = of(&team, "train-0", "main");
    let init =
        containerd.run(&pod, &ContainerSpec { name: "init", command: &["true"], ..ContainerSpec::default() });
    eventually_counts(&memledger, EXITS, &of(&team, "train-0", "init"), ("reason", "completed"), 1.0);
    let eats = ContainerSpec {
        name: "main",
        command: &["/hog", "eat"],
        limit: 32 << 20,
        ..ContainerSpec::default()
    };
    let first = containerd.run(&pod, &eats);
    eventually_counts(&memledger, EXITS, &me, ("reason", "oom_container"), 1.0);
    eventually_counts(&memledger, KILLS, &me, ("victim", "main"), 1.0);
    assert_eq!(memledger.metrics().value("memledger_container_last_exit_code", &me), 137.0);

    let second = containerd.run(&pod, &ContainerSpec { attempt: 1, command: SLEEP, ..eats });
    containerd.remove_container(&first);
    let metrics = eventually_is(&memledger, &me, &second);
    assert_eq!(labels(&metrics, POD_INFO, &me).unwrap()["attempt"], "1");
    assert_eq!(metrics.sum(KILLS, &me), 1.0, "the count continues");
    eventually_counts(&memledger, RESTARTS, &me, ("container_name", "main"), 1.0);
    containerd.stop_container(&second, 0);
    eventually_counts(&memledger, EXITS, &me, ("reason", "killed"), 1.0);
    containerd.remove(&pod.sandbox);

    let re_created = containerd.pod(&wanted);
    let third = containerd.run(&re_created, &ContainerSpec { command: SLEEP, ..eats });
    let metrics = eventually_is(&memledger, &me, &third);
    let info = labels(&metrics, POD_INFO, &me).unwrap();
    assert_eq!((&*info["k8s_pod_uid"], &*info["attempt"]), (&*re_created.uid, "0"));
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
fn kill_by_pod_limit_counts_for_the_container_of_the_victim() {
    let Some(containerd) = Containerd::start() else { return };
    let team = unique("team");
    let pod =
        containerd.pod(&PodSpec { namespace: &team, name: "pair", qos: "burstable/", ..PodSpec::default() });
    let file = if is_v2() { "memory.max" } else { "memory.limit_in_bytes" };
    std::fs::write(root().join(&pod.cgroup).join(file), (64 << 20).to_string()).expect("the pod's limit");
    let memledger = start_memledger(&containerd, &team, &[]);
    let sibling =
        ContainerSpec { name: "sibling", command: &["/hog", "eat=8", "hold"], ..ContainerSpec::default() };
    containerd.run(&pod, &sibling);
    let (sibling, eats) = (of(&team, "pair", "sibling"), of(&team, "pair", "eats"));
    memledger.eventually("the container that allocates 8 MiB", |metrics| metrics.try_value(USAGE, &sibling));
    containerd
        .run(&pod, &ContainerSpec { name: "eats", command: &["/hog", "eat"], ..ContainerSpec::default() });
    eventually_counts(&memledger, EXITS, &eats, ("reason", "oom_container"), 1.0);
    eventually_counts(&memledger, KILLS, &eats, ("scope", "container"), 1.0);
    let metrics = memledger.fresh_metrics();
    assert_eq!(metrics.sum(KILLS, &sibling), 0.0);
    let limit = metrics.value("memledger_container_memory_effective_limit_bytes", &sibling);
    assert_eq!(limit, f64::from(64 << 20), "the pod's");
    assert_eq!(metrics.get("memledger_container_memory_limit_bytes", &sibling), None);
}

#[test]
fn keeps_names_while_containerd_is_down_and_reports_ends_after() {
    let Some(mut containerd) = Containerd::start() else { return };
    let team = unique("team");
    let pod =
        containerd.pod(&PodSpec { namespace: &team, name: "job", qos: "besteffort/", ..PodSpec::default() });
    let waits = ["sh", "-c", "trap 'exit 7' TERM; while :; do sleep 0.1; done"];
    let ends =
        containerd.run(&pod, &ContainerSpec { name: "ends", command: &waits, ..ContainerSpec::default() });
    let stays =
        containerd.run(&pod, &ContainerSpec { name: "stays", command: SLEEP, ..ContainerSpec::default() });
    let memledger = start_memledger(&containerd, &team, &[]);
    let (end, stay) = (of(&team, "job", "ends"), of(&team, "job", "stays"));
    eventually_is(&memledger, &end, &ends);
    eventually_is(&memledger, &stay, &stays);
    containerd.stop();
    memledger.eventually("it is down", |metrics| match metrics.try_value(UP, CRI)? {
        0.0 => Ok(()),
        up => Err(format!("{up}")),
    });
    let cgroup = root().join(&pod.cgroup).join(&ends);
    let first = ProcessRef::first_of_container(&cgroup).expect("its first process");
    signal("TERM", first.pid);
    eventually_true("its end", || first.has_ended());
    let metrics = memledger.fresh_metrics();
    assert_eq!(labels(&metrics, INFO, &stay).unwrap()["container_id"], stays, "names are kept");
    containerd.launch();
    memledger.eventually("it is up", |metrics| match metrics.try_value(UP, CRI)? {
        1.0 => Ok(()),
        up => Err(format!("{up}")),
    });
    eventually_counts(&memledger, EXITS, &end, ("reason", "error"), 1.0);
    let metrics = memledger.fresh_metrics();
    // containerd reports 255 until it has queried the container's shim, and permanently if the shim has ended by then
    let exit_code = metrics.value("memledger_container_last_exit_code", &end);
    assert!([7.0, 255.0].contains(&exit_code), "{exit_code}");
    assert_eq!(metrics.sum(EXITS, &stay), 0.0);
    assert_eq!(metrics.sum(RESTARTS, &stay), 0.0, "the same run");
}

/// Imitates CRI-O, which is not available here, by responses that follow its documentation: names of cgroups, `info`, the name
/// of the image. The processes and their cgroups are real.
struct CriO {
    server: Server,
    containers: Vec<messages::Container>,
}

impl CriO {
    fn new() -> Self {
        let server = Server::new();
        let version =
            messages::VersionResponse { runtime_name: "cri-o".into(), runtime_version: "1.31.2".into() };
        server.respond_with(&method("Version"), &version);
        let this = Self { server, containers: vec![] };
        this.set_lists(&[]);
        this
    }

    fn flag(&self) -> String {
        format!("--cri.endpoint={}", self.server.socket.display())
    }

    fn set_lists(&self, sandboxes: &[messages::PodSandbox]) {
        let list = messages::ListContainersResponse { containers: self.containers.clone() };
        self.server.respond_with(&method("ListContainers"), &list);
        let items = sandboxes.to_vec();
        self.server.respond_with(&method("ListPodSandbox"), &messages::ListPodSandboxResponse { items });
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

    fn add_running(&mut self, id: &str, sandbox: &str, name: &str) {
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
        self.server.respond_with(
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
    let top = format!("{}/kubepods.slice/kubepods-besteffort.slice", parent());
    TestCgroup::at(&format!("{top}/kubepods-besteffort-pod{pod}.slice/crio-{id}.scope"), &id)
}

#[test]
fn reads_responses_of_cri_o_and_lists_on_events() {
    let team = unique("team");
    let mut crio = CriO::new();
    crio.server.set_response(&method("GetContainerEvents"), Response::Stream);
    let pause = crio_cgroup(&team);
    let cgroup = crio_cgroup(&team);
    let _processes = [&pause, &cgroup]
        .map(|cgroup| Python::start(cgroup, "import signal; print('ready'); signal.pause()"));
    let sandbox = CriO::sandbox(&pause.id, &team, "train-0");
    crio.set_lists(std::slice::from_ref(&sandbox));
    let flags = [
        &crio.flag(),
        "--docker.socket=",
        "--podman.socket=",
        &format!("--container.include=^{team}/|{}", pause.name()),
    ];
    let memledger = Memledger::start(&flags);
    let list = method("ListContainers");
    eventually_true("the first pause is over, and events are sent", || {
        crio.server.call_count(&list) >= 2 && crio.server.call_count(&method("GetContainerEvents")) >= 1
    });
    crio.add_running(&cgroup.id, &pause.id, "main");
    crio.set_lists(&[sandbox]);
    let (lists, began) = (crio.server.call_count(&list), Timestamp::now());
    crio.server.send_event();
    let me = of(&team, "train-0", "main");
    let metrics = eventually_is_complete(&memledger, &me, &cgroup.id, "num_workers");
    assert_eq!(labels(&metrics, INFO, &me).unwrap()["image"], "registry.example/train:1");
    let info = labels(&metrics, POD_INFO, &me).unwrap();
    assert_eq!((&*info["attempt"], &*info["qos_class"]), ("3", "besteffort"));
    assert_eq!(labels(&metrics, RUN_INFO, &me).unwrap()["num_workers"], "4");
    assert_eq!(metrics.value(REQUEST, &me), 1048576.0, "memory.min");
    assert_eq!(metrics.value("memledger_container_start_time_seconds", &me), 1_700_000_001.0);
    assert!(
        metrics.all(INFO, &[("container_name", pause.name())]).is_empty(),
        "a sandbox is not a container"
    );
    for _ in 0..25 {
        memledger.fresh_metrics(); // five seconds in all, more on a busy machine
    }
    // of the event, of the start of the stream, and every ten seconds, which may have passed just then: a list every second would
    // exceed it
    let took = Timestamp::now().duration_since(began).as_secs_f64();
    let more = crio.server.call_count(&list) - lists;
    assert!((more as f64) <= 3.0 + took / 10.0, "{more} lists in {took} s");
}

#[test]
fn hanging_status_does_not_delay_others_and_is_completed_later() {
    const START: &str = "memledger_container_start_time_seconds";
    const REPORTED: f64 = 1_700_000_001.0;
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
    crio.server.set_response_for(&status, &hangs.id, Some(Response::Never));
    crio.add_running(&hangs.id, pod, "hangs");
    crio.add_running(&other.id, pod, "other");
    crio.set_lists(&sandbox);
    let include = format!("--container.include=^{team}/");
    let memledger = Memledger::start(&[&crio.flag(), "--docker.socket=", "--podman.socket=", &include]);
    let eventually_complete = |name: &str| {
        let me = of(&team, "train-0", name);
        memledger.eventually("the start time", |metrics| match metrics.try_value(START, &me)? {
            REPORTED => Ok(()),
            start => Err(format!("{start}")),
        });
    };
    eventually_complete("other");
    let hanging = of(&team, "train-0", "hangs");
    // the list interval is a second: waiting ten seconds for one response would delay the lists
    let lists = crio.server.call_count(&list);
    let queries = crio.server.call_count(&status);
    crio.add_running(&later.id, pod, "later");
    crio.set_lists(&sandbox);
    eventually_complete("later");
    eventually_true("six lists", || crio.server.call_count(&list) >= lists + 6);
    let more = crio.server.call_count(&status) - queries;
    assert!((1..=4).contains(&more), "the new one, and few retries of the hanging one: {more} queries");
    let metrics = memledger.fresh_metrics();
    let info = labels(&metrics, INFO, &hanging).unwrap();
    assert_eq!(info["container_id"], hangs.id, "the list names it");
    assert!(metrics.value(START, &hanging) > REPORTED, "the start is that of its first process");
    assert_eq!(metrics.sum(EXITS, &hanging), 0.0, "it runs");
    crio.server.set_response_for(&status, &hangs.id, None);
    eventually_complete("hangs");
    let metrics = memledger.fresh_metrics();
    assert_eq!((metrics.sum(EXITS, &hanging), metrics.sum(RESTARTS, &hanging)), (0.0, 0.0), "the same run");
    assert_eq!(metrics.value(UP, CRI), 1.0);
}

#[test]
fn default_socket_without_pods_is_not_down() {
    let Some(containerd) = Containerd::start() else { return };
    let tokio = tokio::runtime::Runtime::new().expect("a runtime");
    let docker = std::path::PathBuf::from("/run/docker/containerd/containerd.sock");
    let no_cri = Server::new();
    let settings = |sockets: &[&std::path::Path], is_explicit| CriSettings {
        sockets: sockets.iter().map(|socket| socket.to_path_buf()).collect(),
        is_explicit,
        ..CriSettings::default()
    };
    let search = |sockets: &[&std::path::Path], is_explicit| match tokio
        .block_on(find(&settings(sockets, is_explicit)))
    {
        SocketSearch::Runtime(socket, _) => (Some(socket), ConnectionState::Up),
        SocketSearch::Nothing { connection, .. } => (None, connection),
    };
    let ours = containerd.socket();
    assert_eq!(search(&["/no/such.sock".as_ref()], false), (None, ConnectionState::NoSocket));
    assert_eq!(
        search(&["/no/such.sock".as_ref()], true),
        (None, ConnectionState::Down),
        "configured, and missing"
    );
    assert_eq!(search(&[&no_cri.socket], false), (None, ConnectionState::NoSocket));
    assert_eq!(search(&[&no_cri.socket], true), (None, ConnectionState::Down), "configured as a CRI runtime");
    assert_eq!(search(&[&ours], false), (None, ConnectionState::Idle));
    assert_eq!(search(&[&ours], true), (Some(ours.clone()), ConnectionState::Up));
    let team = unique("team");
    let pod = containerd.pod(&PodSpec { namespace: &team, name: "first", ..PodSpec::default() });
    assert_eq!(
        search(&[&no_cri.socket, &ours], false),
        (Some(ours.clone()), ConnectionState::Up),
        "it has pods now"
    );
    if docker.exists() {
        assert_eq!(search(&[&docker, &ours], false).0, Some(ours.clone()), "not Docker's own containerd");
    }

    let flags = ["--docker.socket=", "--podman.socket=", "--cri.endpoint=/no/such.sock"];
    let memledger = Memledger::start(&flags);
    memledger.eventually("the missing socket is down", |metrics| match metrics.try_value(UP, CRI)? {
        0.0 => Ok(()),
        up => Err(format!("{up}")),
    });
    containerd.remove(&pod.sandbox);
}

#[test]
fn shows_pods_and_docker_containers_once_each() {
    let (Some(containerd), Some(engine)) = (Containerd::start(), Engine::shared()) else { return };
    let team = unique("team");
    let pod = containerd.pod(&PodSpec {
        namespace: &team,
        name: "train-0",
        qos: "burstable/",
        ..PodSpec::default()
    });
    let id = containerd.run(&pod, &ContainerSpec { name: &team, command: SLEEP, ..ContainerSpec::default() });
    let container = engine.run(&team, &[], &["sleep", "1000"]);
    let ids = [&id, &container.id, &pod.sandbox].map(|id| id[..12].to_owned());
    let include = format!("--container.include=^({team}|{})$", ids.join("|"));
    let memledger = Memledger::start(&[&containerd.flag(), &engine.flag(), "--podman.socket=", &include]);
    // one runtime may list its containers before the other
    let (metrics, all) = memledger.eventually("both", |metrics| {
        let all = metrics.all(INFO, &[]).into_iter().map(|(_, labels, _)| labels["container_id"].clone());
        let all: Vec<_> = all.collect();
        let both = all.contains(&id) && all.contains(&container.id);
        if both { Ok((metrics.clone(), all)) } else { Err(format!("{all:?}")) }
    });
    assert_eq!(all.len(), 2, "{all:?}");
    assert_eq!(
        metrics.all(USAGE, &[("container_name", &team)]).len(),
        2,
        "the same name in a pod is another identity"
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
struct ContainerDevices {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, repeated, tag = "2")]
    devices: Vec<Devices>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PodDevices {
    #[prost(string, tag = "1")]
    pod: String,
    #[prost(string, tag = "2")]
    namespace: String,
    #[prost(message, repeated, tag = "3")]
    containers: Vec<ContainerDevices>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct DeviceList {
    #[prost(message, repeated, tag = "1")]
    pods: Vec<PodDevices>,
}

/// No kubelet runs here: its responses are written by the test. containerd, the pod and the dlopen are real.
#[test]
fn shows_gpus_allocated_by_the_kubelet() {
    let Some(containerd) = Containerd::start() else { return };
    let team = unique("team");
    let pod = containerd.pod(&PodSpec { namespace: &team, name: "train-0", ..PodSpec::default() });
    let id =
        containerd.run(&pod, &ContainerSpec { name: "main", command: SLEEP, ..ContainerSpec::default() });
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
    let allocates = |pods: &[(&str, &str)]| {
        let pod = |(pod, id): &(&str, &str)| {
            let devices = vec![
                Devices { resource: "nvidia.com/gpu".into(), ids: vec![(*id).into()] },
                Devices { resource: "rdma/hca".into(), ids: vec!["mlx5_0".into()] },
            ];
            let containers = vec![ContainerDevices { name: "main".into(), devices }];
            PodDevices { pod: (*pod).into(), namespace: team.clone(), containers }
        };
        kubelet.respond_with(list, &DeviceList { pods: pods.iter().map(pod).collect() });
    };
    allocates(&[("train-0", uuids[1])]);
    let socket = format!("--kubelet.pod-resources={}", kubelet.socket.display());
    let nvml = format!("--gpu.nvml-library={}", library.path().display());
    let memledger = start_memledger(&containerd, &team, &[&socket, &nvml]);
    let me = of(&team, "train-0", "main");
    eventually_is(&memledger, &me, &id);
    // the allocation may change later, and GKE's plugin names device files
    for (id, uuid, instance) in [
        (uuids[1].as_str(), uuids[1], ""),
        (uuids[0].as_str(), uuids[0], ""),
        ("nvidia4", uuids[1], ""),
        ("nvidia5/vgpu1", uuids[0], ""),
        ("nvidia9/gi7", uuids[2], "7"),
    ] {
        allocates(&[("train-0", id)]);
        memledger.eventually("its allocation", |metrics| {
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
    let shown = |metrics: &Metrics| {
        let pair = |labels: &Labels| [labels["k8s_pod_name"].clone(), labels["gpu_uuid"].clone()];
        metrics.all(ALLOCATED, &[]).iter().map(|(_, labels, _)| pair(labels)).collect::<BTreeSet<_>>()
    };
    let has = |wanted: &[[&str; 2]]| {
        let wanted: BTreeSet<_> = wanted.iter().map(|pair| pair.map(str::to_owned)).collect();
        memledger.eventually("these allocations", |metrics| match shown(metrics) {
            found if found == wanted => Ok(()),
            found => Err(format!("{found:?}")),
        });
    };
    // a pod of which nothing runs
    allocates(&[("train-0", uuids[1]), ("pull", uuids[0])]);
    let both = [["train-0", uuids[1]], ["pull", uuids[0]]];
    has(&both);
    // a kubelet that knows no pod yet
    allocates(&[]);
    let calls = kubelet.call_count(list);
    eventually_true("two more responses", || kubelet.call_count(list) > calls + 1);
    has(&both);
    // HAMi's name, from which nobody knows the GPU
    let name = format!("{}-1", uuids[1]);
    allocates(&[("train-0", &name)]);
    has(&[]);
    memledger.eventually("the name", |metrics| {
        let of = [("k8s_pod_name", "train-0"), ("resource", "nvidia.com/gpu"), ("device", name.as_str())];
        metrics.try_value("memledger_container_gpu_unmatched", &of)
    });
}

/// Containers have no names then, and no uid distinguishes a pod from its predecessor.
#[test]
fn nothing_is_allocated_while_the_runtime_is_unreachable() {
    let folder = tempfile::tempdir().expect("a folder");
    let state = State::with_gpus(1);
    let library = FakeNvml::install(folder.path(), &state).expect("the fake library is installed");
    let runtime = folder.path().join("cri.sock");
    drop(std::os::unix::net::UnixListener::bind(&runtime).expect("a socket without a server"));
    let kubelet = Server::new();
    let devices = vec![Devices { resource: "nvidia.com/gpu".into(), ids: vec![state.gpus[0].uuid.clone()] }];
    let containers = vec![ContainerDevices { name: "main".into(), devices }];
    let pods = vec![PodDevices { pod: "train-0".into(), namespace: "ml".into(), containers }];
    kubelet.respond_with("/v1.PodResourcesLister/List", &DeviceList { pods });
    let memledger = Memledger::start(&[
        &format!("--cri.endpoint={}", runtime.display()),
        &format!("--kubelet.pod-resources={}", kubelet.socket.display()),
        &format!("--gpu.nvml-library={}", library.path().display()),
        "--docker.socket=",
        "--podman.socket=",
    ]);
    let began = memledger.metrics().value("memledger_snapshot_timestamp_seconds", &[]);
    memledger.eventually("two seconds more", |metrics| {
        let now = metrics.value("memledger_snapshot_timestamp_seconds", &[]);
        if now > began + 2.0 { Ok(()) } else { Err(format!("{} s", now - began)) }
    });
    let metrics = memledger.metrics();
    assert_eq!(metrics.all(ALLOCATED, &[]).len(), 0);
    assert_eq!(metrics.value(UP, CRI), 0.0);
    assert!(metrics.value("memledger_gpu_memory_total_bytes", &[]) > 0.0);
}

#[test]
fn doctor_in_a_pod_names_values_of_the_chart() {
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

#[test]
fn errors_in_the_log_of_a_pod_are_counted_also_after_its_rotation() {
    let Some(containerd) = Containerd::start() else { return };
    let team = unique("team");
    let logs = format!("--cri.pod-logs={}", containerd.logs());
    let memledger = start_memledger(&containerd, &team, &["--container.logs=all", &logs]);
    let wanted = PodSpec { namespace: &team, name: "train-0", qos: "", labels: &[], annotations: &[] };
    let pod = containerd.pod(&wanted);
    let me = of(&team, "train-0", "main");
    let text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has less";
    let script =
        format!("trap \"echo '{text}' >&2; exit 1\" TERM; echo '{text}'; while :; do sleep 0.1; done");
    let command = ["sh", "-c", &script];
    let main = ContainerSpec { name: "main", command: &command, ..ContainerSpec::default() };
    let id = containerd.run(&pod, &main);
    let ooms = "memledger_container_cuda_ooms_total";
    memledger.eventually("the first error", |metrics| match metrics.sum(ooms, &me) {
        1.0 => Ok(()),
        count => Err(format!("{count} {}", memledger.log())),
    });
    containerd.rotate_log(&pod, &main, &id);
    let cgroup = root().join(&pod.cgroup).join(&id);
    signal("TERM", ProcessRef::first_of_container(&cgroup).expect("its first process").pid);
    eventually_counts(&memledger, ooms, &me, ("source", "log"), 2.0);
    eventually_counts(&memledger, EXITS, &me, ("reason", "cuda_oom"), 1.0);
}
