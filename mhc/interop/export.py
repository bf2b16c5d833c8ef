"""Write a run as a folder that others can read: safetensors, config.json, tokenizer.json and a model card.

    python -m mhc.interop.export RUN --to DIR [--step s] [--names auto|hf|ours]

A plain model that a family of Hugging Face expresses is written in that family's names. Any other model is written in
our names, with model.py beside it: one short file of numpy that computes the logits. docs/interop.md documents both.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import itertools
import json
import math
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mhc import cli, kinds, remote
from mhc import config as configs
from mhc.config import Config
from mhc.errors import UserError
from mhc.files import read_json, read_jsonl, write_json
from mhc.interop.folder import GENERATION

if TYPE_CHECKING:
    from mhc.data.tokenizers import Tokenizer

SHARD = 5_000_000_000  # bytes of the largest file
VERSION = 1  # of our format
GROUPS = ("model", "attention", "positions", "mlp", "moe", "norm", "head", "residual")  # they say what is computed
_TRAINING = {"model": ("dtype", "remat", "scan"), "attention": ("impl",)}
_TRAINING |= {"moe": ("balance", "balance_rate", "balance_loss", "z_loss"), "head": ("z_loss",)}
_TRAINING |= {"positions": ("noise",), "residual": ("init", "module")}
_TRAINING["norm"] = ("gamma_init", "gamma_frozen", "gamma_schedule", "gamma_shape", "gamma_layers", "beta_frozen")


def export(run: str | Path, folder: str | Path, step: int | None = None, names: str = "auto") -> Path:
    """Write a run's model into a new folder; nothing is written unless all of it can be.

    Args:
      step: of the checkpoint; None for the last.
      names: hf, ours, or auto, which is hf if a family expresses the model.

    Raises:
      UserError: no such run or checkpoint, a folder that holds something, names="hf" for a model that no family
      expresses, or a residual kind that has no numpy form.
    """
    target = cli.check_writable(str(folder), "--to")
    if target.exists() and any(target.iterdir()):
        raise UserError(f"--to {target}: holds something already, allowed: a new or an empty folder")

    from mhc.data import tokenizers
    from mhc.interop import families, hf, tensors
    from mhc.interop.folder import written_whole
    from mhc.train.checkpoint import load_run

    loaded = load_run(run, step)
    config = loaded.config
    tokenizer = tokenizers.load(config.data.tokenizer)
    leaf = hf.leaf_reader(loaded.params)
    family = None
    if names != "ours":
        try:
            family, written = families.express(config)
        except UserError:
            if names == "hf":
                raise
    if family is not None:
        described: dict[str, Any] = written | generation_config(config, tokenizer)
        plan = tensors.plan(config, tensors.Layout(family.name, head=not config.head.tied))
        shapes = {name: tensor.shape for name, tensor in plan.items()}

        def tensor(name: str) -> np.ndarray:
            return tensors.compose(plan[name], leaf)
    else:
        source = model_file(config)
        described = {"format": "mhc", "version": VERSION, "model": function_fields(config)}
        places = our_names(config)
        shapes = {name: shape for name, (_, _, shape) in places.items()}

        def tensor(name: str) -> np.ndarray:
            path, layer, _ = places[name]
            return leaf(path) if layer is None else leaf(path)[layer]

    with written_whole(target) as out:
        (out / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        (out / GENERATION).write_text(json.dumps(generation_config(config, tokenizer), indent=2) + "\n")
        write_weights(out, shapes, tensor, {"format": "pt"} if family else {"format": "mhc"})
        write_tokenizer(out / "tokenizer.json", config.data.tokenizer)
        write_tokenizer_config(out / "tokenizer_config.json", config)
        if family is None:
            (out / "model.py").write_text(source)
        about = card(remote.local_copy(run), loaded.step, config, family.name if family else None)
        (out / "README.md").write_text(about)
    return target


def generation_config(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return bos_token_id and eos_token_id, a list if several ids end a text, with the tokeniser's first."""
    ends = [int(end) for end in dict.fromkeys((tokenizer.eos_id, *config.data.stop_tokens))]
    return {"bos_token_id": int(tokenizer.bos_id), "eos_token_id": ends if len(ends) > 1 else ends[0]}


def function_fields(config: Config) -> dict[str, dict[str, Any]]:
    """Return the groups of a resolved config that say what is computed, without fields for training alone."""
    tree = configs.to_dict(config)
    left_out = {group: set(_TRAINING.get(group, ())) for group in GROUPS}
    left_out["residual"] |= {name for name, option in kinds.options().items() if option.initial}
    return {
        group: {name: value for name, value in tree[group].items() if name not in left_out[group]} for group in GROUPS
    }


def model_file(config: Config) -> str:
    """Return the text of model.py for a model: the short file of numpy, with the numpy form of its residual in it.

    Raises:
      UserError: the kind has no numpy form, or one whose source cannot be copied.
    """
    import jax

    from mhc.model.block import build_topology
    from mhc.residual import runner as numpy_form
    from mhc.rng import path_key

    for field, usual in (("attention.kind", ("heads", "mla")), ("head.classes", (None,))):
        value = configs.value_of(config, field)
        if value not in usual:
            raise UserError(f"{field}={value}: it cannot be exported: model.py computes texts by attention")
    refused = f"residual.kind={config.residual.kind}: it cannot be exported in our names"
    runner = build_topology(config, path_key(jax.random.key(0))).numpy_form()
    if runner is None:
        have = ", ".join(name for name in kinds.names() if not kinds.module_of(name))
        raise UserError(f"{refused}: it has no numpy form (`runner` of its topology), allowed: {have}, or one with it")
    foreign = _foreign(runner)
    if foreign:
        raise UserError(f"{refused}: its numpy form uses {', '.join(foreign)}, which model.py does not have")
    template = Path(__file__).with_name("standalone.py").read_text()
    marker = re.search(r"^# An exported file has .*\nfrom mhc\.residual\.runner import .*\n", template, re.MULTILINE)
    assert marker is not None
    try:
        classes = [inspect.getsource(part) for part in reversed(runner.__mro__[:-1])]
    except (OSError, TypeError):
        raise UserError(f"{refused}: the source of {runner.__name__} cannot be read") from None
    parts = [inspect.getsource(helper) for helper in (numpy_form.sigmoid, numpy_form.softmax)] + classes
    code = "\n\n".join(textwrap.dedent(part) for part in parts)
    needs = [f"import {name}\n" for name in ("itertools", "math") if f"{name}." in code]
    head = template[: marker.start()]
    needs = [line for line in needs if line not in head]
    head = head.replace("import json\n", "".join(sorted([*needs, "import json\n"])), 1)
    text = f"{head.rstrip()}\n\n\n{code}\n\nResidual = {runner.__name__}\n{template[marker.end() :]}"
    return text


def _foreign(runner: type) -> list[str]:
    """Return the global names that a runner's methods use and that model.py lacks, or has for something else."""
    from mhc.residual import runner as numpy_form

    bases = {part.__name__: part for part in runner.__mro__}
    known = {"np": np, "math": math, "itertools": itertools, **vars(builtins), **bases}
    known |= {"sigmoid": numpy_form.sigmoid, "softmax": numpy_form.softmax}

    def used(code: types.CodeType) -> Iterator[str]:
        yield from (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from used(constant)

    foreign = set()
    for part in runner.__mro__[:-1]:
        for method in vars(part).values():
            if isinstance(method, types.FunctionType):
                where = method.__globals__
                names = {
                    name
                    for name in used(method.__code__)
                    if name not in known or where.get(name, known[name]) is not known[name]
                }
                foreign |= names
    return sorted(foreign)


def our_names(config: Config) -> dict[str, tuple[str, int | None, tuple[int, ...]]]:
    """Return {name in our format: (path of the parameter, number in its stack, shape)}."""
    import jax

    from mhc.model.decoder import STACKS, DecoderDefinition
    from mhc.sharding import path_of

    out: dict[str, tuple[str, int | None, tuple[int, ...]]] = {}
    for key, leaf in jax.tree_util.tree_leaves_with_path(DecoderDefinition(config).abstract()):
        path = path_of(key)
        stack, _, rest = path.partition("/")
        if stack not in STACKS:
            out[path.replace("/", ".")] = path, None, leaf.shape
            continue
        first = config.leading_layers if stack == "blocks" else 0
        for layer in range(leaf.shape[0]):
            out[f"layers.{first + layer}.{rest.replace('/', '.')}"] = path, layer, leaf.shape[1:]
    return out


def write_weights(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensor: Callable[[str], np.ndarray],
    metadata: Mapping[str, str],
    shard: int = SHARD,
) -> None:
    """Write model.safetensors, or shards with an index, of at most ``shard`` bytes unless a tensor is larger."""
    from mhc.interop import safetensors
    from mhc.interop.folder import INDEX, SINGLE

    parts: list[list[str]] = [[]]
    room = shard
    sizes = {name: 4 * math.prod(shape) for name, shape in shapes.items()}
    for name in sorted(shapes):
        if parts[-1] and sizes[name] > room:
            parts.append([])
            room = shard
        parts[-1].append(name)
        room -= sizes[name]
    files = (
        [SINGLE]
        if len(parts) == 1
        else [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    )
    for file, names in zip(files, parts, strict=True):
        safetensors.write(folder / file, {name: shapes[name] for name in names}, tensor, metadata)
    if len(parts) > 1:
        where = {name: file for file, names in zip(files, parts, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_tokenizer(path: Path, spec: str) -> None:
    """Write a tokenizer.json: a copy of the run's, or one that does what ``bytes`` does."""
    if spec != "bytes":
        shutil.copyfile(Path(spec).expanduser(), path)
        return
    import tokenizers

    # Every byte is a printable character there: itself where it is one, else the next free one from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    character = {byte: byte for byte in printable} | {byte: 256 + number for number, byte in enumerate(others)}
    model = tokenizers.models.BPE({chr(character[byte]): byte for byte in range(256)}, [])
    byte_level = tokenizers.Tokenizer(model)
    byte_level.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    byte_level.decoder = tokenizers.decoders.ByteLevel()
    byte_level.add_special_tokens(["<s>", "</s>"])  # 256 and 257
    byte_level.save(str(path))


def write_tokenizer_config(path: Path, config: Config) -> None:
    """Write a tokenizer_config.json that names the special tokens, with what lay beside the run's tokeniser.

    An id that was added behind the file's vocabulary has no token, and none is named for it.
    """
    from mhc.data import tokenizers

    tokenizer = tokenizers.load(config.data.tokenizer)
    beside: dict[str, Any] = {}
    if config.data.tokenizer != "bytes":
        source = Path(config.data.tokenizer).expanduser().with_name(tokenizers.SPECIAL)
        text = source.read_text("utf-8") if source.is_file() else "{}"  # it was read when the tokeniser was
        described = json.loads(text)
        beside = described if isinstance(described, dict) else {}
    ours = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    limit = {"model_max_length": config.max_length} if config.positions.kind == "learned" else {}
    write_json(path, {**ours, **limit, **beside, **tokenizer.special_tokens()})


def card(run: Path, step: int, config: Config, family: str | None) -> str:
    """Return the model card in Markdown: what the model was trained on and how, and what was measured."""
    from mhc.model.decoder import DecoderDefinition
    from mhc.model.flops import count_parameters

    counts, r, data, train = count_parameters(DecoderDefinition(config)), config.residual, config.data, config.train
    rows = read_jsonl(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else []
    rows = [row for row in rows if row["step"] <= step]
    streams = "" if r.spec.streams == (1,) else f", {config.streams} streams"
    what = [
        f"A decoder-only language model with the residual `{r.kind}`{streams}: {counts['total']:,} parameters,",
        f"{counts['active']:,} of them active for a token; {config.model.layers} layers of width {config.model.width},",
        f"vocabulary {config.vocab_size}. Exported by mhc, step {step} of its run.",
        f"Weights and config.json are those of the family {family}: what reads that family reads this folder."
        if family
        else "`model.py` runs it with numpy alone: `from model import load; logits = load()(tokens)`.",
    ]
    tokens = rows[-1]["tokens"] if rows else 0
    held_out = "a held-out part of it" if data.validation is None else f"`{data.validation}`"
    trained = [
        *([f"It started with the weights of `{train.init_from}`."] if train.init_from else []),
        f"Trained on `{data.source}`, validated on {held_out}; sequences of {data.sequence_length} tokens,",
        f"{train.batch_size} a step: {tokens:,} target tokens in {step} steps.",
        f"Tokeniser: `{Path(data.tokenizer).name}`.",
    ]
    parts = [f"# {run.resolve().name}", "\n".join(what), "## Data", "\n".join(trained), "## Measured"]
    parts += [_measured(run, rows), "## Config", f"```json\n{configs.to_json(config)}```"]
    return "\n\n".join(parts) + "\n"


def _measured(run: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of what the run logged up to the last of the rows."""
    if not rows:
        return "No step was trained: the weights are as they were imported."
    validated: Mapping[str, Any] = next((row for row in reversed(rows) if "val_loss" in row), {})
    summary = read_json(run / "summary.json") if (run / "summary.json").is_file() else {}
    measured = (
        ("training loss, nats per token", rows[-1]["step"], rows[-1]["loss"]),
        ("validation loss, nats per token", validated.get("step"), validated.get("val_loss")),
        ("validation, bits per byte", validated.get("step"), validated.get("val_bits_per_byte")),
        ("peak forward gain of the residual", f"to {summary.get('steps')}", summary.get("peak_forward_gain")),
    )
    lines = [f"| {name} | {step} | {value:.5g} |" for name, step, value in measured if isinstance(value, (int, float))]
    return "\n".join(["| | step | |", "| --- | --- | --- |", *lines])


def main(arguments: Sequence[str]) -> int:
    """Run the program, and return its exit code. Raises UserError for a user's mistake."""
    parser = cli.Parser(
        description="Write a run's model as safetensors, config.json, tokenizer.json and a model card.",
        example="{prog} runs/a --to exported/a",
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument("--to", required=True, metavar="DIR", help="folder to make")
    parser.add_argument("--step", type=int, help="step of the checkpoint; without it the last")
    parser.add_argument(
        "--names",
        choices=("auto", "hf", "ours"),
        default="auto",
        help="hf: those of a Hugging Face family; ours: with model.py; auto: hf if a family expresses the model",
    )
    options = parser.parse_args(arguments)
    folder = export(options.run, options.to, options.step, options.names)
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    return 0


if __name__ == "__main__":
    cli.run_main(main, sys.argv[1:])
