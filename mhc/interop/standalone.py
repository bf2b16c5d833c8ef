"""Run a language model in the format of mhc with numpy alone. This file belongs to the folder that it lies in.

    python model.py 72 101 108          prints the five likeliest next tokens and their probabilities
    model = load("folder"); logits = model(tokens)      tokens [B, T] integers -> logits [B, T, V] float32

config.json holds ``model``: groups of fields that say what is computed. The weights are safetensors, float32, named by
layer; matrices are [in, out]. Every row is one document from position 0; all is computed in float64, without a cache.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np

# An exported file has the residual of its own model here instead of this line.
from mhc.residual.runner import Runner as Residual, sigmoid, softmax  # isort: skip


def load(folder=None):
    """Return the model of a folder; None for the folder of this file."""
    folder = Path(folder or Path(__file__).parent)
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                at = 8 + length + entry["data_offsets"][0]
                tensors[name] = np.memmap(path, "<f4", "r", at, tuple(entry["shape"]))
    return Model(json.loads((folder / "config.json").read_text())["model"], tensors)


def gelu(x):
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x * sigmoid(x)


ACTIVATIONS = {"relu": lambda x: np.maximum(x, 0), "gelu": gelu, "silu": silu}
GATES = {"glu": sigmoid, "geglu": gelu, "swiglu": silu}


class Model:
    """Computes logits; ``config`` holds the groups of config.json's ``model``, ``tensors`` the arrays by name."""

    def __init__(self, config, tensors):
        self.c, self.tensors = config, tensors
        self.first_values = np.zeros(())  # of layer 0's attention, where later layers mix them in
        self.residual = Residual(self)

    def w(self, name):
        return np.asarray(self.tensors[name], np.float64)

    def has(self, name):
        return name in self.tensors

    def __call__(self, tokens):
        c, tokens = self.c, np.asarray(tokens)
        width, length = c["model"]["width"], tokens.shape[1]
        x = self.w("embed.table")[tokens] * (math.sqrt(width) if c["model"]["embed_scale"] else 1.0)
        at = np.arange(length)
        if c["positions"]["kind"] == "learned":
            x = x + self.w("positions.table")[at]
        if c["positions"]["kind"] == "sinusoidal":
            angle = at[:, None] * 10_000.0 ** (-np.arange((width + 1) // 2) * 2 / width)
            x = x + np.stack([np.sin(angle), np.cos(angle)], -1).reshape(length, -1)[:, :width]
        x = self.norm(x, "embed_norm") if c["norm"]["embedding"] else x
        state, residual, k = self.residual.expand(x), self.residual, 0
        for layer in range(c["model"]["layers"]):
            for part, core in (("attention", self.attention), ("mlp", self.feed_forward)):
                name = f"layers.{layer}.{part}"
                u, context = residual.read(state, f"layers.{layer}.{part}_residual", k)
                u = self.norm(u, f"{name}.norm") if self.has(f"{name}.norm.scale") else u
                y = core(u, f"{name}.core", layer)
                y = self.norm(y, f"{name}.post_norm") if self.has(f"{name}.post_norm.scale") else y
                y = y * self.w(f"{name}.update") if self.has(f"{name}.update") else y
                state, k = residual.write(state, y, context), k + 1
        h = residual.collapse(state)
        h = self.norm(h, "final_norm") if self.has("final_norm.scale") else h
        logits = h @ (self.w("embed.table").T if c["head"]["tied"] else self.w("head.kernel"))
        cap = c["head"]["softcap"]
        return (logits if cap is None else cap * np.tanh(logits / cap)).astype(np.float32)

    def rms(self, x, name=None):
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c["norm"]["eps"])
        return x if name is None else x * self.w(f"{name}.scale")

    def norm(self, x, name):
        if self.c["norm"]["kind"] == "layernorm":
            x = x - x.mean(-1, keepdims=True)
        x = self.rms(x, name)
        return x + self.w(f"{name}.bias") if self.has(f"{name}.bias") else x

    # Attention --------------------------------------------------------------------------------------------------------

    def attention(self, x, name, layer):
        a, length = self.c["attention"], x.shape[1]
        heads = self.latent_heads if a["kind"] == "mla" else self.plain_heads
        q, k, v = heads(x, name)  # [B, T, H, K], [B, T, G, K], [B, T, G, J]
        if self.has(f"{name}.links.first_values.lam"):
            self.first_values = v if layer == 0 else self.first_values
            lam = self.w(f"{name}.links.first_values.lam")
            v = v if layer == 0 else lam[0] * v + lam[1] * self.first_values
        k, v = (np.repeat(y, q.shape[2] // y.shape[2], axis=2) for y in (k, v))
        scale = a["scale"] or 1.0 / math.sqrt(q.shape[-1])
        scores = np.einsum("bthk,buhk->bhtu", q, k, optimize=True) * scale
        if a["softcap"] is not None:
            scores = a["softcap"] * np.tanh(scores / a["softcap"])
        distance = np.arange(length)[:, None] - np.arange(length)
        scores = scores + self.bias(distance, q.shape[2])
        every, seen = a["global_every"], distance >= 0
        if a["window"] is not None and not (every and (layer + 1) % every == 0):
            seen &= distance < a["window"]
        first = np.arange(length) < a["prefix"]
        weights = softmax(np.where(seen | (first[:, None] & first), scores, -np.inf))
        y = np.einsum("bhtu,buhj->bthj", weights, v, optimize=True)
        y = np.einsum("bthj,hjd->btd", y, self.w(f"{name}.out"), optimize=True)
        return y + self.w(f"{name}.out_bias") if a["bias"] else y

    def plain_heads(self, x, name):
        a, out = self.c["attention"], []
        for which in ("query", "key", "value"):
            y = np.einsum("btd,dhk->bthk", x, self.w(f"{name}.{which}"), optimize=True)
            y = y + self.w(f"{name}.{which}_bias") if a["bias"] else y
            if which != "value":
                y = self.rms(y, f"{name}.{which}_norm") if a["qk_norm"] else y
                y = self.rotate(y)
            out.append(y)
        return out

    def latent_heads(self, x, name):
        a = self.c["attention"]
        if a["q_rank"] is None:
            q = np.einsum("btd,dhk->bthk", x, self.w(f"{name}.query"), optimize=True)
        else:
            latent = self.rms(x @ self.w(f"{name}.query_down"), f"{name}.query_norm")
            q = np.einsum("btq,qhk->bthk", latent, self.w(f"{name}.query_up"), optimize=True)
        plain, rotary = np.split(q, [a["head_dim"]], axis=-1)
        latent, shared = np.split(x @ self.w(f"{name}.kv_down"), [a["kv_rank"]], axis=-1)
        latent, shared = self.rms(latent, f"{name}.kv_norm"), self.rotate(shared[:, :, None])
        k = np.einsum("btc,chk->bthk", latent, self.w(f"{name}.key_up"), optimize=True)
        k = np.concatenate([k, np.broadcast_to(shared, (*k.shape[:3], shared.shape[-1]))], axis=-1)
        v = np.einsum("btc,chj->bthj", latent, self.w(f"{name}.value_up"), optimize=True)
        return np.concatenate([plain, self.rotate(rotary)], axis=-1), k, v

    def rotate(self, x):
        """Turn the pairs (i, i + K/2) of a head by position times frequency."""
        p, size, length = self.c["positions"], x.shape[-1], x.shape[1]
        if p["kind"] != "rope" or not size:
            return x
        theta, factor, o, gain = p["theta"], p["factor"], p["original_length"], 1.0
        power = size / max(size - 2, 1)
        if p["scaling"] == "ntk":
            theta *= factor**power
        if p["scaling"] == "dynamic":
            theta *= max(factor * length / o - (factor - 1.0), 1.0) ** power
        f = theta ** (-np.arange(size // 2) / (size // 2))
        keep = np.ones_like(f)  # share of a frequency that is not scaled
        if p["scaling"] == "linear":
            keep = np.zeros_like(f)
        if p["scaling"] == "llama3":
            low, high = p["low_frequency"], p["high_frequency"]
            keep = np.clip((o * f / (2 * math.pi) - low) / (high - low), 0, 1)
        if p["scaling"] == "yarn":
            turns = p["beta_fast"], p["beta_slow"]
            fast, slow = (size * math.log(o / (turn * 2 * math.pi)) / (2 * math.log(theta)) for turn in turns)
            low, high = max(math.floor(fast), 0), min(math.ceil(slow), size - 1)
            keep = 1 - np.clip((np.arange(size // 2) - low) / max(high - low, 1e-3), 0, 1)
            gain = p["attention_factor"] or 0.1 * math.log(factor) + 1.0
        f = f * keep + (0 if (keep == 1).all() else f / factor * (1 - keep))
        angle = np.arange(length)[:, None, None] * f
        cos, sin = gain * np.cos(angle), gain * np.sin(angle)
        left, right = np.split(x, 2, axis=-1)
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)

    def bias(self, distance, heads):
        p = self.c["positions"]
        if p["kind"] == "alibi":
            power = 2 ** math.floor(math.log2(heads))
            slopes = [2.0 ** (-8 * h / power) for h in range(1, power + 1)]
            slopes += [2.0 ** (-4 * h / power) for h in range(1, 2 * (heads - power), 2)]
            return -np.array(slopes)[:, None, None] * distance
        if p["kind"] == "relative_bias":
            exact, past = p["buckets"] // 2, np.maximum(distance, 0)
            share = np.log(np.maximum(past, 1).astype(np.float32) / np.float32(exact))
            share = share / np.float32(math.log(p["max_distance"] / exact))
            coarse = exact + (share * np.float32(p["buckets"] - exact)).astype(int)
            bucket = np.where(past < exact, past, np.minimum(coarse, p["buckets"] - 1))
            return np.moveaxis(self.w("positions.bias")[bucket], -1, 0)
        return 0.0

    # Feed-forward -----------------------------------------------------------------------------------------------------

    def hidden(self, x, w, bias):
        kind, clamp = self.c["mlp"]["kind"], self.c["mlp"]["clamp"]
        up = x @ w("up") + bias("up")
        if kind in ACTIVATIONS:
            return ACTIVATIONS[kind](up)
        gate = x @ w("gate") + bias("gate")
        return GATES[kind](gate if clamp is None else np.clip(gate, -clamp, clamp)) * up

    def dense(self, x, name):
        def bias(which):
            return self.w(f"{name}.{which}_bias") if self.c["mlp"]["bias"] else 0.0

        return self.hidden(x, lambda which: self.w(f"{name}.{which}"), bias) @ self.w(f"{name}.down") + bias("down")

    def feed_forward(self, x, name, layer):
        if not self.has(f"{name}.router"):
            return self.dense(x, name)
        moe = self.c["moe"]
        scores = x @ self.w(f"{name}.router")
        scores = softmax(scores) if moe["score"] == "softmax" else sigmoid(scores)
        order = scores + (self.w(f"{name}.router_bias") if self.has(f"{name}.router_bias") else 0.0)
        chosen = np.argsort(-order, axis=-1, kind="stable")[..., : moe["top_k"]]
        weights = np.zeros_like(scores)
        np.put_along_axis(weights, chosen, np.take_along_axis(scores, chosen, -1), -1)
        weights /= weights.sum(-1, keepdims=True) + 1e-20 if moe["normalize"] else 1.0
        y = self.dense(x, f"{name}.shared") if moe["shared"] else np.zeros_like(x)
        for e in range(moe["experts"]):
            taken = (chosen == e).any(-1)
            h = self.hidden(x[taken], lambda which, e=e: self.expert(name, which, e), lambda which: 0.0)
            y[taken] += moe["scale"] * weights[taken][:, e, None] * (h @ self.expert(name, "down", e))
        return y

    def expert(self, name, which, e):
        return np.asarray(self.tensors[f"{name}.experts.{which}"][e], np.float64)


if __name__ == "__main__":
    probabilities = softmax(load()([[int(token) for token in sys.argv[1:]]])[0, -1].astype(np.float64))
    for likely in np.argsort(-probabilities)[:5]:
        print(likely, round(float(probabilities[likely]), 4))
