"""Test that the kernels for TPU compile, forward and backward, for chips that are not there."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHIPS = ("v5e:1x1", "v5p:1x1x1", "v6e:1x1")
WIDTHS = (1024, 1280, 1920, 2560, 4096, 7168)
STREAMS = (2, 4, 8)

PROGRAM = """
import json, sys
import numpy as np
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from mhc.kernels import Form, pallas_tpu
from tpu.slices import devices_of, parse_slice

chip, cases = sys.argv[1], json.loads(sys.argv[2])
devices = devices_of(parse_slice(chip))
layout = NamedSharding(Mesh(np.array(devices[:1]), ("x",)), PartitionSpec())
tokens = 2048

def shape(dtype, *axes):
    return jax.ShapeDtypeStruct(axes, jnp.dtype(dtype), sharding=layout)

for n, width, each in cases:
    columns = (2 + n) * n
    form = Form(each=each, squash="tanh" if each else "sigmoid", offset=0.0, eps=1e-6)

    def chain(x, y, post, res, phi, gain, bias):
        x, raw, u = pallas_tpu.enter(form, x, phi, gain, bias)
        x, more, v = pallas_tpu.follow(form, x, y + u, post, res, phi, gain, bias)
        return pallas_tpu.write(x, v, post, res), raw, more

    def passes(*arguments):
        out, pull = jax.vjp(chain, *arguments)
        return pull(out)

    arguments = (
        shape("bfloat16", tokens, n, width), shape("bfloat16", tokens, width), shape("float32", n, tokens),
        shape("float32", n, n, tokens), shape("float32", n, width, columns), shape("float32", columns),
        shape("float32", columns),
    )
    jax.jit(passes).lower(*arguments).compile()
    print("compiled", chip, n, width, flush=True)
"""


def compiled(chip: str, cases: list[tuple[int, int, bool]]) -> int:
    """Return how many cases (N, D, whether streams are normalised one by one) a process has compiled for a chip."""
    command = [sys.executable, "-c", PROGRAM, chip, json.dumps(cases)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.count("compiled ")


@pytest.mark.process
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install -e '.[tpu]'")
@pytest.mark.parametrize("chip", CHIPS)
def test_the_kernels_compile(chip: str) -> None:
    """One process a chip: libtpu is loaded once."""
    cases = [(n, width, each) for n in STREAMS for width in WIDTHS for each in ((False, True) if n == 4 else (False,))]
    assert compiled(chip, cases) == len(cases)
