"""The chart's container as flags of `docker run`: `container.py [VALUE...]`, values as `--set-json` takes them.

Prints the flags, one a line, then `--`, then the container's arguments. What a runtime makes of a pod and Docker of flags is
the same for all that is here: capabilities, user, root, namespaces, mounts, environment, seccomp's default. Not here: the
cgroup namespace, which a pod has of its own on cgroup v2; profiles of AppArmor and SELinux.
"""
import sys

import chart


def flags(pod, container):
    context = container["securityContext"]
    yield from ["--pid=host"] * pod["hostPID"]
    yield f"--user={context['runAsUser']}:{context['runAsGroup']}"
    yield from ["--read-only"] * context["readOnlyRootFilesystem"]
    if context["privileged"]:
        # what memledger uses of it: the machines that test may not start privileged containers
        yield from ("--device=/dev/kmsg:/dev/kmsg:r", "--cap-drop=ALL", "--cap-add=SYSLOG", "--cap-add=SYS_PTRACE")
    if context.get("allowPrivilegeEscalation") is False:
        yield "--security-opt=no-new-privileges:true"
    capabilities = context.get("capabilities", {})
    yield from (f"--cap-drop={each}" for each in capabilities.get("drop", []))
    yield from (f"--cap-add={each}" for each in capabilities.get("add", []))
    yield from (f"--env={each['name']}={each['value']}" for each in container["env"])
    yield "--env=KUBERNETES_SERVICE_HOST=192.0.2.1"  # which every pod has; doctor knows by it where it is
    limit = container["resources"]["limits"]["memory"]
    yield f"--memory={limit.removesuffix('Mi')}m"
    volumes = {each["name"]: each for each in pod["volumes"]}
    for mount in container["volumeMounts"]:
        if mount["mountPath"] == "/dev/kmsg":
            continue  # given as a device
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
