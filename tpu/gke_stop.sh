#!/usr/bin/env bash
# Ends a run on a GKE cluster: its pods are told to save, and its JobSet is deleted. gke_start.sh continues it.
# shellcheck disable=SC2154 # OPT_* is set by options
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

options "save and end a run on a GKE cluster" name project location cluster namespace -- "$@"
check_name
cluster_options
kubectl_command
# In the foreground: when the command returns, the pods have saved and are gone.
run "${CMD[@]}" delete jobset "$OPT_name" --cascade=foreground --wait
