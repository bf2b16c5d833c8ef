"""Small corpora for the data tests."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mhc.config import DataConfig

WORDS = [
    "the",
    "width",
    "of",
    "a",
    "stream",
    "is",
    "not",
    "its",
    "depth",
    "naïve",
    "—",
    "深さ",
    "ширина",
    "🙂",
    "still",
]


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words)) + "."


def write_texts(folder: Path, count: int, seed: int = 0, words: int = 60) -> None:
    """``count`` .txt files of a few lines each."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        lines = [sentence(rng, rng.randint(1, words)) for _ in range(rng.randint(1, 5))]
        (folder / f"{number:03d}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def texts(tmp_path: Path) -> DataConfig:
    """A corpus of 60 text files, cut by file."""
    write_texts(tmp_path / "texts", 60)
    return DataConfig(
        source=f"text:{tmp_path}/texts/*.txt", sequence_length=48, cache_dir=str(tmp_path / "cache"), prefetch=0
    )


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a tokenizer.json: byte-level BPE of 400 pieces with <|endoftext|>, trained here."""
    rng = random.Random(1)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([sentence(rng, 30) for _ in range(50)], trainer)
    path = str(tmp_path_factory.mktemp("bpe") / "tokenizer.json")
    tokenizer.save(path)
    return path
