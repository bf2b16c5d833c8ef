"""Run EleutherAI's lm-evaluation-harness on a checkpoint (extra [eval]; torch is not needed).

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

import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mhc import cli
from mhc.errors import UserError
from mhc.eval.common import checkpoints
from mhc.eval.harness.scores import Score, evaluate, paper, paper_table, scores, table
from mhc.eval.harness.tasks import GROUP, Tasks, check_any, load_tasks, missing_lines, quiet, runnable
from mhc.files import write_json

if TYPE_CHECKING:
    from mhc.eval.harness.lm import LanguageModel


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code: 1 where a task could not run. Raises UserError for a mistake."""
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
    checkpoints.config_of(options.checkpoint, options.step, changes)
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
    results = evaluate(model, tasks, **how)
    every = scores(results, tasks)
    print(table(every))
    of_paper = paper(every, tasks) if GROUP in names else None
    if of_paper is not None:
        print()
        print(paper_table(of_paper))
    _write(options, checkpoint, model, tasks, every, results, of_paper)
    return 1 if tasks.missing else 0


def _write(
    options: Any,
    checkpoint: checkpoints.Checkpoint,
    model: LanguageModel,
    tasks: Tasks,
    every: Sequence[Score],
    results: dict[str, Any],
    of_paper: list[dict[str, Any]] | None,
) -> None:
    """Write the scores (--json) and the samples (--samples), each where it was asked for."""
    if options.json:
        write_json(
            options.json,
            {
                "checkpoint": checkpoint.name,
                "steps": list(checkpoint.steps),
                "lm_eval": version("lm_eval"),
                "max_length": model.max_length,
                "limit": options.limit,
                "scores": [score._asdict() for score in every],
                "versions": results["versions"],
                "missing": tasks.missing,
                GROUP: of_paper,
            },
        )
    if options.samples:
        file = Path(options.samples)
        temporary = file.with_name(f"{file.name}.part")
        with temporary.open("w", encoding="utf-8") as out:
            for name, samples in results["samples"].items():
                for sample in samples:
                    out.write(json.dumps({"task": name, **sample}, ensure_ascii=False, default=str) + "\n")
        temporary.replace(file)


if __name__ == "__main__":
    cli.run_main(main)
