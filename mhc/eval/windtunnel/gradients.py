"""Measure the gradient dynamics of attention: advantages, responsibilities, and whether attention follows advantages.

The closed forms of `mhc.eval.windtunnel.advantage` are checked against automatic differentiation within every layer of
the model. The loss L of a sequence is that of training: the cross-entropy in nats, the mean over the supervised places,
of the value that came true or of the posterior over hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhc.data.windtunnel import Sequences, Task
from mhc.eval.common import checkpoints
from mhc.eval.common import page as pages
from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.program import Program
from mhc.eval.common.sheet import Sheet
from mhc.eval.windtunnel import advantage, attention
from mhc.eval.windtunnel.sections import Result, Shown
from mhc.model.decoder import Decoder, SublayerView
from mhc.model.edits import Edits

CHECKED = 8
"""Sequences on which the closed forms are checked against automatic differentiation."""
_COPIES = 8  # arrays as large as all logits that a program holds at once
_FIELDS = ("tokens", "places", "targets")
_IDENTITIES = {"scores": "∂L/∂s", "values": "∂L/∂v", "results": "c = Σ α v"}
_ALONE = (
    "the correlation needs two checkpoints of a run: checkpoint.every and checkpoint.keep_every keep them, and "
    "checkpoint.keep the last ones"
)


class Dynamics(NamedTuple):
    """Holds the gradient dynamics of a run; C checkpoints, L layers, H heads.

    Attributes:
        deviation: {identity: float64 [L]}, the largest |closed form − autodiff| over the largest |autodiff|, at the
            model's own precision. "results" compares Σ_j α_ij v_j with what the model computed.
        queries_per_value: float64 [L, H], how many queries share the update of a value.
        supervised: float64 [L, H], the share of responsibilities that the queries at supervised places have.
        steps: of the C checkpoints.
        with_scores: float64 [C - 1, L, H], correlation of the advantage with the change of logits to the next one.
        with_weights: float64 [C - 1, L, H], with the change of weights.
    """

    deviation: dict[str, np.ndarray]
    queries_per_value: np.ndarray
    supervised: np.ndarray
    steps: list[int]
    with_scores: np.ndarray
    with_weights: np.ndarray


def follow(checkpoint: Checkpoint, task: Task, sequences: int) -> Dynamics:
    """Follow the attention of a run, on held-out sequences, over the checkpoints that it keeps, to a given one.

    Raises:
        UserError: a checkpoint cannot be read.
    """
    sums: dict[str, Any] = {}
    for name, values in _each(checkpoint, _responsibilities, task, sequences):
        sums[name] = sums.get(name, 0.0) + values.sum(axis=0)
    steps = checkpoints.steps_until(checkpoint)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    before = None
    for step in steps:
        now = checkpoints.at_step(checkpoint, step)
        if before is not None:
            agreed = _agreement(before, now, task, sequences)
            found.append((agreed.with_scores.correlation(), agreed.with_weights.correlation()))
        before = now
    with_scores, with_weights = zip(*found, strict=True) if found else ((), ())
    shape = (-1, *sums["queries_per_value"].shape)
    return Dynamics(
        deviations(checkpoint, task),
        sums["queries_per_value"] / sequences,
        sums["supervised"] / sequences,
        steps,
        np.array(with_scores).reshape(shape),
        np.array(with_weights).reshape(shape),
    )


def deviations(checkpoint: Checkpoint, task: Task) -> dict[str, np.ndarray]:
    """Return the largest relative deviation [L] of each identity from automatic differentiation, on some sequences."""
    pairs: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for name, values in _each(checkpoint, _identities, task, CHECKED):
        pairs.setdefault(name, []).append((values[..., 0], values[..., 1]))  # by sequence: what is apart, what it is of
    out = {}
    for name, parts in pairs.items():
        apart, size = (np.concatenate(each).max(axis=0) for each in zip(*parts, strict=True))
        out[name] = np.where(size > 0, apart / np.where(size > 0, size, 1.0), apart)
    return out


def _agreement(before: Checkpoint, now: Checkpoint, task: Task, sequences: int) -> advantage.Agreement:
    total: advantage.Agreement | None = None
    pairs = zip(
        _run(before, _advantages, task, sequences), _run(now, attention.scores_at_places, task, sequences), strict=True
    )
    for first, later in pairs:
        part = advantage.agreement(*(x.astype(np.float64) for x in (first["advantage"], first["scores"], later)))
        total = (
            part
            if total is None
            else advantage.Agreement(*(one + other for one, other in zip(total, part, strict=True)))
        )
    assert total is not None
    return total


def _run(checkpoint: Checkpoint, function: Callable[..., Any], task: Task, sequences: int) -> Iterator[Any]:
    """Yield a function's results for the held-out sequences, some at a time."""
    drawn = attention.batches(checkpoint.config, task, sequences, _COPIES)
    inputs = (batch | {"targets": targets(task, block)} for block, batch in drawn)
    return (found for _, found in Program(checkpoint, function).each(inputs, _FIELDS))


def _each(
    checkpoint: Checkpoint, function: Callable[..., Any], task: Task, sequences: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, float64 values by sequence) of a function's results."""
    for found in _run(checkpoint, function, task, sequences):
        for name, values in found.items():
            yield name, values.astype(np.float64)


def targets(task: Task, drawn: Sequences) -> np.ndarray:
    """Return the targets of training at the supervised places: int32 ids [B, P], or float32 distributions [B, P, C]."""
    if task.classes is None:
        return drawn.targets + np.int32(task.first_class)
    return drawn.posterior.astype(np.float32)


# ---------------------------------------------------------------------------------------------- programs over a decoder


def loss(decoder: Decoder, batch: dict[str, jax.Array], shift: jax.Array) -> jax.Array:
    """Return L of each sequence [B], in nats: the mean cross-entropy over its supervised places.

    ``shift`` [L, B, T, H, J] is added to the results of the heads.
    """
    h = decoder.forward(batch["tokens"], edits=Edits(head_shift=shift)).h
    h = jnp.take_along_axis(h, batch["places"][:, :, None], axis=1)
    log_p = jax.nn.log_softmax(decoder.logits(h), axis=-1)
    wanted = batch["targets"]
    if jnp.issubdtype(wanted.dtype, jnp.integer):
        return -jnp.take_along_axis(log_p, wanted[..., None], axis=-1)[..., 0].mean(axis=-1)
    return -jnp.sum(wanted * log_p, axis=-1).mean(axis=-1)


class _Seen(NamedTuple):
    """Holds `attention.Queries` of all layers, float32, and u = ∂L/∂c."""

    scores: jax.Array  # [L, B, H, T, U]
    values: jax.Array  # [L, B, U, G, J]
    results: jax.Array  # [L, B, T, H, J]
    u: jax.Array  # [L, B, T, H, J]


def _seen(decoder: Decoder, batch: dict[str, jax.Array]) -> _Seen:
    def observe(view: SublayerView) -> dict[str, jax.Array]:
        found = attention.queries(view)
        return {} if found is None else found._asdict()

    observed = decoder.forward(batch["tokens"], observe=observe).observed
    scores, values, results = (_wide(observed[name]) for name in ("scores", "values", "results"))
    u = jax.grad(lambda shift: loss(decoder, batch, shift).sum())(jnp.zeros_like(results))
    return _Seen(scores, values, results, u)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _advantages(decoder: Decoder, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return advantage and logits of the queries at the supervised places, [B, L, H, P, T]."""
    seen = _seen(decoder, batch)
    found = jax.vmap(advantage.gradients)(seen.scores, seen.values, seen.u).advantage
    arrays = {"advantage": found, "scores": seen.scores}
    return {name: jnp.moveaxis(attention.at_places(x, batch["places"]), 0, 1) for name, x in arrays.items()}


def _responsibilities(decoder: Decoder, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return how queries share the updates of values, [B, L, H] each."""

    def observe(view: SublayerView) -> dict[str, jax.Array]:
        found = attention.queries(view)
        if found is None:
            return {}
        alpha = jax.nn.softmax(found.scores, axis=-1)
        return {
            "queries_per_value": advantage.queries_per_value(alpha),
            "supervised": advantage.responsibility_at(alpha, there),
        }

    tokens = batch["tokens"]
    there = (jnp.arange(tokens.shape[1])[None, :, None] == batch["places"][:, None]).any(axis=-1)
    observed = decoder.forward(tokens, observe=observe).observed
    return {name: jnp.moveaxis(values, 0, 1) for name, values in observed.items()}


def _identities(decoder: Decoder, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return (largest |closed form − autodiff|, largest |autodiff|) of each identity, [B, L, 2]."""
    seen = _seen(decoder, batch)
    contexts = jax.vmap(advantage.contexts)
    before = contexts(seen.scores, seen.values)

    def through(scores: jax.Array, values: jax.Array) -> jax.Array:
        """Return L after the results of each layer are moved by the difference that other logits and values make."""
        return loss(decoder, batch, contexts(scores, values) - before).sum()

    by_scores, by_values = jax.grad(through, (0, 1))(seen.scores, seen.values)
    closed = jax.vmap(advantage.gradients)(seen.scores, seen.values, seen.u)
    pairs = {
        "scores": (closed.scores, by_scores),
        "values": (closed.values, by_values),
        "results": (before, seen.results),
    }
    return {
        name: jnp.moveaxis(jnp.stack([_largest(one - other), _largest(other)], axis=-1), 0, 1)
        for name, (one, other) in pairs.items()
    }


def _largest(x: jax.Array) -> jax.Array:
    return jnp.abs(x).max(axis=tuple(range(2, x.ndim)))


# ---------------------------------------------------------------------------------------------------------- the section


def measure(checkpoint: Checkpoint, task: Task, sequences: int) -> Result:
    """Return the gradient dynamics; the scalars are means over checkpoints, layers and heads."""
    if not attention.attends(checkpoint.config):
        return Result({}, {"note": attention.NO_ATTENTION})
    found = follow(checkpoint, task, sequences)
    means = {
        "advantage_scores_correlation": mean(found.with_scores),
        "advantage_weights_correlation": mean(found.with_weights),
        "queries_per_value": mean(found.queries_per_value),
        "supervised_responsibility": mean(found.supervised),
    }
    return Result({name: value for name, value in means.items() if value is not None}, as_json(found, sequences))


def mean(values: np.ndarray) -> float | None:
    """Return the mean of the values that are not nan; None if all are."""
    there = values[np.isfinite(values)]
    return float(there.mean()) if there.size else None


def as_json(found: Dynamics, sequences: int) -> dict[str, Any]:
    """Return the entry of windtunnel.json by checkpoint, layer and head. None stands for what does not exist."""
    return {
        "sequences": sequences,
        "identities": {
            "sequences": CHECKED,
            **{
                name: {"largest": float(values.max()), "by_layer": values.tolist()}
                for name, values in found.deviation.items()
            },
        },
        "queries_per_value": found.queries_per_value.tolist(),
        "supervised_responsibility": found.supervised.tolist(),
        "steps": found.steps,
        "advantage_and_scores": _listed(found.with_scores),
        "advantage_and_weights": _listed(found.with_weights),
        **({"note": _ALONE} if len(found.steps) < 2 else {}),
    }


def _listed(values: np.ndarray) -> Any:
    """Return nested lists of numbers; None stands for nan."""
    if values.ndim:
        return [_listed(each) for each in values]
    return float(values) if math.isfinite(values) else None


def page(results: Sequence[Shown], folder: Path) -> str:
    """Return the table of identities, and the figure of correlations over the steps of training."""
    parts = []
    for note in dict.fromkeys(f"{one.name}: {one.result.json['note']}" for one in results if "note" in one.result.json):
        parts.append(f'<p class="note">{pages.text(note)}.</p>')
    there = [one for one in results if "identities" in one.result.json]
    if not there:
        return "".join(parts)
    rows = [
        [pages.cell(pages.text(one.name), "label")]
        + [pages.cell(f"{one.result.json['identities'][name]['largest']:.1e}") for name in _IDENTITIES]
        for one in there
    ]
    parts.append(
        '<p class="note">The largest deviation of each closed form from automatic differentiation, of c from what the '
        "model computed, relative to the largest value of the layer.</p>"
    )
    parts.append(pages.table([pages.heading("checkpoint"), *_IDENTITIES.values()], rows))
    if any(len(one.result.json["steps"]) > 1 for one in there):
        parts.append(pages.figures([_draw(there, folder)]))
    return "".join(parts)


def _draw(results: Sequence[Shown], folder: Path) -> pages.Drawn:
    titles = {"advantage_and_scores": "change of logits", "advantage_and_weights": "change of weights"}
    sheet = Sheet(
        "gradients",
        columns=len(titles),
        legend=list({one.label: (one.style, one.label) for one in results}.values()),
        y="correlation with the advantage",
    )
    for panel, (name, title) in enumerate(titles.items()):
        sheet.title(panel, title)
        for one in results:
            values = [mean(np.array(heads, float)) for heads in one.result.json[name]]
            if values:
                line = np.array([math.nan if value is None else value for value in values])
                x = np.array(one.result.json["steps"][1:], float)
                sheet.line(panel, one.name, x, line, one.style, marker=True, alpha=0.8)
    return pages.Drawn(
        sheet.save(folder, folder),
        "Does attention follow the advantage?",
        "Correlation of the advantage at a checkpoint with the change to the one at the step shown, over all pairs of "
        "a supervised query and a key that it sees: the mean over layers and heads.",
        True,
    )
