{{/*
Rejects values that are valid alone and wrong together, with what to do. The schema of single values is in values.schema.json.
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
{{- fail "networkPolicy.enabled does nothing with hostNetwork: a NetworkPolicy does not apply to the node's own network; unset one of them" -}}
{{- end -}}
{{- if and $v.kmsg.enabled $v.appArmorProfile -}}
{{- fail "appArmorProfile has no effect with kmsg.enabled: a privileged container has no profile; unset one of them" -}}
{{- end -}}
{{- if and $v.service.headless (ne $v.service.type "ClusterIP") -}}
{{- fail "service.headless needs service.type ClusterIP" -}}
{{- end -}}
{{- if and (not $v.serviceAccount.create) $v.serviceAccount.annotations -}}
{{- fail "serviceAccount.annotations apply to an account that the chart creates: set serviceAccount.create" -}}
{{- end -}}
{{- with get $v.settings "web.config.file" -}}
{{- $file := . -}}
{{- $mounted := false -}}
{{- range $v.extraVolumeMounts -}}
{{- if hasPrefix (printf "%s/" (trimSuffix "/" .mountPath)) (clean $file) -}}{{- $mounted = true -}}{{- end -}}
{{- end -}}
{{- if not $mounted -}}
{{- fail (printf "settings.web.config.file: %s is not inside a mounted directory; mount the directory of a Secret there with extraVolumes and extraVolumeMounts" $file) -}}
{{- end -}}
{{- end -}}
{{- range $v.extraArgs -}}
{{- if hasPrefix "--web.config.file" . -}}
{{- fail "extraArgs: the probes cannot see --web.config.file; set settings.web.config.file" -}}
{{- end -}}
{{- end -}}
{{- range $v.extraVolumes -}}
{{- $path := dig "hostPath" "path" "" . -}}
{{- if and $path (eq (clean $path) "/") -}}
{{- fail (printf "extraVolumes: volume %s mounts / of the node; mount only the required directory" .name) -}}
{{- end -}}
{{- end -}}
{{- $pushes := get $v.settings "otlp.endpoint" -}}
{{- range $v.extraEnv -}}
{{- if regexMatch "^(OTEL_EXPORTER_OTLP_.*|MEMLEDGER_OTLP_)ENDPOINT$" .name -}}{{- $pushes = .name -}}{{- end -}}
{{- if eq .name "MEMLEDGER_WEB_CONFIG_FILE" -}}
{{- fail "extraEnv: the default probes and the monitors cannot see MEMLEDGER_WEB_CONFIG_FILE; set settings.web.config.file" -}}
{{- end -}}
{{- if has .name (list "MEMLEDGER_PATH_PROCFS" "MEMLEDGER_PATH_CGROUPFS" "MEMLEDGER_STATE_PATH" "MEMLEDGER_REPORTER_DIRECTORY" "MEMLEDGER_WEB_LISTEN_ADDRESS" "MEMLEDGER_CRI_ENDPOINT" "MEMLEDGER_DOCKER_SOCKET") -}}
{{- fail (printf "extraEnv: %s is set by the chart; use the values port, host, state, reporter, runtime or docker" .name) -}}
{{- end -}}
{{- end -}}
{{- if and $pushes $v.networkPolicy.enabled (not $v.networkPolicy.egress) -}}
{{- fail "networkPolicy.enabled blocks OTLP: set networkPolicy.egress to the collector, and to the cluster's DNS (port 53)" -}}
{{- end -}}
{{- end -}}
