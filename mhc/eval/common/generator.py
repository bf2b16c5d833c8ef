"""Generate text: a model with its sampling, compiled for batches of prompts of different lengths."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mhc.config import Config
from mhc.data.tokenizers import Tokenizer
from mhc.errors import UserError
from mhc.eval.common.prompts import place_of
from mhc.eval.common.text_streams import Row, text_stream

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from mhc.model.cache import DecoderCache
    from mhc.model.decoder import Decoder, Params
    from mhc.model.sampling import Sampling

CHUNK = 512  # tokens of a prompt that are read at once


@dataclasses.dataclass(frozen=True)
class Completion:
    """Holds the text that a prompt was continued with."""

    prompt: str
    text: str  # without the stop string
    tokens: tuple[int, ...]  # new ones, without the stop token
    reason: str  # why it ends: length, token (a stop token), stop (a stop string)


def padded(size: int, *, least: int = 16) -> int:
    """Return the next larger size that programs are compiled for: a power of two, or one and a half times one."""
    power = least
    while power < size:
        if power * 3 // 2 >= size:
            return power * 3 // 2
        power *= 2
    return power


def power_of_two(size: int) -> int:
    """Return the next power of two."""
    return 1 << (size - 1).bit_length()


def chunks(length: int, width: int) -> list[int]:
    """Return the widths of the calls that read ``length`` tokens, the last padded to one of few sizes."""
    full, rest = divmod(length, width)
    return [width] * full + ([min(width, power_of_two(max(rest, 16)))] if rest else [])


class Generator:
    """Holds a model and how it samples; compiled programs are kept from call to call."""

    def __init__(
        self,
        config: Config,
        params: Params,
        tokenizer: Tokenizer,
        sampling: Sampling,
        *,
        batch_size: int = 8,
        chunk: int = CHUNK,
        mesh: Mesh | None = None,
    ) -> None:
        """Prepare the programs; each is compiled when it is first needed.

        Args:
          config: of the model. It is resolved.
          batch_size: prompts at once.
          chunk: tokens of a prompt that are read at once.
          mesh: that of the parameters, None where they lie on none; its data axes share the rows of a batch.

        Raises:
          UserError: the tokeniser has more ids than the model.
        """
        import jax

        from mhc import sharding
        from mhc.eval.common.program import compiled
        from mhc.model.decoder import DecoderDefinition
        from mhc.model.sampling import sample, token_keys

        if tokenizer.vocab_size > config.vocab_size:
            raise UserError(
                f"data.tokenizer: given {config.data.tokenizer} of {tokenizer.vocab_size} tokens, allowed: at most the "
                f"model's {config.vocab_size}"
            )
        self.config, self.tokenizer, self.batch_size = config, tokenizer, batch_size
        self._params = params
        # A prefix that is seen both ways must come in one piece.
        self._chunk = max(chunk, power_of_two(config.attention.prefix or 1))
        definition = DecoderDefinition(config)
        vocabulary = tokenizer.vocab_size
        self._mesh = mesh

        def empty(rows: int, room: int) -> tuple[DecoderCache, jax.Array]:
            """Return (cache, hidden state [B, D]) of rows that have no token yet."""
            cache = definition.bind(definition.abstract()).empty_cache(rows, room)
            return by_rows(cache), jax.numpy.zeros((rows, config.model.width), config.model.dtype)

        def by_rows(tree: Any) -> Any:
            return tree if mesh is None else _over_rows(tree, mesh)

        def prefill(
            decoder: Decoder, cache: DecoderCache, h: jax.Array, tokens: jax.Array, valid: jax.Array
        ) -> tuple[DecoderCache, jax.Array]:
            """Return (cache, hidden state [B, D] of each row's last token so far)."""
            hidden, cache = decoder.extend_hidden(tokens, cache, valid)
            last = jax.numpy.max(jax.numpy.where(valid, jax.numpy.arange(valid.shape[1]), -1), axis=1)[:, None]
            picked = jax.numpy.take_along_axis(hidden, jax.numpy.maximum(last, 0)[:, :, None], axis=1)[:, 0]
            return by_rows(cache), by_rows(jax.numpy.where(last >= 0, picked, h))

        def step(
            decoder: Decoder, cache: DecoderCache, h: jax.Array, keys: jax.Array
        ) -> tuple[DecoderCache, jax.Array, jax.Array]:
            """Return (cache, hidden state of the new token, the new token [B])."""
            logits = by_rows(decoder.logits(h[:, None])[:, 0, :vocabulary])
            tokens = by_rows(sample(logits, token_keys(keys, cache.lengths), sampling))
            hidden, cache = decoder.extend_hidden(tokens[:, None], cache)
            return by_rows(cache), by_rows(hidden[:, 0]), tokens

        # Where devices are threads of one CPU, few programs may wait for one another.
        self._wait = mesh is not None and sharding.threads_of_one_cpu(mesh)
        self._empty = sharding.jit(empty, mesh, static_argnums=(0, 1))
        self._prefill = compiled(config, mesh, prefill, donate=(0, 1))
        self._step = compiled(config, mesh, step, donate=(0, 1))

    def encode(self, prompts: Sequence[str], new: int) -> list[list[int]]:
        """Return bos and the tokens of each prompt.

        Raises:
          UserError: a prompt that the tokeniser has no ids for, or that is with ``new`` tokens longer than the model's
            learned positions.
        """
        ids = []
        for number, text in enumerate(prompts, start=1):
            try:
                ids.append([self.tokenizer.bos_id, *self.tokenizer.encode(text).tolist()])
            except UserError as error:
                raise UserError(f"{place_of(text, number)}: {error}") from None
        most = self.config.max_length
        for number, (text, prompt) in enumerate(zip(prompts, ids, strict=True), start=1):
            if self.config.positions.kind == "learned" and len(prompt) + new > most:
                raise UserError(
                    f"{place_of(text, number)}: given {len(prompt)} tokens (bos included) and {new} new ones, allowed: "
                    f"{most} together, the rows of the model's learned positions"
                )
        return ids

    def complete(
        self,
        prompts: Sequence[str],
        max_new_tokens: int,
        *,
        seed: int = 0,
        stop: Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        tell: Callable[[int, str], None] = lambda prompt, text: None,
        progress: Callable[[int, int], None] = lambda done, tokens: None,
    ) -> list[Completion]:
        """Return the completion of each prompt, in their order.

        Args:
          max_new_tokens: of each prompt, at most.
          seed: equal seeds give equal texts. A prompt's randomness depends on it and on the prompt alone.
          stop: strings that end a text.
          stop_tokens: ids that end a text, beside eos.
          tell: called with (number of the prompt, more of its text) as the text is made.
          progress: called with (prompts done, tokens made) after every token of a batch.

        Raises:
          UserError: a prompt with the new tokens is longer than the model's learned positions.
        """
        ids = self.encode(prompts, max_new_tokens)
        return [
            Completion(prompt, row.text, tuple(row.tokens), row.reason or "length")
            for prompt, row in zip(
                prompts,
                self.extend(
                    ids, max_new_tokens, seed=seed, stop=stop, stop_tokens=stop_tokens, tell=tell, progress=progress
                ),
                strict=True,
            )
        ]

    def extend(
        self,
        ids: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        seed: int | Sequence[int] = 0,
        stop: Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        tell: Callable[[int, str], None] = lambda prompt, text: None,
        progress: Callable[[int, int], None] = lambda done, tokens: None,
    ) -> list[Row]:
        """Return what ``complete`` does, for prompts that are token ids; ``seed`` is one for all, or one for each."""
        seeds = [seed] * len(ids) if isinstance(seed, int) else seed
        ends = frozenset((*stop_tokens, *self.config.data.stop_tokens, self.tokenizer.eos_id))
        rows = [Row(text_stream(self.tokenizer, prompt), stop, ends, max_new_tokens) for prompt in ids]
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        total = 0
        for first in range(0, len(order), self.batch_size):
            batch = order[first : first + self.batch_size]
            for tokens in self._tokens([ids[k] for k in batch], [seeds[k] for k in batch], max_new_tokens):
                for index, token in zip(batch, tokens.tolist(), strict=False):
                    if rows[index].reason is None:
                        total += 1
                        new = rows[index].push(token)
                        if new:
                            tell(index, new)
                progress(sum(row.reason is not None for row in rows), total)
                if all(rows[index].reason for index in batch):
                    break
        return rows

    def _placed(self, *arrays: np.ndarray) -> tuple[Any, ...]:
        if self._mesh is None:
            return arrays
        from mhc.sharding import put_batch

        return tuple(put_batch(dict(enumerate(arrays)), self._mesh).values())  # type: ignore[arg-type]

    def _tokens(self, ids: Sequence[Sequence[int]], seeds: Sequence[int], new: int) -> Iterator[np.ndarray]:
        """Yield the next tokens [B] of a batch of prompts, up to ``new`` times; B may be padded."""
        import jax

        from mhc.eval.common.program import multiple

        count = multiple(min(self.batch_size, power_of_two(len(ids))), self._mesh)
        lengths = np.array([len(prompt) for prompt in ids] + [0] * (count - len(ids)))
        longest = int(lengths.max())
        room = padded(longest + new)
        if self.config.positions.kind == "learned":
            room = min(room, self.config.max_length)
        cache, h = self._empty(count, room)
        # Where every call computes the whole row again, one call is enough.
        widths = chunks(longest, self._chunk if cache.tokens is None else power_of_two(longest))
        tokens = np.zeros((count, sum(widths)), np.int32)
        for row, prompt in enumerate(ids):
            tokens[row, : len(prompt)] = prompt
        valid = np.arange(tokens.shape[1]) < lengths[:, None]
        start = 0
        for width in widths:
            columns = slice(start, start + width)
            cache, h = self._prefill(self._params, cache, h, *self._placed(tokens[:, columns], valid[:, columns]))
            start += width
            if self._wait:
                jax.block_until_ready(h)

        filling = count - len(ids)
        keys = jax.numpy.stack(list(map(_row_key, [*seeds, *[0] * filling], [*ids, *[[]] * filling])))
        waiting: jax.Array | None = None
        for _ in range(new):  # one step ahead of what is read, so that the device never waits
            cache, h, token = self._step(self._params, cache, h, keys)
            if waiting is not None:
                yield np.asarray(waiting)
            waiting = token
        if waiting is not None:
            yield np.asarray(waiting)


def _over_rows(tree: Any, mesh: Mesh) -> Any:
    """Return a cache, or arrays [B, ...], with their rows shared by the data axes."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from mhc.model.cache import DecoderCache
    from mhc.sharding import BATCH_AXES

    def shared(leaf: Any, *axes: Any) -> Any:
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, PartitionSpec(*axes)))

    def of_layers(leaf: jax.Array) -> jax.Array:  # [layers, B, slots, ...], of most kinds by head
        heads = "tensor" if leaf.ndim == 5 and leaf.shape[3] % mesh.shape["tensor"] == 0 else None
        return shared(leaf, None, BATCH_AXES, None, heads) if heads else shared(leaf, None, BATCH_AXES)

    if not isinstance(tree, DecoderCache):
        return shared(tree, BATCH_AXES)
    lengths, prefix = shared(tree.lengths, BATCH_AXES), shared(tree.prefix, BATCH_AXES)
    tokens = None if tree.tokens is None else shared(tree.tokens, BATCH_AXES)
    layers = jax.tree.map(of_layers, tree.layers)
    return dataclasses.replace(tree, lengths=lengths, prefix=prefix, tokens=tokens, layers=layers)


def _row_key(seed: int, prompt: Sequence[int]) -> Any:
    import jax

    return jax.random.fold_in(jax.random.key(seed), zlib.crc32(np.asarray(prompt, "<i4").tobytes()))
