"""Measure what a row's length costs: time and memory."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.generator import CHUNK, chunks, power_of_two
from mhc.eval.common.program import compiled
from mhc.eval.common.statistics import quantile
from mhc.model.cache import DecoderCache
from mhc.model.decoder import Decoder


class Clock:
    """Times one row: reading a prompt to its first token, then one token after the other."""

    def __init__(self, checkpoint: Checkpoint):
        self._config, self._params, self._definition = checkpoint.config, checkpoint.params, checkpoint.definition

        def extend(decoder: Decoder, cache: DecoderCache, tokens: jax.Array, count: jax.Array) -> tuple[jax.Array, Any]:
            """Return (most probable next token [1], cache) after ``count`` of the tokens [1, T]."""
            valid = jnp.arange(tokens.shape[1])[None] < count
            h, cache = decoder.extend_hidden(tokens, cache, valid)
            last = jax.lax.dynamic_slice_in_dim(h, count - 1, 1, axis=1)
            return jnp.argmax(decoder.logits(last)[:, 0], axis=-1).astype(jnp.int32), cache

        self._extend = compiled(checkpoint.config, checkpoint.mesh, extend, donate=(0,))

    def measure(self, ids: np.ndarray, new: int, repeats: int) -> dict[str, Any]:
        """Return the times of a row of ids [L] whose last ``new`` tokens are decoded; an untimed pass before compiles.

        The prompt is read in the chunks of eval.generate. A step waits for the token before it, on the host.
        """
        prompt, firsts, steps, size = len(ids) - new, [], [], 0
        for repeat in range(repeats + 1):
            cache = self._definition.bind(self._params).empty_cache(1, len(ids))
            size = cache_bytes(cache)
            width = CHUNK if cache.tokens is None else power_of_two(prompt)
            width = max(width, power_of_two(self._config.attention.prefix or 1))
            padded = np.zeros((1, sum(chunks(prompt, width))), np.int32)
            padded[0, :prompt] = ids[:prompt]
            jax.block_until_ready(cache)
            started, place = time.perf_counter(), 0
            for part in chunks(prompt, width):
                count = np.int32(min(part, prompt - place))
                token, cache = self._extend(self._params, cache, padded[:, place : place + part], count)
                jax.block_until_ready(token)
                place += part
            first, decoded = time.perf_counter() - started, []
            for _ in range(new):
                started = time.perf_counter()
                token, cache = self._extend(self._params, cache, token[:, None], np.int32(1))
                jax.block_until_ready(token)
                decoded.append(time.perf_counter() - started)
            if repeat:
                firsts.append(first)
                steps += decoded
        return {
            "length": len(ids),
            "prompt": prompt,
            "repeats": repeats,
            "steps": len(steps),
            "first_token_seconds": quantile(firsts, 0.5).at(),
            "step_seconds_median": quantile(steps, 0.5).at(),
            "step_seconds_p95": quantile(steps, 0.95).at(),
            "cache_bytes": size,
        }


def cache_bytes(cache: Any) -> int:
    """Return the bytes of all arrays of a cache."""
    return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(cache))
