{{/* What pods have in common. Each takes `$`, or (list $ "part"). */}}

{{/* All that stands on a pod's level. */}}
{{- define "tracegrad.pod" -}}
{{- $root := index . 0 -}}
serviceAccountName: {{ include "tracegrad.serviceAccount" $root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with $root.Values.images.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Where the pods of a part may run. */}}
{{- define "tracegrad.placement" -}}
{{- $root := index . 0 -}}
{{- $part := index $root.Values (index . 1) -}}
{{- with $part.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $part.affinity }}
affinity: {{- toYaml $part.affinity | nindent 2 }}
{{- else }}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {{- include "tracegrad.selector" . | nindent 14 }}
{{- end }}
{{- end }}

{{/* Of pods of our images. */}}
{{- define "tracegrad.podSecurity" -}}
{{- toYaml .Values.podSecurityContext }}
{{- end }}

{{- define "tracegrad.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "tracegrad.annotations" -}}
checksum/settings: {{ include "tracegrad.settings" . | sha256sum }}
{{- with .Values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Environment. */}}
{{- define "tracegrad.hubEnv" -}}
- {name: HF_HOME, value: /models}
{{- if .Values.hub.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Values.hub.existingSecret }}, key: token}}
{{- end }}
{{- end }}

{{- define "tracegrad.storeEnv" -}}
{{- if .Values.store.trial.enabled }}
- {name: TRACEGRAD_STORE, value: "postgresql://tracegrad@{{ include "tracegrad.fullname" . }}-postgres:5432/tracegrad"}
- name: PGPASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "tracegrad.fullname" . }}-postgres, key: password}}
{{- else }}
- name: TRACEGRAD_STORE
  valueFrom: {secretKeyRef: {name: {{ .Values.store.existingSecret }}, key: {{ .Values.store.secretKey }}}}
{{- end }}
{{- end }}

{{- define "tracegrad.controlKeyEnv" -}}
- name: TRACEGRAD_PROXY_CONTROL_KEY
  valueFrom: {secretKeyRef: {name: {{ include "tracegrad.authSecret" . }}, key: control-key}}
{{- end }}

{{- define "tracegrad.apiKeyEnv" -}}
- name: TRACEGRAD_API_KEY
  valueFrom: {secretKeyRef: {name: {{ include "tracegrad.authSecret" . }}, key: api-key}}
{{- end }}

{{/* Volumes that proxies, ranks and workers have. */}}
{{- define "tracegrad.volumes" -}}
- name: settings
  configMap: {name: {{ include "tracegrad.fullname" . }}-settings}
- name: models
  persistentVolumeClaim: {claimName: {{ include "tracegrad.modelsClaim" . }}}
- name: data
  emptyDir: {}
- name: tmp
  emptyDir: {}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "tracegrad.mounts" -}}
- {name: models, mountPath: /models}
- {name: data, mountPath: /data}
- {name: tmp, mountPath: /tmp}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}
