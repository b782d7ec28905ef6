//! Memory of containers, from folders in the place of cgroups.

use super::*;
use crate::clock::Timestamp;
use crate::collect::CycleData;
use crate::discover::Inventory;
use crate::host::HostPaths;

/// Creates a cgroup in a folder that has the place of cgroup v2.
fn cgroup(root: &Path, path: &str, files: &[(&str, &str)]) {
    std::fs::create_dir_all(root.join(path)).unwrap();
    for (name, text) in files {
        std::fs::write(root.join(path).join(name), text).unwrap();
    }
}

fn collect(root: &Path, containers: &[(&str, &str)]) -> CycleData {
    collect_again(&mut Cgroups::default(), root, containers)
}

fn collect_again(cgroups: &mut Cgroups, root: &Path, containers: &[(&str, &str)]) -> CycleData {
    let containers = containers.iter().map(|(id, path)| Container::in_cgroup(id, path)).collect();
    collect_at(cgroups, Timestamp::now(), Version::V2, root, containers)
}

fn collect_at(
    cgroups: &mut Cgroups,
    now: Timestamp,
    version: Version,
    root: &Path,
    containers: Vec<Arc<Container>>,
) -> CycleData {
    collect_beside(cgroups, now, version, root, containers, CycleData::default())
}

/// Collects beside what other collectors have left.
fn collect_beside(
    cgroups: &mut Cgroups,
    now: Timestamp,
    version: Version,
    root: &Path,
    containers: Vec<Arc<Container>>,
    mut cycle_data: CycleData,
) -> CycleData {
    let hierarchy = Hierarchy { version, root: root.to_path_buf() };
    let inventory = Arc::new(Inventory { containers, ..Inventory::default() });
    let context = Context {
        now,
        host_paths: &HostPaths::default(),
        hierarchy: Some(&hierarchy),
        inventory: &inventory,
    };
    let (mut series, mut read_errors) = Default::default();
    let mut output =
        Output { series: &mut series, cycle_data: &mut cycle_data, read_errors: &mut read_errors };
    assert_eq!(cgroups.collect(&context, &mut output), CollectOutcome::Ok);
    cycle_data
}

#[test]
fn utilization_is_that_of_the_tightest_level() {
    let folder = tempfile::tempdir().unwrap();
    let level = |path: &str, mib: u64, max: &str, high: &str| {
        let stat = format!("anon {}\nfile 0\nshmem 0\nkernel 0\nslab_reclaimable 0\nsock 0\n", mib << 20);
        let usage = format!("{}\n", mib << 20);
        let files =
            [("memory.current", &*usage), ("memory.stat", &stat), ("memory.max", max), ("memory.high", high)];
        cgroup(folder.path(), path, &files);
    };
    level("pods", 60, "104857600\n", "max\n");
    level("pods/idle", 4, "50331648\n", "max\n");
    level("pods/throttled", 9, "104857600\n", "10485760\n");
    let memory = collect(folder.path(), &[("idle", "pods/idle"), ("throttled", "pods/throttled")]).memory;
    let of = |number: usize| memory[number].unwrap();
    assert_eq!((of(0).limit_utilization, of(0).headroom), (Some(0.6), Some(40 << 20)));
    assert_eq!(
        (of(1).limit_utilization, of(1).high),
        (Some(0.9), Some(10 << 20)),
        "memory.high is the lower one"
    );
}

/// The kernel moves memory into swap before it kills.
#[test]
fn free_swap_is_headroom() {
    let folder = tempfile::tempdir().unwrap();
    let mib = |mib: u64| format!("{}\n", mib << 20);
    let level = |path: &str, used: u64, max: u64, swap: Option<(u64, &str)>| {
        let stat = format!(
            "anon {}\nfile 0\nshmem 0\nkernel 0\nslab_reclaimable 0\nsock 0\nunevictable {}\n",
            used << 20,
            1 << 20
        );
        cgroup(
            folder.path(),
            path,
            &[("memory.current", &mib(used)), ("memory.stat", &stat), ("memory.max", &mib(max))],
        );
        if let Some((used, max)) = swap {
            cgroup(folder.path(), path, &[("memory.swap.current", &mib(used)), ("memory.swap.max", max)]);
        }
    };
    level("pods", 150, 300, Some((0, "max\n")));
    level("pods/without", 60, 100, None);
    level("pods/none", 60, 100, Some((0, "0\n")));
    level("pods/some", 60, 100, Some((10, "52428800\n"))); // 50 MiB
    level("pods/unlimited", 60, 100, Some((10, "max\n")));
    level("noswap", 0, 1000, Some((0, "0\n")));
    level("noswap/below", 60, 100, Some((0, "max\n")));
    let paths = ["pods/without", "pods/none", "pods/some", "pods/unlimited", "noswap/below"];
    let containers = || paths.map(|path| Container::in_cgroup(path, path)).into();
    let headroom = |free_swap: u64| {
        let (mut cgroups, now) = (Cgroups::default(), Timestamp::now());
        let beside = CycleData { free_swap: free_swap << 20, ..CycleData::default() };
        let found = collect_beside(&mut cgroups, now, Version::V2, folder.path(), containers(), beside);
        found.memory.iter().map(|memory| memory.unwrap().headroom.unwrap() >> 20).collect::<Vec<_>>()
    };
    assert_eq!(headroom(0), [40; 5]);
    assert_eq!(headroom(30), [40, 40, 70, 70, 40], "no swap above the last one");
    assert_eq!(
        headroom(500),
        [40, 40, 80, 99, 40],
        "no more than what can be swapped: 1 of 60 MiB is locked"
    );
}

/// Creates a cgroup with this limit.
fn limited(root: &Path, path: &str, max: &str) {
    let stat = "anon 1\nfile 0\nshmem 0\nkernel 0\nslab_reclaimable 0\nsock 0\n";
    cgroup(root, path, &[("memory.current", "1\n"), ("memory.stat", stat), ("memory.max", max)]);
}

#[test]
fn limit_of_level_that_was_created_again_is_read_at_once() {
    let (folder, gone) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut cgroups = Cgroups::default();
    let mut limit = || collect_again(&mut cgroups, folder.path(), &[("a", "a.slice/a")]).memory[0].unwrap();
    limited(folder.path(), "a.slice", "max\n");
    limited(folder.path(), "a.slice/a", "max\n");
    assert_eq!(limit().effective_limit, None);
    // moved, not removed: a folder of a real file system may get the inode of a removed one
    std::fs::rename(folder.path().join("a.slice"), gone.path().join("a.slice")).unwrap();
    limited(folder.path(), "a.slice", "4096\n");
    limited(folder.path(), "a.slice/a", "max\n");
    assert_eq!(limit().effective_limit, Some(4096));
}

/// Moves the cgroups away, which keeps the watches of their files as the kernel does for removed ones.
#[test]
fn watches_end_with_their_cgroups() {
    let (folder, gone) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut cgroups = Cgroups::default();
    for number in 0..20 {
        let (slice, path) = (format!("{number}.slice"), format!("{number}.slice/a"));
        limited(folder.path(), &slice, "max\n");
        limited(folder.path(), &path, "4096\n");
        collect_again(&mut cgroups, folder.path(), &[(&slice, &path)]);
        assert_eq!(cgroups.watch.watches(), 2);
        std::fs::rename(folder.path().join(&slice), gone.path().join(&slice)).unwrap();
    }
    collect_again(&mut cgroups, folder.path(), &[]);
    assert_eq!(cgroups.watch.watches(), 0);
}

#[test]
fn sum_is_incomplete_with_a_cgroup_without_memory_controller() {
    let folder = tempfile::tempdir().unwrap();
    cgroup(folder.path(), "user.slice/rootless", &[("cgroup.procs", "7\n")]);
    let cycle_data = collect(folder.path(), &[("rootless", "user.slice/rootless")]);
    assert!(!cycle_data.memory_complete);
    assert!(collect(folder.path(), &[("ended", "user.slice/ended")]).memory_complete);
}

/// The memory of a nested container is in the outer one's.
#[test]
fn sum_is_complete_with_a_nested_cgroup_without_memory_controller() {
    let folder = tempfile::tempdir().unwrap();
    cgroup(folder.path(), "outer", &[("memory.current", "4096\n"), ("memory.stat", "anon 4096\n")]);
    cgroup(folder.path(), "outer/inner", &[("cgroup.procs", "7\n")]);
    let inner = Container { nested: true, ..(*Container::in_cgroup("inner", "outer/inner")).clone() };
    let containers = vec![Container::in_cgroup("outer", "outer"), Arc::new(inner)];
    let (mut cgroups, now) = (Cgroups::default(), Timestamp::now());
    let cycle_data = collect_at(&mut cgroups, now, Version::V2, folder.path(), containers);
    assert!(cycle_data.memory[0].is_some() && cycle_data.memory[1].is_none());
    assert!(cycle_data.memory_complete);
}

#[test]
fn sum_is_incomplete_with_a_container_that_gets_no_cgroup() {
    let folder = tempfile::tempdir().unwrap();
    let (mut cgroups, start) = (Cgroups::default(), Timestamp::now());
    let rootless = Container { cgroup: None, ..(*Container::in_cgroup("rootless", "")).clone() };
    let mut is_complete = |seconds| {
        let now = start.plus(Duration::from_secs(seconds));
        collect_at(&mut cgroups, now, Version::V1, folder.path(), vec![Arc::new(rootless.clone())])
            .memory_complete
    };
    assert!(is_complete(0) && is_complete(5), "the runtime may create it now");
    assert!(!is_complete(10));
}

#[test]
fn room_below_a_level_of_unknown_memory_is_unknown() {
    let folder = tempfile::tempdir().unwrap();
    let level = |path: &str, stat: &str, max: &str| {
        cgroup(folder.path(), path, &[("memory.current", "1\n"), ("memory.stat", stat), ("memory.max", max)]);
    };
    let stat = "anon 1\nfile 0\nshmem 0\nkernel 0\nslab_reclaimable 0\nsock 0\n";
    level("pod", stat, "1000\n");
    level("pod/limited", "file 0\n", "100\n");
    level("pod/unlimited", "file 0\n", "max\n");
    let memory = collect(folder.path(), &[("a", "pod/limited"), ("b", "pod/unlimited")]).memory;
    let of = |number: usize| {
        let memory: ContainerMemory = memory[number].unwrap();
        (memory.effective_limit, memory.headroom, memory.limit_utilization)
    };
    assert_eq!(of(0), (Some(100), None, None), "not that of the looser level");
    assert_eq!(of(1), (Some(1000), Some(999), Some(0.001)));
}

#[test]
fn utilization_is_also_shown_for_each_level() {
    let stat = |bytes: u64| format!("anon {bytes}\nfile 0\nshmem 0\nkernel 0\nslab_reclaimable 0\nsock 0\n");
    let class = "kubepods.slice/kubepods-burstable.slice";
    let pod = format!("{class}/kubepods-burstable-pod1.slice");
    let own = format!("{pod}/crio-a.scope");
    let folder = tempfile::tempdir().unwrap();
    for (path, bytes, max) in
        [("kubepods.slice", 80, "100"), (class, 60, "200"), (&*pod, 40, "max"), (&*own, 10, "40")]
    {
        let max = format!("{max}\n");
        let files = [("memory.current", "1\n"), ("memory.stat", &*stat(bytes)), ("memory.max", &max)];
        cgroup(folder.path(), path, &files);
    }
    let memory = collect(folder.path(), &[("a", &own)]).memory[0].unwrap();
    assert_eq!(memory.level_utilization, [Some(0.25), None, Some(0.8), None], "the higher one of the node's");
    assert_eq!(memory.limit_utilization, Some(0.8));
    for (path, level) in [
        ("kubepods/burstable", LimitLevel::Node),
        ("kubepods/burstable/pod1", LimitLevel::Pod),
        ("system.slice/job-pod1.slice", LimitLevel::Slice),
    ] {
        assert_eq!(LimitLevel::above(Path::new(path)), level, "{path}");
    }
}

#[test]
fn levels_open_only_the_files_that_they_need() {
    let folder = tempfile::tempdir().unwrap();
    let files = [
        "memory.current",
        "memory.stat",
        "memory.max",
        "memory.high",
        "memory.swap.max",
        "memory.events",
        "memory.peak",
        "memory.swap.current",
        "memory.pressure",
        "cpu.stat",
    ];
    let files = files.map(|name| (name, if name.ends_with("stat") { "anon 1\n" } else { "1\n" }));
    cgroup(folder.path(), "pod", &files);
    cgroup(folder.path(), "pod/a", &files);
    assert_eq!(collect(folder.path(), &[("a", "pod/a")]).cgroup_files, 3 + 2);
    let missing = collect(folder.path(), &[("a", "pod/a"), ("missing", "pod/missing")]);
    assert_eq!(missing.cgroup_files, 3 + 2 + MAX_FILES, "with those that are still to be opened");
}

#[test]
fn subtracts_shmem_from_file_on_both_versions() {
    let mut v2 = ContainerMemory { usage: 100, ..ContainerMemory::default() };
    let stat = b"anon 40\nfile 30\nkernel 20\nsock 1\nshmem 10\nslab_reclaimable 5\nslab_unreclaimable 1\n";
    apply_v2(&mut v2, parse::StatV2::parse(stat));
    assert_eq!((v2.anon, v2.file, v2.shmem, v2.kernel), (Some(40), Some(20), Some(10), Some(20)));
    assert_eq!(v2.unreclaimable, Some(40 + 10 + (20 - 5) + 1));
    assert_eq!(v2.rest(), 10);
    let mut v1 = ContainerMemory { usage: 100, ..ContainerMemory::default() };
    apply_v1(&mut v1, parse::StatV1::parse(b"total_cache 30\ntotal_rss 40\ntotal_shmem 10\n"), Some(20));
    assert_eq!((v1.anon, v1.file, v1.shmem, v1.kernel), (Some(40), Some(20), Some(10), Some(20)));
    assert_eq!((v1.unreclaimable, v1.rest()), (Some(70), 10));
}

#[test]
fn sums_kernel_memory_from_parts_before_linux_5_18() {
    let mut memory = ContainerMemory { usage: 100, ..ContainerMemory::default() };
    let stat = b"anon 40\nfile 10\nkernel_stack 3\npagetables 4\npercpu 2\nsock 0\nshmem 0\nslab_reclaimable 7\nslab_unreclaimable 8\nslab 15\n";
    apply_v2(&mut memory, parse::StatV2::parse(stat));
    assert_eq!(memory.kernel, Some(15 + 3 + 4 + 2));
    assert_eq!(memory.unreclaimable, Some(40 + 8 + 3 + 4 + 2));
}

#[test]
fn unreclaimable_is_absent_without_shmem() {
    let mut memory = ContainerMemory { usage: 100, ..ContainerMemory::default() };
    apply_v1(&mut memory, parse::StatV1::parse(b"total_cache 30\ntotal_rss 40\n"), None);
    assert_eq!((memory.unreclaimable, memory.file, memory.shmem), (None, None, None));
    assert_eq!(memory.rest(), 60, "memory that cannot be split is in the rest");
}
