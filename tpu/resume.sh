#!/usr/bin/env bash
# Brings a run to its end: creates the slice where there is none, installs, starts, looks again and again; creates a slice
# anew that was preempted or failed, and starts the same command, which resumes from its last checkpoint.
#
# Exit codes: 0 the run finished, or was stopped by stop.sh; 2 a user's mistake, also one that train.py found; 3 the run's
# guard halted it; 1 anything else. May be ended at any time (Ctrl-C) and called again: the run does not depend on it.
# shellcheck disable=SC2086,SC2154 # lists of names; OPT_* is set by options
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

options "bring a run to its end, through preemptions" +config $SLICE_OPTIONS topology accelerator spot version create_flag \
    config workdir commit repo tries backoff poll max_restarts max_failures delete_when_done -- "$@"
slice_options
number 1 tries max_failures
number 0 backoff poll max_restarts
create_command
check_config
check_workdir
check_overrides
training

if [ -n "$OPT_dry_run" ]; then
    list_command && run "${CMD[@]}"
    delete_command && run "${CMD[@]}"
    create_command && run "${CMD[@]}"
    install_workers
    status_command && run "${CMD[@]}"
    start_workers
    summary_command && run "${CMD[@]}"
    run sleep "$OPT_poll"
    exit 0
fi

SAID=$(mktemp)
trap 'rm -f "$SAID"' EXIT

note() { say "$(date -u +%Y-%m-%dT%H:%M:%SZ) $OPT_name: $*"; }

restarts=0 failures=0
gone=''    # the slice is to be created anew: counted once, though deleting it may take several tries
there=''   # the slice has been seen: if it vanishes, somebody deleted it
started='' # the run has been started or seen running by this loop: if it has ended, this is its end

finish() { # CODE MESSAGE: the end of the loop
    local code=$1
    shift
    note "$*"
    if [ "$code" != 0 ]; then
        ssh_command 0 "tail -n 20 mhc/run/log"
        "${CMD[@]}" </dev/null || true
    fi
    if [ -n "$OPT_delete_when_done" ]; then
        delete_command
        "${CMD[@]}" </dev/null || die "the slice could not be deleted, and costs: $(quote "${CMD[@]}")"
        note "slice deleted"
    else
        delete_command
        note "the slice is still there, and costs: $(quote "${CMD[@]}")"
    fi
    exit "$code"
}

# Runs a command; a failure is counted, and too many end the loop. The count begins anew (failures=0) where something went
# on: a list that answers is not enough, since creating or reaching the slice may fail for ever.
attempt() {
    if "$@" </dev/null; then return 0; fi
    failed "$@"
}

failed() { # COMMAND
    failures=$((failures + 1))
    note "failed ($failures in a row): $(quote "$@")" >&2
    [ "$failures" -lt "$OPT_max_failures" ] || die "given up after $failures failures in a row; look at the slice with watch.sh"
    sleep "$OPT_poll"
    return 1
}

# As attempt, of gcloud's answers: what is refused for good would be refused for an hour.
ask() {
    local said code=0
    "$@" </dev/null 2>"$SAID" || code=$?
    said=$(<"$SAID")
    [ -z "$said" ] || printf '%s\n' "$said" >&2
    [ "$code" != 0 ] || return 0
    if [ "$1" = capture ]; then shift; fi
    if refused "$code" "$said"; then
        mistake "gcloud refuses for good, not tried again: $(quote "$@")${there:+; the slice is left as it is, and costs}"
    fi
    failed "$@"
}

again() { # MESSAGE: counts what is to be started again
    [ "$restarts" -lt "$OPT_max_restarts" ] || finish 1 "$*; not started again, after --max_restarts=$OPT_max_restarts"
    restarts=$((restarts + 1))
    note "$* ($restarts of $OPT_max_restarts)"
}

capture() { # sets OUTPUT
    OUTPUT=$("$@")
}

state_in_list() { # sets STATE: of the slice in the list; nothing where it is not there
    local name state
    STATE=''
    while read -r name state; do
        if [ "$name" = "$OPT_name" ]; then STATE=$state; fi
    done <<<"$OUTPUT"
}

count_workers() { # sets how many there are, by what they say
    local line
    ALL=0 EMPTY=0 ABSENT=0 RUNNING=0 STRANGE=0 ASKED=0 MISTAKEN=0 HALTED=0 CRASHED=0
    while read -r line; do
        case $line in
        mhc-worker:*) ALL=$((ALL + 1)) ;;
        esac
        case $line in
        "mhc-worker: empty") EMPTY=$((EMPTY + 1)) ;;
        "mhc-worker: absent") ABSENT=$((ABSENT + 1)) ;;
        "mhc-worker: running $KEY") RUNNING=$((RUNNING + 1)) ;;
        "mhc-worker: running "*) STRANGE=$((STRANGE + 1)) ;;
        "mhc-worker: ended "*" asked") ASKED=$((ASKED + 1)) ;;
        "mhc-worker: ended "*" 0") ;;
        "mhc-worker: ended "*" 2") MISTAKEN=$((MISTAKEN + 1)) ;;
        "mhc-worker: ended "*" 3") HALTED=$((HALTED + 1)) ;;
        "mhc-worker: ended "*) CRASHED=$((CRASHED + 1)) ;;
        esac
    done <<<"$OUTPUT"
    [ "$ALL" -gt 0 ]
}

while :; do
    list_command
    ask capture "${CMD[@]}" || continue
    state_in_list
    case $STATE in
    '')
        [ -z "$there" ] || die "the slice was deleted by somebody else; call again to create it"
        create_command
        ask "${CMD[@]}" || continue
        note "slice created, or asked for"
        there=yes failures=0
        continue
        ;;
    READY | ACTIVE) there=yes ;;
    PREEMPTED | TERMINATED | FAILED | SUSPENDED)
        [ -n "$gone" ] || again "slice is $STATE: it is created anew"
        gone=yes
        delete_command
        ask "${CMD[@]}" || continue
        # A request that failed may well fail at once again.
        if [ "$STATE" = FAILED ]; then sleep "$OPT_poll"; fi
        there='' gone=''
        continue
        ;;
    STOPPED) die "the slice is STOPPED, which somebody asked for: start it or delete it, then call again" ;;
    *) # CREATING, WAITING_FOR_RESOURCES, SUSPENDING, REPAIRING, ...
        note "slice is $STATE"
        there=yes failures=0
        sleep "$OPT_poll"
        continue
        ;;
    esac

    status_command
    attempt capture "${CMD[@]}" || continue
    attempt count_workers || continue
    failures=0
    if [ "$EMPTY" -gt 0 ]; then
        note "installing ${COMMIT:0:12}"
        attempt install_workers || continue
        attempt start_workers || continue
        started=yes
    elif [ "$STRANGE" -gt 0 ]; then
        die "another run holds this slice: stop it first, or take another --name"
    elif [ "$ABSENT" -gt 0 ] || { [ -z "$started" ] && [ "$RUNNING" = 0 ]; }; then
        # A worker that has rebooted, or an end from before this loop: those that run are left alone by a start.
        [ -z "$started" ] || again "a worker has no run"
        attempt start_workers || continue
        started=yes
    elif [ "$RUNNING" -gt 0 ]; then
        started=yes
    elif [ "$ASKED" -gt 0 ]; then
        note "stopped, as asked; the same command continues it"
        exit 0
    elif [ "$MISTAKEN" -gt 0 ]; then
        finish 2 "train.py found a mistake of the user's, see the log: not started again"
    elif [ "$HALTED" -gt 0 ]; then
        finish 3 "the guard halted the run, see events.jsonl: not started again"
    elif [ "$CRASHED" -gt 0 ]; then
        # Hosts whose peers are preempted crash too, and the slice's state may come later.
        sleep "$OPT_poll"
        list_command
        ask capture "${CMD[@]}" || continue
        state_in_list
        case $STATE in
        READY | ACTIVE) finish 1 "crashed $OPT_tries times, see the log: not started again" ;;
        *) continue ;;
        esac
    else
        summary_command
        attempt capture "${CMD[@]}" || continue
        reason=$(printf '%s\n' "$OUTPUT" | sed -n 's/.*"exit_reason": *"\([a-z]*\)".*/\1/p')
        if [ "$reason" = finished ]; then finish 0 "finished"; fi
        # Saved on a SIGTERM that nobody asked for: a preemption whose state comes later, or a machine's maintenance.
        again "run is ${reason:-of unknown state}"
        started=''
    fi
    sleep "$OPT_poll"
done
