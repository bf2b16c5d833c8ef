"""Load lm-eval's tasks, those of the mHC paper among them, and tell which of them can run."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mhc import extras
from mhc.errors import UserError, did_you_mean
from mhc.eval.common.terminal import Progress

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task

    from mhc.eval.harness.lm import LanguageModel

SUFFIXES = ("jsonl", "parquet", "json")  # of files of --data


class Benchmark(NamedTuple):
    """Describes one of the mHC paper's benchmarks, by lm-eval's name, and the number that stands for it."""

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


class Tasks(NamedTuple):
    """Holds tasks that can run, and names those that cannot."""

    asked: dict[str, tuple[str, ...]]  # by what was asked for: its leaves, those that cannot run included
    loaded: dict[str, Task]
    groups: dict[str, Group]
    missing: dict[str, str]  # leaf: why


def load_tasks(names: Sequence[str], data: Path | None = None, shots: int | None = None) -> Tasks:
    """Return the tasks of names, YAML files and folders of them; ``mhc_paper`` stands for its eight.

    Args:
      data: folder with datasets, DATASET[/NAME]/SPLIT.jsonl (.parquet, .json), which are looked for there first.
      shots: examples before each question; None: as the tasks say.

    Raises:
      UserError: an unknown name, a file that is no task, or a task that is named twice.
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
    of_paper = [built_in / one.folder for one in MHC_PAPER] + [built_in / "benchmarks"] if GROUP in plain else []
    manager = TaskManager(include_path=[*([] if everything else of_paper), *folders], include_defaults=everything)
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
        built, leaves = loader.load(entry, fields, index)
        twice = next((leaf for leaf in leaves for others in asked.values() if leaf in others), None)
        if name in asked or twice:
            raise UserError(f"--tasks: {twice or name} is named twice")
        asked[name] = leaves
        tasks |= built["tasks"]
        groups |= {name: group for name, group in built["groups"].items() if group.get_all_tasks()}
    for task in tasks.values():
        if shots is not None and task.get_config("num_fewshot") != 0:
            task.set_config(key="num_fewshot", value=shots)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEED)
    return Tasks(asked, tasks, groups, loader.missing)


SEED = 1234  # lm-eval's own, of examples and of numpy


def _of_folder(index: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the groups of a folder, and its tasks that are in none of them. Raises UserError if it has neither."""
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
    """Return the entry of a YAML file. Raises UserError if the file describes no task."""
    from lm_eval.tasks._index import TaskIndex

    if not Path(file).is_file():
        raise UserError(f"--tasks: no such file: {file}")
    try:
        entry = TaskIndex.entry_from_path(Path(file))
    except Exception as error:  # YAML's own, or a shape that lm-eval does not know
        raise UserError(f"--tasks: {file} is no task of lm-eval: {_line_of(error)}") from None
    if entry is None:
        raise UserError(f"--tasks: {file} is no task of lm-eval: it names neither a task nor a group")
    return entry


def _line_of(error: BaseException) -> str:
    """Return an error of another library as one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, (OSError, UserError)) and text else f"{type(error).__name__}: {text}"


def _loader(data: Path | None) -> Any:
    """Return a factory of lm-eval's tasks that notes what cannot be loaded, and looks for data in a folder first."""
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
            """Return (what lm-eval's TaskManager.load gives, names of the leaves with those that are missing)."""
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
                self.missing[name] = _line_of(error)
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
    """Return the fields of a task whose dataset lies in the folder; {} where it does not."""
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


def runnable(tasks: Tasks, model: LanguageModel, *, unsafe: bool) -> Tasks:
    """Return the tasks without those that this model cannot do, which are missing with a reason."""
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


def missing_lines(tasks: Tasks) -> list[str]:
    """Return a line for each task that was asked for and cannot run, as a whole or in part."""
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


def check_any(tasks: Tasks) -> None:
    """Raise UserError where no task is left."""
    if not tasks.loaded:
        raise UserError(f"--tasks: none of the {len(tasks.asked)} that were asked for can run")


def quiet() -> None:
    """Silence other libraries' progress and notes. Raises UserError where lm-eval is missing."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        import datasets
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"this program needs lm-eval: {extras.command('eval')} (not installed: {error.name})") from None
    for name in ("lm_eval", "datasets", "huggingface_hub", "httpx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    datasets.disable_progress_bars()
