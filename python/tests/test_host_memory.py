"""How much host memory is left: the least of what the host and each cgroup above the process have, from trees as the kernel shows them."""

import pytest
from memledger_client._host_memory import HostMemory, host_memory

MIB = 1 << 20
MEMINFO = f"MemTotal: {16 * 1024 * 1024} kB\nMemFree: 1 kB\nMemAvailable: {8 * 1024 * 1024} kB\n"


@pytest.fixture
def tree(tmp_path):
    """Makes a directory with proc and sys, from the files of each cgroup, by its path below the mount point."""

    def make(cgroup, mount, cgroups):
        point = mount.split(" ")[4].lstrip("/")
        for name, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, "proc/self/mountinfo": mount}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        for path, files in cgroups.items():
            directory = tmp_path / point / path
            directory.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (directory / name).write_text(str(text) + "\n")
        return str(tmp_path)

    return make


def v2(limit, anon, file=0, high="max", kernel=0):
    stat = f"anon {anon * MIB}\nfile {file * MIB}\nshmem 0\nkernel {kernel * MIB}\nslab_reclaimable 0\nsock 0"
    limits = {name: value if value == "max" else value * MIB for name, value in (("memory.max", limit), ("memory.high", high))}
    return {**limits, "memory.current": (anon + file + kernel) * MIB, "memory.stat": stat}


def v1(limit, rss, cache=0, kernel=0, above=None):
    stat = f"hierarchical_memory_limit {min(limit, above or limit) * MIB}\ntotal_rss {rss * MIB}\ntotal_shmem 0\ntotal_cache {cache * MIB}"
    usage = {"memory.usage_in_bytes": (rss + cache + kernel) * MIB, "memory.kmem.usage_in_bytes": kernel * MIB}
    return {"memory.limit_in_bytes": limit * MIB, "memory.stat": stat, **usage}


V2_MOUNT = "30 23 0:26 {} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 {} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
NONE = (1 << 43) - 1  # of version 1, in MiB: no limit


def test_own_limit_of_version_2_counts_without_page_cache(tree):
    root = tree("0::/\n", V2_MOUNT.format("/"), {"": v2(512, anon=100, file=300, kernel=12)})
    assert host_memory(root) == HostMemory(400 * MIB, 512 * MIB, "the cgroup at /sys/fs/cgroup")


def test_cgroup_above_that_leaves_less_counts(tree):
    cgroups = {"a.slice/b/c": v2("max", 10), "a.slice/b": v2(900, 100), "a.slice": v2(1000, 950), "": {}}
    root = tree("0::/a.slice/b/c\n", V2_MOUNT.format("/"), cgroups)
    assert host_memory(root) == HostMemory(50 * MIB, 1000 * MIB, "the cgroup /a.slice")


def test_memory_high_is_a_limit_too(tree):
    root = tree("0::/a\n", V2_MOUNT.format("/"), {"a": v2(1000, 100, high=600)})
    assert host_memory(root) == HostMemory(500 * MIB, 600 * MIB, "the cgroup /a")


def test_cgroup_of_version_2_of_an_older_kernel_has_no_sum_of_the_kernels_memory(tree):
    stat = f"anon {10 * MIB}\nshmem {20 * MIB}\nfile {99 * MIB}\nslab_unreclaimable {30 * MIB}\nkernel_stack {MIB}\nsock {MIB}"
    files = {"memory.max": 512 * MIB, "memory.current": 500 * MIB, "memory.stat": stat}
    assert host_memory(tree("0::/\n", V2_MOUNT.format("/"), {"": files})).left == (512 - 62) * MIB


def test_container_with_the_hosts_path_has_its_cgroup_at_the_mount_point(tree):
    cgroup = "9:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n0::/docker/ab\n"
    root = tree(cgroup, V1_MOUNT.format("/docker/ab"), {"": v1(512, 100, cache=300, kernel=2)})
    assert host_memory(root) == HostMemory(410 * MIB, 512 * MIB, "the cgroup at /sys/fs/cgroup/memory")


def test_cgroups_inside_the_container_count_with_its_own(tree):
    root = tree("4:memory:/docker/ab/job\n", V1_MOUNT.format("/docker/ab"), {"": v1(512, 500), "job": v1(400, 100)})
    assert host_memory(root) == HostMemory(12 * MIB, 512 * MIB, "the cgroup at /sys/fs/cgroup/memory")


def test_limit_above_what_is_mounted_counts_with_version_1(tree):
    root = tree("4:memory:/pod/ab\n", V1_MOUNT.format("/pod/ab"), {"": v1(NONE, 100, above=300)})
    assert host_memory(root) == HostMemory(200 * MIB, 300 * MIB, "a cgroup above the one at /sys/fs/cgroup/memory")


def test_host_counts_without_a_limit_and_where_it_has_less(tree):
    for files in (v2("max", 100), v2(1 << 20, 100), {}):
        assert host_memory(tree("0::/\n", V2_MOUNT.format("/"), {"": files})) == HostMemory(8 << 30, 16 << 30, "the host")


def test_path_outside_of_the_namespace_and_other_hierarchies_are_no_error(tree):
    root = tree("0::/../other\n", V2_MOUNT.format("/"), {"": v2(512, 100)})
    assert host_memory(root).limit == 512 * MIB
    root = tree("4:memory:/a\n", V1_MOUNT.format("/").replace("rw,memory", "rw,cpu"), {"a": v1(512, 100)})
    assert host_memory(root).owner == "the host"


def test_more_than_the_limit_leaves_nothing_and_nothing_to_read_is_unknown(tree, tmp_path):
    assert host_memory(tree("0::/\n", V2_MOUNT.format("/"), {"": v2(100, 150)})).left == 0
    assert host_memory(str(tmp_path / "nothing")) is None


def test_measurement_leaves_a_tenth_of_a_limit_and_a_fifth_of_what_is_left():
    assert HostMemory(400, 1000, "the cgroup /a").for_measurement == 300
    assert HostMemory(900, 1000, "the cgroup /a").for_measurement == 720
    assert HostMemory(50, 1000, "the cgroup /a").for_measurement == 0
    assert HostMemory(50, 1000, "the host").for_measurement == 40
