"""Score a run's checkpoints as they are committed, beside the training that writes them.

    python -m eval.watch runs/a --rows 0
    python -m eval.watch runs/a --config.data.source='text:books/*.txt' --tasks hellaswag,piqa --limit 200
    JAX_PLATFORMS=cpu python -m eval.watch gs://bucket/runs/a --out scores.jsonl --every_seconds 120

Each checkpoint is a line of ``RUN.scores.jsonl``, beside the run's folder, or of ``--out``: step, loss, perplexity and
bits per byte as of `eval.perplexity`, and under ``tasks`` what `eval.harness` gives. A checkpoint that has its line
with the same options is not scored again. A checkpoint that the run deletes while it is read (``checkpoint.keep``) is
left out, in a line on stderr. The watcher ends with the run, or with ``--once`` when every checkpoint that exists has
its line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mhc import cli, remote, stdio
from mhc.errors import UserError
from mhc.eval.common import checkpoints
from mhc.eval.common.rows import add_arguments, corpus_of, rows_of
from mhc.eval.harness import scores as harness_scores
from mhc.eval.harness import tasks as harness_tasks
from mhc.eval.perplexity.score import score, summary
from mhc.remote import Folder

if TYPE_CHECKING:
    import argparse

Scored = dict[str, Any]


def watch(
    run: Folder,
    out: Path,
    how: dict[str, Any],
    measure: Callable[[int], Scored],
    *,
    every_seconds: float,
    once: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Score each committed checkpoint that has no line of ``how`` in ``out`` yet, until the run is done.

    Args:
      how: what the scores depend on beside the checkpoint; part of each line. measure: the scores of a step.
      every_seconds: between looks. once: do not wait for more.

    Returns:
      How many were scored.

    Raises:
      What ``measure`` raises, where the checkpoint is still there.
    """
    from mhc.files import append_jsonl, read_jsonl, repair
    from mhc.train.checkpoint import committed_steps

    repair(out)
    lines = read_jsonl(out) if out.is_file() else []
    done = {line["step"] for line in lines if line.get("run") == str(run) and line.get("how") == how}
    scored = 0
    while True:
        over = finished(run)  # before the steps are listed: the last one is among them
        for step in committed_steps(run):
            if step in done:
                continue
            began = time.monotonic()
            try:
                result = measure(step)
            except Exception:  # of any kind: readers say in many ways that files are missing
                if not _deleted(run, step, sleep):
                    raise
                print(f"{run}: checkpoint {step} was deleted while it was read; left out", file=sys.stderr, flush=True)
            else:
                line = {"run": str(run), "step": step, **result, "how": how}
                append_jsonl(out, {**line, "time": time.time(), "seconds": time.monotonic() - began})
                scored += 1
            done.add(step)
        if over or once:
            return scored
        sleep(every_seconds)


def _deleted(run: Folder, step: int, sleep: Callable[[float], None]) -> bool:
    """Return whether a checkpoint is gone, or goes within the time that deleting its files may take."""
    from mhc.train.checkpoint import committed_steps

    for _ in range(20):
        if step not in committed_steps(run):
            return True
        sleep(0.5)
    return False


def finished(run: Folder) -> bool:
    """Return whether the run writes no more checkpoints: its summary is of the last step, or the guard halted it.

    Raises:
      UserError: one of the two files is damaged.
    """
    summary_, config = (remote.read(run / name) for name in ("summary.json", "config.json"))
    if summary_ is None or config is None:
        return False
    try:
        told = json.loads(summary_)
        return bool(told["exit_reason"] == "halted" or told["steps"] >= json.loads(config)["train"]["steps"])
    except (ValueError, KeyError, TypeError) as error:  # bytes that are no UTF-8 are a ValueError too
        raise UserError(f"{run}: summary.json and config.json: not as a run writes them ({error!r})") from None


def perplexity(checkpoint: checkpoints.Checkpoint, options: argparse.Namespace, changes: dict[str, Any]) -> Scored:
    """Return loss, perplexity and bits per byte of a checkpoint."""
    result = summary(score(checkpoint, corpus_of(checkpoint.config, options, changes)), None)
    measures = {name: result[name] for name in ("loss", "perplexity", "bits_per_token", "bits_per_byte")}
    values = {name: measure["value"] for name, measure in measures.items()}
    intervals = {name: [measure["low"], measure["high"]] for name, measure in measures.items()}
    return {
        **values,
        "intervals": intervals,
        **{name: result[name] for name in ("documents", "tokens", "bytes", "bits_per_byte_reason") if name in result},
    }


def tasks_of(names: Sequence[str], data: Path | None) -> harness_tasks.Tasks:
    """Return lm-eval's tasks; name those that cannot run on stderr. Raises UserError where none can."""
    harness_tasks.quiet()
    tasks = harness_tasks.load_tasks(names, data)
    for line in harness_tasks.missing_lines(tasks):
        print(f"left out: {line}", file=sys.stderr, flush=True)
    harness_tasks.check_any(tasks)
    return tasks


def benchmarks(checkpoint: checkpoints.Checkpoint, tasks: harness_tasks.Tasks, limit: int | None) -> Scored:
    """Return {task or group: {metric,filter: value}} of a checkpoint."""
    from mhc.eval.harness.lm import LanguageModel

    model = LanguageModel(checkpoint)
    can = harness_tasks.runnable(tasks, model, unsafe=False)
    harness_tasks.check_any(can)
    every: Scored = {}
    for scored in harness_scores.scores(harness_scores.evaluate(model, can, limit=limit), can):
        every.setdefault(scored.name, {})[scored.metric] = scored.value
    return every


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code. Raises UserError for a mistake."""
    parser = cli.Parser(
        description="Score a run's checkpoints as they are committed.",
        example="{prog} runs/a --rows 0",
        fields=checkpoints.FIELDS,
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run, which may be going on")
    parser.add_argument("--out", metavar="FILE.jsonl", help="where lines are added (RUN.scores.jsonl, beside the run)")
    parser.add_argument("--every_seconds", type=float, default=30.0, help="between two looks (30)")
    parser.add_argument("--once", action="store_true", help="score what is there and end")
    add_arguments(parser)
    parser.add_argument("--tasks", metavar="T1,T2", help="also tasks of lm-eval, as of eval.harness")
    parser.add_argument("--data", metavar="DIR", help="with --tasks: datasets, before the hub's")
    parser.add_argument("--limit", type=int, help="with --tasks: questions of each, without: all")
    options, rest = parser.parse_known_args(arguments)
    changes = checkpoints.parse_changes(rest, parser)
    run = remote.path(options.run)
    out = _checked(options, run)

    from mhc.config import from_json

    stored = remote.read(run / "config.json")
    if stored is None:
        raise UserError(f"{run}: not a run folder (it has no config.json)")
    rows = rows_of(
        options,
        checkpoints.changed(from_json(stored.decode(), run / "config.json"), checkpoints.without_mesh(changes)),
        changes,
    )
    names = [name.strip() for name in (options.tasks or "").split(",") if name.strip()]
    tasks = tasks_of(names, Path(options.data) if options.data else None) if names else None

    def measure(step: int) -> Scored:
        print(f"{run}: scoring checkpoint {step}", file=sys.stderr, flush=True)
        checkpoint = checkpoints.load(options.run, step, changes=changes)
        result = perplexity(checkpoint, options, changes)
        bits = result.get("bits_per_byte_reason") or f"{result['bits_per_byte']:.4f} bits per byte"
        told = f"{checkpoint.name}: loss {result['loss']:.4f}, {bits}"
        if tasks is not None:
            result["tasks"] = benchmarks(checkpoint, tasks, options.limit)
            told += "".join(f", {name} {next(iter(of.values())):.4f}" for name, of in result["tasks"].items() if of)
        print(told, flush=True)
        return result

    how = {
        "changes": checkpoints.without_mesh(changes),
        **{name: getattr(options, name) for name in ("split", "stride", "without_eos", "limit")},
        "rows": rows,
        "tasks": names,
    }
    scored = watch(
        run,
        out,
        json.loads(json.dumps(how)),
        measure,
        every_seconds=options.every_seconds,
        once=options.once,
    )
    print(f"{scored} checkpoints scored: {out}", file=sys.stderr)
    return 0


def _checked(options: argparse.Namespace, run: Folder) -> Path:
    """Return the file for the scores. Raises UserError for a file that cannot be written and for impossible options."""
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit: given {options.limit}, allowed: 1 or more")
    if not options.every_seconds > 0:
        raise UserError(f"--every_seconds: given {options.every_seconds:g}, allowed: above 0")
    for name in ("data", "limit"):
        if getattr(options, name) is not None and options.tasks is None:
            raise UserError(f"--{name}: given {getattr(options, name)}, allowed: none without --tasks")
    if options.data and not Path(options.data).is_dir():
        raise UserError(f"--data: no such folder: {options.data}")
    stdio.keep_going()
    if options.out is None:
        if not isinstance(run, Path):
            raise UserError(f"--out is needed for {run}: a local file, e.g. --out scores.jsonl")
        run = run.resolve()
        return run.with_name(f"{run.name}.scores.jsonl")
    out = cli.check_file(options.out, "--out")
    if isinstance(run, Path) and run.resolve() in out.resolve().parents:
        raise UserError(f"--out: given {out}, allowed: a file outside the run's folder")
    return out


if __name__ == "__main__":
    cli.run_main(main)
