"""Define the tasks: what a sequence reads, where it is supervised, and the exact posterior there.

A sequence is a pure function of the task, the seed, the split and its number, so that any process makes any row of any
batch by itself.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np

from mhc.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from jaxtyping import Bool, Float64, Int32

PREFIX = "windtunnel:"
Split = Literal["train", "validation"]
_STREAMS: dict[str, int] = {"train": 0, "validation": 1}  # a seed's sequences of one split are never the other's


class Sequences(NamedTuple):
    """Holds some sequences of a task, and the truth about them.

    Attributes:
        tokens: int32 [B, T], what the model reads.
        targets: int32 [B, P], the class that came true at each supervised place: the next value, or the hidden state.
        posterior: float64 [B, P, C], the exact posterior over the C classes at each supervised place.
    """

    tokens: np.ndarray
    targets: np.ndarray
    posterior: np.ndarray


def entropy_bits(posterior: Float64[np.ndarray, "*B C"]) -> Float64[np.ndarray, "*B"]:
    """Return the entropy H = −Σ p log2 p over the last axis, in bits; 0 log 0 is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(posterior > 0, posterior * np.log2(posterior), 0.0)
    return -terms.sum(axis=-1)


def hmm_posterior(transition: np.ndarray, emission: np.ndarray, observations: np.ndarray) -> Float64[np.ndarray, "K S"]:
    """Return the filtered posterior p(s_t | o_1 … o_t) of a hidden Markov model, for t = 1 … K.

    The forward algorithm, scaled at each step: f_1 ∝ emission[:, o_1] (the start is uniform) and
    f_t ∝ emission[:, o_t] · (f_{t−1} @ transition), in float64.

    Args:
        transition: float64 [S, S], ``transition[i, j]`` = p(s_{t+1} = j | s_t = i); rows sum to 1.
        emission: float64 [S, O], ``emission[i, o]`` = p(o_t = o | s_t = i); rows sum to 1.
        observations: integers [K] in 0 … O − 1.

    Raises:
        ValueError: shapes do not fit, a row is no distribution, an observation is no symbol of the model, or the
            observations have probability 0.
    """
    transition, emission = np.asarray(transition, np.float64), np.asarray(emission, np.float64)
    observations = np.asarray(observations)
    states = len(emission)
    if transition.shape != (states, states) or emission.ndim != 2 or observations.ndim != 1:
        raise ValueError(
            f"transition {transition.shape}, emission {emission.shape}, observations {observations.shape}: "
            "expected [S, S], [S, O] and [K]"
        )
    for name, matrix in (("transition", transition), ("emission", emission)):
        if not ((matrix >= 0).all() and np.allclose(matrix.sum(axis=1), 1.0, rtol=0, atol=1e-9)):
            raise ValueError(f"{name}: each row must be a distribution: not negative, with sum 1")
    if len(observations) and not (
        observations.dtype.kind in "iu" and 0 <= observations.min() <= observations.max() < emission.shape[1]
    ):
        raise ValueError(f"observations: expected integers in 0 … {emission.shape[1] - 1}")
    filtered = np.empty((len(observations), states))
    belief = np.full(states, 1.0 / states)
    for t, symbol in enumerate(observations):
        belief = (belief if t == 0 else belief @ transition) * emission[:, symbol]
        total = belief.sum()
        if not total > 0:
            raise ValueError(f"observation {t} has probability 0 after those before it")
        belief = belief / total
        filtered[t] = belief
    return filtered


def _generator(seed: int, split: Split, index: int) -> np.random.Generator:
    """Return the generator of one sequence: a key of its own, so that no order of making them matters."""
    words = np.random.SeedSequence([seed, _STREAMS[split], index])
    return np.random.Generator(np.random.Philox(words))


@dataclasses.dataclass(frozen=True)
class Bijection:
    """Asks for the values of a fresh uniform permutation π of ``symbols`` keys in each sequence, key by key.

    A sequence reads k_1 π(k_1) k_2 π(k_2) … k_{V−1} with distinct keys in random order: 2V − 3 tokens, of which ids
    0 … V − 1 are keys and V … 2V − 1 values. Each key is supervised, and predicts its value, which is the next token;
    the last one's stands in no sequence. Before the m-th value the posterior is uniform over the V − m + 1 values that
    were not seen, so its entropy is log2(V − m + 1) bits.
    """

    symbols: int = 20
    name: ClassVar[str] = "bijection"
    bounds: ClassVar[dict[str, tuple[int, int]]] = {"symbols": (3, 1000)}

    @property
    def vocabulary(self) -> int:
        """Return how many ids a sequence may hold."""
        return 2 * self.symbols

    @property
    def classes(self) -> int | None:
        """Return how many classes a head of its own has; None where the head is over the vocabulary."""
        return None

    @property
    def length(self) -> int:
        """Return how many tokens a sequence has."""
        return 2 * self.symbols - 3

    @property
    def places(self) -> np.ndarray:
        """Return int64 [P]: the supervised places of a sequence, which are those of the keys."""
        return np.arange(0, self.length, 2)

    @property
    def first_class(self) -> int:
        """Return the index of class 0 among the logits: a value's class is its id minus this index."""
        return self.symbols

    @property
    def optimum(self) -> float:
        """Return the exact posterior's cross-entropy in nats: Σ_m ln(V − m + 1) / (V − 1), for every sequence."""
        return math.fsum(math.log(left) for left in range(2, self.symbols + 1)) / (self.symbols - 1)

    @property
    def span(self) -> int:
        """Return how many positions a model of this task must know."""
        return self.length

    def positions(self, seed: int, split: Split, indices: Iterable[int]) -> Int32[np.ndarray, "B T"]:
        """Return the position of each token of these sequences: 0 … T − 1."""
        return np.tile(np.arange(self.length, dtype=np.int32), (len(list(indices)), 1))

    @property
    def symbol_ids(self) -> dict[str, np.ndarray]:
        """Return the ids of each group of symbols, int64 [V] each."""
        return {"keys": np.arange(self.symbols), "values": np.arange(self.symbols, 2 * self.symbols)}

    def evidence(self, tokens: Int32[np.ndarray, "B T"]) -> Bool[np.ndarray, "B P T"]:
        """Return which tokens the posterior at each supervised place depends on: the values before it."""
        before = np.arange(self.length) < self.places[:, None]
        return before & (tokens >= self.symbols)[:, None]

    def symbol(self, id_: int) -> str:
        """Return the name of an id: k3, v5."""
        return f"k{id_}" if id_ < self.symbols else f"v{id_ - self.symbols}"

    def make(self, seed: int, split: Split, indices: Iterable[int]) -> Sequences:
        """Return the sequences of these numbers; a posterior's classes are the values 0 … V − 1."""
        numbers, symbols = list(indices), self.symbols
        keys = np.empty((len(numbers), symbols - 1), np.int64)
        values = np.empty_like(keys)
        for row, index in enumerate(numbers):
            draw = _generator(seed, split, index)
            keys[row] = draw.permutation(symbols)[:-1]
            values[row] = draw.permutation(symbols)[keys[row]]
        tokens = np.empty((len(numbers), 2 * symbols - 2), np.int32)
        tokens[:, 0::2], tokens[:, 1::2] = keys, values + symbols
        seen = np.cumsum(np.eye(symbols)[values], axis=1)
        before = np.concatenate([np.zeros((len(numbers), 1, symbols)), seen[:, :-1]], axis=1)
        left = 1.0 - before
        return Sequences(tokens[:, :-1], values.astype(np.int32), left / left.sum(axis=-1, keepdims=True))


@dataclasses.dataclass(frozen=True)
class HiddenMarkov:
    """Writes a fresh hidden Markov model into each sequence's header, and asks for its state's filtered posterior.

    The rows of transition [S, S] and emission [S, O] are drawn from Dirichlet(1), raised to at least 0.05, normalised
    and rounded to 0.01; the start is uniform. The posterior uses the rounded matrices, normalised once more. A sequence
    reads T, the S² percentages of the transition, E, those S·O of the emission, and ``length`` times OBS and a symbol.
    Each symbol is supervised, by p(s_t | o_1 … o_t) over S classes of a head of its own.

    With ``reach`` above ``observations`` the observations of a training sequence stand at shifted positions: the first
    at step d, uniform in 0 … reach − observations, of a sequence of ``reach`` observations. A scheme with a vector for
    each position has then seen all those of longer sequences, as with randomised positions (arXiv:2305.16843).
    Held-out sequences begin at step 0.
    """

    observations: int = 20
    states: int = 5
    symbols: int = 5
    reach: int = dataclasses.field(default=0, repr=False)  # not a matter of the tokens
    name: ClassVar[str] = "hmm"
    bounds: ClassVar[dict[str, tuple[int, int]]] = {
        "observations": (1, 10_000),
        "states": (2, 18),
        "symbols": (2, 18),
        "reach": (0, 10_000),
    }
    floor: ClassVar[float] = 0.05  # below every probability: one row of 20 would have to be uniform

    # Ids: percentages 0 … 100, then the three markers, then the symbols.
    TRANSITION: ClassVar[int] = 101
    EMISSION: ClassVar[int] = 102
    OBSERVATION: ClassVar[int] = 103
    FIRST_SYMBOL: ClassVar[int] = 104

    @property
    def vocabulary(self) -> int:
        """Return how many ids a sequence may hold."""
        return self.FIRST_SYMBOL + self.symbols

    @property
    def classes(self) -> int | None:
        """Return how many classes a head of its own has: the hidden states."""
        return self.states

    @property
    def header(self) -> int:
        """Return how many tokens come before the first observation."""
        return 2 + self.states * (self.states + self.symbols)

    @property
    def length(self) -> int:
        """Return how many tokens a sequence has."""
        return self.header + 2 * self.observations

    @property
    def span(self) -> int:
        """Return how many positions a model of this task must know."""
        return self.header + 2 * max(self.reach, self.observations)

    def positions(self, seed: int, split: Split, indices: Iterable[int]) -> Int32[np.ndarray, "B T"]:
        """Return the position of each token of these sequences: 0 … T − 1, in training with observations shifted."""
        numbers = list(indices)
        out = np.tile(np.arange(self.length, dtype=np.int32), (len(numbers), 1))
        if split == "train" and self.reach > self.observations:
            most = self.reach - self.observations
            shifts = [_generator(seed, split, number).spawn(2)[1].integers(most, endpoint=True) for number in numbers]
            out[:, self.header :] += 2 * np.array(shifts, np.int32).reshape(-1, 1)
        return out

    @property
    def places(self) -> np.ndarray:
        """Return int64 [P]: the supervised places of a sequence, which are those of the symbols."""
        return np.arange(self.header + 1, self.length, 2)

    @property
    def first_class(self) -> int:
        """Return the index of class 0 among the logits."""
        return 0

    @property
    def symbol_ids(self) -> dict[str, np.ndarray]:
        """Return the ids of each group of symbols, int64 [O]."""
        return {"observations": self.FIRST_SYMBOL + np.arange(self.symbols)}

    def evidence(self, tokens: Int32[np.ndarray, "B T"]) -> Bool[np.ndarray, "B P T"]:
        """Return which tokens a supervised symbol must look up: its own column of E, which is S tokens of the header.

        The posterior depends on all tokens so far; these alone are weighted by this symbol.
        """
        place = np.arange(self.length) - (self.header - self.states * self.symbols)
        in_emission = (place >= 0) & (place < self.states * self.symbols)
        observed = tokens[:, self.places] - self.FIRST_SYMBOL
        return in_emission & (place % self.symbols == observed[..., None])

    def symbol(self, id_: int) -> str:
        """Return the name of an id: 0.35, T, E, OBS, o2."""
        markers = {self.TRANSITION: "T", self.EMISSION: "E", self.OBSERVATION: "OBS"}
        if id_ >= self.FIRST_SYMBOL:
            return f"o{id_ - self.FIRST_SYMBOL}"
        return markers.get(id_) or f"{id_ / 100:.2f}"

    def matrices(self, seed: int, split: Split, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (transition int64 [S, S], emission int64 [S, O]) of a sequence, in percent as its header has them."""
        draw = _generator(seed, split, index)
        return self._percent(draw, self.states), self._percent(draw, self.symbols)

    def make(self, seed: int, split: Split, indices: Iterable[int]) -> Sequences:
        """Return the sequences of these numbers; targets are the hidden states that were drawn."""
        numbers = list(indices)
        tokens = np.empty((len(numbers), self.length), np.int32)
        states = np.empty((len(numbers), self.observations), np.int32)
        posterior = np.empty((len(numbers), self.observations, self.states))
        for row, index in enumerate(numbers):
            percent = self.matrices(seed, split, index)
            transition, emission = (matrix / matrix.sum(axis=1, keepdims=True) for matrix in percent)
            draw = _generator(seed, split, index).spawn(1)[0]
            states[row], seen = self._walk(draw, transition, emission)
            size = self.states**2
            tokens[row, 0], tokens[row, 1 : 1 + size] = self.TRANSITION, percent[0].ravel()
            tokens[row, 1 + size], tokens[row, 2 + size : self.header] = self.EMISSION, percent[1].ravel()
            tokens[row, self.header :: 2], tokens[row, self.header + 1 :: 2] = (
                self.OBSERVATION,
                self.FIRST_SYMBOL + seen,
            )
            posterior[row] = hmm_posterior(transition, emission, seen)
        return Sequences(tokens, states, posterior)

    def _percent(self, draw: np.random.Generator, columns: int) -> np.ndarray:
        rows = np.maximum(draw.dirichlet(np.ones(columns), self.states), self.floor)
        return np.rint(100 * rows / rows.sum(axis=1, keepdims=True)).astype(np.int64)

    def _walk(
        self, draw: np.random.Generator, transition: np.ndarray, emission: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw (states [K], observations [K]) from the model: by inversion, one uniform number a choice."""
        chances = draw.random((self.observations, 2))
        moves, shows = np.cumsum(transition, axis=1), np.cumsum(emission, axis=1)
        states, seen = np.empty((2, self.observations), np.int64)
        for t, (to_state, to_symbol) in enumerate(chances):
            ladder = moves[states[t - 1]] if t else np.arange(1, self.states + 1) / self.states
            states[t] = min(np.searchsorted(ladder, to_state, side="right"), self.states - 1)
            seen[t] = min(np.searchsorted(shows[states[t]], to_symbol, side="right"), self.symbols - 1)
        return states, seen


Task = Bijection | HiddenMarkov
TASKS: dict[str, type[Bijection] | type[HiddenMarkov]] = {"bijection": Bijection, "hmm": HiddenMarkov}


def is_windtunnel(source: str) -> bool:
    """Return whether a source, as ``data.source`` names it, is a wind tunnel."""
    return source.startswith(PREFIX)


@functools.cache
def task(source: str) -> Task:
    """Return the task that ``windtunnel:NAME[,OPTION=NUMBER…]`` names.

    Raises:
        UserError: no such task or option, or a number out of its bounds.
    """
    name, *options = (part.strip() for part in source.removeprefix(PREFIX).split(","))
    if name not in TASKS:
        raise UserError(
            f"data.source: {source}: given {name!r}, allowed: {', '.join(TASKS)}{did_you_mean(name, TASKS)}"
        )
    kind, numbers = TASKS[name], {}
    for option in options:
        field, _, text = option.partition("=")
        if field not in kind.bounds:
            allowed = ", ".join(kind.bounds)
            raise UserError(
                f"data.source: {source}: {name} has no {field!r}, allowed: {allowed}{did_you_mean(field, kind.bounds)}"
            )
        low, high = kind.bounds[field]
        if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
            raise UserError(f"data.source: {source}: {field}: given {text!r}, allowed: an integer from {low} to {high}")
        if field in numbers:
            raise UserError(f"data.source: {source}: {field} is given twice")
        numbers[field] = int(text)
    chosen = kind(**numbers)
    if isinstance(chosen, HiddenMarkov) and 0 < chosen.reach < chosen.observations:
        allowed = f"0 or at least observations={chosen.observations}"
        raise UserError(f"data.source: {source}: reach: given {chosen.reach}, allowed: {allowed}")
    return chosen
