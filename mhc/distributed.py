"""Let the processes of a run find each other, agree, and stop together. jax.distributed does the work.

Every process runs the same program on its devices and its rows of each batch; process 0 alone writes. What one process
alone knows (a user's mistake, a signal, a position in its data) is shared here, so that all take the same path. Every
function below that waits for the others must be called by all of them, in the same order.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from mhc.config import DistributedConfig
from mhc.errors import UserError
from mhc.full_disk import DiskFull

LOST = 4  # exit code of a process that lost another one

# Words by which XLA, its transports and the coordination service report a process that is gone.
_SIGNS_OF_LOSS = ("gloo", "nccl", "connection", "unavailable", "deadline_exceeded", "aborted", "heartbeat", "timed out")


def initialize(config: DistributedConfig) -> None:
    """Join the run's other processes, before jax's first use of a device. With ``cluster=none`` do nothing.

    If they do not find each other within ``start_timeout``, the process prints a line and ends with code ``LOST``.

    Raises:
      UserError: the environment names no cluster.
      SystemExit: the coordinator's host has no address by then; the code is ``LOST``.
    """
    if config.cluster == "none":
        return
    given: dict[str, Any] = {}
    if config.cluster == "address":
        assert config.coordinator is not None  # mhc.config.checks refuses it
        _await_host(config.coordinator.rpartition(":")[0].strip("[]"), config.start_timeout)
        sys.stderr.write(
            f"process {config.process_id} of {config.processes}: joining the others at {config.coordinator}, "
            f"for at most {config.start_timeout} s\n"
        )
        given = {
            "coordinator_address": config.coordinator,
            "num_processes": config.processes,
            "process_id": config.process_id,
            "cluster_detection_method": "deactivate",
        }
    elif config.cluster != "auto":
        given = {"cluster_detection_method": config.cluster}
    # jax logs a missing cluster at length; below it is one line.
    logging.getLogger("jax._src.clusters.cluster").setLevel(logging.CRITICAL)
    try:
        with _giving_up(config):
            jax.distributed.initialize(
                **given,
                # Longer than ours, since jax aborts the process with a stack trace when its timeout ends.
                initialization_timeout=config.start_timeout + 60,
                heartbeat_timeout_seconds=config.timeout,
                shutdown_timeout_seconds=config.timeout,
            )
    except RuntimeError as error:
        if "Failed to start RPC server" not in str(error):
            raise
        raise UserError(
            f"distributed.coordinator: {config.coordinator or 'the address'} cannot be listened on: is the port taken?"
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        missing = f"{error} is not set" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise UserError(
            f"distributed.cluster: given {config.cluster!r}, but the environment does not describe such a cluster "
            f"({missing}); allowed: none, or address with coordinator, processes and process_id"
        ) from None


@contextlib.contextmanager
def _giving_up(config: DistributedConfig) -> Iterator[None]:
    """End this process with a line and code ``LOST`` if the block takes longer than ``start_timeout``."""

    def leave() -> None:
        at = f" at {config.coordinator}" if config.coordinator else ""
        sys.stderr.write(
            f"error: distributed.start_timeout: not all processes have joined{at} after {config.start_timeout} s; do "
            "all of them run, each with its own process_id, and do they reach process 0?\n"
        )
        sys.stderr.flush()
        os._exit(LOST)  # an exception in another thread would not end the wait

    timer = threading.Timer(config.start_timeout, leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _await_host(host: str, seconds: float) -> None:
    """Wait until the host has an address, which comes late where the host starts at the same time."""
    end, reported = time.monotonic() + seconds, False
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            problem = f"distributed.coordinator: host {host}: {error.strerror or error}"
        if time.monotonic() >= end:
            sys.stderr.write(f"error: {problem}, after {seconds:g} s\n")
            sys.exit(LOST)
        if not reported:
            sys.stderr.write(f"{problem}; trying for at most {seconds:g} s\n")
            reported = True
        time.sleep(1.0)


def primary() -> bool:
    """Return whether this is process 0, which writes for all."""
    return jax.process_index() == 0


def gather(value: Any) -> list[Any]:
    """Return the JSON values that all processes give, in the order of the processes. This waits for all of them."""
    if jax.process_count() == 1:
        return [value]
    ours = np.frombuffer(json.dumps(value).encode(), np.uint8)
    with jax.transfer_guard("allow"):
        sizes = np.asarray(multihost_utils.process_allgather(np.asarray([ours.size], np.int32))).reshape(-1)
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: ours.size] = ours
        rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def wait(name: str) -> None:
    """Wait until every process is here. ``name`` names the place in messages of the runtime."""
    if jax.process_count() > 1:
        with jax.transfer_guard("allow"):
            multihost_utils.sync_global_devices(name)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Share users' mistakes: if one process raises a UserError in the block, all do. This waits for all at its end.

    Raises:
      UserError: the mistake of this process, or else that of the first process that has one.
    """
    ours: UserError | None = None
    try:
        yield
    except UserError as error:
        ours = error
    mistakes = gather(None if ours is None else [str(ours), isinstance(ours, DiskFull)])
    if ours is not None:
        raise ours
    for number, mistake in enumerate(mistakes):
        if mistake is not None:
            text, no_room = mistake
            raise (DiskFull if no_room else UserError)(f"process {number}: {text}")


class StopRequest:
    """Tells whether the run shall stop and save: after SIGTERM, SIGINT, or a cloud's notice that a machine goes away.

    A single process stops by itself. Several agree on the step after which they stop, through the preemption service of
    jax.distributed, which takes a SIGTERM to any of them for the notice. A second SIGINT interrupts at once.
    """

    def __init__(self) -> None:
        self.asked = False
        self._polled = 0

    def poll(self) -> bool:
        """Return whether to stop. Every process must call this once before each step."""
        if jax.process_count() > 1 and not self.asked:
            self._polled += 1
            self.asked = multihost_utils.reached_preemption_sync_point(self._polled)
        return self.asked

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals within the block.

        A SIGINT that is ignored stays so: a shell starts what runs in the background that way, so that the keyboard's
        interrupt goes to the foreground alone.
        """
        several = jax.process_count() > 1
        interrupts = 0

        def ask(number: int, frame: FrameType | None) -> None:
            nonlocal interrupts
            interrupts += 1
            if interrupts > 1:
                raise KeyboardInterrupt
            if several:
                os.kill(os.getpid(), signal.SIGTERM)  # the preemption service handles it and tells the others
            else:
                self.asked = True

        numbers = (signal.SIGINT,) if several else (signal.SIGTERM, signal.SIGINT)
        heard = [number for number in numbers if (number, signal.getsignal(number)) != (signal.SIGINT, signal.SIG_IGN)]
        before = {number: signal.signal(number, ask) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def leaving_when_lost(where: str) -> Iterator[None]:
    """End this process with code ``LOST`` and one line when the runtime reports that another process is gone.

    This waits for nothing and closes nothing, since saves and barriers would wait for the process that is gone. If the
    runtime merely hears no more from that one, jax.distributed ends this process after ``distributed.timeout``, with
    its own message.

    Args:
      where: the run, as the message begins.
    """
    try:
        yield
    except RuntimeError as error:  # the base of jax's errors
        text = str(error)
        if jax.process_count() == 1 or not any(sign in text.lower() for sign in _SIGNS_OF_LOSS):
            raise
        first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
        sys.stderr.write(
            f"error: {where}: process {jax.process_index()} of {jax.process_count()} stops: another process is lost "
            f"({first[:200]}); start all of them again: the run goes on from its last checkpoint\n"
        )
        sys.stderr.flush()
        os._exit(LOST)
