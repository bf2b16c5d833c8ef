"""Test what the kinds of other forms refuse, by field and with the values that are allowed."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from flax import nnx

from mhc import residual
from mhc.config import from_config_dict
from mhc.errors import UserError

FIXED = "allowed: None with residual.kind={}: how its stream ends is fixed"


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("attn_res", {"n": 2}, "residual.n: given 2, allowed: 1 with residual.kind=attn_res: it has one stream"),
        ("denseformer", {"n": 4}, "residual.n: given 4, allowed: 1 with residual.kind=denseformer: it has one stream"),
        ("laurel", {"n": 2}, "residual.n: given 2, allowed: 1 with residual.kind=laurel: it has one stream"),
        ("frac", {"n": 3}, "residual.n: given 3, allowed: a divisor of model.width=256 with residual.kind=frac"),
        ("attn_res", {"block": -1}, "residual.block: given -1, allowed: an int >= 0"),
        ("denseformer", {"dilation": 0}, "residual.dilation: given 0, allowed: an int >= 1"),
        ("laurel", {"rank": 0}, "residual.rank: given 0, allowed: an int >= 1 or None"),
        ("gated_residual", {"rank": 0}, "residual.rank: given 0, allowed: an int >= 1 or None"),
        ("laurel", {"variant": "wr"}, "residual.variant: given 'wr', allowed: one of rw, lr, rw_lr"),
        ("laurel", {"variant": "rw", "rank": 2}, "residual.rank: given 2, allowed: None with residual.variant=rw"),
        ("frac", {"dynamic": False, "alpha": 0.1}, "residual.alpha: given 0.1, allowed: None"),
        ("mhc", {"block": 2}, "residual.block: given 2, allowed: 0 with residual.kind=mhc: it is a choice of attn_res"),
        ("frac", {"init": "fanin"}, "residual.init: given 'fanin', allowed: home or equivalent"),
        *(
            (kind, {"collapse": "mean"}, FIXED.format(kind))
            for kind in ("frac", "gated_residual", "attn_res", "laurel")
        ),
    ],
)
def test_a_wrong_value_is_refused_by_field(kind: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        from_config_dict({"residual": {"kind": kind, **fields}})
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("frac", {"n": 3}, "n: given 3, allowed: a divisor of the width 8"),
        ("attn_res", {}, "attn_res: sublayers: given None, allowed: the depth of the network"),
        ("denseformer", {"sublayers": 3}, "denseformer: sublayers: given 3, allowed: an even number"),
        ("gated_residual", {"collapse": "mean"}, "collapse: given 'mean', allowed: None"),
    ],
)
def test_a_builder_refuses_what_the_width_or_the_depth_rule_out(kind: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        residual.build(kind, 8, rngs=nnx.Rngs(0), **options)


def test_costs_are_those_of_the_equations() -> None:
    """Multiply-adds of a token and sublayer, by hand for D = 16."""
    made = {
        kind: residual.build(kind, 16, rngs=nnx.Rngs(0), sublayers=8, **options)
        for kind, options in {
            "frac": {"n": 4},
            "gated_residual": {"n": 4, "rank": 3},
            "attn_res": {"block": 4},
            "denseformer": {},
            "laurel": {"rank": 3},
        }.items()
    }
    costs = {kind: [topology.multiplies(k) for k in range(8)] for kind, topology in made.items()}
    assert costs["frac"] == [(4 * 4 + 2) * 16] * 8
    assert costs["gated_residual"] == [4 * 16 * (2 * 3 + 4 + 2)] * 8
    assert costs["attn_res"] == [3 * 16 * sources for sources in (1, 2, 2, 2, 2, 3, 3, 3)]
    assert made["attn_res"].end_multiplies() == 3 * 16 * 3
    assert costs["denseformer"] == [0, 2 * 16, 0, 3 * 16, 0, 4 * 16, 0, 5 * 16]
    assert costs["laurel"] == [(2 * 3 + 2) * 16] * 8
    shapes = jax.eval_shape(made["attn_res"].expand, jax.ShapeDtypeStruct((2, 3, 16), "float32"))
    assert shapes["sources"].shape == (3, 2, 3, 16)  # J + 1 of them
