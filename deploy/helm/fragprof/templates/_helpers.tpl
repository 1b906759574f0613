{{- define "fragprof.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "fragprof.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "fragprof.labels" -}}
{{ include "fragprof.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "fragprof.account" -}}
{{- if .Values.serviceAccount.name }}{{ .Values.serviceAccount.name }}{{ else if .Values.serviceAccount.create }}{{ include "fragprof.name" . }}{{ else }}default{{ end }}
{{- end }}

{{/* The agent's configuration: the values' tables, and what the pod decides. */}}
{{- define "fragprof.config" -}}
{{- range $table, $keys := .Values.config }}
[{{ $table }}]
{{- range $key, $value := $keys }}
{{ $key }} = {{ if kindIs "float64" $value }}{{ if and (eq (toString $value) (toString (int64 $value))) (ne $key "budget_percent") }}{{ int64 $value }}{{ else if contains "." (toString $value) }}{{ $value }}{{ else }}{{ printf "%.1f" $value }}{{ end }}{{ else }}{{ toJson $value }}{{ end }}
{{- end }}
{{ end }}
[containers]
cri = {{ .Values.cri | quote }}

[server]
listen = "127.0.0.1:9746"
metrics_listen = "0.0.0.0:{{ .Values.metricsPort }}"
{{ end }}
