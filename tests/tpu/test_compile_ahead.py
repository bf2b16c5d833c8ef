"""Sizing for a TPU that is not there: command line, collectives of a program and, marked slow, a real compile."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mhc.config import MeshConfig
from mhc.errors import UserError
from mhc.sharding import make_mesh
from tests.small import small
from tpu import compile_ahead, hlo


def test_collectives_of_a_loop_count_as_often_as_it_runs():
    """Five rounds of a sum over eight devices of 64 float32, then one gather of 8 x 64."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=8), jax.devices()[:8])

    def program(x: jax.Array) -> jax.Array:
        def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            total = jax.lax.psum(carry, "fsdp")
            return jnp.sin(total) + carry, None

        def inside(x: jax.Array) -> jax.Array:
            looped, _ = jax.lax.scan(body, x, None, length=5)
            return jax.lax.all_gather(looped, "fsdp", axis=0, tiled=True)

        return jax.shard_map(inside, mesh=mesh, in_specs=P("fsdp"), out_specs=P(), check_vma=False)(x)

    shape = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    text = jax.jit(program).lower(shape).compile().as_text()
    assert text is not None
    found = hlo.collectives(text)
    assert found["all-reduce"] == hlo.Collectives(5, 5 * 64 * 4)
    assert found["all-gather"] == hlo.Collectives(1, 8 * 64 * 4)
    assert list(hlo.gathered_shapes(text)) == [(8, 64)]


def test_parts_of_one_asynchronous_collective_count_once():
    text = """
%body (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %a = bf16[4,8]{1,0} all-gather(%x), channel_id=7, dimensions={0}
  %b = bf16[4,8]{1,0} all-gather(%x), channel_id=7, dimensions={0}
}

%below (p: (s32[], bf16[4,8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(12)
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (x: bf16[1,8]) -> bf16[4,8] {
  %loop = (s32[], bf16[4,8]) while(%init), condition=%below, body=%body
  %start = (f32[2]{0}, f32[8]{0}) all-gather-start(%y), channel_id=9
  %done = f32[8]{0} all-gather-done(%start)
}
"""
    assert hlo.collectives(text) == {"all-gather": hlo.Collectives(13, 12 * 4 * 8 * 2 + 20)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "v7p:2x2x1"], "--topology: 'v7p:2x2x1', allowed: v4, v5e, v5p, v6e and a shape"),
        (["--topology", "v5p:4x4"], "--topology: 'v5p:4x4', allowed: 3 sides, such as v5p:4x4x8"),
        (["--smallest", "v5"], "--smallest: 'v5', allowed: v4, v5e, v5p, v6e (did you mean"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(arguments, message):
    with pytest.raises(UserError) as caught:
        compile_ahead.main(["--config", "configs/dense_10m.py", *arguments])
    assert message in str(caught.value)


def test_meshes_that_are_tried_use_every_chip_and_share_the_batch():
    config = small(moe={"experts": 8}, train={"batch_size": 64})
    tried = list(compile_ahead.meshes(config, 16))
    assert tried[0] == MeshConfig(data=1, fsdp=16)
    for mesh in tried:
        assert mesh.fsdp * mesh.tensor * mesh.expert == 16 and 64 % (mesh.fsdp * mesh.expert) == 0
    assert {mesh.expert for mesh in tried} == {1, 2, 4, 8}
    assert {mesh.expert for mesh in compile_ahead.meshes(small(train={"batch_size": 64}), 16)} == {1}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install -e '.[tpu]'")
def test_a_step_compiles_for_a_slice(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "tpu.compile_ahead", "--config", "configs/dense_10m.py", "--topology", "v5e:2x2"]
    fields = ["--config.model.layers=2", "--config.residual.kind=plain", "--config.mesh.fsdp=4", f"--json={out}"]
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    root = Path(__file__).parents[2]
    done = subprocess.run([*command, *fields], capture_output=True, text=True, cwd=root, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["fits"] and found["mesh"]["fsdp"] == 4
    assert found["per_device_bytes"]["optimizer"] >= 2 * found["per_device_bytes"]["parameters"]
    assert found["collectives"]["all-gather"]["count"] > 7 * 2
