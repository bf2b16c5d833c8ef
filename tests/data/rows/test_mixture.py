"""Test mixtures and named validation sets: shares, order, resuming, and what is written of each source."""

from __future__ import annotations

import collections
import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from mhc.config import Config, shares
from mhc.data import pipeline, tokenizers
from mhc.data.corpus.sources import open_source, parts
from mhc.data.rows.mixture import Assignment
from mhc.errors import UserError
from mhc.eval.common import checkpoints
from mhc.eval.common import rows as corpora
from mhc.eval.perplexity.score import score
from mhc.files import read_jsonl
from tests.small_runs import assert_equal_runs, config, run

BYTES = tokenizers.load("bytes")
LETTERS = {"short": b"abc", "long": b"def", "middle": b"ghi"}  # each source is written in its own


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return three corpora of documents of very different lengths, mixed 6 : 3 : 1."""
    folder = tmp_path_factory.mktemp("corpora")
    rng = random.Random(0)
    for (name, letters), length in zip(LETTERS.items(), (5, 300, 40), strict=True):
        (folder / name).mkdir()
        for number in range(30):
            (folder / name / f"{number}.txt").write_bytes(bytes(rng.choices(letters, k=length + number % 7)))
    return "mix:" + "; ".join(
        f"{name}={weight}*text:{folder / name}/*.txt" for name, weight in zip(LETTERS, (6, 3, 1), strict=True)
    )


def made_of(source: str, kind: str = "mhc", **data: Any) -> Config:
    folder = shares(source)[0].source.removeprefix("text:").split("*")[0]
    return config(source, kind, data={"cache_dir": str(Path(folder).parent / "cache"), **data})


# The share of each source ---------------------------------------------------------------------------------------------


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6),
    st.sampled_from([1, 2, 7, 8, 64, 144, 320]),
    st.integers(0, 2**31),
)
def test_shares_are_within_a_percent_over_ten_thousand_sequences(weights, batch, seed):
    shares_ = np.array(weights) / sum(weights)
    assign = Assignment(shares_, seed)
    steps = -(-10_000 // batch)
    found = np.array([[assign(step, row) for row in range(batch)] for step in range(steps)])
    counts = np.bincount(found.ravel(), minlength=len(weights)) / found.size
    assert np.abs(counts - shares_).max() < 0.01
    if steps > 1000:  # in every row as well, so that no source's documents are left to a few rows
        by_row = np.stack([np.bincount(column, minlength=len(weights)) for column in found.T]) / steps
        assert np.abs(by_row - shares_).max() < 0.01


def test_seeds_differ():
    one, other = (Assignment([0.5, 0.5], seed) for seed in (0, 1))
    assert [one(0, row) for row in range(64)] != [other(0, row) for row in range(64)]


# Batches --------------------------------------------------------------------------------------------------------------


def batches(source: str, count: int, rows: list[int] | None = None, state: Any = None, **fields: Any) -> Any:
    data = made_of(source, **fields).data
    with_state = pipeline.train_iterator(data, BYTES, batch_size=8, seed=3, rows=rows)
    if state is not None:
        with_state.set_state(json.loads(json.dumps(state)))
    made = [next(with_state) for _ in range(count)]
    state = with_state.get_state()
    with_state.close()
    return made, state


def test_a_row_is_of_the_source_that_it_names(mixed):
    made, _ = batches(mixed, 40)
    counts: collections.Counter[int] = collections.Counter()
    for batch in made:
        for tokens, number in zip(batch["tokens"], batch["sources"], strict=True):
            letters = set(tokens[tokens < 256].tolist())
            assert letters <= set(list(LETTERS.values())[number])
            counts[int(number)] += 1
    assert [round(counts[k] / 320, 1) for k in range(3)] == [0.6, 0.3, 0.1]


def test_order_depends_on_neither_processes_nor_prefetch_nor_interruption(mixed):
    whole, end = batches(mixed, 9)
    parts_ = [batches(mixed, 9, rows=rows) for rows in ([0, 1, 2], [5, 3, 4], [6, 7])]
    for number, batch in enumerate(whole):
        for (made, _), rows in zip(parts_, ([0, 1, 2], [5, 3, 4], [6, 7]), strict=True):
            for name, array in batch.items():
                np.testing.assert_array_equal(made[number][name], array[rows])
    assert pipeline.merge_states([state for _, state in parts_]) == end
    assert batches(mixed, 9, prefetch=0)[1] == end
    half, state = batches(mixed, 4)
    rest, again = batches(mixed, 5, state=state)
    assert again == end
    for one, other in zip([*half, *rest], whole, strict=True):
        for name in other:
            np.testing.assert_array_equal(one[name], other[name])


def test_another_mixture_does_not_go_on(mixed):
    _, state = batches(mixed, 2)
    with pytest.raises(UserError, match=r"saved with another mixture in data\.source .*init_from"):
        batches(mixed.replace("=6*", "=5*"), 1, state=state)


# Runs -----------------------------------------------------------------------------------------------------------------


def test_a_run_writes_of_each_source_and_each_set(mixed, tmp_path):
    made = made_of(mixed, kind="plain")
    assert run(made, tmp_path / "whole") == 0
    lines = read_jsonl(tmp_path / "whole" / "metrics.jsonl")
    for before, line in zip([None, *lines], lines, strict=False):
        tokens = {name: line[f"tokens/{name}"] - (before or {}).get(f"tokens/{name}", 0) for name in LETTERS}
        assert sum(tokens.values()) == 8 * 16 and line["tokens"] == sum(line[f"tokens/{name}"] for name in LETTERS)
        nats = sum(line[f"loss/{name}"] * count for name, count in tokens.items() if count)
        assert nats / (8 * 16) == pytest.approx(line["loss"], rel=1e-6)
        assert [line[f"loss/{name}"] is None for name in LETTERS] == [count == 0 for count in tokens.values()]
    last = lines[-1]
    losses = [last[f"val_loss/{name}"] for name in LETTERS]
    assert len(set(losses)) == 3 and min(losses) < last["val_loss"] < max(losses)
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert [summary[f"val_loss/{name}"] for name in LETTERS] == losses

    # Perplexity reads the same rows of each set.
    checkpoint = checkpoints.load(str(tmp_path / "whole"), devices=jax.devices()[:1])
    corpus = corpora.packed(checkpoint.config, "validation", rows=16, batch_size=8)
    sums = score(checkpoint, corpus).sums
    assert sums.nll.sum() / sums.tokens.sum() == pytest.approx(last["val_loss"], rel=1e-6)


@pytest.mark.long
def test_a_killed_run_goes_on_bit_for_bit(mixed, tmp_path):
    made = made_of(mixed)
    assert run(made, tmp_path / "whole") == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "12")  # it was not committed
    assert run(made, tmp_path / "parts") == 0
    assert_equal_runs(tmp_path / "whole", tmp_path / "parts")


def test_named_sets(mixed, tmp_path):
    """A set that a training source holds out and a corpus of its own, which is read whole, are validated by name."""
    one = shares(mixed)[0].source
    (tmp_path / "own.txt").write_bytes(b"9" * 50)
    data = made_of(mixed, validation=f"sets:held={one}; own=text:{tmp_path}/own.txt").data
    sets = pipeline.validation_sets(data, BYTES, batch_size=2, batches=0)
    letters = {
        name: {t for b in of for t in b["tokens"][b["tokens"] < 256].tolist()} - {0} for name, of in sets.items()
    }
    assert letters == {"held": set(LETTERS["short"]), "own": {ord("9")}}
    train, held = (open_source(own, "train") for _, own in parts(data, "train")[:2])
    assert len(train) < 30 and len(held) == 30  # only the first source holds anything out


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": "mix:a=1*text:x"}, None),
        (
            {"source": "mix:a=1*text:x; a=2*text:y"},
            "data.source: the name 'a' is used twice, allowed: NAME=",
        ),
        ({"source": "mix: a = 1 * text:x "}, None),
        ({"source": "mix:a=1e308*text:x; b=1e308*text:y"}, "data.source: the weights 1e\\+308, 1e\\+308 are too large"),
        ({"source": "mix:a=1e-300*text:x; b=1e300*text:y"}, "data.source: the weights .* too far apart"),
        ({"source": "mix:a=1* "}, "data.source: given 'a=1\\*'"),
        ({"source": "mix:a=0*text:x"}, "data.source: given '0', .*a weight above 0 \\(a\\)"),
        ({"source": "mix:a=inf*text:x"}, "data.source: given 'inf'"),
        *(
            ({"source": f"mix:b=1*text:y; a={given}"}, f"the part 'a' has no weight, .* e\\.g\\. a=1\\*{source}$")
            for given, source in (
                ("text:x", "text:x"),
                ("text:x/*.txt", "text:x/\\*.txt"),
                ("text:*/y*", "text:\\*/y\\*"),
                ("*text:x/*", "text:x/\\*"),
                (" stdlib ", "stdlib"),
            )
        ),
        ({"source": "mix:a=1"}, "data.source: given 'a=1', allowed: mix:NAME=WEIGHT\\*SOURCE;"),
        ({"source": "mix:text:x"}, "data.source: given 'text:x', allowed: mix:NAME=WEIGHT\\*SOURCE;"),
        ({"source": "mix:"}, "data.source: 'mix:' names no source, allowed: mix:NAME=WEIGHT\\*SOURCE;"),
        ({"source": "mix:;"}, "data.source: 'mix:;' names no source"),
        ({"source": "mix:a=1*text:x;;b=1*text:y"}, "data.source: part 2 of 3 is empty, allowed: mix:NAME="),
        ({"source": "mix:a=1*text:x; "}, None),
        ({"source": "mix:a=1*sets:b=text:x"}, "given 'sets:b=text:x', allowed: [^?]*; sets: is for data.validation as"),
        ({"source": "mix:a=1*mix:b=1*text:x"}, "given 'mix:b=1\\*text:x', .*; mix: is for data.source as a whole$"),
        ({"source": "mix:a=1*txt:x"}, "data.source: given 'txt:x', .*did you mean text\\?"),
        ({"source": "mix:a b=1*text:x"}, "data.source: given 'a b'"),
        (
            {"source": "sets:a=text:x"},
            "data.source: given 'sets:a=text:x', allowed: one of stdlib, [^?]* is for data.val",
        ),
        ({"validation": "mix:a=1*text:x"}, "data.validation: given [^?]*; mix: is for data.source as a whole$"),
        ({"validation": "sets:a=text:x;;"}, "data.validation: part 2 of 2 is empty, allowed: sets:NAME=SOURCE;"),
    ],
)
def test_mistakes(fields, message):
    if message is None:
        assert math.isclose(shares(fields["source"])[0].weight, 1.0)
        return
    with pytest.raises(UserError, match=message):
        config("stdlib", data=fields)
