"""Checks that invalid values are rejected, with a message that names the value and the reason: `refusals.py`.

One row: the values (JSON, as for `--set-json`), and a part of the message.
"""
import re
import sys

import chart

REJECTIONS = [
    # wrong type
    ('service.port="abc"', "at '/service/port': got string, want integer"),
    ("service.port=0", "at '/service/port': minimum: got 0, want 1"),
    ("port=70000", "at '/port': maximum: got 70,000, want 65,535"),
    ('hostPID="yes"', "at '/hostPID': got string, want boolean"),
    ('capabilities={"syslog":"true"}', "at '/capabilities/syslog': got string, want boolean"),
    ("tolerations={}", "at '/tolerations': got object, want array"),
    ('nodeSelector={"gpu":true}', "at '/nodeSelector/gpu': got boolean, want string"),
    # unknown
    ("hostPid=true", "additional properties 'hostPid' not allowed"),
    ('capabilities={"sys_ptrace":true}', "additional properties 'sys_ptrace' not allowed"),
    ("kmsg.enable=true", "at '/kmsg': additional properties 'enable' not allowed"),
    ("privileged=true", "additional properties 'privileged' not allowed"),
    ('settings={"sample.intervall":"2s"}', "additional properties 'sample.intervall' not allowed"),
    ('settings={"path.procfs":"/x"}', "additional properties 'path.procfs' not allowed"),
    ("updateStrategy.maxSurge=1", "additional properties 'maxSurge' not allowed"),
    # enumerations
    ('image.pullPolicy="Sometimes"', "at '/image/pullPolicy': value must be one of 'Always', 'IfNotPresent', 'Never'"),
    ('runtime.mount="directory"', "at '/runtime/mount': value must be one of 'Socket', 'Directory'"),
    ('seccompProfile.type="unconfined"', "at '/seccompProfile/type': value must be one of"),
    ('appArmorProfile={"type":"Localhost"}', "missing property 'localhostProfile'"),
    ('service.type="ExternalName"', "at '/service/type': value must be one of"),
    ('settings={"log.level":"loud"}', "at '/settings/log.level': value must be one of 'debug', 'info', 'warn', 'error'"),
    ('settings={"oom.kernel-log":false}', "at '/settings/oom.kernel-log': value must be one of 'auto', 'device', 'syslog', 'off'"),
    # patterns
    ('runtime.socket="/"', "at '/runtime/socket': '/' does not match pattern"),
    ('runtime.socket="containerd.sock"', "at '/runtime/socket': 'containerd.sock' does not match pattern"),
    ('state.hostPath="/"', "at '/state/hostPath'"),
    ('state.hostPath="/var/../.."', "at '/state/hostPath'"),
    ('podResources.path=""', "at '/podResources/path': '' does not match pattern"),
    ('image.digest="latest"', "at '/image/digest': 'latest' does not match pattern"),
    ('image.repository="memledger:1"', "at '/image/repository': 'memledger:1' does not match pattern"),
    ('settings={"sample.interval":"2 s"}', "at '/settings/sample.interval': '2 s' does not match pattern"),
    ('serviceMonitor.interval="often"', "at '/serviceMonitor/interval': 'often' does not match pattern"),
    ('updateStrategy.maxUnavailable="0%"', "at '/updateStrategy/maxUnavailable'"),
    ('extraArgs=["serve"]', "at '/extraArgs/0': 'serve' does not match pattern"),
    ('prometheusRule.severities={"MemledgerGpuXid":"urgent"}', "value must be one of 'critical', 'warning', 'info', 'none'"),
    ('prometheusRule.alerts={"MemledgerGpuXid":{"for":"soon"}}', "does not match pattern"),
    ('prometheusRule.alerts={"MemledgerGpuXid":{"severity":"info"}}', "additional properties 'severity' not allowed"),
    # invalid combinations
    ('prometheusRule.enabled=true,prometheusRule.alerts={"MemledgerGpuIdle":{"for":"1h"}}', "unknown alert MemledgerGpuIdle"),
    ('prometheusRule.enabled=true,prometheusRule.alerts={"MemledgerGpuLost":{"threshold":1}}', "is not one comparison with a threshold"),
    ('prometheusRule.enabled=true,prometheusRule.alerts={"MemledgerGpuLost":{"thresholds":{"memledger_gpus_visible_total":1}}}', "has not one comparison of memledger_gpus_visible_total"),
    ('prometheusRule.enabled=true,prometheusRule.alerts={"MemledgerContainerMemoryLeakSuspected":{"thresholds":{"memledger_container_memory_rss_bytes":1}}}', "has not one comparison of memledger_container_memory_rss_bytes"),
    ('prometheusRule.alerts={"MemledgerGpuXid":{"thresholds":{".*":1}}}', "does not match pattern"),
    ("serviceMonitor.enabled=true,podMonitor.enabled=true", "every node would be scraped twice; set one of them"),
    ("serviceMonitor.enabled=true,service.enabled=false", "serviceMonitor.enabled needs service.enabled"),
    ("networkPolicy.enabled=true,hostNetwork=true", "networkPolicy.enabled does nothing with hostNetwork"),
    ('kmsg.enabled=true,appArmorProfile={"type":"Unconfined"}', "a privileged container has no profile"),
    ('service.headless=true,service.type="NodePort"', "service.headless needs service.type ClusterIP"),
    ('serviceAccount={"create":false,"annotations":{"a":"b"}}', "set serviceAccount.create"),
    ('extraVolumes=[{"name":"root","hostPath":{"path":"/usr/.."}}]', "volume root mounts / of the node"),
    ('extraEnv=[{"name":"MEMLEDGER_PATH_PROCFS","value":"/p"}]', "extraEnv: MEMLEDGER_PATH_PROCFS is set by the chart"),
    ('settings={"web.config.file":"/etc/memledger/web.yml"}', "/etc/memledger/web.yml is not inside a mounted directory; mount the directory"),
    ('extraArgs=["--web.config.file=/w.yml"]', "the probes cannot see --web.config.file; set settings.web.config.file"),
    ('extraEnv=[{"name":"MEMLEDGER_WEB_CONFIG_FILE","value":"/w.yml"}]', "set settings.web.config.file"),
    ('settings={"otlp.endpoint":"http://c:4318"},networkPolicy.enabled=true', "set networkPolicy.egress to the collector"),
    ('extraEnv=[{"name":"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT","value":"http://c"}],networkPolicy.enabled=true', "set networkPolicy.egress"),
    ('prometheusRule={"enabled":true,"disabledAlerts":["MemledgerGpuLos"]}', "unknown alert MemledgerGpuLos; use NAME or NAME/SEVERITY of: MemledgerCollectorFailing, MemledgerContainer"),
]  # fmt: skip


def main():
    wrong = 0
    for given, wanted in REJECTIONS:
        try:
            # commas between values, not within JSON
            chart.render(settings=re.split(r",(?=[\w.]+=)", given))
            message = "no error: it was rendered"
        except chart.Rejected as refusal:
            message = str(refusal)
        if wanted not in message:
            wrong += 1
            print(f"{given}: expected {wanted!r}, got {message}")
    print(f"{len(REJECTIONS)} invalid values, {wrong} not rejected as expected")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
