{{/* Names, labels and images. */}}
{{- define "tracegrad.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* Short enough for the names of pods, which are labels: 63 characters. */}}
{{- define "tracegrad.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "tracegrad.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "tracegrad.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{/* (list $ "proxy"): what selects the pods of a part. */}}
{{- define "tracegrad.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "tracegrad.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "tracegrad.labels" -}}
{{- $root := index . 0 -}}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{ include "tracegrad.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
{{- end }}

{{/* (list $ "proxy") */}}
{{- define "tracegrad.image" -}}
{{- $root := index . 0 -}}
{{- $image := index $root.Values.images (index . 1) -}}
{{- printf "%s:%s" $image.repository (default $root.Chart.AppVersion $image.tag) | quote -}}
{{- end }}

{{- define "tracegrad.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "tracegrad.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{- define "tracegrad.authSecret" -}}
{{- default (printf "%s-auth" (include "tracegrad.fullname" .)) .Values.auth.existingSecret -}}
{{- end }}

{{- define "tracegrad.stateClaim" -}}
{{- default (printf "%s-state" (include "tracegrad.fullname" .)) .Values.state.existingClaim -}}
{{- end }}

{{- define "tracegrad.modelsClaim" -}}
{{- default (printf "%s-models" (include "tracegrad.fullname" .)) .Values.models.existingClaim -}}
{{- end }}

{{/* (list $ "engine" 0): where a pod of a StatefulSet is reached. */}}
{{- define "tracegrad.podHost" -}}
{{- $root := index . 0 -}}
{{- $set := printf "%s-%s" (include "tracegrad.fullname" $root) (index . 1) -}}
{{- /* Whole: HAProxy's own resolver looks into no search list. */ -}}
{{- printf "%s-%d.%s.%s.svc.%s" $set (int (index . 2)) $set $root.Release.Namespace $root.Values.clusterDomain -}}
{{- end }}
