//! Where the memory of a container of the newest Docker runs out: at a limit above it, inside it, or nowhere at all.

use super::reasons::kill_of;
use super::{KILLS, docker_host};
use crate::support::cgroups::is_v2;
use crate::support::docker::{info, of};
use crate::support::eventually;
use crate::support::oom::{CgroupParent, limit};

#[test]
fn limit_above_or_inside_a_container_is_named() {
    let parent = CgroupParent::new("engines");
    let Some((private, mut host, name)) = docker_host("places", &[]) else { return };
    let eat = ["tail", "/dev/zero"];
    let start = |what: &str, flags: &[&str], command: &[&str]| {
        private.engine.run(&format!("{name}-{what}"), flags, command)
    };
    // the engine says OOMKilled of both, but the kernel kills the larger one alone
    let quiet = start("quiet", &[&parent.flag], &["sleep", "1000"]);
    host.knows(&quiet.name);
    limit(&parent.folder, 64 << 20);
    let below = start("below", &[&parent.flag], &eat);
    let of_host = start("pid-host", &["--pid=host", "-m", "40m"], &eat);
    for container in [&below, &of_host] {
        host.ended(&container.name, 1.0, "oom_container");
    }
    let above = format!("/{} above it", parent.folder.file_name().expect("a name").display());
    host.explains(&below.name, &["OUT OF MEMORY at the limit of a cgroup above it", &above]);
    host.explains(&of_host.name, &["OUT OF MEMORY at its own limit"]);
    assert_eq!(kill_of(&host, &below.name)["limit_bytes"], 64 << 20);
    assert_eq!(host.memledger().fresh_metrics().sum(KILLS, &of(&quiet.name)), 0.0, "the neighbour");
    host.explains(&quiet.name, &["NO KILL OR EXIT KNOWN"]);
    if !is_v2() {
        let inside = "cd /sys/fs/cgroup/memory && mkdir in && echo 20M > in/memory.limit_in_bytes && \
                      echo $$ > in/cgroup.procs && exec tail /dev/zero";
        let inside = start("inside", &["--privileged"], &["sh", "-c", inside]);
        host.ended(&inside.name, 1.0, "oom_container");
        host.explains(&inside.name, &["the cgroup /in inside it"]);
    }
    host.finish(&private.engine);
}

/// cgroup v2 has no such switch.
#[test]
fn container_that_waits_for_memory_is_not_killed() {
    if is_v2() {
        return;
    }
    let Some((private, mut host, name)) = docker_host("waits", &[]) else { return };
    let flags = ["-m", "40m", "--oom-kill-disable"];
    // by page faults: a system call that needs memory fails instead of waiting
    let script = "a=x; while :; do a=$a$a; done";
    let container = private.engine.run(&name, &flags, &["sh", "-c", script]);
    host.explains(&name, &["AT ITS MEMORY LIMIT: its processes wait"]);
    eventually("the engine says otherwise", || match &*container.inspect("{{.State.OOMKilled}}") {
        "true" => Ok(()),
        other => Err(other.to_owned()),
    });
    assert_eq!(host.memledger().fresh_metrics().sum(KILLS, &of(&name)), 0.0);
    // the kernel lets one that is to be killed have memory
    container.docker(&["kill"]);
    host.ended(&name, 1.0, "stopped");
    host.finish(&private.engine);
}

#[test]
fn images_are_shown_as_they_were_named_at_the_start() {
    let Some((private, mut host, name)) = docker_host("images", &[]) else { return };
    let engine = &private.engine;
    let id = engine.docker(&["image", "inspect", "-f", "{{.Id}}", &engine.image]);
    let (moved, plain) = (format!("{name}:1"), engine.image.clone());
    engine.docker(&["tag", &plain, &moved]);
    let of_image = |what: &str, image: &str| {
        let engine = crate::support::docker::Engine { image: image.to_owned(), ..engine.clone() };
        engine.run(&format!("{name}-{what}"), &[], &["sleep", "1000"])
    };
    let containers = [of_image("name", &plain), of_image("moved", &moved), of_image("id", &id)];
    // the tag is another image's now
    let archive = engine.docker(&["commit", &containers[0].id, &moved]);
    assert_ne!(archive, id);
    for (container, image) in std::iter::zip(&containers, [&plain, &moved, &id]) {
        host.memledger().eventually("its image", |metrics| {
            let labels = info(metrics, super::INFO, &container.name)?;
            if labels["image"] == **image { Ok(()) } else { Err(format!("{labels:?}")) }
        });
    }
    host.finish(engine);
}
