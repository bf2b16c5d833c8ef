"""Test the rows that a run is validated on: spread over documents, the same for any batch size, hosts and format."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mhc import config as configs
from mhc.config import DataConfig
from mhc.data import pipeline, prepare, tokenizers
from mhc.data.rows import spread as spreads
from mhc.data.rows.packing import Document, empty_batch, fill_row
from mhc.data.rows.spread import RowStream
from mhc.errors import UserError
from mhc.eval.perplexity import __main__ as perplexity
from mhc.files import read_json
from tests.small_runs import config, lines, run

BYTES = tokenizers.load("bytes")
LENGTH = 8


def documents(sizes: list[int]) -> list[Document]:
    """Return documents of so many pairs each, whose tokens are numbers of their own."""
    starts = np.cumsum([0, *(size + 1 for size in sizes)]).tolist()
    return [
        Document(np.arange(start, start + size + 1, dtype=np.int32), np.ones(size, np.int32))
        for start, size in zip(starts, sizes, strict=False)
    ]


def read(made: list[Document], count: int, *, sizes: Any = None, spread: bool = True) -> tuple[list[Any], RowStream]:
    rows = RowStream(made.__getitem__, 0, len(made), length=LENGTH, count=count, sizes=sizes, spread=spread)
    found = []
    while rows.next_row():
        batch = empty_batch(1, LENGTH)
        if not fill_row(batch, 0, rows):
            break
        found.append(
            [int(token) for token, weight in zip(batch["tokens"][0], batch["weights"][0], strict=True) if weight]
        )
    return found, rows


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=60),
    count=st.integers(0, 40),
    places=st.sampled_from([1, 3, 512]),
    known=st.booleans(),
)
def test_no_pair_is_read_twice_and_rows_are_in_order(sizes: list[int], count: int, places: int, known: bool) -> None:
    made = documents(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spreads, "PLACES", places)
        found, rows = read(made, count, sizes=np.array(sizes) if known else None)
    read_tokens = [token for row in found for token in row]
    assert read_tokens == sorted(set(read_tokens))
    assert len(found) <= count or not count
    assert all(len(row) == LENGTH for row in found[:-1])
    of_document = [number for number, document in enumerate(made) for _ in document.target_bytes]
    owner = dict(zip([t for d in made for t in d.tokens[:-1].tolist()], of_document, strict=True))
    assert rows.touched == {owner[token] for token in read_tokens}
    if not count or (known and sum(max(size, 1) + 1 for size in sizes) <= count * LENGTH):
        assert len(read_tokens) == sum(sizes)  # a set that fits is read whole
    firsts, _ = read(made, count, spread=False)
    whole = [token for document in made for token in document.tokens[:-1].tolist()]
    assert [token for row in firsts for token in row] == whole[: count * LENGTH if count else None]


@pytest.mark.parametrize("count", [4, 16, 64])
@pytest.mark.parametrize("most", [10, 400])
def test_rows_are_spread_evenly_over_documents_short_and_long(count: int, most: int) -> None:
    rng = random.Random(0)
    sizes: list[int] = []
    while sum(sizes) < 40_000:
        sizes.append(rng.randint(1, most))
    made = documents(sizes)
    found, rows = read(made, count, sizes=np.array(sizes))
    whole = {token: place for place, token in enumerate(t for d in made for t in d.tokens[:-1].tolist())}
    starts = [whole[row[0]] for row in found]
    ideal = [sum(sizes) * (2 * row + 1) / (2 * count) for row in range(count)]
    assert len(found) == count
    assert max(abs(start - there) for start, there in zip(starts, ideal, strict=True)) <= most + LENGTH
    assert len(rows.touched) >= min(count, len(sizes) // 4)


def test_at_many_places_each_costs_one_document() -> None:
    asked = []
    made = documents([50] * 4000)

    def fetch(index: int) -> Document:
        asked.append(index)
        return made[index]

    rows = RowStream(fetch, 0, 4000, length=LENGTH, count=2048, sizes=np.full(4000, 50))
    while rows.next_row():
        assert fill_row(empty_batch(1, LENGTH), 0, rows)
    assert len(rows.touched) == len(set(asked)) <= 2 * spreads.PLACES
    assert min(asked) < 10 and max(asked) > 3990


# Of a corpus ----------------------------------------------------------------------------------------------------------


def letters(folder: Path) -> DataConfig:
    """Return 400 documents that grow harder: of one letter, then of two, … of 26."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for name, count in (("train", 40), ("held", 400)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for number in range(count):
                letters = "abcdefghijklmnopqrstuvwxyz"[: 1 + 26 * number // count]
                text = "".join(rng.choice(letters) for _ in range(rng.randint(20, 400)))
                file.write(json.dumps({"text": text}) + "\n")
    return DataConfig(
        source=f"text:{folder}/train.jsonl",
        validation=f"text:{folder}/held.jsonl",
        sequence_length=32,
        cache_dir=str(folder / "cache"),
    )


def rows_of(data: DataConfig, batch_size: int, count: int, rows: Any = None, **of: Any) -> dict[str, np.ndarray]:
    batches = pipeline.validation_batches(data, BYTES, batch_size=batch_size, count=count, spread=True, rows=rows, **of)
    made = [list(batches), list(batches)]  # the second time from what was kept
    for one, other in zip(*made, strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], strict=True)
    return {name: np.concatenate([batch[name] for batch in made[0]]) for name in made[0][0]}


def test_rows_are_the_same_whatever_the_batch_the_hosts_and_the_format(tmp_path: Path) -> None:
    data = letters(tmp_path)
    whole = rows_of(data, 1, 64)
    for batch_size in (4, 7, 64, 100):
        found = rows_of(data, batch_size, 64)
        for name, array in whole.items():
            np.testing.assert_array_equal(found[name][:64], array)
            assert not found[name][64:].any()
    for own in ([0, 2], [1, 3]):
        part = rows_of(data, 4, 64, rows=own)
        np.testing.assert_array_equal(part["tokens"], whole["tokens"].reshape(16, 4, -1)[:, own].reshape(32, -1))
    held = (data.validation or "").removeprefix("text:")
    prepare.prepare(f"text:{held}", str(tmp_path / "made"), sequence_length=32, whole=True, workers=1)
    same = rows_of(dataclasses.replace(data, validation=f"prepared:{tmp_path}/made"), 4, 64)
    for name, array in whole.items():
        np.testing.assert_array_equal(same[name], array)


def test_a_whole_set_is_not_read_just_to_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pipeline.validation_batches(letters(tmp_path), BYTES, batch_size=4)
    monkeypatch.setattr(pipeline.ValidationBatches, "__iter__", None)
    assert made.coverage("a") == "validation set a: all of its 400 document(s)"


def test_what_is_measured_on_them_is_near_the_whole(tmp_path: Path) -> None:
    """The mean letter, which grows from the first document to the last, is near the whole's, unlike the first rows'."""
    data = letters(tmp_path)

    def mean(found: dict[str, np.ndarray]) -> float:
        letters = found["targets"][(found["weights"] > 0) & (found["targets"] < 256)]
        return float(letters.mean() - ord("a"))

    everything = mean(rows_of(data, 8, 0))
    for batch_size, count in ((4, 64), (8, 64), (8, 128)):
        assert mean(rows_of(data, batch_size, count)) == pytest.approx(everything, rel=0.1)
    (first,) = pipeline.validation_batches(data, BYTES, batch_size=64, batches=1)
    assert mean(first) < 0.2 * everything


# Of a run -------------------------------------------------------------------------------------------------------------


def of_run(source: str, steps: int = 4, **validation: Any) -> configs.Config:
    """Return the config of a plain run of one block, without probes."""
    groups: dict[str, dict[str, Any]] = {
        "model": {"layers": 1},
        "train": {"steps": steps},
        "validation": {"every": 2, **validation},
        "checkpoint": {"every": 2},
        "monitor": {"probe_every": 0},
    }
    return config(source, "plain", **groups)


def older(folder: Path) -> None:
    """Change a run folder to what a version without the fields left."""
    for path in [folder / "config.json", *folder.glob("checkpoints/*/config/metadata")]:
        stored = read_json(path)
        for name in ("rule", "rows"):
            del stored["validation"][name]
        path.write_text(json.dumps(stored))


@pytest.mark.long
def test_a_run_says_what_it_reads_and_perplexity_reads_the_same(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rows, rule in ((8, None), (8, "first")):
        folder = tmp_path / f"{rule}"
        assert run(of_run(corpus, rows=rows, batches=None, rule=rule), folder) == 0
        said = capsys.readouterr().err
        assert f"{folder}: validation: {rows} row(s) of 16 tokens touch " in said
        assert perplexity.main(["--checkpoint", str(folder), "--json", str(tmp_path / "found.json")]) == 0
        (one,) = read_json(tmp_path / "found.json")["checkpoints"]
        assert one["loss"]["value"] == pytest.approx(lines(folder, "metrics")[-1]["val_loss"], rel=1e-6)
        touched = int(said.split(" tokens touch ")[1].split(" of ")[0])
        assert one["documents"] == touched
        assert touched >= 5 or rule == "first"


def test_an_older_run_keeps_its_rows(corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command resumes it, although the default of 16 batches is gone now; another number is refused."""
    old, whole = tmp_path / "old", tmp_path / "whole"
    assert run(of_run(corpus, rule="first", batches=2), whole) == 0
    assert run(of_run(corpus, 2, rule="first", batches=2), old) == 0
    older(old)
    assert configs.from_json((old / "config.json").read_text()).validation.rule == "first"
    with pytest.raises(UserError, match=r"validation.batches: stored 2, given 3"):
        run(of_run(corpus, batches=3), old)
    capsys.readouterr()
    assert run(of_run(corpus, batches=None), old) == 0
    assert "validation.r" not in capsys.readouterr().err
    assert lines(old, "metrics") == lines(whole, "metrics")
    new = configs.resolve(of_run(corpus, batches=2), BYTES.vocab_size)
    assert (new.validation.rule, new.validation_rows) == ("spread", 16)
