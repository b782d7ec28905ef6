{{/* Access to the node: environment, mounts and volumes, which belong together. */}}

{{/* Path of the CRI socket in the container. */}}
{{- define "memledger.criSocket" -}}
{{- if eq .Values.runtime.mount "Directory" -}}
{{- printf "/host/cri/%s" (base .Values.runtime.socket) -}}
{{- else -}}
/host/cri.sock
{{- end -}}
{{- end -}}

{{- define "memledger.env" -}}
- {name: MEMLEDGER_WEB_LISTEN_ADDRESS, value: ":{{ .Values.port }}"}
- {name: MEMLEDGER_PATH_PROCFS, value: {{ ternary "/host/proc" "/proc" .Values.host.proc }}}
- {name: MEMLEDGER_PATH_CGROUPFS, value: {{ ternary "/host/cgroup" "/sys/fs/cgroup" .Values.host.cgroup }}}
- {name: MEMLEDGER_STATE_PATH, value: /var/lib/memledger}
- {name: MEMLEDGER_REPORTER_DIRECTORY, value: {{ ternary "/run/memledger-reporter" "" (ne .Values.reporter.hostPath "") | quote }}}
{{- if .Values.runtime.enabled }}
- {name: MEMLEDGER_CRI_ENDPOINT, value: {{ include "memledger.criSocket" . }}}
{{- end }}
{{- if .Values.docker.enabled }}
- {name: MEMLEDGER_DOCKER_SOCKET, value: /host/docker.sock}
{{- end }}
{{- if not (or .Values.kmsg.enabled .Values.capabilities.syslog (hasKey .Values.settings "oom.kernel-log")) }}
# a source that is disabled on purpose must not alert
- {name: MEMLEDGER_OOM_KERNEL_LOG, value: "off"}
{{- end }}
{{- with .Values.nvidia.visibleDevices }}
- {name: NVIDIA_VISIBLE_DEVICES, value: {{ quote . }}}
- {name: NVIDIA_DRIVER_CAPABILITIES, value: utility}
{{- end }}
{{- range $key, $value := .Values.settings }}
- name: MEMLEDGER_{{ $key | replace "." "_" | replace "-" "_" | upper }}
  {{- if kindIs "slice" $value }}
  value: {{ join "," $value | quote }}
  {{- else if and (kindIs "float64" $value) (eq $value (floor $value)) }}
  value: {{ int64 $value | quote }}
  {{- else }}
  value: {{ toString $value | quote }}
  {{- end }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "memledger.mounts" -}}
- {name: state, mountPath: /var/lib/memledger}
# the control socket, for verbs in this container: kubectl exec POD -- /memledger why NAME
- {name: run, mountPath: /run/memledger}
{{- if .Values.reporter.hostPath }}
- {name: reporter, mountPath: /run/memledger-reporter}
{{- end }}
{{- if .Values.host.cgroup }}
# cgroup v1 has a mount below for each controller: without "recursive" those would be writable
- {name: cgroup, mountPath: /host/cgroup, readOnly: true, recursiveReadOnly: IfPossible}
{{- end }}
{{- if .Values.host.proc }}
- {name: proc, mountPath: /host/proc, readOnly: true, recursiveReadOnly: IfPossible}
{{- end }}
{{- if .Values.runtime.enabled }}
# read-only applies to the file, not to requests through it
- {name: cri, mountPath: {{ ternary "/host/cri" "/host/cri.sock" (eq .Values.runtime.mount "Directory") }}, readOnly: true}
{{- end }}
{{- if .Values.docker.enabled }}
- {name: docker, mountPath: /host/docker.sock, readOnly: true}
{{- end }}
{{- if .Values.podResources.enabled }}
- {name: pod-resources, mountPath: /var/lib/kubelet/pod-resources, readOnly: true}
{{- end }}
{{- if ne (toString (default "none" (index .Values.settings "container.logs"))) "none" }}
- {name: pod-logs, mountPath: /var/log/pods, readOnly: true}
{{- end }}
{{- if .Values.kmsg.enabled }}
- {name: kmsg, mountPath: /dev/kmsg, readOnly: true}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "memledger.volumes" -}}
- name: run
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
- name: state
  {{- if .Values.state.hostPath }}
  hostPath: {path: {{ .Values.state.hostPath }}, type: DirectoryOrCreate}
  {{- else }}
  emptyDir: {sizeLimit: 256Mi}
  {{- end }}
{{- if .Values.reporter.hostPath }}
- name: reporter
  hostPath: {path: {{ .Values.reporter.hostPath }}, type: DirectoryOrCreate}
{{- end }}
{{- if ne (toString (default "none" (index .Values.settings "container.logs"))) "none" }}
# the logs of containers, for errors of GPU memory in them
- name: pod-logs
  hostPath: {path: /var/log/pods, type: Directory}
{{- end }}
{{- if .Values.host.cgroup }}
- name: cgroup
  hostPath: {path: /sys/fs/cgroup, type: Directory}
{{- end }}
{{- if .Values.host.proc }}
- name: proc
  hostPath: {path: /proc, type: Directory}
{{- end }}
{{- if .Values.runtime.enabled }}
- name: cri
  {{- if eq .Values.runtime.mount "Directory" }}
  hostPath: {path: {{ dir .Values.runtime.socket }}, type: Directory}
  {{- else }}
  hostPath: {path: {{ .Values.runtime.socket }}, type: Socket}
  {{- end }}
{{- end }}
{{- if .Values.docker.enabled }}
- name: docker
  hostPath: {path: {{ .Values.docker.socket }}, type: Socket}
{{- end }}
{{- if .Values.podResources.enabled }}
- name: pod-resources
  hostPath: {path: {{ .Values.podResources.path }}, type: Directory}
{{- end }}
{{- if .Values.kmsg.enabled }}
- name: kmsg
  hostPath: {path: /dev/kmsg, type: CharDevice}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
