"""Test the pipeline: resuming, process counts, coverage of an epoch, the fixed validation set."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mhc.config import DataConfig
from mhc.data import tokenizers
from mhc.data.corpus.pieces import Pieces, piece_size
from mhc.data.corpus.sources import documents, open_source
from mhc.data.corpus.text import TextFiles
from mhc.data.pipeline import TrainIterator, merge_states, train_iterator, validation_batches
from mhc.data.rows.packing import Batch
from mhc.errors import UserError

BYTES = tokenizers.load("bytes")
KEYS = {"tokens", "targets", "segment_ids", "positions", "weights", "target_bytes"}
on_fixture = settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


def take(iterator: TrainIterator, count: int) -> list[Batch]:
    return [next(iterator) for _ in range(count)]


def same(one: list[Batch], other: list[Batch]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys() == KEYS
        for name in a:
            assert a[name].dtype == b[name].dtype
            np.testing.assert_array_equal(a[name], b[name])


def test_shapes_and_dtypes(texts: DataConfig) -> None:
    batch = next(train_iterator(texts, BYTES, batch_size=6, seed=0))
    assert batch.keys() == KEYS
    for name, array in batch.items():
        assert array.shape == (6, 48)
        assert array.dtype == (np.float32 if name == "weights" else np.int32)
    assert (batch["weights"] == 1).all()


@on_fixture
@given(save=st.integers(0, 30), prefetch=st.integers(0, 3), batch_size=st.sampled_from([1, 4, 8]))
def test_a_restored_run_sees_the_batches_of_an_undisturbed_one(
    texts: DataConfig, save: int, prefetch: int, batch_size: int
) -> None:
    data = dataclasses.replace(texts, prefetch=prefetch)
    whole = train_iterator(data, BYTES, batch_size=batch_size, seed=3)
    take(whole, save)
    state = json.loads(json.dumps(whole.get_state()))
    rest = take(whole, 150 // batch_size)  # over the end of an epoch
    again = train_iterator(data, BYTES, batch_size=batch_size, seed=3)
    take(again, 2)  # a restore counts whatever was read before
    again.set_state(state)
    assert again.get_state() == state
    same(take(again, len(rest)), rest)
    whole.close()
    again.close()


@pytest.mark.parametrize("batch_size", [1, 8])
def test_epochs_differ_and_each_gives_every_token_as_a_target_once(texts: DataConfig, batch_size: int) -> None:
    source = open_source(texts, "train")
    pieces = Pieces(source, piece_size(texts))
    wanted = [pieces[index] for index in range(len(pieces))]
    size = sum(map(len, documents(texts, "train")))
    # Rows reach the end of an epoch at different batches: gather each row's targets and cut them where bos comes in.
    inputs: list[list[int]] = [[] for _ in range(batch_size)]
    targets: list[list[int]] = [[] for _ in range(batch_size)]
    for batch in take(train_iterator(texts, BYTES, batch_size=batch_size, seed=0), 5 * size // (48 * batch_size)):
        for row in range(batch_size):
            inputs[row] += batch["tokens"][row].tolist()
            targets[row] += batch["targets"][row].tolist()
    read = []
    for row in range(batch_size):
        starts = [place for place, token in enumerate(inputs[row]) if token == BYTES.bos_id]
        read.append([tuple(targets[row][a:b]) for a, b in itertools.pairwise(starts)])
    order = [read[position % batch_size][position // batch_size] for position in range(3 * len(pieces))]
    epochs = [order[start : start + len(pieces)] for start in range(0, len(order), len(pieces))]
    expected = sorted((*cast(bytes, piece.content), *[BYTES.eos_id] * piece.ends) for piece in wanted)
    assert [sorted(epoch) for epoch in epochs] == [expected] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_another_seed_is_another_order_and_not_a_shifted_one(texts: DataConfig) -> None:
    def opening(seed: int, batches: int) -> bytes:
        iterator = train_iterator(texts, BYTES, batch_size=1, seed=seed)
        return b"".join(batch["targets"].tobytes() for batch in take(iterator, batches))

    epoch = sum(map(len, documents(texts, "train"))) // 48 + 2
    assert opening(0, 60) in opening(0, 3 * epoch)
    assert opening(1, 60) not in opening(0, 3 * epoch)


@pytest.mark.parametrize("processes", [2, 4])
def test_the_global_batch_does_not_depend_on_the_number_of_processes(texts: DataConfig, processes: int) -> None:
    whole = train_iterator(texts, BYTES, batch_size=8, seed=0)
    parts = [
        train_iterator(texts, BYTES, batch_size=8, seed=0, rows=range(first, first + 8 // processes))
        for first in range(0, 8, 8 // processes)
    ]

    def joined(count: int) -> list[Batch]:
        steps = zip(*[take(part, count) for part in parts], strict=True)
        return [{name: np.concatenate([batch[name] for batch in step]) for name in KEYS} for step in steps]

    same(joined(20), take(whole, 20))
    merged = merge_states([part.get_state() for part in reversed(parts)])
    assert merged == whole.get_state()
    same(joined(3), expected := take(whole, 3))
    for part in parts:  # and a state of all processes serves any number of them
        part.set_state(merged)
    same(joined(3), expected)
    alone = train_iterator(texts, BYTES, batch_size=8, seed=0)
    alone.set_state(merged)
    same(take(alone, 3), expected)


def test_rows_of_a_process_need_not_adjoin_and_may_be_those_of_another(texts: DataConfig) -> None:
    whole = train_iterator(texts, BYTES, batch_size=8, seed=0)
    shares = [[0, 1, 4, 5], [2, 3, 6, 7], [6, 7]]
    parts = [train_iterator(texts, BYTES, batch_size=8, seed=0, rows=rows) for rows in shares]
    expected = take(whole, 5)
    for rows, part in zip(shares, parts, strict=True):
        same(take(part, 5), [{name: batch[name][rows] for name in KEYS} for batch in expected])
    assert merge_states([part.get_state() for part in parts]) == whole.get_state()


def test_merging_states_with_a_process_missing_is_refused(texts: DataConfig) -> None:
    states = [
        train_iterator(texts, BYTES, batch_size=8, seed=0, rows=rows).get_state() for rows in ([0, 1, 5], [2, 3, 4])
    ]
    with pytest.raises(ValueError, match="no state has row 6"):
        merge_states(states)


def test_a_position_saved_in_the_first_format_is_read(texts: DataConfig) -> None:
    iterator = train_iterator(texts, BYTES, batch_size=8, seed=0)
    take(iterator, 3)
    state = {**iterator.get_state(), "format": 1, "rows": [0, 8]}
    expected = take(iterator, 2)
    assert [entry["row"] for entry in iterator.describe(state)] == list(range(8))
    iterator.set_state(state)
    same(take(iterator, 2), expected)


def test_states_of_another_run_are_refused(texts: DataConfig, tmp_path: Path) -> None:
    iterator = train_iterator(texts, BYTES, batch_size=8, seed=0)
    state = iterator.get_state()
    fields = {
        "format": (r"form .*init_from", 0),
        "batch_size": (r"train\.batch_size; .* \(saved 4, now 8\)", 4),
        "seed": (r"seed\.data; .* \(saved 1, now 0\)", 1),
        "sequence_length": (r"data\.sequence_length, .* \(saved 9, now 48\)", 9),
        "holdout": (r"data\.holdout; .* \(saved 0\.5, now 0\.05\)", 0.5),
        "corpus": (r"corpus in data\.source .*init_from", "0"),
        "tokenizer": (r"data\.tokenizer; .*init_from", "x"),
        "piece": (r"data\.sequence_length, .*init_from", 1),
    }
    assert set(fields) == set(state) - {"rows", "position", "offset"}
    for key, (said, value) in fields.items():
        with pytest.raises(UserError, match=f"saved with another {said}$"):
            iterator.set_state({**state, key: value})
        with pytest.raises(UserError, match=r"saved with another .*; do this") as raised:
            iterator.set_state({**state, key: value}, remedy="do this")
        assert "init_from" not in str(raised.value)
    half = train_iterator(texts, BYTES, batch_size=8, seed=0, rows=range(4, 8)).get_state()
    with pytest.raises(UserError, match=r"has 4 rows of the batch, this process needs row 0 too"):
        iterator.set_state(half)
    (tmp_path / "texts" / "060.txt").write_text("one more document\n")
    with pytest.raises(UserError, match=r"saved with another corpus in data\.source"):
        train_iterator(texts, BYTES, batch_size=8, seed=0).set_state(state)


@pytest.mark.parametrize("kind", ["files", "lines", "tokens", "mixture", "validation"])
def test_a_position_is_refused_where_another_share_is_held_out(texts: DataConfig, tmp_path: Path, kind: str) -> None:
    """It is refused for every source, unless nothing is held out of the source."""
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "line {number} of a text"}}\n' for number in range(200)))
    np.save(tmp_path / "a.npy", np.arange(4000) % 250)
    sources = {"files": texts.source, "lines": f"text:{tmp_path}/a.jsonl", "tokens": f"tokens:{tmp_path}/a.npy"}
    sources["mixture"] = f"mix:a=1*{sources['lines']};b=1*{sources['files']}"
    data = dataclasses.replace(texts, source=sources.get(kind, texts.source), sequence_length=16)
    if kind == "validation":
        data = dataclasses.replace(data, validation=sources["lines"])
    one, other = (
        train_iterator(dataclasses.replace(data, holdout=holdout), BYTES, batch_size=2, seed=0)
        for holdout in (0.05, 0.2)
    )
    state = one.get_state()
    one.set_state(state)
    if kind == "validation":
        other.set_state(state)
        same(take(one, 3), take(other, 3))
        return
    with pytest.raises(UserError, match=r"another data\.holdout; .* \(saved 0\.05, now 0\.2\)$"):
        other.set_state(state)


def test_positions_saved_before_lengths_and_shares_were_are_read(texts: DataConfig) -> None:
    iterator = train_iterator(texts, BYTES, batch_size=8, seed=0)
    take(iterator, 3)
    state = iterator.get_state()
    expected = take(iterator, 2)
    iterator.set_state({key: value for key, value in state.items() if key not in ("sequence_length", "holdout")})
    same(take(iterator, 2), expected)


def test_closing_ends_the_thread_and_may_be_repeated(texts: DataConfig) -> None:
    before = threading.active_count()
    iterator = train_iterator(dataclasses.replace(texts, prefetch=2), BYTES, batch_size=2, seed=0)
    next(iterator)
    assert threading.active_count() == before + 1
    iterator.close()
    iterator.close()
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="closed"):
        next(iterator)


@on_fixture
@given(batch_size=st.integers(1, 9), length=st.integers(3, 80))
def test_validation_has_every_token_once_and_its_bytes_are_the_splits(
    texts: DataConfig, batch_size: int, length: int
) -> None:
    data = dataclasses.replace(texts, sequence_length=length)
    held = list(documents(data, "validation"))
    batches = list(validation_batches(data, BYTES, batch_size=batch_size, batches=0))
    assert sum(int(batch["target_bytes"].sum()) for batch in batches) == sum(map(len, held))
    targets = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in batches])
    expected = b"".join(held)
    assert targets[targets < 256].astype(np.uint8).tobytes() == expected
    assert (targets == BYTES.eos_id).sum() == len(held)
    assert len(targets) == len(expected) + len(held)
    assert {batch["tokens"].shape for batch in batches} == {(batch_size, length)}
    for batch in batches[:-1]:
        assert (batch["weights"] == 1).all()


def test_validation_is_the_same_again_on_any_process_and_may_be_cut_short(texts: DataConfig) -> None:
    whole = validation_batches(texts, BYTES, batch_size=4, batches=0)
    batches = list(whole)
    same(list(whole), batches)
    same(list(validation_batches(texts, BYTES, batch_size=4, batches=2)), batches[:2])
    halves = [list(validation_batches(texts, BYTES, batch_size=4, batches=0, rows=rows)) for rows in ([0, 2], [1, 3])]
    joined = [
        {name: np.stack([a[name], b[name]], axis=1).reshape(4, -1) for name in KEYS}
        for a, b in zip(*halves, strict=True)
    ]
    same(joined, batches)


def test_no_document_is_in_both_splits(texts: DataConfig) -> None:
    train, held = set(documents(texts, "train")), set(documents(texts, "validation"))
    assert train
    assert held
    assert not train & held


def test_rows_change_documents_often_even_when_these_are_long(tmp_path: Path) -> None:
    """In a corpus of one long file no two rows of a batch are at the same place, and new text comes every few steps."""
    (tmp_path / "book.txt").write_text("\n".join(f"line {number} of the book" for number in range(20_000)))
    data = DataConfig(source=f"text:{tmp_path}/book.txt", sequence_length=64, prefetch=0)
    iterator = train_iterator(data, BYTES, batch_size=16, seed=0)
    batches = take(iterator, 40)
    for batch in batches:
        assert len({row.tobytes() for row in batch["targets"]}) == 16
    opened = sum(int((batch["tokens"] == BYTES.bos_id).sum()) for batch in batches)
    assert opened >= 16 * 40 // 12  # pieces of 8 to 12 sequences


def test_a_bpe_tokeniser_counts_the_same_bytes(texts: DataConfig, bpe: str) -> None:
    data = dataclasses.replace(texts, tokenizer=bpe)
    tokenizer = tokenizers.load(bpe)
    batches = list(validation_batches(data, tokenizer, batch_size=4, batches=0))
    total = sum(map(len, documents(data, "validation")))
    assert sum(int(batch["target_bytes"].sum()) for batch in batches) == total
    assert sum(int((batch["weights"] > 0).sum()) for batch in batches) < 0.6 * total


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_mistake_found_while_training_is_still_one_line(
    texts: DataConfig, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TFDS text is checked as it is read; the error comes through grain and its thread unchanged."""
    iterator = train_iterator(dataclasses.replace(texts, prefetch=prefetch), BYTES, batch_size=2, seed=0)
    next(iterator)

    def broken(self: TextFiles, index: int) -> bytes:
        raise UserError("example 7: not UTF-8 at byte 3")

    monkeypatch.setattr(TextFiles, "__getitem__", broken)
    with pytest.raises(UserError) as caught:
        take(iterator, 200)
    assert str(caught.value) == "example 7: not UTF-8 at byte 3"
    iterator.close()
