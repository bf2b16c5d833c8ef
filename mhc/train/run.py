"""Train a config in a folder, from where the folder was left, and write checkpoints, curves and a summary."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from mhc import config as configs
from mhc import distributed, provenance, stdio
from mhc.config import Config
from mhc.data.corpus import fidelity
from mhc.files import read_json, write_json
from mhc.model.flops import count_parameters
from mhc.monitor import train_log
from mhc.monitor.phases import Phases, Watchdog
from mhc.monitor.progress import Progress, duration
from mhc.sharding import in_order, put_batch, threads_of_one_cpu
from mhc.train.actions import act
from mhc.train.checkpoint import committed_steps
from mhc.train.opened import Opened, Pending, open_run
from mhc.train.setup import Setup
from mhc.train.stalls import Stalls
from mhc.train.step import Faults


def run(config: Config, workdir: str | Path, origin: provenance.StoredRun | None = None) -> int:
    """Train to ``train.steps``, from the last committed checkpoint of ``workdir`` if there is one.

    Where several processes share the run (`mhc.distributed`), all of them call this.

    Args:
      workdir: the run's folder, local or ``gs://…`` (`mhc.remote`).
      origin: the run.json that the config is from; every difference from it is printed on a line of its own.

    Returns:
      The exit code: 0 when the run ended or was asked to stop (SIGTERM, SIGINT) and saved, 3 when the guard halted it.
      Where another process is lost, this one ends with `distributed.LOST`; where the watchdog is to end it, with
      `phases.STALLED`.

    Raises:
      UserError: the folder holds a run of another config, or the data, mesh or batch cannot be used. Nothing is
        written.
    """
    with distributed.leaving_when_lost(str(workdir)):
        with distributed.together():
            prepared = Run(config, workdir, origin=origin)
        return prepared.execute()


class Run:
    """Runs the training of a config in its folder. ``execute`` reads from top to bottom: open, loop, finish.

    Attributes:
      setup: config, devices and data, checked; nothing is written before ``execute``.
      opened: the run once its folder is open.
      phases: what the run is doing, and where its time goes.
    """

    def __init__(
        self,
        config: Config,
        workdir: str | Path,
        faults: Faults | None = None,
        devices: Sequence[jax.Device] | None = None,
        origin: provenance.StoredRun | None = None,
    ):
        """Check everything that a user may have got wrong.

        Args:
          faults: test hook.
          devices: those to use; None: all.
          origin: as of `run`.

        Raises:
          UserError: as of `run`.
        """
        self.setup = Setup(config, workdir, devices, origin)
        self.opened: Opened | None = None
        self._faults = faults
        self._stop = distributed.StopRequest()
        self.phases = Phases()

    def execute(self) -> int:
        """Train, and return the exit code: 0 or, when the guard halted the run, 3."""
        setup = self.setup
        config, home = setup.config, setup.home
        with contextlib.ExitStack() as closing:
            closing.callback(setup.data.close)
            closing.enter_context(self._stop.listening())
            closing.enter_context(self.phases.listening())
            with distributed.together():
                setup.check_alike()
            with distributed.together():
                home.wait_until_free()
            with distributed.together():
                closing.enter_context(home.held(writes=setup.primary))
            stderr = stdio.lossy(sys.stderr)
            stream = None if setup.primary else closing.enter_context(open(os.devnull, "w"))  # one process speaks
            every, label = config.monitor.progress_every, setup.place.name
            progress = Progress(config.train.steps, every=every, label=label, stream=stream)
            closing.callback(progress.close)
            if distributed.gather(_finished(setup))[0]:
                progress.note(f"{setup.place}: finished already")
                return 0
            log: train_log.TrainLog | None = None
            if setup.primary:
                log = train_log.TrainLog(home.files / train_log.FILE)
                closing.callback(log.close)
                closing.enter_context(log.keeping_stderr())
                progress.log = log.line
            stalls = Stalls(config.watchdog, home, self._step, stderr, log)
            watchdog = Watchdog(self.phases, config.watchdog, stalls.begin, stalls.end)
            closing.enter_context(watchdog.watching())
            with self.phases("start"):
                self.opened = open_run(setup, progress, self.phases, closing, self._faults)
            if self.opened.standing.step < config.train.steps:
                with jax.transfer_guard("disallow"):  # a transfer that is not meant would make every step wait
                    self._loop(self.opened)
            return self._finish(self.opened, log)

    def _step(self) -> int:
        """Return the number of completed updates, 0 before the folder is open."""
        return 0 if self.opened is None else self.opened.standing.step

    # ----------------------------------------------------------------------------------------------------------- loop

    def _loop(self, run: Opened) -> None:
        """Run the steps: start one, read the metrics of the one before, then probe, validate or save if that is due.

        The device always has the next step queued while the last one's metrics are fetched, and never more than that.
        """
        setup, data, mesh, phases = self.setup, self.setup.data, self.setup.mesh, self.phases
        config = setup.config
        run.progress.note(
            f"{setup.place}: compiling, then training from step {run.standing.step + 1}{_judged_from(config)}"
        )
        if run.fresh:  # not: at step 0, where a run may have been stopped after its probe
            run.measure(None)
            if config.train.init_from is not None:  # from here on the run needs its source no more
                run.save()
        phases.take()  # what came before is no step's
        run.last_time = time.perf_counter()
        pending: Pending | None = None
        while run.standing.step < config.train.steps and run.halted is None and not self._stop.poll():
            with jax.profiler.StepTraceAnnotation("train", step_num=run.standing.step + 1):
                position = data.get_state()
                with phases("data"):
                    batch = next(data)
                with phases("step"):
                    run.state, metrics = in_order(run.trainer.step(run.state, put_batch(batch, mesh)), mesh)
                run.standing.step += 1
                before, pending = pending, Pending(run.standing.step, metrics, batch, position)
                if before is not None and (alarm := run.log(before)):
                    pending = act(run, alarm, before, pending)

            step = run.standing.step
            last = step == config.train.steps
            validate, probe, save = (
                _is_due(step, config.validation.every, last),
                run.probe is not None and _is_due(step, config.monitor.probe_every, last),
                _is_due(step, config.checkpoint.every, last),
            )
            if pending is not None and (validate or probe or save or threads_of_one_cpu(mesh)):
                # The line of this step is written before its checkpoint: a crash after the save loses no line.
                now, pending = pending, None
                if alarm := run.log(now, with_validation=validate, with_probe=probe):
                    act(run, alarm, now, None)
                if save and run.standing.step == now.step and run.halted is None:
                    run.save()
        if pending is not None and run.halted is None and (alarm := run.log(pending)):
            act(run, alarm, pending, None)
        if self._stop.asked and run.halted is None:
            run.save()

    # ------------------------------------------------------------------------------------------------------------ end

    def _finish(self, run: Opened, log: train_log.TrainLog | None) -> int:
        """Write the summary, once every checkpoint is committed, and return the exit code."""
        setup, step = self.setup, run.standing.step
        with self.phases("checkpoint"):
            run.checkpoints.wait()
        run.record.flush(run.checkpoints.left())
        reason = "halted" if run.halted else "finished" if step >= setup.config.train.steps else "stopped"
        if reason == "stopped":
            run.record.event("stopped", step, reason="signal")
        withheld = fidelity.why_withheld(fidelity.worst(setup.lost.values()), setup.config.data.tokenizer)
        summary = {
            **(run.record.summary() if setup.primary else {}),
            **({"bits_per_byte_reason": withheld} if withheld else {}),
            "steps": step,
            "tokens": run.standing.tokens,
            "seconds": run.seconds,
            "params": count_parameters(run.trainer.definition)["total"],
            "exit_reason": reason,
        }
        if setup.primary:
            write_json(setup.home.files / "summary.json", summary)
        if reason == "stopped":
            run.progress.note(f"{setup.place}: stopped and saved after step {step}; the same command resumes it")
        if reason == "halted":
            run.progress.note(f"{setup.place}: halted: {run.halted}; saved after step {step}, see events.jsonl")
        if log is not None:
            log.line(f"{reason} after step {step}, {duration(run.seconds)} of training")
        return 3 if reason == "halted" else 0


def _finished(setup: Setup) -> bool:
    """Return whether the folder holds the whole run: a checkpoint of the last step, and the summary as of then."""
    steps, summary = committed_steps(setup.place), setup.home.files / "summary.json"
    if not steps or steps[-1] < setup.config.train.steps or not summary.is_file():
        return False
    return read_json(summary)["steps"] == steps[-1]


def _is_due(step: int, every: int, last: bool) -> bool:
    return last or (every > 0 and step % every == 0)


def _judged_from(config: Config) -> str:
    """Return a line for the start of a short run: from which step on its z-scores are judged."""
    least, steps = config.zscore_min_history, config.train.steps
    if least >= steps:
        return f"; {steps} steps are too few to judge loss and gradient norm by (monitor.zscore_min_history={least})"
    if least >= configs.ZSCORE_HISTORY:
        return ""
    return f"; loss and gradient norm are judged from step {least + 1} on (monitor.zscore_min_history={least})"
