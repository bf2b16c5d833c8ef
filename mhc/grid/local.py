"""Run the arms of a grid as processes of this machine, a few at a time."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from mhc import checkout, full_disk, stdio
from mhc.grid import folder as folders
from mhc.grid.devices import Slot
from mhc.grid.folder import Attempt, Claim
from mhc.monitor.progress import duration

Command = Callable[[Path, str], Sequence[str]]
Say = Callable[[str], None]

_POLL = 0.1  # seconds between looks at the processes
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def train_command(workdir: Path, arm: str) -> list[str]:
    """Return the command that trains an arm of a grid's folder."""
    return [sys.executable, "-m", "mhc.grid.child", str(workdir), arm]


def environment(workdir: Path) -> dict[str, str]:
    """Return variables for every arm: where this package is found, and where arms share what they compile.

    Arms that differ in their seeds alone run the same programs. Variables that the user has set stay.
    """
    package = [str(checkout.ROOT)] if checkout.exists() else []  # an installed one is found as it is here
    path = os.pathsep.join(entry for entry in (*package, os.environ.get("PYTHONPATH", "")) if entry)
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str((workdir / ".compiled").resolve()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1",
    }
    return {"PYTHONPATH": path, **{name: value for name, value in cache.items() if name not in os.environ}}


class Runner:
    """Runs arms until each is finished, or has failed, halted or been interrupted once.

    The runner waits for an arm that another process runs. If that process stops, without a failure and before the end,
    the arm is continued here.
    """

    def __init__(
        self,
        workdir: Path,
        arms: dict[str, int],
        slots: Sequence[Slot],
        *,
        retry: Collection[str] = (),
        sources: Mapping[str, tuple[str, int]] | None = None,
        command: Command = train_command,
        say: Say,
    ):
        """Take the arms, and start nothing yet.

        Args:
          workdir: folder of the grid.
          arms: steps of each arm by name, in the order in which they start.
          slots: places for arms, each for one arm at a time.
          retry: arms that run although their last attempt failed or was halted.
          sources: name and steps of the arm that must have finished before an arm starts, by that arm.
          command: gives the command of an arm in a grid's folder.
          say: takes a line for the user.
        """
        self.workdir, self.arms, self.slots = workdir, arms, slots
        self.retry, self.command, self._say = set(retry), command, say
        self.sources = sources or {}
        self.running: dict[int, Attempt] = {}  # by slot
        self.attempted: set[str] = set()
        self.waited: set[str] = set()  # arms that wait or cannot start, which the user was told
        self.asked, self.signal = 0, 0  # signals received, and the last one
        self.told = 0  # signals passed on
        self.full: str | None = None  # the line of a full disk: no further arm is started

    def run(self) -> int:
        """Run the arms, and return the exit code.

        It is 0 if all finished or were halted by the guard, 1 if not, 128 + the signal after a signal, and
        `full_disk.EXIT_CODE` if the disk is full: then no further arm is started, and those that run end.
        """
        with self._signals():
            while True:
                self._reap()
                if self.asked:
                    self._stop()
                    if not self.running:
                        self.say("stopped; the same command continues")
                        return 128 + self.signal
                elif self.full is not None:
                    if not self.running:
                        self.say(f"{self.full}; the same command continues")
                        return full_disk.EXIT_CODE
                elif not self._fill() and not self.running:
                    break
                time.sleep(_POLL)
        ends = {folders.state(self.workdir / arm, steps) for arm, steps in self.arms.items()}
        return 0 if ends <= {"finished", "halted"} else 1

    def say(self, line: str) -> None:
        """Tell the user a line. If nobody reads it any more, the arms run on."""
        with contextlib.suppress(OSError, ValueError, stdio.ClosedPipe):
            self._say(line)

    def _fill(self) -> bool:
        """Start an arm in every free slot, and return whether an arm is left to run or to wait for."""
        taken = self._taken_devices()
        left = False
        for arm, steps in self.arms.items():
            if arm in self.attempted or self._done(arm, steps):
                continue
            if not self._ready(arm):
                left |= self._awaited(arm)
                continue
            left = True
            free = [
                number
                for number, slot in enumerate(self.slots)
                if number not in self.running and not taken & set(slot.devices)
            ]
            if not free:
                return True
            try:
                with full_disk.reporting(self.workdir / arm):
                    self._start(arm, steps, free[0])
            except full_disk.DiskFull as full:
                self.full = str(full)
                return True
        return left

    def _ready(self, arm: str) -> bool:
        """Return whether the arm that an arm starts from, if any, has finished."""
        if arm not in self.sources:
            return True
        source, steps = self.sources[arm]
        return folders.finished(self.workdir / source, steps) and not folders.claimed(self.workdir / source)

    def _awaited(self, arm: str) -> bool:
        """Return whether the source of an arm that is not ready may still finish; tell the user if not."""
        source, steps = self.sources[arm]
        to_come = source in self.arms and source not in self.attempted and not self._ended(source, steps)
        running = any(attempt.name == source for attempt in self.running.values())
        if running or folders.claimed(self.workdir / source) or (to_come and self._comes(source)):
            return True
        if arm not in self.waited:
            state = folders.state(self.workdir / source, steps)
            self.say(f"{arm}: not started: it branches from {source}, which is {state}")
            self.waited.add(arm)
        return False

    def _comes(self, arm: str) -> bool:
        return self._ready(arm) or self._awaited(arm)

    def _done(self, arm: str, steps: int) -> bool:
        """Return whether nothing is left to do for an arm, and no process runs it."""
        return self._ended(arm, steps) and not folders.claimed(self.workdir / arm)

    def _ended(self, arm: str, steps: int) -> bool:
        state = folders.settled(self.workdir / arm, steps)
        return state == "finished" or (state in ("failed", "halted") and arm not in self.retry)

    def _start(self, arm: str, steps: int, number: int) -> None:
        folder, slot = self.workdir / arm, self.slots[number]
        claim = Claim.take(folder)
        if claim is None:
            if arm not in self.waited:
                note = folders.record(folder)
                self.say(
                    f"{arm}: another process runs it ({note.get('host', '?')}, pid {note.get('pid', '?')}); waiting"
                )
                self.waited.add(arm)
            return
        if self._ended(arm, steps):  # by another runner, since it was looked at
            claim.release()
            return
        before = folders.last_metrics(folder).get("step", 0)
        self.say(f"{arm}: " + (f"continues from its checkpoint (step {before} logged)" if before else "starts"))
        try:
            attempt = Attempt.start(
                folder,
                steps,
                claim,
                self.command(self.workdir, arm),
                environment={**environment(self.workdir), **slot.environment},
                details={"launcher": "local", "devices": slot.devices},
            )
        except (OSError, full_disk.DiskFull):
            claim.release()
            raise
        if slot.cores:
            # In time: threads inherit it, and the interpreter starts slower than this call.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(attempt.process.pid, slot.cores)
        self.attempted.add(arm)
        self.running[number] = attempt

    def _taken_devices(self) -> set[str]:
        """Return the accelerators of this machine that orphaned arms of a killed runner use."""
        taken: set[str] = set()
        if any(slot.devices for slot in self.slots):
            ours = {attempt.folder for attempt in self.running.values()}
            for folder in {path.parent for path in self.workdir.glob(f"*/{folders.RECORD}")} - ours:
                note = folders.record(folder)
                if note.get("host") == socket.gethostname() and folders.claimed(folder):
                    taken |= set(note.get("devices", ()))
        return taken

    def _reap(self) -> None:
        for number, attempt in list(self.running.items()):
            note = attempt.poll()
            if note is None:
                continue
            del self.running[number]
            words = f"{attempt.name}: {note['state']} after {duration(note['seconds'])}"
            last = note["last_lines"][-1] if note["last_lines"] else "no output"
            if note["state"] in ("failed", "halted") or note["exit_code"] == full_disk.EXIT_CODE:
                words += f" (exit code {note['exit_code']}): {last}"
            if note["exit_code"] == full_disk.EXIT_CODE:
                self.full = f"{self.workdir}: there is no room for {attempt.name}: {last.removeprefix('error: ')}"
            done = sum(folders.settled(self.workdir / arm, steps) == "finished" for arm, steps in self.arms.items())
            self.say(f"{words} [{done}/{len(self.arms)} finished]")

    def _stop(self) -> None:
        """Pass a signal on: with the first one arms save and end, a second one interrupts them."""
        if self.told < self.asked:
            if self.told == 0 and self.running:
                names = ", ".join(attempt.name for attempt in self.running.values())
                self.say(f"stopping: {names} will save and end")
            self.told += 1
            for attempt in self.running.values():
                attempt.stop()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def ask(number: int, frame: FrameType | None) -> None:
            self.asked += 1
            self.signal = number

        # What was started under nohup goes on when the terminal closes.
        heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, ask) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
