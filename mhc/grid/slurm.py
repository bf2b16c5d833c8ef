"""Submit the arms of a grid to Slurm through submitit: a job for each arm, requeued at its time limit and if preempted.

The grid's folder has to lie on a file system that the nodes share.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from mhc.errors import UserError
from mhc.files import read_json, write_json
from mhc.grid import folder as folders
from mhc.grid.folder import Attempt, Claim
from mhc.grid.local import Command, Say, environment, train_command

JOB = ".job.json"
LOGS = ".slurm"
SAVE_SECONDS = 180  # before the time limit, for the current step and the checkpoint
REQUEUES = 1000  # the most time limits that one arm may reach


class ArmJob:
    """Runs one attempt of one arm as a job. It ends at once if the arm is finished or runs elsewhere."""

    def __init__(self, workdir: Path, arm: str, steps: int, command: Command = train_command):
        self.workdir, self.arm, self.steps, self.command = workdir, arm, steps, command
        self.attempt: Attempt | None = None

    def __call__(self) -> str:
        """Run the arm, and return its state."""
        folder = self.workdir / self.arm
        claim = Claim.take(folder)
        if claim is None:
            return "running"
        if folders.finished(folder, self.steps):
            claim.release()
            return "finished"
        self.attempt = Attempt.start(
            folder,
            self.steps,
            claim,
            self.command(self.workdir, self.arm),
            environment=environment(self.workdir),
            details={"launcher": "slurm", "job": os.environ.get("SLURM_JOB_ID")},
        )
        while (note := self.attempt.poll()) is None:
            time.sleep(0.5)
        if note["state"] == "interrupted" and "SLURM_JOB_ID" in os.environ:
            # A preemption is told to all processes by SIGTERM, and then to submitit, which requeues from its handler.
            time.sleep(60)
        return str(note["state"])

    def checkpoint(self) -> Any:
        """Save, end, and ask to be queued again; submitit calls this before the time limit and when preempted."""
        if self.attempt is not None:
            self.attempt.stop()
            note = self.attempt.wait()
            if note["state"] != "interrupted":
                return None
            write_json(self.attempt.folder / folders.RECORD, note | {"state": "submitted"})
        return _submitit().helpers.DelayedSubmission(ArmJob(self.workdir, self.arm, self.steps, self.command))

    __submitit_checkpoint__ = checkpoint  # its name in later versions


def queued_jobs() -> set[str]:
    """Return the ids of the user's jobs that wait or run. Raises UserError where Slurm does not answer."""
    try:
        done = subprocess.run(
            ["squeue", "--me", "--noheader", "--format=%A"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        raise UserError(f"--launcher slurm: squeue does not answer: {reason}") from None
    return set(done.stdout.split())


def submit(
    workdir: Path,
    arms: Mapping[str, int],
    parameters: Mapping[str, Any],
    *,
    retry: Collection[str] = (),
    cluster: str = "slurm",
    queued: Callable[[], set[str]] = queued_jobs,
    command: Command = train_command,
    say: Say,
) -> list[Any]:
    """Submit a job for each arm that is neither finished nor submitted, and return without waiting.

    Args:
        workdir: folder of the grid.
        arms: steps of each arm by name.
        parameters: those of ``submitit.AutoExecutor.update_parameters``.
        retry: arms to submit although their last attempt failed or was halted.
        cluster: slurm, or submitit's local and debug for trying it out.
        queued: the ids of jobs that wait or run.
        command: the process of an arm.
        say: takes a line for the user.
    Returns:
        The jobs.
    Raises:
        UserError: submitit is not installed, or this machine cannot submit.
    """
    submitit = _submitit()
    try:
        executor = submitit.AutoExecutor(
            folder=workdir.resolve() / LOGS / "%j", cluster=cluster, slurm_max_num_timeout=REQUEUES
        )
    except RuntimeError as error:
        raise UserError(f"--launcher slurm: {error}") from None
    waiting = queued()
    jobs = []
    for arm, steps in arms.items():
        folder = workdir / arm
        claim = Claim.take(folder)
        if claim is None:
            continue
        with claim:
            state = folders.settled(folder, steps)
            if state == "finished" or (state in ("failed", "halted") and arm not in retry) or _job(folder) in waiting:
                continue
            note = folders.record(folder)
            write_json(folder / folders.RECORD, note | {"state": "submitted", "launcher": "slurm"})
        executor.update_parameters(name=arm, **parameters)
        job = executor.submit(ArmJob(workdir.resolve(), arm, steps, command))
        write_json(folder / JOB, {"job": job.job_id})
        say(f"{arm}: submitted as job {job.job_id}")
        jobs.append(job)
    return jobs


def _submitit() -> Any:
    try:
        return importlib.import_module("submitit")
    except ImportError:
        raise UserError("--launcher slurm needs submitit: install this project with its extra [slurm]") from None


def _job(folder: Path) -> str | None:
    return str(read_json(folder / JOB)["job"]) if (folder / JOB).is_file() else None
