"""Test wind tunnels: the posterior is exact, sequences are pure functions of seed and number, and rows resume."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from mhc.config import DataConfig, default, from_config_dict
from mhc.data import pipeline, tokenizers
from mhc.data.windtunnel import Bijection, HiddenMarkov, check_model, entropy_bits, fields, hmm_posterior, task
from mhc.errors import UserError

GOLDEN = Path(__file__).parents[1] / "golden/posteriors.npz"
BIJECTION, HMM = "windtunnel:bijection,symbols=6", "windtunnel:hmm,observations=5"


# ------------------------------------------------------------------------------------------------------------ posterior


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as file:
        return dict(file)


@pytest.mark.parametrize("case", range(8))
def test_the_posterior_is_the_reference_s(case: int, golden: dict[str, np.ndarray]) -> None:
    model = {name: golden[f"hmm{case}/{name}"] for name in ("transition", "emission", "observations")}
    posterior = hmm_posterior(**model)
    np.testing.assert_allclose(posterior, golden[f"hmm{case}/posterior"], rtol=0, atol=1e-9)
    np.testing.assert_allclose(entropy_bits(posterior), golden[f"hmm{case}/entropy_bits"], rtol=0, atol=1e-9)


def enumerated(transition: np.ndarray, emission: np.ndarray, observations: np.ndarray) -> np.ndarray:
    """Return p(s_t | o_1 … o_t) by the sum over every path of states, which shares nothing with the recursion."""
    states = len(emission)
    out = np.zeros((len(observations), states))
    for t in range(len(observations)):
        for path in itertools.product(range(states), repeat=t + 1):
            chance = 1.0 / states
            for place, state in enumerate(path):
                chance *= emission[state, observations[place]]
                chance *= transition[path[place - 1], state] if place else 1.0
            out[t, path[-1]] += chance
    return out / out.sum(axis=1, keepdims=True)


@hypothesis.settings(max_examples=25)
@hypothesis.given(st.integers(0, 2**32), st.integers(2, 3), st.integers(2, 4), st.integers(1, 5))
def test_the_posterior_equals_the_sum_over_all_paths(seed: int, states: int, symbols: int, length: int) -> None:
    draw = np.random.default_rng(seed)
    transition, emission = draw.dirichlet(np.ones(states), states), draw.dirichlet(np.ones(symbols), states)
    observations = draw.integers(0, symbols, length)
    expected = enumerated(transition, emission, observations)
    np.testing.assert_allclose(hmm_posterior(transition, emission, observations), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"transition": np.ones((2, 3)) / 3}, "expected"),
        ({"transition": np.ones((2, 2))}, "transition: each row"),
        ({"emission": np.array([[1.5, -0.5], [0.5, 0.5]])}, "emission: each row"),
        ({"observations": np.array([0, 2])}, "observations: expected"),
        ({"observations": np.array([0.0])}, "observations: expected"),
        ({"emission": np.array([[1.0, 0.0], [1.0, 0.0]]), "observations": np.array([0, 1])}, "probability 0"),
    ],
)
def test_what_is_no_model_is_refused(change: dict[str, Any], words: str) -> None:
    half = np.full((2, 2), 0.5)
    with pytest.raises(ValueError, match=words):
        hmm_posterior(**{"transition": half, "emission": half, "observations": np.array([0, 1])} | change)


def test_the_bijection_s_posterior_has_the_closed_form(golden: dict[str, np.ndarray]) -> None:
    """For every sequence entropies are log2(V − m + 1), and so is the cross-entropy of what came true, to 1e-12."""
    made = Bijection()
    sequences = made.make(0, "train", range(300))
    entropies = entropy_bits(sequences.posterior)
    np.testing.assert_allclose(entropies, np.tile(golden["bijection/V20_entropy_bits"][:19], (300, 1)), atol=1e-12)
    chosen = np.take_along_axis(sequences.posterior, sequences.targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(-np.log(chosen).mean(axis=1), made.optimum, rtol=0, atol=1e-12)
    assert made.optimum == pytest.approx(2.2282, abs=5e-5)
    assert made.optimum == pytest.approx(math.log(math.factorial(20)) / 19, abs=1e-12)


# ------------------------------------------------------------------------------------------------------------ sequences


def test_a_bijection_maps_each_key_once_to_a_value_of_its_own() -> None:
    made = Bijection(6)
    sequences = made.make(1, "train", range(200))
    assert sequences.tokens.shape == (200, 9) and made.length == 9
    for tokens, targets in zip(sequences.tokens, sequences.targets, strict=True):
        keys, values = tokens[0::2], tokens[1::2] - 6
        assert len(set(keys)) == 5 and keys.max() < 6
        assert list(values) == list(targets[:-1]) and len(set(targets)) == 5
    firsts = np.bincount(sequences.targets[:, 0], minlength=6)
    assert firsts.min() > 10  # of 200 over six values


def test_a_hidden_markov_sequence_writes_out_the_model_of_its_posterior() -> None:
    made = HiddenMarkov(observations=7)
    sequences = made.make(2, "train", range(50))
    for tokens, posterior in zip(sequences.tokens, sequences.posterior, strict=True):
        assert tokens[0] == made.TRANSITION and tokens[26] == made.EMISSION
        transition, emission = (tokens[part].reshape(5, 5) / 100 for part in (slice(1, 26), slice(27, 52)))
        for matrix in (transition, emission):
            assert matrix.min() >= 0.03 and np.abs(matrix.sum(axis=1) - 1).max() < 0.03
            matrix /= matrix.sum(axis=1, keepdims=True)
        assert set(tokens[52::2]) == {made.OBSERVATION}
        seen = tokens[53::2] - made.FIRST_SYMBOL
        np.testing.assert_allclose(posterior, hmm_posterior(transition, emission, seen), rtol=0, atol=1e-12)


def test_hidden_states_come_true_as_often_as_the_posterior_says() -> None:
    """The posterior is calibrated: of states that it gives 20 to 30 %, about a quarter came true."""
    sequences = HiddenMarkov(observations=10).make(0, "train", range(2000))
    came_true = np.eye(5)[sequences.targets]
    for low in (0.1, 0.3, 0.5, 0.7):
        bin_ = (sequences.posterior >= low) & (sequences.posterior < low + 0.2)
        assert came_true[bin_].mean() == pytest.approx(sequences.posterior[bin_].mean(), abs=0.03)


@pytest.mark.parametrize("source", [BIJECTION, HMM])
def test_a_sequence_depends_on_seed_split_and_number_alone(source: str) -> None:
    made = task(source)
    several = made.make(3, "train", [5, 9, 2])
    for place, number in enumerate((5, 9, 2)):
        for one, row in zip(made.make(3, "train", [number]), several, strict=True):
            np.testing.assert_array_equal(one[0], row[place])
    others = [made.make(4, "train", [5]), made.make(3, "validation", [5]), made.make(3, "train", [6])]
    assert all((other.tokens[0] != several.tokens[0]).any() for other in others)


def test_shifted_observations_visit_every_position_and_leave_the_tokens_alone() -> None:
    """A training sequence's observations begin at any even step that leaves them room; held-out ones begin at 0."""
    shifted, plain = HiddenMarkov(observations=3, reach=7), HiddenMarkov(observations=3)
    for ours, theirs in zip(shifted.make(5, "train", range(9)), plain.make(5, "train", range(9)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    positions = shifted.positions(5, "train", range(300))
    assert positions.dtype == np.int32 and positions.shape == (300, shifted.length)
    np.testing.assert_array_equal(positions[:, : shifted.header], np.tile(np.arange(shifted.header), (300, 1)))
    inside = positions[:, shifted.header :] - shifted.header
    np.testing.assert_array_equal(np.diff(inside, axis=1), 1)
    counts = np.bincount(inside[:, 0], minlength=9)
    assert (counts[0:9:2] > 30).all() and counts[1:9:2].sum() == 0 and counts.sum() == 300  # 0, 2, … 8: five shifts
    assert positions.max() + 1 == shifted.span == HiddenMarkov(observations=7).length
    np.testing.assert_array_equal(shifted.positions(5, "train", [7])[0], positions[7])
    for made, unshifted in (
        (shifted, shifted.positions(5, "validation", range(4))),
        (plain, plain.positions(5, "train", range(4))),
        (Bijection(6), Bijection(6).positions(5, "train", range(4))),
    ):
        np.testing.assert_array_equal(unshifted, np.tile(np.arange(made.length), (4, 1)))


def test_a_model_that_does_not_fit_its_task_is_refused() -> None:
    """Another number of classes, too few learned positions, and classes over text are refused."""
    reaching = f"{HMM},reach=9"
    chosen = task(reaching)
    cases: dict[str, dict[str, dict[str, Any]]] = {
        "head.classes: given None, allowed: ": {"data": {"source": HMM}},
        "head.classes: given 4, allowed: None with data.source=windtunnel:bijection": {
            "data": {"source": BIJECTION},
            "head": {"classes": 4},
        },
        "head.classes: given 4, allowed: None with data.source=stdlib": {"head": {"classes": 4}},
        f"positions.max_length: given {chosen.span - 1}, allowed: at least {chosen.span} with data.source=": {
            "data": {"source": reaching, "sequence_length": chosen.length},
            "head": {"classes": chosen.classes},
            "positions": {"kind": "learned", "max_length": chosen.span - 1},
        },
    }
    for words, given in cases.items():
        config = default()
        for group, values in given.items():
            config[group].update(values)
        with pytest.raises(UserError, match=re.escape(words)):
            check_model(from_config_dict(config))


# ----------------------------------------------------------------------------------------------------------------- rows


def data(source: str, **changes: Any) -> DataConfig:
    own = {name.removeprefix("data."): value for name, value in fields(source).items() if name.startswith("data.")}
    return DataConfig(**own | changes)


def batches(config: DataConfig, count: int, **arguments: Any) -> list[tuple[dict[str, np.ndarray], Any]]:
    """Return batches, each with the state after it."""
    state = arguments.pop("state", None)
    tokenizer = tokenizers.load(config.tokenizer)
    iterator = pipeline.train_iterator(config, tokenizer, **{"batch_size": 6, "seed": 1, **arguments})
    try:
        if state is not None:
            iterator.set_state(state)
        return [(next(iterator), json.loads(json.dumps(iterator.get_state()))) for _ in range(count)]
    finally:
        iterator.close()


def assert_same(one: Any, other: Any) -> None:
    for (batch, state), (theirs, their_state) in zip(one, other, strict=True):
        assert state == their_state and batch.keys() == theirs.keys()
        for name, array in batch.items():
            np.testing.assert_array_equal(array, theirs[name])


@pytest.mark.parametrize("source", [BIJECTION, HMM, f"{HMM},reach=9"])
def test_rows_are_supervised_where_the_posterior_is_known(source: str) -> None:
    made = task(source)
    ((batch, _),) = batches(data(source), 1)
    drawn = made.make(1, "train", range(6))
    np.testing.assert_array_equal(batch["tokens"], drawn.tokens)
    assert (batch["weights"][:, made.places] == 1).all() and batch["weights"].sum() == 6 * len(made.places)
    np.testing.assert_array_equal(batch["targets"][:, made.places], drawn.targets + made.first_class)
    assert ("posterior" in batch) == (made.classes is not None)
    if made.classes is not None:
        np.testing.assert_array_equal(batch["posterior"][:, made.places], drawn.posterior.astype(np.float32))
        np.testing.assert_array_equal(batch["positions"], made.positions(1, "train", range(6)))
    else:  # each value is the token behind its key
        inner = made.places[:-1]
        np.testing.assert_array_equal(batch["targets"][:, inner], batch["tokens"][:, inner + 1])


@pytest.mark.parametrize("source", [BIJECTION, HMM])
def test_rows_go_on_from_a_state_and_are_shared_out_over_processes(source: str) -> None:
    config = data(source)
    whole = batches(config, 5)
    assert_same(batches(config, 3, state=whole[1][1]), whole[2:])
    halves = [batches(config, 2, rows=rows) for rows in ([0, 2, 4], [1, 3, 5])]
    for step, (batch, state) in enumerate(whole[:2]):
        for rows, half in zip(([0, 2, 4], [1, 3, 5]), halves, strict=True):
            for name, array in half[step][0].items():
                np.testing.assert_array_equal(array, batch[name][rows])
        merged = pipeline.merge_states([half[step][1] for half in halves])
        assert merged == state


def test_worker_processes_change_no_row() -> None:
    config = data(HMM)
    assert_same(batches(dataclasses.replace(config, workers=2), 3), batches(config, 3))


def test_validation_has_sequences_of_its_own_the_same_for_every_seed() -> None:
    config = data(BIJECTION)
    sets = pipeline.validation_sets(config, tokenizers.load(config.tokenizer), batch_size=4, count=6)
    first, last = list(sets[""])
    np.testing.assert_array_equal(first["tokens"], Bijection(6).make(0, "validation", range(4)).tokens)
    assert last["weights"][2:].sum() == 0 and last["segment_ids"][2:].sum() == 0  # filled up
    assert sets[""].coverage() == "validation: 6 held-out sequence(s) of 9 tokens"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source": "windtunnel:bijektion"}, "did you mean bijection"),
        ({"source": "windtunnel:hmm,observation=3"}, "did you mean observations"),
        ({"source": "windtunnel:hmm,observations=0"}, "an integer from 1"),
        ({"source": "windtunnel:hmm,observations=9,reach=8"}, "reach: given 8, allowed: 0 or at least observations=9"),
        ({"source": "windtunnel:bijection,symbols=ten"}, "an integer from 3"),
        ({"source": "windtunnel:bijection,symbols=5,symbols=6"}, "given twice"),
        ({"tokenizer": "bytes"}, f"data.tokenizer: given 'bytes', allowed: {BIJECTION}"),
        ({"sequence_length": 64}, "data.sequence_length: given 64, allowed: 9"),
        ({"source": f"mix:a=1*{BIJECTION};b=1*stdlib"}, "not in a mixture"),
        ({"validation": "stdlib"}, "data.validation: given 'stdlib', allowed: None with windtunnel:"),
        ({"source": "stdlib", "tokenizer": "bytes", "validation": BIJECTION}, "data.validation: given"),
    ],
)
def test_a_mistake_is_a_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words.replace("(", r"\(").replace(")", r"\)")):
        batches(dataclasses.replace(data(BIJECTION), **changes), 1)


def test_programs_that_read_documents_are_told() -> None:
    from mhc.data.corpus.sources import open_source

    with pytest.raises(UserError, match=r"has no documents; python -m eval\.windtunnel"):
        open_source(data(BIJECTION), "train")
    with pytest.raises(UserError, match="has no ids for text"):
        tokenizers.load(BIJECTION).encode("text")
