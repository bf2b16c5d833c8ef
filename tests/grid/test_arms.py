"""Test arms as data: the algebra of product, zip and chain, and names that no other arm can change."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mhc.errors import UserError
from mhc.grid import Arms, arm, axis, branches, chain, product, seeds, zipped
from mhc.grid.arms import name_of, source_of

FIELDS = ("residual.kind", "residual.n", "optimizer.lr", "model.layers", "data.source", "head.tied", "train.steps")
values = st.one_of(
    st.integers(-5, 10**9),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.text(max_size=40),
    st.lists(st.floats(0, 1), max_size=3).map(tuple),
)
one_arm = st.dictionaries(st.sampled_from(FIELDS), values)
sizes = st.lists(st.integers(1, 4), min_size=1, max_size=len(FIELDS))


def axes(counts: list[int]) -> list[Arms]:
    """Return an axis for each field, with so many values each."""
    return [axis(field, *range(count)) for field, count in zip(FIELDS, counts, strict=False)]


@given(sizes)
def test_a_product_has_every_combination_once(counts: list[int]) -> None:
    arms = product(*axes(counts))
    assert len(arms) == math.prod(counts)
    assert len({tuple(sorted(one.items())) for one in arms}) == len(arms)
    assert all(set(one) == set(FIELDS[: len(counts)]) for one in arms)


@given(sizes)
def test_products_of_products_are_products(counts: list[int]) -> None:
    parts = axes(counts)
    assert product(product(*parts[:2]), *parts[2:]) == product(*parts)


@given(sizes)
def test_a_chain_has_the_arms_of_its_parts_in_order(counts: list[int]) -> None:
    parts = axes(counts)
    assert list(chain(*parts)) == [one for part in parts for one in part]


def test_zipped_arms_go_together() -> None:
    arms = zipped(axis("model.layers", 2, 4), axis("optimizer.lr", 0.1, 0.2))
    assert arms == ({"model.layers": 2, "optimizer.lr": 0.1}, {"model.layers": 4, "optimizer.lr": 0.2})


def test_seeds_pair_initial_weights_and_data() -> None:
    assert seeds(0, 7) == ({"seed.init": 0, "seed.data": 0}, {"seed.init": 7, "seed.data": 7})


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: axis("residual.kidn", "hc"), "did you mean residual.kind?"),
        (lambda: arm({"lr": 0.1}), "did you mean optimizer.lr?"),
        (lambda: axis("optimizer.lr"), "no value given"),
        (lambda: zipped(axis("model.layers", 1, 2), axis("optimizer.lr", 0.1)), "parts of 2, 1 arms"),
        (lambda: product(axis("model.layers", 1), axis("model.layers", 2)), "model.layers is set twice in one arm"),
        (lambda: product(seeds(0), axis("seed.init", 1)), "seed.init is set twice in one arm"),
    ],
)
def test_a_mistake_is_told(build: Callable[[], Arms], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        build()


@given(one_arm, st.randoms())
def test_a_name_does_not_depend_on_the_order_of_fields(fields: dict, shuffle: random.Random) -> None:
    items = list(fields.items())
    shuffle.shuffle(items)
    assert name_of(dict(items)) == name_of(fields)


@given(one_arm)
def test_a_name_is_a_folder(fields: dict) -> None:
    name = name_of(fields)
    assert re.fullmatch(r"[A-Za-z0-9_+=,-][A-Za-z0-9._+=,-]{0,119}", name), name


@given(one_arm, one_arm)
@example({}, {"residual.kind": ""})
@example({}, {"residual.kind": "base"})
@example({}, {"residual.kind": ()})
@example({"residual.kind": "mhc", "residual.n": 4}, {"residual.kind": "mhc,n=4"})
@example({"data.source": 0.5}, {"data.source": (0.5,)})
@example({"data.source": (0.5, 0.25)}, {"data.source": "0.5+0.25"})
def test_different_arms_have_different_names(one: dict, other: dict) -> None:
    # 1 and 1.0 and True are equal to Python; a plan holds values in the type of their field.
    if repr(sorted(one.items())) != repr(sorted(other.items())):
        same = {k: str(v) for k, v in one.items()} == {k: str(v) for k, v in other.items()} or one == other
        assert same or name_of(one) != name_of(other)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "base"),
        ({"residual.kind": "mhc", "seed.init": 0, "seed.data": 0, "optimizer.lr": 3e-3}, "mhc,lr=0.003,seed=0"),
        ({"optimizer.lr": 1.0}, "lr=1"),
        ({"optimizer.lr": 1e-5}, "lr=1e-05"),
        ({"seed.init": 1, "seed.data": 2, "train.batch_size": 8}, "seed.data=2,seed.init=1,train.batch_size=8"),
        (
            {"residual.kind": "plain", "residual.scale": 0.0, "init.scale_residual": False},
            "plain,scale=0,scaled_init=False",
        ),
        ({"schedule.step_ratios": (0.5, 0.25)}, "schedule.step_ratios=0.5+0.25"),
    ],
)
def test_names_stay_what_they_are(fields: dict, name: str) -> None:
    """Folders of existing grids are found by these names: a change here orphans every arm that has run."""
    assert name_of(fields) == name


def test_branches_have_their_trunk_s_fields_and_take_over_all_of_its_state() -> None:
    trunks = product(seeds(0, 1), axis("residual.kind", "plain", "mhc"))
    made = branches(trunks, 80, axis("train.steps", 20, 40))
    assert len(made) == 8
    for trunk, branch in zip([trunk for trunk in trunks for _ in range(2)], made, strict=True):
        assert trunk.items() <= branch.items()
        assert source_of(trunk) is None and source_of(branch) == (name_of(trunk), 80)
        assert branch["train.init_optimizer"] and branch["train.init_data"]
    changed = branches(arm({"schedule.kind": "constant"}), 80, arm({"schedule.kind": "wsd"}))
    assert changed[0]["schedule.kind"] == "wsd"
    for text in ("arm:plain", "arm:@80", "arm:plain@last"):
        with pytest.raises(UserError, match=r"train\.init_from: given 'arm:.*', allowed in a grid: arm:NAME@STEP"):
            source_of({"train.init_from": text})


DECAY = {"schedule.kind": "wsd", "schedule.wsd_steps": 20, "train.steps": 20}


def test_the_name_of_a_branch_says_what_is_not_usual() -> None:
    def name(trunk: Arms, change: Mapping[str, Any], step: int = 80) -> str:
        return name_of(branches(trunk, step, (change,))[0])

    trunk = product(seeds(0), axis("residual.kind", "plain"))
    assert name(trunk, DECAY) == "plain,from=80,decay=20,seed=0"
    assert name(trunk, {**DECAY, "schedule.wsd_shape": "sqrt"}) == "plain,from=80,decay=20,shape=sqrt,seed=0"
    # What is another, or missing, is named; a trunk that the other fields do not tell is in a hash.
    names = [
        name(trunk, DECAY),
        name(trunk, DECAY, step=160),
        name(trunk, {**DECAY, "train.steps": 40}),
        name(trunk, {**DECAY, "train.init_data": False}),
        name(trunk, {**DECAY, "schedule.kind": "linear"}),
        name(trunk, {field: value for field, value in DECAY.items() if field != "schedule.kind"}),
        name(trunk, {**DECAY, "residual.kind": "mhc"}),
        name(product(trunk, axis("model.layers", 2)), {**DECAY, "residual.kind": "mhc"}),
        name_of({**trunk[0], **DECAY, "train.init_from": "arm:hc@80"}),
        name_of({**trunk[0], **DECAY, "train.init_from": "arm:mhc@80"}),
        name_of({**trunk[0], **DECAY, "train.init_from": "runs/a@80"}),
    ]
    assert len({one.lower() for one in names}) == len(names)
