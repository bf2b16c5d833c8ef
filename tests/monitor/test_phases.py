"""Test phases: their seconds, what jax compiles in them, and a watchdog that reports the one that hangs."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhc.config import WatchdogConfig
from mhc.monitor import phases as module
from mhc.monitor.phases import Phases, Stall, Watchdog, device_memory, dump_stacks


def fresh() -> Callable[[Any], jax.Array]:
    """Return a jitted function that nobody compiled before."""
    return jax.jit(lambda x: jnp.sin(x) + 1.0)


# Seconds --------------------------------------------------------------------------------------------------------------


def test_the_time_of_a_phase_is_its_own_until_it_is_taken():
    phases = Phases()
    with phases("checkpoint") as one:
        time.sleep(0.02)
    with phases("probe"), phases("checkpoint") as inner:
        time.sleep(0.01)
    taken = phases.take()
    assert taken["checkpoint_seconds"] == pytest.approx(one.seconds + inner.seconds) and one.seconds >= 0.02
    assert taken["probe_seconds"] >= inner.seconds >= 0.01 and taken["validation_seconds"] == 0.0
    assert set(phases.take().values()) == {0}


def test_a_phase_that_raises_is_over():
    phases = Phases()
    with pytest.raises(KeyError), phases("probe"):
        raise KeyError
    assert phases.doing().phase == "record" and phases.take()["probe_seconds"] > 0


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted), max_size=8))
def test_nested_spans_count_once(spans):
    """The seconds are the number of unit intervals that at least one span covers."""
    covered = {unit for start, end in spans for unit in range(start, end)}
    assert module._union([(float(start), float(end)) for start, end in spans]) == len(covered)


# Compilation ----------------------------------------------------------------------------------------------------------


def test_a_program_compiled_after_its_phase_had_its_own_is_a_recompilation():
    phases, function = Phases(), fresh()
    with phases.listening():
        for size, compiles, again in ((3, True, 0), (3, False, 0), (4, True, 1), (4, False, 0)):
            with phases("step"):
                function(np.ones(size, np.float32)).block_until_ready()
            taken = phases.take()
            assert (taken["compile_seconds"] > 0, taken["recompilations"]) == (compiles, again)
        with phases("probe"):  # which has its own programs
            function(np.ones(5, np.float32))
        with phases("checkpoint"):  # which has none to speak of
            function(np.ones(6, np.float32))
        taken = phases.take()
        assert taken["recompilations"] == taken["compile_seconds"] == 0  # of steps
    with phases("step"):
        function(np.ones(7, np.float32))
    assert phases.take()["recompilations"] == 0  # not heard any more


def test_what_other_threads_compile_is_not_counted():
    phases, function = Phases(), fresh()
    with phases.listening():
        thread = threading.Thread(target=lambda: function(np.ones(3, np.float32)))
        thread.start()
        thread.join()
        assert phases.take() == dict.fromkeys(phases.take(), 0)


def test_a_phase_is_compiling_when_it_is_new_and_while_a_program_is_made():
    phases, seen, now = Phases(), [], time.time()

    def compiling(*done: str) -> None:
        for what in done:
            jax.monitoring.record_event_time_span(f"/jax/core/compile/{what}_duration", now, now)
        seen.append(phases.doing().compiling)

    with phases.listening():
        with phases("step"):
            compiling()
            compiling("jaxpr_trace", "backend_compile")  # there may be more of them
        with phases("step"):
            compiling()
            compiling("jaxpr_trace")
            compiling("jaxpr_to_mlir_module")
            compiling("backend_compile")
        with phases("data"):  # nothing to compile
            compiling()
    assert seen == [True, True, False, True, True, False, False]
    assert phases.doing().words == "writing the record"


def test_memory_is_that_of_the_fullest_device_where_it_is_known():
    class Device:
        def __init__(self, stats: dict[str, int] | None):
            self._stats = stats

        def memory_stats(self) -> dict[str, int] | None:
            return self._stats

    def of(*stats: dict[str, int] | None) -> dict[str, int | None]:
        return device_memory([Device(one) for one in stats])

    one, other = {"bytes_in_use": 5, "peak_bytes_in_use": 9, "x": 1}, {"bytes_in_use": 7, "peak_bytes_in_use": 8}
    assert of(one, other) == {"memory_bytes": 7, "memory_peak_bytes": 9}
    unknown = {"memory_bytes": None, "memory_peak_bytes": None}
    assert of(one, None) == of({"bytes_in_use": 5}) == of() == unknown
    assert device_memory(jax.local_devices()) == unknown  # those of a CPU


# The watchdog ---------------------------------------------------------------------------------------------------------


class Reports:
    """Holds what a watchdog reported, and when."""

    def __init__(self) -> None:
        self.stalled: list[tuple[float, Stall]] = []
        self.resumed: list[Stall] = []

    def watch(self, phases: Phases, **fields: Any) -> Watchdog:
        return Watchdog(
            phases,
            WatchdogConfig(**fields),
            lambda stall: self.stalled.append((time.monotonic(), stall)),
            self.resumed.append,
        )


def test_a_stall_is_reported_once_within_its_time_and_its_end_too():
    phases, said = Phases(), Reports()
    with said.watch(phases, seconds=0.2).watching():
        for _ in range(2):
            with phases("data"):
                began = time.monotonic()
                time.sleep(0.7)
            time.sleep(0.05)
    assert len(said.stalled) == len(said.resumed) == 2
    for at, stall in said.stalled[1:]:
        assert 0.2 <= at - began < 0.6 and stall.seconds >= 0.2
        assert stall.doing.words == "waiting for data"
    assert all(0.65 < over.seconds < 1.5 and over.doing.phase == "data" for over in said.resumed)


def test_what_gets_on_is_not_reported():
    phases, said = Phases(), Reports()
    with said.watch(phases, seconds=0.4).watching(), phases("validation"):
        for _ in range(40):  # longer than the limit, batch by batch
            time.sleep(0.02)
            phases.beat()
    assert not said.stalled


def test_compiling_has_a_limit_of_its_own():
    phases, said = Phases(), Reports()
    with said.watch(phases, seconds=0.1, compile_seconds=30.0).watching():
        for _ in range(2):
            with phases("step"):  # new: its program is being made
                time.sleep(0.4)
        time.sleep(0.05)
    assert [stall.doing for _, stall in said.stalled] == [said.resumed[0].doing]  # the second alone
    assert said.resumed[0].doing.words == "in a step"
    phases, said = Phases(), Reports()
    with said.watch(phases, seconds=0.1, compile_seconds=0.0).watching(), phases("step"):
        time.sleep(0.4)
    assert said.stalled[0][1].doing.words == "compiling (step)"


def test_a_watchdog_of_zero_seconds_is_no_thread():
    before = threading.active_count()
    with Reports().watch(Phases(), seconds=0.0).watching():
        assert threading.active_count() == before


def test_the_stacks_of_all_threads_are_dumped(tmp_path: Path) -> None:
    waiting = threading.Event()

    def hangs_here() -> None:
        waiting.wait()

    thread = threading.Thread(target=hangs_here, name="the one that hangs")
    thread.start()
    try:
        with (tmp_path / "log").open("w") as file:
            dump_stacks(file, io.StringIO())  # which has no descriptor
    finally:
        waiting.set()
        thread.join()
    said = (tmp_path / "log").read_text()
    assert f"0x{thread.ident:016x} the one that hangs" in said.splitlines()[0]
    assert "in hangs_here" in said and "test_the_stacks_of_all_threads_are_dumped" in said
