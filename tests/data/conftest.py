"""Provide small corpora for the data tests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
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
    """Write ``count`` .txt files of a few lines each."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        lines = [sentence(rng, rng.randint(1, words)) for _ in range(rng.randint(1, 5))]
        (folder / f"{number:03d}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def prepare_tfds(
    folder: Path, splits: dict[str, list[str]], field: str = "text", file_format: str = "array_record"
) -> None:
    """Prepare a TFDS dataset ``tales`` below a folder, as a user would, and return {split: texts}."""
    import tensorflow_datasets as tfds

    class Tales(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
        VERSION = tfds.core.Version("1.2.3")
        code_path = None

        def _info(self) -> Any:
            features = tfds.features.FeaturesDict({field: tfds.features.Text(), "id": np.int64})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager: Any) -> Any:
            return {split: self._generate_examples(split) for split in splits}

        def _generate_examples(self, split: str) -> Any:
            for number, text in enumerate(splits[split]):
                yield number, {field: text, "id": number}

    tfds.disable_progress_bar()
    Tales(data_dir=folder, file_format=file_format).download_and_prepare(
        download_config=tfds.download.DownloadConfig(try_download_gcs=False, compute_stats="skip")
    )


@pytest.fixture
def texts(tmp_path: Path) -> DataConfig:
    """Return a corpus of 60 text files, split by file."""
    write_texts(tmp_path / "texts", 60)
    return DataConfig(
        source=f"text:{tmp_path}/texts/*.txt", sequence_length=48, cache_dir=str(tmp_path / "cache"), prefetch=0
    )


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a tokenizer.json that is trained here: byte-level BPE of 400 pieces with <|endoftext|>."""
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
