"""Report and act when a run makes no progress."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from mhc.config import WatchdogConfig
from mhc.files import append_jsonl
from mhc.monitor.phases import STALLED, Stall, dump_stacks
from mhc.monitor.train_log import TrainLog
from mhc.run_folder import RunFolder


class Stalls:
    """Reports a stall as a line on stderr and in train.log, an event, and the stacks of all threads.

    Its methods run in the watchdog's thread. Every process of several reports: those that wait for a slower one are in
    a step.

    Args:
      config: whether a stall ends the run.
      home: the run's folder.
      step: gives the number of completed updates.
      stderr: where the lines go.
      log: train.log; None in a process that does not write.
    """

    def __init__(
        self, config: WatchdogConfig, home: RunFolder, step: Callable[[], int], stderr: Any, log: TrainLog | None
    ) -> None:
        self._config, self._home, self._step = config, home, step
        self._stderr, self._log = stderr, log

    def begin(self, stall: Stall) -> None:
        """Report that nothing gets on, and end the process where ``watchdog.abort`` asks for it."""
        process = f" (process {jax.process_index()})" if jax.process_count() > 1 else ""
        message = (
            f"{self._home.place}{process}: no progress for {stall.seconds:.3g} s: {stall.doing.words}, "
            f"after step {self._step()}"
        )
        self._say(f"{message}; the stacks of all threads follow")
        self._event("stall", stall)
        dump_stacks(*(stream for stream in (self._stderr, self._log) if stream is not None))
        if self._config.abort:
            self._say(f"{message}: given up (watchdog.abort); the same command goes on from the last checkpoint")
            # Only the copy of the record is waited for, and not for long: what hangs would hang the end too.
            copying = threading.Thread(target=self._home.push, daemon=True)
            copying.start()
            copying.join(15.0)
            os._exit(STALLED)

    def end(self, stall: Stall) -> None:
        """Report that the run goes on."""
        self._say(
            f"{self._home.place}: going on after {stall.seconds:.3g} s {stall.doing.words}, after step {self._step()}"
        )
        self._event("stall_over", stall)

    def _say(self, text: str) -> None:
        self._stderr.write(text + "\n")
        self._stderr.flush()
        if self._log is not None:
            self._log.line(text)

    def _event(self, event: str, stall: Stall) -> None:
        if self._log is None:
            return
        details = {"phase": stall.doing.phase, "compiling": stall.doing.compiling, "seconds": stall.seconds}
        line = {"step": self._step(), "event": event, "time": time.time(), **details}
        with contextlib.suppress(OSError):  # a full disk; the lines on stderr say it too
            append_jsonl(self._home.files / "events.jsonl", line)
