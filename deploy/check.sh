#!/bin/sh
# Validates the image's description and everything in deploy/ without a network: `deploy/check.sh .venvs/tools build/k8s`.
# The first is where tools.sh put the validators, the second where the rendered manifests go.
set -eu
tools=$1
rendered=$2

yamllint() { "$tools/bin/yamllint" "$@"; }
promtool() { "$tools/programs/promtool" "$@"; }

rm -rf "$rendered"
mkdir -p "$rendered"
for overlay in deploy/k8s/overlays/*/ deploy/ray/; do
  name=$(basename "$overlay")
  "$tools/bin/kubectl" kustomize "$overlay" >"$rendered/$name.yaml"
done

yamllint --strict .yamllint.yaml buf.yaml deploy tests
"$tools/bin/hadolint" --failure-threshold style Dockerfile
"$tools/bin/check-jsonschema" --quiet --builtin-schema vendor.compose-spec deploy/compose.yaml
# Without --strict a field that does not exist passes. A RayCluster is of a kind that it does not know.
"$tools/bin/kubernetes-validate" --strict --quiet "$rendered"/*.yaml
"$tools/bin/checkov" --config-file deploy/checkov.yaml --file Dockerfile "$rendered"/*.yaml
promtool check config deploy/prometheus/prometheus.yaml
