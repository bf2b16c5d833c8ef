"""Measure the geometry of attention on a wind tunnel: axes of keys, alignment of queries, and outputs.

- **Keys.** Each symbol's mean key, before positions are applied, of each head: are symbols orthogonal? The mean
  |cosine| of different symbols is compared with that of random vectors, √(2 / (π d)).
- **Queries.** The cosine of the queries at supervised places with the keys that they must look up, after positions are
  applied, as attention meets them; beside it that with all other earlier keys.
- **Outputs.** The principal components of attention's outputs at supervised places, and how well the first one orders
  the posterior's entropy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhc.data.windtunnel import Task, entropy_bits
from mhc.eval.common import page as pages
from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.palette import Style
from mhc.eval.common.program import Program, filled
from mhc.eval.common.sheet import Sheet
from mhc.eval.windtunnel.sections import Result, Shown
from mhc.model.attention import Attention, Tokenwise
from mhc.model.decoder import Decoder, SublayerView

if TYPE_CHECKING:
    from jaxtyping import Float64

_BYTES = 128 * 2**20  # of the results of one batch
_NO_KEYS = "attention.kind=tokenwise has no keys: no token looks at another"


class Principal(NamedTuple):
    """Holds the principal components of some vectors of width D.

    Attributes:
        first, second: shares of the variance of the first two components; nan where there is no variance.
        participation: (Σ λ)² / Σ λ², the participation ratio: how many components share the variance, 1 … D.
        direction: float64 [D], of the first component.
    """

    first: float
    second: float
    participation: float
    direction: np.ndarray


class Geometry(NamedTuple):
    """Holds the measurements. L layers, H heads, G key heads, P places; nan stands for what does not exist.

    Attributes:
        keys: {group of symbols: float64 [L, G]}, mean |cosine| of different symbols; None without keys.
        nulls: {group: (mean, low, high)} of as many random vectors: the mean and 95 % of draws.
        size: d, the width of a key.
        matching: float64 [L, H, P], mean cosine of the queries with the keys to look up; None without keys.
        others: float64 [L, H, P], with the other earlier keys.
        outputs: the principal components of each of the L layers' outputs.
        spearman: float64 [L], rank correlation of the first component with the posterior's entropy, without its sign.
    """

    keys: dict[str, np.ndarray] | None
    nulls: dict[str, tuple[float, float, float]] | None
    size: int | None
    matching: np.ndarray | None
    others: np.ndarray | None
    outputs: list[Principal]
    spearman: np.ndarray

    @property
    def contrast(self) -> np.ndarray | None:
        """Return how much more queries align with the keys to look up than with others, float64 [L, H]: place mean.

        Only places count that have keys of both sorts.
        """
        if self.matching is None or self.others is None:
            return None
        apart = self.matching - self.others
        there = np.isfinite(apart)
        with np.errstate(invalid="ignore"):
            mean: np.ndarray = np.where(there, apart, 0.0).sum(axis=-1) / there.sum(axis=-1)
        return mean


# ----------------------------------------------------------------------------------------------------------- arithmetic


def off_diagonal(vectors: Float64[np.ndarray, "*B V d"]) -> np.ndarray:
    """Return the mean |cosine| of different vectors, float64 [*B].

    A vector that is 0 or not finite is left out; nan stands for fewer than two others.
    """
    norm = np.linalg.norm(vectors, axis=-1, keepdims=True)
    there = np.isfinite(norm) & (norm > 0)
    unit = np.where(there, vectors, 0.0) / np.where(there, norm, 1.0)
    size, pairs = np.abs(unit @ unit.mT), (there & there.mT).astype(np.float64)
    index = np.arange(pairs.shape[-1])
    pairs[..., index, index] = 0.0
    with np.errstate(invalid="ignore"):
        return np.asarray((size * pairs).sum(axis=(-2, -1)) / pairs.sum(axis=(-2, -1)))


def random_null(count: int, size: int, draws: int = 200) -> tuple[float, float, float]:
    """Return (mean, low, high) of ``off_diagonal`` of ``count`` random directions of width ``size``.

    They are normal vectors, drawn from a fixed seed; the bounds hold 95 % of the draws. The mean tends to √(2 / (π d)).
    """
    rng = np.random.default_rng(0)
    cosines = np.array([off_diagonal(rng.standard_normal((count, size))) for _ in range(draws)])
    low, high = np.percentile(cosines, (2.5, 97.5))
    return float(cosines.mean()), float(low), float(high)


def principal(covariance: Float64[np.ndarray, "D D"]) -> Principal:
    """Return the principal components of a covariance."""
    if not np.isfinite(covariance).all():  # a model that diverged
        return Principal(math.nan, math.nan, math.nan, np.full(len(covariance), np.nan))
    values, vectors = np.linalg.eigh(covariance)
    values = np.maximum(values, 0.0)[::-1]
    total = values.sum()
    if not total > 0:
        return Principal(math.nan, math.nan, math.nan, vectors[:, -1])
    second = float(values[1] / total) if len(values) > 1 else 0.0
    return Principal(float(values[0] / total), second, float(total**2 / (values**2).sum()), vectors[:, -1])


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Return |Spearman's ρ| of two series, ties sharing their mean rank; nan where one is constant or not finite."""
    from scipy import stats

    if not (np.ptp(first) > 0 and np.ptp(second) > 0):
        return math.nan
    return abs(float(stats.spearmanr(first, second).statistic))


# -------------------------------------------------------------------------------------------------------------- a model


@np.errstate(invalid="ignore", over="ignore")  # a model that diverged gives nan, without a warning
def look(checkpoint: Checkpoint, task: Task, sequences: int) -> Geometry:
    """Measure the geometry of a checkpoint on held-out sequences of a task that it fits."""
    batches = _Batches(checkpoint, task, sequences)
    sums: dict[str, np.ndarray] = {}
    for _, observed in batches:
        for name, values in observed.items():
            total = sums.get(name, 0.0)
            sums[name] = total + values.astype(np.float64).sum(axis=0)
            if name == "output":
                flat = np.moveaxis(values.astype(np.float64), 1, 0).reshape(values.shape[1], -1, values.shape[-1])
                sums["squares"] = sums.get("squares", 0.0) + flat.mT @ flat
    samples = sequences * len(task.places)
    means = sums["output"].sum(axis=1) / samples  # [L, D]
    outputs = [
        principal(squares / samples - np.outer(mean, mean))
        for squares, mean in zip(sums["squares"], means, strict=True)
    ]
    directions = np.stack([each.direction for each in outputs])
    # The components are known after the first pass alone, and outputs are not kept: a second one projects them.
    scores, entropies = [], []
    for posterior, observed in batches:
        scores.append(np.einsum("blpd,ld->lbp", observed["output"].astype(np.float64) - means[:, None], directions))
        entropies.append(entropy_bits(posterior))
    entropy, score = np.concatenate(entropies).ravel(), np.concatenate(scores, axis=1).reshape(len(means), -1)
    spearman = np.array([rank_correlation(np.round(entropy, 12), values) for values in score])
    if "keys" not in sums:
        return Geometry(None, None, None, None, None, outputs, spearman)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_keys = np.moveaxis(sums["keys"] / sums["counts"][..., None, None], 1, 2)  # [L, G, symbols, K]
        matching, others = (sums[name] / sums[f"{name}_pairs"][:, None] for name in ("matching", "others"))
    keys, nulls, first = {}, {}, 0
    for group, ids in task.symbol_ids.items():
        keys[group] = off_diagonal(mean_keys[:, :, first : first + len(ids)])
        nulls[group] = random_null(len(ids), mean_keys.shape[-1])
        first += len(ids)
    return Geometry(keys, nulls, mean_keys.shape[-1], matching, others, outputs, spearman)


class _Batches:
    """Runs a checkpoint over sequences, anew for each iteration over it."""

    def __init__(self, checkpoint: Checkpoint, task: Task, sequences: int) -> None:
        self._task, self._sequences, self._program = task, sequences, Program(checkpoint, _observed)
        self._symbols = np.concatenate(list(task.symbol_ids.values())).astype(np.int32)
        config = checkpoint.config
        keys = len(self._symbols) * (config.attention.heads + 1) * (config.head_dim + config.rope_dim)
        row = 4 * config.model.layers * (keys + len(task.places) * config.model.width)
        self._size = max(1, min(64, sequences, _BYTES // row))

    def __iter__(self) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """Yield (posterior [B, P, C], observations by sequence), some sequences at a time."""
        blocks = (
            range(first, min(first + self._size, self._sequences)) for first in range(0, self._sequences, self._size)
        )
        for block in blocks:
            drawn = self._task.make(0, "validation", block)
            rows = (len(block), 1)
            batch = {
                "tokens": drawn.tokens,
                "places": np.tile(self._task.places.astype(np.int32), rows),
                "symbols": np.tile(self._symbols, rows),
                "evidence": self._task.evidence(drawn.tokens),
            }
            # All batches are of one size, so that one program serves them.
            ((_, observed),) = self._program.each([filled(batch, self._size)], tuple(batch))
            yield drawn.posterior, {name: values[: len(block)] for name, values in observed.items()}


def _observed(decoder: Decoder, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the quantities that are summed over sequences, float32 by sequence and layer.

    output [B, L, P, D]; and with keys: keys [B, L, symbols, G, K], sums over the symbol's tokens, and counts of these
    [B, L, symbols]; matching and others [B, L, H, P], sums of cosines, and counts of these pairs [B, L, P].
    """
    tokens, places, evidence = batch["tokens"], batch["places"], batch["evidence"]
    earlier = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, None] < places[:, :, None]
    which = (tokens[:, :, None] == batch["symbols"][:, None]).astype(jnp.float32)  # [B, T, symbols]

    def at_places(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, places.reshape(*places.shape, *(1,) * (x.ndim - 2)), axis=1).astype(jnp.float32)

    def observe(view: SublayerView) -> dict[str, jax.Array]:
        core = view.sublayer.core
        if not isinstance(core, Attention):
            return {}
        out = {"output": at_places(view.y)}
        if isinstance(core, Tokenwise):
            return out
        (context,) = view.args
        x = view.sublayer.before(view.u)
        bare = core.recall(x, context.positions, None, view.memory)[1].astype(jnp.float32)
        q, k, *_ = core.recall(x, context.positions, context.frequencies, view.memory)
        k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2).astype(jnp.float32)
        cosine = jnp.einsum("bphk,bthk->bhpt", _unit(at_places(q)), _unit(k))
        out["keys"] = jnp.einsum("bts,btgk->bsgk", which, bare)
        out["counts"] = which.sum(axis=1)
        for name, pairs in (("matching", evidence & earlier), ("others", earlier & ~evidence)):
            out[name] = jnp.sum(jnp.where(pairs[:, None], cosine, 0.0), axis=-1)
            out[f"{name}_pairs"] = pairs.sum(axis=-1).astype(jnp.float32)
        return out

    observed = decoder.forward(tokens, observe=observe).observed
    return {name: jnp.moveaxis(values, 0, 1) for name, values in observed.items()}


def _unit(x: jax.Array) -> jax.Array:
    norm = jnp.linalg.norm(x, axis=-1, keepdims=True)
    return x / jnp.where(norm > 0, norm, 1.0)


# ---------------------------------------------------------------------------------------------------------- the section


def measure(checkpoint: Checkpoint, task: Task, sequences: int) -> Result:
    """Return the geometry; the scalars are means over layers and heads, or of the last layer where they say so."""
    geometry = look(checkpoint, task, sequences)
    values = {
        "pc1_share_last_layer": geometry.outputs[-1].first,
        "pc1_entropy_spearman_last_layer": float(geometry.spearman[-1]),
        "participation_ratio_last_layer": geometry.outputs[-1].participation,
    }
    if geometry.keys is not None:
        values |= {f"key_cosine_{group}": float(cosines.mean()) for group, cosines in geometry.keys.items()}
    if geometry.contrast is not None:
        values |= {"alignment": float(geometry.contrast.mean()), "alignment_best_head": float(geometry.contrast.max())}
    return Result({name: value for name, value in values.items() if math.isfinite(value)}, as_json(geometry, sequences))


def as_json(geometry: Geometry, sequences: int) -> dict[str, Any]:
    """Return the entry of windtunnel.json by layer, head and place. None stands for what does not exist."""
    keys, alignment = None, None
    if geometry.keys is not None and geometry.nulls is not None and geometry.size is not None:
        keys = {
            group: {
                "off_diagonal": _listed(cosines),
                "null": dict(zip(("mean", "low", "high"), geometry.nulls[group], strict=True)),
                "null_formula": math.sqrt(2 / (math.pi * geometry.size)),
                "width": geometry.size,
            }
            for group, cosines in geometry.keys.items()
        }
    if geometry.matching is not None and geometry.others is not None and geometry.contrast is not None:
        names = {"matching": geometry.matching, "others": geometry.others, "contrast": geometry.contrast}
        alignment = {name: _listed(values) for name, values in names.items()}
    return {
        "sequences": sequences,
        "keys": keys,
        "alignment": alignment,
        "outputs": {
            "pc1_share": _listed(np.array([each.first for each in geometry.outputs])),
            "pc2_share": _listed(np.array([each.second for each in geometry.outputs])),
            "participation_ratio": _listed(np.array([each.participation for each in geometry.outputs])),
            "pc1_entropy_spearman": _listed(geometry.spearman),
        },
        **({"note": _NO_KEYS} if keys is None else {}),
    }


def _listed(values: np.ndarray) -> Any:
    """Return nested lists of numbers; None stands for nan."""
    if values.ndim:
        return [_listed(each) for each in values]
    return float(values) if np.isfinite(values) else None


def page(results: Sequence[Shown], folder: Path) -> str:
    """Return the figures: keys, alignment and outputs by layer, and alignment by layer and place."""
    drawn = [_by_layer(results, folder)]
    if any(one.result.json["alignment"] for one in results):
        drawn.append(_by_place(results, folder))
    without = [one.name for one in results if one.result.json["keys"] is None]
    note = f'<p class="note">{pages.text(", ".join(without))}: {pages.text(_NO_KEYS)}.</p>' if without else ""
    return note + pages.figures(drawn)


def _legend(results: Sequence[Shown]) -> list[tuple[Style, str]]:
    return list({one.label: (one.style, one.label) for one in results}.values())


def _by_layer(results: Sequence[Shown], folder: Path) -> pages.Drawn:
    groups = list(dict.fromkeys(group for one in results for group in one.result.json["keys"] or ()))
    outputs = {
        "pc1_share": "outputs: share of PC1",
        "participation_ratio": "outputs: participation ratio",
        "pc1_entropy_spearman": "outputs: PC1 and entropy, |ρ|",
    }
    titles = [
        *(f"{group}: |cosine| of keys" for group in groups),
        *(["queries: contrast"] if groups else []),
        *outputs.values(),
    ]
    columns = 3
    sheet = Sheet(
        "geometry",
        columns=columns,
        rows=-(-len(titles) // columns),
        legend=_legend(results),
        x="layer",
        sharey=False,
    )
    for panel, title in enumerate(titles):
        sheet.title(panel, title)
    for axes in sheet.panels[len(titles) :]:
        axes.set_axis_off()
    for shown in results:
        series: list[np.ndarray | None] = []
        json = shown.result.json
        for group in groups:
            series.append(
                np.mean(np.array(json["keys"][group]["off_diagonal"], float), axis=1) if json["keys"] else None
            )
        if groups:
            series.append(np.max(np.array(json["alignment"]["contrast"], float), axis=1) if json["alignment"] else None)
        series += [np.array(json["outputs"][name], float) for name in outputs]
        for panel, values in enumerate(series):
            if values is not None:
                x = np.arange(1.0, len(values) + 1)
                sheet.line(panel, shown.name, x, values, shown.style, marker=True, alpha=0.8)
    for panel, group in enumerate(groups):
        null = next(one.result.json["keys"][group]["null"]["mean"] for one in results if one.result.json["keys"])
        sheet.level(panel, null, "random")
    return pages.Drawn(
        sheet.save(folder, folder),
        "Geometry of attention by layer",
        "Keys: mean over heads; random vectors of the first checkpoint's width have the level shown. Queries: how much "
        "more they align with the keys to look up than with other earlier ones, of the best head. Outputs: at "
        "supervised places.",
        True,
    )


def _by_place(results: Sequence[Shown], folder: Path) -> pages.Drawn:
    with_keys = [one for one in results if one.result.json["alignment"]]
    layers = max(len(one.result.json["alignment"]["matching"]) for one in with_keys)
    columns = min(layers, 3)
    sheet = Sheet(
        "alignment",
        columns=columns,
        rows=-(-layers // columns),
        legend=_legend(with_keys),
        x="supervised place",
        y="cosine",
    )
    for panel in range(layers):
        sheet.title(panel, f"layer {panel + 1}")
    for axes in sheet.panels[layers:]:
        axes.set_axis_off()
    for shown in with_keys:
        values = np.array(shown.result.json["alignment"]["matching"], float).mean(axis=1)  # [L, P]
        for panel, line in enumerate(values):
            sheet.line(panel, shown.name, np.arange(1.0, len(line) + 1), line, shown.style, marker=True, alpha=0.8)
    return pages.Drawn(
        sheet.save(folder, folder),
        "Cosine of queries with the keys to look up",
        "Mean over sequences and heads. Bijection: the values so far. Hidden Markov model: the symbol's column of E.",
        True,
    )
