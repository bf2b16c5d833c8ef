"""Write residual maps as numbers: an entry of mappings.json, and the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mhc.eval.mappings.maps import Mappings
from mhc.eval.mappings.published import streams_used

if TYPE_CHECKING:
    from mhc.eval.common.page import Drawn


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
        **_published_summary(maps),
        "by_sublayer": {
            **{name: probe[f"gain/{name}_mean"] for name in ("forward_single", "backward_single")},
            **{name: probe[f"gain/{name}_mean"] for name in ("forward_composite", "backward_composite")},
            "pre": maps.pre,
            "post": maps.post,
            "single": maps.single,
            "from_start": maps.from_start,
            "to_end": maps.to_end,
            **_published_by_sublayer(maps),
        },
    }


def _published_summary(maps: Mappings) -> dict[str, float]:
    """Return what the entry of a published model has beside that of a checkpoint."""
    if maps.dynamic is None:
        return {}
    used = streams_used(maps)
    return {
        "to_identity": float(maps.probe["mix/to_identity_composite"][-1]),
        "to_uniform": float(maps.probe["mix/to_uniform_composite"][-1]),
        "streams_told_apart": float(used["told_apart"][-1]),
        "median_streams_read": float(np.median(used["read"])),
        "median_streams_written": float(np.median(used["written"])),
        "peak_res_scale": float(np.max(np.abs(maps.dynamic.scale[:, 2]))),
        "peak_res_logit_rms": float(np.max(maps.dynamic.logit_rms[:, 2])),
    }


def _published_by_sublayer(maps: Mappings) -> dict[str, Any]:
    """Return the curves that the entry of a published model has beside those of a checkpoint."""
    if maps.dynamic is None:
        return {}
    distances = {
        f"to_{target}_{extent}": maps.probe[f"mix/to_{target}_{extent}"]
        for target in ("identity", "uniform")
        for extent in ("single", "composite")
    }
    return {**distances, "streams": streams_used(maps), "dynamic": maps.dynamic._asdict()}


_ROWS = (
    ("streams", "streams"),
    ("peak_forward_single_gain", "peak gain of a sublayer, forward"),
    ("peak_backward_single_gain", "backward"),
    ("peak_forward_composite_gain", "peak gain over depth, forward"),
    ("peak_backward_composite_gain", "backward"),
    ("row_error", "largest abs(row sum − 1)"),
    ("column_error", "of a column"),
)
_PUBLISHED_ROWS = (
    ("to_identity", "product over depth to the identity"),
    ("to_uniform", "to uniform mixing"),
    ("streams_told_apart", "streams that it tells apart"),
    ("median_streams_read", "streams read (median)"),
    ("median_streams_written", "written"),
    ("peak_res_scale", "largest abs(scale) of H_res"),
    ("peak_res_logit_rms", "largest rms of its dynamic logits"),
)


def number_rows(maps: Mappings) -> tuple[tuple[str, str], ...]:
    """Return (key of ``summary``, heading) of the numbers in the page's table and in the printed line."""
    return _ROWS if maps.dynamic is None else (*_ROWS, *_PUBLISHED_ROWS)


def page(every: Sequence[Mappings], drawn: Sequence[Drawn]) -> str:
    """Return mappings.html."""
    from mhc.eval.common.page import cell, document, figures, table, text
    from mhc.eval.common.words import number

    summaries = [summary(maps) for maps in every]
    columns, published = number_rows(every[0]), every[0].dynamic is not None
    rows = [
        [cell(text(values["checkpoint"])), cell(values["kind"]), *(cell(number(values[key])) for key, _ in columns)]
        for values in summaries
    ]
    lead = "How checkpoints mix their streams, on the probe batch of each run."
    if published:
        lead = (
            "How published models mix their streams: the static maps, of base alone, without what depends on the token."
        )
    body = f"""<h1>Residual maps</h1>
<p class="lead">{lead}</p>
{table(["model" if published else "checkpoint", "kind", *(heading for _, heading in columns)], rows)}
{figures(drawn)}"""
    return document("Residual maps", body)
