# Shared by the scripts of this folder, which source it: options, quoting, slices, and the commands that reach them.
# For bash 3.2 and newer. Sourcing changes no more than variables and functions.
# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # OPT_* and what slice and training set are made here and read there

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PROGRAM=$(basename "$0")
OVERRIDES=()    # --config.GROUP.FIELD=VALUE, verbatim
CREATE_FLAGS=() # further flags of gcloud ... create
CONNECT_FLAGS=() # further flags of gcloud ... ssh and scp
MOUNT=/runs # of --claim, in a pod, as in mhc/grid/gke.py

# --------------------------------------------------------------------------------------------------------- messages

mistake() { # a user's mistake: one line, exit code 2
    printf 'error: %s\n' "$*" >&2
    exit 2
}

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

say() { printf '%s\n' "$*"; }

quote() { # the arguments as one line that a shell, or shlex, reads back as the same arguments
    local word line='' mark="'" escaped="'\\''"
    for word in "$@"; do
        case $word in
        '' | *[!A-Za-z0-9_./:=@%+,-]*) word="'${word//$mark/$escaped}'" ;;
        esac
        line="$line${line:+ }$word"
    done
    printf '%s' "$line"
}

run() { # run a command, or print it in a dry run
    if [ -n "$OPT_dry_run" ]; then
        quote "$@"
        printf '\n'
    else
        "$@"
    fi
}

# ---------------------------------------------------------------------------------------------------------- options

# describe NAME: sets KIND (value, list or flag), DEFAULT and MEANING of an option. A script names those that it takes.
describe() {
    case $1 in
    name) KIND=value DEFAULT='' MEANING="name of the run's slice or JobSet, such as mhc-27b" ;;
    project) KIND=value DEFAULT='' MEANING="Google Cloud project" ;;
    zone) KIND=value DEFAULT='' MEANING="zone of the slice, such as us-east5-a" ;;
    location) KIND=value DEFAULT='' MEANING="zone or region of the cluster, such as us-east5" ;;
    topology) KIND=value DEFAULT='' MEANING="slice as CHIP:SHAPE, such as v5p:2x2x4 (chips: v4, v5e, v5p, v6e)" ;;
    accelerator) KIND=value DEFAULT='' MEANING="or: the accelerator type of gcloud, such as v5p-32, v5litepod-16, v6e-16" ;;
    slices) KIND=value DEFAULT=1 MEANING="slices of the run; more than one are a queued resource" ;;
    queued) KIND=flag DEFAULT='' MEANING="ask through a queued resource, which waits for capacity" ;;
    spot) KIND=flag DEFAULT='' MEANING="spot capacity: cheaper, may be preempted" ;;
    version) KIND=value DEFAULT='' MEANING="runtime version of the TPU VMs (default: the chip's)" ;;
    create_flag) KIND=list DEFAULT='' MEANING="a further flag of gcloud's create, such as --create_flag=--network=NAME; may be repeated" ;;
    connect_flag) KIND=list DEFAULT='' MEANING="a further flag of gcloud's ssh and scp, such as --connect_flag=--internal-ip; may be repeated" ;;
    commit) KIND=value DEFAULT=HEAD MEANING="commit of the project that the workers have" ;;
    repo) KIND=value DEFAULT='' MEANING="URL to clone on the workers (default: this checkout is copied to them)" ;;
    workdir) KIND=value DEFAULT='' MEANING="folder of the run: gs://BUCKET/PATH, or the path of a folder that all workers share" ;;
    config) KIND=value DEFAULT='' MEANING="config file in the project, such as configs/paper_27b.py" ;;
    tries) KIND=value DEFAULT=10 MEANING="times that the command is started before a crash is final" ;;
    backoff) KIND=value DEFAULT=30 MEANING="seconds before the second try; doubles with each, up to 480" ;;
    poll) KIND=value DEFAULT=60 MEANING="seconds between two looks at the slice" ;;
    max_restarts) KIND=value DEFAULT=100 MEANING="slices created again and runs started again before the loop gives up" ;;
    max_failures) KIND=value DEFAULT=60 MEANING="gcloud commands that may fail in a row, such as a create without capacity" ;;
    delete_when_done) KIND=flag DEFAULT='' MEANING="delete the slice at the end, whatever the end, but after a stop that was asked for" ;;
    wait) KIND=value DEFAULT=600 MEANING="seconds to wait for the run to save and end" ;;
    lines) KIND=value DEFAULT=20 MEANING="lines of the log to begin with" ;;
    worker) KIND=value DEFAULT=0 MEANING="worker whose log is shown" ;;
    no_follow) KIND=flag DEFAULT='' MEANING="show the state and the last lines, and end" ;;
    cluster) KIND=value DEFAULT='' MEANING="GKE cluster" ;;
    namespace) KIND=value DEFAULT=default MEANING="Kubernetes namespace" ;;
    claim) KIND=value DEFAULT='' MEANING="PersistentVolumeClaim to mount at $MOUNT, for a --workdir there" ;;
    image) KIND=value DEFAULT='' MEANING="container image with the project in its working directory" ;;
    service_account) KIND=value DEFAULT='' MEANING="Kubernetes service account that may write to the workdir" ;;
    chips_per_host) KIND=value DEFAULT='' MEANING="chips of a node (default: 4, or all of a smaller slice)" ;;
    restarts) KIND=value DEFAULT=100 MEANING="times that the JobSet is started again after a crash or a preemption" ;;
    grace) KIND=value DEFAULT=300 MEANING="seconds between SIGTERM and SIGKILL, for the checkpoint" ;;
    host_network) KIND=flag DEFAULT='' MEANING="pods on the network of their nodes, for faster traffic between slices" ;;
    dry_run) KIND=flag DEFAULT='' MEANING="print the commands, one a line, and run none" ;;
    help) KIND=flag DEFAULT='' MEANING="show this text" ;;
    *) die "no option $1 is described" ;;
    esac
}

usage() { # text, whether overrides are taken, options
    local about=$1 overrides=$2 option
    shift 2
    say "$PROGRAM: $about"
    say
    for option in "$@"; do
        describe "$option"
        case $KIND in
        flag) printf '  --%-20s %s\n' "$option" "$MEANING" ;;
        *) printf '  --%-20s %s%s\n' "$option X" "$MEANING" "${DEFAULT:+ (default: $DEFAULT)}" ;;
        esac
    done
    [ -z "$overrides" ] || printf '  --%-20s %s\n' "config.GROUP.FIELD=X" "a field of the config, passed on as it is"
}

# options "ABOUT" [+config] [+print] NAME... -- ARGUMENTS: sets OPT_NAME for every option, OVERRIDES, CREATE_FLAGS and
# CONNECT_FLAGS. With +config overrides are taken; a script with +print runs no commands, and has no dry run.
options() {
    local about=$1 overrides='' allowed=() last='dry_run help' option key value
    shift
    while [ "$1" != -- ]; do
        case $1 in
        +config) overrides=yes ;;
        +print) last=help ;;
        *) allowed+=("$1") ;;
        esac
        shift
    done
    shift
    OPT_dry_run=''
    for option in $last; do allowed+=("$option"); done
    for option in "${allowed[@]}"; do
        describe "$option"
        printf -v "OPT_$option" %s "$DEFAULT"
    done
    while [ $# -gt 0 ]; do
        case $1 in *$'\n'*) mistake "${1%%$'\n'*}: a line break in an argument, allowed: none" ;; esac
        case $1 in
        --config.*=* | -config.*=*)
            [ -n "$overrides" ] || mistake "$1: $PROGRAM starts nothing, allowed: ${allowed[*]/#/--}"
            OVERRIDES+=("$1")
            shift
            continue
            ;;
        --config.* | -config.*)
            mistake "$1: a value is missing, allowed: $1=VALUE"
            ;;
        --*) key=${1#--} ;;
        *) mistake "$1: not an option, allowed: ${allowed[*]/#/--}" ;;
        esac
        key=${key%%=*}
        case " ${allowed[*]} " in
        *" $key "*) ;;
        *) mistake "--$key: unknown option, allowed: ${allowed[*]/#/--}" ;;
        esac
        describe "$key"
        if [ "$KIND" = flag ]; then
            [ "$1" = "--$key" ] || mistake "$1: takes no value, allowed: --$key"
            value=yes
        elif [ "$1" != "--$key" ]; then
            value=${1#*=}
        else
            [ $# -gt 1 ] || mistake "--$key: a value is missing, allowed: $MEANING"
            shift
            value=$1
            case $value in *$'\n'*) mistake "--$key: a line break in the value, allowed: none" ;; esac
        fi
        case $key in
        create_flag) CREATE_FLAGS+=("$value") ;;
        connect_flag) CONNECT_FLAGS+=("$value") ;;
        *) printf -v "OPT_$key" %s "$value" ;;
        esac
        shift
    done
    if [ -n "$OPT_help" ]; then
        usage "$about" "$overrides" "${allowed[@]}"
        exit 0
    fi
}

required() { # each of the named options has to have a value
    local option variable
    for option in "$@"; do
        variable=OPT_$option
        describe "$option"
        [ -n "${!variable}" ] || mistake "--$option is missing, allowed: $MEANING"
    done
}

number() { # LEAST NAME...: each of the named options has to be a whole number
    local least=$1 option variable
    shift
    for option in "$@"; do
        variable=OPT_$option
        case ${!variable} in
        '' | *[!0-9]* | ???????*) mistake "--$option: given '${!variable}', allowed: a whole number from $least" ;;
        esac
        printf -v "$variable" %d "$((10#${!variable}))"
        [ "${!variable}" -ge "$least" ] || mistake "--$option: given ${!variable}, allowed: a whole number from $least"
    done
}

check_name() {
    required name
    [[ $OPT_name =~ ^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$ ]] ||
        mistake "--name: given '$OPT_name', allowed: up to 40 of a-z, 0-9 and -, a letter first, no - last"
}

# ----------------------------------------------------------------------------------------------------------- slices

# Accelerator types and shapes of a generation: those that tpu.compile_ahead lists, and single chips.
SHAPES_3D="2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8"
SHAPES_2D="1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"

# --topology or --accelerator: sets CHIP, RUNTIME, LABEL (GKE's), and of a --topology also SHAPE and CHIPS.
# ACCELERATOR is empty for a shape that is no accelerator type's own.
slice() {
    local prefix cores side pattern
    SHAPE='' CHIPS='' ACCELERATOR=''
    if [ -n "$OPT_topology" ] && [ -n "${OPT_accelerator:-}" ]; then
        mistake "--topology and --accelerator: given both, allowed: one of them"
    fi
    case $OPT_topology,${OPT_accelerator:-} in
    v4:*,* | *,v4-*) CHIP=v4 prefix=v4 cores=2 RUNTIME=tpu-ubuntu2204-base LABEL=tpu-v4-podslice ;;
    v5e:*,* | *,v5litepod-*) CHIP=v5e prefix=v5litepod cores=1 RUNTIME=v2-alpha-tpuv5-lite LABEL=tpu-v5-lite-podslice ;;
    v5p:*,* | *,v5p-*) CHIP=v5p prefix=v5p cores=2 RUNTIME=v2-alpha-tpuv5 LABEL=tpu-v5p-slice ;;
    v6e:*,* | *,v6e-*) CHIP=v6e prefix=v6e cores=1 RUNTIME=v2-alpha-tpuv6e LABEL=tpu-v6e-slice ;;
    ,) mistake "--topology is missing, allowed: CHIP:SHAPE such as v5p:2x2x4; chips: v4, v5e, v5p, v6e" ;;
    ,*) mistake "--accelerator: given '$OPT_accelerator', allowed: v4-N, v5litepod-N, v5p-N, v6e-N, such as v5p-32" ;;
    *) mistake "--topology: given '$OPT_topology', allowed: CHIP:SHAPE such as v5p:2x2x4; chips: v4, v5e, v5p, v6e" ;;
    esac
    if [ -n "${OPT_accelerator:-}" ]; then
        [[ ${OPT_accelerator#*-} =~ ^[1-9][0-9]*$ ]] ||
            mistake "--accelerator: given '$OPT_accelerator', allowed: $prefix-N, such as $prefix-32"
        ACCELERATOR=$OPT_accelerator
        return
    fi
    SHAPE=${OPT_topology#*:}
    if [ "$cores" = 2 ]; then
        SHAPES=$SHAPES_3D pattern='^[1-9][0-9]?(x[1-9][0-9]?){2}$'
    else
        SHAPES=$SHAPES_2D pattern='^[1-9][0-9]?x[1-9][0-9]?$'
    fi
    [[ $SHAPE =~ $pattern ]] || mistake "--topology: given '$OPT_topology', allowed: $CHIP: and one of $SHAPES"
    CHIPS=1
    for side in ${SHAPE//x/ }; do CHIPS=$((CHIPS * side)); done
    case " $SHAPES " in *" $SHAPE "*) ACCELERATOR=$prefix-$((CHIPS * cores)) ;; esac
}

# Options of everything that talks to a slice of TPU VMs.
SLICE_OPTIONS="name project zone slices queued connect_flag"

slice_options() { # check them; sets WHERE and QUEUED
    check_name
    required project zone
    number 1 slices
    WHERE=("--project=$OPT_project" "--zone=$OPT_zone" --quiet)
    QUEUED=$OPT_queued
    [ "$OPT_slices" = 1 ] || QUEUED=yes
}

# The functions below set CMD, the command that a script then runs, prints or reads.

create_command() {
    slice
    [ -n "$ACCELERATOR" ] || mistake "--topology: given '$OPT_topology', allowed: $CHIP: and one of $SHAPES, or --accelerator"
    local version=${OPT_version:-$RUNTIME}
    if [ -n "$QUEUED" ]; then
        CMD=(gcloud compute tpus queued-resources create "$OPT_name" "${WHERE[@]}")
        CMD+=("--accelerator-type=$ACCELERATOR" "--runtime-version=$version")
        if [ "$OPT_slices" = 1 ]; then
            CMD+=("--node-id=$OPT_name")
        else
            CMD+=("--node-count=$OPT_slices" "--node-prefix=$OPT_name")
        fi
    else
        CMD=(gcloud compute tpus tpu-vm create "$OPT_name" "${WHERE[@]}")
        CMD+=("--accelerator-type=$ACCELERATOR" "--version=$version")
    fi
    [ -z "$OPT_spot" ] || CMD+=(--spot)
    CMD+=(${CREATE_FLAGS[@]+"${CREATE_FLAGS[@]}"})
}

delete_command() {
    if [ -n "$QUEUED" ]; then
        CMD=(gcloud compute tpus queued-resources delete "$OPT_name" "${WHERE[@]}" --force)
    else
        CMD=(gcloud compute tpus tpu-vm delete "$OPT_name" "${WHERE[@]}")
    fi
}

# refused CODE TEXT: whether what gcloud said on stderr as it failed would be said again however often it were asked. No
# capacity, a quota that others use up, and errors of the service or the network are not of this kind.
refused() {
    local code=$1 text=$2
    case $text in
    *"imit: 0 in "* | *"imit: 0.0 in "* | *"imit: 0 globally"* | *"imit: 0.0 globally"*) return 0 ;; # a quota of zero
    *[Qq]uota* | *QUOTA* | *[Rr]ate[Ll]imit* | *RATE_LIMIT* | *capacity*) return 1 ;;
    esac
    [ "$code" != 2 ] || return 0 # arguments that gcloud does not take
    case $text in
    *tpu-vm.delete* | *queued-resources.delete*) ;; # nothing to delete: the next list says so
    *NOT_FOUND*) return 0 ;;
    esac
    case $text in
    *PERMISSION_DENIED* | *UNAUTHENTICATED* | *INVALID_ARGUMENT* | *"does not have permission"*) return 0 ;;
    *"Invalid value for"* | *"not a valid project"* | *"gcloud auth login"*) return 0 ;;
    *'"code": 3'[!0-9]* | *'"code": 5'[!0-9]* | *'"code": 7'[!0-9]* | *'"code": 16'[!0-9]*) return 0 ;; # of an operation
    esac
    return 1
}

# Lines "NAME<tab>STATE" of all slices there: what is missing is then no error, but every error is one.
list_command() {
    if [ -n "$QUEUED" ]; then
        CMD=(gcloud compute tpus queued-resources list "${WHERE[@]}" "--format=value(name.basename(),state.state)")
    else
        CMD=(gcloud compute tpus tpu-vm list "${WHERE[@]}" "--format=value(name.basename(),state)")
    fi
}

ssh_command() { # WORKER COMMAND: on one worker of the first slice, or on all workers of all
    local worker=$1 remote=$2
    if [ "$OPT_slices" = 1 ]; then
        CMD=(gcloud compute tpus tpu-vm ssh "$OPT_name" "${WHERE[@]}" "--worker=$worker")
    else
        CMD=(gcloud compute tpus queued-resources ssh "$OPT_name" "${WHERE[@]}")
        if [ "$worker" = all ]; then CMD+=(--node=all); else CMD+=(--node=0); fi
        CMD+=("--worker=$worker")
    fi
    CMD+=(${CONNECT_FLAGS[@]+"${CONNECT_FLAGS[@]}"} "--command=$remote")
}

copy_command() { # FILE DESTINATION: to all workers of all slices
    if [ "$OPT_slices" = 1 ]; then
        CMD=(gcloud compute tpus tpu-vm scp "$1" "$OPT_name:$2" "${WHERE[@]}" --worker=all)
    else
        CMD=(gcloud compute tpus queued-resources scp "$1" "$OPT_name:$2" "${WHERE[@]}" --node=all --worker=all)
    fi
    CMD+=(${CONNECT_FLAGS[@]+"${CONNECT_FLAGS[@]}"})
}

# --------------------------------------------------------------------------------------------- the project and its run

WORKER="bash mhc/src/tpu/worker.sh" # on a worker, in its home folder
# Code is not replaced under a run.
IDLE="if [ -e mhc/run/lock ] && ! flock --shared --nonblock mhc/run/lock true; then echo 'error: a run holds this worker: stop it first' >&2; exit 1; fi"

commit() { # sets COMMIT, the full hash of --commit
    COMMIT=$(git -C "$ROOT" rev-parse --verify --quiet "$OPT_commit^{commit}") ||
        mistake "--commit: given '$OPT_commit', allowed: a commit of the project's git repository"
}

check_config() { # --config has to be in the commit, since workers see nothing else
    required config
    commit
    git -C "$ROOT" cat-file -e "$COMMIT:${OPT_config%%:*}" 2>/dev/null ||
        mistake "--config: given '$OPT_config', allowed: a file of commit ${COMMIT:0:12}, by its path in the project"
}

check_workdir() {
    required workdir
    case $OPT_workdir in
    gs:///*) ;;
    gs://?*/?* | /?*)
        OPT_workdir=${OPT_workdir%/}
        return
        ;;
    esac
    mistake "--workdir: given '$OPT_workdir', allowed: gs://BUCKET/PATH, or an absolute path that all workers share"
}

# The commit's config and the overrides, as train.py reads them there, before anything is created: with a Python that has
# the project's packages, where there is one.
check_overrides() {
    local python folder said code=0
    local read="import sys; from mhc import cli; cli.run_main(lambda a: cli.load_config(a[0], a[1:], None) and 0)"
    for python in "$ROOT/.venv/bin/python" python3 python; do
        "$python" -c "import ml_collections" >/dev/null 2>&1 || continue
        folder=$(mktemp -d)
        said=$(git -C "$ROOT" archive --format=tar "$COMMIT" | tar -x -C "$folder" && cd "$folder" &&
            "$python" -c "$read" "$OPT_config" ${OVERRIDES[@]+"${OVERRIDES[@]}"} 2>&1 >/dev/null) || code=$?
        rm -rf "$folder"
        [ "$code" = 0 ] || mistake "${said#error: }"
        return 0
    done
    [ -n "$OPT_dry_run" ] || printf 'note: no Python here has the project: --config.* are checked on the workers alone\n' >&2
}

training() { # sets TRAIN, the command that trains
    TRAIN=(python train.py --config "$OPT_config" --workdir "$OPT_workdir" --config.distributed.cluster=auto)
    TRAIN+=(${OVERRIDES[@]+"${OVERRIDES[@]}"})
    KEY=$(quote "${TRAIN[@]}" | cksum)
    KEY=${KEY%% *}
}

install_workers() { # the commit on all workers, with its environment
    local archive=mhc-${COMMIT:0:12}.tar.gz
    if [ -n "$OPT_repo" ]; then
        ssh_command all "$IDLE; rm -rf mhc/src && git clone --quiet $(quote "$OPT_repo") mhc/src && git -C mhc/src checkout --quiet $COMMIT && $WORKER install"
        run "${CMD[@]}"
        return
    fi
    local folder=${TMPDIR:-/tmp}
    run git -C "$ROOT" archive --format=tar.gz "--output=${folder%/}/$archive" "$COMMIT" || return
    copy_command "${folder%/}/$archive" "$archive"
    run "${CMD[@]}" || return
    ssh_command all "$IDLE; rm -rf mhc/src && mkdir -p mhc/src && tar -xzf $archive -C mhc/src && $WORKER install"
    run "${CMD[@]}"
}

start_workers() { # the training command on all workers, detached, under the supervisor
    ssh_command all "$WORKER start --key $KEY --tries $OPT_tries --backoff $OPT_backoff -- $(quote "${TRAIN[@]}")"
    run "${CMD[@]}"
}

# The run's summary.json, which says how it ended.
summary_command() {
    case $OPT_workdir in
    gs://*) CMD=(gcloud storage cat "$OPT_workdir/summary.json" "--project=$OPT_project") ;;
    *) ssh_command 0 "cat $(quote "$OPT_workdir/summary.json")" ;;
    esac
}

# Lines "mhc-worker: STATE ..." of all workers; see worker.sh.
status_command() { ssh_command all "$WORKER status 2>/dev/null || echo mhc-worker: empty"; }

# -------------------------------------------------------------------------------------------------------------- GKE

# Options of a JobSet's text.
MANIFEST_OPTIONS="name namespace image topology slices chips_per_host spot workdir claim config service_account restarts grace host_network"

manifest_options() { # check them; sets TRAIN, HOSTS and PER_HOST (chips), and MANIFEST_ARGUMENTS, which say the same
    local option variable
    check_name
    required image config
    number 1 slices
    number 0 restarts grace
    slice
    check_workdir
    case $OPT_workdir,$OPT_claim in
    gs://*, | "$MOUNT"/*,?*) ;;
    gs://*) mistake "--claim: given with --workdir $OPT_workdir, allowed: with a --workdir in $MOUNT" ;;
    *) mistake "--workdir: given '$OPT_workdir', allowed: gs://BUCKET/PATH, or $MOUNT/PATH with --claim" ;;
    esac
    training
    if [ -n "$OPT_chips_per_host" ]; then
        number 1 chips_per_host
        PER_HOST=$OPT_chips_per_host
    else
        PER_HOST=$((CHIPS < 4 ? CHIPS : 4))
    fi
    [ $((CHIPS % PER_HOST)) = 0 ] ||
        mistake "--chips_per_host: given $PER_HOST, allowed: a divisor of the $CHIPS chips of $OPT_topology"
    HOSTS=$((CHIPS / PER_HOST))
    [ "$OPT_slices" = 1 ] || [ "$HOSTS" -gt 1 ] ||
        mistake "--slices: given $OPT_slices of one host each, allowed: 1, or slices of several hosts"
    MANIFEST_ARGUMENTS=()
    for option in $MANIFEST_OPTIONS; do
        variable=OPT_$option
        case $option in
        spot | host_network) [ -z "${!variable}" ] || MANIFEST_ARGUMENTS+=("--$option") ;;
        *) [ -z "${!variable}" ] || MANIFEST_ARGUMENTS+=("--$option=${!variable}") ;;
        esac
    done
    MANIFEST_ARGUMENTS+=(${OVERRIDES[@]+"${OVERRIDES[@]}"})
}

cluster_options() {
    required project location cluster
}

# The context that gcloud container clusters get-credentials writes: no command reaches another cluster.
kubectl_command() {
    CMD=(kubectl "--context=gke_${OPT_project}_${OPT_location}_${OPT_cluster}" "--namespace=$OPT_namespace")
}
