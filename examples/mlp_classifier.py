"""Put Hyper-Connections into a classifier of your own: residual MLP blocks tell the arms of three spirals apart.

    python examples/mlp_classifier.py                # mhc, four streams
    python examples/mlp_classifier.py --kind plain   # the same network with plain residuals

This needs jax, flax and optax, and `mhc.residual` of this project.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mhc import cli, residual
from mhc.errors import UserError
from mhc.residual import HyperConnection

CLASSES = 3


class Block(nnx.Module):
    """Runs a sublayer: its own norm, then a two-layer MLP. It returns what is added to the stream, not the sum."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, u: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(self.norm(u))))


class Classifier(nnx.Module):
    """Maps points [B, 2] to logits [B, CLASSES]."""

    def __init__(self, width: int, depth: int, kind: str, rngs: nnx.Rngs):
        self.embed = nnx.Linear(2, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(depth)])
        self.connections = nnx.List([HyperConnection(width, k, kind=kind, rngs=rngs) for k in range(depth)])
        self.head = nnx.Linear(width, CLASSES, rngs=rngs)

    def __call__(self, points: jax.Array) -> jax.Array:
        x = self.connections[0].expand(self.embed(points))  # once
        for connection, block in zip(self.connections, self.blocks, strict=True):
            x = connection(x, block)
        return self.head(self.connections[-1].collapse(x))  # once


def spirals(count: int, seed: int) -> tuple[jax.Array, jax.Array]:
    """Draw points on three arms of a spiral, with a little noise; return (points [count, 2] float32, labels int32)."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    radius = np.sqrt(rng.uniform(0.02, 1.0, count))
    angle = 8.0 * radius + 2 * np.pi * labels / CLASSES + 0.3 * rng.normal(size=count)
    points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    return jnp.asarray(points, jnp.float32), jnp.asarray(labels, jnp.int32)


def cross_entropy(model: Classifier, points: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the loss in nats a point."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model(points), labels))


@nnx.jit
def train_step(model: Classifier, optimizer: nnx.Optimizer, points: jax.Array, labels: jax.Array) -> jax.Array:
    """Update the model by one batch; return the loss before the update."""
    loss, grads = nnx.value_and_grad(cross_entropy)(model, points, labels)
    optimizer.update(model, grads)
    return loss


def main(arguments: Sequence[str]) -> int:
    """Train the model, and return the exit code. Raises UserError for an argument that is not allowed."""
    parser = cli.Parser(
        description="Learn to tell three spirals apart with residual MLP blocks.",
        example="python examples/mlp_classifier.py --kind hc --steps 200",
    )
    parser.add_argument("--kind", default="mhc", choices=residual.kinds(), help="residual topology (default: mhc)")
    parser.add_argument("--steps", type=int, default=100, help="of the training (default: 100)")
    parser.add_argument("--width", type=int, default=32, help="of the streams (default: 32)")
    parser.add_argument("--depth", type=int, default=6, help="in sublayers (default: 6)")
    args = parser.parse_args(arguments)
    for name in ("steps", "width", "depth"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}: given {getattr(args, name)}, allowed: 1 or more")
    model = Classifier(args.width, args.depth, args.kind, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    for step in range(args.steps):
        loss = train_step(model, optimizer, *spirals(128, seed=step))
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step:4d}  loss {float(loss):.3f}", flush=True)
    points, labels = spirals(1000, seed=10**6)
    accuracy = float(np.mean(np.argmax(nnx.jit(lambda m, p: m(p))(model, points), axis=-1) == labels))
    print(f"{args.kind}: {100 * accuracy:.1f} % of unseen points right (by chance {100 / CLASSES:.0f} %)")
    return 0


if __name__ == "__main__":
    cli.run_main(main)
