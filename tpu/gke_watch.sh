#!/usr/bin/env bash
# Shows a run's JobSet and pods, and the log of a pod of its first slice. Ctrl-C ends the watching alone.
# shellcheck disable=SC2154 # OPT_* is set by options
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

options "show a run on a GKE cluster, and a log" name project location cluster namespace worker lines no_follow -- "$@"
check_name
cluster_options
number 0 lines worker
kubectl_command
here=("${CMD[@]}")
run "${here[@]}" get jobset "$OPT_name"
run "${here[@]}" get pods "--selector=jobset.sigs.k8s.io/jobset-name=$OPT_name" --output=wide
pod="jobset.sigs.k8s.io/jobset-name=$OPT_name,jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=$OPT_worker"
follow=--follow
[ -z "$OPT_no_follow" ] || follow=--follow=false
run "${here[@]}" logs "--selector=$pod" "--tail=$OPT_lines" "$follow"
