//! Stories of pods on cgroup v2, told without the kernel log: the counter of the pod's cgroup, and those of the containers
//! that are there.

use std::sync::Arc;

use super::story::{KILLED, Story, id, runs};
use crate::collect::kernel_log::Position;
use crate::collect::oom_cgroups::Reading;
use crate::discover::{Named, Pod, What};
use crate::ledger::entries::{Kill, Whose};
use crate::ledger::machine::Hint;

const UID: &str = "1b-2c";
const SLICE: &str = "kubepods.slice/kubepods-pod1b_2c.slice";

/// A pod whose containers run, with the kernel's counter at 10.
fn pod_of(letters: &[char]) -> Story {
    let mut story = Story::new();
    for (pid, letter) in (100..).zip(letters) {
        tell(&mut story, *letter, 0.0, What::Started);
        tell(&mut story, *letter, 0.0, runs(pid));
    }
    let containers: Vec<_> = letters.iter().map(|letter| (*letter, 0)).collect();
    look(&mut story, 0.5, 10, 0, &containers);
    story
}

fn tell(story: &mut Story, letter: char, at: f64, what: What) {
    let pod = Pod {
        namespace: "ml".into(),
        name: "train-0".into(),
        uid: UID.into(),
        attempt: 0,
        source: "".into(),
        labels: vec![],
        memory_min_bytes: None,
    };
    let name = letter.to_string().into();
    let named = Named { name, pod: Some(Arc::new(pod)), image: "".into(), labels_match: true };
    story.tell_named(letter, at, at, Some(named), what);
}

fn ends(story: &mut Story, letter: char, at: f64, exit_code: Option<i64>) {
    tell(story, letter, at, What::Ended { exit_code, oom_flag: None });
}

/// What the counters of the pod and of the containers that are there say.
fn sweep(story: &mut Story, at: f64, pod: u64, containers: &[(char, u64)]) {
    let own = |(letter, kills): &(char, u64)| Reading {
        id: Some(id(*letter)),
        path: format!("{SLICE}/cri-containerd-{}.scope", id(*letter).as_str()),
        inode: u64::from(*letter as u32),
        kills: *kills,
        fresh: true,
    };
    let readings: Vec<_> = [of_pod(SLICE, 1, pod)].into_iter().chain(containers.iter().map(own)).collect();
    story.machine.sweep(story.at(at), &readings, true);
}

fn of_pod(path: &str, inode: u64, kills: u64) -> Reading {
    Reading { id: None, path: path.into(), inode, kills, fresh: true }
}

/// The same, and the kernel's.
fn look(story: &mut Story, at: f64, host: u64, pod: u64, containers: &[(char, u64)]) {
    let now = story.at(at);
    story.machine.log(now, None, Position::default());
    sweep(story, at, pod, containers);
    story.machine.counted(now, Some(host));
    story.settle(at);
}

/// Whose the kills were, in order.
fn owners(story: &Story) -> Vec<String> {
    let owner = |kill: &Kill| match (&kill.whose, kill.victim) {
        (Whose::Container(subject), Some(victim)) => {
            format!("{}: {victim:?}", subject.name.container_name)
        }
        (Whose::Unattributed, None) => "nobody".to_owned(),
        other => format!("{other:?}"),
    };
    story.kept.kills().map(owner).collect()
}

/// Looks on until everything is settled.
fn rest(story: &mut Story, from: f64, host: u64, pod: u64, containers: &[(char, u64)]) {
    for second in 0..=16 {
        look(story, from + f64::from(second), host, pod, containers);
    }
}

#[test]
fn a_kill_that_only_the_pod_s_counter_tells_is_the_container_s_that_is_gone() {
    let mut story = pod_of(&['a', 'b']);
    look(&mut story, 1.0, 10, 0, &[('a', 0), ('b', 0)]);
    ends(&mut story, 'a', 1.5, KILLED);
    rest(&mut story, 2.0, 11, 1, &[('b', 0)]);
    assert_eq!(owners(&story), ["a: Main"]);
}

#[test]
fn a_kill_that_two_containers_of_a_pod_can_have_had_is_nobody_s_and_its_evidence_names_the_pod() {
    let mut story = pod_of(&['a', 'b', 'c']);
    look(&mut story, 1.0, 10, 0, &[('a', 0), ('b', 0), ('c', 0)]);
    ends(&mut story, 'a', 1.4, KILLED);
    ends(&mut story, 'b', 1.6, KILLED);
    rest(&mut story, 2.0, 11, 1, &[('c', 0)]);
    let kill = story.last_kill();
    assert_eq!(kill.whose, Whose::Unattributed);
    assert!(kill.evidence.iter().any(|line| line.text.contains(SLICE)), "{:?}", kill.evidence);
}

#[test]
fn a_container_that_had_ended_before_or_began_after_the_kill_is_no_suspect() {
    let mut story = pod_of(&['a', 'b']);
    ends(&mut story, 'b', 1.0, KILLED);
    look(&mut story, 5.0, 10, 0, &[('a', 0)]);
    ends(&mut story, 'a', 5.5, KILLED);
    look(&mut story, 6.0, 11, 1, &[]);
    tell(&mut story, 'c', 7.5, What::Started);
    rest(&mut story, 8.0, 11, 1, &[]);
    assert_eq!(story.owner().as_deref(), Some("a"));
}

#[test]
fn a_container_whose_end_its_runtime_does_not_tell_is_not_blamed() {
    let mut story = pod_of(&['a']);
    look(&mut story, 1.0, 10, 0, &[('a', 0)]);
    rest(&mut story, 2.0, 11, 1, &[]);
    assert_eq!(story.last_kill().whose, Whose::Unattributed);
}

#[test]
fn a_kill_that_a_container_s_own_counter_tells_is_not_told_again_by_its_pod_s() {
    let mut story = pod_of(&['a', 'b']);
    look(&mut story, 1.0, 11, 1, &[('a', 1), ('b', 0)]);
    assert_eq!(story.owner().as_deref(), Some("a"));
    ends(&mut story, 'b', 1.5, Some(0));
    rest(&mut story, 2.0, 12, 1, &[('a', 1)]);
    assert_eq!(
        story.last_kill().whose,
        Whose::Unattributed,
        "a process of the host: the pod has counted none"
    );
    assert_eq!(owners(&story), ["a: Child", "nobody"]);
}

#[test]
fn a_kill_of_the_kernel_log_is_not_told_again_by_the_pod_s_counter() {
    let mut story = pod_of(&['a']);
    look(&mut story, 1.0, 10, 0, &[('a', 0)]);
    sweep(&mut story, 1.4, 1, &[]);
    let path = format!("/{SLICE}/cri-containerd-{}.scope", id('a').as_str());
    story.kill(1.5, 100, Some(&path), Hint::default());
    ends(&mut story, 'a', 1.5, KILLED);
    story.settle(1.5);
    rest(&mut story, 2.0, 12, 1, &[]); // and one of which only the kernel's counter tells
    assert_eq!(owners(&story), ["a: Main", "nobody"]);
}

#[test]
fn a_container_of_which_nobody_has_told_more_than_that_it_was_made_may_have_had_the_kill() {
    let mut story = pod_of(&['a']);
    look(&mut story, 1.0, 10, 0, &[('a', 0)]);
    ends(&mut story, 'a', 1.5, Some(0));
    tell(&mut story, 'b', 1.2, What::Exists); // it ran and was killed, and its status is not answered
    rest(&mut story, 2.0, 11, 1, &[]);
    assert_eq!(owners(&story), ["nobody"]);
    tell(&mut story, 'c', 39.0, What::Started);
    look(&mut story, 40.0, 11, 1, &[('c', 0)]);
    ends(&mut story, 'c', 40.5, KILLED);
    rest(&mut story, 41.0, 12, 2, &[]);
    assert_eq!(owners(&story), ["nobody", "c: Main"], "one that never ran is no suspect for ever");
}

#[test]
fn the_run_before_of_one_that_is_there_again_may_have_had_the_kill() {
    let mut story = pod_of(&['a', 'b']);
    look(&mut story, 1.0, 10, 0, &[('a', 0), ('b', 0)]);
    ends(&mut story, 'a', 1.3, KILLED);
    ends(&mut story, 'b', 1.4, Some(0));
    tell(&mut story, 'a', 1.6, What::Started);
    rest(&mut story, 2.0, 11, 1, &[('a', 0)]);
    assert_eq!(owners(&story), ["nobody"], "not b's: Docker has started a again in a new cgroup");
}

#[test]
fn one_that_was_there_only_at_a_later_kill_is_not_innocent_of_the_first() {
    let mut story = pod_of(&['a', 'b']);
    look(&mut story, 1.0, 10, 0, &[('a', 0), ('b', 0)]);
    ends(&mut story, 'b', 1.5, Some(0));
    look(&mut story, 2.0, 11, 1, &[]); // the cgroup of a is made anew, its end and start are told late
    look(&mut story, 3.0, 12, 2, &[('a', 0)]);
    rest(&mut story, 4.0, 12, 2, &[('a', 0)]);
    assert_eq!(owners(&story), ["nobody", "nobody"]);
}

#[test]
fn of_two_pods_with_a_kill_each_no_evidence_names_the_wrong_one() {
    let mut story = pod_of(&['a', 'b']);
    let other = "kubepods.slice/kubepods-pod3d.slice";
    for second in 0..=14 {
        let now = story.at(1.0 + f64::from(second));
        story.machine.log(now, None, Position::default());
        let kills = u64::from(second > 0);
        story.machine.sweep(now, &[of_pod(SLICE, 1, kills), of_pod(other, 2, kills)], true);
        story.machine.counted(now, Some(10 + 2 * kills));
        story.settle(1.0 + f64::from(second));
    }
    assert_eq!(owners(&story), ["nobody", "nobody"]);
    let named =
        story.kept.kills().flat_map(|kill| &kill.evidence).filter(|line| line.text.contains("kubepods"));
    assert_eq!(named.count(), 0);
}

#[test]
fn pods_are_not_asked_while_the_kernel_log_is_read() {
    let mut story = pod_of(&['a']);
    let path = format!("/{SLICE}/cri-containerd-{}.scope", id('a').as_str());
    look(&mut story, 1.0, 10, 0, &[('a', 0)]);
    ends(&mut story, 'a', 1.5, KILLED);
    for second in 2..=14 {
        let at = f64::from(second);
        story.log(at, vec![]);
        sweep(&mut story, at, 1, &[]);
        story.machine.counted(story.at(at), Some(11)); // a record is lost; whose it was the pod cannot know better
        story.settle(at);
    }
    let kill = story.last_kill();
    assert_eq!(kill.whose, Whose::Unattributed, "{path}");
}

#[test]
fn a_kill_of_a_container_nobody_has_told_of_explains_its_pod_by_its_path() {
    let mut story = pod_of(&['a']);
    look(&mut story, 1.0, 10, 0, &[('a', 0)]);
    sweep(&mut story, 1.4, 1, &[]);
    let path = format!("/{SLICE}/cri-containerd-{}.scope", id('e').as_str());
    story.kill(1.5, 100, Some(&path), Hint::default());
    story.machine.counted(story.at(1.5), Some(11));
    story.settle(1.5);
    ends(&mut story, 'a', 1.6, Some(0));
    rest(&mut story, 2.0, 12, 1, &[]); // and one of the host's
    assert_eq!(owners(&story)[1], "nobody", "{:?}", owners(&story));
}

#[test]
fn kills_that_can_only_be_one_container_s_are_not_exchangeable() {
    let mut story = pod_of(&['a', 'b']);
    look(&mut story, 1.0, 10, 0, &[('a', 0), ('b', 0)]);
    sweep(&mut story, 1.4, 1, &[('a', 1), ('b', 0)]);
    ends(&mut story, 'a', 1.5, KILLED);
    rest(&mut story, 2.0, 12, 2, &[('b', 0)]);
    let mut owners = owners(&story);
    owners.sort();
    assert_eq!(owners, ["a: Child", "a: Main"]);
    assert!(story.kept.kills().all(|kill| !kill.exchangeable));
}
