"""Refuse, or warn of, a HyperConnection within Flax Linen whose parameters the model would not train.

A Linen module owns what it gets by ``self.param``. An nnx module that one of its methods makes is made anew at every
call, with parameters that no optimiser sees: the model runs and its connections do not train.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
from flax import linen, nnx
from flax.nnx.bridge import wrappers


def refuse_within(class_name: str, arguments: str) -> None:
    """Refuse to make an nnx module in a method of a Linen module, but for ``nnx.bridge.ToLinen``, which registers it.

    Args:
      class_name: of the nnx module. arguments: what it is made of, for the message.

    Raises:
      RuntimeError: the module is made in such a method; the message has the line that works.
    """
    module = _linen_module()
    if module is not None:
        raise RuntimeError(
            f"{class_name} is made within {type(module).__name__}, a Flax Linen module, which would make it anew at "
            f"every call and train none of its parameters: write nnx.bridge.to_linen({class_name}, {arguments}, …), "
            "without rngs, in its place"
        )


def warn_of_constants(module: nnx.Module, state: Any) -> None:
    """Warn where a Linen module computes with an nnx module whose parameters are constants, while its input is traced.

    This happens if the nnx module was made elsewhere and is an attribute of the Linen module.
    """
    owner = _linen_module()
    if owner is None or not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state)):
        return
    params = jax.tree.leaves(nnx.state(module))
    if params and not any(isinstance(leaf, jax.core.Tracer) for leaf in params):
        warnings.warn(
            f"{type(module).__name__} is an attribute of {type(owner).__name__}, a Flax Linen module, which does not "
            "train its parameters: make it within by nnx.bridge.to_linen",
            stacklevel=4,
        )


def _linen_module() -> linen.Module | None:
    """Return the Linen module whose method runs; None: there is none, or it is the bridge, which owns parameters."""
    module: linen.Module | None = wrappers.current_linen_module()
    return None if isinstance(module, nnx.bridge.ToLinen) else module
