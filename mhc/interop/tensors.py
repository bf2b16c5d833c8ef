"""Match the tensors of a family with our parameters, in both directions.

A ``Part`` shows a tensor, or a piece of it, in our layout as a numpy *view*: reading copies from the view, and writing
copies into it. So each correspondence is stated once, and what was read is written back bit for bit.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from mhc.config import GATED, Config
from mhc.errors import UserError
from mhc.interop.families import FAMILIES, Family
from mhc.interop.safetensors import listed

Index = tuple[int | slice, ...]
View = Callable[[np.ndarray], np.ndarray]


class Part(NamedTuple):
    """Says which piece of a tensor belongs at a place in our parameters."""

    path: str  # a/b/c
    at: Index  # along the leading axes; the other axes are whole
    view: View


class Tensor(NamedTuple):
    """Describes a tensor of a family."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Says what differs between sources of one family."""

    family: str
    bare: bool = False  # names lack the family's prefix
    fused: bool = False  # all experts of a layer in one tensor, as transformers 5 has them in memory
    interleaved: bool = True  # deepseek_v3: the two numbers of a rotary pair stand side by side
    head: bool = True  # the head's tensor is there, tied or not


def layout(family: Family, raw: Mapping[str, object], names: Iterable[str]) -> Layout:
    """Return the layout that a source's config and names show."""
    known = set(names)
    return Layout(
        family.name,
        bare=family.embedding in known and family.prefix + family.embedding not in known,
        fused=any(name.endswith(".mlp.experts.gate_up_proj") for name in known),
        interleaved=raw.get("rope_interleave", True) is True,  # null is false
        head="lm_head.weight" in known,
    )


# Views ----------------------------------------------------------------------------------------------------------------


def _whole(w: np.ndarray) -> np.ndarray:
    return w


def _linear(w: np.ndarray) -> np.ndarray:
    """Return the view of a matrix [out, in] as [in, out]."""
    return w.T


def _into_heads(heads: int) -> View:
    """Return the view of [H K, D] as [D, H, K], and of a bias [H K] as [H, K]."""
    return lambda w: w.reshape(heads, -1, *w.shape[1:]).transpose(*((2, 0, 1) if w.ndim == 2 else (0, 1)))


def _from_heads(heads: int) -> View:
    """Return the view of [D, H K] as [H, K, D]."""
    return lambda w: w.reshape(w.shape[0], heads, -1).transpose(1, 2, 0)


class _Plan:
    """Gathers tensors layer by layer."""

    def __init__(self, config: Config, layout: Layout):
        self.config, self.layout, self.family = config, layout, FAMILIES[layout.family]
        self.prefix = "" if layout.bare else self.family.prefix
        self.tensors: dict[str, Tensor] = {}

    def add(self, name: str, shape: tuple[int, ...], *parts: Part) -> None:
        self.tensors[name] = Tensor(name, shape, parts)

    def place(self, layer: int) -> tuple[str, int]:
        """Return (stack of our parameters, number in it) of a layer."""
        leading = self.config.leading_layers
        return ("leading_blocks", layer) if layer < leading else ("blocks", layer - leading)

    def norm(self, name: str, path: str, width: int, index: Index = ()) -> None:
        self.add(f"{name}.weight", (width,), Part(f"{path}/scale", index, _whole))
        if self.config.norm.kind == "layernorm":
            self.add(f"{name}.bias", (width,), Part(f"{path}/bias", index, _whole))

    def linear(
        self, name: str, path: str, shape: tuple[int, int], index: Index, view: View = _linear, bias: View | None = None
    ) -> None:
        """Add a matrix [out, in], and with ``bias``, its view, a bias [out]."""
        self.add(f"{name}.weight", shape, Part(path, index, view))
        if bias is not None:
            self.add(f"{name}.bias", shape[:1], Part(f"{path}_bias", index, bias))


def plan(config: Config, layout: Layout) -> dict[str, Tensor]:
    """Return every tensor of a family's model, by name. ``config`` is resolved."""
    p = _Plan(config, layout)
    model, vocab, width = p.prefix, config.vocab_size, config.model.width
    p.add(model + p.family.embedding, (vocab, width), Part("embed/table", (), _whole))
    for layer in range(config.model.layers):
        {"gpt2": _gpt2_layer, "bloom": _bloom_layer}.get(layout.family, _llama_layer)(p, layer)
    if layout.family == "gpt2":
        p.add(f"{model}wpe.weight", (config.max_length, width), Part("positions/table", (), _whole))
    if layout.family == "bloom":
        p.norm(f"{model}word_embeddings_layernorm", "embed_norm", width)
    p.norm(model + ("ln_f" if layout.family in ("gpt2", "bloom") else "norm"), "final_norm", width)
    if layout.head or not config.head.tied:
        # A tied head repeats the embedding: read, it is compared with it; written, it is written twice.
        part = Part("embed/table", (), _whole) if config.head.tied else Part("head/kernel", (), _linear)
        p.add("lm_head.weight", (vocab, width), part)
    return p.tensors


def _gpt2_layer(p: _Plan, layer: int) -> None:
    stack, i = p.place(layer)
    d, f, h = p.config.model.width, p.config.mlp_width, p.config.attention.heads
    name, attention, mlp = f"{p.prefix}h.{layer}", f"{stack}/attention", f"{stack}/mlp"
    p.norm(f"{name}.ln_1", f"{attention}/norm", d, (i,))
    p.norm(f"{name}.ln_2", f"{mlp}/norm", d, (i,))

    def third(which: int) -> View:  # [D, 3 D] -> [D, H, K], and a bias [3 D] -> [H, K]
        return lambda w: w.reshape(*w.shape[:-1], 3, h, -1)[..., which, :, :]

    names = ("query", "key", "value")
    for what, shape in (("", (d, 3 * d)), ("_bias", (3 * d,))):
        parts = (Part(f"{attention}/core/{our}{what}", (i,), third(number)) for number, our in enumerate(names))
        p.add(f"{name}.attn.c_attn.{'bias' if what else 'weight'}", shape, *parts)
    # These matrices are stored as [in, out].
    p.add(
        f"{name}.attn.c_proj.weight",
        (d, d),
        Part(f"{attention}/core/out", (i,), lambda w: w.reshape(h, -1, w.shape[1])),
    )
    p.add(f"{name}.attn.c_proj.bias", (d,), Part(f"{attention}/core/out_bias", (i,), _whole))
    for their, our, shape in (("c_fc", "up", (d, f)), ("c_proj", "down", (f, d))):
        p.add(f"{name}.mlp.{their}.weight", shape, Part(f"{mlp}/core/{our}", (i,), _whole))
        p.add(f"{name}.mlp.{their}.bias", shape[1:], Part(f"{mlp}/core/{our}_bias", (i,), _whole))


def _bloom_layer(p: _Plan, layer: int) -> None:
    stack, i = p.place(layer)
    d, f, h = p.config.model.width, p.config.mlp_width, p.config.attention.heads
    name, attention, mlp = f"{p.prefix}h.{layer}", f"{stack}/attention", f"{stack}/mlp"
    p.norm(f"{name}.input_layernorm", f"{attention}/norm", d, (i,))
    p.norm(f"{name}.post_attention_layernorm", f"{mlp}/norm", d, (i,))

    def third(which: int) -> View:  # [H 3 K, D] -> [D, H, K], and a bias [H 3 K] -> [H, K]
        def view(w: np.ndarray) -> np.ndarray:
            piece = w.reshape(h, 3, -1, *w.shape[1:])[:, which]
            return piece.transpose(2, 0, 1) if w.ndim == 2 else piece

        return view

    names = ("query", "key", "value")
    for what, shape in (("", (3 * d, d)), ("_bias", (3 * d,))):
        parts = (Part(f"{attention}/core/{our}{what}", (i,), third(number)) for number, our in enumerate(names))
        p.add(f"{name}.self_attention.query_key_value.{'bias' if what else 'weight'}", shape, *parts)
    p.linear(f"{name}.self_attention.dense", f"{attention}/core/out", (d, d), (i,), _from_heads(h), _whole)
    p.linear(f"{name}.mlp.dense_h_to_4h", f"{mlp}/core/up", (f, d), (i,), bias=_whole)
    p.linear(f"{name}.mlp.dense_4h_to_h", f"{mlp}/core/down", (d, f), (i,), bias=_whole)


def _llama_layer(p: _Plan, layer: int) -> None:
    """Add a layer of llama, mistral, qwen3, mixtral or deepseek_v3."""
    stack, i = p.place(layer)
    config, d = p.config, p.config.model.width
    name, attention, mlp = f"{p.prefix}layers.{layer}", f"{stack}/attention", f"{stack}/mlp"
    p.norm(f"{name}.input_layernorm", f"{attention}/norm", d, (i,))
    p.norm(f"{name}.post_attention_layernorm", f"{mlp}/norm", d, (i,))
    if config.attention.kind == "mla":
        _latent_attention(p, f"{name}.self_attn", f"{attention}/core", i)
    else:
        _head_attention(p, f"{name}.self_attn", f"{attention}/core", i)
    if config.moe.experts and stack == "blocks":
        _experts(p, name, f"{mlp}/core", i)
    else:
        _gated(p, f"{name}.mlp", f"{mlp}/core", (i,), config.mlp_width, _whole if config.mlp.bias else None)


def _head_attention(p: _Plan, name: str, path: str, i: int) -> None:
    config, d = p.config, p.config.model.width
    h, g, size = config.attention.heads, config.kv_heads, config.head_dim
    bias = config.attention.bias
    for their, our, heads in (("q_proj", "query", h), ("k_proj", "key", g), ("v_proj", "value", g)):
        view = _into_heads(heads)
        p.linear(f"{name}.{their}", f"{path}/{our}", (heads * size, d), (i,), view, view if bias else None)
    p.linear(f"{name}.o_proj", f"{path}/out", (d, h * size), (i,), _from_heads(h), _whole if bias else None)
    if config.attention.qk_norm:
        for their, our in (("q_norm", "query_norm"), ("k_norm", "key_norm")):
            p.add(f"{name}.{their}.weight", (size,), Part(f"{path}/{our}/scale", (i,), _whole))


def _latent_attention(p: _Plan, name: str, path: str, i: int) -> None:
    config, a, d = p.config, p.config.attention, p.config.model.width
    h, size, rotary, rank, values = a.heads, config.head_dim, config.rope_dim, a.kv_rank, config.value_dim

    def halves(path: str, before: tuple[slice, ...], first: int, view: View) -> tuple[Part, ...]:
        """Return the parts of a last axis whose places from ``first`` on are rotary; ours pairs i with i + R/2."""
        end, half = first + rotary, first + rotary // 2
        pieces = [(slice(0, first), slice(0, first))]
        if p.layout.interleaved:
            pieces += [(slice(first, half), slice(first, end, 2)), (slice(half, end), slice(first + 1, end, 2))]
        else:
            pieces += [(slice(first, end), slice(first, end))]

        def piece(which: slice) -> View:
            return lambda w: view(w)[..., which]

        return tuple(Part(path, (i, *before, ours), piece(theirs)) for ours, theirs in pieces)

    whole = slice(None)
    if a.q_rank is None:
        p.add(
            f"{name}.q_proj.weight",
            (h * (size + rotary), d),
            *halves(f"{path}/query", (whole, whole), size, _into_heads(h)),
        )
    else:
        p.linear(f"{name}.q_a_proj", f"{path}/query_down", (a.q_rank, d), (i,))
        p.add(f"{name}.q_a_layernorm.weight", (a.q_rank,), Part(f"{path}/query_norm/scale", (i,), _whole))
        shape = (h * (size + rotary), a.q_rank)
        p.add(f"{name}.q_b_proj.weight", shape, *halves(f"{path}/query_up", (whole, whole), size, _into_heads(h)))
    p.add(f"{name}.kv_a_proj_with_mqa.weight", (rank + rotary, d), *halves(f"{path}/kv_down", (whole,), rank, _linear))
    p.add(f"{name}.kv_a_layernorm.weight", (rank,), Part(f"{path}/kv_norm/scale", (i,), _whole))
    up = _into_heads(h)
    p.add(
        f"{name}.kv_b_proj.weight",
        (h * (size + values), rank),
        Part(f"{path}/key_up", (i,), lambda w: up(w)[..., :size]),
        Part(f"{path}/value_up", (i,), lambda w: up(w)[..., size:]),
    )
    p.linear(f"{name}.o_proj", f"{path}/out", (d, h * values), (i,), _from_heads(h))


def _gated(p: _Plan, name: str, path: str, index: Index, f: int, bias: View | None = None, names: str = "") -> None:
    d = p.config.model.width
    gate, up, down = names.split() if names else ("gate_proj", "up_proj", "down_proj")
    if p.config.mlp.kind in GATED:
        p.linear(f"{name}.{gate}", f"{path}/gate", (f, d), index, bias=bias)
    p.linear(f"{name}.{up}", f"{path}/up", (f, d), index, bias=bias)
    p.linear(f"{name}.{down}", f"{path}/down", (d, f), index, bias=bias)


def _experts(p: _Plan, name: str, path: str, i: int) -> None:
    moe, d, f = p.config.moe, p.config.model.width, p.config.expert_width
    mixtral = p.layout.family == "mixtral"
    name = f"{name}.block_sparse_moe" if mixtral and not p.layout.fused else f"{name}.mlp"
    p.linear(f"{name}.gate", f"{path}/router", (moe.experts, d), (i,))
    if moe.balance == "loss_free":
        p.add(f"{name}.gate.e_score_correction_bias", (moe.experts,), Part(f"{path}/router_bias", (i,), _whole))
    if p.layout.fused:
        p.add(
            f"{name}.experts.gate_up_proj",
            (moe.experts, 2 * f, d),
            Part(f"{path}/experts/gate", (i,), lambda w: w[:, :f].transpose(0, 2, 1)),
            Part(f"{path}/experts/up", (i,), lambda w: w[:, f:].transpose(0, 2, 1)),
        )
        down = Part(f"{path}/experts/down", (i,), lambda w: w.transpose(0, 2, 1))
        p.add(f"{name}.experts.down_proj", (moe.experts, d, f), down)
    else:
        for e in range(moe.experts):
            _gated(p, f"{name}.experts.{e}", f"{path}/experts", (i, e), f, names="w1 w3 w2" if mixtral else "")
    if moe.shared:
        _gated(p, f"{name}.shared_experts", f"{path}/shared", (i,), moe.shared * f)


# Checks and copies ----------------------------------------------------------------------------------------------------

# Buffers of old files, which hold no weights.
_BUFFERS = re.compile(r"(^|\.)(attn\.(masked_)?bias|rotary_emb\.((original_)?inv_freq|(cos|sin)_cached))$")
# Of a layer behind the model's own (multi-token prediction): names that only such a layer has, or those of any layer.
_NEXT = re.compile(
    r"(model\.)?layers\.(\d+)\.(enorm|hnorm|eh_proj|embed_tokens|shared_head\.(norm|head)|input_layernorm"
    r"|post_attention_layernorm|self_attn\.\w+|mlp\..+)"
    r"\.(weight|e_score_correction_bias|weight_scale(_inv)?|input_scale)$"  # scales: of 8-bit weights
)


def ignored(name: str, config: Config, raw: Mapping[str, object]) -> bool:
    """Return whether a tensor is left out: it is a buffer of an old file, or of a layer that predicts further tokens.

    Such a layer is no part of the function from tokens to logits.
    """
    if _BUFFERS.search(name):
        return True
    more, match = raw.get("num_nextn_predict_layers"), _NEXT.match(name)
    if not isinstance(more, int) or match is None or raw.get("model_type") != "deepseek_v3":
        return False
    return config.model.layers <= int(match[2]) < config.model.layers + more


def check(wanted: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Refuse a source whose tensors are not those of the plan.

    Raises:
      UserError: the line lists missing, unexpected and misshaped tensors by name.
    """
    missing = [name for name in wanted if name not in shapes]
    extra = [name for name in shapes if name not in wanted]
    bent = [
        f"{name} {list(shapes[name])} instead of {list(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in shapes and shapes[name] != tensor.shape
    ]
    kinds = (("missing", missing), ("not of this model", extra), ("of another shape", bent))
    problems = [f"{len(names)} {what}: {listed(names)}" for what, names in kinds if names]
    if problems:
        raise UserError(f"{where}: tensors do not fit config.json: {'; '.join(problems)}")


def fill(target: np.ndarray, corner: tuple[int, ...], part: Part, tensor: np.ndarray) -> None:
    """Copy the piece of a part that lies in ``target``, a box of the parameter that begins at ``corner``."""
    place: list[int | slice] = []
    piece: list[slice] = []
    index = (*part.at, *[slice(None)] * (target.ndim - len(part.at)))
    view = part.view(tensor)
    axis = 0
    for where, begin, size in zip(index, corner, target.shape, strict=True):
        if isinstance(where, int):
            if not begin <= where < begin + size:
                return
            place.append(where - begin)
            continue
        start = where.start or 0
        low, high = max(start, begin), min(start + view.shape[axis], begin + size)
        if low >= high:
            return
        place.append(slice(low - begin, high - begin))
        piece.append(slice(low - start, high - start))
        axis += 1
    target[tuple(place)] = view[tuple(piece)]


def touches(part: Part, corner: tuple[int, ...], size: tuple[int, ...]) -> bool:
    """Return whether a part may lie in a box, by its index alone."""
    for where, begin, length in zip(part.at, corner, size, strict=False):
        low = where if isinstance(where, int) else where.start or 0
        if isinstance(where, int) and not begin <= low < begin + length:
            return False
        if low >= begin + length:
            return False
    return True


def compose(tensor: Tensor, leaf: Callable[[str], np.ndarray]) -> np.ndarray:
    """Return a tensor [shape], float32, from our parameters by path."""
    out = np.empty(tensor.shape, np.float32)
    for part in tensor.parts:
        view = part.view(out)
        assert np.shares_memory(view, out), f"{tensor.name}: the view of {part.path} is a copy"
        view[...] = leaf(part.path)[part.at]
    return out
