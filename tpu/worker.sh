#!/usr/bin/env bash
# What runs beside train.py: on a worker of a TPU slice, in its home folder, and as the entry point of a pod.
#
#   worker.sh install                                            the environment, in ~/mhc/venv
#   worker.sh start --key K --tries N --backoff S -- COMMAND ... the supervisor, detached; nothing if it runs already
#   worker.sh status                                             one line: mhc-worker: running K | ended K CODE [asked] | absent
#   worker.sh stop                                               SIGTERM to the command, which saves; no more tries
#   worker.sh wait SECONDS                                       until it has ended; exit code 1 if it has not
#   worker.sh pod --workdir DIR -- COMMAND ...                   in a pod: exit code 0 for a finished run alone
#
# ~/mhc/run holds log, key, pid (of the command), ended (its exit code), asked (after stop), and lock, which is held as
# long as the supervisor or the command lives.
set -euo pipefail

MISTAKE=2 HALTED=3 # exit codes of train.py after which the same command would only fail again
UNFINISHED=75      # of a pod whose command ended well before the run did
LONGEST=480        # seconds between two tries

home=${HOME:-}/mhc
state=$home/run

say() { printf 'mhc-worker: %s\n' "$*"; }

fail() {
    say "error: $*" >&2
    exit 1
}

held() { # whether somebody holds the lock
    [ -e "$state/lock" ] && ! flock --shared --nonblock "$state/lock" true
}

install() {
    local python=
    for name in python3.13 python3.12 python3.11; do
        if command -v "$name" >/dev/null && "$name" -c 'import ensurepip' 2>/dev/null; then
            python=$name
            break
        fi
    done
    rm -rf "$home/venv"
    if [ -n "$python" ]; then
        "$python" -m venv "$home/venv"
        "$home/venv/bin/python" -m pip install --quiet "$home/src[tpu]"
    else # runtimes of Ubuntu 22.04 have Python 3.10: uv brings one
        python3 -m pip install --quiet --user uv
        "$HOME/.local/bin/uv" venv --quiet --python 3.12 "$home/venv"
        "$HOME/.local/bin/uv" pip install --quiet --python "$home/venv/bin/python" "$home/src[tpu]"
    fi
    say "installed"
}

start() {
    local key='' tries='' backoff=''
    while [ "$1" != -- ]; do
        case $1 in
        --key) key=$2 ;;
        --tries) tries=$2 ;;
        --backoff) backoff=$2 ;;
        *) fail "unknown option $1" ;;
        esac
        shift 2
    done
    shift
    mkdir -p "$state"
    if held; then
        [ "$(cat "$state/key")" = "$key" ] || fail "another run holds this slice: stop it first"
        [ ! -e "$state/asked" ] || fail "the run is stopping: wait for its end"
        say "running already"
        return
    fi
    rm -f "$state/ended" "$state/asked" "$state/pid"
    printf '%s\n' "$key" >"$state/key"
    # The lock goes to the supervisor and to its command: whichever lives, the worker is taken.
    exec 9>>"$state/lock"
    flock --timeout 5 9 || fail "another start came first"
    setsid nohup bash "${BASH_SOURCE[0]}" supervise "$tries" "$backoff" "$@" </dev/null >>"$state/log" 2>&1 &
    say "started"
}

supervise() { # TRIES BACKOFF COMMAND...: its output is the log
    local tries=$1 pause=$2 try=1 code down=''
    shift 2
    # A machine that goes down tells all its processes, so that nothing is passed on to the command. What it makes of it
    # is no end of the run: on a machine that comes up again the worker is absent, and is started again.
    trap 'down=yes' TERM INT HUP
    cd "$home/src"
    export PATH="$home/venv/bin:$PATH"
    while :; do
        say "$(date -u +%Y-%m-%dT%H:%M:%SZ) try $try of $tries: $*"
        "$@" &
        printf '%s\n' $! >"$state/pid"
        [ ! -e "$state/asked" ] || kill -TERM $! || true # asked between two tries
        await $!
        rm -f "$state/pid"
        say "$(date -u +%Y-%m-%dT%H:%M:%SZ) exit code $code"
        [ -z "$down" ] || exit 0
        if [ "$code" = 0 ] || [ "$code" = "$MISTAKE" ] || [ "$code" = "$HALTED" ] || [ "$try" -ge "$tries" ]; then break; fi
        [ ! -e "$state/asked" ] || break
        say "again in $pause s"
        sleep "$pause" || true
        [ -z "$down" ] || exit 0
        [ ! -e "$state/asked" ] || break
        pause=$((pause * 2 < LONGEST ? pause * 2 : LONGEST))
        try=$((try + 1))
    done
    printf '%s\n' "$code" >"$state/ended.new"
    mv "$state/ended.new" "$state/ended"
}

await() { # PID: sets code. A trap interrupts wait, and the status then is the trap's.
    local again
    code=0
    wait "$1" || code=$?
    while [ "$code" -gt 128 ] && kill -0 "$1" 2>/dev/null; do
        code=0
        wait "$1" || code=$?
    done
    again=0
    if [ "$code" -gt 128 ]; then # it may have ended while the trap ran: bash remembers how
        wait "$1" 2>/dev/null || again=$?
        [ "$again" = 127 ] || code=$again
    fi
}

status() {
    if held; then
        say "running $(cat "$state/key")"
    elif [ -e "$state/ended" ]; then
        say "ended $(cat "$state/key") $(cat "$state/ended")$([ ! -e "$state/asked" ] || printf ' asked')"
    else
        say "absent"
    fi
}

stop() {
    if ! held; then
        status
        return
    fi
    : >"$state/asked"
    # No pid: between two tries, and the supervisor looks for the mark.
    if [ -e "$state/pid" ]; then kill -TERM "$(cat "$state/pid")" 2>/dev/null || true; fi
    say "told to save and end"
}

wait_for_end() {
    local left=$1
    while held; do
        [ "$left" -gt 0 ] || fail "still running after $1 s"
        sleep 1
        left=$((left - 1))
    done
    status
}

exit_reason() { # WORKDIR: finished, stopped or halted, as summary.json has it; nothing where it cannot be read
    local file=$1/summary.json text=
    case $file in
    gs://*)
        if command -v gcloud >/dev/null; then
            text=$(gcloud storage cat "$file" 2>/dev/null) || true
        else
            text=$(python -c 'import sys; from etils import epath; print(epath.Path(sys.argv[1]).read_text())' "$file" 2>/dev/null) || true
        fi
        ;;
    *) text=$(cat "$file" 2>/dev/null) || true ;;
    esac
    printf '%s\n' "$text" | sed -n 's/.*"exit_reason": *"\([a-z]*\)".*/\1/p'
}

# Kubernetes counts a pod that exits with 0 as complete, also one that was told to go and saved. So 0 is kept for the end
# of the run: whoever was told to go, or finds a summary that is not finished, exits with another code and is started again.
pod() {
    local workdir='' code told='' passed_on='' child=''
    [ "$1" = --workdir ] && [ "$3" = -- ] || fail "pod takes --workdir DIR -- COMMAND ..."
    workdir=$2
    shift 3
    trap 'told=yes; [ -z "$child" ] || passed_on=yes; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true' TERM INT
    "$@" &
    child=$!
    # Told before there was anybody to tell; never told twice.
    [ -z "$told" ] || [ -n "$passed_on" ] || kill -TERM "$child" 2>/dev/null || true
    await "$child"
    if [ "$code" != 0 ]; then exit "$code"; fi
    for pause in 0 10 20; do # the process that writes the summary may end after this one
        sleep "$pause"
        if [ "$(exit_reason "$workdir")" = finished ]; then exit 0; fi
        [ -z "$told" ] || break
    done
    say "the command ended, the run has not: its summary says '$(exit_reason "$workdir")'" >&2
    exit "$UNFINISHED"
}

case ${1:-} in
install | start | supervise | status | stop | pod) "$@" ;;
wait) wait_for_end "$2" ;;
*) fail "worker.sh takes install, start, status, stop, wait or pod" ;;
esac
