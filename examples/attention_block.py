"""Put Flax's own attention inside Hyper-Connections: a two-block transformer learns to reverse a sequence.

    python examples/attention_block.py --kind mhc

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

VOCABULARY, LENGTH = 8, 8


class AttentionBlock(nnx.Module):
    """Runs attention and feed-forward, each a sublayer with a connection of its own; ``layer`` counts blocks."""

    def __init__(self, width: int, layer: int, kind: str, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(
            num_heads=4, in_features=width, qkv_features=width, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.around_attention = HyperConnection(width, 2 * layer, kind=kind, rngs=rngs)
        self.around_mlp = HyperConnection(width, 2 * layer + 1, kind=kind, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.around_attention(x, lambda u: self.attention(self.norms[0](u)))
        return self.around_mlp(x, lambda u: self.down(nnx.gelu(self.up(self.norms[1](u)))))


class Reverser(nnx.Module):
    """Maps tokens [B, T] to logits [B, T, VOCABULARY]."""

    def __init__(self, width: int, kind: str, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, width, rngs=rngs)
        self.blocks = nnx.List([AttentionBlock(width, layer, kind, rngs) for layer in range(2)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        h = self.embed(tokens) + self.positions(jnp.arange(LENGTH))[None]
        x = self.blocks[0].around_attention.expand(h)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.blocks[-1].around_mlp.collapse(x)))


def cross_entropy(model: Reverser, tokens: jax.Array) -> jax.Array:
    """Return the loss against the reversed sequences, in nats a token."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens[:, ::-1]))


@nnx.jit
def train_step(model: Reverser, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    """Update the model by one batch; return the loss before the update."""
    loss, grads = nnx.value_and_grad(cross_entropy)(model, tokens)
    optimizer.update(model, grads)
    return loss


def main(arguments: Sequence[str]) -> int:
    """Train the model, and return the exit code. Raises UserError for an argument that is not allowed."""
    parser = cli.Parser(
        description="Learn to reverse sequences with Flax's attention.",
        example="python examples/attention_block.py --kind hc --steps 200",
    )
    parser.add_argument("--kind", default="mhc", choices=residual.kinds(), help="residual topology (default: mhc)")
    parser.add_argument("--steps", type=int, default=100, help="of the training (default: 100)")
    args = parser.parse_args(arguments)
    if args.steps < 1:
        raise UserError(f"--steps: given {args.steps}, allowed: 1 or more")
    model = Reverser(32, args.kind, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    rng = np.random.default_rng(0)
    for step in range(args.steps):
        loss = float(train_step(model, optimizer, jnp.asarray(rng.integers(0, VOCABULARY, (32, LENGTH)))))
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step:4d}  loss {loss:.3f} nats a token (a guess: {np.log(VOCABULARY):.3f})", flush=True)
    return 0


if __name__ == "__main__":
    cli.run_main(main)
