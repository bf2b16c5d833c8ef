#!/usr/bin/env bash
# Prints the JobSet of a run on TPU slices of a GKE cluster, one job a slice and one pod a host. mhc/grid/gke.py writes
# those of a grid's arms.
# shellcheck disable=SC2086,SC2154 # lists of names; OPT_* is set by options
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

options "print the JobSet manifest of a run" +config +print $MANIFEST_OPTIONS -- "$@"
manifest_options

text() { # a YAML scalar, quoted
    local mark="'"
    printf "'%s'" "${1//$mark/$mark$mark}"
}

list() { # INDENT WORD...
    local indent=$1 word
    shift
    for word in "$@"; do
        printf '%*s- ' "$indent" ''
        text "$word"
        printf '\n'
    done
}

cat <<YAML
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $OPT_name
  namespace: $(text "$OPT_namespace")
  labels:
    mhc-run: $OPT_name
YAML
if [ "$HOSTS" -gt 1 ]; then
    cat <<YAML
  annotations:
    # All pods of a slice in one node pool, and no others there.
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
YAML
fi
cat <<YAML
spec:
  failurePolicy:
    # Crashes and preemptions: all pods are started again and resume from the last checkpoint.
    maxRestarts: $OPT_restarts
    rules:
      # A user's mistake or the guard's halt would only come again.
      - action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: slice
      replicas: $OPT_slices
      template:
        spec:
          parallelism: $HOSTS
          completions: $HOSTS
          completionMode: Indexed
          backoffLimit: 0
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes:
                  containerName: train
                  operator: In
                  values: [2, 3]
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: $OPT_grace
YAML
if [ -n "$OPT_service_account" ]; then
    printf '              serviceAccountName: '
    text "$OPT_service_account"
    printf '\n'
fi
if [ -n "$OPT_host_network" ]; then
    cat <<YAML
              hostNetwork: true
              dnsPolicy: ClusterFirstWithHostNet
YAML
fi
cat <<YAML
              nodeSelector:
                cloud.google.com/gke-tpu-accelerator: $LABEL
                cloud.google.com/gke-tpu-topology: $SHAPE
YAML
[ -z "$OPT_spot" ] || say '                cloud.google.com/gke-spot: "true"'
cat <<YAML
              containers:
                - name: train
                  image: $(text "$OPT_image")
                  command:
$(list 20 bash tpu/worker.sh pod --workdir "$OPT_workdir" -- "${TRAIN[@]}")
                  ports:
                    - containerPort: 8471
                    - containerPort: 8080
                    - containerPort: 8482
                  resources:
                    limits:
                      google.com/tpu: $PER_HOST
YAML
if [ -n "$OPT_claim" ]; then
    cat <<YAML
                  volumeMounts:
                    - name: runs
                      mountPath: $MOUNT
              volumes:
                - name: runs
                  persistentVolumeClaim:
                    claimName: $(text "$OPT_claim")
YAML
fi
