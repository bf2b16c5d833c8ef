"""Declare the residual kinds: what each allows, its options, and how training treats its parameters.

This module is free of jax, so that a configuration is refused before anything heavy is loaded. A kind of this project
is one row below and one file in ``mhc/residual``; ``mhc.residual.register`` adds a kind from elsewhere.
The configuration, the layout over a mesh, the optimiser, the exporter and the contract tests read the table; none of
them names a kind.
"""

from __future__ import annotations

from typing import Any

from mhc.kind_table import (
    _PARAMETERS,
    COMMON,
    Kind,
    Option,
    Parameter,
    collapses,
    declare,
    inits,
    known,
    module_of,
    modules_for,
    names,
    options,
    owners,
    parameter,
    referred,
    unknown,
)
from mhc.rules import refuse

__all__ = [
    "COMMON",
    "Kind",
    "Option",
    "Parameter",
    "collapses",
    "declare",
    "inits",
    "known",
    "module_of",
    "modules_for",
    "names",
    "options",
    "owners",
    "parameter",
    "referred",
    "unknown",
]

SINKHORN_PRESETS = ("paper", "deepseek")  # orders of normalisation; ``mhc.residual.functional.sinkhorn`` describes them

# Options that several kinds share.
_ALPHA = Option(
    "initial gate of the maps' input-dependent part; None: the preset's value",
    default=None,
    type=float | None,
    initial=True,
)
_RMS_EPS = Option("added under the root of the maps' norm", default=1e-6, low=0, anywhere=True)
_MAP_EPS = Option("sinkhorn=deepseek and collapse=head: added to the read weights", default=1e-6, low=0, anywhere=True)


def _check_hc(config: Any) -> None:
    """Refuse options that have no effect without the input-dependent part. Raises UserError."""
    residual = config.residual
    if not residual.dynamic:
        if residual.decay_dynamic:
            refuse("residual.decay_dynamic", True, "False with residual.dynamic=False: nothing is left to decay")
        if residual.alpha is not None:
            refuse("residual.alpha", residual.alpha, "None with residual.dynamic=False: no gate is left")


# The learned collapse (collapse=head) of every topology with streams; its parameters are not a connection's.
_PARAMETERS |= {
    "head/fn": Parameter(("streams", "stream_width", "maps")),
    "head/base": Parameter(("maps",)),
    "head/scale": Parameter(("maps",)),
}


def _manifold(name: str, mixing: str, **fields: Any) -> Kind:
    """Return a kind that differs from mhc in its H_res alone.

    Args:
      name: the kind's name.
      mixing: ``module:name`` of the Mixing that gives H_res.
      fields: further fields of Kind; options and parameters are added to the shared ones.
    """
    options = {
        "alpha": _ALPHA,
        "res_gap": Option(
            "init=equivalent: how far the logits off the diagonal lie below those on it",
            default=4.0,
            low=0,
            initial=True,
            anywhere=True,
        ),
        "sinkhorn": Option(
            "mhc: order of the normalisations; deepseek also adds map_eps to pre, for every kind related to mhc",
            default="paper",
            choices=SINKHORN_PRESETS,
        ),
        "iters": Option("mhc: Sinkhorn iterations", default=20, low=1, anywhere=True),
        "single_pass": Option("mhc and relatives: read with the weights that the sublayer before made", default=False),
        "rms_eps": _RMS_EPS,
        "map_eps": _MAP_EPS,
        "sinkhorn_eps": Option(
            "sinkhorn=deepseek: added to the sums that are divided by",
            default=1e-6,
            low=0,
            anywhere=True,
        ),
    }
    return Kind(
        name,
        inits=fields.pop("inits", ("home", "equivalent", "fanin", "v4")),
        preserving={"init": "equivalent", "alpha": 0.0, "collapse": "mean"},
        options=options | fields.pop("options", {}),
        parameters={
            "phi": Parameter(("streams", "stream_width", "maps"), muon=((-3, -2), (-1,))),
            "alpha": Parameter(("maps",)),
            "bias": Parameter(("maps",)),
            **fields.pop("parameters", {}),
        },
        fixes_collapse="single_pass",
        builder="mhc.residual.single_pass:manifold_topology",
        mixing=mixing,
        **fields,
    )


PLAIN = Kind(
    "plain",
    streams=(1,),
    why_streams="it has one stream",
    preserving={"scale": 1.0},
    collapses=("mean", "sum"),
    options={"scale": Option("plain: x' = scale x + F(x); 0 leaves the residual out, as a control", default=1.0)},
    builder="mhc.residual.plain:PlainResidual",
)
HC = Kind(
    "hc",
    inits=("hc",),
    preserving={"init": "hc", "collapse": "mean"},
    collapses=("sum", "mean", "head"),
    options={
        "alpha": _ALPHA,
        "dynamic": Option("hc: the maps depend on the input; False: they are the biases alone", default=True),
        "tanh": Option("hc: apply tanh to the input-dependent part", default=True),
        "rms_eps": _RMS_EPS,
        "map_eps": _MAP_EPS,
        "decay_dynamic": Option("hc: apply weight decay to the input-dependent part's weights too", default=False),
    },
    parameters={
        "w_pre": Parameter(("stream_width",), decayed_by="decay_dynamic"),
        "w_post": Parameter(("stream_width",), decayed_by="decay_dynamic"),
        "w_res": Parameter(("stream_width", "maps"), decayed_by="decay_dynamic"),
        "alpha": Parameter(("maps",)),
        "b_pre": Parameter(("maps",)),
        "b_post": Parameter(("maps",)),
        "b_res": Parameter(("maps", "maps")),
    },
    check=_check_hc,
    builder="mhc.residual.hyper:HyperConnections",
)
MHC = _manifold("mhc", "mhc.residual.mixing.sinkhorn:Sinkhorn", convention="sinkhorn")
MHC_LITE = _manifold(
    "mhc_lite",
    "mhc.residual.mixing.permutations:Permutations",
    streams=(1, 2, 3, 4, 5),
    why_streams="it mixes all N! permutation matrices",
)
KROMHC = _manifold(
    "kromhc",
    "mhc.residual.mixing.kronecker:Kronecker",
    streams=(1, 2, 4, 8),
    why_streams="its H_res is a Kronecker product of 2 x 2 matrices",
)
IDENTITY = _manifold("identity", "mhc.residual.mixing.identity:Identity")
_NOT_FROM_ZERO = ("home", "equivalent")  # presets of what does not learn from residual logits of zero


def _check_go_mhc(config: Any) -> None:
    """Refuse a rotation of more than 32 axes. Raises UserError."""
    n, s = config.residual.n or GO_MHC.default_streams, config.residual.s
    if n * s > 32:
        refuse("residual.s", s, f"at most {32 // n} with residual.n={n}: it rotates n s axes, 32 at most")


GO_MHC = _manifold(
    "go_mhc",
    "mhc.residual.mixing.orthostochastic:Orthostochastic",
    inits=_NOT_FROM_ZERO,
    options={"s": Option("go_mhc: rows and columns of the rotation that make one of H_res", default=2, low=1)},
    check=_check_go_mhc,
)
TBP_MHC = _manifold(
    "tbp_mhc",
    "mhc.residual.mixing.transport:Transport",
    inits=_NOT_FROM_ZERO,
    options={"minorize": Option("tbp_mhc: mix a learned share of the uniform map in", default=True)},
    parameters={"delta": Parameter(())},
)
SHC = _manifold("shc", "mhc.residual.mixing.spectral:Spectral", parameters={"gamma": Parameter(("maps",))})
ISO = _manifold("iso", "mhc.residual.mixing.rotations:Isometric")
ORTHO = _manifold("ortho", "mhc.residual.mixing.rotations:Orthogonal")
CIRCULANT = _manifold(
    "circulant",
    "mhc.residual.mixing.circulant:Circulant",
    options={
        "beta": Option(
            "circulant: what is not the identity has the share beta / (2 S) over S sublayers, 1/4 at most",
            default=4.0,
            above=0,
        )
    },
)


def _check_frac(config: Any) -> None:
    """Refuse a width that the slots do not divide, and options without an effect. Raises UserError."""
    residual, width = config.residual, config.model.width
    m = residual.n or FRAC.default_streams
    if width % m:
        refuse("residual.n", m, f"a divisor of model.width={width} with residual.kind=frac, which cuts it into slots")
    _check_hc(config)


def _check_laurel(config: Any) -> None:
    """Refuse a rank under a variant that does not use it. Raises UserError."""
    if config.residual.variant == "rw" and config.residual.rank is not None:
        refuse("residual.rank", config.residual.rank, "None with residual.variant=rw: it has no matrices")


_ONE_STREAM: dict[str, Any] = {"streams": (1,), "why_streams": "it has one stream, and its past"}
_AS_PLAIN: dict[str, Any] = {"inits": ("home", "equivalent"), "preserving": {"init": "equivalent"}, "collapses": ()}
_RANK = Option(
    "gated_residual, laurel: width r of the low-rank part; None: D / 8", default=None, type=int | None, low=1
)
FRAC = Kind(
    "frac",
    default_n=2,
    **_AS_PLAIN,
    options={name: HC.options[name] for name in ("alpha", "dynamic", "tanh", "rms_eps", "decay_dynamic")},
    parameters={
        "w_read": Parameter(("stream_width", "maps"), decayed_by="decay_dynamic"),
        **{name: HC.parameters[name] for name in ("w_post", "w_res", "alpha", "b_post", "b_res")},
        "b_read": Parameter(("maps", "maps")),
    },
    check=_check_frac,
    builder="mhc.residual.frac:FracConnections",
)
GATED_RESIDUAL = Kind(
    "gated_residual",
    **_AS_PLAIN,
    own_norms=True,
    options={"rank": _RANK, "rms_eps": _RMS_EPS},
    parameters={
        f"{place}{name}": Parameter(axes)
        for place, names in (("", ("w_norm", "w_down", "w_up", "w_inject")), ("end/", ("w_norm", "w_down", "w_up")))
        for name, axes in {
            "w_norm": ("streams", "stream_width"),
            "w_down": ("streams", "stream_width", "maps"),
            "w_up": ("maps", "streams", "stream_width"),
            "w_inject": ("streams", "stream_width", "maps"),
        }.items()
        if name in names
    },
    builder="mhc.residual.gated:GatedResidual",
)
ATTN_RES = Kind(
    "attn_res",
    **_ONE_STREAM,
    **_AS_PLAIN,
    options={
        "block": Option(
            "attn_res: sublayers whose outputs are summed to one source; 0: each is its own", default=0, low=0
        ),
        "rms_eps": _RMS_EPS,
    },
    parameters={
        f"{place}{name}": Parameter(("stream_width",)) for place in ("", "end/") for name in ("query", "scale")
    },
    builder="mhc.residual.depth.attn_res:AttentionResiduals",
)
DENSEFORMER = Kind(
    "denseformer",
    **_ONE_STREAM,
    **_AS_PLAIN,
    options={"dilation": Option("denseformer: every dilation-th block counts in the average", default=1, low=1)},
    parameters={"weights": Parameter(("maps", "maps"))},
    builder="mhc.residual.depth.denseformer:DenseFormer",
)
LAUREL = Kind(
    "laurel",
    streams=(1,),
    why_streams="it has one stream",
    **_AS_PLAIN,
    options={
        "variant": Option(
            "laurel: learned shares of output and stream (rw), a low-rank term of the stream (lr), or both",
            default="rw_lr",
            choices=("rw", "lr", "rw_lr"),
        ),
        "rank": _RANK,
    },
    parameters={
        "w": Parameter(("maps",)),
        "A": Parameter(("stream_width", "maps")),
        "B": Parameter(("maps", "stream_width")),
    },
    check=_check_laurel,
    builder="mhc.residual.depth.laurel:Laurel",
)

for _kind in (PLAIN, HC, MHC, MHC_LITE, KROMHC, IDENTITY):
    declare(_kind)
for _kind in (GO_MHC, TBP_MHC, SHC, ISO, ORTHO, CIRCULANT):
    declare(_kind)
for _kind in (FRAC, GATED_RESIDUAL, ATTN_RES, DENSEFORMER, LAUREL):
    declare(_kind)
