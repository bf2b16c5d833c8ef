"""Make H_res from a token's residual logits; each file has the way of one relative of mhc.

Reads, writes and gates of all of them are alike (``mhc.residual.manifold``). A ``Mixing`` says how many residual logits
a token has, what bias they start from, and what H_res they give.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from mhc import kinds
from mhc.residual.runner import ManifoldRunner


@dataclasses.dataclass(frozen=True)
class Mixing:
    """Maps the R residual logits of a token to H_res [N, N].

    A subclass is a frozen dataclass. Its fields are options of its kind (fields of ``residual.*``) or ``sublayers``,
    the S of the network; the topology hands it those that it names.
    """

    runner: ClassVar[type[ManifoldRunner] | None] = None
    """The same in numpy, for exported models; None: they are refused."""
    exact: ClassVar[frozenset[str]] = frozenset()
    """What holds of H_res to rounding, whatever the logits are: ``rows`` and ``columns`` sum to one; ``signs``: no
    entry is negative; ``norm``: the spectral norm is at most 1; ``isometry``: H^T H = I."""
    draws: ClassVar[bool] = False
    """Whether the initial residual logits are random, so that every preset needs a key."""
    from_zero: ClassVar[bool] = True
    """Whether residual logits of zero, the presets ``fanin`` and ``v4``, can be trained from."""

    def logits(self, n: int) -> int:
        """Return R, the number of residual logits of a token. Raises ValueError for an N that it does not have."""
        raise NotImplementedError

    def initial(self, n: int, gap: float) -> jax.Array:
        """Return the bias [R], float32, from which H_res starts near the identity.

        The logits of the identity are ``gap`` above all others. Nothing calls this where ``start`` is overridden.
        """
        raise NotImplementedError

    def start(self, n: int, *, init: str, gap: float, key: jax.Array | None = None) -> jax.Array:
        """Return the bias [R], float32, of the presets ``home`` and ``equivalent``.

        Args:
          gap: ``res_gap``, which ``equivalent`` takes. key: given where ``draws`` is True.
        """
        return self.initial(n, 8.0 if init == "home" else gap)

    def gates(self, n: int) -> tuple[int, ...]:
        """Return how many consecutive residual logits share each gate alpha, for the gates after those of pre and post.

        The numbers sum to R.
        """
        return (self.logits(n),)

    def own(self) -> dict[str, jax.Array]:
        """Return the initial values, float32, of parameters that a connection has beside phi, alpha and bias.

        Their names are fields of the mixing: ``with_own`` puts the values there before H_res is computed.
        """
        return {}

    def with_own(self, parameters: Mapping[str, jax.Array]) -> Self:
        """Return this mixing with the values of a connection's own parameters."""
        return dataclasses.replace(self, **parameters) if parameters else self

    def check(self, n: int) -> None:
        """Refuse an N that does not exist, or a mixing that lacks what it needs. Raises ValueError."""
        self.logits(n)

    def multiplies(self, n: int) -> int:
        """Return the multiply-adds that make one H_res from its logits, if they are enough to count."""
        return 0

    def order_under(self, other: Mixing, n: int) -> np.ndarray | None:
        """Return the order [R] of residual logits under which ``other`` projects the same matrix.

        ``other`` is the same mixing under another convention. None stands for the order that they have.
        """
        return None

    def reference(self, logits: jax.Array, n: int) -> jax.Array:
        """Return H_res [..., N, N] of logits [..., R], in the dtype of the logits, as the definition writes it."""
        raise NotImplementedError

    def __call__(self, logits: jax.Array, n: int) -> jax.Array | None:
        """Return H_res [N, N, ...] of logits [R, ...], tokens last as the kernels have them; None: the identity."""
        return jnp.moveaxis(self.reference(jnp.moveaxis(logits, 0, -1), n), (-2, -1), (0, 1))


def mixing_of(kind: str, **options: object) -> Mixing:
    """Return the mixing of a kind, with those of the options that it has.

    Raises:
      ValueError: the kind is unknown, or none that mixes by residual logits.
    """
    spec = kinds.known().get(kind)
    if spec is None or not spec.mixing:
        have = ", ".join(name for name, other in kinds.known().items() if other.mixing)
        raise ValueError(f"unknown kind {kind!r}; allowed: {have}")
    return configured(kinds.referred(spec.mixing), options)


def configured(mixing: type[Mixing], options: dict[str, object]) -> Mixing:
    """Return a mixing made with those of the options that are fields of it."""
    fields = {field.name for field in dataclasses.fields(mixing)}
    return mixing(**{name: value for name, value in options.items() if name in fields})
