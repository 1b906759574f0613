#!/usr/bin/env bash
# Lints the Helm chart and renders it with the values that change its shape. Installs helm with go (some minutes) where it is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v helm >/dev/null; then
	GOBIN=$PWD/target/go GOFLAGS=-modcacherw go install helm.sh/helm/v3/cmd/helm@latest
	PATH=$PWD/target/go:$PATH
fi
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
kept=$(rendered --set history.kind=hostPath)
expect "$(grep -c 'hostPath:' <<<"$kept")" 1 "history on the node"
for wrong in image.pullPolicy=Sometimes history.kind=disk nosuch=1 config.server.listen=x; do
	if rendered --set "$wrong" >/dev/null 2>&1; then
		echo "the schema allows $wrong" >&2
		exit 1
	fi
done
scripts/render-manifests.sh --check
echo "the chart is good"
