"""Run the topologies in numpy; an exported model carries this code in its ``model.py``.

``mhc.interop.export`` copies the source of a topology's runner and of what it derives from into that file. So a runner
uses numpy, ``math``, ``itertools`` and the helpers below, and nothing else. Arrays are float64; B batch, T tokens, N
streams, D width.
"""

import numpy as np


def sigmoid(x):
    """Return 1 / (1 + e^-x)."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def softmax(x, axis=-1):
    """Return e^x / sum e^x over an axis."""
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


class Runner:
    """Defines what flows between the sublayers of a model; ``state`` is the runner's own."""

    def __init__(self, model):
        self.model, self.r, self.n = model, model.c["residual"], model.c["residual"]["n"]

    def w(self, name):
        """Return a parameter by its name in the exported file."""
        return self.model.w(name)

    def expand(self, x):
        """Return the state before sublayer 0 from the embedding x [B, T, D]."""
        raise NotImplementedError

    def read(self, state, name, k):
        """Return (the input u [B, T, D] of sublayer k, what ``write`` needs); ``name`` is that of the connection."""
        raise NotImplementedError

    def write(self, state, y, context):
        """Return the next state from the sublayer's output y [B, T, D]."""
        raise NotImplementedError

    def collapse(self, state):
        """Return the hidden state [B, T, D] after the last sublayer."""
        raise NotImplementedError


class StreamRunner(Runner):
    """Runs N streams [B, T, N, D] that maps read, mix and write; a subclass gives the maps."""

    def expand(self, x):
        return np.repeat(x[:, :, None], self.n, axis=2)

    def maps(self, x, name):
        """Return pre [B, T, N], post [B, T, N], res [B, T, N, N] from the streams."""
        raise NotImplementedError

    def read(self, state, name, k):
        pre, post, res = self.maps(state, name)
        return (pre[..., None] * state).sum(2), (post, res)

    def write(self, state, y, context):
        post, res = context
        return res @ state + post[..., None] * y[:, :, None]

    def collapse(self, state):
        if self.r["collapse"] != "head":
            return state.sum(2) if self.r["collapse"] == "sum" else state.mean(2)
        flat = state.reshape(*state.shape[:2], -1)
        m = flat / np.sqrt((flat * flat).mean(-1, keepdims=True) + self.r["rms_eps"])
        raw = m @ self.w("residual.head.fn").reshape(flat.shape[-1], -1)
        weights = sigmoid(self.w("residual.head.scale") * raw + self.w("residual.head.base")) + self.r["map_eps"]
        return (weights[..., None] * state).sum(2)


class ManifoldRunner(StreamRunner):
    """Computes the maps of mhc and its relatives; a subclass says what H_res the residual logits give.

    With ``single_pass`` the state is (streams, the weights [B, T, N] of the next read).
    """

    def expand(self, x):
        streams = super().expand(x)
        if not self.r.get("single_pass"):
            return streams
        return streams, np.broadcast_to(np.eye(self.n)[0], streams.shape[:-1])

    def read(self, state, name, k):
        if not self.r.get("single_pass"):
            return super().read(state, name, k)
        streams, weights = state
        return (weights[..., None] * streams).sum(2), self.maps(streams, name)

    def write(self, state, y, context):
        if not self.r.get("single_pass"):
            return super().write(state, y, context)
        pre, post, res = context
        return super().write(state[0], y, (post, res)), pre

    def collapse(self, state):
        if not self.r.get("single_pass"):
            return super().collapse(state)
        return (state[1][..., None] * state[0]).sum(2)

    def maps(self, x, name):
        n = self.n
        flat = x.reshape(*x.shape[:2], -1)
        m = flat / np.sqrt((flat * flat).mean(-1, keepdims=True) + self.r["rms_eps"])
        phi, bias = self.w(f"{name}.phi"), self.w(f"{name}.bias")
        alpha = np.repeat(self.w(f"{name}.alpha"), [n, n, *self.gates(n, len(bias) - 2 * n)])
        pre, post, res = np.split(m @ phi.reshape(flat.shape[-1], -1) * alpha + bias, [n, 2 * n], axis=-1)
        pre = sigmoid(pre) + (self.r["map_eps"] if self.r["sinkhorn"] == "deepseek" else 0.0)
        return pre, 2.0 * sigmoid(post), self.mixing_of(name, res, n)

    def gates(self, n, logits):
        """Return how many of the residual logits share each gate after those of pre and post."""
        return [logits]

    def mixing_of(self, name, logits, n):
        """Return H_res [..., N, N] of the connection ``name``; a mixing with parameters of its own reads them here."""
        return self.mixing(logits, n)

    def mixing(self, logits, n):
        """Return H_res [..., N, N] of residual logits [..., R]."""
        raise NotImplementedError
