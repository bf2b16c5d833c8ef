"""Make a run of a folder of Hugging Face; its model computes the same function, under any residual that can.

    python -m mhc.interop.import_hf DIR --workdir runs/x --config.residual.kind=mhc [--config.GROUP.FIELD=VALUE …]

The run folder holds a checkpoint of step 0 and the resolved config: evaluate it, or train it with

    python -m mhc.train --config runs/x/config.json --workdir runs/x

Fields that a run cannot change when it is resumed (rate, data, schedule) are given here, or to a run of its own that
starts with ``--config.train.init_from=runs/x``. A tokenizer.json in DIR is copied and used.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mhc import cli
from mhc import config as configs
from mhc.errors import UserError

if TYPE_CHECKING:
    from mhc.interop.folder import HfFolder

TOKENIZER = "tokenizer.json"


def import_hf(folder: str | Path, workdir: str | Path, overrides: Mapping[str, Any] | None = None) -> Path:
    """Make a run folder of a folder of Hugging Face; nothing is written unless all of it can be.

    Args:
      folder: holds config.json, safetensors and perhaps tokenizer.json.
      workdir: a folder that holds nothing yet.
      overrides: {dotted field of our config: value}; none may change what the model computes.

    Returns:
      The run folder.

    Raises:
      UserError: as ``mhc.interop.load_hf``; a workdir that holds something; a tokeniser that is larger than the
      vocabulary.
    """
    target = cli.check_writable(str(workdir))
    if target.exists() and any(target.iterdir()):
        raise UserError(f"--workdir {target}: holds something already, allowed: a new or an empty folder")
    source_tokenizer = Path(folder) / TOKENIZER

    # jax takes seconds to import: only a command without mistakes waits for it.
    from flax import nnx
    from jax.sharding import Mesh

    from mhc.data import tokenizers
    from mhc.files import write_json
    from mhc.interop import families, hf
    from mhc.interop.folder import GENERATION, HfFolder, read_object, written_whole
    from mhc.sharding import make_mesh
    from mhc.train.checkpoint import save_weights

    source = HfFolder(folder)
    generation = read_object(source.path / GENERATION) if (source.path / GENERATION).is_file() else {}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in (overrides or {}).items():
        group, _, field = name.partition(".")
        groups.setdefault(group, {})[field] = value
    groups["residual"] = hf.residual_fields(groups.get("residual", {}))
    data = groups.setdefault("data", {})
    copied = source_tokenizer.is_file() and "tokenizer" not in data
    if copied:
        data["tokenizer"] = str(source_tokenizer)  # the copy is named once it is there
    config = hf.merged(source.config, groups)
    special = special_tokens(source_tokenizer, source.config, generation) if copied else {}
    if copied:
        configs.resolve(config, tokenizers.JsonTokenizer(source_tokenizer, special).vocab_size)
    elif "tokenizer" in data:
        configs.resolve(config, tokenizers.load(config.data.tokenizer).vocab_size)
    if "stop_tokens" not in data:
        ends = stop_tokens(source, generation, special)
        chosen = tuple(token for token in ends if token < config.vocab_size)  # the model gives no other
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, stop_tokens=chosen))
    mesh: Mesh | None = make_mesh(config.mesh)
    if max(config.mesh.fsdp, config.mesh.tensor, config.mesh.expert) == 1:
        mesh = None  # every device would hold the same: one is enough to write it
    decoder = hf.read(source.config, source, config, mesh)

    with written_whole(target) as out:
        if copied:
            shutil.copyfile(source_tokenizer, out / TOKENIZER)
            write_json(out / tokenizers.SPECIAL, special)
            data_config = dataclasses.replace(config.data, tokenizer=str(target / TOKENIZER))
            config = dataclasses.replace(config, data=data_config)
        origin = {"family": families.family_of(source.config).name, "folder": str(Path(folder).absolute())}
        save_weights(out, nnx.to_pure_dict(nnx.state(decoder)), config, imported=origin)
        write_json(out / "config.json", configs.to_dict(config))
    return target


def special_tokens(tokenizer: Path, *configs: Mapping[str, Any]) -> dict[str, str]:
    """Return those of {bos_token, eos_token} that a model declares, as ``tokenizer_config.json`` names them.

    They come from the file of that name beside its tokenizer.json, or else from the ids in the first config with one.
    """
    import tokenizers as library

    from mhc.data.tokenizers import declared_special

    special = declared_special(tokenizer)
    try:
        names = library.Tokenizer.from_file(str(tokenizer))
    except Exception:  # the library raises bare Exception; whoever reads the file says what is wrong with it
        return special
    for name in ("bos_token", "eos_token"):
        for config in configs:
            ids = config.get(f"{name}_id")
            first = ids[0] if isinstance(ids, list) and ids else ids
            token = names.id_to_token(first) if isinstance(first, int) and 0 <= first < 2**32 else None
            if name not in special and token is not None:
                special[name] = token
    return special


def stop_tokens(source: HfFolder, generation: Mapping[str, Any], special: Mapping[str, str]) -> tuple[int, ...]:
    """Return every id that ends a text, by a folder's config.json, generation_config.json and tokeniser.

    Each file has an ``eos_token_id``, one id or several; the tokeniser has an ``eos_token``.

    Raises:
      UserError: one of them is no id.
    """
    import tokenizers as library

    from mhc.interop.folder import GENERATION

    ends: list[int] = []
    for name, described in (("config.json", source.config), (GENERATION, generation)):
        given = described.get("eos_token_id")
        ids = given if isinstance(given, list) else [] if given is None else [given]
        if not all(isinstance(id_, int) and not isinstance(id_, bool) for id_ in ids):
            raise UserError(f"{source.path / name}: eos_token_id: given {given!r}, allowed: an id, or a list of ids")
        ends += [id_ for id_ in ids if id_ >= 0]  # -1: none
    if "eos_token" in special:
        named = library.Tokenizer.from_file(str(source.path / TOKENIZER)).token_to_id(special["eos_token"])
        ends += [] if named is None else [named]
    return tuple(dict.fromkeys(ends))


def main(arguments: Sequence[str]) -> int:
    """Run the program, and return its exit code. Raises UserError for a user's mistake."""
    parser = cli.Parser(
        description="Make a run folder of a Hugging Face model: config.json and safetensors.",
        example="{prog} models/llama --workdir runs/llama --config.data.source='text:corpus/*.txt'",
        fields=cli.EVERY_FIELD,
    )
    parser.add_argument("folder", metavar="DIR", help="folder with config.json and (sharded) safetensors")
    parser.add_argument("--workdir", required=True, metavar="DIR", help="folder of the run to make")
    options, rest = parser.parse_known_args(arguments)
    overrides = cli.overrides(rest, parser)
    for name in ("train.init_from", "train.init_optimizer"):
        if name in overrides:
            raise UserError(
                f"{name}: given {overrides[name]!r}, allowed: nothing, the weights come from {options.folder}"
            )
    run = import_hf(options.folder, options.workdir, overrides)
    config = configs.from_json((run / "config.json").read_text())
    if config.data.tokenizer == "bytes" and config.vocab_size < 258:
        print(
            f"{run}: imported. {options.folder} has no {TOKENIZER}, and bytes need 258 ids where the model has "
            f"{config.vocab_size}: to train it or to generate, import with --config.data.tokenizer=FILE"
        )
        return 0
    if not (run / TOKENIZER).is_file():
        print(f"{options.folder} has no {TOKENIZER}: the run's is {config.data.tokenizer}")
    print(f"{run}: imported; to train it: python -m mhc.train --config {run}/config.json --workdir {run}")
    return 0


if __name__ == "__main__":
    cli.run_main(main, sys.argv[1:])
