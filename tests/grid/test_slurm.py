"""Test Slurm jobs, against a stand-in for submitit, and against submitit itself if it is installed."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from mhc.errors import UserError
from mhc.grid import folder as folders
from mhc.grid import slurm
from mhc.grid.slurm import ArmJob

FAKE = Path(__file__).with_name("fake_arm.py")
STEPS = 10


def command(workdir: Path, arm: str) -> list[str]:
    """Return the command of a fake arm."""
    return [sys.executable, "-S", str(FAKE), str(workdir), arm]


class Executor:
    """Keeps what it is given; jobs are pickled, as on their way to a node, and run when the test says so."""

    made: list[Executor]

    def __init__(self, folder: Path, cluster: str, **options: Any):
        self.folder, self.cluster, self.options = folder, cluster, options
        self.parameters: dict[str, Any] = {}
        self.jobs: list[tuple[dict[str, Any], bytes]] = []
        Executor.made.append(self)

    def update_parameters(self, **parameters: Any) -> None:
        self.parameters |= parameters

    def submit(self, job: ArmJob) -> Any:
        self.jobs.append((dict(self.parameters), pickle.dumps(job)))
        return types.SimpleNamespace(job_id=str(len(self.jobs)))


class Delayed:
    """Describes the job that a requeued job runs next."""

    def __init__(self, function: ArmJob):
        self.function = function


@pytest.fixture
def executors(monkeypatch: pytest.MonkeyPatch) -> list[Executor]:
    """Put the stand-in in place; return the executors that were made."""
    Executor.made = []
    helpers = types.SimpleNamespace(DelayedSubmission=Delayed)
    monkeypatch.setitem(sys.modules, "submitit", types.SimpleNamespace(AutoExecutor=Executor, helpers=helpers))
    return Executor.made


def submit(workdir: Path, *arms: str, queued: tuple[str, ...] = (), **options: Any) -> list[Any]:
    """Submit arms with jobs waiting in the queue."""
    steps, say = dict.fromkeys(arms, STEPS), lambda line: None
    return slurm.submit(
        workdir, steps, {"timeout_min": 5}, queued=lambda: set(queued), command=command, say=say, **options
    )


def run_jobs(executor: Executor) -> list[str]:
    """Run the jobs that were submitted."""
    return [pickle.loads(job)() for _, job in executor.jobs]


def starts(workdir: Path) -> list[dict[str, Any]]:
    """Return what each start of an arm saw."""
    file = workdir / "starts"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_one_job_an_arm(tmp_path: Path, executors: list[Executor]) -> None:
    assert len(submit(tmp_path, "a", "b")) == 2
    (executor,) = executors
    assert executor.cluster == "slurm" and executor.options == {"slurm_max_num_timeout": slurm.REQUEUES}
    assert [parameters for parameters, _ in executor.jobs] == [{"name": arm, "timeout_min": 5} for arm in ("a", "b")]
    assert [folders.state(tmp_path / arm, STEPS) for arm in "ab"] == ["submitted"] * 2
    assert run_jobs(executor) == ["finished"] * 2
    assert [folders.state(tmp_path / arm, STEPS) for arm in "ab"] == ["finished"] * 2
    assert folders.record(tmp_path / "a")["launcher"] == "slurm"
    assert run_jobs(executor) == ["finished"] * 2  # a job too many does nothing
    assert len(starts(tmp_path)) == 2


def test_what_waits_finished_or_failed_is_not_submitted_again(tmp_path: Path, executors: list[Executor]) -> None:
    (tmp_path / "behaviour.json").write_text('{"b": "fail"}')
    submit(tmp_path, "a", "b", "c")  # jobs 1, 2, 3
    for _, job in executors[0].jobs[:2]:
        pickle.loads(job)()
    assert submit(tmp_path, "a", "b", "c", queued=("3",)) == []
    assert len(submit(tmp_path, "a", "b", "c", queued=("3",), retry=("b",))) == 1
    assert len(submit(tmp_path, "a", "b", "c")) == 2  # the jobs of b and c are gone, and neither arm has finished


def test_an_arm_that_runs_is_not_submitted_and_its_second_job_ends(tmp_path: Path, executors: list[Executor]) -> None:
    claim = folders.Claim.take(tmp_path / "a")
    assert claim is not None
    with claim:
        assert submit(tmp_path, "a") == []
        assert ArmJob(tmp_path, "a", STEPS, command)() == "running"
    assert starts(tmp_path) == []


@pytest.mark.usefixtures("executors")
def test_before_its_time_limit_an_arm_saves_and_is_queued_again(tmp_path: Path) -> None:
    """As in submitit, the handler of its signal asks for what to run next, while the job waits for its arm."""
    (tmp_path / "behaviour.json").write_text('{"a": "hang"}')
    job = ArmJob(tmp_path, "a", STEPS, command)
    given: list[Any] = []

    class Requeued(BaseException):
        """Ends the job, as submitit does."""

    def handler(number: int, frame: Any) -> None:
        given.append(job.checkpoint())
        raise Requeued

    def ring(number: int, frame: Any) -> None:
        if starts(tmp_path):
            signal.setitimer(signal.ITIMER_REAL, 0)
            os.kill(os.getpid(), signal.SIGUSR2)

    before = {
        number: signal.signal(number, what) for number, what in ((signal.SIGUSR2, handler), (signal.SIGALRM, ring))
    }
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with pytest.raises(Requeued):
            job()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, what in before.items():
            signal.signal(number, what)
    assert folders.record(tmp_path / "a")["last_lines"] == ["saved"]
    assert folders.state(tmp_path / "a", STEPS) == "submitted"
    (tmp_path / "go").touch()
    assert pickle.loads(pickle.dumps(given[0].function))() == "finished"
    assert len(starts(tmp_path)) == 2


def test_a_missing_submitit_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserError, match=r"needs submitit: install this project with its extra \[slurm\]"):
        submit(tmp_path, "a")


def test_a_machine_without_slurm_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="squeue does not answer"):
        slurm.queued_jobs()


def test_the_queue_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "squeue"
    fake.write_text("#!/bin/sh\necho 12\necho 7\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert slurm.queued_jobs() == {"12", "7"}


def test_with_submitit_itself(tmp_path: Path) -> None:
    """Its local executor runs the pickled job in a process of its own, as a node would."""
    submitit = pytest.importorskip("submitit")
    cloudpickle = pytest.importorskip("cloudpickle")
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # nodes do not import tests
    jobs = submit(tmp_path, "a", cluster="local")
    assert isinstance(jobs[0], submitit.Job)
    assert [job.result() for job in jobs] == ["finished"]
    assert folders.state(tmp_path / "a", STEPS) == "finished"
