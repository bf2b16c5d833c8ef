#!/usr/bin/env bash
# Shows the state of a slice, what each worker does, and the log of one. Ctrl-C ends the watching alone.
# shellcheck disable=SC2086,SC2154 # lists of names; OPT_* is set by options
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

options "show the state of a slice, its workers, and a log" $SLICE_OPTIONS worker lines no_follow -- "$@"
slice_options
number 0 lines worker
list_command
run "${CMD[@]}"
status_command
run "${CMD[@]}"
follow=-F
[ -z "$OPT_no_follow" ] || follow=
ssh_command "$OPT_worker" "tail -n $OPT_lines ${follow:+$follow }mhc/run/log"
run "${CMD[@]}"
