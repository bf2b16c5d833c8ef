"""What a row's length does to a checkpoint: loss by position under each rotary scaling, time and memory."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mhc.config import Config, PositionsConfig
from mhc.eval.common import checkpoints
from mhc.eval.common.statistics import mean, quantile
from mhc.eval.longcontext.needles import Haystack

if TYPE_CHECKING:
    import jax

    from mhc.model.cache import DecoderCache
    from mhc.model.decoder import Decoder

SCALINGS = ("none", "linear", "ntk", "dynamic", "yarn", "llama3")
_OF_ONE_SCALING = ("attention_factor", "beta_fast", "beta_slow", "low_frequency", "high_frequency")  # of positions
_ENOUGH = 8  # documents that fill a row: with fewer, intervals would say little


# Text -----------------------------------------------------------------------------------------------------------------


class Corpus(NamedTuple):
    """A split, as documents and end to end."""

    documents: Callable[[int], np.ndarray]  # number -> bos, ids, and eos unless it goes on elsewhere
    sizes: np.ndarray | None  # about the bytes (ids) of each document, where known
    size: int  # documents
    haystack: Haystack
    tokenizer: Any
    is_text: bool
    identity: tuple[str, str]  # of tokeniser and text: equal for corpora that give the same rows


def open_corpus(config: Config, split: Any) -> Corpus:
    """The run's own corpus, or the one that ``--config.data.*`` names. Raises UserError as training does."""
    from mhc.data import tokenizers
    from mhc.data.rows.encoding import encoder, open_corpus

    tokenizer = tokenizers.load(config.data.tokenizer)
    source = open_corpus(config.data, tokenizer, split)
    encode = encoder(source, tokenizer)

    def inner(number: int) -> np.ndarray:
        ids = encode(number).tokens[1:]
        return ids[:-1] if len(ids) and ids[-1] == tokenizer.eos_id else ids

    is_text = not isinstance(source[0], np.ndarray)  # of a prepared text: Tokenised
    separator = tokenizer.encode("\n\n") if is_text else np.zeros(0, np.int32)
    haystack = Haystack(inner, len(source), separator)
    return Corpus(
        lambda number: encode(number).tokens,
        source.sizes,
        len(source),
        haystack,
        tokenizer,
        is_text,
        (tokenizer.content_hash, f"{source.fingerprint} {source.holdout}"),
    )


# Rows -----------------------------------------------------------------------------------------------------------------


def rows_at_once(tokens: int, length: int) -> int:
    """Rows of a length in a batch of about so many tokens."""
    return max(tokens // length, 1)


def fill_row(batch: dict[str, np.ndarray], row: int, ids: np.ndarray) -> None:
    """One document of n + 1 ids as n pairs of input and target."""
    pairs = len(ids) - 1
    batch["tokens"][row, :pairs], batch["targets"][row, :pairs] = ids[:-1], ids[1:]
    batch["segment_ids"][row, :pairs], batch["positions"][row, :pairs] = 1, np.arange(pairs)


# Loss by position -----------------------------------------------------------------------------------------------------


class LossRows(NamedTuple):
    """What is read: every row fills the length, so that all positions are of the same rows."""

    ids: np.ndarray  # int32 [D, R, L + 1]: R rows of each of D documents
    joined: bool  # documents end to end, R = 1; otherwise a row is a stretch of one document


def loss_rows(corpus: Corpus, length: int, rows: int, seed: int) -> LossRows | None:
    """About ``rows`` rows: of the first documents that are long enough, stretches begun anywhere, of each as many.

    Where fewer than 8 are: documents end to end from the first one on, each row opened with bos. None where the split
    is shorter than a row.
    """
    rng, found = np.random.default_rng([seed, length]), list[np.ndarray]()
    for number in range(corpus.size):
        if len(found) == rows:
            break
        if corpus.sizes is not None and corpus.sizes[number] + 1 < length:
            continue
        ids = corpus.documents(number)
        if len(ids) > length:
            found.append(ids)
    if len(found) >= min(_ENOUGH, rows):
        starts = [rng.integers(len(ids) - length, size=rows // len(found)) for ids in found]
        stretches = [[ids[i : i + length + 1] for i in own] for ids, own in zip(found, starts, strict=True)]
        return LossRows(np.array(stretches), joined=False)
    total = 0
    for number in range(corpus.size):
        total += len(corpus.documents(number)) - 2
        if total >= rows * length:
            break
    count = min(rows, total // length)
    if not count:
        return None
    joined = corpus.haystack.read((0, 0), count * length).reshape(count, 1, length)
    return LossRows(np.pad(joined, ((0, 0), (0, 0), (1, 0)), constant_values=corpus.tokenizer.bos_id), joined=True)


def scalings(config: Config, length: int, names: Sequence[str] = SCALINGS) -> dict[str, Config]:
    """Configs that differ in rotary scaling alone, by name, the run's own first.

    The others stretch the length without scaling to ``length``. Positions that are not rotary, and lengths that need no
    stretching, have the run's own alone.
    """
    own = config.positions
    label = own.scaling if own.kind == "rope" else own.kind
    if own.factor != 1.0:
        label += f" ×{own.factor:g}"
    found = {f"{label} (as trained)": config}
    factor = length / config.original_length
    if own.kind != "rope" or factor <= 1.0:
        return found
    defaults: dict[str, Any] = {
        field.name: field.default for field in dataclasses.fields(PositionsConfig) if field.name in _OF_ONE_SCALING
    }
    for name in names:
        if name != own.scaling:
            # Dynamic scaling grows with the row by itself.
            by = 1.0 if name in ("none", "dynamic") else factor
            positions = dataclasses.replace(own, scaling=name, factor=by, **defaults)
            found[name if by == 1.0 else f"{name} ×{by:g}"] = dataclasses.replace(config, positions=positions)
    return found


def position_losses(
    checkpoint: checkpoints.Checkpoint,
    ids: np.ndarray,
    batch_size: int,
    tell: Callable[[int], None] = lambda tokens: None,
) -> np.ndarray:
    """Nats of each target, means over a document's rows: float64 [D, L] of rows [D, R, L + 1], each read by itself.

    Under dynamic scaling the frequencies of a row depend on its length: positions between two doublings of the
    unscaled length are taken from rows cut at the second.
    """
    from mhc.data.rows.packing import empty_batch
    from mhc.eval.common.scoring import Scorer

    config, documents = checkpoint.config, len(ids)
    ids = ids.reshape(-1, ids.shape[-1])
    count, length = len(ids), ids.shape[1] - 1
    ends = [length]
    if config.positions.kind == "rope" and config.positions.scaling == "dynamic":
        unscaled = min(config.original_length, length)
        ends = [end for end in octaves(config.original_length, length) if end >= unscaled]
    scorer, nll, start, done = Scorer(checkpoint), np.zeros((count, length)), 0, 0
    for end in ends:
        size = min(rows_at_once(batch_size * config.data.sequence_length, end), count)

        def batches(end: int = end, size: int = size) -> Iterator[dict[str, np.ndarray]]:
            for first in range(0, count, size):
                batch = empty_batch(size, end)
                for row, one in enumerate(ids[first : first + size]):
                    fill_row(batch, row, one[: end + 1])
                yield batch

        for number, (_, scores) in enumerate(scorer.each(batches())):
            part = slice(number * size, min((number + 1) * size, count))
            nll[part, start:end] = scores.nll[: part.stop - part.start, start:end]
            done += size * end
            tell(done)
        start = end
    return nll.reshape(documents, -1, length).mean(axis=1)


def octaves(trained: int, length: int) -> list[int]:
    """Edges of positions: 0, half the trained length, it, and its doublings up to ``length``."""
    edges = [0, *(trained * 2**k for k in range(length.bit_length()) if trained * 2**k < length), length]
    return [0, trained // 2, *edges[1:]] if 2 <= trained <= length else edges


def buckets(nll: np.ndarray, edges: Sequence[int], first: np.ndarray | None = None, least: int = 0) -> list[Any]:
    """Mean loss between edges with intervals over documents, and the difference to ``first`` paired by document.

    Args:
      nll: [D, L]. least: tokens of context below which a target does not count (attention.prefix).
    """
    found = []
    for start, end in itertools.pairwise(edges):
        start = max(start, least - 1)
        if start >= end:
            continue
        values = nll[:, start:end].mean(axis=1)
        one: dict[str, Any] = {"from": start + 1, "to": end, "documents": len(nll)}  # tokens of context
        one["loss"] = mean(values).at()
        if first is not None:
            one["minus_first"] = mean(values - first[:, start:end].mean(axis=1)).at()
        found.append(one)
    return found


# Cost -----------------------------------------------------------------------------------------------------------------


class Clock:
    """Times of one row: reading a prompt to its first token, then one token after the other."""

    def __init__(self, checkpoint: checkpoints.Checkpoint):
        import jax
        import jax.numpy as jnp

        from mhc.eval.common.program import compiled

        self._config, self._params, self._definition = checkpoint.config, checkpoint.params, checkpoint.definition

        def extend(decoder: Decoder, cache: DecoderCache, tokens: jax.Array, count: jax.Array) -> tuple[jax.Array, Any]:
            """Return (most probable next token [1], cache) after ``count`` of the tokens [1, T]."""
            valid = jnp.arange(tokens.shape[1])[None] < count
            h, cache = decoder.extend_hidden(tokens, cache, valid)
            last = jax.lax.dynamic_slice_in_dim(h, count - 1, 1, axis=1)
            return jnp.argmax(decoder.logits(last)[:, 0], axis=-1).astype(jnp.int32), cache

        self._extend = compiled(checkpoint.config, checkpoint.mesh, extend, donate=(0,))

    def measure(self, ids: np.ndarray, new: int, repeats: int) -> dict[str, Any]:
        """Of a row of ids [L] whose last ``new`` tokens are decoded; the first, untimed, pass compiles.

        The prompt is read in the chunks of eval.generate. A step waits for the token before it, on the host.
        """
        import jax

        from mhc.eval.common.generator import CHUNK, chunks, power_of_two

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
    """Of all arrays of a cache."""
    import jax

    return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(cache))
