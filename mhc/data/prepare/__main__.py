"""Run `mhc.data.prepare`: ``python -m mhc.data.prepare``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from mhc import cli
from mhc.config import DataConfig
from mhc.data import prepare as package
from mhc.data.prepare.run import LARGEST_SHARD, prepare
from mhc.errors import UserError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def _size(text: str) -> int:
    """Return the bytes that an option like 64MB means. Raises UserError where it means none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B|)", text.strip())
    size = 0.0 if match is None else float(match[1]) * _UNITS[match[2]]
    if not 1 <= size <= LARGEST_SHARD:
        raise UserError(
            f"--shard_size: given {text!r}, allowed: bytes, or as in 64MB (KB, MB, GB, TB), up to "
            f"{LARGEST_SHARD // 10**12:,}TB"
        )
    return int(size)


_DATA_FIELDS = ("source", "tokenizer", "field", "sequence_length", "holdout", "cache_dir")  # that are options here


def main(arguments: Sequence[str]) -> int:
    """Run the program with arguments, and return its exit code. Raises UserError for a user's mistake."""
    defaults = DataConfig()
    parser = cli.Parser(
        description=package.__doc__.splitlines()[0],
        example="{prog} --source 'text:corpus/*.jsonl' --tokenizer tokenizer.json --out prepared/corpus",
    )
    parser.add_argument(
        "--source", required=True, help="text:<glob>: .txt, .jsonl (also .gz, .zst) or .parquet; or gs://"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder: a new one, or one to go on with")
    parser.add_argument("--tokenizer", default="bytes", help="`bytes`, or the path of a tokenizer.json")
    parser.add_argument("--field", default=defaults.field, help="field of a line, or column, that holds the text")
    parser.add_argument(
        "--sequence_length", type=int, default=defaults.sequence_length, help="data.sequence_length of the runs"
    )
    parser.add_argument("--holdout", type=float, default=defaults.holdout, help="data.holdout of the runs")
    parser.add_argument(
        "--validation", action="store_true", help="a validation set of its own (data.validation): no document is cut"
    )
    parser.add_argument("--workers", type=int, help="processes; default: one a core")
    parser.add_argument("--shard_size", type=_size, help="of the corpus, as in 64MB; default: 1/64 of it, 1 to 256 MB")
    parser.add_argument("--cache_dir", help="where packed and remote files are copied to; default: as data.cache_dir")
    options: argparse.Namespace = parser.parse_args(arguments)
    if options.workers is not None and options.workers < 1:
        raise UserError(f"--workers: given {options.workers}, allowed: 1 or more")
    with cli.interrupted_by_sigterm(), cli.naming_options(_DATA_FIELDS):
        manifest = prepare(
            options.source,
            options.out,
            tokenizer=options.tokenizer,
            field=options.field,
            sequence_length=options.sequence_length,
            holdout=options.holdout,
            whole=options.validation,
            workers=options.workers,
            shard_size=options.shard_size,
            cache_dir=options.cache_dir,
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )
    print(
        f"{options.out}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens, "
        f"{manifest['bytes']:,} bytes of text in {len(manifest['shards'])} shard(s)"
    )
    return 0


if __name__ == "__main__":
    cli.run_main(main)
