#!/usr/bin/env bash
# Starts a run on a GKE cluster: renders its JobSet and creates it. One of the same name that is there is an error.
# shellcheck disable=SC2086,SC2154 # lists of names; OPT_* is set by options
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

options "start a run on a GKE cluster" +config project location cluster $MANIFEST_OPTIONS -- "$@"
cluster_options
manifest_options
render=(bash "$ROOT/tpu/gke_manifest.sh" "${MANIFEST_ARGUMENTS[@]}")
kubectl_command
CMD+=(create --filename=-)
if [ -n "$OPT_dry_run" ]; then
    say "$(quote "${render[@]}") | $(quote "${CMD[@]}")"
else
    "${render[@]}" | "${CMD[@]}"
fi
