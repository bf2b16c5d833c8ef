"""Test the scripts that create slices and run there: what they would run, and what they make of the answers.

No test can reach a cloud, whatever a script does: its PATH has chosen tools alone, where gcloud and kubectl are stubs.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mhc.chips import TPUS
from mhc.grid import gke
from mhc.grid.plan import Plan

pytestmark = pytest.mark.scripts

yaml = pytest.importorskip("yaml")  # comes with flax

TPU = Path(__file__).parents[2] / "tpu"
SCRIPTS = sorted(path.name for path in TPU.glob("*.sh") if path.name not in ("common.sh", "worker.sh"))
TOOLS = """
    basename bash cat cksum date dirname env flock git grep gzip mkdir mktemp mv nohup rm sed setsid sleep sort tail tar
    true
"""

# Records its arguments, a line a call, and answers from files of answers, one line a call; the last line stays.
GCLOUD = r"""#!/usr/bin/env bash
set -eu
printf '%s\n' "${0##*/} $*" >>"$STUB/calls"
answer() {
    [ -e "$STUB/$1" ] || return 0
    mapfile -t lines <"$STUB/$1"
    printf '%s\n' "${lines[0]}"
    [ "${#lines[@]}" = 1 ] || printf '%s\n' "${lines[@]:1}" >"$STUB/$1"
}
refuse() { # "CODE MESSAGE": fails as gcloud does
    [ "$1" = "${1%% *}" ] || printf 'ERROR: (gcloud.%s.%s) %s\n' "$group" "$verb" "${1#* }" >&2
    exit "${1%% *}"
}
group=${2:-}.${3:-}.${4:-} verb=${5:-}
case "$*" in
*" list "*)
    state=$(answer states)
    case $state in
    ERROR*) refuse "1${state#ERROR}" ;;
    ABSENT) ;;
    *) printf 'run-10\tREADY\nrun\t%s\nother\tREADY\n' "$state" ;;
    esac
    ;;
*worker.sh\ start*)
    key="$*"
    key=${key#*--key }
    printf '%s\n' "${key%% *}" >"$STUB/key"
    ;;
*worker.sh\ status*)
    said=$(answer workers)
    [ "$said" != ERROR ] || exit 1
    key=$(cat "$STUB/key" 2>/dev/null || true)
    said=${said//KEY/$key}
    printf 'mhc-worker: %s\n' "${said//;/$'\n'mhc-worker: }"
    ;;
*summary.json*) printf '{\n  "steps": 3,\n  "exit_reason": "%s"\n}\n' "$(answer summaries)" ;;
*" create "*) refuse "$(answer creates)" ;;
*" delete "*) refuse "$(answer deletes)" ;;
esac
"""


@dataclasses.dataclass
class World:
    """Holds a copy of the scripts in a git repository of their own, a PATH, and a home folder."""

    repository: Path
    commit: str
    stub: Path
    environment: dict[str, str]

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a script to its end."""
        done = subprocess.run(
            ["bash", str(self.repository / "tpu" / script), *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
        )
        # Not as text: a carriage return in an argument is no end of a line.
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())

    def dry(self, script: str, *arguments: str) -> list[str]:
        """Return the lines of a dry run."""
        done = self.run(script, *arguments, "--dry_run")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.endswith("\n")
        return done.stdout[:-1].split("\n")

    def answers(self, **files: str) -> None:
        """Set what the stubs answer: words by file, one a call."""
        for name, words in files.items():
            (self.stub / name).write_text("".join(f"{word}\n" for word in words.split("|")))

    def calls(self, *wanted: str) -> list[str]:
        """Return the stubs' calls, each shortened to the first of the wanted words in it, without the others."""
        lines = (self.stub / "calls").read_text().splitlines() if (self.stub / "calls").exists() else []
        found = (next((word for word in wanted if f" {word} " in f"{line} "), None) for line in lines)
        return [word for word in found if word is not None]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a repository of the scripts and a config, and its commit."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "tpu").mkdir()
    for path in TPU.glob("*.sh"):
        shutil.copy(path, folder / "tpu")
    (folder / "configs").mkdir()
    (folder / "configs" / "a.py").write_text(
        "from ml_collections import ConfigDict\n\n\ndef get_config():\n    return ConfigDict()\n"
    )
    git = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=m"]):
        subprocess.run([*git, *words], env=environment, check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], env=environment, check=True, capture_output=True, text=True)
    return folder, head.stdout.strip()


def make_world(repository: tuple[Path, str], folder: Path) -> World:
    """Return a world with nothing in its home folder."""
    tools, stub, home = folder / "bin", folder / "stub", folder / "home"
    for made in (tools, stub, home, folder / "tmp"):
        made.mkdir()
    for tool in TOOLS.split():
        found = shutil.which(tool)
        if found is None:
            pytest.skip(f"no {tool} here")
        (tools / tool).symlink_to(found)
    for name in ("gcloud", "kubectl"):
        (tools / name).write_text(GCLOUD)
        (tools / name).chmod(0o755)
    for name in ("creates", "deletes"):
        (stub / name).write_text("0\n")
    environment = {
        "PATH": str(tools),
        "HOME": str(home),
        "TMPDIR": str(folder / "tmp"),
        "STUB": str(stub),
        "LC_ALL": "C.UTF-8",
    }
    return World(*repository, stub, environment)


@pytest.fixture
def world(repository: tuple[Path, str], tmp_path: Path) -> World:
    """Return a world of one test."""
    return make_world(repository, tmp_path)


@pytest.fixture(scope="module")
def still(repository: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a world for tests that change nothing in it."""
    return make_world(repository, tmp_path_factory.mktemp("still"))


# ------------------------------------------------------------------------------------------------------------ dry runs

SLICE = ["--name=run", "--project=p", "--zone", "us-east5-a"]
CLUSTER = ["--name=run", "--project=p", "--location=us-east5", "--cluster=c"]
RUN = ["--config=configs/a.py", "--workdir=gs://b/r/", "--config.residual.kind=mhc"]
TRAIN = (
    "python train.py --config configs/a.py --workdir gs://b/r --config.distributed.cluster=auto "
    "--config.residual.kind=mhc"
)
VM = "gcloud compute tpus tpu-vm"
QUEUED = "gcloud compute tpus queued-resources"
WHERE = "--project=p --zone=us-east5-a --quiet"
KUBECTL = "kubectl --context=gke_p_us-east5_c --namespace=default"
IDLE = (
    "if [ -e mhc/run/lock ] && ! flock --shared --nonblock mhc/run/lock true; then "
    r"echo '\''error: a run holds this worker: stop it first'\'' >&2; exit 1; fi"
)
STATUS = "'--command=bash mhc/src/tpu/worker.sh status 2>/dev/null || echo mhc-worker: empty'"
START = f"'--command=bash mhc/src/tpu/worker.sh start --key KEY --tries 10 --backoff 30 -- {TRAIN}'"
INSTALL = [
    "git -C ROOT archive --format=tar.gz --output=TMP/mhc-SHORT.tar.gz COMMIT",
    f"{VM} scp TMP/mhc-SHORT.tar.gz run:mhc-SHORT.tar.gz {WHERE} --worker=all",
    f"{VM} ssh run {WHERE} --worker=all '--command={IDLE}; rm -rf mhc/src && mkdir -p mhc/src && "
    "tar -xzf mhc-SHORT.tar.gz -C mhc/src && bash mhc/src/tpu/worker.sh install'",
]
DRY: dict[str, tuple[str, list[str], list[str]]] = {
    "create": (
        "create.sh",
        [*SLICE, "--topology=v5p:2x2x4"],
        [f"{VM} create run {WHERE} --accelerator-type=v5p-32 --version=v2-alpha-tpuv5"],
    ),
    "create spot": (
        "create.sh",
        [
            *SLICE,
            "--accelerator=v5litepod-16",
            "--spot",
            "--create_flag=--network=n",
            "--create_flag",
            "--internal-ips",
        ],
        [
            f"{VM} create run {WHERE} --accelerator-type=v5litepod-16 --version=v2-alpha-tpuv5-lite --spot --network=n "
            "--internal-ips"
        ],
    ),
    "create queued": (
        "create.sh",
        [*SLICE, "--topology", "v6e:4x4", "--queued", "--version=v"],
        [f"{QUEUED} create run {WHERE} --accelerator-type=v6e-16 --runtime-version=v --node-id=run"],
    ),
    "create slices": (
        "create.sh",
        [*SLICE, "--topology=v4:2x2x2", "--slices=3", "--spot"],
        [
            f"{QUEUED} create run {WHERE} --accelerator-type=v4-16 --runtime-version=tpu-ubuntu2204-base "
            "--node-count=3 --node-prefix=run --spot"
        ],
    ),
    "install": ("install.sh", SLICE, INSTALL),
    "install slices": (
        "install.sh",
        [*SLICE, "--slices=2", "--connect_flag=--internal-ip"],
        [
            INSTALL[0],
            f"{QUEUED} scp TMP/mhc-SHORT.tar.gz run:mhc-SHORT.tar.gz {WHERE} --node=all --worker=all --internal-ip",
            INSTALL[2].replace(VM, QUEUED).replace("--worker=all", "--node=all --worker=all --internal-ip"),
        ],
    ),
    "install by clone": (
        "install.sh",
        [*SLICE, "--repo=https://example.org/mhc.git"],
        [
            f"{VM} ssh run {WHERE} --worker=all '--command={IDLE}; rm -rf mhc/src && git clone --quiet "
            "https://example.org/mhc.git mhc/src && git -C mhc/src checkout --quiet COMMIT && "
            "bash mhc/src/tpu/worker.sh install'"
        ],
    ),
    "start": ("start.sh", [*SLICE, *RUN], [f"{VM} ssh run {WHERE} --worker=all {START}"]),
    "start slices": (
        "start.sh",
        [*SLICE, *RUN, "--slices=2", "--tries=3", "--backoff=0"],
        [
            f"{QUEUED} ssh run {WHERE} --node=all --worker=all "
            + START.replace("tries 10", "tries 3").replace("backoff 30", "backoff 0")
        ],
    ),
    "watch": (
        "watch.sh",
        SLICE,
        [
            f"{VM} list {WHERE} '--format=value(name.basename(),state)'",
            f"{VM} ssh run {WHERE} --worker=all {STATUS}",
            f"{VM} ssh run {WHERE} --worker=0 '--command=tail -n 20 -F mhc/run/log'",
        ],
    ),
    "watch slices": (
        "watch.sh",
        [*SLICE, "--slices=2", "--worker=1", "--lines=5", "--no_follow"],
        [
            f"{QUEUED} list {WHERE} '--format=value(name.basename(),state.state)'",
            f"{QUEUED} ssh run {WHERE} --node=all --worker=all {STATUS}",
            f"{QUEUED} ssh run {WHERE} --node=0 --worker=1 '--command=tail -n 5 mhc/run/log'",
        ],
    ),
    "stop": (
        "stop.sh",
        SLICE,
        [
            f"{VM} ssh run {WHERE} --worker=all '--command=bash mhc/src/tpu/worker.sh stop'",
            f"{VM} ssh run {WHERE} --worker=all '--command=bash mhc/src/tpu/worker.sh wait 600'",
        ],
    ),
    "delete": ("delete.sh", SLICE, [f"{VM} delete run {WHERE}"]),
    "delete queued": ("delete.sh", [*SLICE, "--queued"], [f"{QUEUED} delete run {WHERE} --force"]),
    "resume": (
        "resume.sh",
        [*SLICE, *RUN, "--topology=v5p:2x2x4", "--spot", "--poll=5"],
        [
            f"{VM} list {WHERE} '--format=value(name.basename(),state)'",
            f"{VM} delete run {WHERE}",
            f"{VM} create run {WHERE} --accelerator-type=v5p-32 --version=v2-alpha-tpuv5 --spot",
            *INSTALL,
            f"{VM} ssh run {WHERE} --worker=all {STATUS}",
            f"{VM} ssh run {WHERE} --worker=all {START}",
            "gcloud storage cat gs://b/r/summary.json --project=p",
            "sleep 5",
        ],
    ),
    "gke_start": (
        "gke_start.sh",
        [*CLUSTER, *RUN, "--image=i:1", "--topology=v5p:2x2x4", "--slices=2", "--spot"],
        [
            "bash ROOT/tpu/gke_manifest.sh --name=run --namespace=default --image=i:1 --topology=v5p:2x2x4 "
            "--slices=2 --spot --workdir=gs://b/r --config=configs/a.py --restarts=100 --grace=300 "
            f"--config.residual.kind=mhc | {KUBECTL} create --filename=-"
        ],
    ),
    "gke_watch": (
        "gke_watch.sh",
        [*CLUSTER, "--worker=2"],
        [
            f"{KUBECTL} get jobset run",
            f"{KUBECTL} get pods --selector=jobset.sigs.k8s.io/jobset-name=run --output=wide",
            f"{KUBECTL} logs --selector=jobset.sigs.k8s.io/jobset-name=run,jobset.sigs.k8s.io/job-index=0,"
            "batch.kubernetes.io/job-completion-index=2 --tail=20 --follow",
        ],
    ),
    "gke_stop": ("gke_stop.sh", CLUSTER, [f"{KUBECTL} delete jobset run --cascade=foreground --wait"]),
}


@pytest.mark.parametrize("case", DRY)
def test_a_dry_run_prints_every_command_and_runs_none(case: str, still: World) -> None:
    script, arguments, expected = DRY[case]
    lines = still.dry(script, *arguments)
    fixed = {
        "ROOT": str(still.repository),
        "COMMIT": still.commit,
        "SHORT": still.commit[:12],
        "TMP": still.environment["TMPDIR"],
    }
    for name, value in fixed.items():
        expected = [line.replace(name, value) for line in expected]
    assert [re.sub(r"--key \d+", "--key KEY", line) for line in lines] == expected
    assert {shlex.split(line)[0] for line in lines} <= {"gcloud", "kubectl", "git", "bash", "sleep"}
    assert not still.calls("gcloud", "kubectl")


def test_every_script_has_a_dry_run() -> None:
    assert {script for script, _, _ in DRY.values()} == set(SCRIPTS) - {"gke_manifest.sh"}  # which runs no command


@pytest.mark.parametrize("case", ["create", "stop", "watch", "delete queued", "install", "gke_stop", "gke_watch"])
def test_the_lines_of_a_dry_run_do_what_the_script_does(
    case: str, repository: tuple[Path, str], tmp_path: Path
) -> None:
    script, arguments, _ = DRY[case]
    calls = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        world = make_world(repository, tmp_path / str(number))
        world.answers(states="READY", workers="absent")
        world.environment["TMPDIR"] = str(tmp_path)  # the same in both
        if number:
            subprocess.run(
                ["bash", "-e", "-c", "\n".join(world.dry(script, *arguments))], env=world.environment, check=True
            )
        else:
            assert world.run(script, *arguments).returncode == 0
        calls.append((world.stub / "calls").read_text())
    assert calls[0] == calls[1] != ""


# Without the line breaks that scripts refuse, and what no argument of a process can hold.
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\0"), max_size=12)
AWKWARD = """a'b "c" $HOME `id` $(id) \\ \\' ; & | > < * ? [x] {a,b} ~ ! # %USER% & = é \t end """


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(words, st.just(AWKWARD)), min_size=1, max_size=3))
def test_overrides_survive_every_shell_on_their_way(still: World, values: list[str]) -> None:
    overrides = [f"--config.x.y{number}={value}" for number, value in enumerate(values)]
    (line,) = still.dry("start.sh", *SLICE, *RUN[:2], *overrides)
    arguments = shlex.split(line)
    command = arguments[-1].removeprefix("--command=")
    # gcloud splits the command at spaces, ssh joins it again, and the worker's shell reads it.
    command = " ".join(command.split(" "))
    trained = shlex.split(command)[shlex.split(command).index("--") + 1 :]
    assert trained == [*TRAIN.split()[:-1], *overrides]
    # shlex is no shell: bash reads both the same.
    for text, seen in ((line, arguments), (command, shlex.split(command))):
        shown = subprocess.run(["bash", "-c", f"printf '%s\\0' {text}"], capture_output=True, check=True).stdout
        assert shown.decode().split("\0")[:-1] == seen


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(words, st.just(AWKWARD)), min_size=1, max_size=3))
def test_overrides_survive_the_manifest(still: World, values: list[str]) -> None:
    printable = ["".join(c for c in value if c == "\t" or c.isprintable()) for value in values]
    overrides = [f"--config.x.y{number}={value}" for number, value in enumerate(printable)]
    text = still.run("gke_manifest.sh", "--name=run", "--image=i", "--topology=v5p:2x2x4", *RUN[:2], *overrides).stdout
    command = pod(yaml.safe_load(text))["containers"][0]["command"]
    assert command[command.index("--") + 1 :] == [*TRAIN.split()[:-1], *overrides]


# ------------------------------------------------------------------------------------------------------------ mistakes

MISTAKES: dict[str, tuple[list[str], str]] = {
    "unknown": (["start.sh", "--nmae=x"], "--nmae: unknown option, allowed: --name --project"),
    "positional": (["stop.sh", "run"], "run: not an option, allowed: --name"),
    "no value": (["stop.sh", "--name"], "--name: a value is missing"),
    "flag with a value": (["create.sh", "--spot=yes"], "--spot=yes: takes no value, allowed: --spot"),
    "no name": (["stop.sh", "--project=p", "--zone=z"], "--name is missing"),
    "no zone": (["delete.sh", "--name=run", "--project=p"], "--zone is missing, allowed: zone of the slice"),
    "name": (["stop.sh", "--name=Run", "--project=p", "--zone=z"], "--name: given 'Run', allowed: up to 40 of a-z"),
    "number": (["stop.sh", *SLICE, "--slices=0"], "--slices: given 0, allowed: a whole number from 1"),
    "no number": (["stop.sh", *SLICE, "--wait=1m"], "--wait: given '1m', allowed: a whole number from 0"),
    "no slice": (["create.sh", *SLICE], "--topology is missing, allowed: CHIP:SHAPE such as v5p:2x2x4"),
    "two slices": (
        ["create.sh", *SLICE, "--topology=v4:2x2x2", "--accelerator=v4-16"],
        "given both, allowed: one of them",
    ),
    "chip": (["create.sh", *SLICE, "--topology=v9:2x2"], "--topology: given 'v9:2x2', allowed: CHIP:SHAPE"),
    "shape": (
        ["create.sh", *SLICE, "--topology=v5p:4x4"],
        "--topology: given 'v5p:4x4', allowed: v5p: and one of 2x2x1",
    ),
    "odd shape": (["create.sh", *SLICE, "--topology=v5e:3x3"], "allowed: v5e: and one of 1x1 2x2 2x4"),
    "accelerator": (
        ["create.sh", *SLICE, "--accelerator=v5p"],
        "--accelerator: given 'v5p', allowed: v4-N, v5litepod-N",
    ),
    "workdir": (
        ["start.sh", *SLICE, RUN[0], "--workdir=runs/a"],
        "--workdir: given 'runs/a', allowed: gs://BUCKET/PATH",
    ),
    "config": (
        ["start.sh", *SLICE, "--config=configs/b.py"],
        "--config: given 'configs/b.py', allowed: a file of commit",
    ),
    "commit": (["install.sh", *SLICE, "--commit=abc"], "--commit: given 'abc', allowed: a commit of the project's"),
    "override": (["stop.sh", *SLICE, "--config.a.b=1"], "--config.a.b=1: stop.sh starts nothing"),
    "override without a value": (["start.sh", "--config.a.b", "1"], "--config.a.b: a value is missing"),
    "line break": (["start.sh", "--config.a.b=x\ny"], "--config.a.b=x: a line break in an argument"),
    "one host": (
        ["gke_manifest.sh", *CLUSTER[:1], *RUN, "--image=i", "--topology=v5e:2x2", "--slices=2"],
        "--slices: given 2 of one host each",
    ),
    "hosts": (
        ["gke_manifest.sh", *CLUSTER[:1], *RUN, "--image=i", "--topology=v5e:2x4", "--chips_per_host=3"],
        "--chips_per_host: given 3, allowed: a divisor of the 8 chips",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(case: str, still: World) -> None:
    (script, *arguments), message = MISTAKES[case]
    done = still.run(script, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: .*\n", done.stderr) and message in done.stderr
    assert not still.calls("gcloud", "kubectl")


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_names_every_option(script: str, still: World) -> None:
    done = still.run(script, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    allowed = still.run(script, "--nothing").stderr.partition("allowed: ")[2].split()
    assert {"--name", "--help"} <= set(allowed)
    assert all(f"  {option} " in done.stdout for option in allowed)


def test_shapes_are_those_of_compile_ahead(still: World) -> None:
    for chip, known in TPUS.items():
        for shape in known.slices[::3]:
            (line,) = still.dry("create.sh", *SLICE, f"--topology={chip}:{shape}")
            chips = math.prod(int(side) for side in shape.split("x"))
            kind = {"v4": "v4", "v5e": "v5litepod", "v5p": "v5p", "v6e": "v6e"}[chip]
            number = chips * (2 if chip in ("v4", "v5p") else 1)  # gcloud counts the cores of these
            assert f"--accelerator-type={kind}-{number} " in line


def test_uncommitted_changes_are_said_to_be_left_out(repository: tuple[Path, str], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(repository[0], copy)
    (copy / "configs" / "a.py").write_text("changed")
    (tmp_path / "w").mkdir()
    done = make_world((copy, repository[1]), tmp_path / "w").run("install.sh", *SLICE, "--dry_run")
    assert (done.returncode, done.stderr) == (
        0,
        f"note: uncommitted changes are left out; installed is {repository[1][:12]}\n",
    )


def test_scripts_are_clean_to_shellcheck() -> None:
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if shellcheck is None:
        pytest.skip("no shellcheck: it comes with the extra [dev]")
    done = subprocess.run([shellcheck, *map(str, sorted(TPU.glob("*.sh")))], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


# -------------------------------------------------------------------------------------------------------------- resume

LOOP = [*SLICE, *RUN, "--topology=v5p:2x2x4", "--spot", "--poll=0"]


def test_a_run_preempted_twice_is_resumed_and_finishes(world: World) -> None:
    world.answers(
        states="ABSENT|READY|READY|READY|PREEMPTED|ABSENT|CREATING|READY|PREEMPTED|ABSENT|READY|READY",
        workers="empty|running KEY;running KEY|running KEY|empty|empty|ended KEY 0;ended KEY 0",
        summaries="finished",
    )
    done = world.run("resume.sh", *LOOP)
    assert done.returncode == 0 and "finished" in done.stdout and "and costs: gcloud" in done.stdout
    once = ["create", "scp", "start"]
    assert world.calls("create", "delete", "scp", "start", "cat") == [*once, "delete", *once, "delete", *once, "cat"]
    starts = [line for line in (world.stub / "calls").read_text().splitlines() if "worker.sh start" in line]
    assert len(set(starts)) == 1 and starts[0].endswith(f"-- {TRAIN}")


def test_a_summary_on_a_shared_file_system_is_read_there(world: World) -> None:
    world.answers(states="READY", workers="empty|ended KEY 0", summaries="finished")
    assert world.run("resume.sh", *LOOP, "--workdir=/mnt/my runs/a").returncode == 0
    (call,) = [line for line in (world.stub / "calls").read_text().splitlines() if "summary.json" in line]
    assert call == f"{VM} ssh run {WHERE} --worker=0 --command=cat '/mnt/my runs/a/summary.json'"


def test_a_queued_resource_is_waited_for_and_asked_for_again(world: World) -> None:
    world.answers(
        states="ABSENT|ACCEPTED|WAITING_FOR_RESOURCES|PROVISIONING|ACTIVE|SUSPENDING|SUSPENDED|ABSENT|ACTIVE|ACTIVE",
        workers="empty|empty|ended KEY 0",
        summaries="finished",
    )
    done = world.run("resume.sh", *LOOP, "--slices=2")
    assert done.returncode == 0
    assert world.calls("create", "delete", "start") == ["create", "start", "delete", "create", "start"]
    assert "tpu-vm" not in (world.stub / "calls").read_text()


ENDS: dict[str, tuple[str, str, int, str]] = {
    # what the workers say after the start, what the summary says, exit code, message
    "mistake": ("ended KEY 2;ended KEY 2", "", 2, "a mistake of the user's"),
    "mistake on one host": ("ended KEY 2;ended KEY 1", "", 2, "a mistake of the user's"),
    "halted": ("ended KEY 3", "halted", 3, "the guard halted the run"),
    "crashed": ("ended KEY 1;ended KEY 134", "", 1, "crashed 10 times"),
    "asked": ("ended KEY 0 asked;ended KEY 0 asked", "stopped", 0, "stopped, as asked"),
    "killed when asked": ("ended KEY 143 asked", "", 0, "stopped, as asked"),
}


@pytest.mark.parametrize("case", ENDS)
def test_what_would_only_come_again_is_not_started_again(case: str, world: World) -> None:
    said, reason, code, message = ENDS[case]
    world.answers(states="READY", workers=f"empty|running KEY|{said}", summaries=reason)
    done = world.run("resume.sh", *LOOP)
    assert done.returncode == code and message in done.stdout
    assert world.calls("create", "delete", "start") == ["start"]


def test_a_run_that_only_stopped_is_started_again(world: World) -> None:
    """It was saved on a SIGTERM that nobody asked for: the preemption comes later, or never."""
    world.answers(
        states="READY|READY|READY|READY|PREEMPTED|ABSENT|READY|READY",
        workers="empty|ended KEY 0|ended KEY 0|ended KEY 0|empty|ended KEY 0",
        summaries="stopped|stopped|finished",
    )
    done = world.run("resume.sh", *LOOP)
    assert done.returncode == 0
    assert world.calls("create", "start", "cat") == ["start", "cat", "start", "cat", "create", "start", "cat"]


def test_a_crash_that_was_a_preemption_is_resumed(world: World) -> None:
    world.answers(
        states="READY|READY|PREEMPTED|PREEMPTED|ABSENT|READY|READY",
        workers="empty|ended KEY 1|empty|ended KEY 0",
        summaries="finished",
    )
    assert world.run("resume.sh", *LOOP).returncode == 0
    assert world.calls("create", "delete", "start") == ["start", "delete", "create", "start"]


def test_a_rebooted_worker_is_started_again(world: World) -> None:
    world.answers(states="READY", workers="empty|running KEY;absent|running KEY|ended KEY 0", summaries="finished")
    assert world.run("resume.sh", *LOOP).returncode == 0
    assert world.calls("create", "start") == ["start", "start"]


def test_an_end_from_before_the_loop_is_no_end(world: World) -> None:
    world.answers(states="READY", workers="ended 1 0 asked|ended KEY 0", summaries="finished")
    assert world.run("resume.sh", *LOOP).returncode == 0
    assert world.calls("scp", "start") == ["start"]


def test_a_run_that_is_under_way_is_left_alone(world: World) -> None:
    first = world.dry("start.sh", *SLICE, *RUN)[0]
    key = re.findall(r"--key (\d+)", first)[0]
    world.answers(states="READY", workers=f"running {key}|ended {key} 0", summaries="finished")
    assert world.run("resume.sh", *LOOP).returncode == 0
    assert world.calls("create", "scp", "start") == []


def test_another_run_on_the_slice_is_left_alone(world: World) -> None:
    world.answers(states="READY", workers="running 1")
    done = world.run("resume.sh", *LOOP)
    assert done.returncode == 1 and "another run holds this slice" in done.stderr
    assert world.calls("create", "delete", "start") == []


def test_a_slice_that_somebody_deleted_is_not_created_again(world: World) -> None:
    world.answers(states="READY|ABSENT", workers="empty")
    done = world.run("resume.sh", *LOOP)
    assert done.returncode == 1 and "deleted by somebody else" in done.stderr
    assert world.calls("create") == []


def test_restarts_are_bounded(world: World) -> None:
    world.answers(states="ABSENT|PREEMPTED|ABSENT|PREEMPTED|ABSENT|PREEMPTED")
    done = world.run("resume.sh", *LOOP, "--max_restarts=2")
    assert done.returncode == 1 and "not started again, after --max_restarts=2" in done.stdout
    assert world.calls("create") == ["create"] * 3


def test_a_delete_that_fails_at_first_is_one_restart(world: World) -> None:
    world.answers(
        states="READY|PREEMPTED|PREEMPTED|PREEMPTED|ABSENT|READY|READY",
        deletes="1|1|0",
        workers="empty|empty|ended KEY 0",
        summaries="finished",
    )
    assert world.run("resume.sh", *LOOP, "--max_restarts=1").returncode == 0
    assert world.calls("create", "delete") == ["delete", "delete", "delete", "create"]


def test_failures_in_a_row_are_bounded(world: World) -> None:
    world.answers(states="ABSENT|ABSENT|ERROR", creates="1")  # that a list answers is no progress
    done = world.run("resume.sh", *LOOP, "--max_failures=3")
    assert done.returncode == 1 and "given up after 3 failures in a row" in done.stderr
    assert world.calls("create", "list") == ["list", "create", "list", "create", "list"]


def test_no_capacity_for_a_while_is_waited_for(world: World) -> None:
    world.answers(
        states="ABSENT|ABSENT|ABSENT|READY", creates="1|1|0", workers="empty|ERROR|ended KEY 0", summaries="finished"
    )
    assert world.run("resume.sh", *LOOP).returncode == 0
    assert world.calls("create") == ["create"] * 3


REFUSED = (
    "1 PERMISSION_DENIED: Permission 'tpu.nodes.create' denied on resource '//tpu.googleapis.com/projects/p'",
    "1 User [a@example.org] does not have permission to access projects instance [p] (or it may not exist)",
    "1 NOT_FOUND: Location us-east5-q is not found",
    "1 INVALID_ARGUMENT: Cloud TPU received a bad request. Accelerator type v5p-31 is not available in zone us-east5-a",
    "1 Quota limit 'TPUV5PPreemptiblePerProjectPerZone' has been exceeded. Limit: 0 in zone us-east5-a.",
    '1 { "code": 3, "message": "The runtime version does not exist" }',
    "2 argument --zone: expected one argument",
)


@pytest.mark.parametrize("said", REFUSED)
def test_what_gcloud_refuses_for_good_is_not_asked_again(said: str, world: World) -> None:
    world.answers(states="ABSENT", creates=said)
    done = world.run("resume.sh", *LOOP)
    assert done.returncode == 2 and world.calls("create", "list") == ["list", "create"]
    told, line = done.stderr.splitlines()[-2:]
    assert said[2:] in told and line.startswith("error: gcloud refuses for good, not tried again: gcloud compute tpus")
    assert list(Path(world.environment["TMPDIR"]).iterdir()) == []


@pytest.mark.parametrize("said", ["ERROR UNAUTHENTICATED: Request had invalid authentication credentials", "ERROR"])
def test_a_list_that_is_refused_for_good_ends_the_loop(said: str, world: World) -> None:
    world.answers(states=f"{said}|READY", workers="empty|ended KEY 0", summaries="finished")
    done = world.run("resume.sh", *LOOP)
    again = said == "ERROR"  # no answer at all: the network, perhaps
    assert done.returncode == (0 if again else 2)
    assert world.calls("list")[:2] == ["list"] * (2 if again else 1)


LATER = (
    '1 { "code": 8, "message": "There is no more capacity in the zone \\"us-east5-a\\"" }',
    "1 RESOURCE_EXHAUSTED: Quota limit 'TPUV5PPerProjectPerZone' has been exceeded. Limit: 32 in zone us-east5-a.",
    "1 INTERNAL: an internal error has occurred",
    "1 ALREADY_EXISTS: node run already exists",
    "1 There was a problem reaching the service: connection reset by peer",
)


@pytest.mark.parametrize("said", LATER)
def test_what_may_be_granted_later_is_asked_again(said: str, world: World) -> None:
    world.answers(states="ABSENT|ABSENT|READY", creates=f"{said}|0", workers="empty|ended KEY 0", summaries="finished")
    assert world.run("resume.sh", *LOOP).returncode == 0
    assert world.calls("create") == ["create"] * 2


def test_overrides_are_checked_before_a_slice_is_created(world: World) -> None:
    """The commit's train.py reads them: names, and what does not go together."""
    tool = Path(world.environment["PATH"]) / "python3"
    tool.write_text(f'#!/usr/bin/env bash\nexec "{sys.executable}" "$@"\n')
    tool.chmod(0o755)
    for override, message in (
        ("--config.residual.knd=mhc", "residual.knd: unknown field (did you mean residual.kind?)"),
        ("--config.mesh.fsdp=3", "train.batch_size: given 32, allowed: a multiple of 3"),
    ):
        done = world.run("resume.sh", *LOOP, override)
        assert done.returncode == 2 and done.stderr.startswith(f"error: {message}"), done.stderr
        assert done.stderr.count("\n") == 1 and not world.calls("gcloud")
    assert world.dry("resume.sh", *LOOP)
    assert list(Path(world.environment["TMPDIR"]).iterdir()) == []


@pytest.mark.parametrize(("said", "code"), [("ended KEY 0", 0), ("ended KEY 3", 3)])
def test_the_slice_is_deleted_at_the_end_if_wanted(said: str, code: int, world: World) -> None:
    world.answers(states="READY", workers=f"empty|{said}", summaries="finished")
    done = world.run("resume.sh", *LOOP, "--delete_when_done")
    assert done.returncode == code and "slice deleted" in done.stdout
    assert world.calls("delete") == ["delete"]


# -------------------------------------------------------------------------------------------------------- on a worker


class Worker:
    """Runs worker.sh with a home folder, reached by a line of shell as through gcloud's ssh."""

    def __init__(self, world: World):
        self.home = Path(world.environment["HOME"])
        (self.home / "mhc").mkdir()
        (self.home / "mhc" / "src").symlink_to(world.repository)
        self.state = self.home / "mhc" / "run"
        self.environment = world.environment

    def ssh(self, line: str) -> str:
        """Return what a line prints, both outputs together."""
        done = subprocess.run(
            ["bash", "-c", line], cwd=self.home, env=self.environment, capture_output=True, text=True, timeout=60
        )
        return (done.stdout + done.stderr).strip().removeprefix("mhc-worker: ")

    def start(self, script: str, key: str = "1", tries: int = 3) -> str:
        """Start a shell script as the command."""
        command = f"--key {key} --tries {tries} --backoff 0 -- bash -c {shlex.quote(script)}"
        return self.ssh(f"bash mhc/src/tpu/worker.sh start {command}")

    def __call__(self, verb: str) -> str:
        return self.ssh(f"bash mhc/src/tpu/worker.sh {verb}")

    def settled(self) -> str:
        """Return the status, once nothing runs."""
        return until(lambda: None if (said := self("status")).startswith("running") else said)

    def processes(self) -> tuple[int, int]:
        """Return the processes of the command, once it has said that it is ready, and of its supervisor."""
        file = self.state / "pid"  # it is there before its text is
        pid = int(until(lambda: (file.read_text() or None) if "\nready\n" in self.log() and file.exists() else None))
        return pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    def log(self) -> str:
        """Return all that the command and the supervisor printed."""
        return (self.state / "log").read_text()


def until(look: Any) -> Any:
    """Return what ``look`` finds, as soon as it finds something."""
    for _ in range(500):
        if (found := look()) is not None:
            return found
        time.sleep(0.02)
    raise AssertionError("it did not come")


@pytest.fixture
def worker(world: World) -> Worker:
    """Return a worker with the project."""
    return Worker(world)


@pytest.mark.parametrize(
    ("codes", "tried", "end"),
    [
        ("0", 1, "ended 1 0"),
        ("2", 1, "ended 1 2"),
        ("3", 1, "ended 1 3"),
        ("1 1 1 1", 3, "ended 1 1"),
        ("4 0", 2, "ended 1 0"),
        ("139 1 3", 3, "ended 1 3"),
    ],
)
def test_crashes_are_retried_a_bounded_number_of_times(codes: str, tried: int, end: str, worker: Worker) -> None:
    (worker.home / "codes").write_text("".join(f"{code}\n" for code in codes.split()))
    script = "cd; echo >>tries; exit $(sed -n $(grep -c '' tries)p codes)"
    assert worker("status") == "absent"
    assert worker.start(script) == "started"
    assert worker.settled() == end
    assert len((worker.home / "tries").read_text()) == tried
    assert worker.log().count("mhc-worker: ") == 3 * tried - 1  # a try, its exit code, and the pause before the next


SAVES = "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.02; done"


def test_stop_saves_and_is_no_crash(worker: Worker) -> None:
    worker.start(SAVES)
    until(lambda: "ready" in worker.log() or None)
    assert worker("status") == "running 1"
    assert worker.start(SAVES) == "running already"
    assert worker.start(SAVES, key="2") == "error: another run holds this slice: stop it first"
    assert worker("wait 0") == "error: still running after 0 s"
    assert worker("stop") == "told to save and end"
    assert worker.settled() == "ended 1 0 asked" == worker("wait 9") == worker("stop")
    assert worker.log().count("\nsaved\n") == 1
    assert worker.start("true", key="2") == "started"
    assert worker.settled() == "ended 2 0"


def test_stop_between_two_tries_ends_the_tries(worker: Worker) -> None:
    line = "bash mhc/src/tpu/worker.sh start --key 1 --tries 9 --backoff 1 -- bash -c 'exit 1'"
    assert worker.ssh(line) == "started"
    until(lambda: "again in 1 s" in worker.log() or None)
    worker("stop")
    assert worker.settled() == "ended 1 1 asked"
    assert worker.log().count("exit code 1") == 1


def test_a_machine_that_goes_down_has_no_end(worker: Worker) -> None:
    """Supervisor and command are both told; nothing is passed on, and nothing counts as the run's end."""
    worker.start(SAVES)
    pid, supervisor = worker.processes()
    for _ in range(5):  # each interrupts the supervisor's waiting
        os.kill(supervisor, signal.SIGTERM)
        time.sleep(0.02)
    os.kill(pid, signal.SIGTERM)
    assert worker.settled() == "absent"
    assert worker.log().count("\nsaved\n") == worker.log().count(" exit code 0\n") == 1


def test_a_crash_after_stop_is_not_tried_again(worker: Worker) -> None:
    line = "bash mhc/src/tpu/worker.sh start --key 1 --tries 9 --backoff 99 -- bash -c " + shlex.quote(
        SAVES.replace("exit 0", "exit 1")
    )
    assert worker.ssh(line) == "started"
    worker.processes()
    worker("stop")
    assert worker.settled() == "ended 1 1 asked"


def test_a_command_that_outlives_its_supervisor_holds_the_worker(worker: Worker) -> None:
    worker.start(SAVES)
    pid, supervisor = worker.processes()
    os.kill(supervisor, signal.SIGKILL)
    assert worker("status") == "running 1"
    assert worker.start(SAVES) == "running already"
    os.kill(pid, signal.SIGTERM)
    assert worker.settled() == "absent"


def test_overrides_reach_the_command(world: World, worker: Worker) -> None:
    """They pass from start.sh's arguments to those of the process on the worker."""
    tools = Path(world.environment["PATH"])
    (tools / "python").write_text('#!/usr/bin/env bash\nprintf \'%s\\0\' "$@" >"$HOME/arguments"\n')
    (tools / "python").chmod(0o755)
    overrides = [f"--config.a.b={AWKWARD}", "--config.c.d="]
    (line,) = world.dry("start.sh", *SLICE, *RUN[:2], *overrides)
    assert worker.ssh(shlex.split(line)[-1].removeprefix("--command=")) == "started"
    assert worker.settled().endswith(" 0")
    assert (worker.home / "arguments").read_text().split("\0")[:-1] == [*TRAIN.split()[1:-1], *overrides]


def test_code_is_not_replaced_under_a_run(world: World, worker: Worker) -> None:
    line = shlex.split(world.dry("install.sh", *SLICE)[-1])[-1].removeprefix("--command=")
    worker.start(SAVES)
    assert worker.ssh(line) == "error: a run holds this worker: stop it first"
    assert (worker.home / "mhc" / "src").exists()
    worker("stop")
    worker.settled()


# ----------------------------------------------------------------------------------------------------------------- GKE


def pod(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod of the one kind of job."""
    (job,) = manifest["spec"]["replicatedJobs"]
    return job["template"]["spec"]["template"]["spec"]


def manifest(world: World, *arguments: str) -> dict[str, Any]:
    """Return a manifest, parsed."""
    done = world.run("gke_manifest.sh", "--name=run", "--image=i:1", *RUN, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return yaml.safe_load(done.stdout)


def test_the_manifest(still: World) -> None:
    found = manifest(
        still, "--topology=v5p:2x2x4", "--slices=2", "--restarts=7", "--grace=120", "--service_account=w", "--spot"
    )
    template = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 120,
        "serviceAccountName": "w",
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
            "cloud.google.com/gke-tpu-topology": "2x2x4",
            "cloud.google.com/gke-spot": "true",
        },
        "containers": [
            {
                "name": "train",
                "image": "i:1",
                "command": ["bash", "tpu/worker.sh", "pod", "--workdir", "gs://b/r", "--", *TRAIN.split()],
                "ports": [{"containerPort": port} for port in (8471, 8080, 8482)],
                "resources": {"limits": {"google.com/tpu": 4}},
            }
        ],
    }
    fails = {"action": "FailJob", "onExitCodes": {"containerName": "train", "operator": "In", "values": [2, 3]}}
    job = {
        "parallelism": 4,
        "completions": 4,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [fails]},
        "template": {"spec": template},
    }
    assert found == {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": "run",
            "namespace": "default",
            "labels": {"mhc-run": "run"},
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        },
        "spec": {
            "failurePolicy": {
                "maxRestarts": 7,
                "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [{"name": "slice", "replicas": 2, "template": {"spec": job}}],
        },
    }


@pytest.mark.parametrize(
    ("topology", "label", "hosts", "chips"),
    [
        ("v4:2x2x1", "tpu-v4-podslice", 1, 4),
        ("v5e:1x1", "tpu-v5-lite-podslice", 1, 1),
        ("v5e:16x16", "tpu-v5-lite-podslice", 64, 4),
        ("v5p:4x4x12", "tpu-v5p-slice", 48, 4),
        ("v6e:2x4", "tpu-v6e-slice", 2, 4),
    ],
)
def test_a_slice_is_pods_of_one_host_each(topology: str, label: str, hosts: int, chips: int, still: World) -> None:
    found = manifest(still, f"--topology={topology}")
    (job,) = found["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["parallelism"] == job["template"]["spec"]["completions"] == hosts
    assert pod(found)["containers"][0]["resources"]["limits"]["google.com/tpu"] == chips
    assert pod(found)["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == label
    # A pool of single hosts is shared with other jobs; one that is a slice is not.
    assert ("annotations" in found["metadata"]) == (hosts > 1)


def test_a_manifest_and_a_grids_ask_for_the_same_hardware(still: World) -> None:
    volume = ["--workdir=/runs/a", "--claim=runs"]
    found = manifest(still, "--topology=v6e:2x4", "--chips_per_host=8", "--host_network", *volume)
    of_grid = gke.Pod("i:1", "runs", "tpu-v6e-slice", chips=8, topology="2x4")
    arm = gke.manifest(Plan("g", str(TPU.parent / "configs" / "demo.py"), {}, {}, {"a": {}}), "a", of_grid)
    assert (found["apiVersion"], found["kind"]) == (arm["apiVersion"], arm["kind"])
    assert pod(found)["nodeSelector"] == pod(arm)["nodeSelector"]
    assert pod(found)["containers"][0]["resources"] == pod(arm)["containers"][0]["resources"]
    assert pod(found)["terminationGracePeriodSeconds"] == pod(arm)["terminationGracePeriodSeconds"]
    assert pod(found)["volumes"] == pod(arm)["volumes"]
    assert pod(found)["containers"][0]["volumeMounts"] == pod(arm)["containers"][0]["volumeMounts"]
    assert (pod(found)["hostNetwork"], pod(found)["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")


def test_start_hands_the_manifest_to_the_cluster(world: World) -> None:
    script, arguments, _ = DRY["gke_start"]
    kubectl = Path(world.environment["PATH"]) / "kubectl"
    kubectl.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$*" >"$STUB/calls"\ncat >"$STUB/manifest"\n')
    assert world.run(script, *arguments).returncode == 0
    assert (world.stub / "calls").read_text() == f"{KUBECTL} create --filename=-\n".partition(" ")[2]
    sent = yaml.safe_load((world.stub / "manifest").read_text())
    assert sent == manifest(world, "--topology=v5p:2x2x4", "--slices=2", "--spot")


# Without spinning: where a test is cut off, what it started may live on.
# The pipe is opened once: a signal that meets bash in a process substitution leaves it with half a command.
FOREVER = "exec 9<> <(:); echo ready; while :; do read -t 0.05 -u 9 || :; done"
PODS: dict[str, tuple[str, str, bool, int]] = {
    # what the command does, what the summary says, whether the pod is told to go, the pod's exit code
    "finished": ("exit 0", "finished", False, 0),
    "stopped because another pod was told to go": ("exit 0", "stopped", False, 75),
    "told to go": ("trap 'exit 0' TERM; " + FOREVER, "stopped", True, 75),
    "told to go at the end": ("trap 'exit 0' TERM; " + FOREVER, "finished", True, 0),
    "killed when told to go": (FOREVER, "", True, 143),
    "mistake": ("exit 2", "", False, 2),
    "halted": ("exit 3", "halted", False, 3),
    "crashed": ("exit 1", "", False, 1),
    "no summary": ("exit 0", "", False, 75),
}


@pytest.mark.parametrize("case", PODS)
def test_a_pod_exits_with_0_for_a_finished_run_alone(case: str, world: World, tmp_path: Path) -> None:
    script, reason, told, code = PODS[case]
    workdir = tmp_path / "run"
    workdir.mkdir()
    if reason:
        (workdir / "summary.json").write_text(f'{{\n  "steps": 3,\n  "exit_reason": "{reason}"\n}}\n')
    sleep = Path(world.environment["PATH"]) / "sleep"
    sleep.unlink()
    sleep.symlink_to(str(shutil.which("true")))
    process = subprocess.Popen(
        [
            "bash",
            str(world.repository / "tpu" / "worker.sh"),
            "pod",
            "--workdir",
            str(workdir),
            "--",
            "bash",
            "-c",
            script,
        ],
        env=world.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    if told:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
    said = process.communicate(timeout=30)[1]
    assert process.returncode == code
    assert ("the run has not" in said) == (code == 75)
