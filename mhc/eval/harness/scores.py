"""Run lm-eval's tasks on a model, and put their scores into tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mhc.eval.common.terminal import aligned
from mhc.eval.harness.tasks import MHC_PAPER, SEED, Tasks

if TYPE_CHECKING:
    from mhc.eval.harness.lm import LanguageModel


def evaluate(
    model: LanguageModel, tasks: Tasks, *, limit: int | None = None, samples: bool = False, unsafe: bool = False
) -> dict[str, Any]:
    """Return lm-eval's results: {results: {task or group: {metric,filter: value}}, n-shot, n-samples, …}."""
    import random

    import numpy as np
    from lm_eval import evaluator

    random.seed(0)
    np.random.seed(SEED)  # noqa: NPY002  lm-eval's tasks draw from the global generator
    results: dict[str, Any] = evaluator.evaluate(
        model,
        {"tasks": tasks.loaded, "groups": tasks.groups, "group_map": {}},
        limit=limit,
        log_samples=samples,
        bootstrap_iters=1000,
        confirm_run_unsafe_code=unsafe,
    )
    return results


class Score(NamedTuple):
    """Holds a number of a task or group."""

    name: str
    shots: int | None
    questions: int
    metric: str  # metric,filter
    value: float
    error: float | None  # standard error


def scores(outcome: dict[str, Any], tasks: Tasks) -> list[Score]:
    """Return the scores of groups, then of single tasks, each with all its metrics."""
    results = outcome["results"]
    out = []
    for name in [*(name for name in results if name in tasks.groups), *tasks.loaded]:
        leaves = [task.task_name for task in tasks.groups[name].get_all_tasks()] if name in tasks.groups else [name]
        questions = sum(outcome["n-samples"][leaf]["effective"] for leaf in leaves)
        counts = {outcome["n-shot"][leaf] for leaf in leaves}
        shots = counts.pop() if len(counts) == 1 else None
        for key, value in results[name].items():
            metric, comma, which = key.partition(",")
            if not comma or metric.endswith("_stderr") or isinstance(value, str):
                continue
            error = results[name].get(f"{metric}_stderr,{which}")
            out.append(
                Score(
                    name,
                    shots,
                    questions,
                    key,
                    float(value),
                    float(error) if isinstance(error, (int, float)) else None,
                )
            )
    return out


def table(every: Sequence[Score]) -> str:
    """Return a table with a line for each score."""
    rows = [("task", "shots", "questions", "metric", "value")]
    for score in every:
        shots = "" if score.shots is None else str(score.shots)
        rows.append((score.name, shots, f"{score.questions:,}", _metric(score.metric), _value(score)))
    return aligned(rows)


def paper(every: Sequence[Score], tasks: Tasks) -> list[dict[str, Any]]:
    """Return the scores of the mHC paper's benchmarks."""
    out = []
    for benchmark in MHC_PAPER:
        key = (benchmark.task, benchmark.key)
        score = next((score for score in every if (score.name, score.metric) == key), None)
        leaves = tasks.asked[benchmark.task]
        gone = sum(leaf in tasks.missing for leaf in leaves)
        out.append(
            {
                "benchmark": benchmark.title,
                "task": benchmark.task,
                "shots": benchmark.shots,
                "metric": benchmark.metric,
                "key": benchmark.key,
                "value": None if score is None else score.value,
                "stderr": None if score is None else score.error,
                "questions": 0 if score is None else score.questions,
                "parts": len(leaves) - gone,
                "parts_of": len(leaves),
            }
        )
    return out


def paper_table(outcome: Sequence[dict[str, Any]]) -> str:
    """Return a table with a line for each of the paper's benchmarks."""
    rows = [("benchmark", "shots", "metric", "value", "questions", "lm-eval's task")]
    for row in outcome:
        whole = "" if row["parts"] == row["parts_of"] else f", {row['parts']} of {row['parts_of']} parts"
        score = Score(row["task"], row["shots"], row["questions"], row["key"], row["value"] or 0.0, row["stderr"])
        value = "not run" if row["value"] is None else _value(score)
        rows.append(
            (row["benchmark"], str(row["shots"]), row["metric"], value, f"{row['questions']:,}{whole}", row["task"])
        )
    return aligned(rows)


def _metric(key: str) -> str:
    metric, _, which = key.partition(",")
    return metric if which == "none" else f"{metric} ({which})"


def _value(score: Score) -> str:
    known = score.error is not None and not math.isnan(score.error)
    return f"{score.value:.4f} ± {score.error:.4f}" if known else f"{score.value:.4f}"
