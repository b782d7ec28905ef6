{{- define "memledger.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "memledger.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "memledger.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "memledger.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "memledger.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride -}}
{{- end -}}

{{- define "memledger.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "memledger.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Selector labels of the DaemonSet, the Service and the monitors. They cannot be changed on an existing DaemonSet. */}}
{{- define "memledger.selectorLabels" -}}
app.kubernetes.io/name: {{ include "memledger.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "memledger.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "memledger.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/*
Metadata of an object: dict "root" $ "name" NAME, and optionally "namespace", "labels", "annotations".
*/}}
{{- define "memledger.metadata" -}}
name: {{ .name }}
namespace: {{ default (include "memledger.namespace" .root) .namespace }}
labels:
  {{- $own := include "memledger.labels" .root | fromYaml }}
  {{- toYaml (mergeOverwrite $own (default dict .labels)) | nindent 2 }}
{{- with mergeOverwrite (deepCopy .root.Values.commonAnnotations) (default dict .annotations) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "memledger.image" -}}
{{- $registry := default .Values.image.registry .Values.global.imageRegistry -}}
{{- $name := ternary (printf "%s/%s" $registry .Values.image.repository) .Values.image.repository (ne $registry "") -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" $name .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Security context of the container. The API server rejects privileged together with contradicting fields. */}}
{{- define "memledger.securityContext" -}}
# root with the listed capabilities only: the sockets belong to root, and a capability granted to another user is lost at exec
runAsUser: 0
runAsGroup: 0
runAsNonRoot: false
readOnlyRootFilesystem: true
{{- if .Values.kmsg.enabled }}
privileged: true
{{- else }}
privileged: false
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
  {{- $add := list }}
  {{- if .Values.capabilities.syslog }}{{ $add = append $add "SYSLOG" }}{{ end }}
  {{- if .Values.capabilities.sysPtrace }}{{ $add = append $add "SYS_PTRACE" }}{{ end }}
  {{- with $add }}
  add: {{ toJson . }}
  {{- end }}
{{- with .Values.seccompProfile }}
seccompProfile:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.appArmorProfile }}
appArmorProfile:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with .Values.seLinuxOptions }}
seLinuxOptions:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A probe: the value, or the default if it is empty; nothing if it is null. dict "given" VALUE "default" DICT */}}
{{- define "memledger.probe" -}}
{{- if not (kindIs "invalid" .given) -}}
{{- toYaml (default .default .given) -}}
{{- end -}}
{{- end -}}

{{/*
Relabelings of a target, the same in a ServiceMonitor and a PodMonitor. The operator adds the labels of the pod to every series; with
them each series of the node would end with memledger's pod, and a rule with a range would match two of each.
*/}}
{{- define "memledger.relabelings" -}}
- {targetLabel: job, replacement: memledger}
- {sourceLabels: [__meta_kubernetes_pod_node_name], targetLabel: instance}
- {sourceLabels: [__meta_kubernetes_pod_node_name], targetLabel: node}
- {regex: pod|container|endpoint|service, action: labeldrop}
{{- end -}}

{{/* Scrape settings of both monitors. dict "monitor" VALUES "path" PATH "root" $ */}}
{{- define "memledger.endpoint" -}}
port: metrics
path: {{ .path }}
interval: {{ .monitor.interval }}
{{- with .monitor.scrapeTimeout }}
scrapeTimeout: {{ . }}
{{- end }}
scheme: {{ default (ternary "https" "http" (not (empty (get .root.Values.settings "web.config.file")))) .monitor.scheme }}
{{- with .monitor.tlsConfig }}
tlsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .monitor.basicAuth }}
basicAuth:
  {{- toYaml . | nindent 2 }}
{{- end }}
honorLabels: {{ .monitor.honorLabels }}
relabelings:
  {{- include "memledger.relabelings" . | nindent 2 }}
  {{- with .monitor.relabelings }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .monitor.metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Limits of a monitor that are set. */}}
{{- define "memledger.limits" -}}
{{- range $name := list "sampleLimit" "labelLimit" "labelNameLengthLimit" "labelValueLengthLimit" }}
{{- with get $.monitor $name }}
{{ $name }}: {{ int64 . }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "memledger.telemetryPath" -}}
{{- default "/metrics" (get .Values.settings "web.telemetry-path") -}}
{{- end -}}
