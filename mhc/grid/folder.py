"""Keep an arm's folder: the run that it holds, who runs it now, and how its attempts ended.

Beside the run's own files an arm has ``arm.json`` (the record of its latest attempt), ``arm.log`` (the output of its
processes) and ``.claim``, which is locked as long as a process runs the arm. That process inherits the lock from the
one that started it, so that the claim of a killed runner lasts exactly as long as the orphaned process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import json
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mhc import full_disk
from mhc.errors import UserError
from mhc.files import read_json, write_json

log = logging.getLogger(__name__)

RECORD, LOG, CLAIM = "arm.json", "arm.log", ".claim"
STATES = ("finished", "running", "submitted", "interrupted", "pending", "halted", "failed")
LAST_LINES = 20

_HALTED = 3  # the exit code of a run that its guard halted
# Exit codes of a run that was ended from outside: it is continued, and not reported as a failure of the arm.
_STOPPED = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM}
_STOPPED |= {full_disk.EXIT_CODE}


class Claim:
    """Holds the right to run an arm against every other process, on other machines too if the file system locks."""

    def __init__(self, file: io.TextIOWrapper):
        self._file = file

    @classmethod
    def take(cls, folder: Path) -> Claim | None:
        """Take the claim on the arm in a folder, made if missing; return None if another process has the claim."""
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / CLAIM).open("a")
        for path in (None, folder / ".lock"):  # .lock: a run that was started without a grid
            if not _lock(file if path is None else path):
                file.close()
                return None
        return cls(file)

    def fileno(self) -> int:
        """Return the descriptor; a process that inherits it keeps the claim."""
        return self._file.fileno()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Give the claim up, whoever inherited it."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()


def _lock(what: io.TextIOWrapper | Path) -> bool:
    """Lock an open file for good, or try the lock of a path; return False if another process has it."""
    if isinstance(what, Path):
        if not what.is_file():
            return True
        with what.open("a") as file:
            return _lock(file)
    try:
        fcntl.flock(what, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        log.info("%s: this file system has no locks", what.name)
    return True


def claimed(folder: Path) -> bool:
    """Return whether a process runs the arm in a folder now."""
    if not (folder / CLAIM).is_file():
        return False
    with (folder / CLAIM).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False


def record(folder: Path) -> dict[str, Any]:
    """Return the record of the latest attempt, from arm.json; {} if there was none."""
    return read_json(folder / RECORD) if (folder / RECORD).is_file() else {}


def begun(folder: Path) -> bool:
    """Return whether an arm has been attempted."""
    return (folder / "config.json").is_file() or (folder / RECORD).is_file()


def finished(folder: Path, steps: int) -> bool:
    """Return whether a run ended by itself after at least ``steps`` steps."""
    ended = summary(folder)
    return ended.get("exit_reason") == "finished" and ended.get("steps", 0) >= steps


def summary(folder: Path) -> dict[str, Any]:
    """Return a run's summary.json; {} if there is none that can be read."""
    try:
        return read_json(folder / "summary.json")
    except UserError:
        return {}


def settled(folder: Path, steps: int) -> str:
    """Return the state of an arm that no process runs: one of STATES but ``running``."""
    last = record(folder).get("state")
    if finished(folder, steps):
        return "finished"
    if last == "running" and summary(folder).get("exit_reason") == "halted":
        return "halted"  # an orphaned process ended, and no runner recorded it
    if last in ("failed", "halted", "submitted"):
        return str(last)
    return "interrupted" if begun(folder) else "pending"


def state(folder: Path, steps: int) -> str:
    """Return the state of an arm: one of STATES."""
    return "running" if claimed(folder) else settled(folder, steps)


def last_metrics(folder: Path) -> dict[str, Any]:
    """Return the last whole record of metrics.jsonl, {} if there is none. Only the end of the file is read."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16384))
        lines = file.read().split(b"\n")
    for line in reversed(lines):
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and "step" in record:
                return record
    return {}


@dataclasses.dataclass
class Attempt:
    """Runs one arm in one process, from ``start`` to its end; the claim is held meanwhile."""

    name: str
    folder: Path
    steps: int
    claim: Claim
    process: subprocess.Popen[bytes]
    offset: int
    began: float

    @classmethod
    def start(
        cls,
        folder: Path,
        steps: int,
        claim: Claim,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> Attempt:
        """Start the process and record it in arm.json.

        Args:
            folder: the arm's folder.
            steps: the number of steps after which the arm is finished.
            claim: on the folder.
            command: the process; its output goes to arm.log.
            environment: variables in addition to this process's.
            details: further entries of arm.json, such as the devices.
        """
        attempts = int(record(folder).get("attempts", 0)) + 1
        begun_at = time.time()
        note = {
            "state": "running",
            "attempts": attempts,
            "began": begun_at,
            "host": socket.gethostname(),
            **(details or {}),
        }
        write_json(folder / RECORD, note)
        with (folder / LOG).open("ab") as file:
            offset = file.tell()
            # A session of its own: Ctrl-C reaches the runner alone, which asks its arms once.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                pass_fds=(claim.fileno(),),
                start_new_session=True,
            )
        with contextlib.suppress(full_disk.DiskFull):  # the arm runs all the same
            write_json(folder / RECORD, {**note, "pid": process.pid})
        return cls(folder.name, folder, steps, claim, process, offset, begun_at)

    def stop(self) -> None:
        """Ask the process to save and end."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)

    def poll(self) -> dict[str, Any] | None:
        """Return the record of the attempt if its process has ended, else None."""
        code = self.process.poll()
        return None if code is None else self._end(code)

    def wait(self) -> dict[str, Any]:
        """Wait for the process to end, and return the record; a signal handler within ``poll`` may call this."""
        # Popen.wait would wait for a lock that the interrupted poll may hold.
        with contextlib.suppress(ChildProcessError):
            _, status = os.waitpid(self.process.pid, 0)
            self.process.returncode = os.waitstatus_to_exitcode(status)
        return self._end(self.process.returncode or 0)

    def _end(self, code: int) -> dict[str, Any]:
        """Record in arm.json how the process ended, and give the claim up."""
        outcome = self._outcome(code)
        note = record(self.folder) | {
            "state": outcome,
            "exit_code": code,
            "ended": time.time(),
            "seconds": time.time() - self.began,
            "last_lines": [] if outcome == "finished" else self._last_lines(),
        }
        try:
            # Without it the arm counts as interrupted: nobody runs it any more.
            with contextlib.suppress(full_disk.DiskFull):
                write_json(self.folder / RECORD, note)
        finally:
            self.claim.release()
        return note

    def _outcome(self, code: int) -> str:
        if finished(self.folder, self.steps):
            return "finished"
        if code == _HALTED:
            return "halted"
        stopped = code == 0 and (self.folder / "config.json").is_file()
        return "interrupted" if stopped or code in _STOPPED else "failed"

    def _last_lines(self) -> list[str]:
        with (self.folder / LOG).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self.offset, size - 16384))
            text = file.read().decode(errors="replace")
        lines = (line.split("\r")[-1].rstrip() for line in text.splitlines())
        return [line for line in lines if line][-LAST_LINES:]
