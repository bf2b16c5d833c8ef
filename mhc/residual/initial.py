"""Initialise the maps' parameters by preset, in pure functions that the modules use too.

``N`` streams, ``D`` model width, ``R`` residual logits, ``k`` the sublayer's number in depth order, which may be
traced, home the stream k mod N. Everything is float32. The presets of mhc and its relatives (``g``: ``res_gap``):

=============  ========================  =====  =================  ================  ================================
preset         phi                       alpha  bias of pre        bias of post      bias of res
=============  ========================  =====  =================  ================  ================================
``home``       0                         0.01   1 at home, else -1 1 at home, else -1 the identity's logits, gap 8
``equivalent`` normal, std 1/sqrt(N D)   0      logit(1/N)         0                 the identity's logits, gap g
``fanin``      normal, std 1/sqrt(N D)   0.01   0                  0                 0
``v4``         normal, std 0.02          1      0                  0                 0
=============  ========================  =====  =================  ================  ================================

Relatives whose logits have no such gap say in ``Mixing.start`` what ``home`` and ``equivalent`` begin with.

No preset has zeros for both bias and phi: a sublayer would add the same to every stream, the streams would stay equal
for ever, and N of them would compute what one does.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from mhc.errors import did_you_mean
from mhc.residual.arrays import check_count
from mhc.residual.mixing import Mixing, mixing_of

_ALPHA = {"home": 0.01, "equivalent": 0.0, "fanin": 0.01, "v4": 1.0}
PRESETS = tuple(_ALPHA)
"""Presets of mhc and its relatives, the default first."""
HC_ALPHA = 0.01


def hc_params(
    n: int, width: int, *, k: int | jax.Array = 0, alpha: float | None = None, dynamic: bool = True
) -> dict[str, jax.Array]:
    """Return initial parameters of ``hc_maps``, under which the network is the plain residual network.

    Every w is 0, b_pre one-hot at the home stream, b_post 1, b_res the identity (arXiv:2409.19606).

    Args:
      alpha: the three gates; None: 0.01. dynamic: whether there are w's and gates.

    Returns:
      w_pre [D], w_post [D], w_res [D, N], alpha [3] if dynamic; b_pre [N], b_post [N], b_res [N, N].

    Raises:
      ValueError: n or width is no whole number of at least 1.
    """
    check_count("n", n)
    check_count("width", width)
    static = {
        "b_pre": jax.nn.one_hot(k % n, n, dtype=jnp.float32),
        "b_post": jnp.ones((n,), jnp.float32),
        "b_res": jnp.eye(n, dtype=jnp.float32),
    }
    if not dynamic:
        return static
    return static | {
        "w_pre": jnp.zeros((width,), jnp.float32),
        "w_post": jnp.zeros((width,), jnp.float32),
        "w_res": jnp.zeros((width, n), jnp.float32),
        "alpha": jnp.full((3,), HC_ALPHA if alpha is None else alpha, jnp.float32),
    }


def mhc_params(
    n: int,
    width: int,
    *,
    kind: str | Mixing = "mhc",
    init: str = "home",
    k: int | jax.Array = 0,
    key: jax.Array | None = None,
    alpha: float | None = None,
    res_gap: float = 4.0,
) -> dict[str, jax.Array]:
    """Return initial parameters of ``mhc_maps``: phi [N*D, 2N+R], alpha [3], bias [2N+R], and what the kind adds.

    Args:
      kind: a relative of mhc by its name, or a ``Mixing``, for options other than the defaults.
      init: one of ``PRESETS``; the table above says what each is.
      key: for phi and for random logits; where neither is random, none is needed (``draws``).
      alpha: the gates; None: the preset's. res_gap: see the table.

    Raises:
      ValueError: an unknown kind or preset, a preset or an N that the kind does not have, or no key where one is
        needed.
    """
    check_count("n", n)
    mixing = mixing_of(kind) if isinstance(kind, str) else kind
    return {
        "phi": mhc_phi(n, width, mixing.logits(n), init=init, key=key),
        "alpha": mhc_alpha(init=init, alpha=alpha, gates=2 + len(mixing.gates(n))),
        "bias": mhc_bias(n, kind=mixing, init=init, k=k, res_gap=res_gap, key=key),
        **mixing.own(),
    }


def draws(init: str, mixing: Mixing | None = None) -> bool:
    """Return whether a preset needs a key: for phi or, of a given mixing, for the residual logits.

    Raises:
      ValueError: an unknown preset.
    """
    return _checked(init) != "home" or (mixing is not None and mixing.draws)


def mhc_phi(n: int, width: int, logits: int, *, init: str = "home", key: jax.Array | None = None) -> jax.Array:
    """Return the projection phi [N*D, 2N+R] of a preset; ``logits`` is R.

    Raises:
      ValueError: an unknown preset, or no key where it is random.
    """
    check_count("n", n)
    check_count("width", width)
    shape = (n, width, 2 * n + logits)
    if not draws(init):
        return jnp.zeros((n * width, shape[-1]), jnp.float32)
    if key is None:
        raise ValueError(f"init={init!r} draws phi at random and needs a key")
    std = 0.02 if init == "v4" else (n * width) ** -0.5
    return (std * jax.random.normal(key, shape, jnp.float32)).reshape(n * width, shape[-1])


def mhc_alpha(*, init: str = "home", alpha: float | None = None, gates: int = 3) -> jax.Array:
    """Return the gates of a preset, or ``alpha`` for each of them. Raises ValueError for an unknown preset."""
    return jnp.full((gates,), _ALPHA[_checked(init)] if alpha is None else alpha, jnp.float32)


def mhc_bias(
    n: int,
    *,
    kind: str | Mixing = "mhc",
    init: str = "home",
    k: int | jax.Array = 0,
    res_gap: float = 4.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """Return the bias [2N+R] of a preset: of pre, post, then the residual logits.

    Raises:
      ValueError: an unknown kind or preset, a preset or an N that the kind does not have, or no key where the residual
        logits are random.
    """
    check_count("n", n)
    mixing = mixing_of(kind) if isinstance(kind, str) else kind
    if _checked(init) in ("fanin", "v4"):
        if not mixing.from_zero:
            words = f"init={init!r} starts from residual logits of zero, where {type(mixing).__name__} does not learn"
            raise ValueError(f"{words}; allowed: home, equivalent")
        return jnp.zeros((2 * n + mixing.logits(n),), jnp.float32)
    if mixing.draws:
        if key is None:
            raise ValueError(f"{type(mixing).__name__} draws its residual logits at random and needs a key")
        key = jax.random.fold_in(key, 1)  # apart from phi, which takes the key itself
    res = mixing.start(n, init=init, gap=res_gap, key=key)
    if init == "home":
        at_home = 2.0 * jax.nn.one_hot(k % n, n, dtype=jnp.float32) - 1.0
        return jnp.concatenate([at_home, at_home, res])
    # equivalent: the streams are read as their mean (17 saturates the sigmoid in float32), each gets the output once.
    read_mean = -math.log(n - 1) if n > 1 else 17.0
    return jnp.concatenate([jnp.full((n,), read_mean, jnp.float32), jnp.zeros((n,), jnp.float32), res])


def head_params(n: int, width: int, *, key: jax.Array) -> dict[str, jax.Array]:
    """Return initial parameters of ``collapse_head``: fn [N*D, N] normal with std 0.02, base [N] 0, scale [1] 1.

    Raises:
      ValueError: n or width is no whole number of at least 1.
    """
    check_count("n", n)
    check_count("width", width)
    fn = 0.02 * jax.random.normal(key, (n, width, n), jnp.float32)
    return {
        "fn": fn.reshape(n * width, n),
        "base": jnp.zeros((n,), jnp.float32),
        "scale": jnp.ones((1,), jnp.float32),
    }


def _checked(init: str) -> str:
    """Return a preset's name. Raises ValueError where there is none of this name."""
    if init not in PRESETS:
        near = did_you_mean(init, PRESETS) if isinstance(init, str) else ""
        raise ValueError(f"unknown preset {init!r}; allowed: {', '.join(PRESETS)}{near}")
    return init
