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
from mhc.eval.common.prior_check import PriorCheck
from mhc.eval.common.prompts import place_of
from mhc.eval.common.text_streams import Row, text_stream

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from mhc.model.cache import DecoderCache
    from mhc.model.decoder import Decoder, Params
    from mhc.model.sampling import Sampling

    Last = dict[str, jax.Array]

CHUNK = 512  # tokens of a prompt that are read at once
CHUNK_INSIDE = 64  # the same where the states of all blocks are looked at


@dataclasses.dataclass(frozen=True)
class Completion:
    """Holds the text that a prompt was continued with."""

    prompt: str
    text: str  # without the stop string
    tokens: tuple[int, ...]  # new ones, without the stop token
    reason: str  # why it ends: length, token (a stop token), stop (a stop string)
    trace: tuple[dict[str, Any], ...] | None = None  # of each token that was drawn, the stop token too; see `Generator`


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
        trace: bool = False,
        check: PriorCheck | None = None,
    ) -> None:
        """Prepare the programs; each is compiled when it is first needed.

        Args:
          config: of the model. It is resolved.
          batch_size: prompts at once.
          chunk: tokens of a prompt that are read at once.
          mesh: that of the parameters, None where they lie on none; its data axes share the rows of a batch.
          trace: completions have for each token that was drawn its values (`mhc.eval.common.signals.values`), what
            decided how it was drawn (``drawn``: below, between or above the thresholds) and what the check did
            (``check``: filtered, empty, or None).
          check: filters candidates where the state before the last norm is small. Each token then waits for the host.

        Raises:
          UserError: the tokeniser has more ids than the model, or the model lacks the block of the logit lens.
        """
        import jax

        from mhc import sharding
        from mhc.eval.common import signals
        from mhc.eval.common.program import compiled
        from mhc.model.decoder import DecoderDefinition
        from mhc.model.sampling import choose, draw, token_keys

        if tokenizer.vocab_size > config.vocab_size:
            raise UserError(
                f"data.tokenizer: given {config.data.tokenizer} of {tokenizer.vocab_size} tokens, allowed: at most the "
                f"model's {config.vocab_size}"
            )
        block, layers = sampling.lens_block, config.model.layers
        if block is not None and not 0 <= block < layers:
            raise UserError(f"--lens_block: given {block}, allowed: 0 to {layers - 1}, the model's blocks")
        self.config, self.tokenizer, self.batch_size = config, tokenizer, batch_size
        self._params, self._trace, self._check = params, trace, check
        self.checks = {"filtered": 0, "empty": 0}  # tokens that the check was asked about, by what it did
        looks = sampling.looks_inside or trace or check is not None
        chunk = min(chunk, CHUNK_INSIDE) if looks else chunk
        # A prefix that is seen both ways must come in one piece.
        self._chunk = max(chunk, power_of_two(config.attention.prefix or 1))
        definition = DecoderDefinition(config)
        vocabulary = tokenizer.vocab_size
        self._mesh = mesh

        kept = ("h", *signals.INSIDE) if looks else ("h",)

        def empty(rows: int, room: int) -> tuple[DecoderCache, Last]:
            """Return (cache, what is kept of each row's last token, [B, D] each) of rows that have no token yet."""
            cache = definition.bind(definition.abstract()).empty_cache(rows, room)
            shape, dtype = (rows, config.model.width), config.model.dtype
            return by_rows(cache), {name: jax.numpy.zeros(shape, dtype) for name in kept}

        def by_rows(tree: Any) -> Any:
            return tree if mesh is None else _over_rows(tree, mesh)

        def extended(
            decoder: Decoder, tokens: jax.Array, cache: DecoderCache, valid: jax.Array | None
        ) -> tuple[Last, DecoderCache]:
            """Return (what is kept of the tokens, [B, T, D] each; cache with them)."""
            if not looks:
                hidden, cache = decoder.extend_hidden(tokens, cache, valid)
                return {"h": hidden}, cache
            hidden, cache, observed = decoder.extend_observed(tokens, cache, valid, signals.observe)
            every = signals.inside(observed, sampling.lens_block)
            return {"h": hidden, **{name: leaf.astype(hidden.dtype) for name, leaf in every.items()}}, cache

        def prefill(
            decoder: Decoder, cache: DecoderCache, before: Last, tokens: jax.Array, valid: jax.Array
        ) -> tuple[DecoderCache, Last]:
            """Return (cache, what is kept of each row's last token so far)."""
            new, cache = extended(decoder, tokens, cache, valid)
            last = jax.numpy.max(jax.numpy.where(valid, jax.numpy.arange(valid.shape[1]), -1), axis=1)[:, None]
            out = {}
            for name, leaf in new.items():
                picked = jax.numpy.take_along_axis(leaf, jax.numpy.maximum(last, 0)[:, :, None], axis=1)[:, 0]
                out[name] = by_rows(jax.numpy.where(last >= 0, picked, before[name]))
            return by_rows(cache), out

        def look(decoder: Decoder, last: Last) -> tuple[jax.Array, Last]:
            """Return (logits to draw from [B, V], values by name [B])."""
            logits = by_rows(decoder.logits(last["h"][:, None])[:, 0, :vocabulary])
            if not looks:
                return choose(logits, sampling)[0], {}
            values = signals.values(decoder, last, logits, lens=sampling.lens_block is not None)
            chosen, decided = choose(logits, sampling, None if sampling.guide == "output" else values[sampling.guide])
            return chosen, {**values, "decided": decided}

        def step(
            decoder: Decoder, cache: DecoderCache, last: Last, keys: jax.Array
        ) -> tuple[DecoderCache, Last, tuple[jax.Array, Last]]:
            """Return (cache, what is kept of the new token, (the new token [B], values before it))."""
            chosen, values = look(decoder, last)
            return joined(decoder, cache, chosen, keys, values)

        def joined(
            decoder: Decoder, cache: DecoderCache, chosen: jax.Array, keys: jax.Array, values: Last
        ) -> tuple[DecoderCache, Last, tuple[jax.Array, Last]]:
            tokens = by_rows(draw(chosen, token_keys(keys, cache.lengths)))
            new, cache = extended(decoder, tokens[:, None], cache, None)
            return by_rows(cache), {name: by_rows(leaf[:, 0]) for name, leaf in new.items()}, (tokens, values)

        def drawn(
            decoder: Decoder, cache: DecoderCache, chosen: jax.Array, keys: jax.Array
        ) -> tuple[DecoderCache, Last, tuple[jax.Array, Last]]:
            return joined(decoder, cache, chosen, keys, {})

        # Where devices are threads of one CPU, few programs may wait for one another.
        self._wait = mesh is not None and sharding.threads_of_one_cpu(mesh)
        self._empty = sharding.jit(empty, mesh, static_argnums=(0, 1))
        self._prefill = compiled(config, mesh, prefill, donate=(0, 1))
        self._step = compiled(config, mesh, step, donate=(0, 1))
        self._look = compiled(config, mesh, look)  # with `_drawn` a step in two, for the check between them
        self._drawn = compiled(config, mesh, drawn, donate=(0,))

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
            Completion(
                prompt, row.text, tuple(row.tokens), row.reason or "length", tuple(row.trace) if self._trace else None
            )
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

            def checked(number: int, chosen: np.ndarray, batch: Sequence[int] = batch) -> tuple[np.ndarray, str | None]:
                """Return the logits of a row of the batch after the check, and what it did."""
                row, check = rows[batch[number]] if number < len(batch) else None, self._check
                if row is None or row.reason is not None or check is None:
                    return chosen, None
                text = self.tokenizer.decode([*ids[batch[number]], *row.tokens])
                kept, did = check.filtered(chosen, text, self.tokenizer, ends)
                self.checks[did] += 1
                return kept, did

            for tokens, values in self._tokens(
                [ids[k] for k in batch], [seeds[k] for k in batch], max_new_tokens, checked
            ):
                for number, (index, token) in enumerate(zip(batch, tokens.tolist(), strict=False)):
                    if rows[index].reason is None:
                        total += 1
                        if self._trace:
                            rows[index].trace.append({"token": token, **_traced(values, number)})
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

    def _tokens(
        self,
        ids: Sequence[Sequence[int]],
        seeds: Sequence[int],
        new: int,
        checked: Callable[[int, np.ndarray], tuple[np.ndarray, str | None]],
    ) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
        """Yield the next tokens [B] of a batch of prompts and their values, up to ``new`` times; B may be padded.

        Where there is a check, ``checked`` gets the number of a row under its threshold and the logits to draw from.
        """
        import jax

        from mhc.eval.common.program import multiple

        count = multiple(min(self.batch_size, power_of_two(len(ids))), self._mesh)
        lengths = np.array([len(prompt) for prompt in ids] + [0] * (count - len(ids)))
        longest = int(lengths.max())
        room = padded(longest + new)
        if self.config.positions.kind == "learned":
            room = min(room, self.config.max_length)
        cache, last = self._empty(count, room)
        # Where every call computes the whole row again, one call is enough.
        widths = chunks(longest, self._chunk if cache.tokens is None else power_of_two(longest))
        tokens = np.zeros((count, sum(widths)), np.int32)
        for row, prompt in enumerate(ids):
            tokens[row, : len(prompt)] = prompt
        valid = np.arange(tokens.shape[1]) < lengths[:, None]
        start = 0
        for width in widths:
            columns = slice(start, start + width)
            cache, last = self._prefill(self._params, cache, last, *self._placed(tokens[:, columns], valid[:, columns]))
            start += width
            if self._wait:
                jax.block_until_ready(last)

        filling = count - len(ids)
        keys = jax.numpy.stack(list(map(_row_key, [*seeds, *[0] * filling], [*ids, *[[]] * filling])))
        if self._check is not None:
            for _ in range(new):
                chosen, seen = self._look(self._params, last)
                logits, values = np.array(chosen), {name: np.asarray(leaf) for name, leaf in seen.items()}
                did: list[str | None] = [None] * count
                for row in np.flatnonzero(values["norm"][: len(ids)] < self._check.norm).tolist():
                    logits[row], did[row] = checked(row, logits[row])
                cache, last, (token, _) = self._drawn(self._params, cache, *self._placed(logits), keys)
                yield np.asarray(token), {**values, "check": did}
            return
        waiting: Any = None
        for _ in range(new):  # one step ahead of what is read, so that the device never waits
            cache, last, result = self._step(self._params, cache, last, keys)
            if waiting is not None:
                yield np.asarray(waiting[0]), jax.tree.map(np.asarray, waiting[1])
            waiting = result
        if waiting is not None:
            yield np.asarray(waiting[0]), jax.tree.map(np.asarray, waiting[1])


def _traced(values: dict[str, Any], row: int) -> dict[str, Any]:
    """Return the values of one row, as completions have them."""
    numbers = {name: float(leaf[row]) for name, leaf in values.items() if name not in ("decided", "check")}
    drawn = ("below", "between", "above")[int(values["decided"][row]) + 1]
    return {**numbers, "drawn": drawn, "check": values["check"][row] if "check" in values else None}


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
