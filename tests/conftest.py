"""Set up every test: eight CPU devices and a compilation cache before anything imports jax, checks, markers, times."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from mhc import xla_options
from tests import durations, shapes

# What a shell starts in the background has SIGINT ignored, and every process that a test starts would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})

# Most of the suite's time is compilation: without LLVM's optimisations and the fusion emitters it is seven times
# shorter, and programs as small as the tests' run no slower. Numbers differ in the last bits only, and no test compares
# them with those of an optimised program. Flags that the environment sets already win. One that
# this release of XLA does not know would end every process, and is left out.
_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    "--xla_backend_optimization_level": "0",
    "--xla_cpu_use_fusion_emitters": "false",
    "--xla_cpu_parallel_codegen_split_count": "1",  # cutting a small program for several threads costs a fifth more
    # Two independent collectives of one program in a fixed order: devices that are threads may deadlock otherwise.
    "--xla_cpu_enable_concurrency_optimized_scheduler": "false",
}

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers have them from the process that started them
    _given = os.environ.get("XLA_FLAGS", "")
    _wanted = [f"{flag}={value}" for flag, value in _FLAGS.items() if flag not in _given]
    _unknown = xla_options.unknown_flags(_wanted)
    os.environ["XLA_FLAGS"] = " ".join([_given, *(flag for flag in _wanted if flag not in _unknown)]).strip()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"  # [B, B] + [B] would go to the columns, whatever was meant
# Programs that tests start as subprocesses inherit these.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

shapes.install("mhc")

# Tracing makes many objects that reference counts free; looking for cycles among them as often as Python does by itself
# costs a quarter of the time of tracing.
gc.set_threshold(50_000, 10, 10)

# Time limits of single examples say how loaded the machine is, not whether a property holds.
hypothesis.settings.register_profile("project", deadline=None)
hypothesis.settings.load_profile("project")


_MOST_MAPS = 20_000  # of the 65,530 memory maps that Linux gives a process; a module adds some thousands at most


@pytest.fixture(scope="module", autouse=True)
def _few_programs() -> Iterator[None]:
    """Drop the compiled programs when there are many: a process that keeps them all runs out of memory maps."""
    yield
    maps = Path("/proc/self/maps")
    few = maps.is_file() and maps.read_bytes().count(b"\n") <= _MOST_MAPS
    if "jax" in sys.modules and not few:
        sys.modules["jax"].clear_caches()
        gc.collect()


@pytest.fixture(scope="module", autouse=True)
def _without_sync(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let no test wait for the disk, except those that kill a run or fill its disk; the others see no difference."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name != "faults":
            patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write forty short texts and return the source that reads them."""
    from tests.small_runs import write_corpus

    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="module")
def compiled_once() -> Iterator[None]:
    """Let the runs of one config share their programs. Runs in processes of their own are in tests/faults."""
    import functools

    from mhc.monitor import probes
    from mhc.train import opened

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opened, "Trainer", functools.cache(opened.Trainer))
        patch.setattr(probes, "compile_probe", functools.cache(probes.compile_probe))
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--slowest FILE``."""
    parser.addoption("--slowest", type=Path, metavar="FILE", help="write which tests took how many CPU seconds")


def pytest_configure(config: pytest.Config) -> None:
    """Measure every test, in workers too; the process that started them writes the file."""
    path = None if hasattr(config, "workerinput") else config.getoption("slowest")
    config.pluginmanager.register(durations.Durations(path))


def pytest_collection_finish() -> None:
    """Leave what was imported out of every later search for cycles."""
    gc.collect()
    gc.freeze()


REASONS = ("product", "process", "long", "scripts")  # why `make test` leaves a test out; pyproject.toml explains them


# Kinds with a like that `make test` holds to what every kind is held to: mhc and shc stand for the other relatives of
# mhc, hc for frac, attn_res for the other kinds over depth. Their golden values and their configs are fast for each.
LIKES = frozenset(
    {"identity", "mhc_lite", "kromhc", "frac", "go_mhc", "tbp_mhc", "iso", "ortho", "circulant"}
    | {"denseformer", "laurel"}
)
ROOMS = frozenset({"contracts", "residual", "model", "interop", "eval"})  # whose tests compile for each kind


def _has_a_like(item: pytest.Item) -> bool:
    """Return whether a test tries one of `LIKES` in a room where every kind compiles."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    kind = parameters.get("kind") or getattr(parameters.get("group"), "kind", None)
    room = item.path.relative_to(item.config.rootpath).parts[1]
    return isinstance(kind, str) and kind in LIKES and room in ROOMS and "golden" not in item.path.name


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that gives a reason as ``slow``, before ``-m`` chooses; refuse ``slow`` without a reason."""
    for item in items:
        if _has_a_like(item):
            item.add_marker("product")
        if item.get_closest_marker("slow"):
            raise pytest.UsageError(f"{item.nodeid} is marked slow: mark it by its reason, one of {', '.join(REASONS)}")
        if any(item.get_closest_marker(reason) for reason in REASONS):
            item.add_marker("slow")


_cases: dict[tuple[str, str], int] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up what passed tests recorded as ``record_property("cases of …", count)``, by file."""
    path = report.nodeid.partition("::")[0]
    for name, count in report.user_properties:
        if report.when == "call" and report.passed and name.startswith("cases of "):
            _cases[path, name] = _cases.get((path, name), 0) + int(str(count))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many cases were checked by tests that go through many each."""
    for (path, name), count in _cases.items():
        terminalreporter.write_line(f"{path}: {count} {name} passed")
