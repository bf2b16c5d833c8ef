"""Draw what a checkpoint's residual maps do: single sublayers, their products over depth, gains, distances.

    python -m eval.mappings --checkpoint runs/mhc --out report
    python -m eval.mappings --checkpoint runs/hc runs/mhc --out report      # side by side

writes mappings.html (self-contained), its figures (.png), their numbers (.csv) and mappings.json into the folder. The
maps are taken on the run's own probe batch and averaged over its tokens, so that the gains are those of its probes
(figures 3, 7 and 8 of arXiv:2512.24880 show the same of the paper's models).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mhc import cli
from mhc.errors import UserError
from mhc.eval.common import checkpoints

if TYPE_CHECKING:
    import jax

    from mhc.eval.common.page import Drawn
    from mhc.model.decoder import Decoder, SublayerView

MOST = 8  # checkpoints side by side


class Mappings(NamedTuple):
    """Holds a checkpoint's maps, means over the tokens of a batch, float64; S sublayers, N streams (1 of plain)."""

    name: str
    kind: str
    single: np.ndarray  # H_k [S, N, N]
    from_start: np.ndarray  # H_k ... H_0 [S, N, N]
    to_end: np.ndarray  # H_{S-1} ... H_k [S, N, N]
    pre: np.ndarray  # [S, N]
    post: np.ndarray  # [S, N]
    probe: dict[str, np.ndarray]  # mhc.monitor.probes.measure of the same batch


def measure(checkpoint: checkpoints.Checkpoint, sequences: int | None = None) -> Mappings:
    """Return the maps of a checkpoint on its run's probe batch.

    Args:
      sequences: of the validation set; None: monitor.probe_sequences.
    """
    import jax

    from mhc.eval.common.program import Program
    from mhc.monitor import probes

    config = checkpoint.config
    if sequences is not None:
        monitor = dataclasses.replace(config.monitor, probe_sequences=sequences)
        config = dataclasses.replace(config, monitor=monitor)
    batch = probes.probe_batch(config)
    try:
        means = jax.block_until_ready(Program(checkpoint, _means)(batch))
    except UserError as error:
        raise UserError(f"{checkpoint.name}: {error}") from None
    probe = probes.compile_probe(checkpoint.definition, checkpoint.mesh)(checkpoint.params, batch)
    return Mappings(
        checkpoint.name,
        config.residual.kind,
        **{name: np.asarray(value, np.float64) for name, value in means.items()},
        probe={name: np.asarray(value) for name, value in jax.device_get(probe).items()},
    )


def _means(decoder: Decoder, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the maps of ``Mappings``, as means over the tokens of a batch."""
    import jax.numpy as jnp

    from mhc.residual.functional import composite_maps

    kind = decoder.config.residual.kind

    def observe(view: SublayerView) -> dict[str, jax.Array]:
        maps = view.connection.maps(view.context)
        if maps is None:
            raise UserError(f"residual.kind={kind} has no maps between streams to draw")
        return {"res": maps.res, "pre": maps.pre, "post": maps.post}

    _, seen = decoder.hidden(batch["tokens"], batch["segment_ids"], batch["positions"], observe=observe)
    res = seen["res"]  # [S, B, T, N, N]
    # Products from the end are those from the start of the transposed maps in reverse order, transposed.
    backwards = composite_maps(jnp.swapaxes(res, -1, -2)[::-1])
    every = {
        "single": res,
        "from_start": composite_maps(res),
        "to_end": jnp.swapaxes(backwards, -1, -2)[::-1],
        "pre": seen["pre"],
        "post": seen["post"],
    }
    valid = (batch["segment_ids"] > 0).astype(jnp.float32)
    return {name: jnp.einsum("sbt...,bt->s...", value, valid) / jnp.sum(valid) for name, value in every.items()}


def chosen(depth: int) -> list[tuple[str, str, int]]:
    """Return (title, field of Mappings, sublayer) of the matrices that are drawn, as in the paper."""
    middle, last = depth // 2, depth - 1
    single = [(f"H of sublayer {k}", "single", k) for k in sorted({min(1, last), middle, last})]
    products = [("first half", "from_start", max(middle - 1, 0)), ("second half", "to_end", middle)]
    return [*single, *((f"product of the {title}", name, k) for title, name, k in products), ("product", "to_end", 0)]


# Figures --------------------------------------------------------------------------------------------------------------


def draw(every: Sequence[Mappings], folder: Path) -> list[Drawn]:
    """Draw maps_K.png of each checkpoint; gains, distances and weights of all: PNG and CSV in the folder."""
    from mhc.eval.common.page import Drawn
    from mhc.eval.common.palette import styles_of_kinds
    from mhc.eval.common.sheet import Sheet

    look = styles_of_kinds([maps.kind for maps in every])
    legend = [(style, maps.name) for style, maps in zip(look, every, strict=True)]
    drawn = []
    for number, maps in enumerate(every, start=1):
        if maps.single.shape[-1] == 1:
            continue  # plain: one stream that nothing mixes
        which = chosen(len(maps.single))
        sheet = Sheet(f"maps_{number}", columns=len(which), height=2.6, x="", sharey=False, wide=True)
        for panel, (title, name, k) in enumerate(which):
            sheet.title(panel, title)
            sheet.matrix(panel, maps.name, getattr(maps, name)[k])
        caption = (
            "Mean over tokens; row = output stream, column = input stream. At the right the row sums (what a signal "
            "that all streams share is multiplied with), below the column sums (the same for a gradient)."
        )
        drawn.append(Drawn(sheet.save(folder, folder), f"{maps.kind}: {maps.name}", caption, wide=True, section="main"))

    depth = [np.arange(len(maps.single), dtype=np.float64) for maps in every]
    for name, title, panels, caption, logarithmic in _CURVES:
        sheet = Sheet(name, columns=2, rows=len(panels) // 2, legend=legend, x="sublayer", sharey=False)
        for panel, (key, heading) in enumerate(panels):
            sheet.title(panel, heading)
            for maps, x, style in zip(every, depth, look, strict=True):
                sheet.line(panel, maps.name, x, np.asarray(maps.probe[key], np.float64), style)
            if logarithmic:
                sheet.log(panel)
        drawn.append(Drawn(sheet.save(folder, folder), title, caption, wide=True, section="main"))

    sheet = Sheet("weights", columns=2, rows=len(every), height=1.9, x="sublayer", sharey=False)
    for row, maps in enumerate(every):
        for column, (heading, values) in enumerate((("read: H_pre", maps.pre), ("write: H_post", maps.post))):
            panel = 2 * row + column
            sheet.title(panel, f"{heading}, {maps.name}")
            sheet.cells(panel, maps.name, values, "stream")
    caption = "How much of each stream a sublayer reads, and how much of its output goes to each: means over tokens."
    drawn.append(Drawn(sheet.save(folder, folder), "Reading and writing", caption, wide=True, section="main"))
    return drawn


_CURVES: tuple[tuple[str, str, tuple[tuple[str, str], ...], str, bool], ...] = (
    (
        "gains",
        "Gains over depth",
        (
            ("gain/forward_single_mean", "forward, each sublayer"),
            ("gain/backward_single_mean", "backward, each sublayer"),
            ("gain/forward_composite_mean", "forward, from the embedding"),
            ("gain/backward_composite_mean", "backward, from the head"),
        ),
        "Largest absolute row sum (forward) and column sum (backward) of H_k and of its products, per token, then the "
        "mean over tokens: the gains of the run's probes. Averaging the matrices first, as the pictures above do, "
        "hides what cancels between tokens.",
        True,
    ),
    (
        "distances",
        "Distance to identity and to uniform",
        (
            ("mix/to_identity_single", "each sublayer, to the identity"),
            ("mix/to_uniform_single", "each sublayer, to uniform mixing"),
            ("mix/to_identity_composite", "product from the embedding, to the identity"),
            ("mix/to_uniform_composite", "product from the embedding, to uniform mixing"),
        ),
        "Frobenius distance over √N. At the identity streams are kept apart, at uniform mixing they have become one.",
        False,
    ),
)


# The report -----------------------------------------------------------------------------------------------------------


def summary(maps: Mappings) -> dict[str, Any]:
    """Return a checkpoint's entry for mappings.json."""
    probe = maps.probe
    peaks = {
        f"peak_{direction}_{extent}_gain": float(np.max(probe[f"gain/{direction}_{extent}_mean"]))
        for extent in ("single", "composite")
        for direction in ("forward", "backward")
    }
    return {
        "checkpoint": maps.name,
        "kind": maps.kind,
        "sublayers": len(maps.single),
        "streams": maps.single.shape[-1],
        **peaks,
        "row_error": float(np.max(probe["ds_error/rows"])),
        "column_error": float(np.max(probe["ds_error/columns"])),
        "by_sublayer": {
            **{name: probe[f"gain/{name}_mean"] for name in ("forward_single", "backward_single")},
            **{name: probe[f"gain/{name}_mean"] for name in ("forward_composite", "backward_composite")},
            "pre": maps.pre,
            "post": maps.post,
            "single": maps.single,
            "from_start": maps.from_start,
            "to_end": maps.to_end,
        },
    }


_ROWS = (
    ("streams", "streams"),
    ("peak_forward_single_gain", "peak gain of a sublayer, forward"),
    ("peak_backward_single_gain", "backward"),
    ("peak_forward_composite_gain", "peak gain over depth, forward"),
    ("peak_backward_composite_gain", "backward"),
    ("row_error", "largest abs(row sum − 1)"),
    ("column_error", "of a column"),
)


def page(every: Sequence[Mappings], drawn: Sequence[Drawn]) -> str:
    """Return mappings.html."""
    from mhc.eval.common.page import cell, document, figures, table, text
    from mhc.eval.common.words import number

    summaries = [summary(maps) for maps in every]
    rows = [
        [cell(text(values["checkpoint"])), cell(values["kind"]), *(cell(number(values[key])) for key, _ in _ROWS)]
        for values in summaries
    ]
    body = f"""<h1>Residual maps</h1>
<p class="lead">How checkpoints mix their streams, on the probe batch of each run.</p>
{table(["checkpoint", "kind", *(heading for _, heading in _ROWS)], rows)}
{figures(drawn)}"""
    return document("Residual maps", body)


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code. Raises UserError for a mistake."""
    parser = cli.Parser(
        description="Pictures of a checkpoint's residual maps.",
        example="{prog} --checkpoint runs/mhc --out report",
        fields=checkpoints.FIELDS,
    )
    checkpoints.add_arguments(parser, several=True)
    parser.add_argument("--sequences", type=int, help="of the validation set; without: monitor.probe_sequences")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the page, the figures and the numbers")
    options, rest = parser.parse_known_args(arguments)
    changes = checkpoints.parse_changes(rest, parser)
    out = cli.check_writable(options.out, "--out")
    if options.sequences is not None and options.sequences < 1:
        raise UserError(f"--sequences: given {options.sequences}, allowed: 1 or more")
    if len(options.checkpoint) > MOST:
        raise UserError(f"--checkpoint: given {len(options.checkpoint)}, allowed: at most {MOST} side by side")
    every = []
    for name in options.checkpoint:
        checkpoint = checkpoints.load(name, options.step, average=options.average, changes=changes)
        print(f"{checkpoint.name}: compiling, then measuring", file=sys.stderr, flush=True)
        every.append(measure(checkpoint, options.sequences))
    out.mkdir(parents=True, exist_ok=True)
    names = checkpoints.short_names([maps.name for maps in every])
    drawn = draw([maps._replace(name=name) for maps, name in zip(every, names, strict=True)], out)
    from mhc.files import write_json

    write_json(out / "mappings.json", {"checkpoints": [summary(maps) for maps in every]})
    file = out / "mappings.html"
    file.write_text(page(every, drawn), encoding="utf-8")
    for maps in every:
        values = summary(maps)
        print(f"{maps.name} ({maps.kind}): " + ", ".join(f"{text} {values[key]:.4g}" for key, text in _ROWS[1:]))
    print(file)
    return 0


if __name__ == "__main__":
    cli.run_main(main)
