#!/usr/bin/env bash
# Asks the run to save and end, and waits for it. The slice stays, and costs: delete.sh. start.sh or resume.sh continue.
# shellcheck disable=SC2086,SC2154 # lists of names; OPT_* is set by options
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

options "ask the run to save and end" $SLICE_OPTIONS wait -- "$@"
slice_options
number 0 wait
# Two steps, so that every worker has been told before anything waits for one.
ssh_command all "$WORKER stop"
run "${CMD[@]}"
ssh_command all "$WORKER wait $OPT_wait"
run "${CMD[@]}"
