"""Converts the chart's container to options of `docker run`: `container.py [VALUE...]`, values as for `--set-json`.

Prints the options, one per line, then `--`, then the container's arguments. Both have the same effect for: capabilities, user,
root, namespaces, mounts, environment, the default seccomp profile. Not here: the cgroup namespace, which is private to a pod on
cgroup v2; AppArmor and SELinux profiles.
"""
import sys

import chart


def flags(pod, container):
    context = container["securityContext"]
    yield from ["--pid=host"] * pod["hostPID"]
    yield f"--user={context['runAsUser']}:{context['runAsGroup']}"
    yield from ["--read-only"] * context["readOnlyRootFilesystem"]
    if context["privileged"]:
        # only what memledger uses of it: test machines may not start privileged containers
        yield from ("--device=/dev/kmsg:/dev/kmsg:r", "--cap-drop=ALL", "--cap-add=SYSLOG", "--cap-add=SYS_PTRACE")
    if context.get("allowPrivilegeEscalation") is False:
        yield "--security-opt=no-new-privileges:true"
    capabilities = context.get("capabilities", {})
    yield from (f"--cap-drop={each}" for each in capabilities.get("drop", []))
    yield from (f"--cap-add={each}" for each in capabilities.get("add", []))
    yield from (f"--env={each['name']}={each['value']}" for each in container["env"])
    yield "--env=KUBERNETES_SERVICE_HOST=192.0.2.1"  # set in every pod; doctor detects Kubernetes by it
    limit = container["resources"]["limits"]["memory"]
    yield f"--memory={limit.removesuffix('Mi')}m"
    volumes = {each["name"]: each for each in pod["volumes"]}
    for mount in container["volumeMounts"]:
        if mount["mountPath"] == "/dev/kmsg":
            continue  # passed as a device
        volume = volumes[mount["name"]]
        if "hostPath" in volume:
            yield f"--volume={volume['hostPath']['path']}:{mount['mountPath']}" + ":ro" * mount.get("readOnly", False)
        else:
            yield f"--volume={mount['mountPath']}"


def main():
    # there is no kubelet here
    found = chart.objects(chart.render(settings=["podResources.enabled=false", *sys.argv[1:]]))
    container = chart.container(found)
    print("\n".join([*flags(chart.pod(found), container), "--", *container["args"]]))


if __name__ == "__main__":
    main()
