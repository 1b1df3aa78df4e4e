{{/* tracegrad.toml of proxies, ranks and workers: what the chart knows, and the values' `settings`. */}}
{{- define "tracegrad.settings" -}}
{{- include "tracegrad.checks" . -}}
{{- $root := . -}}
{{- $engines := list -}}
{{- range $n := until (int .Values.engine.replicas) -}}
{{- $engines = append $engines (printf "http://%s:8000" (include "tracegrad.podHost" (list $root "engine" $n))) -}}
{{- end -}}
{{- $proxies := list -}}
{{- range $n := until (int .Values.proxy.replicas) -}}
{{- $proxies = append $proxies (printf "http://%s:4141" (include "tracegrad.podHost" (list $root "proxy" $n))) -}}
{{- end -}}
{{- $known := dict
    "model" .Values.model
    "state_dir" "/state/tracegrad"
    "proxy_url" (printf "http://%s:%d" (include "tracegrad.fullname" .) (int .Values.haproxy.service.port))
    "vllm" (dict "urls" $engines "max_model_len" (int .Values.maxModelLen))
    "push" (dict "proxies" $proxies) -}}
{{- mergeOverwrite (deepCopy .Values.settings) $known | toToml -}}
{{- end }}

{{/* One line for each wrong combination that values.schema.json cannot see. */}}
{{- define "tracegrad.checks" -}}
{{- $settings := .Values.settings -}}
{{- range $name, $from := dict
    "model" "model"
    "state_dir" "the volume `state`"
    "proxy_url" "haproxy.service"
    "vllm.urls" "engine.replicas"
    "vllm.max_model_len" "maxModelLen"
    "push.proxies" "proxy.replicas" -}}
{{- $place := $settings -}}
{{- $path := splitList "." $name -}}
{{- range initial $path -}}{{- $place = index $place . | default dict -}}{{- end -}}
{{- if hasKey $place (last $path) -}}
{{- fail (printf "settings.%s: the chart sets it by %s; leave it out" $name $from) -}}
{{- end -}}
{{- end -}}
{{- if not (or .Values.auth.existingSecret (and .Values.auth.apiKey .Values.auth.controlKey)) -}}
{{- fail "auth: name a Secret with the keys api-key and control-key (auth.existingSecret), or give auth.apiKey and auth.controlKey" -}}
{{- end -}}
{{- if and .Values.auth.existingSecret (or .Values.auth.apiKey .Values.auth.controlKey) -}}
{{- fail "auth.existingSecret has both keys: leave auth.apiKey and auth.controlKey out" -}}
{{- end -}}
{{- if and .Values.store.existingSecret .Values.store.trial.enabled -}}
{{- fail "store.existingSecret names a database: leave store.trial.enabled out" -}}
{{- end -}}
{{- if not (or .Values.store.existingSecret .Values.store.trial.enabled) -}}
{{- fail "store: name a Secret with the URL of a PostgreSQL (store.existingSecret), or try things with store.trial.enabled" -}}
{{- end -}}
{{- if and .Values.store.trial.enabled (not .Values.store.trial.password) -}}
{{- fail "store.trial.password: the trial database needs one; make it with: openssl rand -hex 32" -}}
{{- end -}}
{{- $rewards := $settings.rewards | default dict -}}
{{- $prompts := ($settings.resample | default dict).prompts | default "none" -}}
{{- $tasks := ($settings.promotion | default dict).tasks | default "" -}}
{{- $composes := or $rewards.functions $rewards.commands $rewards.judge $rewards.length $rewards.format -}}
{{- $work := or $composes (ne $prompts "none") $tasks -}}
{{- if and $work (not .Values.workers.enabled) -}}
{{- fail "workers.enabled: the settings need workers (rewards, resample.prompts or promotion.tasks); set it to true" -}}
{{- end -}}
{{- if and .Values.workers.enabled (not $work) -}}
{{- fail "workers.enabled: the settings have work for none (rewards, resample.prompts, promotion.tasks); leave it out" -}}
{{- end -}}
{{- end }}
