#!/usr/bin/env bash
# Lints the Helm chart, renders it with the values that change its shape, and decodes every rendered object strictly into the API's own
# types, as a client-side dry run does. Builds helm and kustomize with go (some minutes) if they are missing.
set -euo pipefail
cd "$(dirname "$0")/.."
export GOBIN=$PWD/target/go GOFLAGS=-modcacherw PATH=$PWD/target/go:$PATH
command -v helm >/dev/null || go install helm.sh/helm/v3/cmd/helm@latest
command -v kustomize >/dev/null || go install sigs.k8s.io/kustomize/kustomize/v5@v5.7.1
(cd scripts/check-manifests && go build -o "$GOBIN/check-manifests" .)
chart=deploy/helm/fragprof
helm lint --strict "$chart"
rendered() { helm template fragprof "$chart" --namespace fragprof --kube-version 1.30.0 "$@"; }
count() { grep -c "^kind: $1\$" <<<"$2" || true; }
expect() { [ "$1" = "$2" ] || { echo "expected $2, got $1: $3" >&2; exit 1; }; }

all=$(rendered)
expect "$(count DaemonSet "$all")" 1 "a DaemonSet"
expect "$(count ConfigMap "$all")" "$((1 + $(ls deploy/grafana/*.json | wc -l)))" "the settings and each dashboard"
bare=$(rendered --set networkPolicy.enabled=false,dashboards.enabled=false,serviceAccount.create=false,prometheus.annotations=false)
expect "$(grep -c '^kind:' <<<"$bare")" 2 "DaemonSet and ConfigMap alone"
monitored=$(rendered --set prometheus.podMonitor.enabled=true)
expect "$(count PodMonitor "$monitored")" 1 "a PodMonitor"
old=$(rendered --set rights.oldKernel=true)
expect "$(grep -c -- '- SYS_ADMIN' <<<"$old")" 1 "SYS_ADMIN for old kernels"
filtered=$(rendered --set rights.reclaimFiltered=true,config.reclaim.enabled=true)
expect "$(grep -c -- '- SYS_ADMIN' <<<"$filtered")" 1 "SYS_ADMIN for processes with seccomp filters"
expect "$(grep -c -- '- SYS_ADMIN' <<<"$all" || true)" 0 "no SYS_ADMIN by default"
expect "$(grep -c 'hostPath:' <<<"$all")" 1 "history on the node"
delivering=$(rendered --set config.delivery.enabled=true)
expect "$(grep -c 'path: /var/lib/fragprof-sampler' <<<"$delivering")" 1 "the directory of the sampler"
expect "$(grep -c 'fragprof-sampler' <<<"$all" || true)" 0 "no directory of the sampler by default"
short=$(rendered --set history.kind=emptyDir)
expect "$(grep -c 'emptyDir:' <<<"$short")" 1 "history that ends with the pod"
pushed=$(rendered --set config.push.url=http://pyroscope.monitoring:4040,push.tokenSecret.name=pyroscope,networkPolicy.pushTo.team=obs)
expect "$(grep -c 'secretName: pyroscope' <<<"$pushed")" 1 "the token's Secret"
expect "$(grep -c 'port: 4040' <<<"$pushed")" 1 "egress to the server of profiles"
secured=$(rendered --set config.push.url=https://pyroscope.monitoring,push.filesSecret=pyroscope-tls,config.push.tls.ca_file=/etc/fragprof-push/ca.crt)
expect "$(grep -c 'secretName: pyroscope-tls' <<<"$secured")" 1 "the Secret with certificates"
expect "$(grep -c 'port: 443' <<<"$secured")" 1 "egress to the port of https"
expect "$(grep -c 'tls = { ca_file = "/etc/fragprof-push/ca.crt" }' <<<"$secured")" 1 "the authority's file"
for shape in "$all" "$bare" "$monitored" "$old" "$filtered" "$delivering" "$short" "$pushed" "$secured"; do
	check-manifests <<<"$shape"
done
kustomize build deploy/kubernetes | check-manifests
# An unknown field must be rejected, or the check is worthless.
if sed 's/hostPID: true/hostPid: true/' <<<"$all" | check-manifests 2>/dev/null; then
	echo "an unknown field passes the check" >&2
	exit 1
fi
for wrong in image.pullPolicy=Sometimes history.kind=disk nosuch=1 config.server.listen=x config.census.budget_procent=1 \
	config.census.budget_percent=0 config.push.url=ftp://x config.push.tls.ca_file=ca.crt; do
	if rendered --set "$wrong" >/dev/null 2>&1; then
		echo "the schema allows $wrong" >&2
		exit 1
	fi
done
scripts/render-manifests.sh --check
echo "the chart is good"
