"""Track what a run is doing and where its time goes, by phases and compilations, and watch for lack of progress."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from mhc.config import WatchdogConfig

STALLED = 5  # exit code of a run that its watchdog ended

# Phases by name, and what is said of a run that is in one. Those of programs are compiled when they are first entered.
WORDS = {
    "start": "starting",
    "data": "waiting for data",
    "step": "in a step",
    "validation": "in a validation",
    "probe": "in a probe",
    "checkpoint": "at a checkpoint",
    "rewind": "rewinding",
    "record": "writing the record",  # all that is between the others
}
PROGRAMS = ("step", "validation", "probe")

_TRACED = "/jax/core/compile/jaxpr_trace_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"  # also of a program that the persistent cache has
_COMPILING = "/jax/core/compile/"


class Doing(NamedTuple):
    """Describes what a run is doing."""

    phase: str
    since: float  # last sign of progress, by time.monotonic
    compiling: bool

    @property
    def words(self) -> str:
        """Return in words what the run is doing."""
        return f"compiling ({self.phase})" if self.compiling and self.phase != "start" else WORDS[self.phase]


class Span:
    """Holds how long a phase took: ``seconds``, once it is over."""

    seconds = 0.0


class Phases:
    """Keeps the phases of one thread, one after the other, and their seconds.

    ``with phases("data") as span:`` enters one; ``beat()`` says within it that the run gets on. Time within a phase
    that lies in another counts to both. What jax compiles in the thread is seen while ``listening``. A trace of
    jax.profiler shows the phases by name.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._seconds = dict.fromkeys(WORDS, 0.0)
        self._entered: set[str] = set()
        self._known = True  # the phase in hand had its programs before
        self._lowering = False  # between the trace of a program and its machine code
        self._compiled: list[tuple[float, float]] = []  # in steps: when, by time.time
        self._recompilations = 0
        self._phase, self._since = "record", time.monotonic()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[Span]:
        span, began = Span(), time.monotonic()
        before = self._phase, self._known
        self._phase, self._since, self._lowering = phase, began, False
        self._known = phase in self._entered or phase not in (*PROGRAMS, "start")
        try:
            with jax.profiler.TraceAnnotation(phase):
                yield span
        finally:
            now = time.monotonic()
            span.seconds = now - began
            self._seconds[phase] += span.seconds
            self._entered.add(phase)
            self._phase, self._known = before
            self._since, self._lowering = now, False

    def beat(self) -> None:
        """Report progress within the current phase."""
        self._since = time.monotonic()

    def doing(self) -> Doing:
        """Return what the run is doing now; any thread may call this."""
        return Doing(self._phase, self._since, self._lowering or not self._known)

    def take(self) -> dict[str, Any]:
        """Return the seconds spent on each kind of work since the last call, and how many programs were compiled again.

        Keys: ``data_wait``, ``checkpoint_seconds``, ``validation_seconds``, ``probe_seconds``; ``compile_seconds`` of
        steps; ``recompilations``, the number of programs compiled in phases that had theirs before.
        """
        taken: dict[str, Any] = {"compile_seconds": _union(self._compiled)}
        names = {phase: f"{phase}_seconds" for phase in ("checkpoint", "validation", "probe")} | {"data": "data_wait"}
        for phase, name in names.items():
            taken[name], self._seconds[phase] = self._seconds[phase], 0.0
        taken["recompilations"], self._recompilations = self._recompilations, 0
        self._compiled = []
        return taken

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note within the block what jax compiles."""

        def heard(event: str, start_time: float, end_time: float, **kwargs: str | int) -> None:
            if not event.startswith(_COMPILING) or threading.get_ident() != self._thread:
                return
            if self._phase == "step":
                self._compiled.append((start_time, end_time))
            if event == _TRACED:
                self._lowering = True
            elif event == _COMPILED:
                self._lowering = False
                self._recompilations += self._phase in PROGRAMS and self._known
            self.beat()

        jax.monitoring.register_event_time_span_listener(heard)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_time_span_listener(heard)


def _union(spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds that at least one span covers: a function traced within another is in the other's span too."""
    total, reached = 0.0, -float("inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def device_memory(devices: Sequence[jax.Device]) -> dict[str, int | None]:
    """Return ``memory_bytes`` in use and ``memory_peak_bytes`` so far of the fullest device; None: not known (CPU)."""
    stats = [device.memory_stats() for device in devices]
    names = {"memory_bytes": "bytes_in_use", "memory_peak_bytes": "peak_bytes_in_use"}
    known = all(device is not None and set(names.values()) <= set(device) for device in stats)
    return {key: max(device[name] for device in stats) if known and stats else None for key, name in names.items()}


class Stall(NamedTuple):
    """Describes a run without progress."""

    doing: Doing
    seconds: float  # for so long


class Watchdog:
    """Reports a run without progress from a thread of its own: once for each time, and again when it goes on.

    A thread that holds the interpreter's lock and never lets go of it stops this one too.

    Args:
      stalled: called, in the watchdog's thread, when there was no progress for ``watchdog.seconds``, or, while a
        program is compiled, for ``watchdog.compile_seconds`` if that is longer.
      resumed: called when there is progress again.
    """

    def __init__(
        self,
        phases: Phases,
        config: WatchdogConfig,
        stalled: Callable[[Stall], None],
        resumed: Callable[[Stall], None],
    ):
        self._phases, self._config = phases, config
        self._stalled, self._resumed = stalled, resumed
        self._end = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the run; with ``watchdog.seconds`` of 0 do nothing."""
        if not self._config.seconds:
            yield
            return
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()

    def _watch(self) -> None:
        reported: Doing | None = None
        look = min(1.0, self._config.seconds / 10)  # seconds between two looks, at most: a phase may change meanwhile
        wait = look
        while not self._end.wait(wait):
            doing, now = self._phases.doing(), time.monotonic()
            idle = now - doing.since
            if reported is not None:
                if doing.since == reported.since:
                    wait = look
                    continue
                self._resumed(Stall(reported, doing.since - reported.since))
                reported = None
            limit = max(self._config.seconds, self._config.compile_seconds if doing.compiling else 0.0)
            if idle >= limit:
                reported = doing
                self._stalled(Stall(doing, idle))
            wait = min(look, max(limit - idle, 1e-3))


def dump_stacks(*streams: Any) -> None:
    """Write the stacks of all threads, and the names of the threads before them, to files that have a descriptor."""
    names = ", ".join(f"0x{thread.ident or 0:016x} {thread.name}" for thread in threading.enumerate())
    for stream in streams:
        try:
            number = stream.fileno()
        except (AttributeError, ValueError, io.UnsupportedOperation):  # a stream of a notebook or a test
            continue
        stream.write(f"threads: {names}\n")
        stream.flush()
        faulthandler.dump_traceback(file=number, all_threads=True)
