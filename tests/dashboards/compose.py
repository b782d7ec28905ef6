"""Checks the files of deploy/ for Docker Compose and Grafana against each other: `compose.py`, or `compose.py flags`.

With `flags` it prints, one per line, the options of `docker run` that run memledger as services.yml does (except the published
port, GPU devices and the network), so that a test runs the image in the same way.

Not here: whether `docker compose` accepts the files; tests/packages/test_image.py starts them.
"""
import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
HOST_PATHS = {"/run/memledger-reporter", "/var/lib/memledger-runs", "/sys/fs/cgroup", "/var/run/docker.sock", "/dev/null"}
DEFAULT = re.compile(r"\$\{\w+:-([^}]*)\}")  # of a variable that Compose fills in
# keys of a service that `docker run` accepts unchanged
FLAGS = {"pid": "--pid", "cgroup": "--cgroupns", "mem_limit": "--memory"}


def read(path):
    return yaml.safe_load(path.read_text())


def services(path):
    """Yields the services of a file, merged over the services that they extend."""
    for name, service in read(path)["services"].items():
        base = service.pop("extends", None)
        yield name, (read(path.parent / base["file"])["services"][base["service"]] if base else {}) | service


def judge(path):
    """Yields the errors in one file."""
    declared = set(read(path).get("volumes", {}))
    for name, service in services(path):
        image = service.get("image", "memledger:local")
        if ":" not in image or image.endswith(":latest"):
            yield f"{name}: the image {image} is not pinned"
        for port in service.get("ports", []):
            if not DEFAULT.sub(r"\1", port).startswith("127.0.0.1:"):
                yield f"{name}: port {port} is published on all addresses"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                if not (DEPLOY / source).exists():
                    yield f"{name}: {source} does not exist"
            elif source.startswith("/"):
                if source not in HOST_PATHS:
                    yield f"{name}: mounts {source} of the host"
            elif source not in declared:
                yield f"{name}: volume {source} is not declared"
        if name != "train" and "cap_drop" not in service and "build" not in service and "image" in service:
            yield f"{name}: keeps capabilities that it does not need"
        if name in ("prometheus", "alertmanager", "grafana") and service.get("profiles") != ["monitoring"]:
            yield f"{name}: starts without the profile monitoring"


def provisioning():
    """Yields errors in the configuration of Grafana and Prometheus."""
    grafana = dict(services(DEPLOY / "docker-compose.yml"))["grafana"]
    if grafana["environment"].get("GF_AUTH_ANONYMOUS_ENABLED") != "false":
        yield "grafana: anonymous access is not disabled"
    inside = {volume.split(":")[1]: volume.split(":")[0] for volume in grafana["volumes"]}
    provider = read(DEPLOY / "grafana/provisioning/dashboards/memledger.yml")["providers"][0]
    folder = inside.get(provider["options"]["path"])
    if folder is None or (DEPLOY / folder).resolve() != ROOT / "dashboards":
        yield f"grafana: the dashboards are read from {provider['options']['path']}, which is not dashboards/"
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    if not (ROOT / "dashboards" / home.name).exists() or str(home.parent) != provider["options"]["path"]:
        yield f"grafana: missing home dashboard {home}"
    source = read(DEPLOY / "grafana/provisioning/datasources/prometheus.yml")["datasources"][0]
    demo = read(DEPLOY / "demo/grafana.yml")["datasources"][0]
    port = re.search(r"(?m)^PORT = (\d+)$", (DEPLOY / "demo/monitoring.py").read_text())[1]
    if demo["url"] != f"http://127.0.0.1:{port}" or demo["uid"] != source["uid"]:
        yield f"demo/grafana.yml: {demo['url']} is not the address of the demo's Prometheus, or the uid differs"
    known = set(dict(services(DEPLOY / "docker-compose.yml")))
    addresses = [source["url"].split("//")[1]]
    prometheus = read(DEPLOY / "prometheus/prometheus.yml")
    for group in [*prometheus["alerting"]["alertmanagers"], *prometheus["scrape_configs"]]:
        addresses += [target for static in group["static_configs"] for target in static["targets"]]
    for address in addresses:
        if address.split(":")[0] not in known | {"localhost"}:
            yield f"no service named {address}"


def unit():
    """Yields errors in the systemd unit: settings that block what memledger reads."""
    lines = (DEPLOY / "systemd/memledger.service").read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    # ProtectClock adds a DeviceAllow, which blocks all other devices before systemd 253.
    for name in ("PrivateDevices", "DeviceAllow", "DevicePolicy", "ProtectClock", "ProtectKernelLogs", "ProtectProc", "ProcSubset", "PrivatePIDs", "PrivateUsers", "InaccessiblePaths"):
        if name in settings:
            yield f"memledger.service: {name} blocks what memledger reads"
    if "ProtectSystem" in settings and settings.get("StateDirectory") != "memledger":
        yield "memledger.service: the state directory is not writable"


def flags():
    """Yields the memledger service of services.yml as options of `docker run`."""
    service = dict(services(DEPLOY / "services.yml"))["memledger"]
    yield from (f"{flag}={service[key]}" for key, flag in FLAGS.items())
    yield from ["--read-only"] * service["read_only"]
    yield from (f"--security-opt={each}" for each in service["security_opt"])
    yield from (f"--cap-drop={each}" for each in service["cap_drop"])
    yield from (f"--cap-add={each}" for each in service["cap_add"])
    yield from (f"--device={each}" for each in service["devices"])
    yield from (f"--tmpfs={each}" for each in service["tmpfs"])
    # The named volume would remain after the test; the image creates an anonymous one.
    yield from (f"--volume={each}" for each in service["volumes"] if each.startswith("/"))


def main():
    if sys.argv[1:] == ["flags"]:
        print("\n".join(flags()))
        return
    errors = [f"{path.name}: {what}" for path in sorted(DEPLOY.glob("*.yml")) if path.name != "services.yml" for what in judge(path)]
    errors += provisioning()
    errors += unit()
    for error in errors:
        print(error)
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
