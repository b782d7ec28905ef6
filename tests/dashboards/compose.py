"""Checks the files of deploy/ for Docker Compose and Grafana against each other: `compose.py`, or `compose.py flags`.

With `flags` it prints, one a line, what `docker run` takes to run memledger as services.yml has it (but the published
port, the devices of a GPU and the network), so that a test runs the image just so.

Not here: whether `docker compose` takes the files. It cannot be had where the tests run.
"""
import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
HOST_PATHS = {"/sys/fs/cgroup", "/var/run/docker.sock", "/dev/null"}
# of a service, those that `docker run` takes as they are
FLAGS = {"pid": "--pid", "cgroup": "--cgroupns", "mem_limit": "--memory"}


def read(path):
    return yaml.safe_load(path.read_text())


def services(path):
    """The services of a file, with what they extend laid under them."""
    for name, service in read(path)["services"].items():
        base = service.pop("extends", None)
        yield name, (read(path.parent / base["file"])["services"][base["service"]] if base else {}) | service


def judge(path):
    """The complaints about one file."""
    declared = set(read(path).get("volumes", {}))
    for name, service in services(path):
        image = service.get("image", "memledger:local")
        if ":" not in image or image.endswith(":latest"):
            yield f"{name}: the image {image} is not pinned"
        for port in service.get("ports", []):
            if not port.startswith("127.0.0.1:"):
                yield f"{name}: port {port} is open to everybody"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                if not (DEPLOY / source).exists():
                    yield f"{name}: {source} is not there"
            elif source.startswith("/"):
                if source not in HOST_PATHS:
                    yield f"{name}: it mounts {source} of the host"
            elif source not in declared:
                yield f"{name}: volume {source} is not declared"
        if name != "train" and "cap_drop" not in service and "build" not in service and "image" in service:
            yield f"{name}: it keeps capabilities that it does not need"
        if name in ("prometheus", "alertmanager", "grafana") and service.get("profiles") != ["monitoring"]:
            yield f"{name}: it starts without the profile monitoring"


def provisioning():
    """The complaints about what Grafana and Prometheus are given."""
    grafana = dict(services(DEPLOY / "docker-compose.yml"))["grafana"]
    if grafana["environment"].get("GF_AUTH_ANONYMOUS_ENABLED") != "false":
        yield "grafana: anybody may look without a password"
    inside = {volume.split(":")[1]: volume.split(":")[0] for volume in grafana["volumes"]}
    provider = read(DEPLOY / "grafana/provisioning/dashboards/memledger.yml")["providers"][0]
    folder = inside.get(provider["options"]["path"])
    if folder is None or (DEPLOY / folder).resolve() != ROOT / "dashboards":
        yield f"grafana: the dashboards are looked for in {provider['options']['path']}, which is not dashboards/"
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    if not (ROOT / "dashboards" / home.name).exists() or str(home.parent) != provider["options"]["path"]:
        yield f"grafana: there is no home dashboard {home}"
    source = read(DEPLOY / "grafana/provisioning/datasources/prometheus.yml")["datasources"][0]
    demo = read(DEPLOY / "demo/grafana.yml")["datasources"][0]
    port = re.search(r"(?m)^PORT = (\d+)$", (DEPLOY / "demo/monitoring.py").read_text())[1]
    if demo["url"] != f"http://127.0.0.1:{port}" or demo["uid"] != source["uid"]:
        yield f"demo/grafana.yml: {demo['url']} is not where the demo's Prometheus listens, or the uid is another"
    known = set(dict(services(DEPLOY / "docker-compose.yml")))
    addresses = [source["url"].split("//")[1]]
    prometheus = read(DEPLOY / "prometheus/prometheus.yml")
    for group in [*prometheus["alerting"]["alertmanagers"], *prometheus["scrape_configs"]]:
        addresses += [target for static in group["static_configs"] for target in static["targets"]]
    for address in addresses:
        if address.split(":")[0] not in known | {"localhost"}:
            yield f"nothing is called {address}"


def unit():
    """The complaints about the systemd unit: a setting that takes away what memledger reads."""
    lines = (DEPLOY / "systemd/memledger.service").read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    # ProtectClock adds a DeviceAllow, and with one of those all other devices are closed before systemd 253
    for name in ("PrivateDevices", "DeviceAllow", "DevicePolicy", "ProtectClock", "ProtectKernelLogs", "ProtectProc", "ProcSubset", "PrivatePIDs", "PrivateUsers", "InaccessiblePaths"):
        if name in settings:
            yield f"memledger.service: {name} closes what it reads"
    if "ProtectSystem" in settings and settings.get("StateDirectory") != "memledger":
        yield "memledger.service: the state directory cannot be written"


def flags():
    """memledger of services.yml as flags of `docker run`."""
    service = dict(services(DEPLOY / "services.yml"))["memledger"]
    yield from (f"{flag}={service[key]}" for key, flag in FLAGS.items())
    yield from ["--read-only"] * service["read_only"]
    yield from (f"--security-opt={each}" for each in service["security_opt"])
    yield from (f"--cap-drop={each}" for each in service["cap_drop"])
    yield from (f"--cap-add={each}" for each in service["cap_add"])
    yield from (f"--device={each}" for each in service["devices"])
    # the named volume would stay after the test; the image makes one of no name
    yield from (f"--volume={each}" for each in service["volumes"] if each.startswith("/"))


def main():
    if sys.argv[1:] == ["flags"]:
        print("\n".join(flags()))
        return
    complaints = [f"{path.name}: {what}" for path in sorted(DEPLOY.glob("*.yml")) if path.name != "services.yml" for what in judge(path)]
    complaints += provisioning()
    complaints += unit()
    for complaint in complaints:
        print(complaint)
    sys.exit(bool(complaints))


if __name__ == "__main__":
    main()
