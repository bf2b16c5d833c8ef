"""Serve a checkpoint as a model of EleutherAI's lm-evaluation-harness, registered there as ``mhc``, without torch.

    lm = LanguageModel("runs/a")                 # or mhc.eval.common.checkpoints.load(...)
    lm_eval.simple_evaluate(lm, tasks=["hellaswag"])

A text opens with the tokeniser's bos, as documents do in training; a context that is too long loses its beginning. Each
request's numbers are those of a forward pass of it alone, whatever it is batched with.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from mhc.data import tokenizers
from mhc.data.corpus import fidelity
from mhc.errors import UserError, did_you_mean
from mhc.eval.common import checkpoints
from mhc.eval.common.generator import Generator, padded, power_of_two
from mhc.eval.common.scoring import Scorer, windows
from mhc.eval.common.terminal import Progress
from mhc.model.sampling import Sampling

_log = logging.getLogger("mhc.eval")
MAX_NEW_TOKENS = 256  # of a generation whose task does not say: lm-eval's own default


class _Part(NamedTuple):
    """Holds a window of a request: tokens that are read, and which of their targets count."""

    request: int
    tokens: Sequence[int]  # inputs and the last target
    scored: int  # the first pair (input i, target i + 1) that counts


@register_model("mhc")
class LanguageModel(TemplateLM):
    """Answers the requests of lm-eval by a run's checkpoint: loglikelihood, loglikelihood_rolling, generate_until."""

    def __init__(
        self,
        checkpoint: checkpoints.Checkpoint | str,
        *,
        batch_size: int = 16,
        max_length: int | None = None,
        max_gen_toks: int | None = None,
        step: int | None = None,
        average: int = 1,
        seed: int = 0,
        **ignored: Any,  # lm-eval hands max_batch_size and device to every model: a mesh of all devices is used
    ) -> None:
        """Load the checkpoint.

        Args:
          checkpoint: a loaded one, or RUN or RUN/checkpoints/STEP; ``step`` and ``average`` go with a path.
          batch_size: rows at once; changes nothing but speed.
          max_length: tokens of context; None: the run's data.sequence_length.
          max_gen_toks: the most tokens of a generation, whatever its task says; None: as the task says, or 256.
          seed: the seed of sampling, for tasks that sample.

        Raises:
          UserError: no such run, or a length that the model has no positions for.
        """
        super().__init__()
        if isinstance(checkpoint, str):
            checkpoint = checkpoints.load(checkpoint, step, average=average)
        config = checkpoint.config
        self.checkpoint, self.batch_size, self.seed = checkpoint, int(batch_size), seed
        if self.batch_size < 1:
            raise UserError(f"--batch_size: given {batch_size}, allowed: 1 or more")
        self.max_length = int(max_length or config.data.sequence_length)
        most = config.max_length if config.positions.kind == "learned" else None
        if self.max_length < 2 or (most is not None and self.max_length > most):
            allowed = "2 or more" if most is None else f"2 to {most}, the rows of the model's learned positions"
            raise UserError(f"--max_length: given {max_length}, allowed: {allowed}")
        self.max_gen_toks = max_gen_toks
        self._tokenizer = tokenizers.load(config.data.tokenizer)
        self._scorer = Scorer(checkpoint)
        self._generators: dict[Sampling, Generator] = {}

    # Tokens ----------------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self._tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.content_hash

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: Any) -> list[int]:
        """Return the ids of a text, with bos unless ``add_special_tokens`` is False."""
        ids: list[int] = self._tokenizer.encode(string).tolist()
        return ids if add_special_tokens is False else [self._tokenizer.bos_id, *ids]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        context_ids, ids = super()._encode_pair(context, continuation)
        # A tokeniser may spell both with no more ids than the context alone: nothing would be left to score.
        return context_ids, ids or self.tok_encode(continuation, add_special_tokens=False)

    @contextlib.contextmanager
    def _naming(self, requests: Sequence[Instance]) -> Iterator[None]:
        """Name the task's document in the error of a text that the tokeniser has no ids for."""
        try:
            yield
        except UserError:
            for request in requests:
                for text in (argument for argument in request.args if isinstance(argument, str)):
                    try:
                        self._tokenizer.encode(text)
                    except UserError as error:
                        place = f"task {request.task_name}, document {request.doc_id}"
                        raise UserError(f"{place}: {error}") from None
            raise

    # Likelihoods -----------------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (log-probability in nats, whether it is what greedy decoding gives) of each continuation."""
        pairs = []
        with self._naming(requests):
            for context, continuation in (request.args for request in requests):
                if context:
                    ids = self._encode_pair(context, continuation)
                else:
                    ids = [self.prefix_token_id], self.tok_encode(continuation, add_special_tokens=False)
                pairs.append(((context, continuation), *ids))
        return self._loglikelihood_tokens(pairs)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]], **ignored: Any
    ) -> list[tuple[float, bool]]:
        """Return what ``loglikelihood`` does, for (texts, ids of the context, ids of the continuation)."""
        totals, greedy = np.zeros(len(requests)), np.ones(len(requests), bool)
        # One pass serves all the single tokens that are asked for behind one context: answers A, B, C, D of a question.
        single: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        parts: list[_Part] = []
        for number, (_, context, continuation) in enumerate(requests):
            if len(continuation) == 1:
                single[tuple(context[-self.max_length :])].append((number, continuation[0]))
                continue
            tokens = [*context, *continuation]
            for start, scored, end in windows(len(tokens) - 1, self.max_length, self.max_length, len(context) - 1):
                parts.append(_Part(number, tokens[start : end + 1], scored - start))
        progress, done = Progress("rows scored", len(parts) + len(single)), 0

        def tell(rows: int) -> None:
            nonlocal done
            done += rows
            progress(done)

        for batch, scores in self._scorer.each(self._rows(parts)):
            for row, number in enumerate(batch["requests"]):
                counted = batch["weights"][row]
                totals[number] -= scores.nll[row][counted].astype(np.float64).sum()
                greedy[number] &= bool(scores.greedy[row][counted].all())
            tell(len(batch["requests"]))
        asked = list(single.values())
        for batch, scores in self._scorer.each(self._choices(list(single), asked)):
            for row, number in enumerate(batch["requests"]):
                for column, (request, _) in enumerate(asked[number]):
                    totals[request] = -float(scores.nll[row, column])
                    greedy[request] = bool(scores.greedy[row, column])
            tell(len(batch["requests"]))
        answers = [(float(total), bool(flag)) for total, flag in zip(totals, greedy, strict=True)]
        for (texts, *_), result in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, result)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability in nats of each text, without eos.

        It is what ``eval.perplexity --without_eos`` sums with a stride of the context's length.
        """
        texts = [request.args[0] for request in requests]
        with self._naming(requests):
            tokens = [(None, [self.prefix_token_id], self.tok_encode(text, add_special_tokens=False)) for text in texts]
        self._note_lost(texts)
        answers = [total for total, _ in self._loglikelihood_tokens(tokens)]
        for text, total in zip(texts, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return answers

    def _note_lost(self, texts: Sequence[str]) -> None:
        """Warn if lm-eval's bits per byte would count text that the tokeniser loses."""
        size = sum(len(text.encode()) for text in texts)
        share = sum(map(self._tokenizer.lost, texts)) / max(size, 1)
        if why := fidelity.why_withheld(share, self.checkpoint.config.data.tokenizer):
            _log.warning("%s: those of these tasks, and their word and byte perplexities, are not comparable", why)

    def _batches(self, lengths: Sequence[int]) -> Iterator[tuple[list[int], int, int]]:
        """Yield (items, rows, width) of batches of similar length, longest first: too little memory shows at once."""
        order = sorted(range(len(lengths)), key=lambda item: -lengths[item])
        for first in range(0, len(order), self.batch_size):
            items = order[first : first + self.batch_size]
            rows = min(self.batch_size, power_of_two(len(items)))
            yield items, rows, min(padded(lengths[items[0]]), self.max_length)

    def _rows(self, parts: Sequence[_Part]) -> Iterator[Mapping[str, np.ndarray]]:
        """Yield batches for ``Scorer.each``, with the requests and weights of the rows that are not filling."""
        for items, rows, width in self._batches([len(part.tokens) - 1 for part in parts]):
            batch = self._empty(rows, width) | {"targets": np.zeros((rows, width), np.int32)}
            weights = np.zeros((rows, width), bool)
            for row, part in enumerate(parts[item] for item in items):
                count = len(part.tokens) - 1
                self._fill(batch, row, part.tokens[:-1], part.scored + 1)
                batch["targets"][row, :count] = part.tokens[1:]
                weights[row, part.scored : count] = True
            yield batch | {"weights": weights, "requests": np.array([parts[item].request for item in items])}

    def _choices(
        self, contexts: Sequence[Sequence[int]], asked: Sequence[Sequence[tuple[int, int]]]
    ) -> Iterator[Mapping[str, np.ndarray]]:
        """Yield batches of contexts with the tokens [B, K] that are asked for behind each."""
        for items, rows, width in self._batches([len(context) for context in contexts]):
            most = power_of_two(max(len(asked[item]) for item in items))
            batch = self._empty(rows, width) | {"candidates": np.zeros((rows, most), np.int32)}
            for row, item in enumerate(items):
                self._fill(batch, row, contexts[item], len(contexts[item]))
                batch["candidates"][row, : len(asked[item])] = [token for _, token in asked[item]]
            yield batch | {"requests": np.array(items)}

    def _empty(self, rows: int, width: int) -> dict[str, np.ndarray]:
        names = ("tokens", "segment_ids", "positions")
        batch: dict[str, np.ndarray] = {name: np.zeros((rows, width), np.int32) for name in names}
        if self.checkpoint.config.attention.prefix:
            batch["prefix"] = np.zeros(rows, np.int32)
        return batch

    def _fill(self, batch: dict[str, np.ndarray], row: int, tokens: Sequence[int], context: int) -> None:
        """Write a row of a batch.

        Args:
          context: tokens before the first one that is scored; of a prefix LM no others see one another.
        """
        count = len(tokens)
        batch["tokens"][row, :count] = tokens
        batch["segment_ids"][row, :count] = 1
        batch["positions"][row, :count] = np.arange(count)
        if "prefix" in batch:
            batch["prefix"][row] = min(self.checkpoint.config.attention.prefix, context)

    def room(self, new: int) -> int:
        """Return how many tokens of context fit beside so many new ones. Raises UserError if none does."""
        if new >= self.max_length:
            raise UserError(
                f"{new} new tokens leave no room in a context of {self.max_length}; allowed: --max_gen_toks of at most "
                f"{self.max_length - 1}"
            )
        return self.max_length - new

    # Generation ------------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text that follows each context, up to a stop string, eos or the number of new tokens.

        Raises:
          UserError: a generation argument that is not known here, or no room for a token of context.
        """
        groups: dict[Generation, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            groups[generation(request.args[1], self.max_gen_toks)].append(number)
        texts, progress, before = [""] * len(requests), Progress("texts generated", len(requests)), 0
        for how, numbers in groups.items():
            room = self.room(how.new)
            if how.sampling not in self._generators:
                self._generators[how.sampling] = Generator(
                    self.checkpoint.config,
                    self.checkpoint.params,
                    self._tokenizer,
                    how.sampling,
                    batch_size=self.batch_size,
                    mesh=self.checkpoint.mesh,
                )
            with self._naming(requests):
                ids = [self.tok_encode(requests[number].args[0])[-room:] for number in numbers]

            def tell(done: int, tokens: int, before: int = before) -> None:
                progress(before + done)

            # What a task asks for several times (its ``repeats``) is another sample each time.
            seen: dict[tuple[int, ...], Iterator[int]] = defaultdict(lambda: itertools.count(self.seed))
            seeds = [next(seen[tuple(prompt)]) for prompt in ids]
            rows = self._generators[how.sampling].extend(ids, how.new, seed=seeds, stop=how.stop, progress=tell)
            before += len(numbers)
            for number, row in zip(numbers, rows, strict=True):
                texts[number] = row.text
                self.cache_hook.add_partial("generate_until", requests[number].args, row.text)
        return texts


class Generation(NamedTuple):
    """Describes how a task wants its text generated."""

    sampling: Sampling
    stop: tuple[str, ...]
    new: int  # tokens, at most


# Names that tasks and other models use for the same, and what does nothing for one greedy or sampled text.
_KNOWN = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "min_p")
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_WITHOUT_EFFECT = (
    *("seed", "num_return_sequences", "skip_special_tokens", "spaces_between_special_tokens", "use_cache"),
    *("pad_token_id", "return_dict_in_generate", "output_scores", "output_logits", "output_attentions"),
    *("output_hidden_states", "renormalize_logits", "remove_invalid_values", "clean_up_tokenization_spaces"),
    *("length_penalty", "early_stopping", "diversity_penalty"),  # of beams alone
)
# What else is passed where it asks for nothing: the value that does so, beside null.
_NEUTRAL: Mapping[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "best_of": 1,
    "n": 1,
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "penalty_alpha": 0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "min_tokens": 0,
    "prompt_lookup_num_tokens": 0,
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "bad_words_ids": [],
    "force_words_ids": [],
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "stop_token_ids": [],
    "logit_bias": {},
    "sequence_bias": {},
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "max_time": None,
    "logprobs": None,
}


def generation(arguments: Mapping[str, Any], limit: int | None) -> Generation:
    """Read a task's generation_kwargs, leaving out options that ask for nothing.

    Raises: UserError for one that would change the text and is not known here, or a value that is none.
    """
    for name, value in arguments.items():
        if name in (*_KNOWN, *_LENGTHS, *_WITHOUT_EFFECT):
            continue
        if name not in _NEUTRAL or value not in (None, _NEUTRAL[name]):
            nothing = f", or {name}={_NEUTRAL[name]!r}, which asks for nothing" if name in _NEUTRAL else ""
            raise UserError(
                f"generation_kwargs: given {name}={value!r}, allowed: {', '.join(_KNOWN)}{nothing}"
                f"{'' if nothing else did_you_mean(name, (*_KNOWN, *_LENGTHS))}"
            )
    until = arguments.get("until") or ()
    stop = (until,) if isinstance(until, str) else tuple(until) if isinstance(until, (list, tuple)) else (until,)
    if not all(isinstance(one, str) for one in stop):
        raise UserError(f"generation_kwargs: given until={until!r}, allowed: a string or a list of strings")
    temperature = _number(arguments, "temperature", 0.0)
    # As lm-eval's own models do: a temperature alone asks for sampling, do_sample=False is greedy in any case.
    samples = bool(arguments.get("do_sample", temperature > 0))
    fields: dict[str, Any] = {"temperature": 0.0}
    if samples:
        fields = {"temperature": _number(arguments, "temperature", 1.0)}
        fields |= {name: _number(arguments, name) for name in ("top_p", "min_p") if arguments.get(name) is not None}
        top_k = int(_number(arguments, "top_k", 0.0))
        if top_k not in (0, -1):  # these and None: no limit
            fields["top_k"] = top_k
    try:
        sampling = Sampling(**fields)
    except ValueError as error:
        raise UserError(f"generation_kwargs: {error}") from None
    wanted = next(
        (int(_number(arguments, name)) for name in _LENGTHS if arguments.get(name) is not None), MAX_NEW_TOKENS
    )
    if wanted < 1:
        raise UserError(f"generation_kwargs: given {wanted} new tokens, allowed: 1 or more")
    return Generation(sampling, tuple(one for one in stop if one), min(wanted, limit or wanted))


def _number(arguments: Mapping[str, Any], name: str, default: float = 0.0) -> float:
    """Return an argument that is a number; ``default`` if it is absent or null. Raises UserError for anything else."""
    value = arguments.get(name)
    if value is None:
        return default
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"generation_kwargs: given {name}={value!r}, allowed: a number")
    return number
