"""Test sizing for a TPU that is not there: command line, collectives of a program and, marked `process`, a compile."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mhc import xla_options
from mhc.chips import GIB
from mhc.config import Config, MeshConfig
from mhc.errors import UserError
from mhc.sharding import make_mesh
from mhc.train.step import Trainer
from tests.small import small
from tpu import compile_ahead, hlo, slices, table, xla_process
from tpu.slices import Slice


def test_collectives_of_a_loop_count_as_often_as_it_runs():
    """The program sums eight devices' 64 float32 in five rounds, then gathers 8 x 64 once."""
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
    """Parts lie in fusions and share a channel; instructions that share one elsewhere are different collectives."""
    text = """
%first (p: bf16[1,8]) -> bf16[4,8] {
  %a = bf16[4,8]{1,0} all-gather(%p), channel_id=7, dimensions={0}
}

%second (p: bf16[1,8]) -> bf16[4,8] {
  %a = bf16[4,8]{1,0} all-gather(%p), channel_id=7, dimensions={0}
}

%body (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %x = bf16[4,8]{1,0} fusion(%w), kind=kOutput, calls=%first
  %y = bf16[4,8]{1,0} fusion(%x), kind=kOutput, calls=%second
}

%below (p: (s32[], bf16[4,8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(12)
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%all-reduce-scatter.3 (p: f32[64]) -> f32[16] {
  %whole = f32[64]{0} all-reduce(%p), channel_id=11, to_apply=%add
  ROOT %part = f32[16]{0} dynamic-slice(%whole, %i), dynamic_slice_sizes={16}
}

ENTRY %main (x: bf16[1,8]) -> bf16[4,8] {
  %loop = (s32[], bf16[4,8]) while(%init), condition=%below, body=%body
  %start = (f32[2]{0}, f32[8]{0}) all-gather-start(%y), channel_id=9
  %done = f32[8]{0} all-gather-done(%start)
  %scattered = f32[16]{0} fusion(%z), kind=kCustom, calls=%all-reduce-scatter.3
  %b = f32[32]{0} reduce-scatter(%z), channel_id=1, dimensions={0}
  %c = f32[32]{0} reduce-scatter(%v), channel_id=1, dimensions={0}
}
"""
    assert hlo.collectives(text) == {
        "all-gather": hlo.Collectives(13, 12 * 4 * 8 * 2 + 20),
        "reduce-scatter": hlo.Collectives(3, (16 + 32 + 32) * 4),
    }


BUFFERS = """BufferAssignment:
allocation 0: size 512, thread-local:
 value: <1 add @0> (size=4,offset=0): f32[]
allocation 1: size 3000, parameter 11, shape |f32[750]| at ShapeIndex {}, maybe-live-out:
allocation 2: size 200, parameter 12, shape |f32[50]| at ShapeIndex {}:
allocation 3: size 1024, constant:
allocation 4: size 40, maybe-live-out:
allocation 5: size 16, output shape is |(f32[10], f32[750])|, maybe-live-out:
allocation 6: size 900000, color 1, preallocated-temp:
allocation 7: size 70000, preallocated-temp:
"""


def test_memory_is_what_lies_in_the_main_one():
    found = hlo.memory(BUFFERS)
    assert found == hlo.Memory(arguments=3200, outputs=56, temporaries=70000)
    assert found.peak == 73256


def test_what_a_program_that_does_not_fit_would_need():
    message = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    assert xla_process.used_bytes(message + "Used 30.50G of 15.75G hbm. Exceeded hbm capacity by 14.75G.") == 30.5 * GIB
    early = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (17.50G) "
    early += "exceeds available HBM (15.75G)."
    assert xla_process.used_bytes(early) == 17.5 * GIB
    assert xla_process.used_bytes("INTERNAL: Mosaic failed to compile TPU kernel") is None


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--xla_no_such_flag=1", "XLA_FLAGS: this release of XLA does not know --xla_no_such_flag=1"),
        (
            "--xla_backend_optimization_level=high",
            "XLA_FLAGS: given high for --xla_backend_optimization_level, which is no value of it",
        ),
        ("xla_dump_to=/x", "XLA_FLAGS: given xla_dump_to=/x, which is no file of flags; a flag begins with --"),
    ],
)
def test_flags_that_xla_refuses_are_one_line(flags: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA ends the process that it compiles in; without libtpu that process would not come to read them."""
    start = subprocess.Popen

    def read_flags(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return start([sys.executable, "-c", xla_options._READ_FLAGS], **options)

    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(subprocess, "Popen", read_flags)
    with pytest.raises(UserError, match=f"^{re.escape(line)}$"):
        xla_process.compile_step(small("mhc"), slices.parse_slice("v5e:2x2"), plan_only=True)


def test_another_end_of_the_compiler_is_no_refusal_of_flags() -> None:
    assert xla_options.refusal("INTERNAL: Mosaic failed to compile TPU kernel\nF0000 Check failed: x") is None


def test_a_plan_is_read_when_it_is_whole(tmp_path):
    """It is not read earlier, since XLA writes while its process is watched."""
    (tmp_path / "dump").mkdir()
    start = tmp_path / "dump" / "module_0001.jit__step.cl_1.after_optimizations"
    program = "%f (x: f32[]) -> f32[] {\n  ROOT %x = f32[] parameter(0)\n}\n\nENTRY %main () -> f32[] {\n"
    assert xla_process._planned(tmp_path) is None
    Path(f"{start}-buffer-assignment.txt").write_text(BUFFERS)
    Path(f"{start}_after_buffer_assignment.txt").write_text(program)
    assert xla_process._planned(tmp_path) is None
    Path(f"{start}_after_buffer_assignment.txt").write_text(program + "}\n\n")
    assert xla_process._planned(tmp_path) == (BUFFERS, program + "}\n\n")


def test_a_process_is_waited_for_until_there_is_enough():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    answers = iter([False, True])
    usage = xla_process._wait(process, lambda: next(answers))
    assert process.returncode == -signal.SIGKILL and usage.ru_maxrss > 0
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    xla_process._wait(process, lambda: False)
    assert process.returncode == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "v7p:2x2x1"], "--topology: 'v7p:2x2x1', allowed: v4, v5e, v5p, v6e and a shape"),
        (["--topology", "v5p:4x4"], "--topology: 'v5p:4x4', allowed: 3 sides, such as v5p:4x4x8"),
        (
            ["--topology", "v5e:2x2", "--json", "/nowhere/a.json"],
            "--json: cannot write /nowhere/a.json, allowed: a file",
        ),
        (["--smallest", "v5"], "--smallest: 'v5', allowed: v4, v5e, v5p, v6e (did you mean"),
        (
            ["--topology", "v5e:2x2", "--config.mesh.fsdp=8"],
            "config.mesh: data -1 x fsdp 8 x tensor 1 x expert 1 does not fit v5e:2x2; their product must be 4",
        ),
        (
            ["--topology", "v5e:2x2", "--config.mesh.fsdp", "3"],
            "config.mesh: data -1 x fsdp 3 x tensor 1 x expert 1 does not fit v5e:2x2; their product must be 4",
        ),
        (
            ["--topology", "v5e:2x3", "--config.mesh.fsdp=3"],
            "--topology v5e:2x3: the rows of a micro-batch, train.batch_size / train.accumulation = 8, are split over "
            "mesh data 2 x fsdp 3 x expert 1 = 6, allowed: a divisor of 8; listed slices of v5e: 2x2, 2x4, 4x4, 4x8, ",
        ),
        (
            ["--smallest=v5e", "--config.mesh.fsdp=4"],
            "--config.mesh.fsdp=4: --smallest chooses the mesh, allowed: with",
        ),
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


@pytest.mark.parametrize(
    "mesh", [{"fsdp": 8}, {"fsdp": 2, "tensor": 2}, {"fsdp": 2, "expert": 2, "tensor": 2}], ids=str
)
def test_what_a_layout_determines_is_what_arrays_take(mesh):
    """They are the sizes of the shards of the arrays' own shardings."""
    config = small("mhc", moe={"experts": 4}, train={"batch_size": 64}, mesh={"data": 1, **mesh})
    trainer = Trainer(config, make_mesh(config.mesh, jax.devices()[: math.prod(mesh.values())]))
    for part, found in (("params", "parameters"), ("opt_state", "optimizer")):
        shapes, layouts = (jax.tree.leaves(getattr(tree, part)) for tree in (trainer.abstract, trainer.layout))
        taken = sum(math.prod(y.shard_shape(x.shape)) * x.dtype.itemsize for x, y in zip(shapes, layouts, strict=True))
        assert getattr(compile_ahead.held(config), found) == taken


def test_streams_between_the_passes():
    """They are rows a device x T x N x D x bytes, before each group of blocks: of all 4 blocks, or of every third."""
    sizes = {"layers": 4, "width": 16}
    config = small("mhc", model=sizes, train={"batch_size": 64}, mesh={"data": 1, "fsdp": 4})
    numbers = config.data.sequence_length * 4 * 16
    assert compile_ahead.held(config).streams == 16 * numbers * 4 * 4
    half = dataclasses.replace(config.mesh, tensor=2, fsdp=2)
    assert compile_ahead.held(dataclasses.replace(config, mesh=half)).streams == 32 * numbers // 2 * 4 * 4
    model = dataclasses.replace(config.model, remat="streams", remat_blocks=3, dtype="bfloat16")
    assert compile_ahead.held(dataclasses.replace(config, model=model)).streams == 16 * numbers * 2 * 2


def test_the_search_chooses_micro_batches_only_where_the_config_does_not():
    four = Slice("v5e", "2x2")
    given = list(compile_ahead.candidates(small(train={"batch_size": 64, "accumulation": 4}), four))
    assert {config.train.accumulation for config in given} == {4}
    free = list(compile_ahead.candidates(small(train={"batch_size": 64}), four))
    assert free[0].mesh.fsdp == 4
    for config in free:
        shards = config.mesh.fsdp * config.mesh.expert
        assert 64 % (config.train.accumulation * shards) == 0
    # What fits easily is done at once; one row a device remains as the last resort.
    counts = [config.train.accumulation for config in free if config.mesh == free[0].mesh]
    assert counts == [1, 16]


def test_a_slice_that_cannot_hold_the_step_is_not_compiled(monkeypatch):
    """29 billion parameters, 16 bytes each with moments and gradient, exceed four chips of 95 GiB, not eight."""
    tried = []

    def planned(config: Config, slice_: Slice, *, plan_only: bool) -> xla_process.Outcome:
        tried.append((str(slice_), config.train.accumulation))
        fits = len(tried) > 1
        memory = hlo.Memory(10, 0, 20) if fits else None
        return xla_process.Outcome(memory, "", None if fits else 200 * GIB, {}, None, None, None, 1.0, 1.0, GIB)

    monkeypatch.setattr(xla_process, "compile_step", planned)
    shapes = {name: jax.ShapeDtypeStruct((27 * 2**18, 4096), jnp.float32) for name in ("mlp/core/up",)}
    moments = {f"{name}/mlp/core/up": shape for name in ("mu", "nu") for shape in shapes.values()}
    monkeypatch.setattr(compile_ahead, "_shapes", lambda config: (shapes, moments))
    found = compile_ahead.smallest(small(train={"batch_size": 64}), "v5p")
    assert [name for name, _ in tried] == ["v5p:2x2x2", "v5p:2x2x2"]
    assert tried[0][1] < tried[1][1] == 8
    assert [one["fits"] for one in found] == [False, True]
    assert found[0]["per_device_bytes"]["temporaries"] is None


REPORT = {
    "topology": "v5p:2x2x2",
    "mesh": {"data": 1, "fsdp": 4, "tensor": 2, "expert": 1},
    "accumulation": 8,
    "rows_per_device": 5,
    "per_device_bytes": {"parameters": GIB, "optimizer": 2 * GIB, "temporaries": None, "peak": 3.5 * GIB},
    "collectives": {"all-gather": {"count": 7, "bytes": GIB}},
    "cpu_seconds": 40.2,
}


def test_a_table_of_reports(tmp_path, capsys):
    """The last report of a search's list counts; kinds of collectives that nobody uses are left out."""
    (tmp_path / "a.json").write_text(json.dumps([{}, REPORT]))
    (tmp_path / "b.json").write_text(json.dumps({**REPORT, "collectives": {}}))
    table.main([str(tmp_path / "a.json"), str(tmp_path / "b.json")])
    head, _, first, second = capsys.readouterr().out.splitlines()
    assert head == (
        "| report | slice | mesh | micro-batches x rows | parameters | optimizer | peak | all-gather | CPU s |"
    )
    assert first == "| a | v5p:2x2x2 | fsdp 4, tensor 2 | 8 x 5 | 1.0 | 2.0 | 3.5 | 1.0 in 7 | 40 |"
    assert second == "| b | v5p:2x2x2 | fsdp 4, tensor 2 | 8 x 5 | 1.0 | 2.0 | 3.5 |  | 40 |"
    (tmp_path / "c.json").write_text("[]")
    with pytest.raises(UserError, match=r"c\.json: no report"):
        table.main([str(tmp_path / "c.json")])


def test_the_lock_of_libtpu_is_no_missing_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "0")  # so that it is put back
    monkeypatch.delenv("ALLOW_MULTIPLE_LIBTPU_LOAD")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")

    def locked(**options: object) -> None:
        assert os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
        raise RuntimeError('ABORTED: Internal error when accessing libtpu multi-process lockfile. Run "$ sudo rm x".')

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", locked)
    with pytest.raises(UserError, match="libtpu is in use by another process") as raised:
        slices.devices_of(slices.parse_slice("v5e:2x2"))
    assert "sudo" not in str(raised.value) and "libtpu has no" not in str(raised.value)


@pytest.mark.process
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install -e '.[tpu]'")
def test_two_steps_compile_at_once() -> None:
    command = [sys.executable, "-m", "tpu.compile_ahead", "--config", "configs/dense_10m.py", "--topology", "v5e:2x2"]
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    root = Path(__file__).parents[2]
    both = [
        subprocess.Popen(
            [*command, "--plan"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=root, env=environment
        )
        for _ in range(2)
    ]
    ends = [(process.communicate(timeout=900)[1], process.returncode) for process in both]
    assert ends == [(b"", 0)] * 2


@pytest.mark.process
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install -e '.[tpu]'")
def test_a_step_compiles_for_a_slice(tmp_path):
    """Its plan already has the memory and the collectives of the whole compilation."""
    command = [sys.executable, "-m", "tpu.compile_ahead", "--config", "configs/dense_10m.py", "--topology", "v5e:2x2"]
    fields = ["--config.model.layers=2", "--config.residual.kind=plain", "--config.mesh.fsdp=4"]
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    found = []
    for number, options in enumerate((["--plan"], [])):
        out = tmp_path / f"{number}.json"
        arguments = [*command, *fields, f"--json={out}", *options]
        root = Path(__file__).parents[2]
        done = subprocess.run(arguments, capture_output=True, text=True, cwd=root, env=environment, timeout=900)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(out.read_text()))
    plan, whole = found
    assert whole["fits"] and whole["mesh"]["fsdp"] == 4 and whole["flops"] > 0 and plan["flops"] is None
    sizes = whole["per_device_bytes"]
    assert sizes["optimizer"] >= 2 * sizes["parameters"]
    assert sizes["parameters"] + sizes["optimizer"] < sizes["arguments"]
    assert {**sizes, "code": None, "peak": sizes["peak"] - sizes["code"]} == plan["per_device_bytes"]
    assert whole["collectives"] == plan["collectives"]
    assert whole["collectives"]["all-gather"]["count"] > 7 * 2


@pytest.mark.process
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install -e '.[tpu]'")
def test_attention_over_depth_holds_what_docs_topologies_counts(tmp_path: Path) -> None:
    """Beyond plain a plan holds at most 1.15 of J (J + 1) sources and a running sum, at 24 layers in blocks of 8."""
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    model = {"layers": 24, "width": 1024, "dtype": "bfloat16", "remat": "full"}
    rows, length, blocks = 4, 4096, 2 * 24 // 8
    fields = {f"model.{name}": value for name, value in model.items()} | {
        "attention.heads": 8,
        "data.sequence_length": length,
        "train.batch_size": rows,
    }
    temporaries = {}
    for kind, options in (("plain", {}), ("attn_res", {"residual.block": 8})):
        report = tmp_path / f"{kind}.json"
        given = {**fields, "residual.kind": kind, **options}
        command = [sys.executable, "-m", "tpu.compile_ahead", "--config", "configs/default.py", "--topology"]
        command += ["v5p:1x1x1", "--plan", "--json", str(report), *(f"--config.{k}={v}" for k, v in given.items())]
        subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, check=True, timeout=900)
        temporaries[kind] = json.loads(report.read_text())["per_device_bytes"]["temporaries"]
    stream = 2 * rows * length * 1024  # bytes of [T, D]
    assert temporaries["attn_res"] - temporaries["plain"] <= 1.15 * (blocks * (blocks + 1) + 1) * stream
