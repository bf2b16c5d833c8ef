"""What is measured inside a model: profiles, ablations of heads and sublayers, patches between prompts, patterns.

All of it is forward passes with an observer or with ``mhc.model.edits.Edits``, over any mesh; parameters stay as they
are. Ablations of one kind share one compiled program, since which head is cut is data.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhc.config import Config
from mhc.data.corpus.sources import Split
from mhc.errors import UserError
from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.program import Program, multiple
from mhc.eval.common.rows import packed, scored_places
from mhc.eval.common.scoring import FIELDS, token_scores
from mhc.eval.common.statistics import Estimate, ratio
from mhc.model.attention import Attention
from mhc.model.decoder import Decoder, Observer, SublayerView
from mhc.model.edits import SUBLAYERS, Edits

Tell = Callable[[int, int], None]  # told (done, of how many)
_INPUTS = ("tokens", "segment_ids", "positions")


def _observed(decoder: Decoder, batch: dict[str, jax.Array], observe: Observer) -> dict[str, jax.Array]:
    return decoder.forward(batch["tokens"], batch.get("segment_ids"), batch.get("positions"), observe).observed


# Rows and programs ----------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Rows of a corpus in batches of one shape. R: rows that hold a scored target."""

    batches: list[dict[str, np.ndarray]]  # FIELDS [B, T] int32, counted [B, T] float32: whether the target is scored
    there: np.ndarray  # of all rows of the batches, which are those R
    documents: int  # with a scored target

    def sums(self, name: str) -> np.ndarray:
        """Of each row [R], how many tokens are there ("segment_ids") or are scored ("counted")."""
        return np.concatenate([(batch[name] > 0).sum(axis=1) for batch in self.batches])[self.there]


def read_rows(checkpoint: Checkpoint, split: Split, rows: int, batch_size: int) -> Rows:
    """Rows packed as the run's validation reads them; ``rows``: 0 for all. Raises UserError where there is no token."""
    config = checkpoint.config
    corpus = packed(config, split, rows=rows, batch_size=multiple(batch_size, checkpoint.mesh))
    batches, documents = [], set()
    for batch in corpus.batches:
        counted = scored_places(config, batch)
        documents |= set(np.unique(batch["documents"][counted]).tolist())
        kept = {name: batch[name] for name in FIELDS if name in batch}
        batches.append({**kept, "counted": counted.astype(np.float32)})
    there = np.concatenate([batch["counted"].any(axis=1) for batch in batches]) if batches else np.zeros(0, bool)
    if not there.any():
        raise UserError("nothing to score: the split has no token")
    return Rows(batches, there, len(documents))


def _over(program: Program, rows: Rows, tell: Tell) -> list[Any]:
    """What a program gives for each batch's inputs, on the host."""
    parts = []
    for number, batch in enumerate(rows.batches):
        parts.append(jax.device_get(program(program.put({name: batch[name] for name in _INPUTS}))))
        tell(number + 1, len(rows.batches))
    return parts


# Profile --------------------------------------------------------------------------------------------------------------


class Profile(NamedTuple):
    """Over the tokens of R rows; S sublayers, L blocks, H heads."""

    residual: Estimate  # [S]: rms of the residual state behind each sublayer, over its streams
    output: Estimate  # [S]: rms of F's output
    entropy: Estimate  # [L, H]: of a query's weights, nats, mean over queries
    entropy_by_layer: Estimate  # [L]
    first: Estimate  # [L, H]: share of the weights on the document's first token, mean over queries
    logit_max: np.ndarray  # [L, H]: largest attention logit of a visible pair in all rows
    tokens: int


def profile(checkpoint: Checkpoint, rows: Rows, tell: Tell = lambda done, total: None) -> Profile:
    """Sizes of activations and statistics of attention; padding counts nowhere."""

    def run(decoder: Decoder, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        valid = batch["segment_ids"] > 0

        def over_tokens(values: jax.Array) -> jax.Array:
            """[B, ..., T] -> [B, ...]"""
            shape = (valid.shape[0], *(1,) * (values.ndim - 2), valid.shape[1])
            return jnp.sum(jnp.where(valid.reshape(shape), values, 0.0), axis=-1)

        def observe(view: SublayerView) -> dict[str, jax.Array]:
            streams = view.topology.streams(view.state).astype(jnp.float32)
            out = {
                "residual": over_tokens(jnp.mean(jnp.square(streams), axis=(-2, -1))),
                "output": over_tokens(jnp.mean(jnp.square(view.y.astype(jnp.float32)), axis=-1)),
            }
            core = view.sublayer.core
            if isinstance(core, Attention):
                (context,) = view.args
                scores = core.scores(view.sublayer.before(view.u), context)
                log_weights = jax.nn.log_softmax(scores, axis=-1)
                weights = jnp.exp(log_weights)
                entropy = -jnp.sum(jnp.where(weights > 0, weights * log_weights, 0.0), axis=-1)
                first = jnp.sum(jnp.where((context.positions == 0)[:, None, None], weights, 0.0), axis=-1)
                largest = jnp.where(valid[:, None], jnp.max(scores, axis=-1), -jnp.inf)
                out |= {"entropy": over_tokens(entropy), "first": over_tokens(first)}
                out["logit_max"] = jnp.max(largest, axis=-1)
            return out

        return _observed(decoder, batch, observe)

    program = Program(checkpoint, run)
    parts = _over(program, rows, tell)
    # [S or L, rows, ...] -> [R, S or L, ...]
    found = {
        name: np.moveaxis(np.concatenate([part[name] for part in parts], axis=1), 1, 0)[rows.there].astype(np.float64)
        for name in parts[0]
    }
    tokens = rows.sums("segment_ids")
    return Profile(
        ratio(found["residual"], tokens, np.sqrt),
        ratio(found["output"], tokens, np.sqrt),
        ratio(found["entropy"], tokens),
        ratio(found["entropy"].mean(axis=-1), tokens),
        ratio(found["first"], tokens),
        found["logit_max"].max(axis=0),
        int(tokens.sum()),
    )


# Ablation -------------------------------------------------------------------------------------------------------------

How = Literal["zero", "mean", "scale"]
Head = tuple[int, int]  # (layer, head)


class Case(NamedTuple):
    """What is ablated together."""

    kind: str  # head; attention, feed-forward, block; heads (a set that was asked for), random
    layer: int | None = None
    heads: tuple[Head, ...] = ()
    outputs: tuple[tuple[int, int], ...] = ()  # (layer, which of SUBLAYERS)

    @property
    def name(self) -> str:
        if self.layer is not None and self.kind != "head":
            return f"{self.kind} {self.layer}"
        return f"{self.kind} {' '.join(f'{layer}.{head}' for layer, head in self.heads)}"


class Means(NamedTuple):
    """Over tokens, float64."""

    heads: np.ndarray  # [L, H, J]: heads' results before the output projection
    outputs: np.ndarray  # [L, 2, D]: F's output


class Ablation(NamedTuple):
    """Losses of a model, and of the model with one case after the other ablated, over the same R rows."""

    cases: list[Case]
    base: float  # nats per token
    change: Estimate  # [cases]: loss less that of the whole model, nats per token
    tokens: int


def cases(config: Config, units: Sequence[str] = ("heads", "layers")) -> list[Case]:
    """Every head, and every attention, feed-forward and block."""
    layers, heads = config.model.layers, config.attention.heads
    out: list[Case] = []
    if "heads" in units:
        out += [Case("head", layer, ((layer, head),)) for layer in range(layers) for head in range(heads)]
    if "layers" in units:
        for number, kind in enumerate(SUBLAYERS):
            out += [Case(kind, layer, (), ((layer, number),)) for layer in range(layers)]
        out += [Case("block", layer, (), ((layer, 0), (layer, 1))) for layer in range(layers)]
    return out


def random_heads(config: Config, count: int, draws: int, seed: int, without: Sequence[Head] = ()) -> list[Case]:
    """Sets of ``count`` heads drawn from all but those ``without``, without replacement within a set."""
    every = [(layer, head) for layer in range(config.model.layers) for head in range(config.attention.heads)]
    others = [head for head in every if head not in set(without)]
    if not 0 < count <= len(others):
        return []
    rng = np.random.default_rng(seed)
    return [
        Case("random", None, tuple(others[i] for i in sorted(rng.choice(len(others), count, replace=False))))
        for _ in range(draws)
    ]


def edits_of(case: Case, config: Config, factor: float = 0.0, means: Means | None = None) -> Edits:
    """What is ablated times ``factor``, and its mean added where ``means`` are given. Always of the same shapes."""
    layers, heads, width = config.model.layers, config.attention.heads, config.model.width
    head_scale, head_shift = np.ones((layers, heads)), np.zeros((layers, heads, config.value_dim))
    output_scale, output_shift = np.ones((layers, 2)), np.zeros((layers, 2, width))
    for which in case.heads:
        head_scale[which] = factor
        head_shift[which] = 0.0 if means is None else means.heads[which]
    for which in case.outputs:
        output_scale[which] = factor
        output_shift[which] = 0.0 if means is None else means.outputs[which]
    single = (leaf.astype(np.float32) for leaf in (head_scale, head_shift, output_scale, output_shift))
    return Edits(**dict(zip(("head_scale", "head_shift", "output_scale", "output_shift"), single, strict=True)))  # type: ignore[arg-type]


def mean_outputs(checkpoint: Checkpoint, rows: Rows, tell: Tell = lambda done, total: None) -> Means:
    """Means over the tokens of rows of what heads and sublayers give."""

    def run(decoder: Decoder, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        valid = (batch["segment_ids"] > 0).astype(jnp.float32)

        def observe(view: SublayerView) -> dict[str, jax.Array]:
            out = {"outputs": jnp.einsum("btd,bt->d", view.y.astype(jnp.float32), valid)}
            if view.heads is not None:
                out["heads"] = jnp.einsum("bthj,bt->hj", view.heads.astype(jnp.float32), valid)
            return out

        return _observed(decoder, batch, observe)

    program = Program(checkpoint, run)
    parts = _over(program, rows, tell)
    tokens = sum(int((batch["segment_ids"] > 0).sum()) for batch in rows.batches)
    heads, outputs = (
        np.asarray(np.sum([part[name] for part in parts], axis=0, dtype=np.float64)) / tokens
        for name in ("heads", "outputs")
    )
    return Means(heads, outputs.reshape(-1, 2, outputs.shape[-1]))


class Ablater:
    """Losses of rows under edits; one program for all of them."""

    def __init__(self, checkpoint: Checkpoint, rows: Rows):
        def run(decoder: Decoder, batch: dict[str, jax.Array], edits: Edits) -> jax.Array:
            inputs = {name: batch[name] for name in (*_INPUTS, "targets")}
            scores = token_scores(decoder, **inputs, edits=edits)
            return jnp.sum(scores.nll * batch["counted"], axis=1)

        self._config, self._rows = checkpoint.config, rows
        self.program = Program(checkpoint, run)
        self._batches = [self.program.put(batch) for batch in rows.batches]

    def nll(self, edits: Edits) -> np.ndarray:
        """Of each row [R], nats, float64."""
        found = jax.device_get([self.program(batch, edits) for batch in self._batches])
        return np.concatenate(found).astype(np.float64)[self._rows.there]

    def ablate(
        self,
        which: Sequence[Case],
        factor: float = 0.0,
        means: Means | None = None,
        tell: Tell = lambda done, total: None,
    ) -> Ablation:
        """The change of loss that each case makes."""
        base = self.nll(edits_of(Case("none"), self._config))
        found = []
        for number, case in enumerate(which):
            found.append(self.nll(edits_of(case, self._config, factor, means)) - base)
            tell(number + 1, len(which))
        tokens = self._rows.sums("counted")
        change = ratio(np.stack(found, axis=1), tokens)
        return Ablation(list(which), float(base.sum() / tokens.sum()), change, int(tokens.sum()))


def differs(change: Estimate, comparisons: int) -> np.ndarray:
    """Whether each change is other than 0 at a level of 5 % for ``comparisons`` of them together (Bonferroni)."""
    least = statistics.NormalDist().inv_cdf(1.0 - 0.025 / comparisons)
    return np.abs(change.value) > least * change.error  # False where there is no error to compare with


def chance(value: float, control: np.ndarray) -> float:
    """Share of control draws with at least that change, the value itself counted as one of them: a p-value."""
    return float((1 + np.sum(control >= value)) / (1 + len(control)))


# Patching -------------------------------------------------------------------------------------------------------------

PATCHES = ("state", *SUBLAYERS, "head")


class Patched(NamedTuple):
    """What a corrupted prompt gains by taking activations of a clean one of as many tokens."""

    what: str  # of PATCHES
    clean: float  # logit of the answer less that of the other one after the clean prompt
    corrupted: float
    difference: np.ndarray  # [L, T], of heads [L, H]: the same where one activation is patched
    share: np.ndarray  # of it that is recovered: 0 as corrupted, 1 as clean
    everything: float | None  # share where the whole state before block 0 is patched, 1 if all is well
    answer: int
    other: int


def patch(
    checkpoint: Checkpoint,
    clean: Sequence[int],
    corrupted: Sequence[int],
    what: str,
    *,
    answer: int | None = None,
    other: int | None = None,
    batch_size: int = 16,
    tell: Tell = lambda done, total: None,
) -> Patched:
    """Patches one activation after the other, of each block: at one position, or of one head at all positions.

    Args:
      clean, corrupted: token ids, equally many. what: of PATCHES; ``state`` is the residual state before a block.
      answer, other: token ids whose logits behind the last token are compared; None: the most probable one after the
        clean prompt, and after the corrupted one.
      batch_size: rows at once; one of them is the clean prompt.

    Raises:
      UserError: the two prompts go on alike, so that there is nothing to recover.
    """
    layers, length = checkpoint.config.model.layers, len(clean)
    places = checkpoint.config.attention.heads if what == "head" else length
    variants: list[Any] = [None, *(["all"] if what == "state" else [])]
    variants += [(layer, place) for layer in range(layers) for place in range(places)]
    rows = multiple(max(batch_size, 2), checkpoint.mesh)
    tokens = np.array([clean, *[corrupted] * (rows - 1)], np.int32)

    def run(decoder: Decoder, batch: dict[str, jax.Array], edits: Edits) -> jax.Array:
        h = decoder.forward(batch["tokens"], edits=edits).h
        return decoder.logits(h[:, -1:])[:, 0]

    program = Program(checkpoint, run)
    batch = program.put({"tokens": tokens})
    found: list[np.ndarray] = []  # (logit of the answer, of the other) of each variant
    ends: tuple[float, float] = (0.0, 0.0)
    for first in range(0, len(variants), rows - 1):
        some = variants[first : first + rows - 1]
        logits = np.asarray(program(batch, _patches(some, what, checkpoint.config, rows, length)), np.float64)
        if first == 0:
            answer = int(logits[0].argmax()) if answer is None else answer
            other = int(logits[1].argmax()) if other is None else other
            if answer == other:
                raise UserError(f"token {answer} follows both prompts: name two that differ by --answer and --other")
            ends = (logits[0, answer] - logits[0, other], logits[1, answer] - logits[1, other])
            if abs(ends[0] - ends[1]) < 1e-4:
                raise UserError(f"--clean, --corrupted: the logit difference is {ends[0]:.4f} after both of them")
        found.append(logits[1 : 1 + len(some), answer] - logits[1 : 1 + len(some), other])
        tell(min(first + rows - 1, len(variants)), len(variants))
    difference = np.concatenate(found)
    share = (difference - ends[1]) / (ends[0] - ends[1])
    start = len(variants) - layers * places
    assert answer is not None and other is not None
    return Patched(
        what,
        *ends,
        difference[start:].reshape(layers, places),
        share[start:].reshape(layers, places),
        float(share[1]) if what == "state" else None,
        answer,
        other,
    )


def _patches(variants: Sequence[Any], what: str, config: Config, rows: int, length: int) -> Edits:
    """Edits that patch each variant in a row of its own, from row 1 on: None nothing, "all" the embedding, else one."""
    layers = config.model.layers
    if what == "head":
        where = np.zeros((layers, rows, length, config.attention.heads), bool)
    elif what == "state":
        where = np.zeros((layers, rows, length), bool)
    else:
        where = np.zeros((layers, 2, rows, length), bool)
    for row, variant in enumerate(variants, start=1):
        if variant == "all":
            where[0, row] = True
        elif variant is not None:
            layer, place = variant
            if what == "head":
                where[layer, row, :, place] = True
            elif what == "state":
                where[layer, row, place] = True
            else:
                where[layer, SUBLAYERS.index(what), row, place] = True
    name = {"head": "head_patch", "state": "state_patch"}.get(what, "output_patch")
    return Edits(**{name: where})  # type: ignore[arg-type]


# Patterns -------------------------------------------------------------------------------------------------------------


class Pattern(NamedTuple):
    """What a head's queries attend to."""

    layer: int
    head: int
    weights: np.ndarray  # [T, U], a query's sum to 1
    visible: np.ndarray  # [T, U] bool
    entropy: float  # of a query's weights, nats, mean over queries


def patterns(checkpoint: Checkpoint, tokens: Sequence[int], heads: Sequence[Head]) -> Iterator[Pattern]:
    """Attention weights of some heads over one text."""
    layers = sorted({layer for layer, _ in heads})
    columns = sorted({head for _, head in heads})

    def run(decoder: Decoder, batch: dict[str, jax.Array]) -> jax.Array:
        def observe(view: SublayerView) -> dict[str, jax.Array]:
            core = view.sublayer.core
            if not isinstance(core, Attention):
                return {}
            return {"scores": core.scores(view.sublayer.before(view.u), *view.args)[0, np.array(columns)]}

        scores = _observed(decoder, batch, observe)["scores"]
        return scores[np.array(layers)]

    program = Program(checkpoint, run)
    batch = program.put({"tokens": np.array([tokens] * multiple(1, checkpoint.mesh), np.int32)})
    scores = np.asarray(program(batch), np.float64)  # [layers, heads, T, U]
    for layer, head in heads:
        one = scores[layers.index(layer), columns.index(head)]
        visible = np.isfinite(one)
        weights = np.exp(one - one.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        logs = np.log(weights, where=weights > 0, out=np.zeros_like(weights))
        yield Pattern(layer, head, weights, visible, float(-(weights * logs).sum(axis=-1).mean()))
