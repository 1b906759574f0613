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

{{/*
A value as TOML on one line: tables as inline tables, whatever their depth. A number comes as an integer or as a float depending on where
it was given and on helm's version, so whole numbers are always written without a point.
*/}}
{{- define "fragprof.toml" -}}
{{- if kindIs "map" . -}}
{ {{- range $index, $key := keys . | sortAlpha }}{{ if $index }},{{ end }} {{ include "fragprof.tomlPair" (list $key (get $ $key)) }}{{ end }} }
{{- else if kindIs "slice" . -}}
[ {{- range $index, $item := . }}{{ if $index }}, {{ end }}{{ include "fragprof.toml" $item }}{{ end -}} ]
{{- else if kindIs "float64" . -}}
{{ if eq . (floor .) }}{{ printf "%.0f" . }}{{ else }}{{ printf "%v" . }}{{ end }}
{{- else if kindIs "invalid" . -}}
{{ fail "config: TOML has no null" }}
{{- else -}}
{{ toJson . }}
{{- end -}}
{{- end }}

{{/* A key with its value. A fraction is a string where it was given with --set. */}}
{{- define "fragprof.tomlPair" -}}
{{- $key := index . 0 }}{{ $value := index . 1 -}}
{{ if regexMatch "^[A-Za-z0-9_-]+$" $key }}{{ $key }}{{ else }}{{ toJson $key }}{{ end }} = {{ if and (hasSuffix "_percent" $key) (kindIs "string" $value) }}{{ $value }}{{ else }}{{ include "fragprof.toml" $value }}{{ end }}
{{- end }}

{{/* The node's directory that is mounted into containers, if there is one. */}}
{{- define "fragprof.sampler" -}}
{{- with .Values.config.delivery }}{{ if .enabled }}{{ .directory | default "/var/lib/fragprof-sampler" }}{{ end }}{{ end -}}
{{- end }}

{{/*
Limit in MiB of a volume for fetched debug information, if one is needed: the node has no directory for it. A file that is being fetched
comes on top of the cache.
*/}}
{{- define "fragprof.debuginfodMib" -}}
{{- $symbols := .Values.config.symbols | default dict -}}
{{- if and $symbols.debuginfod_urls (not $symbols.cache_directory) (ne .Values.history.kind "hostPath") -}}
{{ add 256 (int64 ($symbols.cache_mib_max | default 1024)) }}
{{- end -}}
{{- end }}

{{/* Where the Secret with the push's token is mounted. */}}
{{- define "fragprof.secrets" -}}
/etc/fragprof-secrets
{{- end }}

{{/* The agent's configuration: the values' tables, and what the pod decides. */}}
{{- define "fragprof.config" -}}
{{- $tables := deepCopy .Values.config }}
{{- with .Values.push.tokenSecret.name }}
{{- $_ := set $tables "push" (mergeOverwrite (dict) (get $tables "push" | default dict) (dict "token_file" (printf "%s/%s" (include "fragprof.secrets" $) $.Values.push.tokenSecret.key))) }}
{{- end }}
{{- if include "fragprof.debuginfodMib" . }}
{{- $_ := set $tables "symbols" (mergeOverwrite (dict) (get $tables "symbols") (dict "cache_directory" "/var/cache/fragprof/debuginfod")) }}
{{- end }}
{{- range $table := keys $tables | sortAlpha }}
[{{ $table }}]
{{- $keys := get $tables $table }}
{{- range $key := keys $keys | sortAlpha }}
{{- $value := get $keys $key }}
{{- if and (eq $table "push") (eq $key "labels") }}
{{- /* 1 and true are values of a label, too. */}}
{{- $labels := dict }}
{{- range $name, $label := $value }}{{ $_ := set $labels $name (toString $label) }}{{ end }}
{{- $value = $labels }}
{{- end }}
{{ include "fragprof.tomlPair" (list $key $value) }}
{{- end }}
{{ end }}
[containers]
cri = {{ .Values.cri | quote }}

[server]
listen = "127.0.0.1:9746"
metrics_listen = "0.0.0.0:{{ .Values.metricsPort }}"
{{ end }}

{{/* The port of a URL. */}}
{{- define "fragprof.urlPort" -}}
{{ regexFind ":[0-9]+$" (get (urlParse .) "host") | trimPrefix ":" | default (ternary "443" "80" (hasPrefix "https:" .)) }}
{{- end }}

{{/* The ports of the debuginfod servers, each once, as a list in JSON. */}}
{{- define "fragprof.debuginfodPorts" -}}
{{- $ports := list -}}
{{- range dig "symbols" "debuginfod_urls" list .Values.config }}{{ $ports = append $ports (int (include "fragprof.urlPort" .)) }}{{ end -}}
{{- if and $ports .Values.networkPolicy.debuginfodPort }}{{ $ports = list (int .Values.networkPolicy.debuginfodPort) }}{{ end -}}
{{ uniq $ports | toJson }}
{{- end }}

{{/* The port that profiles are pushed to: of the server's pod, behind a Service's. */}}
{{- define "fragprof.pushPort" -}}
{{- if .Values.networkPolicy.pushPort }}{{ .Values.networkPolicy.pushPort }}{{ else }}{{ include "fragprof.urlPort" .Values.config.push.url }}{{ end }}
{{- end }}
