#!/usr/bin/env bash
# Creates a slice of TPU VMs, or several, on demand, as spot, or through a queued resource.
# shellcheck disable=SC2086,SC2154 # lists of names; OPT_* is set by options
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

options "create a slice of TPU VMs" $SLICE_OPTIONS topology accelerator spot version create_flag -- "$@"
slice_options
create_command
run "${CMD[@]}"
