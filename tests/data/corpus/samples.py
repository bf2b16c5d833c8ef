"""Make configs and documents of small corpora."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mhc.config import DataConfig
from mhc.data import tokenizers
from mhc.data.corpus.sources import Source, documents

BYTES = tokenizers.load("bytes")


def config(folder: Path, source: str, **changes: Any) -> DataConfig:
    changes = {"sequence_length": 16, "prefetch": 0, "cache_dir": str(folder / "cache"), **changes}
    return DataConfig(source=source, **changes)


def text_of(source: Source, index: int) -> bytes:
    document = source[index]
    assert isinstance(document, bytes)
    return document


def everything(data: DataConfig) -> list[bytes]:
    return sorted([*documents(data, "train"), *documents(data, "validation")])
