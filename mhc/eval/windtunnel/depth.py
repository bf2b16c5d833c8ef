"""Find where the posterior can be read off the residual stream: linear probes after every sublayer.

A ridge probe (`mhc.eval.windtunnel.probes`) reads the posterior's entropy and its log posterior off the collapsed state
and off each stream alone, at the supervised places, before the first sublayer and after every one. It is fitted on
other held-out sequences than those that it is scored on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhc.data.windtunnel import Task, entropy_bits
from mhc.eval.common import page as pages
from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.program import Program, filled
from mhc.eval.common.sheet import Sheet
from mhc.eval.common.statistics import Estimate
from mhc.eval.windtunnel import probes
from mhc.eval.windtunnel.sections import Result, Shown
from mhc.model.decoder import Decoder
from mhc.residual.protocol import State

if TYPE_CHECKING:
    from jaxtyping import Float64

FLOOR = 0.01
"""A posterior below this share of the uniform 1/C is raised to it before its logarithm is taken, so that 0 has one."""
_BYTES = 128 * 2**20  # of the states of one batch
_TARGETS = {"entropy": slice(0, 1), "log_posterior": slice(1, None)}
_VIEWS = ("collapsed", "streams")


class Depth(NamedTuple):
    """Holds R² of the probes, each an estimate over the scored sequences. S sublayers, N streams.

    The last axis tells the target: the entropy, then the log posterior. ``within`` is against the mean of each place,
    ``across`` against the mean of all places. The penalties are those of ``within``.
    """

    within: dict[str, Estimate]  # {"collapsed": [S + 1, 1, 2], "streams": [S + 1, N, 2]}
    across: dict[str, Estimate]
    penalty: dict[str, np.ndarray]
    fitted: int  # sequences


def targets(posterior: Float64[np.ndarray, "B P C"]) -> Float64[np.ndarray, "B P E"]:
    """Return the targets of a probe, in bits: the posterior's entropy, then log2 max(p_c, 0.01 / C) of each class."""
    floored = np.maximum(posterior, FLOOR / posterior.shape[-1])
    return np.concatenate([entropy_bits(posterior)[..., None], np.log2(floored)], axis=-1)


def parts(sequences: int) -> tuple[range, range, range]:
    """Return the numbers of the sequences to score, to fit on, and to choose the penalty by; no two parts overlap.

    The first are those that the belief is measured on. Twice as many come after them for the fit, a quarter of which
    choose the penalty.
    """
    fitted, end = sequences + 3 * sequences // 2, 3 * sequences
    return range(sequences), range(sequences, fitted), range(fitted, end)


def probe(checkpoint: Checkpoint, task: Task, sequences: int) -> Depth:
    """Fit probes to a checkpoint and score them on other sequences.

    Args:
        checkpoint: of a run that fits the task.
        sequences: held-out sequences that are scored, 2 or more; twice as many more are used for the fit.
    """
    scored, *fitting = parts(sequences)
    batches = _Batches(checkpoint, task, sequences)
    sums = {name: (probes.Sums(), probes.Sums()) for name in _VIEWS}
    for part, numbers in enumerate(fitting):
        for these, states, y in batches.over(numbers):
            for name, x in states.items():
                sums[name][part].add(these, x, y)
    fits = {
        (name, within): probes.fit(*sums[name], tuple(_TARGETS.values()), within=within)
        for name in _VIEWS
        for within in (True, False)
    }
    scores: dict[tuple[str, bool], list[probes.Scores]] = {key: [] for key in fits}
    for these, states, y in batches.over(scored):
        for key, fitted in fits.items():
            scores[key].append(fitted.score(these, states[key[0]], y))

    def estimates(within: bool) -> dict[str, Estimate]:
        return {name: batches.by_depth(name, probes.r2(scores[name, within])) for name in _VIEWS}

    return Depth(
        estimates(True),
        estimates(False),
        {name: batches.unflattened(name, fits[name, True].penalty) for name in _VIEWS},
        sum(map(len, fitting)),
    )


class _Batches:
    """Runs a checkpoint over sequences, and yields the features and targets of some at a time."""

    def __init__(self, checkpoint: Checkpoint, task: Task, most: int) -> None:
        """Take at most ``most`` sequences at once, and fewer where their states would be too large."""
        self._task, self._program = task, Program(checkpoint, _views)
        config = checkpoint.config
        # As if of seven streams and the collapsed state: how many there are is the topology's own matter.
        row = 4 * (2 * config.model.layers + 1) * len(task.places) * 8 * config.model.width
        self._size = max(1, min(64, most, _BYTES // row))
        self._streams: dict[str, int] = {}  # of each view

    def over(self, numbers: range) -> Iterator[tuple[range, dict[str, np.ndarray], np.ndarray]]:
        """Yield (numbers of some sequences, {view: features [K, B, P, D]}, targets [B, P, E]); K is (S + 1) · N."""
        blocks = [numbers[first : first + self._size] for first in range(0, len(numbers), self._size)]
        places = self._task.places.astype(np.int32)

        def inputs() -> Iterator[dict[str, np.ndarray]]:
            for block in blocks:
                drawn = self._task.make(0, "validation", block)
                batch = {"tokens": drawn.tokens, "places": np.tile(places, (len(block), 1))}
                # All batches are of one size, so that one program serves them.
                yield {**filled(batch, self._size), "posterior": drawn.posterior}

        for block, (batch, states) in zip(blocks, self._program.each(inputs(), ("tokens", "places")), strict=True):
            self._streams = {name: x.shape[3] for name, x in states.items()}
            features = {name: _flat(x[: len(block)]) for name, x in states.items()}
            yield block, features, targets(batch["posterior"])

    def unflattened(self, view: str, values: np.ndarray) -> np.ndarray:
        """Return values [K, ...] of a view as [S + 1, N, ...]."""
        return values.reshape(-1, self._streams[view], *values.shape[1:])

    def by_depth(self, view: str, estimate: Estimate) -> Estimate:
        """Return estimates [K, G] of a view as [S + 1, N, G]."""
        value, low, high, error = (self.unflattened(view, part) for part in estimate[:4])
        return Estimate(value, low, high, error, estimate.samples)


def _flat(states: np.ndarray) -> np.ndarray:
    """Return states [B, S + 1, P, N, D] as features [(S + 1) · N, B, P, D]."""
    moved = np.moveaxis(states, (1, 3), (0, 1))
    return moved.reshape(-1, *moved.shape[2:])


def _views(decoder: Decoder, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the collapsed state [B, S + 1, P, 1, D] and the streams [B, S + 1, P, N, D] at the places, float32."""
    tokens, places, topology = batch["tokens"], batch["places"], decoder.residual

    def views(state: State) -> dict[str, jax.Array]:
        states = {"collapsed": topology.collapse(state)[:, :, None], "streams": topology.streams(state)}
        index = places[:, :, None, None]
        return {name: jnp.take_along_axis(x, index, axis=1).astype(jnp.float32) for name, x in states.items()}

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    before = views(topology.settle(topology.expand(decoder.embed_tokens(tokens, positions))))
    after = decoder.forward(tokens, observe=lambda view: views(view.state)).observed
    return {name: jnp.moveaxis(jnp.concatenate([before[name][None], after[name]]), 0, 1) for name in before}


# ---------------------------------------------------------------------------------------------------------- the section


def measure(checkpoint: Checkpoint, task: Task, sequences: int) -> Result:
    """Return R² of the probes; the scalars are those of the state after the last sublayer, within a place."""
    probed = probe(checkpoint, task, sequences)
    scalars: dict[str, float] = {}
    for number, target in enumerate(_TARGETS):
        collapsed = probed.within["collapsed"].value[-1, 0, number]
        streams = probed.within["streams"].value[-1, :, number]
        values = {"": collapsed, "_best_stream": streams.max(), "_worst_stream": streams.min()}
        scalars |= {f"{target}_r2{name}": float(value) for name, value in values.items() if np.isfinite(value)}
    return Result(scalars, as_json(probed, sequences))


def as_json(probed: Depth, sequences: int) -> dict[str, Any]:
    """Return the entry of windtunnel.json: R² with intervals by target, sublayer (the first: before any) and stream."""

    def by_depth(estimates: dict[str, Estimate], number: int) -> dict[str, Any]:
        collapsed, streams = estimates["collapsed"], estimates["streams"]
        depth, count = streams.value.shape[:2]
        return {
            "collapsed": [_bounds(collapsed, k, 0, number) for k in range(depth)],
            "streams": [[_bounds(streams, k, n, number) for n in range(count)] for k in range(depth)],
        }

    return {
        "sequences": sequences,
        "fitted_on": probed.fitted,
        "floor": f"{FLOOR} / classes",
        "within_places": {target: by_depth(probed.within, number) for number, target in enumerate(_TARGETS)},
        "across_places": {target: by_depth(probed.across, number) for number, target in enumerate(_TARGETS)},
        "penalties": {
            name: {target: values[..., number] for number, target in enumerate(_TARGETS)}
            for name, values in probed.penalty.items()
        },
    }


def _bounds(estimate: Estimate, *index: int) -> dict[str, float | None]:
    """Return an estimate for JSON; None stands for an R² that does not exist."""
    bounds = estimate.at(*index)
    return {name: value if value is not None and np.isfinite(value) else None for name, value in bounds.items()}


def page(results: Sequence[Shown], folder: Path) -> str:
    """Return the figure of R² over depth: of the collapsed state, of the best stream and of the worst."""
    titles = {"collapsed": "collapsed state", "best": "best stream", "worst": "worst stream"}
    drawn = []
    for target, words in (("log_posterior", "log posterior"), ("entropy", "entropy")):
        lines = [_lines(one.result.json["within_places"][target]) for one in results]
        if not any(np.isfinite(line).any() for lines_of_one in lines for line in lines_of_one.values()):
            continue  # a function of the place, as the entropy of the bijection is
        sheet = Sheet(
            f"depth_{target}",
            columns=3,
            legend=list({one.label: (one.style, one.label) for one in results}.values()),
            x="sublayers before",
            y="R² within a place",
        )
        for panel, (name, title) in enumerate(titles.items()):
            sheet.title(panel, title)
            for shown, values in zip(results, lines, strict=True):
                x = np.arange(len(values[name]), dtype=float)
                sheet.line(panel, shown.name, x, values[name], shown.style, marker=True, alpha=0.8)
        drawn.append(
            pages.Drawn(
                sheet.save(folder, folder),
                f"R² of the {words} over depth",
                "Linear probes, scored on other sequences than those of the fit, against the mean of each place. The "
                "belief is spread where the worst stream has it as the best one does; it is blurred where none has it.",
                True,
            )
        )
    note = (
        '<p class="note">R² is 1 for a probe without error, and 0 for one no better than the mean of the place. An '
        "R² that is absent is of a target that is a function of the place alone.</p>"
    )
    return note + pages.figures(drawn)


def _lines(target: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return R² [S + 1] of the collapsed state, of the best stream and of the worst; nan where there is none."""
    collapsed = np.array([bound["value"] for bound in target["collapsed"]], float)
    streams = np.array([[bound["value"] for bound in row] for row in target["streams"]], float)
    return {"collapsed": collapsed, "best": streams.max(axis=1), "worst": streams.min(axis=1)}
