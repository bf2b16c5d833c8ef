"""Benchmarks of EleutherAI's lm-evaluation-harness on a checkpoint (`pip install -e '.[eval]'`; torch is not needed).

    python -m eval.harness --checkpoint runs/a --tasks hellaswag,piqa
    python -m eval.harness --checkpoint runs/a --tasks mhc_paper --data datasets --json found.json
    python -m eval.harness --checkpoint runs/a --tasks my_tasks/ --limit 100

A task is a name that lm-eval knows, a YAML file, or a folder of YAML files; ``mhc_paper`` is the eight benchmarks of
the mHC paper (arXiv:2512.24880) with its shots and metrics. Data comes from the Hugging Face hub or its cache, or from
``--data DIR``, where DATASET[/NAME]/SPLIT.jsonl (.parquet, .json) are looked for first. A task whose data cannot be
reached is named with its reason, and the others go on.

The model is `mhc.eval.harness.lm.LanguageModel`. Exit codes: 0 all ran, 1 some could not, 2 a user's mistake.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mhc import cli
from mhc.errors import UserError, did_you_mean
from mhc.eval.common import checkpoints
from mhc.eval.common.terminal import Progress, aligned

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task

    from mhc.eval.harness.lm import LanguageModel

SUFFIXES = ("jsonl", "parquet", "json")  # of files of --data


class Benchmark(NamedTuple):
    """One of the mHC paper's, by lm-eval's name, and the number that stands for it."""

    title: str
    task: str  # a task or group of lm-eval
    folder: str  # of lm-eval's tasks that defines it
    shots: int
    metric: str  # as the paper names it
    key: str  # lm-eval's: metric,filter


# The paper names shots and metrics, no prompts. Chain of thought where 3 and 8 shots are the published sets of worked
# examples (BBH, GSM8K); accuracy of HellaSwag by length-normalised likelihood, as 10-shot results are reported.
MHC_PAPER = (
    Benchmark("BBH", "bbh_cot_fewshot", "bbh", 3, "EM", "exact_match,get-answer"),
    Benchmark("DROP", "drop", "drop", 3, "F1", "f1,none"),
    Benchmark("GSM8K", "gsm8k_cot", "gsm8k", 8, "EM", "exact_match,strict-match"),
    Benchmark("HellaSwag", "hellaswag", "hellaswag", 10, "accuracy", "acc_norm,none"),
    Benchmark("MATH", "minerva_math", "minerva_math", 4, "EM", "exact_match,none"),
    Benchmark("MMLU", "mmlu", "mmlu", 5, "accuracy", "acc,none"),
    Benchmark("PIQA", "piqa", "piqa", 0, "accuracy", "acc,none"),
    Benchmark("TriviaQA", "triviaqa", "triviaqa", 5, "EM", "exact_match,remove_whitespace"),
)
GROUP = "mhc_paper"


# Tasks ----------------------------------------------------------------------------------------------------------------


class Tasks(NamedTuple):
    """Tasks that can run, and those that cannot."""

    asked: dict[str, tuple[str, ...]]  # by what was asked for: its leaves, those that cannot run included
    loaded: dict[str, Task]
    groups: dict[str, Group]
    missing: dict[str, str]  # leaf: why


def load_tasks(names: Sequence[str], data: Path | None = None, shots: int | None = None) -> Tasks:
    """The tasks of names, YAML files and folders of them; ``mhc_paper`` stands for its eight.

    Args:
      data: folder with datasets, see above. shots: examples before each question; None: as the tasks say.

    Raises:
      UserError: a name that nobody knows, a file that is no task, or a task that is named twice.
    """
    from lm_eval.tasks import TaskManager

    loader = _loader(data)
    folders = [Path(name) for name in names if Path(name).is_dir()]
    plain = [name for name in names if not Path(name).is_dir() and not name.endswith((".yaml", ".yml"))]
    everything = any(name != GROUP for name in plain)
    if everything:
        print("reading lm-eval's list of tasks", file=sys.stderr, flush=True)
    # All of lm-eval's tasks take a quarter of a minute to list; those of the paper lie in a few folders.
    built_in = Path(sys.modules["lm_eval.tasks"].__file__ or "").parent
    own = [built_in / one.folder for one in MHC_PAPER] + [built_in / "benchmarks"] if GROUP in plain else []
    manager = TaskManager(include_path=[*([] if everything else own), *folders], include_defaults=everything)
    index = manager.task_index
    wanted: list[tuple[str, Any, dict[str, Any]]] = []  # (name, entry of the index, fields that differ)
    for name in names:
        if Path(name).is_dir():
            wanted += [(one, index[one], {}) for one in _of_folder(index, Path(name))]
        elif name.endswith((".yaml", ".yml")):
            entry = _of_file(name)
            wanted.append((entry.name, entry, {}))
        elif name in index:
            wanted.append((name, index[name], {}))
        elif name == GROUP:
            wanted += [(one.task, index[one.task], {"num_fewshot": one.shots}) for one in MHC_PAPER]
        else:
            raise UserError(
                f"--tasks: given {name}, allowed: a task, group or tag of lm-eval, {GROUP}, a YAML file or a folder of "
                f"them{did_you_mean(name, [GROUP, *index])}"
            )
    asked: dict[str, tuple[str, ...]] = {}
    tasks: dict[str, Task] = {}
    groups: dict[str, Group] = {}
    progress = Progress("tasks read", len(wanted))
    for number, (name, entry, fields) in enumerate(wanted):
        progress(number, note=f"now {name}")
        found, leaves = loader.load(entry, fields, index)
        twice = next((leaf for leaf in leaves for others in asked.values() if leaf in others), None)
        if name in asked or twice:
            raise UserError(f"--tasks: {twice or name} is named twice")
        asked[name] = leaves
        tasks |= found["tasks"]
        groups |= {name: group for name, group in found["groups"].items() if group.get_all_tasks()}
    for task in tasks.values():
        if shots is not None and task.get_config("num_fewshot") != 0:
            task.set_config(key="num_fewshot", value=shots)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=_SEED)
    return Tasks(asked, tasks, groups, loader.missing)


_SEED = 1234  # lm-eval's own, of examples and of numpy


def _of_folder(index: Mapping[str, Any], folder: Path) -> list[str]:
    """The groups that a folder defines, and its tasks that are in none of them. Raises UserError where it has none."""
    here = [
        name
        for name, entry in index.items()
        if entry.yaml_path is not None and Path(entry.yaml_path).resolve().is_relative_to(folder.resolve())
    ]
    if not here:
        raise UserError(f"--tasks: {folder} has no YAML file with a task of lm-eval")
    inside: set[str] = set()
    for name in here:
        members = (index[name].cfg or {}).get("task")
        for member in members if isinstance(members, list) else []:
            inside.add(member if isinstance(member, str) else str(member.get("task", member.get("group"))))
    return [name for name in here if name not in inside]


def _of_file(file: str) -> Any:
    """The entry of a YAML file. Raises UserError where it is none."""
    from lm_eval.tasks._index import TaskIndex

    if not Path(file).is_file():
        raise UserError(f"--tasks: no such file: {file}")
    try:
        entry = TaskIndex.entry_from_path(Path(file))
    except Exception as error:  # YAML's own, or a shape that lm-eval does not know
        raise UserError(f"--tasks: {file} is no task of lm-eval: {_said(error)}") from None
    if entry is None:
        raise UserError(f"--tasks: {file} is no task of lm-eval: it names neither a task nor a group")
    return entry


def _said(error: BaseException) -> str:
    """One line of an error of others."""
    text = " ".join(str(error).split())
    return text if isinstance(error, (OSError, UserError)) and text else f"{type(error).__name__}: {text}"


def _loader(data: Path | None) -> Any:
    """A factory of lm-eval's tasks that notes what cannot be loaded, and looks for data in a folder first."""
    import datasets.config
    from huggingface_hub import constants
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._factory import TaskFactory

    class Loader(TaskFactory):
        def __init__(self) -> None:
            super().__init__(meta={})
            self.missing: dict[str, str] = {}
            self._leaves: list[str] = []

        def load(self, entry: Any, fields: dict[str, Any], index: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
            """(what lm-eval's TaskManager.load gives, names of the leaves with those that are missing)."""
            self._leaves = []
            built = self.build(entry, overrides=fields or None, registry=index)
            parts = [one for one in (built if isinstance(built, list) else [built]) if one is not None]
            manager = TaskManager(include_defaults=False)
            return manager.load(parts), tuple(self._leaves)

        def _build_task(self, entry: Any, overrides: dict[str, Any] | None) -> Any:
            name = str((overrides or {}).get("task", entry.name))
            self._leaves.append(name)
            try:
                return super()._build_task(entry, overrides)
            except Exception as error:  # of the data's library, the task's own code, the network
                self.missing[name] = _said(error)
                if isinstance(error, ConnectionError):
                    # It was tried several times, for half a minute: others are read from the hub's cache only.
                    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
                return None

        def _build_tag(self, *arguments: Any) -> Any:
            return [one for one in super()._build_tag(*arguments) if one is not None]

        def _build_group_members(self, *arguments: Any) -> Any:
            return [one for one in super()._build_group_members(*arguments) if one is not None]

        def _load_full_config(self, entry: Any, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
            fields: dict[str, Any] = super()._load_full_config(entry, overrides)
            if data is not None and isinstance(fields.get("dataset_path"), str):
                fields |= _local(data, fields)
            return fields

    return Loader()


def _local(data: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a task whose dataset lies in the folder; {} where it does not."""
    folder = data / fields["dataset_path"] / (fields.get("dataset_name") or "")
    names = ("training_split", "validation_split", "test_split", "fewshot_split")
    splits = {fields[name] for name in names if fields.get(name)}
    for suffix in SUFFIXES:
        files = {split: str(folder / f"{split}.{suffix}") for split in sorted(splits)}
        there = {split: file for split, file in files.items() if Path(file).is_file()}
        if there:
            kind = "parquet" if suffix == "parquet" else "json"
            return {"dataset_path": kind, "dataset_name": None, "dataset_kwargs": {"data_files": there}}
    return {}


# Running --------------------------------------------------------------------------------------------------------------


def runnable(tasks: Tasks, model: LanguageModel, *, unsafe: bool) -> Tasks:
    """The tasks less those that this model cannot do, which are missing with a reason."""
    from mhc.eval.harness.lm import generation

    missing = dict(tasks.missing)
    for name, task in tasks.loaded.items():
        if getattr(task, "MULTIMODAL", False):
            missing[name] = "it needs images or sound"
        elif getattr(task, "UNSAFE_CODE", False) and not unsafe:
            missing[name] = "it runs programs that the model writes; allowed with --confirm_run_unsafe_code"
        elif task.OUTPUT_TYPE == "generate_until":
            try:
                model.room(generation(task.config.generation_kwargs or {}, model.max_gen_toks).new)
            except UserError as error:
                missing[name] = str(error)
    left = {name: task for name, task in tasks.loaded.items() if name not in missing}
    for group in tasks.groups.values():
        for name in missing:
            group.pop(name)
    groups = {name: group for name, group in tasks.groups.items() if group.get_all_tasks()}
    return Tasks(tasks.asked, left, groups, missing)


def evaluate(
    model: LanguageModel, tasks: Tasks, *, limit: int | None = None, samples: bool = False, unsafe: bool = False
) -> dict[str, Any]:
    """lm-eval's results of the tasks: {results: {task or group: {metric,filter: value}}, n-shot, n-samples, …}."""
    import random

    import numpy as np
    from lm_eval import evaluator

    random.seed(0)
    np.random.seed(_SEED)  # noqa: NPY002  lm-eval's tasks draw from the global generator
    found: dict[str, Any] = evaluator.evaluate(
        model,
        {"tasks": tasks.loaded, "groups": tasks.groups, "group_map": {}},
        limit=limit,
        log_samples=samples,
        bootstrap_iters=1000,
        confirm_run_unsafe_code=unsafe,
    )
    return found


class Score(NamedTuple):
    """A number of a task or group."""

    name: str
    shots: int | None
    questions: int
    metric: str  # metric,filter
    value: float
    error: float | None  # standard error


def scores(found: dict[str, Any], tasks: Tasks) -> list[Score]:
    """Groups, then single tasks, each with all its metrics."""
    results = found["results"]
    out = []
    for name in [*(name for name in results if name in tasks.groups), *tasks.loaded]:
        leaves = [task.task_name for task in tasks.groups[name].get_all_tasks()] if name in tasks.groups else [name]
        questions = sum(found["n-samples"][leaf]["effective"] for leaf in leaves)
        counts = {found["n-shot"][leaf] for leaf in leaves}
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


# The command line -----------------------------------------------------------------------------------------------------


def missing_lines(tasks: Tasks) -> list[str]:
    """One line for each task that was asked for and cannot run, or not whole."""
    lines = []
    for name, leaves in tasks.asked.items():
        gone = [leaf for leaf in leaves if leaf in tasks.missing]
        if not gone:
            continue
        why = list(dict.fromkeys(tasks.missing[leaf] for leaf in gone))
        more = f" (and {len(why) - 1} other reasons)" if len(why) > 1 else ""
        parts = "" if leaves == (name,) else f"{len(gone)} of its {len(leaves)} parts left out: "
        lines.append(f"{name}: {parts}{why[0]}{more}")
    return lines


def table(every: Sequence[Score]) -> str:
    """A line for each number."""
    rows = [("task", "shots", "questions", "metric", "value")]
    rows += [
        (one.name, "" if one.shots is None else str(one.shots), f"{one.questions:,}", _metric(one.metric), _value(one))
        for one in every
    ]
    return aligned(rows)


def paper(every: Sequence[Score], tasks: Tasks) -> list[dict[str, Any]]:
    """The mHC paper's benchmarks among what was asked for."""
    out = []
    for one in MHC_PAPER:
        score = next((score for score in every if (score.name, score.metric) == (one.task, one.key)), None)
        leaves = tasks.asked[one.task]
        gone = sum(leaf in tasks.missing for leaf in leaves)
        out.append(
            {
                "benchmark": one.title,
                "task": one.task,
                "shots": one.shots,
                "metric": one.metric,
                "key": one.key,
                "value": None if score is None else score.value,
                "stderr": None if score is None else score.error,
                "questions": 0 if score is None else score.questions,
                "parts": len(leaves) - gone,
                "parts_of": len(leaves),
            }
        )
    return out


def paper_table(found: Sequence[dict[str, Any]]) -> str:
    """One line a benchmark."""
    rows = [("benchmark", "shots", "metric", "value", "questions", "lm-eval's task")]
    for one in found:
        whole = "" if one["parts"] == one["parts_of"] else f", {one['parts']} of {one['parts_of']} parts"
        score = Score(one["task"], one["shots"], one["questions"], one["key"], one["value"] or 0.0, one["stderr"])
        value = "not run" if one["value"] is None else _value(score)
        rows.append(
            (one["benchmark"], str(one["shots"]), one["metric"], value, f"{one['questions']:,}{whole}", one["task"])
        )
    return aligned(rows)


def _metric(key: str) -> str:
    metric, _, which = key.partition(",")
    return metric if which == "none" else f"{metric} ({which})"


def _value(one: Score) -> str:
    return f"{one.value:.4f}" + ("" if one.error is None or one.error != one.error else f" ± {one.error:.4f}")


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code: 1 where a task could not run. Raises UserError for a mistake."""
    parser = cli.Parser(
        description="lm-evaluation-harness on a checkpoint.",
        example="{prog} --checkpoint runs/a --tasks hellaswag,piqa",
        fields=checkpoints.FIELDS,
    )
    checkpoints.add_arguments(parser)
    parser.add_argument(
        "--tasks", required=True, metavar="T1,T2", help=f"of lm-eval, {GROUP}, YAML files, folders of YAML files"
    )
    parser.add_argument("--data", metavar="DIR", help="datasets as DIR/DATASET[/NAME]/SPLIT.jsonl, before the hub's")
    parser.add_argument("--num_fewshot", type=int, help="examples before each question; without: as the tasks say")
    parser.add_argument("--limit", type=int, help="questions of each task, for a trial; without: all")
    parser.add_argument("--max_length", type=int, help="tokens of context; without: data.sequence_length")
    parser.add_argument("--max_gen_toks", type=int, help="new tokens, at most; without: as the tasks say, or 256")
    parser.add_argument("--batch_size", type=int, default=16, help="rows at once (16); changes nothing but speed")
    parser.add_argument("--seed", type=int, default=0, help="of sampling, where a task asks for it (0)")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--samples", metavar="FILE", help="write every question with its answer there, as JSON lines")
    parser.add_argument(
        "--confirm_run_unsafe_code", action="store_true", help="let tasks run programs that the model writes"
    )
    options, rest = parser.parse_known_args(arguments)
    changes = checkpoints.parse_changes(rest, parser)
    for name, least in (("num_fewshot", 0), ("limit", 1), ("max_length", 2), ("max_gen_toks", 1), ("batch_size", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"--{name}: given {value}, allowed: {least} or more")
    for name in ("json", "samples"):
        if getattr(options, name):
            cli.check_file(getattr(options, name), f"--{name}")
    data = Path(options.data) if options.data else None
    if data is not None and not data.is_dir():
        raise UserError(f"--data: no such folder: {data}")
    names = [name.strip() for name in options.tasks.split(",") if name.strip()]
    if not names:
        raise UserError("--tasks: given none, allowed: names of tasks, separated by commas")
    from mhc.train.checkpoint import find_checkpoint

    find_checkpoint(*checkpoints.locate(options.checkpoint, options.step))
    quiet()
    tasks = load_tasks(names, data, options.num_fewshot)
    for line in missing_lines(tasks):
        print(f"left out: {line}", file=sys.stderr, flush=True)
    check_any(tasks)

    from mhc.eval.harness.lm import LanguageModel

    checkpoint = checkpoints.load(options.checkpoint, options.step, average=options.average, changes=changes)
    model = LanguageModel(
        checkpoint,
        batch_size=options.batch_size,
        max_length=options.max_length,
        max_gen_toks=options.max_gen_toks,
        seed=options.seed,
    )
    known = set(tasks.missing)
    tasks = runnable(tasks, model, unsafe=options.confirm_run_unsafe_code)
    for line in missing_lines(tasks._replace(missing={k: v for k, v in tasks.missing.items() if k not in known})):
        print(f"left out: {line}", file=sys.stderr, flush=True)
    check_any(tasks)
    print(f"{checkpoint.name}: {len(tasks.loaded)} tasks", file=sys.stderr, flush=True)
    how = {"limit": options.limit, "samples": bool(options.samples), "unsafe": options.confirm_run_unsafe_code}
    found = evaluate(model, tasks, **how)
    every = scores(found, tasks)
    print(table(every))
    of_paper = paper(every, tasks) if GROUP in names else None
    if of_paper is not None:
        print()
        print(paper_table(of_paper))
    _write(options, checkpoint, model, tasks, every, found, of_paper)
    return 1 if tasks.missing else 0


def check_any(tasks: Tasks) -> None:
    """Raises UserError where no task is left."""
    if not tasks.loaded:
        raise UserError(f"--tasks: none of the {len(tasks.asked)} that were asked for can run")


def quiet() -> None:
    """Leaves what others print to what matters. Raises UserError where lm-eval is missing."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        import datasets
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"eval.harness needs lm-eval ({error.name} is missing): pip install -e '.[eval]'") from None
    for name in ("lm_eval", "datasets", "huggingface_hub", "httpx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    datasets.disable_progress_bars()


def _write(
    options: Any,
    checkpoint: checkpoints.Checkpoint,
    model: LanguageModel,
    tasks: Tasks,
    every: Sequence[Score],
    found: dict[str, Any],
    of_paper: list[dict[str, Any]] | None,
) -> None:
    import json
    from importlib.metadata import version

    from mhc.files import write_json

    if options.json:
        write_json(
            options.json,
            {
                "checkpoint": checkpoint.name,
                "steps": list(checkpoint.steps),
                "lm_eval": version("lm_eval"),
                "max_length": model.max_length,
                "limit": options.limit,
                "scores": [one._asdict() for one in every],
                "versions": found["versions"],
                "missing": tasks.missing,
                GROUP: of_paper,
            },
        )
    if options.samples:
        file = Path(options.samples)
        temporary = file.with_name(f"{file.name}.part")
        with temporary.open("w", encoding="utf-8") as out:
            for name, samples in found["samples"].items():
                for sample in samples:
                    out.write(json.dumps({"task": name, **sample}, ensure_ascii=False, default=str) + "\n")
        temporary.replace(file)


if __name__ == "__main__":
    cli.run_main(main)
