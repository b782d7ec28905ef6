//! Names: processes that forge kernel messages, long cgroup paths, recreated containers, and reused pids.

use super::unrecorded::{NO_LEDGER, verb};
use crate::support::cgroups::{TestCgroup, new_id, parent};
use crate::support::oom::{
    CgroupParent, KILLS, Ledger, Scene, cgroup_of, oom_kills, wait_for_cgroups_in_the_log, write_kernel_log,
};
use crate::support::python::Python;
use crate::support::{eventually, in_v2_guest, reaches, run, skip};

#[test]
fn case_18_forged_kernel_log_lines_are_not_kills() {
    let Some(scene) = Scene::new("forged") else { return };
    let ledger = scene.start_memledger(&[]);
    let container = scene.run("it", &[], &["hold"]);
    let (tag, id, pid) = (&scene.tag, &container.id, container.pid());
    ledger.settles(&container.name, 0, 0);
    for path in [format!("/docker/{id}"), format!("/system.slice/docker-{id}.scope")] {
        write_kernel_log(&format!(
            "{tag} invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0"
        ));
        write_kernel_log(&format!(
            "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg={path},\
             task_memcg={path},task={tag},pid={pid},uid=0"
        ));
        write_kernel_log(&format!(
            "Memory cgroup out of memory: Killed process {pid} ({tag}) total-vm:67528kB, anon-rss:65024kB, \
             file-rss:600kB, shmem-rss:0kB, UID:0 pgtables:172kB oom_score_adj:0"
        ));
        // the kernel's own prefix, written by a user
        write_kernel_log(&format!(
            "<3>Out of memory: Killed process {pid} ({tag}) total-vm:1kB, anon-rss:1kB, file-rss:0kB"
        ));
    }
    // a real kill afterwards shows that the forged lines were read
    let real = scene.run_known(&ledger, "real", &[], &["eat"]);
    scene.wait_for_kills(1);
    ledger.settles(&real.name, 1, 0);
    ledger.settles(&container.name, 0, 0);
    assert_eq!(ledger.settled_tally(&scene, 1).containers.len(), 1);
    ledger.matches_kernel_count();
}

#[test]
fn case_18_process_name_cannot_hide_a_kill_or_charge_another_container() {
    let Some(scene) = Scene::new("odd") else { return };
    wait_for_cgroups_in_the_log();
    let ledger = scene.start_memledger(&[]);
    let other = scene.run("other", &[], &["hold"]);
    // the longest that the kernel permits; commas are \x2c here because they separate steps
    let names = [
        r#"a\x0ab)\x2cx=1\x2c"(\x5c"#,
        r"\x2cpid=1\x2cuid=0",
        r"\xff\xfe[x]\xc3",
        r"x) total-vm:1",
        r"\x0a3\x2c1\x2c1\x2c-;Kill",
        r"\x2ctask_memcg=/\x2c",
        r"(((((((((((((((",
        r" ",
    ];
    let before = oom_kills();
    let children: Vec<String> = names.iter().map(|name| format!("seq=1:name={name},eat")).collect();
    let mut steps: Vec<&str> = children.iter().map(String::as_str).collect();
    steps.push("hold");
    // an unprivileged user, as for a training job
    let odd = scene.run("odd", &["--user=1000"], &steps);
    // on the host other tests kill, too
    reaches("the kernel's kills", names.len(), || names.len().min((oom_kills() - before) as usize));
    ledger.settles(&odd.name, 0, names.len());
    ledger.settles(&other.name, 0, 0);
    let ours = ledger.events().into_iter().filter(|event| event["container_name"] == odd.name.as_str());
    for event in ours {
        let process = event["process"].as_str().expect("a name");
        assert!(!process.chars().any(char::is_control), "sanitized: {process:?}");
    }
    ledger.matches_kernel_count();
}

/// Makes a kill in a cgroup that a user could have made, as one of Slurm's v1 can in the cgroup of his task. The folder with the name `lab`
/// in its path is user 3001's.
fn kill_in_cgroup_of_a_user(scene: &Scene, path: &str) {
    let cgroup = TestCgroup::at(path, &new_id());
    let of_user = cgroup.path.ancestors().find(|level| level.ends_with("lab"));
    if let Some(of_user) = of_user {
        std::os::unix::fs::chown(of_user, Some(3001), None).expect("root gives it away");
    }
    let hog = start_waiting(scene, &cgroup);
    run_until_killed(scene, &cgroup, hog);
}

#[test]
fn case_18_cgroup_that_a_user_names_after_a_container_is_not_the_container() {
    let Some(scene) = Scene::new("forger") else { return };
    let ledger = scene.start_memledger(&[]);
    let running = scene.run_known(&ledger, "running", &[], &["hold"]);
    let ended = scene.run_known(&ledger, "ended", &[], &["hold"]);
    ended.docker(&["stop", "-t", "0"]);
    ledger.ends(&ended.name, "stopped", 1);
    let folder = format!("{}/{}", parent(), &new_id()[..12]);
    let mut kills = 0;
    for id in [&running.id, &ended.id] {
        for path in [
            format!("{folder}/slurm_vm/uid_3001/job_1/step_0/task_0/{id}"),
            format!("{folder}/slurm_vm/uid_3001/job_1/step_0/task_0/docker/{id}/below"),
            format!("{folder}/lab/docker-{id}.scope"),
            format!("{folder}/lab/docker/{id}"),
        ] {
            kill_in_cgroup_of_a_user(&scene, &path);
            kills += 1;
            scene.wait_for_kills(kills);
        }
    }
    let tally = ledger.settled_tally(&scene, kills);
    // beside bursts of other tests the kernel does not log every cgroup
    assert!(tally.containers.is_empty() && tally.host >= 1, "{tally:?}");
    ledger.settles(&running.name, 0, 0);
    ledger.settles(&ended.name, 0, 0);
    for container in [&running, &ended] {
        let (_, screen) = verb(&scene, &["why", &container.name, NO_LEDGER]);
        assert!(!screen.contains("OUT OF MEMORY"), "without a ledger: {screen}");
    }
    // a kill of its own still is
    let real = scene.run_known(&ledger, "real", &[], &["eat"]);
    ledger.settles(&real.name, 1, 0);
    ledger.matches_kernel_count();
}

#[test]
fn container_below_the_cgroup_of_a_job_is_one_by_its_engines_word() {
    let Some(scene) = Scene::new("inside") else { return };
    wait_for_cgroups_in_the_log();
    let ledger = scene.start_memledger(&[]);
    let parent = CgroupParent::below("jobs", "slurm_vm/uid_0/job_1");
    let container = scene.run_known(&ledger, "it", &[&parent.flag], &["seq=1:eat", "hold"]);
    if !cgroup_of(container.pid()).starts_with(&parent.folder) {
        return skip("this engine takes slices alone as parents");
    }
    scene.wait_for_kills(1);
    ledger.settles(&container.name, 0, 1);
    let (_, screen) = verb(&scene, &["why", &container.name, NO_LEDGER]);
    let words = screen.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("OUT OF MEMORY"), "without a ledger: {screen}");
}

/// Starts a hog in a cgroup that allocates memory in [`run_until_killed`].
fn start_waiting(scene: &Scene, cgroup: &TestCgroup) -> Python {
    cgroup.limit(16 << 20);
    let wait = format!("wait={}", scene.path(cgroup.name()).display());
    let mut hog = scene.run_in(cgroup, &["say=ready", &wait, "eat"]);
    assert_eq!(hog.line(), "ready");
    hog
}

/// Lets it allocate memory until it is killed.
fn run_until_killed(scene: &Scene, cgroup: &TestCgroup, hog: Python) {
    std::fs::write(scene.path(cgroup.name()), "").expect("a file");
    eventually("its end", || match cgroup.pids()[..] {
        [] => Ok(()),
        ref pids => Err(format!("{pids:?}")),
    });
    drop(hog);
}

/// Makes a kill in a container-like cgroup whose path has about so many bytes.
fn kill_at_depth(scene: &Scene, ledger: &Ledger, bytes: usize) -> TestCgroup {
    let id = new_id();
    let level = "l".repeat(150);
    let mut path = format!("{}/long-{}-{bytes}", parent(), &id[..12]);
    while path.len() + 64 + level.len() < bytes {
        path = format!("{path}/{level}");
    }
    let missing = bytes.saturating_sub(path.len() + 67);
    path = format!("{path}/{}/{id}", "m".repeat(missing.max(1)));
    let cgroup = TestCgroup::at(&path, &id);
    let hog = start_waiting(scene, &cgroup);
    // known before the kill, like a container that has run for a while
    ledger.eventually("it is known", |metrics| {
        metrics
            .try_value("memledger_container_memory_usage_bytes", &[("container_name", cgroup.name())])
            .map(drop)
    });
    run_until_killed(scene, &cgroup, hog);
    cgroup
}

#[test]
fn case_20_fragmented_cgroup_path_is_read_and_truncated_one_is_not_guessed() {
    let Some(scene) = Scene::new("long") else { return };
    let ledger = scene.start_memledger_for_all(&[]);
    let mut cgroups = vec![];
    for (n, bytes) in [407, 728, 1070].into_iter().enumerate() {
        let cgroup = kill_at_depth(&scene, &ledger, bytes);
        scene.wait_for_kills(n + 1);
        cgroups.push(cgroup);
    }
    let tally = ledger.settled_tally(&scene, 3);
    assert_eq!(tally.host, 0, "{tally:?}");
    for cgroup in &cgroups[..2] {
        assert_eq!(tally.containers.get(cgroup.name()), Some(&1), "{tally:?}");
    }
    // the kernel truncates the longest one: it is attributed by its process or its counter, or not at all
    let last = tally.containers.get(cgroups[2].name()).copied().unwrap_or(0);
    assert_eq!(last + tally.unattributed, 1, "{tally:?}");
    ledger.matches_kernel_count();
}

/// Returns the id of a new thread: thread ids and pids share one sequence, and threads are quick to create.
fn newest_number() -> u32 {
    let thread = std::thread::spawn(|| std::fs::read_link("/proc/thread-self").expect("it"));
    let own = thread.join().expect("it ends");
    own.file_name().and_then(|name| name.to_str()?.parse().ok()).expect("a number")
}

/// The highest pid of the machine, lowered until this is dropped.
struct FewerPids {
    before: String,
}

impl FewerPids {
    const FILE: &str = "/proc/sys/kernel/pid_max";
    const MOST: u32 = 1_500;

    /// Begins with small numbers again, and lets few follow: the whole series passes in seconds.
    fn new() -> Self {
        let fewer = Self { before: std::fs::read_to_string(Self::FILE).expect("it") };
        fewer.set(newest_number().max(400) + 100);
        eventually("small numbers", || match newest_number() {
            number if number < Self::MOST - 500 => Ok(()),
            number => Err(format!("{number}")),
        });
        fewer.set(Self::MOST);
        fewer
    }

    fn set(&self, most: u32) {
        std::fs::write(Self::FILE, most.to_string()).expect("small");
    }
}

impl Drop for FewerPids {
    fn drop(&mut self) {
        let _ = std::fs::write(Self::FILE, &self.before);
    }
}

#[test]
fn case_21_pid_killed_in_two_containers_is_two_kills() {
    if !in_v2_guest() {
        return; // pids wrap around too slowly if pid_max must not be changed
    }
    let Some(scene) = Scene::new("pids") else { return };
    let ledger = scene.start_memledger_for_all(&[]);
    let [first, second] = [TestCgroup::container(), TestCgroup::container()];
    let fewer = FewerPids::new();
    let hog = start_waiting(&scene, &first);
    let pid = hog.pid();
    run_until_killed(&scene, &first, hog);
    let hog = eventually("the same number again", || {
        if (0..100).all(|_| newest_number() + 1 != pid) {
            return Err("no wraparound yet".to_owned());
        }
        // another process may take it
        let hog = start_waiting(&scene, &second);
        if hog.pid() == pid { Ok(hog) } else { Err(format!("{} of {pid}", hog.pid())) }
    });
    run_until_killed(&scene, &second, hog);
    drop(fewer);
    assert_eq!(scene.wait_for_kills(2), [pid, pid]);
    let tally = ledger.settled_tally(&scene, 2);
    let wanted = [(first.name().to_owned(), 1), (second.name().to_owned(), 1)];
    assert_eq!(tally.containers, wanted.into());
}

#[test]
fn case_27_recreated_container_continues_the_count_of_its_name() {
    let Some(scene) = Scene::new("again") else { return };
    let ledger = scene.start_memledger(&[]);
    let first = scene.run("it", &[], &["eat"]);
    scene.wait_for_kills(1);
    ledger.settles(&first.name, 1, 0);
    let name = first.name.clone();
    drop(first);
    let second = scene.run("it", &[], &["eat"]);
    scene.wait_for_kills(2);
    ledger.settles(&name, 2, 0);
    let kills = ledger.container_kills(&scene);
    assert_ne!(kills[0]["container_id"], kills[1]["container_id"]);
    assert_eq!(kills[1]["container_id"], second.id.as_str());
}

/// Returns the words of a verb about a container of the scene, by its ledger and its engine.
fn answer(scene: &Scene, words: &[&str]) -> String {
    let (_, screen) = verb(scene, &[words, &[&scene.state()]].concat());
    screen.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn case_27_renamed_container_keeps_counts_and_history_and_continues_under_new_name() {
    let Some(scene) = Scene::new("renamed") else { return };
    let socket = scene.path("control.sock").display().to_string();
    let ledger = scene.start_memledger(&[&scene.state(), &format!("--local.socket={socket}")]);
    let container = scene.run("old", &[], &["seq=1:eat", "wait=/control/on", "seq=1:eat", "hold"]);
    scene.wait_for_kills(1);
    ledger.settles(&container.name, 0, 1);
    let rename = |name: &str| scene.engine.docker(&["rename", &container.id, name]);
    let (new, last) = (scene.container_name("new"), scene.container_name("last"));
    rename(&new);
    ledger.eventually("its new name", |metrics| {
        metrics.try_value("memledger_container_memory_usage_bytes", &[("container_name", &new)]).map(drop)
    });
    scene.release("on");
    scene.wait_for_kills(2);
    let sum = |metrics: &crate::support::Metrics, name: &str| metrics.sum(KILLS, &[("container_name", name)]);
    ledger.eventually("each kill under the name of its time", |metrics| {
        let found = (sum(metrics, &container.name), sum(metrics, &new));
        if found == (1.0, 1.0) { Ok(()) } else { Err(format!("{found:?}")) }
    });
    ledger.matches_kernel_count();
    let kills = ledger.container_kills(&scene);
    for kill in &kills {
        assert_eq!(
            (&kill["container_name"], &kill["container_id"]),
            (&new.as_str().into(), &container.id.as_str().into())
        );
    }
    let listed = run(&["ps", "--json", &format!("--local.socket={socket}")]).1;
    let listed =
        listed.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("an object"));
    let ours: Vec<_> = listed.filter(|row| row["name"] == new.as_str()).collect();
    assert_eq!(ours[0]["oom_kills"], 2.0, "{ours:?}");
    let why = answer(&scene, &["why", &new]);
    assert!(
        why.contains("OUT OF MEMORY") && why.contains(&format!("it was {} before", container.name)),
        "{why}"
    );
    let why = answer(&scene, &["why", &container.name]);
    assert!(why.contains("OUT OF MEMORY") && why.contains(&format!("it is {new} now")), "{why}");
    let events = answer(&scene, &["events", "--container", &new]);
    assert_eq!(events.matches("oom kill").count(), 2, "{events}");

    // once it has ended, and while memledger does not run
    scene.engine.docker(&["kill", &container.id]);
    ledger.ends(&new, "stopped", 1);
    drop(ledger);
    rename(&last);
    let other = scene.run("new", &[], &["hold"]);
    let why = answer(&scene, &["why", &last]);
    assert!(why.contains("OUT OF MEMORY") && why.contains("was killed on request"), "{why}");
    let ledger = scene.start_memledger(&[&scene.state()]);
    ledger.eventually("the container that took the name", |metrics| {
        metrics.try_value("memledger_container_info", &[("container_id", &other.id)]).map(drop)
    });
    let why = answer(&scene, &["why", &new]);
    assert!(why.contains("NO KILL OR EXIT KNOWN"), "{why}");
}
