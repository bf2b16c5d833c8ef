"""Compile a function of a model and run it over a checkpoint, for all evaluation programs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mhc.config import Config
from mhc.eval.common.checkpoints import Checkpoint
from mhc.model.decoder import DecoderDefinition
from mhc.sharding import BATCH_AXES, jit, put_batch, replicated, threads_of_one_cpu, tracing_for

Batch = Mapping[str, np.ndarray]


def compiled(
    config: Config, mesh: Mesh | None, function: Callable[..., Any], *, donate: Sequence[int] = (), whole: bool = False
) -> Callable[..., Any]:
    """Return ``call(params, *arguments)``, which computes ``function(decoder, *arguments)`` in one compiled program.

    Args:
      config: of the model. It is resolved.
      mesh: that of the parameters; None where they lie on no mesh.
      donate: the numbers of those arguments whose memory the results may take, 0 for the first after ``params``.
      whole: every device gets the whole results, so that any process can read them.
    """
    definition = DecoderDefinition(config)

    def run(params: Any, *arguments: Any) -> Any:
        with tracing_for(mesh):
            return function(definition.bind(params), *arguments)

    options: dict[str, Any] = {"donate_argnums": tuple(number + 1 for number in donate)} if donate else {}
    if whole and mesh is not None:
        options["out_shardings"] = replicated(mesh)
    call: Callable[..., Any] = jit(run, mesh, **options)
    return call


# A second checkpoint of the same model is not compiled again. What is kept holds no parameters, as long as no function
# closes over them.
_kept = functools.lru_cache(maxsize=8)(compiled)


class Program:
    """Runs ``function(decoder, batch, *more)`` of a checkpoint, compiled once for each shape of its arguments.

    The results are whole on every device. Equal functions of models of equal config and mesh share one program.
    ``function`` must not hold arrays.
    """

    def __init__(self, checkpoint: Checkpoint, function: Callable[..., Any]) -> None:
        self._params, self._mesh = checkpoint.params, checkpoint.mesh
        self.shards = shards(checkpoint.mesh)
        self.compiled = _kept(checkpoint.config, checkpoint.mesh, function, whole=True)

    def put(self, batch: Batch) -> dict[str, jax.Array]:
        """Lay arrays [B, ...] out over the devices by rows; B is a multiple of ``shards``."""
        return put_batch(batch, self._mesh)

    def __call__(self, batch: Mapping[str, Any], *more: Any) -> Any:
        """Return what the function gives for a batch, on the devices."""
        result = self.compiled(self._params, batch, *more)
        # Where devices are threads of one CPU, few programs may wait for one another.
        return jax.block_until_ready(result) if threads_of_one_cpu(self._mesh) else result

    def each(self, batches: Iterable[Batch], fields: Sequence[str], *more: Any) -> Iterator[tuple[Batch, Any]]:
        """Yield each batch with its results as numpy arrays [B, ...], one batch ahead of the device.

        Args:
          batches: arrays [B, ...]. The rows are filled up to ``shards``; the results have none of the filling.
          fields: names of those arrays of a batch that the function takes, where the batch has them.
          more: what the function takes beside each batch.
        """
        waiting: tuple[Batch, Any] | None = None
        for batch in batches:
            inputs = {name: batch[name] for name in fields if name in batch}
            rows = multiple(len(next(iter(inputs.values()))), self._mesh)
            now = (batch, self(self.put(filled(inputs, rows)), *more))
            if waiting is not None:
                yield waiting[0], _fetched(*waiting, fields)
            waiting = now
        if waiting is not None:
            yield waiting[0], _fetched(*waiting, fields)


def _fetched(batch: Batch, result: Any, fields: Sequence[str]) -> Any:
    rows = next(len(batch[name]) for name in fields if name in batch)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:rows], result)


def shards(mesh: Mesh | None) -> int:
    """Return the number of parts that the rows of a batch are split in over the mesh; 1 without one."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def multiple(rows: int, mesh: Mesh | None) -> int:
    """Return the next number of rows, from ``rows`` on, that the mesh can share evenly."""
    return -(-rows // shards(mesh)) * shards(mesh)


def filled(batch: Batch, rows: int) -> dict[str, np.ndarray]:
    """Return the arrays [B, ...] of a batch with rows of zeros behind theirs, [rows, ...] each."""
    return {
        name: np.pad(array, ((0, rows - len(array)), *((0, 0),) * (array.ndim - 1))) if len(array) < rows else array
        for name, array in batch.items()
    }
