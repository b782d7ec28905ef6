"""How much host memory this process may still take: the least that the host and each cgroup above the process have left.

In a container /proc/meminfo is the host's. The limit is that of a cgroup, version 1 or 2, of the container or of one above it; what its
processes hold counts against it, but for page cache, which the kernel drops first.
"""

import os
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

MIB = 1 << 20
#: Files of a limit, of what is charged, and of what is charged for the kernel, in version 2 and 1.
LIMITS = {2: ("memory.max", "memory.high"), 1: ("memory.limit_in_bytes",)}
USAGE = {2: "memory.current", 1: "memory.usage_in_bytes"}
#: Higher ones are none: version 1 writes "no limit" as nearly 2**63.
NO_LIMIT = 1 << 60
#: Share of a limit that is never used up by a measurement, and share of what is left that it takes at most.
RESERVED_SHARE, USED_SHARE = 0.1, 0.8


class HostMemory(NamedTuple):
    """Memory that a limit leaves, in bytes."""

    left: int
    limit: int
    #: Whose limit it is, such as "the cgroup /docker/ab12"; "the host" without one.
    owner: str

    def __str__(self) -> str:
        return f"{self.left / MIB:.2f} MB left of the {self.limit / MIB:.2f} MB of {self.owner}"

    @property
    def for_measurement(self) -> int:
        """What a measurement may take of it, so that a process that grows meanwhile finds some."""
        reserved = 0.0 if self.owner == "the host" else RESERVED_SHARE * self.limit
        return max(0, int(min(USED_SHARE * self.left, self.left - reserved)))


def host_memory(root: str = "/") -> Optional[HostMemory]:
    """Returns the memory of the limit that leaves the least; None where nothing can be read. ``root`` is the directory with proc and sys."""
    every = [found for found in (_of_host(root), *_of_cgroups(root)) if found is not None]
    return min(every, key=lambda found: found.left) if every else None


def _of_host(root: str) -> Optional[HostMemory]:
    found = _numbers(os.path.join(root, "proc/meminfo"))
    total, available = found.get("MemTotal:"), found.get("MemAvailable:")
    return HostMemory(available * 1024, total * 1024, "the host") if total is not None and available is not None else None


def _of_cgroups(root: str) -> Iterator[HostMemory]:
    for version, mount, inside in _memory_cgroups(root):
        lowest = NO_LIMIT
        path = inside
        while True:
            directory = os.path.join(root, mount.lstrip("/"), path.lstrip("/"))
            limit, held = _limit(directory, version), _unreclaimable(directory, version)
            if limit is not None and held is not None:
                yield HostMemory(max(0, limit - held), limit, f"the cgroup {_name(mount, path)}")
                lowest = min(lowest, limit)
            if path in ("", "/"):
                break
            path = os.path.dirname(path)
        # a limit above what is mounted here is in no file but this one; what others hold below it is not known
        directory = os.path.join(root, mount.lstrip("/"), inside.lstrip("/"))
        above = _numbers(os.path.join(directory, "memory.stat")).get("hierarchical_memory_limit") if version == 1 else None
        held = _unreclaimable(directory, version)
        if above is not None and held is not None and above < lowest:
            yield HostMemory(max(0, above - held), above, f"a cgroup above the one {_name(mount, inside)}")


def _name(mount: str, path: str) -> str:
    return path if path not in ("", "/") else f"at {mount}"


def _memory_cgroups(root: str) -> List[Tuple[int, str, str]]:
    """Returns version and mount point of each hierarchy that may limit memory, and the path of this process below it."""
    paths: Dict[int, str] = {}
    for line in _lines(os.path.join(root, "proc/self/cgroup")):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            paths[1] = path
        elif number == "0" and not controllers:
            paths[2] = path
    found = []
    for line in _lines(os.path.join(root, "proc/self/mountinfo")):
        fields, _, of_file_system = line.partition(" - ")
        mounted, kind = fields.split(" "), of_file_system.split(" ")
        if len(mounted) < 5 or len(kind) < 3:
            continue
        version = {"cgroup2": 2, "cgroup": 1}.get(kind[0])
        if version in paths and (version == 2 or "memory" in kind[2].split(",")):
            mounted_root, mount = _unescaped(mounted[3]), _unescaped(mounted[4])
            found.append((version, mount, _below(paths[version], mounted_root)))
    return found


def _below(path: str, mounted_root: str) -> str:
    """Returns a path below what is mounted: a container has its own cgroup at the mount point, with the host's path or in a namespace."""
    mounted_root = mounted_root.rstrip("/")
    if mounted_root and not (path + "/").startswith(mounted_root + "/"):
        return "/"
    inside = path[len(mounted_root) :] or "/"
    return "/" if ".." in inside.split("/") else inside  # outside of the namespace


def _unescaped(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def _limit(directory: str, version: int) -> Optional[int]:
    every = [_number(os.path.join(directory, name)) for name in LIMITS[version]]
    limits = [limit for limit in every if limit is not None and limit < NO_LIMIT]
    return min(limits) if limits else None


def _unreclaimable(directory: str, version: int) -> Optional[int]:
    """Returns what the kernel cannot drop: anonymous and shared memory, and its own. All that is charged, where that is not known."""
    stat, charged = _numbers(os.path.join(directory, "memory.stat")), _number(os.path.join(directory, USAGE[version]))
    if version == 1:
        kernel: Optional[int] = _number(os.path.join(directory, "memory.kmem.usage_in_bytes")) or 0
        names = ("total_rss", "total_shmem")
    else:
        of_kernel = [stat.get(name) for name in ("kernel", "slab_reclaimable")]
        older = ("slab_unreclaimable", "kernel_stack", "pagetables", "percpu")
        kernel = sum(stat.get(name, 0) for name in older) if None in of_kernel else of_kernel[0] - of_kernel[1]  # type: ignore[operator]
        kernel += stat.get("sock", 0)
        names = ("anon", "shmem")
    amounts = [stat.get(name) for name in names]
    if None in amounts:
        return charged
    held = sum(amounts) + max(0, kernel)  # type: ignore[arg-type]
    return held if charged is None else min(held, charged)


def _number(path: str) -> Optional[int]:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None  # "max" is no limit


def _numbers(path: str) -> Dict[str, int]:
    every: List[Any] = [line.split() for line in _lines(path)]
    return {fields[0]: int(fields[1]) for fields in every if len(fields) > 1 and fields[1].isdigit()}


def _lines(path: str) -> List[str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().splitlines()
    except OSError:  # gone, or not of this kernel
        return []
