"""Test train.init_from: a run begins with another's weights, with another residual too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mhc import kinds
from mhc.config import from_config_dict
from mhc.errors import UserError
from mhc.eval import replay
from mhc.train import start
from mhc.train.checkpoint import committed_steps, load_run
from mhc.train.setup import Setup
from mhc.train.step import Trainer
from tests import small_runs
from tests.small import assert_identical, by_path, random_params, relative_error, small
from tests.small_runs import lines, tiny, untrained, write_corpus

PLAIN: dict[str, dict[str, Any]] = {
    "train": {"steps": 4, "batch_size": 8},
    "checkpoint": {"every": 2},
    "validation": {"every": 0, "batches": 1},
    "monitor": {"probe_every": 0},
    "schedule": {"kind": "linear", "decay_steps": 4},
}


@pytest.fixture(scope="module")
def plain(corpus: str) -> Path:
    """Return a plain run of four steps, with checkpoints at 2 and 4."""
    run = Path(corpus.removeprefix("text:")).parent.parent / "plain"
    assert small_runs.run(config(corpus, "plain"), run) == 0
    return run


def config(corpus: str, kind: str, **groups: dict[str, Any]) -> Any:
    merged = {name: {**PLAIN.get(name, {}), **groups.get(name, {})} for name in {**PLAIN, **groups}}
    merged["residual"] = {"kind": kind, **merged.get("residual", {})}
    base = tiny(corpus, kind, **merged)
    base["monitor"] = {"tensorboard": False, "progress_every": 0, **base["monitor"]}
    return from_config_dict(base)


def opened(made: Any, folder: Path) -> Setup:
    """Return the checked setup of a run, which is not begun."""
    setup = Setup(made, folder, devices=jax.devices()[:1])
    setup.data.close()
    return setup


UPCYCLED = [
    pytest.param("mhc", {"init": "equivalent", "iters": 1, "n": 2}, marks=pytest.mark.product),
    pytest.param("hc", {"collapse": "mean"}, marks=pytest.mark.product),
    pytest.param("kromhc", {"init": "equivalent"}, marks=pytest.mark.product),
    pytest.param("mhc_lite", {"init": "equivalent", "n": 2}, marks=pytest.mark.product),
    pytest.param("identity", {"init": "equivalent"}, marks=pytest.mark.product),
    pytest.param("mhc", {"init": "equivalent", "sinkhorn": "deepseek"}, marks=pytest.mark.product),
    pytest.param("mhc", {"init": "equivalent", "collapse": None, "single_pass": True}, marks=pytest.mark.product),
    pytest.param("plain", {"value_residual": True, "value_init": "equivalent"}, marks=pytest.mark.product),
]
UPCYCLED += [  # every further kind with its default options
    pytest.param(name, dict(kind.preserving), marks=pytest.mark.product)
    for name, kind in kinds.known().items()
    if kind.parameters and kind.preserving and not kind.own_norms
    if name not in {"attn_res", *(case.values[0] for case in UPCYCLED)}  # attn_res has a test of its own
]


@pytest.mark.parametrize(("kind", "residual"), UPCYCLED)
def test_an_upcycled_model_begins_with_the_source_s_logits_and_trains(
    kind: str, residual: dict[str, Any], corpus: str, plain: Path, tmp_path: Path
) -> None:
    made = config(corpus, kind, residual=residual, train={"init_from": f"{plain}@2"})
    run = opened(made, tmp_path / "x")
    source = load_run(plain, 2)
    trainer = Trainer(run.config, run.mesh)
    state = start.initial_state(trainer)
    assert (int(state.step), int(state.skipped)) == (0, 0)
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 0, 258)
    logits = trainer.definition.bind(state.params)(tokens)
    assert relative_error(logits, source.decoder()(tokens)) < 1e-4
    assert small_runs.run(made, tmp_path / "x") == 0
    assert committed_steps(tmp_path / "x") == [0, 2, 4]
    assert_identical(load_run(tmp_path / "x", 0).params, state.params)
    losses = [row["loss"] for row in lines(tmp_path / "x", "metrics")]
    assert len(losses) == 4 and losses[-1] < losses[0]
    # Its first loss is what the plain run had at its third step, on the same model but for the batch.
    assert abs(losses[0] - lines(plain, "metrics")[2]["loss"]) < 0.2


@pytest.mark.product
@pytest.mark.parametrize("block", [0, 2])
def test_attention_over_depth_begins_with_the_source_s_logits_but_for_eps(
    block: int, corpus: str, tmp_path: Path
) -> None:
    """It reads the mean of J sources, so the eps of a norm weighs J^2 times as much; here it weighs nothing."""
    norm = {"norm": {"eps": 1e-12}}
    source = small_runs.resolved(config(corpus, "plain", **norm))
    untrained(source, random_params(source), tmp_path / "a")
    residual = {"init": "equivalent", "block": block}
    made = config(corpus, "attn_res", residual=residual, train={"init_from": str(tmp_path / "a")}, **norm)
    run = opened(made, tmp_path / "x")
    trainer = Trainer(run.config, run.mesh)
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 0, 258)
    logits = trainer.definition.bind(start.initial_state(trainer).params)(tokens)
    assert relative_error(logits, load_run(tmp_path / "a").decoder()(tokens)) < 1e-4


@pytest.mark.long
def test_its_first_step_is_replayed_bit_for_bit(corpus: str, plain: Path, tmp_path: Path) -> None:
    made = config(corpus, "hc", residual={"collapse": "mean"}, train={"init_from": str(plain)}, checkpoint={"every": 0})
    assert small_runs.run(made, tmp_path / "x") == 0
    said: list[str] = []
    done = replay.replay(tmp_path / "x", 1, devices=jax.devices()[:1], say=said.append)
    assert done.differences == {}
    assert "checkpoint of step 0" in "".join(said)


def test_weights_of_the_last_checkpoint_are_taken_over_bit_for_bit(corpus: str, plain: Path, tmp_path: Path) -> None:
    made = config(corpus, "plain", train={"init_from": str(plain)}, optimizer={"name": "sgd"})
    run = opened(made, tmp_path / "x")
    state = start.initial_state(Trainer(run.config, run.mesh))
    assert_identical(state.params, load_run(plain).params)
    assert not (tmp_path / "x").exists()


def test_with_the_optimiser_a_run_goes_on_as_if_it_had_not_stopped(corpus: str, plain: Path, tmp_path: Path) -> None:
    made = config(corpus, "plain", train={"init_from": f"{plain}@2", "init_optimizer": True, "steps": 2})
    assert small_runs.run(made, tmp_path / "x") == 0
    assert [row["lr"] for row in lines(tmp_path / "x", "metrics")] == [row["lr"] for row in lines(plain, "metrics")[2:]]
    run = opened(made, tmp_path / "y")
    trainer = Trainer(run.config, run.mesh)
    state = start.initial_state(trainer)
    assert int(state.step) == 2
    moments = by_path(state.opt_state)
    assert any(np.any(leaf != 0) for path, leaf in moments.items() if "embed/table" in path)


def test_the_same_residual_is_taken_over_with_its_maps(corpus: str, plain: Path, tmp_path: Path) -> None:
    first = small_runs.resolved(config(corpus, "identity", residual={"n": 2}))
    untrained(first, random_params(first), tmp_path / "a")
    # init=home, of no consequence here
    made = config(corpus, "identity", train={"init_from": str(tmp_path / "a")}, residual={"n": 2})
    run = opened(made, tmp_path / "b")
    state = start.initial_state(Trainer(run.config, run.mesh))
    assert_identical(state.params, load_run(tmp_path / "a").params)
    for kind, residual in (("plain", {}), ("hc", {"collapse": "mean"}), ("identity", {"init": "equivalent"})):
        other = config(corpus, kind, residual=residual, train={"init_from": str(tmp_path / "a")})
        with pytest.raises(UserError, match=r"has residual\.kind=identity, n=2"):
            opened(other, tmp_path / "c")


@pytest.mark.parametrize(
    ("kind", "groups", "words"),
    [
        ("mhc", {}, "is plain: residual.init: given 'home', allowed: 'equivalent'"),
        ("hc", {}, "is plain: residual.collapse: given 'sum', allowed: 'mean'"),
        ("mhc", {"residual": {"init": "equivalent", "alpha": 0.1}}, "residual.alpha: given 0.1, allowed: 0.0"),
        (
            "plain",
            {"model": {"width": 16}},
            r"parameters of other shapes: .*core/key \[2, 8, 2, 4\] there, \[2, 16, 2, 8\] here.* and 4 more",
        ),
        *(
            (name, {}, rf"is plain: residual\.kind: given '{name}', allowed: plain, .*: it has norms of its own in the")
            for name, kind in kinds.known().items()
            if kind.own_norms
        ),
        ("plain", {"norm": {"embedding": True}}, r"embed_norm/scale absent there, \[8\] here"),
        ("plain", {"optimizer": {"name": "sgd"}, "train": {"init_optimizer": True}}, "optimiser's state of .*: adamw"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    kind: str, groups: dict[str, Any], words: str, corpus: str, plain: Path, tmp_path: Path
) -> None:
    groups = dict(groups)
    groups["train"] = {"init_from": str(plain), **groups.get("train", {})}
    with pytest.raises(UserError, match=words) as raised:
        opened(config(corpus, kind, **groups), tmp_path / "x")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no/such", "no/such: not a run folder"),
        ("{plain}@3", "no checkpoint of step 3; there are 2, 4"),
        ("{plain}@last", "given step .last., allowed: an int >= 0"),
        ("", "not a run"),
    ],
)
def test_a_source_that_is_not_there(text: str, words: str, plain: Path) -> None:
    made = small("plain", train={"init_from": text.format(plain=plain)})
    with pytest.raises(UserError, match=words):
        start.source(made)


def test_the_optimiser_alone_is_no_source() -> None:
    with pytest.raises(UserError, match=r"train\.init_optimizer: given True, allowed: False without"):
        small("plain", train={"init_optimizer": True})


# Longer contexts and branches -----------------------------------------------------------------------------------------

LONGER = [
    pytest.param({"scaling": "yarn", "factor": 4.0, "original_length": 16}, False, marks=pytest.mark.product),
    ({"scaling": "ntk", "factor": 4.0}, True),
    pytest.param({"scaling": "linear", "factor": 4.0}, False, marks=pytest.mark.product),
    pytest.param({"scaling": "none", "theta": 160_000.0}, True, marks=pytest.mark.product),
]


@pytest.mark.parametrize(("positions", "optimizer"), LONGER)
def test_a_run_goes_on_at_four_times_the_length_on_other_data_with_another_schedule(
    positions: dict[str, Any], optimizer: bool, corpus: str, plain: Path, tmp_path: Path
) -> None:
    other = write_corpus(tmp_path / "others")
    made = config(
        corpus,
        "plain",
        positions=positions,
        data={"sequence_length": 64, "source": f"mix:old=1*{corpus};new=3*{other}"},
        schedule={"kind": "cosine", "decay_steps": 8, "warmup_steps": 1, "final_ratio": 0.0},
        train={"init_from": f"{plain}@2", "init_optimizer": optimizer, "steps": 2, "batch_size": 4},
    )
    run = opened(made, tmp_path / "x")
    assert run.config.original_length == positions.get("original_length", 64)
    state = start.initial_state(Trainer(run.config, run.mesh))
    assert_identical(state.params, load_run(plain, 2).params)
    assert int(state.step) == (2 if optimizer else 0)
    assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(state.opt_state)) == optimizer
    if positions["scaling"] == "yarn":  # one is enough to see that it trains
        assert small_runs.run(made, tmp_path / "x") == 0
        rows = lines(tmp_path / "x", "metrics")
        assert [row["tokens"] for row in rows] == [4 * 64, 2 * 4 * 64]
        assert abs(rows[0]["loss"] - lines(plain, "metrics")[2]["loss"]) < 0.3


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            {"kind": "learned"},
            {"kind": "learned"},
            "data.sequence_length: given 64, allowed: at most 16, the positions",
        ),
        (
            {"kind": "learned", "max_length": 128},
            {"kind": "learned"},
            "positions.max_length: given 64, allowed: 128, the positions that .* has learned",
        ),
        (
            {},
            {"scaling": "yarn", "factor": 4.0},
            "positions.original_length: given 64, allowed: at most 16 with .*yarn",
        ),
        ({}, {"scaling": "llama3", "factor": 4.0, "original_length": 32}, "given 32, allowed: at most 16"),
    ],
)
def test_positions_that_the_source_does_not_have_are_one_line(
    before: dict[str, Any], after: dict[str, Any], words: str, corpus: str, tmp_path: Path
) -> None:
    source = small_runs.resolved(config(corpus, "plain", positions=before))
    untrained(source, random_params(source), tmp_path / "a")
    made = config(
        corpus, "plain", positions=after, data={"sequence_length": 64}, train={"init_from": str(tmp_path / "a")}
    )
    with pytest.raises(UserError, match=words) as raised:
        opened(made, tmp_path / "b")
    assert "\n" not in str(raised.value) and not (tmp_path / "b").exists()


def test_learned_positions_that_are_long_enough_are_taken_over(corpus: str, tmp_path: Path) -> None:
    learned = {"kind": "learned", "max_length": 64}
    source = small_runs.resolved(config(corpus, "plain", positions=learned))
    untrained(source, random_params(source), tmp_path / "a")
    made = config(
        corpus, "plain", positions=learned, data={"sequence_length": 64}, train={"init_from": str(tmp_path / "a")}
    )
    run = opened(made, tmp_path / "b")
    assert_identical(start.initial_state(Trainer(run.config, run.mesh)).params, load_run(tmp_path / "a").params)
