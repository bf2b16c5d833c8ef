"""Test the control without context: as many parameters as attention, and no token that sees another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.config import Config, from_config_dict, resolve
from mhc.errors import UserError
from mhc.model.decoder import Decoder
from mhc.model.flops import count_parameters, flops_per_token


def config(**attention: object) -> Config:
    groups: dict[str, dict[str, object]] = {
        "model": {"layers": 2, "width": 16},
        "attention": {"heads": 2, **attention},
        "data": {"sequence_length": 8},
    }
    return resolve(from_config_dict(groups), 32)


def test_it_has_as_many_parameters_and_no_scores_to_compute() -> None:
    from mhc.model.decoder import DecoderDefinition

    attention, control = config(), config(kind="tokenwise")
    sizes = [count_parameters(DecoderDefinition(made))["total"] for made in (attention, control)]
    assert sizes[0] == sizes[1]
    assert flops_per_token(control) < flops_per_token(attention)


@pytest.mark.parametrize("kind", ["plain", "mhc"])
def test_no_token_sees_another(kind: str) -> None:
    made = resolve(
        from_config_dict(
            {
                "model": {"layers": 2, "width": 16},
                "attention": {"heads": 2, "kind": "tokenwise"},
                "residual": {"kind": kind},
                "data": {"sequence_length": 8},
            }
        ),
        32,
    )
    decoder = Decoder(made, rngs=jax.random.key(0))
    tokens = jnp.arange(8, dtype=jnp.int32)[None]
    other = tokens.at[0, 3].set(20)
    apart = np.abs(np.asarray(decoder(tokens) - decoder(other)))[0].max(axis=-1)
    assert apart[3] > 1e-3 and np.delete(apart, 3).max() == 0
    cache = decoder.empty_cache(1, 8)
    first, cache = decoder.extend(tokens[:, :5], cache)
    last, _ = decoder.extend(tokens[:, 5:], cache)
    np.testing.assert_allclose(np.concatenate([first, last], axis=1), decoder(tokens), atol=1e-6)


def test_fields_that_mean_nothing_to_it_are_refused() -> None:
    with pytest.raises(UserError, match=r"attention\.kv_heads"):
        config(kind="tokenwise", kv_heads=1)


def test_a_head_of_classes_has_an_output_for_each() -> None:
    made = resolve(from_config_dict({"model": {"layers": 1, "width": 16}, "head": {"classes": 5}}), 32)
    decoder = Decoder(made, rngs=jax.random.key(0))
    assert decoder(jnp.zeros((1, 3), jnp.int32)).shape == (1, 3, 5)
    with pytest.raises(UserError, match=r"head\.tied"):
        from_config_dict({"head": {"classes": 5, "tied": True}})
