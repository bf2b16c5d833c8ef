"""Train a byte-level BPE tokeniser on text: ``python -m mhc.data.train_tokenizer --source 'text:corpus/*.jsonl' …``.

Bytes are its alphabet, so that any text can be spelt; ``<s>`` and ``</s>`` open and close a document, and are its only
special tokens. What the runs hold out (``--holdout``, as their data.holdout) is not read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mhc import cli
from mhc.config import DataConfig, shares
from mhc.data.corpus.sources import documents
from mhc.errors import UserError

BOS, EOS = "<s>", "</s>"
LEAST = 256 + 2  # the bytes and the two special tokens
_DATA_FIELDS = ("source", "field", "holdout", "cache_dir")  # that are options here
MOST = 1 << 24  # the library sets aside memory for as many


def train(data: DataConfig, vocab_size: int, out: str | os.PathLike[str], *, show_progress: bool = False) -> int:
    """Train on every document that ``data`` reads for training, and write a tokenizer.json.

    Args:
        vocab_size: the largest number of ids, special ones included; a text without enough pairs gives fewer.
    Returns:
        The number of ids.
    Raises:
        UserError: the source is not text or cannot be read, or the vocabulary is smaller than the alphabet.
    """
    for share in shares(data.source):
        if share.source.startswith(("tokens:", "prepared:")):
            allowed = "text, not ids: text:<glob>, stdlib, tfds:<name>"
            raise UserError(f"--source: given {share.source!r}, allowed: {allowed}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if not LEAST <= vocab_size <= MOST:
        least = f"{LEAST} (the bytes and {BOS}, {EOS})"
        raise UserError(f"--vocab_size: given {vocab_size}, allowed: from {least} to {MOST}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    texts = (document.decode() for document in documents(data, "train"))
    tokenizer.train_from_iterator(texts, trainer=trainer)
    file = Path(out)
    part = file.with_name(f".{file.name}.part")
    part.write_text(tokenizer.to_str(), encoding="utf-8")
    part.replace(file)
    return int(tokenizer.get_vocab_size())


def main(arguments: Sequence[str]) -> int:
    """Run the program, and return its exit code. Raises UserError for a user's mistake."""
    parser = cli.Parser(
        description="Train a byte-level BPE tokeniser.",
        example="{prog} --source 'text:corpus/*.jsonl' --vocab_size 32000 --out tokenizer.json",
    )
    parser.add_argument("--source", required=True, help="as data.source: text:<glob>, stdlib, tfds:<name>")
    parser.add_argument("--vocab_size", required=True, type=int, metavar="N", help="ids, the special ones included")
    parser.add_argument("--out", required=True, metavar="FILE", help="the tokenizer.json to write; its folder exists")
    parser.add_argument("--field", default=DataConfig().field, help="as data.field (default: %(default)s)")
    parser.add_argument(
        "--holdout", type=float, default=DataConfig().holdout, help="as data.holdout: not read (default: %(default)s)"
    )
    parser.add_argument("--cache_dir", default=None, help="as data.cache_dir")
    options = parser.parse_args(arguments)
    if cli.check_file(options.out, "--out").exists():
        raise UserError(f"--out {options.out}: there is a file already, and runs may read it; name another")
    with cli.naming_options(_DATA_FIELDS):
        given = {name: getattr(options, name) for name in _DATA_FIELDS}
        size = train(DataConfig(**given), options.vocab_size, options.out, show_progress=sys.stderr.isatty())
    fewer = f"; the text has no more pairs, {options.vocab_size} were asked for" if size < options.vocab_size else ""
    print(f"{options.out}: {size} ids{fewer}")
    return 0


if __name__ == "__main__":
    cli.run_main(main)
