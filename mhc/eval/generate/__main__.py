"""Generate text with a trained model.

    python -m eval.generate --checkpoint RUN --prompt "def main" [--max_new_tokens 200] [--temperature 0.8] [--seed 1]
    python -m eval.generate --checkpoint RUN/checkpoints/1000 --prompts prompts.txt --json out.json

The text of one prompt appears as it is made. A file of prompts is worked off in batches of rows of different lengths;
what a prompt gives is what it gives alone with the same seed, and the same at every call.

A prompt opens with the tokeniser's bos, as documents do in training; the text ends at its eos, at a ``--stop_token``,
before a ``--stop`` string, or after ``--max_new_tokens``. Prompts are read in chunks, so that their length costs no
memory but the cache's.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mhc import cli
from mhc.config import Config
from mhc.data.tokenizers import Tokenizer
from mhc.errors import UserError
from mhc.eval.common import checkpoints
from mhc.eval.common.prompts import check_stops, check_text, place_of, read_prompts
from mhc.eval.common.terminal import Progress

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from mhc.model.cache import DecoderCache
    from mhc.model.decoder import Params
    from mhc.model.sampling import Sampling

CHUNK = 512  # tokens of a prompt that are read at once
_CONTEXT = 6  # tokens before a new one that decide how it is spelled


@dataclasses.dataclass(frozen=True)
class Completion:
    """What a prompt gave."""

    prompt: str
    text: str  # without the stop string
    tokens: tuple[int, ...]  # new ones, without the stop token
    reason: str  # why it ends: length, token (a stop token), stop (a stop string)


# Text from tokens -----------------------------------------------------------------------------------------------------


class TextStream(Protocol):
    """Text of tokens that come one at a time. What is not a whole character yet is held back."""

    def push(self, token: int) -> str:
        """Return the text that is certain now and was not before."""
        ...

    def end(self) -> str:
        """What was held back, as it is: U+FFFD for what never became a character."""
        ...


_STRAY = "\N{REPLACEMENT CHARACTER}"


class PieceStream:
    """Stream what tokens add to the text of those before them: in all, what decoding the whole gives.

    The last pieces that were told are decoded again together with the new ones; what comes out behind them is new.
    U+FFFD at the end is held back as long as it may become a character: bytes that are part of one are three at most.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(before)
        self._cut()
        self._told = 0  # characters of the text of _ids
        # What the tokens before give by themselves. They may end within a character.
        self._before = tokenizer.decode(self._ids)
        self._tell(self._before, len(self._before))

    def push(self, token: int) -> str:
        """Return the text that is certain now and was not before."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        new = self._tell(text, len(text))
        if self._told == len(text) and len(self._ids) > 4 * _CONTEXT and self._cut():
            self._before = self._tokenizer.decode(self._ids)
            self._told = len(self._before)
        return new

    def end(self) -> str:
        """Return what was held back, as it is."""
        text = self._tokenizer.decode(self._ids)
        self._pass(text, len(text))
        self._told, new = len(text), text[self._told :]
        return new

    def _tell(self, text: str, end: int) -> str:
        while end and len(text) - end < 3 and text[end - 1] == _STRAY:
            end -= 1
        self._pass(text, end)
        start, self._told = self._told, max(self._told, end)
        return text[start:end]

    def _pass(self, text: str, end: int) -> None:
        """Passes over what the tokens before gave by themselves and still do."""
        end = min(end, len(self._before))
        while self._told < end and text[self._told] == self._before[self._told]:
            self._told += 1
        if self._told < end:
            self._before = self._before[: self._told]  # the rest of it became another character

    def _cut(self) -> bool:
        """Forget ids far from the end, those before one that opens a character; return whether any were."""
        for index in range(len(self._ids) - _CONTEXT, 0, -1):
            if self._tokenizer.starts(self._ids[index]):
                self._ids = self._ids[index:]
                return True
        return False


def text_stream(tokenizer: Tokenizer, before: Sequence[int]) -> TextStream:
    """The stream of what follows the tokens ``before``."""
    return PieceStream(tokenizer, before)


class StopStrings:
    """Text that comes in pieces, up to a stop string. What may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.found = tuple(stops), "", False

    def push(self, text: str) -> str:
        """Return the text that is certain now and was not before."""
        text = self._held + text
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        if starts:
            self.found, self._held = True, ""
            return text[: min(starts)]
        held = max(
            (n for stop in self._stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])),
            default=0,
        )
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """What was held back and is text after all."""
        text, self._held = self._held, ""
        return text


class Row:
    """What follows one prompt, as it comes: ``text``, ``tokens``, and the ``reason`` why it ends."""

    def __init__(self, stream: TextStream, stops: Sequence[str], stop_tokens: frozenset[int], limit: int) -> None:
        self._stream, self._strings = stream, StopStrings(stops)
        self._stop_tokens, self._limit = stop_tokens, limit
        self.tokens: list[int] = []
        self.text = ""
        self.reason: str | None = None  # None: not at its end

    def push(self, token: int) -> str:
        """Takes the next token; the text that is certain now and was not before."""
        if token in self._stop_tokens:
            return self._end("token", "")
        self.tokens.append(token)
        new = self._strings.push(self._stream.push(token))
        if self._strings.found:
            self.reason = "stop"
        elif len(self.tokens) == self._limit:
            return self._end("length", new)
        self.text += new
        return new

    def _end(self, reason: str, new: str) -> str:
        new += self._strings.push(self._stream.end())
        new += self._strings.end()
        self.reason = "stop" if self._strings.found else reason
        self.text += new
        return new


# Generating -----------------------------------------------------------------------------------------------------------


def padded(size: int, *, least: int = 16) -> int:
    """The next of the few sizes that programs are compiled for: powers of two and one and a half times those."""
    power = least
    while power < size:
        if power * 3 // 2 >= size:
            return power * 3 // 2
        power *= 2
    return power


def power_of_two(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


def chunks(length: int, width: int) -> list[int]:
    """Widths of the calls that read ``length`` tokens, the last padded to one of few sizes."""
    full, rest = divmod(length, width)
    return [width] * full + ([min(width, power_of_two(max(rest, 16)))] if rest else [])


class Generator:
    """A model and how it samples; compiled programs are kept from call to call."""

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
        """``config`` is resolved. ``chunk``: tokens of a prompt that are read at once. ``mesh``: the parameters', where
        they lie on one; the rows of a batch are shared by its data axes."""
        import jax

        from mhc import sharding
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
        self._shards = 1 if mesh is None else int(np.prod([mesh.shape[axis] for axis in sharding.BATCH_AXES]))

        def empty(rows: int, room: int) -> tuple[DecoderCache, jax.Array]:
            """(cache, hidden state [B, D]) of rows that have no token yet."""
            cache = definition.bind(definition.abstract()).empty_cache(rows, room)
            return laid_out(cache), jax.numpy.zeros((rows, config.model.width), config.model.dtype)

        def laid_out(tree: Any) -> Any:
            return tree if mesh is None else _over_rows(tree, mesh)

        def prefill(
            params: Params, cache: DecoderCache, h: jax.Array, tokens: jax.Array, valid: jax.Array
        ) -> tuple[DecoderCache, jax.Array]:
            """(cache, hidden state [B, D] of each row's last token so far)."""
            with sharding.tracing_for(mesh):
                hidden, cache = definition.bind(params).extend_hidden(tokens, cache, valid)
            last = jax.numpy.max(jax.numpy.where(valid, jax.numpy.arange(valid.shape[1]), -1), axis=1)[:, None]
            picked = jax.numpy.take_along_axis(hidden, jax.numpy.maximum(last, 0)[:, :, None], axis=1)[:, 0]
            return laid_out(cache), laid_out(jax.numpy.where(last >= 0, picked, h))

        def step(
            params: Params, cache: DecoderCache, h: jax.Array, keys: jax.Array
        ) -> tuple[DecoderCache, jax.Array, jax.Array]:
            """(cache, hidden state of the new token, the new token [B])."""
            decoder = definition.bind(params)
            with sharding.tracing_for(mesh):
                logits = laid_out(decoder.logits(h[:, None])[:, 0, :vocabulary])
                tokens = laid_out(sample(logits, token_keys(keys, cache.lengths), sampling))
                hidden, cache = decoder.extend_hidden(tokens[:, None], cache)
            return laid_out(cache), laid_out(hidden[:, 0]), tokens

        # Where devices are threads of one CPU, few programs may wait for one another.
        self._wait = mesh is not None and sharding.threads_of_one_cpu(mesh)
        self._empty = sharding.jit(empty, mesh, static_argnums=(0, 1))
        self._prefill = sharding.jit(prefill, mesh, donate_argnums=(1, 2))
        self._step = sharding.jit(step, mesh, donate_argnums=(1, 2))

    def encode(self, prompts: Sequence[str], new: int) -> list[list[int]]:
        """bos and the tokens of each prompt.

        Raises:
          UserError: a prompt that the tokeniser has no ids for, or that is with ``new`` tokens more than the model's
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
        """What each prompt gives, in their order.

        Args:
          max_new_tokens: of each prompt, at most.
          seed: equal seeds give equal texts. A prompt's randomness depends on it and on the prompt alone.
          stop, stop_tokens: strings and ids that end a text, beside eos.
          tell: told (number of the prompt, more of its text) as the text is made.
          progress: told (prompts done, tokens made), after every token of a batch.

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
        """As ``complete``, of prompts that are token ids already; ``seed``: one for all, or one for each."""
        seeds = [seed] * len(ids) if isinstance(seed, int) else seed
        ends = frozenset((*stop_tokens, *self.config.data.stop_tokens, self.tokenizer.eos_id))
        rows = [Row(text_stream(self.tokenizer, prompt), stop, ends, max_new_tokens) for prompt in ids]
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        made = 0
        for first in range(0, len(order), self.batch_size):
            batch = order[first : first + self.batch_size]
            for tokens in self._tokens([ids[k] for k in batch], [seeds[k] for k in batch], max_new_tokens):
                for index, token in zip(batch, tokens.tolist(), strict=False):
                    if rows[index].reason is None:
                        made += 1
                        new = rows[index].push(token)
                        if new:
                            tell(index, new)
                progress(sum(row.reason is not None for row in rows), made)
                if all(rows[index].reason for index in batch):
                    break
        return rows

    def _placed(self, *arrays: np.ndarray) -> tuple[Any, ...]:
        if self._mesh is None:
            return arrays
        from mhc.sharding import put_batch

        return tuple(put_batch(dict(enumerate(arrays)), self._mesh).values())  # type: ignore[arg-type]

    def _tokens(self, ids: Sequence[Sequence[int]], seeds: Sequence[int], new: int) -> Iterator[np.ndarray]:
        """The next tokens [B] of a batch of prompts, up to ``new`` times; B may be padded."""
        import jax

        count = min(self.batch_size, power_of_two(len(ids)))
        count += -count % self._shards
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
    """A cache or arrays [B, ...] with their rows shared by the data axes."""
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


# The command line -----------------------------------------------------------------------------------------------------


def _parser() -> cli.Parser:
    parser = cli.Parser(prog="python -m eval.generate", description="Generate text with a trained model.")
    parser.add_argument("--checkpoint", required=True, metavar="RUN", help="run folder, or RUN/checkpoints/STEP")
    parser.add_argument("--step", type=int, help="the checkpoint's step; without: the last")
    parser.add_argument("--prompt", help="text to go on from; may be empty")
    parser.add_argument("--prompts", metavar="FILE", help="one prompt a line, or .jsonl")
    parser.add_argument("--field", default="prompt", help="of a .jsonl line, that holds the prompt (prompt)")
    parser.add_argument("--max_new_tokens", type=int, default=128, metavar="N", help="at most, of each prompt (128)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy (1)")
    parser.add_argument("--top_k", type=int, metavar="K", help="sample from the K most probable tokens")
    parser.add_argument("--top_p", type=float, metavar="P", help="from the most probable that make up P")
    parser.add_argument("--min_p", type=float, metavar="P", help="from those at least P times as probable as the first")
    parser.add_argument("--entropy_low", type=float, metavar="BITS", help="below: greedy")
    parser.add_argument("--entropy_high", type=float, metavar="BITS", help="above: top-p 0.95, temperature 1.2")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal texts (0)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends before it; may be repeated")
    parser.add_argument(
        "--stop_token", action="append", default=[], type=int, metavar="ID", help="ends at it; likewise"
    )
    parser.add_argument("--batch_size", type=int, default=8, help="prompts of a file at once (8)")
    parser.add_argument("--json", metavar="OUT", help="file for prompts, texts, tokens and reasons")
    return parser


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code. Raises UserError for a mistake."""
    options = _parser().parse_args(arguments)
    if (options.prompt is None) == (options.prompts is None):
        raise UserError("--prompt or --prompts: one of the two is needed")
    for name, least in (("max_new_tokens", 1), ("batch_size", 1), ("seed", 0)):
        if not least <= getattr(options, name) < 2**32:
            raise UserError(f"--{name}: given {getattr(options, name)}, allowed: {least} or more, below 2^32")
    check_stops(options.stop)
    run, step = checkpoints.locate(options.checkpoint, options.step)
    prompts = [options.prompt] if options.prompts is None else read_prompts(options.prompts, options.field)
    if options.prompt is not None:
        check_text(options.prompt, "--prompt")
    out = None if options.json is None else cli.check_file(options.json, "--json")

    # jax takes seconds to import: only a command without mistakes waits for it.
    from mhc.data import tokenizers
    from mhc.model.sampling import Sampling
    from mhc.train.checkpoint import load_run

    fields = [field.name for field in dataclasses.fields(Sampling)]
    try:
        sampling = Sampling(**{name: getattr(options, name) for name in fields})
    except ValueError as error:
        raise UserError(f"--{error}") from None
    loaded = load_run(run, step)
    tokenizer = tokenizers.load(loaded.config.data.tokenizer)
    for token in options.stop_token:
        if not 0 <= token < tokenizer.vocab_size:
            raise UserError(f"--stop_token: given {token}, allowed: 0 to {tokenizer.vocab_size - 1}")
    generator = Generator(loaded.config, loaded.params, tokenizer, sampling, batch_size=options.batch_size)
    _note_length(generator, prompts, options.max_new_tokens)

    print(f"{run}, step {loaded.step}: compiling, then reading", file=sys.stderr)
    started = time.monotonic()
    streams = len(prompts) == 1
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    completions = generator.complete(
        prompts,
        options.max_new_tokens,
        seed=options.seed,
        stop=options.stop,
        stop_tokens=options.stop_token,
        tell=(lambda _, text: print(text, end="", flush=True)) if streams else (lambda _, text: None),
        progress=(lambda done, tokens: None) if streams else _telling(len(prompts)),
    )
    if streams:
        print()
    else:
        for number, completion in enumerate(completions, start=1):
            print(f"== {number}: {completion.prompt}\n{completion.text}")
    seconds, made = time.monotonic() - started, sum(len(completion.tokens) for completion in completions)
    ends = {"length": "--max_new_tokens", "token": "a stop token", "stop": "a stop string"}
    why = f", ended by {ends[completions[0].reason]}" if streams else ""
    print(f"{made} tokens in {seconds:.1f} s, compilation included{why}", file=sys.stderr)
    if out is not None:
        record = {
            "checkpoint": str(run),
            "step": loaded.step,
            "seed": options.seed,
            "max_new_tokens": options.max_new_tokens,
            "sampling": dataclasses.asdict(sampling),
            "stop": options.stop,
            "stop_tokens": options.stop_token,
            "completions": [dataclasses.asdict(completion) for completion in completions],
        }
        temporary = out.with_name(f"{out.name}.part")
        temporary.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", "utf-8")
        temporary.replace(out)
    return 0


def _note_length(generator: Generator, prompts: Sequence[str], new: int) -> None:
    longest = max(map(len, generator.encode(prompts, new))) + new
    trained = generator.config.data.sequence_length
    if longest > trained and generator.config.positions.kind != "learned":
        print(f"note: up to {longest} tokens a text; the model was trained on {trained}", file=sys.stderr)


def _telling(total: int) -> Callable[[int, int], None]:
    progress = Progress()

    def tell(done: int, tokens: int) -> None:
        progress(lambda seconds: f"{done} of {total} prompts, {tokens} tokens, {tokens / seconds:.1f} a second")

    return tell


if __name__ == "__main__":
    cli.run_main(main)
