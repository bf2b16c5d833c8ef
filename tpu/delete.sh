#!/usr/bin/env bash
# Deletes the slice, which ends its cost. The run's folder in its bucket stays. What runs there is not asked to save: stop.sh.
# shellcheck disable=SC2086,SC2154 # lists of names; OPT_* is set by options
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

options "delete a slice" name project zone slices queued -- "$@"
slice_options
delete_command
run "${CMD[@]}"
