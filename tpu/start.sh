#!/usr/bin/env bash
# Starts training on all workers, detached: what becomes of this connection does not matter. A started run is left alone.
# shellcheck disable=SC2086,SC2154 # lists of names; OPT_* is set by options
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

options "start training on all workers" +config $SLICE_OPTIONS config workdir commit tries backoff -- "$@"
slice_options
number 1 tries
number 0 backoff
check_config
check_workdir
training
start_workers
