#!/usr/bin/env bash
# Writes deploy/kubernetes/fragprof.yaml from the Helm chart; with --check only says whether it is up to date.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v helm >/dev/null || {
	echo "helm is not installed: go install helm.sh/helm/v3/cmd/helm@latest" >&2
	exit 3
}
out=deploy/kubernetes/fragprof.yaml
render() {
	echo "# Made by scripts/render-manifests.sh from deploy/helm/fragprof: change that."
	helm template fragprof deploy/helm/fragprof --namespace fragprof --kube-version 1.30.0 --set dashboards.enabled=false 2>/dev/null
}
# Differences between versions of helm: blank lines, comments of its own, and with the text the checksum of the configuration.
same() { sed -e 's/[[:space:]]*$//' -e '/^$/d' -e '/^# Source:/d' -e '/checksum\/config:/d'; }
if [ "${1:-}" = --check ]; then
	diff -u <(same <"$out") <(render | same) && echo "$out is up to date"
else
	render >"$out"
fi
