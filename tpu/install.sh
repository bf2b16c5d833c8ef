#!/usr/bin/env bash
# Installs the project on all workers of a slice, pinned to a commit: this checkout's, or one that they clone.
# shellcheck disable=SC2086,SC2154 # lists of names; OPT_* is set by options
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

options "install the project on all workers" $SLICE_OPTIONS commit repo -- "$@"
slice_options
commit
if [ -z "$OPT_repo" ] && [ -n "$(git -C "$ROOT" status --porcelain --untracked-files=no)" ]; then
    say "note: uncommitted changes are left out; installed is ${COMMIT:0:12}" >&2
fi
install_workers
