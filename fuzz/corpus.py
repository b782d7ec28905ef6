"""Writes the initial corpus of the fuzzer: the recorded hosts, and the samples in the tests of the parsers.

Each `make fuzz` writes it again beside the inputs that the fuzzer found; files are named after the hash of their contents, so there
are no duplicates. A sample must have a valid form, not meaningful values.

usage: corpus.py FOLDER
"""

import hashlib
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", '"': '"', "\\": "\\"}


def literals(*folders):
    """Yields the string literals in Rust sources, unescaped."""
    for folder in folders:
        place = ROOT / folder
        for source in sorted(place.rglob("*.rs")) if place.is_dir() else [place]:
            for text in re.findall(r'"((?:[^"\\]|\\.)*)"', source.read_text(), re.S):
                text = re.sub(r"\\\n\s*", "", text)
                yield re.sub(r"\\(.)", lambda found: ESCAPES.get(found[1], found[0]), text).encode()


def recorded():
    """Yields the files of the recorded hosts."""
    for host in sorted((ROOT / "tests/hosts").glob("*.jsonl")):
        for line in host.read_text().splitlines():
            record = json.loads(line)
            if "text" in record:
                yield record["text"].encode()
            yield record["path"].encode()


def kernel_logs():
    """Yields the recorded kernel logs, without the large one."""
    for log in sorted((ROOT / "tests/kernel-logs").iterdir()):
        text = log.read_bytes()
        if len(text) < 20_000:
            yield text


def message(*fields):
    """Returns a protobuf message of texts and messages, each shorter than 128 bytes."""
    return b"".join(bytes([number << 3 | 2, len(value)]) + value for number, value in fields)


def answers():
    """Yields responses of runtimes, in the forms that memledger reads."""
    inspected = {"Id": "a", "Name": "/train", "State": {"Running": True, "Pid": 7, "StartedAt": "2026-11-21T03:25:01.5Z", "ExitCode": 137,
                 "OOMKilled": True, "FinishedAt": "2026-11-21T05:25:01+02:00"}, "Config": {"Image": "i", "Labels":
                 {"com.docker.compose.project": "p"}, "Env": ["BATCH_SIZE=3", "A=b"]}, "HostConfig": {"DeviceRequests": [{"Driver": "nvidia",
                 "Count": 2, "DeviceIDs": ["GPU-a"], "Capabilities": [["gpu"]]}]}}
    event = {"Action": "kill", "Actor": {"ID": "a", "Attributes": {"signal": "SIGRTMIN+3", "name": "train", "exitCode": "137"}},
             "time": 1795231501, "timeNano": 1795231501500000000}
    listed = [{"Id": "a", "Names": ["/b/a", "/train"], "Image": "i", "State": "running", "Labels": {"a": "b"}}]
    for answer in (inspected, {**inspected, "State": {**inspected["State"], "Running": False}}, event, listed):
        yield json.dumps(answer).encode()
    pair = message((1, b"app"), (2, b"train"))
    who = message((1, b"train"), (2, b"uid"), (3, b"ml"))
    yield message((1, message((1, b"a"), (2, who), (5, pair), (6, pair))))
    yield message((1, message((1, b"a"), (2, b"b"), (3, message((1, b"main"))), (4, message((1, b"image"))), (8, pair))))
    info = b'{"pid":7,"runtimeSpec":{"process":{"env":["BATCH_SIZE=3"]}}}'
    yield message((1, message((8, message((1, b"image"))))), (2, message((1, b"info"), (2, info))))
    yield message((1, message((1, b"p"), (2, b"ml"), (3, message((1, b"c"), (2, message((1, b"nvidia.com/gpu"), (2, b"GPU-b::0"))))))))


def rows():
    """Yields rows of the store."""
    whose = {"container_name": "train", "container_id": "c", "started": 10.0}
    before = {"samples": [{"at": 90.0, "usage_bytes": 9, "unreclaimable_bytes": 8, "limit_bytes": 10, "shm_used_bytes": 2, "shm_size_bytes": 2}],
              "roles": [{"role": "dataloader_worker", "processes": 4, "rss_bytes": 8, "pss_bytes": 7}], "settings": [["num_workers", "4"]],
              "holders": [{"name": "b", "unreclaimable_bytes": 5}], "host_total_bytes": 100, "host_available_bytes": 3}
    kill = {"type": "oom_kill", "id": 1, "at": 100.0, "boot_id": "b", "kernel_usec": 5, "pid": 7, "process": "python", "owner": "container",
            **whose, "victim": "child", "scope": "container", "anon_bytes": 5, "limit_cgroup": "/docker/c", "limit_bytes": 10,
            "evidence": [{"source": "kmsg", "text": "Killed process 7"}], "before": before}
    end = {"type": "exit", "id": 2, "at": 101.0, **whose, "reason": "error", "exit_code": 137, "stop_signals": [15, None], "oom_kills": 1,
           "duration_seconds": 91.0, "evidence": [], "before": before}
    error = {"type": "gpu_error", "id": 3, "at": 99.0, "gpu": "0", "gpu_uuid": "GPU-a", "xid": 79, **whose, "source": "kmsg"}
    stories = [[kill, end], [{**kill, "scope": "host", "victim": "main"}], [error, end], [{**end, "exit_code": 135, "reason": "signal"}]]
    for story in stories + [[{**end, "reason": reason}] for reason in ("stopped", "killed", "oom_host", "host_restart", "unknown", "completed")]:
        yield "\n".join(map(json.dumps, story)).encode()


def main():
    parsers = list(literals("src/parse"))
    seeds = {
        "kernel_files": [*recorded(), *parsers],
        "kernel_log": [*kernel_logs()] + parsers + [b"6,1,1001,-;" + text for text in parsers] + [b"<3>[    1.001001] " + text + b"\n" for text in parsers],
        "runtimes": list(answers()),
        "settings": list(literals("src/config", "tests/web", "tests/otlp")),
        "ledger": list(rows()),
        "network": list(literals("src/http", "src/otlp", "src/reporter")),
    }
    folder = pathlib.Path(sys.argv[1])
    for target, texts in seeds.items():
        (folder / target).mkdir(parents=True, exist_ok=True)
        for text in texts:
            (folder / target / hashlib.sha1(text).hexdigest()).write_bytes(text[:16384])
        print(f"corpus: {target} starts with {len(set(texts))} samples")


main()
