"""Read the hyper-connections of a deepseek_v4 model, and nothing else of its files.

A layer has two, around attention and around the feed-forward part, of three tensors each: ``fn`` [2N+N², N·D] (rows
pre, post, res; columns stream-major), ``base`` [2N+N²] and ``scale`` [3]. With m the normalised streams of a token the
logits are scale_k (fn m)_k + base_k, and the maps are those of mhc under the Sinkhorn preset ``deepseek``. The learned
collapse has ``fn`` [N, N·D], ``base`` [N] and ``scale`` [1].

The published files name them ``layers.I.hc_attn_fn`` and ``hc_head_fn``; a folder that transformers saved has
``model.layers.I.attn_hc.fn`` and ``model.hc_head.hc_fn``.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from pathlib import Path
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mhc.errors import UserError
from mhc.interop.folder import INDEX, SINGLE, HfFolder
from mhc.interop.safetensors import listed
from mhc.residual.functional import Maps, maps_from_logits
from mhc.residual.manifold import ManifoldMaps
from mhc.residual.streams import StreamTopology
from mhc.residual.wrapper import HyperConnection

log = logging.getLogger(__name__)

FAMILY = "deepseek_v4"
SUBLAYERS = ("attn", "ffn")  # of a layer, in depth order
TENSORS = ("fn", "base", "scale")

_IN_LAYER = re.compile(r"((?:.*\.)?)layers\.(\d+)\.(?:hc_(attn|ffn)_(fn|base|scale)|(attn|ffn)_hc\.(fn|base|scale))")
_AT_END = re.compile(r"((?:.*\.)?)(?:hc_head_(fn|base|scale)|hc_head\.(?:hc_)?(fn|base|scale))")
_FURTHER_TOKENS = re.compile(r"(?:.*\.)?mtp\..*")  # layers that predict tokens after the next one

# The config's fields that no tensor's shape tells, with the values that the family's config class has.
_DEFAULTS = {"hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6}


class _Place(NamedTuple):
    """Describes which tensor a name means; layer and sublayer are None for the learned collapse."""

    prefix: str
    layer: int | None
    sublayer: str | None
    tensor: str


def _place(name: str) -> _Place | None:
    """Return which tensor of hyper-connections a name means; None: it means another tensor."""
    if _FURTHER_TOKENS.fullmatch(name):
        return None
    if match := _IN_LAYER.fullmatch(name):
        prefix, layer, *rest = match.groups()
        sublayer, tensor = filter(None, rest)
        return _Place(prefix, int(layer), sublayer, tensor)
    if match := _AT_END.fullmatch(name):
        prefix, *rest = match.groups()
        (tensor,) = filter(None, rest)
        return _Place(prefix, None, None, tensor)
    return None


class Weights(NamedTuple):
    """Holds the tensors of one hyper-connection or of the learned collapse, float32, in the published shapes."""

    fn: np.ndarray
    base: np.ndarray
    scale: np.ndarray


class _Tensors(HfFolder):
    """Maps the names of a folder's hyper-connection tensors to the tensors, float32. No other tensor is read."""

    def __init__(self, folder: str | Path):
        self.beyond: set[int] = set()  # layers after the last one, which predict further tokens
        super().__init__(folder)

    def number(self, name: str, least: int | float) -> int | float | None:
        """Return a number of config.json, whole where ``least`` is an int; None where it is absent or null.

        Raises:
          UserError: it is no such number, or below ``least``.
        """
        value = self.config.get(name)
        if value is None:  # a model with other inputs beside text has the fields of its text part apart
            text = self.config.get("text_config")
            value = text.get(name) if isinstance(text, dict) else None
        if value is None:
            return None
        allowed = int if isinstance(least, int) else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed) or not least <= value < math.inf:
            kind = "a whole number" if isinstance(least, int) else "a number"
            raise UserError(
                f"{self.path / 'config.json'}: {name}: given {value!r:.40}, allowed: {kind} from {least} on"
            )
        return value

    def wants(self, name: str) -> bool:
        place = _place(name)
        if place is None:
            return False
        layers = self.number("num_hidden_layers", 1)
        if layers is not None and place.layer is not None and place.layer >= layers:
            self.beyond.add(place.layer)
            return False
        return True


class ConnectionsFolder:
    """Gives the hyper-connections of a deepseek_v4 folder one at a time; S = 2L sublayers in depth order.

    Names, shapes and dtypes are checked when the folder is opened, from config.json and the headers of the files that
    hold such tensors. A file that holds none is not opened. Layers that predict further tokens are left out.

    Attributes:
      n, width: N and D.
      iters, eps: of the Sinkhorn iterations; ``eps`` is also added to the read weights.
      rms_eps: of the norm of the streams.

    Raises:
      UserError: as ``HfFolder``; no hyper-connection tensors, a layer without one of them, names of both layouts at
        once, a shape or dtype that does not fit, or a field of config.json that holds no such number.
    """

    def __init__(self, folder: str | Path):
        path = Path(folder)
        if (path / "checkpoints").is_dir() and not any((path / name).exists() for name in (SINGLE, INDEX)):
            raise UserError(f"{folder}: a run, allowed: a folder of Hugging Face")
        self.path = path
        self._source = _Tensors(path)
        self._names = self._named()
        self.layers = self._count_layers()
        self._check_complete()
        self.n, self.width = self._sizes()
        self._check_shapes()
        self.has_head = any(layer is None for layer, _, _ in self._names)
        self._read_constants()

    def __len__(self) -> int:
        return len(SUBLAYERS) * self.layers

    def weights(self, k: int) -> Weights:
        """Return the tensors of sublayer k, read now. Raises UserError for values that are not finite."""
        return self._read(k // len(SUBLAYERS), SUBLAYERS[k % len(SUBLAYERS)])

    def head(self) -> Weights:
        """Return the tensors of the learned collapse, read now. Raises UserError for values that are not finite."""
        return self._read(None, None)

    def static_maps(self, base: np.ndarray) -> Maps:
        """Return the maps that ``base`` [..., 2N+N²] gives without the part that depends on the token, float32."""
        return maps_from_logits(
            base, kind="mhc", preset="deepseek", iters=self.iters, map_eps=self.eps, sinkhorn_eps=self.eps
        )

    def connection(self, k: int) -> HyperConnection:
        """Return sublayer k as a connection with its parameters; the last one has the learned collapse, if there is."""
        collapses = self.has_head and k == len(self) - 1
        wrapped = HyperConnection(
            self.width,
            k,
            kind="mhc",
            rngs=nnx.Rngs(0),  # of initial values that are replaced here
            sublayers=len(self),
            n=self.n,
            sinkhorn="deepseek",
            iters=self.iters,
            sinkhorn_eps=self.eps,
            map_eps=self.eps,
            rms_eps=self.rms_eps,
            collapse="head" if collapses else "mean",
        )
        weights, maps = self.weights(k), cast(ManifoldMaps, wrapped.connection)
        maps.phi[...] = self._by_stream(weights.fn)
        maps.alpha[...], maps.bias[...] = jnp.asarray(weights.scale), jnp.asarray(weights.base)
        if collapses:
            weights, head = self.head(), cast(StreamTopology, wrapped.residual).head
            head.fn[...] = self._by_stream(weights.fn)
            head.scale[...], head.base[...] = jnp.asarray(weights.scale), jnp.asarray(weights.base)
        return wrapped

    def _by_stream(self, fn: np.ndarray) -> jax.Array:
        """Return a projection [R, N·D] as this project has it, [N, D, R]."""
        return jnp.asarray(fn.reshape(-1, self.n, self.width).transpose(1, 2, 0))

    def _read(self, layer: int | None, sublayer: str | None) -> Weights:
        read = {}
        for tensor in TENSORS:
            name = self._names[layer, sublayer, tensor]
            read[tensor] = self._source[name]
            if not np.isfinite(read[tensor]).all():
                raise UserError(f"{self.path}: {name} holds numbers that are not finite")
        return Weights(**read)

    def _named(self) -> dict[tuple[int | None, str | None, str], str]:
        """Return the names by layer, sublayer and tensor, after a check that they are of one layout."""
        places = {name: place for name in self._source if (place := _place(name)) is not None}
        in_layers = {name: place for name, place in places.items() if place.layer is not None}
        if not in_layers:
            family = self._source.config.get("model_type")
            hint = f"; model_type is {family!r:.40}, allowed: {FAMILY}" if family != FAMILY else ""
            example = "layers.0.hc_attn_fn, model.layers.0.attn_hc.fn, …"
            raise UserError(f"{self.path}: no tensors of hyper-connections ({example}){hint}")
        layouts: dict[tuple[str, bool], str] = {}
        for name, place in sorted(in_layers.items()):
            layouts.setdefault((place.prefix, f".{place.sublayer}_hc." in name), name)
        if len(layouts) > 1:
            raise UserError(f"{self.path}: tensors named in two ways: {listed(layouts.values())}")
        ((self._prefix, self._dotted),) = layouts
        names: dict[tuple[int | None, str | None, str], str] = {}
        for name, place in places.items():
            key = (place.layer, place.sublayer, place.tensor)
            if place.prefix != self._prefix:
                continue  # a collapse of something else
            if key in names:
                raise UserError(f"{self.path}: tensors named in two ways: {names[key]}, {name}")
            names[key] = name
        return names

    def _count_layers(self) -> int:
        """Return L by config.json, or by the tensors where it does not say."""
        given = self._source.number("num_hidden_layers", 1)
        return int(given) if given is not None else 1 + max(layer for layer, _, _ in self._names if layer is not None)

    def _check_complete(self) -> None:
        """Raise UserError where a layer, or the learned collapse, lacks a tensor."""

        def spelled(layer: int, sublayer: str, tensor: str) -> str:
            last = f"{sublayer}_hc.{tensor}" if self._dotted else f"hc_{sublayer}_{tensor}"
            return f"{self._prefix}layers.{layer}.{last}"

        every = ((layer, s, t) for layer in range(self.layers) for s in SUBLAYERS for t in TENSORS)
        lacking = [spelled(*key) for key in itertools.islice((key for key in every if key not in self._names), 5)]
        at_end = {tensor for layer, _, tensor in self._names if layer is None}
        if at_end:
            separator = "hc_head.hc_" if self._dotted else "hc_head_"
            lacking += [f"{self._prefix}{separator}{tensor}" for tensor in TENSORS if tensor not in at_end]
        if lacking:
            more = " and more" if len(lacking) > 4 else ""
            raise UserError(f"{self.path}: {self.layers} layers, but no tensor {', '.join(lacking[:4])}{more}")

    def _sizes(self) -> tuple[int, int]:
        """Return (N, D) by config.json, or by the shapes where it does not say."""
        given_n, given_width = (self._source.number(name, 1) for name in ("hc_mult", "hidden_size"))
        base, fn = (self._names[0, "attn", tensor] for tensor in ("base", "fn"))
        if given_n is None:
            size = math.prod(self._source.shape(base))
            given_n = math.isqrt(size + 1) - 1  # 2N + N² = (N + 1)² - 1
            if given_n < 1 or given_n * (given_n + 2) != size:
                raise UserError(f"{self.path}: {base} is {list(self._source.shape(base))}, allowed: [2N+N²]")
        if given_width is None:
            given_width = max(1, self._source.shape(fn)[-1] // int(given_n)) if self._source.shape(fn) else 1
        return int(given_n), int(given_width)

    def _check_shapes(self) -> None:
        """Raise UserError where a tensor has another shape than N and D imply, or another dtype than floats."""
        n, flat = self.n, self.n * self.width
        for (layer, _, tensor), name in sorted(self._names.items(), key=lambda item: item[1]):
            rows, gates = (n, 1) if layer is None else (2 * n + n * n, 3)
            allowed = {"fn": (rows, flat), "base": (rows,), "scale": (gates,)}[tensor]
            shape = self._source.shape(name)
            if shape != allowed:
                raise UserError(
                    f"{self.path}: {name} is {list(shape)}, allowed: {list(allowed)} for hc_mult={n} and "
                    f"hidden_size={self.width}"
                )
            self._source.check_dtype(name)

    def _read_constants(self) -> None:
        """Take the constants of config.json, and warn of what was taken for granted."""
        given = {
            name: self._source.number(name, 1 if isinstance(value, int) else 0.0) for name, value in _DEFAULTS.items()
        }
        absent = [f"{name}={_DEFAULTS[name]}" for name, value in given.items() if value is None]
        if absent:
            log.warning(
                "%s: config.json does not say, so the family's defaults are taken: %s", self.path, listed(absent)
            )
        values = {name: _DEFAULTS[name] if value is None else value for name, value in given.items()}
        self.iters = int(values["hc_sinkhorn_iters"])
        self.eps, self.rms_eps = float(values["hc_eps"]), float(values["rms_norm_eps"])
        family = self._source.config.get("model_type")
        if family not in (None, FAMILY):
            log.warning("%s: model_type is %r; its maps are computed as those of %s", self.path, family, FAMILY)
        if self._source.beyond:
            layers = ", ".join(map(str, sorted(self._source.beyond)))
            log.warning("%s: left out, after the last of num_hidden_layers: layers %s", self.path, layers)
        if not self.has_head:
            log.warning("%s: no tensors hc_head: a collapse takes the mean of the streams", self.path)


def hyper_connections(folder: str | Path) -> list[HyperConnection]:
    """Return the hyper-connections of a deepseek_v4 folder: 2L in depth order, attention first, float32.

    They compute the maps of that model for given streams [..., N, D], and ``connections[-1].collapse`` is its learned
    collapse. The sublayers themselves are not read, so that of a folder of hundreds of gigabytes only the tensors of
    hyper-connections are (about 2.8 MB a sublayer at N = 4, D = 7168).

    Args:
      folder: config.json with safetensors, in one file or in shards with an index, as published or as transformers
        saved it.

    Raises:
      UserError: as ``ConnectionsFolder``, or for a tensor with values that are not finite.
    """
    source = ConnectionsFolder(folder)
    return [source.connection(k) for k in range(len(source))]
