"""Declare every parameter of the model: its axes, its group, and how training treats it, found by its path.

Parameters of residual topologies are declared with their kinds (`mhc.kinds`); all others are in the table below. A path
that neither covers is an error. Optimiser state repeats the paths of the parameters, so the same rows lay it out.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from mhc import kinds

MAPS = "maps"  # the group of all parameters of residual topologies

MatrixAxes = tuple[tuple[int, ...], tuple[int, ...]]


class Parameter(NamedTuple):
    """Describes one parameter, or those of one name.

    Attributes:
      axes: a logical axis of `mhc.sharding.RULES` for each axis, without the leading ``layers`` of stacked blocks.
      group: the name under which reports group it.
      decay: whether weight decay applies.
      muon: (input axes, output axes) of the matrix that Muon takes, counted from the right, so that the leading axis of
        stacked blocks is a batch of matrices; None: AdamW takes it.
      decayed_by: the option of the residual kind that, when true, applies weight decay all the same.
    """

    axes: tuple[str, ...]
    group: str
    decay: bool = False
    muon: MatrixAxes | None = None
    decayed_by: str | None = None


_IN_OUT: MatrixAxes = ((-2,), (-1,))
_TO_HEADS: MatrixAxes = ((-3,), (-2, -1))
_FROM_HEADS: MatrixAxes = ((-3, -2), (-1,))

# End of a parameter's path -> what it is. Each path is matched by one row: their order decides nothing.
TABLE: tuple[tuple[str, Parameter], ...] = (
    (r"embed/table", Parameter(("vocab", "embed"), "embedding", True)),
    (r"positions/table", Parameter(("positions", "embed"), "embedding")),
    (r"positions/bias", Parameter(("positions", "heads"), "embedding")),
    (r"head/kernel", Parameter(("embed", "vocab"), "head", True)),
    (r"attention/core/query", Parameter(("embed", "heads", "head_dim"), "attention", True, _TO_HEADS)),
    (r"attention/core/(key|value)", Parameter(("embed", "kv_heads", "head_dim"), "attention", True, _TO_HEADS)),
    (r"attention/core/out", Parameter(("heads", "head_dim", "embed"), "attention", True, _FROM_HEADS)),
    (r"attention/core/(query|kv)_down", Parameter(("embed", "latent"), "attention", True, _IN_OUT)),
    (
        r"attention/core/(query|key|value)_up",
        Parameter(("latent_rows", "heads", "head_dim"), "attention", True, _TO_HEADS),
    ),
    (r"attention/core/query_bias", Parameter(("heads", "head_dim"), "attention")),
    (r"attention/core/(key|value)_bias", Parameter(("kv_heads", "head_dim"), "attention")),
    (r"attention/core/out_bias", Parameter(("norm",), "attention")),
    (r"attention/core/links/\w+/\w+", Parameter(("norm",), "attention")),  # of every link, see mhc.model.memory
    (r"mlp/core/(shared/)?(gate|up)", Parameter(("embed", "mlp"), "feed_forward", True, _IN_OUT)),
    (r"mlp/core/(shared/)?down", Parameter(("mlp", "embed"), "feed_forward", True, _IN_OUT)),
    (r"mlp/core/experts/(gate|up)", Parameter(("experts", "embed", "mlp"), "feed_forward", True, _IN_OUT)),
    (r"mlp/core/experts/down", Parameter(("experts", "mlp", "embed"), "feed_forward", True, _IN_OUT)),
    (r"mlp/core/(gate|up)_bias", Parameter(("mlp",), "feed_forward")),
    (r"mlp/core/down_bias", Parameter(("norm",), "feed_forward")),
    (r"mlp/update", Parameter((), "feed_forward")),  # the factor of its output
    (r"mlp/core/router", Parameter(("embed", "window"), "router", True)),
    (r"mlp/core/router_bias", Parameter(("window",), "router")),
    (r"norm/(scale|bias)", Parameter(("norm",), "norms")),
)

GROUPS = tuple(dict.fromkeys([*(parameter.group for _, parameter in TABLE), MAPS]))


def matches(pattern: str, path: str) -> bool:
    """Return whether a pattern of the table is the end of a path, from the start of a name or of a word in it."""
    return re.search(rf"(^|/|_){pattern}$", path) is not None


def parameter(path: str) -> Parameter:
    """Return the description of the parameter at ``path`` (a/b/c), or of the one whose copy the optimiser keeps there.

    Raises:
      ValueError: nothing covers the path.
    """
    declared = kinds.parameter(path)
    if declared is not None:
        return Parameter(declared.axes, MAPS, False, declared.muon, declared.decayed_by)
    for pattern, row in TABLE:
        if matches(pattern, path):
            return row
    raise ValueError(f"no row covers the parameter {path}; add one to mhc.model.parameters.TABLE")
