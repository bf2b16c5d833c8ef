"""Hyper-Connections in a Flax Linen model, by Flax's own bridge: three spirals again, and the connections train.

    python examples/linen_classifier.py --kind mhc

An nnx module that a Linen module makes itself would not be trained, and is refused. Needs jax, flax and optax, and
`mhc.residual` of this project.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from mhc import cli, residual
from mhc.errors import UserError
from mhc.residual import HyperConnection

CLASSES = 3


class Mlp(nn.Module):
    """A sublayer: its own norm, then a two-layer MLP. It returns what is added to the stream, not the sum."""

    width: int

    @nn.compact
    def __call__(self, u: jax.Array) -> jax.Array:
        return nn.Dense(self.width)(nn.gelu(nn.Dense(2 * self.width)(nn.RMSNorm()(u))))


class Classifier(nn.Module):
    """[B, 2] points to [B, CLASSES] logits."""

    width: int
    depth: int
    kind: str

    @nn.compact
    def __call__(self, points: jax.Array) -> jax.Array:
        connections = [
            nnx.bridge.to_linen(HyperConnection, self.width, k, kind=self.kind, name=f"connection_{k}")
            for k in range(self.depth)
        ]
        x = connections[0].expand(nn.Dense(self.width)(points))  # once
        for connection in connections:
            x = connection(x, Mlp(self.width))
        return nn.Dense(CLASSES)(connections[-1].collapse(x))  # once


def spirals(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (points [count, 2] float32, labels [count] int32): three arms of a spiral with a little noise."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    radius = np.sqrt(rng.uniform(0.02, 1.0, count))
    angle = 8.0 * radius + 2 * np.pi * labels / CLASSES + 0.3 * rng.normal(size=count)
    points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    return points.astype(np.float32), labels.astype(np.int32)


def main(arguments: Sequence[str]) -> int:
    """Train the model, and return the exit code. Raises UserError for an argument that is not allowed."""
    parser = cli.Parser(
        description="Learn to tell three spirals apart with a Flax Linen model.",
        example="python examples/linen_classifier.py --kind hc --steps 200",
    )
    parser.add_argument("--kind", default="mhc", choices=residual.kinds(), help="residual topology (default: mhc)")
    parser.add_argument("--steps", type=int, default=100, help="of the training (default: 100)")
    parser.add_argument("--width", type=int, default=32, help="of the streams (default: 32)")
    parser.add_argument("--depth", type=int, default=6, help="in sublayers (default: 6)")
    args = parser.parse_args(arguments)
    for name in ("steps", "width", "depth"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}: given {getattr(args, name)}, allowed: 1 or more")
    model = Classifier(args.width, args.depth, args.kind)
    start: dict[str, Any] = model.init(jax.random.key(0), spirals(1, seed=0)[0])["params"]
    optimizer = optax.adam(3e-3)

    def loss_of(params: Any, points: jax.Array, labels: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, points)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    @jax.jit
    def train_step(params: Any, state: Any, points: jax.Array, labels: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, points, labels)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    params, state = start, optimizer.init(start)
    for step in range(args.steps):
        params, state, loss = train_step(params, state, *spirals(128, seed=step))
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step:4d}  loss {float(loss):.3f}", flush=True)
    points, labels = spirals(1000, seed=10**6)
    logits = jax.jit(lambda params, points: model.apply({"params": params}, points))(params, points)
    accuracy = float(np.mean(np.argmax(logits, axis=-1) == labels))
    change = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), params, start)
    moved = max((max(jax.tree.leaves(leaf)) for name, leaf in change.items() if name.startswith("conn")), default=0.0)
    print(f"{args.kind}: {100 * accuracy:.1f} % of unseen points right (by chance {100 / CLASSES:.0f} %)")
    print(f"the connections' parameters moved by up to {moved:.3f}")
    return 0


if __name__ == "__main__":
    cli.run_main(main)
