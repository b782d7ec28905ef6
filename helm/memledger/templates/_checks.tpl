{{/*
Values that are right each by itself and wrong together, refused with what to do. What one value alone must look like is in
values.schema.json.
*/}}
{{- define "memledger.check" -}}
{{- $v := .Values -}}
{{- if and $v.serviceMonitor.enabled $v.podMonitor.enabled -}}
{{- fail "serviceMonitor.enabled and podMonitor.enabled: every node would be scraped twice; set one of them" -}}
{{- end -}}
{{- if and $v.serviceMonitor.enabled (not $v.service.enabled) -}}
{{- fail "serviceMonitor.enabled needs service.enabled; without a Service set podMonitor.enabled" -}}
{{- end -}}
{{- if and $v.networkPolicy.enabled $v.hostNetwork -}}
{{- fail "networkPolicy.enabled does nothing with hostNetwork: a NetworkPolicy does not hold for the node's own network; unset one of them" -}}
{{- end -}}
{{- if and $v.kmsg.enabled $v.appArmorProfile -}}
{{- fail "appArmorProfile has no effect with kmsg.enabled: a privileged container has no profile; unset one of them" -}}
{{- end -}}
{{- if and $v.service.headless (ne $v.service.type "ClusterIP") -}}
{{- fail "service.headless needs service.type ClusterIP" -}}
{{- end -}}
{{- if and (not $v.serviceAccount.create) $v.serviceAccount.annotations -}}
{{- fail "serviceAccount.annotations are of an account that the chart makes: set serviceAccount.create" -}}
{{- end -}}
{{- range $v.extraVolumes -}}
{{- $path := dig "hostPath" "path" "" . -}}
{{- if and $path (eq (clean $path) "/") -}}
{{- fail (printf "extraVolumes: volume %s mounts the whole / of the node; mount the folder that is needed" .name) -}}
{{- end -}}
{{- end -}}
{{- range $v.extraEnv -}}
{{- if has .name (list "MEMLEDGER_PATH_PROCFS" "MEMLEDGER_PATH_CGROUPFS" "MEMLEDGER_STATE_PATH" "MEMLEDGER_WEB_LISTEN_ADDRESS" "MEMLEDGER_CRI_ENDPOINT" "MEMLEDGER_DOCKER_SOCKET") -}}
{{- fail (printf "extraEnv: %s is set by the chart; its value is one of port, host, state, runtime, docker" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
