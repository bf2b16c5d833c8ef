"""Compute the outputs of a checkpoint for given rows: logits and hidden states."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mhc import config as configs
from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.regression.rows import Rows

if TYPE_CHECKING:
    import jax

    from mhc.model.decoder import Decoder, SublayerView

FORMAT = 1  # of golden files


class Logits(NamedTuple):
    """Holds the logits of the M tokens of some rows, in their order."""

    values: np.ndarray  # float32 [M, K], K = V where all are kept
    ids: np.ndarray | None  # int32 [M, K]: of which tokens, the most probable first; None: of all
    log_z: np.ndarray  # float32 [M]: log-sum-exp over the whole vocabulary
    best: np.ndarray  # int32 [M]: the most probable token


class Outputs(NamedTuple):
    """Holds a model's outputs for some rows: the content of a golden file."""

    about: dict[str, Any]  # format, checkpoint, steps, config, tokenizer (hash), vocabulary, points, versions, device
    rows: Rows
    logits: Logits
    hidden: np.ndarray | None  # float32 [P, M, D] of the points in ``about``


def points(layers: int) -> list[str]:
    """Return the names of the places where hidden states are taken, in the order of the computation."""
    sublayers = [f"block {k}, {name}" for k in range(layers) for name in ("attention", "feed-forward")]
    return ["embedding", *sublayers, "head input"]


def compute(
    checkpoint: Checkpoint,
    rows: Rows,
    *,
    ids: np.ndarray | None = None,
    top_k: int = 0,
    activations: bool = True,
    batch_size: int = 4,
    tell: Callable[[int], None] = lambda rows: None,
) -> Outputs:
    """Return the logits of every token, and hidden states at ``points``.

    Args:
      ids: int32 [M, K], the tokens whose logits are kept; None: those that ``top_k`` says.
      top_k: how many logits a token keeps without ``ids``: those of the most probable tokens; 0: all.
      activations: whether hidden states are kept, 4 (S + 2) D bytes a token.
      batch_size: rows at once, filled up to the mesh's shards; it changes the last bits at most.
      tell: called after each batch with the rows done.
    """
    import jax

    from mhc.data import tokenizers
    from mhc.eval.common.program import Program, filled, multiple

    config, mesh = checkpoint.config, checkpoint.mesh
    program = Program(checkpoint, _Forward(0 if ids is not None else min(top_k, config.vocab_size), activations))
    size = multiple(batch_size, mesh)
    inputs = rows._asdict()
    if ids is not None:
        inputs["ids"] = np.zeros((*rows.tokens.shape, ids.shape[-1]), np.int32)
        inputs["ids"][rows.valid] = ids
    batches = (
        filled({name: array[start : start + size] for name, array in inputs.items()}, size)
        for start in range(0, len(rows.tokens), size)
    )
    parts: list[dict[str, np.ndarray]] = []
    for batch, outputs in program.each(batches, list(inputs)):
        valid = batch["segment_ids"] > 0
        parts.append({name: array[valid] for name, array in outputs.items()})
        tell(min(len(parts) * size, len(rows.tokens)))
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    device = jax.devices()[0]
    about = {
        "format": FORMAT,
        "checkpoint": checkpoint.name,
        "steps": list(checkpoint.steps),
        "config": json.loads(configs.to_json(config)),  # as a golden file keeps it: a tuple is a list
        "tokenizer": tokenizers.load(config.data.tokenizer).content_hash,
        "vocabulary": config.vocab_size,
        "points": points(config.model.layers),
        "versions": _versions(),
        "device": f"{mesh.size} × {device.device_kind}",
    }
    logits = Logits(joined["values"], joined.get("ids"), joined["log_z"], joined["best"])
    return Outputs(about, rows, logits, np.moveaxis(joined["hidden"], 1, 0) if activations else None)


@dataclasses.dataclass(frozen=True)
class _Forward:
    """Computes the fields of `Logits` [B, T, ...], and hidden states [B, T, P, D], of rows [B, T]."""

    top_k: int  # logits kept a token, where the batch does not name them by its ids; 0: all
    activations: bool

    def __call__(self, decoder: Decoder, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        import jax
        import jax.numpy as jnp

        def observe(view: SublayerView) -> dict[str, jax.Array]:
            return {"h": view.topology.collapse(view.state).astype(jnp.float32)}

        tokens, segments, positions = (batch[name] for name in Rows._fields)
        out = decoder.forward(tokens, segments, positions, observe if self.activations else None)
        logits = decoder.logits(out.h).astype(jnp.float32)
        outputs = {"log_z": jax.nn.logsumexp(logits, axis=-1), "best": jnp.argmax(logits, axis=-1)}
        if "ids" in batch or self.top_k:
            chosen = batch["ids"] if "ids" in batch else jax.lax.top_k(logits, self.top_k)[1]
            outputs |= {"ids": chosen, "values": jnp.take_along_axis(logits, chosen, axis=-1)}
        else:
            outputs["values"] = logits
        if self.activations:
            topology = decoder.residual
            first = topology.collapse(topology.expand(decoder.embed_tokens(tokens, positions)))
            every = [first[None], out.observed["h"], out.h[None]]
            stacked = jnp.concatenate([h.astype(jnp.float32) for h in every])
            outputs["hidden"] = jnp.moveaxis(stacked, 0, 2)
        return outputs


def _versions() -> dict[str, str]:
    from importlib import metadata

    return {name: metadata.version(name) for name in ("mhc-jax", "jax", "flax", "numpy")}
