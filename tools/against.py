"""Compare the results of the code at hand with those of a commit's code, on this machine.

    python tools/against.py                                   # with the default commit, all kinds, minutes
    python tools/against.py COMMIT --kinds plain mhc --only bits
    python tools/against.py --config.model.remat=streams      # other fields, for both

``bits``: the same small run, trained by both, ends with equal bits in every array of the last checkpoint and in every
logged number that is not a time. ``resume``: a run that the commit's code trained half way, and the code at hand to its
end, ends as the commit's own. ``cost``: one compiled training step needs as many FLOPs and bytes, within 1 %.

It prints a line for each kind, then what differs by name. Exit codes: 0 all is equal, 1 something differs, 2 it could
not be compared. Each run is a process on one CPU device; neither code sees the other's compiled programs. The code at
hand is copied first, so that it may be edited meanwhile. The module is longer than most, since it stands alone: it
shares nothing with the code that it compares.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
COMMIT = "409e07b"  # the last before topologies declared themselves
KINDS = ("plain", "hc", "mhc", "mhc_lite", "kromhc", "identity")
PARTS = ("bits", "resume", "cost")
CODE = ("mhc", "configs", "train.py")  # of the code at hand
TOLERANCE = 0.01  # of FLOPs and bytes, relative
SHOWN = 20  # names that are listed of a kind and part
AT_ONCE = 2  # kinds

# What the clock and the machine's memory decide, wherever it is logged.
TIMES = (
    *("time", "seconds", "seconds_p50", "seconds_p95", "wall_seconds", "tokens_per_second", "mfu", "goodput"),
    *("data_wait", "compile_seconds", "checkpoint_seconds", "validation_seconds", "probe_seconds"),
    *("memory_bytes", "memory_peak_bytes"),
)

# A row holds two documents and more; three blocks, so that one is neither the first nor the last.
FIELDS: dict[str, Any] = {
    "model.layers": 3,
    "model.width": 32,
    "attention.heads": 2,
    "data.sequence_length": 96,
    "data.holdout": 0.2,
    "optimizer.lr": 1e-2,
    "schedule.warmup_steps": 4,
    "train.batch_size": 4,
    "validation.batches": 2,
    "checkpoint.keep": 4,
    "monitor.probe_every": 5,
    "monitor.probe_sequences": 2,
    "monitor.tensorboard": False,
    "monitor.progress_every": 0,
    "monitor.zscore_min_history": 64,  # once the default of short runs too
}
# What newer code says otherwise on purpose, with a word of the source that says so: a run of few steps is not judged.
CHANGED = {f"summary.{name}": "judged_steps" for name in ("spike_score_", "spikes", "judged_steps")}
# Fields that newer code needs to be told to do what older code did, with a word of its source that tells it has them.
AS_BEFORE: dict[str, tuple[Any, str]] = {"validation.rule": ("first", 'choices=("spread", "first")')}


class Failed(Exception):
    """Reports why the two could not be compared."""


# Differences ----------------------------------------------------------------------------------------------------------


def differing(one: Any, other: Any, where: str = "") -> list[str]:
    """Return the dotted names at which two trees of JSON values and arrays differ by a bit, each with both values.

    Times are left out. Numbers of another type, arrays of another dtype or shape, and keys that one lacks differ.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        lines = []
        for name in dict.fromkeys([*one, *other]):
            inner = f"{where}.{name}" if where else str(name)
            if name in TIMES:
                continue
            if name not in one or name not in other:
                lines.append(f"{inner}: only in the {'first' if name in one else 'second'}")
            else:
                lines += differing(one[name], other[name], inner)
        return lines
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return [f"{where}: {len(one)} and {len(other)} entries"]
        pairs = enumerate(zip(one, other, strict=True))
        return [line for number, (a, b) in pairs for line in differing(a, b, f"{where}[{number}]")]
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.dtype != other.dtype or one.shape != other.shape:
            return [f"{where}: {one.dtype}{list(one.shape)} and {other.dtype}{list(other.shape)}"]
        a, b = (np.ascontiguousarray(array).reshape(-1) for array in (one, other))
        unequal = (a.view(np.uint8) != b.view(np.uint8)).reshape(a.size, -1).any(axis=1)
        if not unequal.any():
            return []
        first = int(np.flatnonzero(unequal)[0])
        return [f"{where}: {unequal.sum()} of {a.size} entries, first {a[first]!r} and {b[first]!r}"]
    return [] if _bits(one) == _bits(other) else [f"{where}: {one!r} and {other!r}"]


def without_added(lines: list[str]) -> tuple[list[str], set[str]]:
    """Return (the differences without measures that the second code's probes add, the names of those).

    A probe that measures more computes what it did. A measure that the second lacks is a difference.
    """
    found = {line: re.fullmatch(r"probes\[\d+\]\.(.+): only in the second", line) for line in lines}
    return [line for line in lines if not found[line]], {match[1] for match in found.values() if match}


def _bits(value: Any) -> Any:
    return ("float", struct.pack("<d", value)) if isinstance(value, float) else (type(value).__name__, value)


def numbers(tree: Any) -> int:
    """Return how many values `differing` compares in a tree; an array counts as one."""
    if isinstance(tree, Mapping):
        return sum(numbers(value) for name, value in tree.items() if name not in TIMES)
    return sum(map(numbers, tree)) if isinstance(tree, (list, tuple)) else 1


def costlier(one: Mapping[str, float], other: Mapping[str, float], where: str = "") -> list[str]:
    """Return the names of costs that differ by more than `TOLERANCE` of the first, or that one lacks."""
    lines = []
    for name in dict.fromkeys([*one, *other]):
        a, b = one.get(name, math.nan), other.get(name, math.nan)
        if not abs(b - a) <= TOLERANCE * abs(a):  # nor where one is NaN
            lines.append(f"{where}{name}: {a:,.0f} and {b:,.0f}")
    return lines


# A run's record -------------------------------------------------------------------------------------------------------


def checkpoint_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Return {path in the train state: array} of RUN/checkpoints/STEP, read without either code."""
    import jax
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)
    state = folder.absolute() / "state"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        metadata = reader.metadata(state).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata)
        restored = reader.restore(state, restore_args=as_numpy)
    leaves = jax.tree_util.tree_leaves_with_path(restored)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def record(run: Path, steps: int) -> dict[str, Any]:
    """Return all that a run left after its last step, except its config and the record of its starts.

    Raises Failed where it logged other steps than 1 to ``steps``, or has no checkpoint of the last.
    """
    logs = {name: _lines(run / f"{name}.jsonl") for name in ("metrics", "probes", "events")}
    if [line["step"] for line in logs["metrics"]] != list(range(1, steps + 1)):
        raise Failed(f"{run}: it did not log the steps 1 to {steps}")
    last = run / "checkpoints" / str(steps)
    if not last.is_dir():
        raise Failed(f"{run}: it has no checkpoint of step {steps}")
    logs["events"] = [line for line in logs["events"] if line["event"] != "resume"]
    return {  # in the order in which differences are listed: the first step that differs tells most
        **logs,
        "summary": json.loads((run / "summary.json").read_text()),
        "host": json.loads((last / "host" / "metadata").read_text()),
        "checkpoint": checkpoint_arrays(last),
    }


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.is_file() else []


def cut(run: Path, target: Path, step: int) -> None:
    """Copy a run as it was when it had saved ``step``: without later checkpoints and without its summary.

    Later lines of its logs stay, as after a crash: resuming cuts them.
    """
    shutil.copytree(run, target)
    (target / "summary.json").unlink()
    for later in (target / "checkpoints").iterdir():
        if int(later.name) > step:
            shutil.rmtree(later)
    if not (target / "checkpoints" / str(step)).is_dir():
        raise Failed(f"{run}: it has no checkpoint of step {step}")


# Both codes -----------------------------------------------------------------------------------------------------------


class Children:
    """Keeps the processes that run, so that none goes on when the comparison is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False

    def run(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> tuple[int, str, str]:
        """Return (exit code, stdout, stderr). Raises Failed after `end`."""
        with self._lock:
            if self._ended:
                raise Failed("interrupted")
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)
            self._running.add(process)
        with process:
            out, err = process.communicate()
        with self._lock:
            self._running.discard(process)
        return process.returncode, out, err

    def end(self) -> None:
        """End the processes that run; none begins afterwards."""
        with self._lock:
            self._ended = True
            for process in self._running:
                process.kill()


class Side(NamedTuple):
    """Describes one of the two codes, and what its processes may use."""

    root: Path  # holds mhc, configs and train.py
    caches: Path
    children: Children

    def child(self, job: Mapping[str, Any]) -> str:
        """Run a job of `tools.against_child` and return its stdout. Raises Failed with the end of what it said."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
        environment |= {
            "PYTHONPATH": str(self.root),
            "PYTHONDONTWRITEBYTECODE": "1",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.caches / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # a resumed run finds the programs of this side's own
            "MHC_CACHE": str(self.caches / "data"),
        }
        # -P: the folder of the child's own file is no place to import from.
        command = [sys.executable, "-P", str(Path(__file__).with_name("against_child.py"))]
        job = {"root": str(self.root), **job}
        code, out, err = self.children.run([*command, json.dumps(job)], self.root, environment)
        if code:
            message = "\n".join((err or out).strip().splitlines()[-15:])
            raise Failed(f"the code in {self.root} ended with {code}:\n{message}")
        return out

    def train(self, fields: Mapping[str, Any], workdir: Path) -> None:
        """Train a run to its end, or resume it. Raises Failed."""
        overrides = [f"--config.{name}={value}" for name, value in fields.items()]
        config = ["--config", str(self.root / "configs" / "default.py")]
        self.child({"do": "train", "arguments": [*config, *overrides, "--workdir", str(workdir)]})

    def costs(self, fields: Mapping[str, Any]) -> dict[str, float]:
        """Return FLOPs and bytes of one step, with blocks scanned and unrolled. Raises Failed."""
        configs = {name: _nested({**fields, "model.scan": name == "scanned"}) for name in ("scanned", "unrolled")}
        counted = json.loads(self.child({"do": "cost", "configs": configs}))
        return {f"{name} {what}": value for name in counted for what, value in counted[name].items()}


def _nested(fields: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tree: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        group, _, field = name.partition(".")
        tree.setdefault(group, {})[field] = value
    return tree


@contextlib.contextmanager
def both(commit: str, folder: Path, at_hand: Path) -> Iterator[tuple[Side, Side]]:
    """Give (the commit's code, a copy of that at hand) below a folder; the commit's worktree is removed at the end.

    Raises Failed where git, the repository or the commit is missing.
    """
    children = Children()
    old, new = (Side(folder / name, folder / f"caches-{name}", children) for name in ("old", "new"))
    _git("worktree", "add", "--quiet", "--detach", str(old.root), commit)
    try:
        new.root.mkdir()
        for name in CODE:
            if (at_hand / name).is_dir():
                shutil.copytree(at_hand / name, new.root / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(at_hand / name, new.root / name)
        yield old, new
    finally:
        _git("worktree", "remove", "--force", str(old.root))


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    except OSError as error:
        raise Failed(f"git: {error.strerror}") from None
    if done.returncode:
        raise Failed(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def write_corpus(folder: Path) -> str:
    """Write sixty short documents, always the same; returns the source that reads them."""
    rng = random.Random(0)
    folder.mkdir(parents=True)
    words = ("stream", "width", "of", "the", "norm", "is", "—", "depth", "and", "gain")
    for number in range(60):
        text = " ".join(rng.choice(words) for _ in range(rng.randint(3, 9)))
        (folder / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    return f"text:{folder}/*.txt"


# The comparison -------------------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """Holds the result of the comparison for a kind."""

    kind: str
    parts: dict[str, str]  # in words
    differences: dict[str, list[str]]

    def line(self) -> str:
        """Return one line for people."""
        return f"{self.kind:<10}" + "; ".join(f"{part}: {words}" for part, words in self.parts.items())


def as_before(root: Path) -> dict[str, Any]:
    """Return the fields under which the code at hand behaves as the code in ``root``, which lacks these fields."""
    files = [root / "mhc" / "config.py", *(root / "mhc" / "config").glob("*.py")]  # a module once, now a package
    source = "".join(file.read_text("utf-8") for file in files if file.is_file())
    return {name: value for name, (value, word) in AS_BEFORE.items() if word not in source}


def changed_since(root: Path) -> tuple[str, ...]:
    """Return the beginnings of the names of values that differ on purpose from those of the code in ``root``."""
    source = (root / "mhc" / "train" / "record.py").read_text("utf-8") if (root / "mhc").is_dir() else ""
    return tuple(name for name, word in CHANGED.items() if word not in source)


def compare(kind: str, fields: Mapping[str, Any], sides: tuple[Side, Side], folder: Path, parts: set[str]) -> Verdict:
    """Return what differs between two codes in one kind. Raises Failed.

    Args:
      fields: of the config, by dotted name, the same for both. folder: where the runs go. parts: of `PARTS`.
    """
    old, new = sides
    fields = {**fields, "residual.kind": kind}
    purposely = changed_since(old.root)
    steps = fields["train.steps"]
    results: dict[str, str] = {}
    differences: dict[str, list[str]] = {}

    def tell(part: str, lines: list[str], extent: str) -> None:
        lines = [line for line in lines if not line.startswith(purposely)]
        lines, added = without_added(lines)
        differences[part] = lines
        extent += f"; {len(added)} measures are new" if added else ""
        results[part] = f"equal ({extent})" if not lines else f"{len(lines)} DIFFER ({extent})"

    if parts & {"bits", "resume"}:
        old.train(fields, folder / "old")
        reference = record(folder / "old", steps)
        arrays, logged = len(reference["checkpoint"]), numbers(reference) - len(reference["checkpoint"])
    if "bits" in parts:
        new.train({**as_before(old.root), **fields}, folder / "new")
        lines = differing(reference, record(folder / "new", steps))
        tell("bits", lines, f"{arrays} arrays, {logged:,} logged values of {steps} steps")
    if "resume" in parts:
        half = fields["checkpoint.every"]
        cut(folder / "old", folder / "resumed", half)
        new.train(fields, folder / "resumed")
        if not any(line["event"] == "resume" for line in _lines(folder / "resumed" / "events.jsonl")):
            raise Failed(f"{folder / 'resumed'}: it was not resumed")
        lines = differing(reference, record(folder / "resumed", steps))
        tell("resume", lines, f"from step {half}")
    if "cost" in parts:
        before, after = (side.costs(fields) for side in sides)
        worst = max(abs(after.get(name, math.inf) / value - 1) for name, value in before.items())
        flops, moved = before["unrolled flops"], before["unrolled bytes accessed"]
        tell(
            "cost", costlier(before, after), f"{flops:,.0f} FLOPs, {moved:,.0f} bytes a step, at most {worst:.3%} apart"
        )
    return Verdict(kind, results, differences)


def run(
    commit: str,
    kinds: Sequence[str],
    steps: int,
    parts: set[str],
    changes: Mapping[str, Any],
    at_hand: Path = ROOT,
) -> int:
    """Compare all kinds, print a line each and then what differs. Returns the exit code; raises Failed.

    Args:
      steps: even. parts: of `PARTS`. changes: of `FIELDS`, by dotted name. at_hand: holds the code to compare.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="against-") as temporary:
        folder = Path(temporary).resolve()
        fields = {
            **FIELDS,
            "data.source": write_corpus(folder / "corpus"),
            "train.steps": steps,
            "validation.every": max(steps // 4, 1),
            "checkpoint.every": steps // 2,
            **changes,
        }
        verdicts = []
        with both(commit, folder, at_hand) as sides, concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                waiting = [pool.submit(compare, kind, fields, sides, folder / kind, parts) for kind in kinds]
                for future in waiting:
                    verdicts.append(future.result())
                    print(verdicts[-1].line(), flush=True)
            except BaseException:
                sides[0].children.end()
                pool.shutdown(cancel_futures=True)
                raise
    for verdict in verdicts:
        for part, lines in verdict.differences.items():
            for name in lines[:SHOWN]:
                print(f"{verdict.kind}, {part}: {name}")
            if len(lines) > SHOWN:
                print(f"{verdict.kind}, {part}: and {len(lines) - SHOWN} more")
    differ = [verdict.kind for verdict in verdicts if any(verdict.differences.values())]
    took = f"{time.monotonic() - began:.0f} s"
    print(f"{'differs from' if differ else 'equal to'} {commit}: {', '.join(differ or kinds)}, in {took}")
    return 1 if differ else 0


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="tools/against.py",
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="config fields:\n  --config.GROUP.FIELD=VALUE changes a field, for both\n\n"
        "example:\n  python tools/against.py --kinds plain mhc --only bits",
    )
    parser.add_argument("commit", nargs="?", default=COMMIT, help=f"what the code at hand is compared with ({COMMIT})")
    parser.add_argument(
        "--kinds", nargs="+", default=KINDS, metavar="KIND", help=f"of the residual ({' '.join(KINDS)})"
    )
    parser.add_argument("--steps", type=int, default=20, help="of each run; an even number (20)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="what is compared; without: all")
    options, rest = parser.parse_known_args(arguments)
    if options.steps < 2 or options.steps % 2:
        parser.error(f"--steps: given {options.steps}, allowed: 2, 4, 6, …")
    changes = {}
    for argument in rest:
        name, equals, text = argument.removeprefix("--config.").partition("=")
        if not argument.startswith("--config.") or not equals:
            parser.error(f"unknown argument {argument}; allowed: also --config.GROUP.FIELD=VALUE")
        try:
            changes[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            changes[name] = text
    try:
        return run(options.commit, options.kinds, options.steps, set(options.only), changes)
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception: children end, the worktree goes
    sys.exit(main(sys.argv[1:]))
