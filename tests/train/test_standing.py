"""Test the standing of a run: what is stored is what is read, also from checkpoints of older versions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhc.train.standing import Standing

counts = st.integers(0, 2**53)
names = st.text(min_size=1, max_size=8)
stored_parts = {"data", "tokens", "source_tokens", "seconds", "rewinds", "weights_only", "step", "about"}


@given(
    st.builds(
        Standing,
        step=counts,
        tokens=counts,
        source_tokens=st.dictionaries(names, counts, max_size=3),
        seconds=st.floats(0, 1e9),
        rewinds=counts,
        data=st.none() | st.dictionaries(names, counts, max_size=3),
        weights_only=st.booleans(),
        about=st.dictionaries(names.filter(lambda name: name not in stored_parts), counts, max_size=2),
    )
)
def test_what_is_stored_is_read_back(standing: Standing) -> None:
    stored = json.loads(json.dumps(standing.to_json()))
    assert Standing.from_json(standing.step, stored) == standing


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (
            {"data": {"rows": [0]}, "tokens": 9, "seconds": 1.5, "rewinds": 1},  # before mixtures
            Standing(step=4, tokens=9, seconds=1.5, rewinds=1, data={"rows": [0]}),
        ),
        (
            {"data": None, "tokens": 0, "seconds": 0.0, "rewinds": 0, "weights_only": True, "imported": {"from": "x"}},
            Standing(step=4, weights_only=True, about={"imported": {"from": "x"}}),
        ),
    ],
)
def test_checkpoints_of_older_versions_are_read(stored: dict[str, Any], expected: Standing) -> None:
    assert Standing.from_json(4, stored) == expected


@pytest.mark.parametrize("missing", ["data", "tokens", "seconds", "rewinds"])
def test_a_part_that_is_missing_is_named(missing: str) -> None:
    stored = Standing().to_json()
    del stored[missing]
    with pytest.raises(KeyError, match=missing):
        Standing.from_json(0, stored)
