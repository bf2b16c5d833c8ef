"""Compile one training step for a TPU slice in a process of its own, and read what XLA wrote about it.

The process gives its memory back, can be stopped once the wanted part is done, and takes a crash of the compiler with
it. XLA first plans: it partitions the program, schedules it, and assigns every buffer a place in the chip's memory.
Then it generates machine code for each fusion, which takes several times as long and changes none of the plan.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from mhc import config as configs
from mhc import xla_options
from mhc.config import Config
from mhc.errors import UserError
from tpu import hlo
from tpu.slices import Slice, devices_of, parse_slice

POLL_SECONDS = 0.5
_USED = (
    re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm"),
    re.compile(r"required for HLO temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM"),
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Outcome(NamedTuple):
    """Holds the result of compiling a step. Sizes are bytes of a device's HBM; FLOPs and bytes are XLA's counts."""

    memory: hlo.Memory | None  # None: the step does not fit
    program: str  # the scheduled program as XLA writes it; empty where the step does not fit
    used: int | None  # what a step that does not fit would have needed at least
    collectives: dict[str, hlo.Collectives]
    code: int | None  # this and the next two are None unless code was generated
    flops: float | None
    bytes_accessed: float | None
    seconds: float
    cpu_seconds: float
    host_bytes: int  # largest resident size of the process


def compile_step(config: Config, slice_: Slice, *, plan_only: bool) -> Outcome:
    """Compile the step of a config on its mesh, with ``plan_only`` no further than XLA's plan.

    Raises:
      UserError: libtpu is missing, XLA refuses the environment's XLA_FLAGS, or the mesh does not fit the slice or the
        batch.
      RuntimeError: the compiler failed; the message has its last lines.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps({"config": configs.to_json(config), "slice": str(slice_)}))
        start = time.perf_counter()
        with (folder / "log").open("w") as log:
            command = [sys.executable, "-m", "tpu.xla_process", name]
            root = Path(__file__).parents[1]
            process = subprocess.Popen(command, cwd=root, stdout=log, stderr=subprocess.STDOUT)
            try:
                usage = _wait(process, lambda: plan_only and _planned(folder) is not None)
            finally:
                if process.returncode is None:
                    process.kill()
        seconds = time.perf_counter() - start
        result = folder / "result.json"
        answer = json.loads(result.read_text()) if result.exists() else {}
        if "error" in answer:
            raise UserError(answer["error"])
        plan = _planned(folder)
        if plan is None and "used" not in answer:
            text = (folder / "log").read_text(errors="replace")
            refusal = xla_options.refusal(text)
            if refusal is not None:
                raise UserError(refusal)
            raise RuntimeError("the compiler failed:\n" + "\n".join(text.splitlines()[-20:]))
        return Outcome(
            hlo.memory(plan[0]) if plan and "used" not in answer else None,
            plan[1] if plan and "used" not in answer else "",
            answer.get("used"),
            hlo.collectives(plan[1]) if plan else {},
            answer.get("code"),
            answer.get("flops"),
            answer.get("bytes_accessed"),
            round(seconds, 1),
            round(usage.ru_utime + usage.ru_stime, 1),
            usage.ru_maxrss * 1024,
        )


def _wait(process: subprocess.Popen[bytes], enough: Callable[[], bool]) -> resource.struct_rusage:
    """Wait until the process ends, or stop it once ``enough()`` is true; return the resources it used."""
    while True:
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        if not ended and enough():
            process.kill()
            ended, status, usage = os.wait4(process.pid, 0)
        if ended:
            process.returncode = os.waitstatus_to_exitcode(status)  # nobody else can wait for it now
            return usage
        time.sleep(POLL_SECONDS)


def _planned(folder: Path) -> tuple[str, str] | None:
    """Return (buffer assignment, program after it) once XLA has written both to the end, None before."""
    ends = ("-buffer-assignment", "_after_buffer_assignment")
    files = [list(folder.glob(f"dump/*jit__step*.after_optimizations{end}.txt")) for end in ends]
    if not all(files):
        return None
    # The program is written last, and its last computation ends like this.
    buffers, program = (matches[0].read_text() for matches in files)
    return (buffers, program) if "\nENTRY " in program and program.endswith("\n}\n\n") else None


def used_bytes(message: str) -> int | None:
    """Return the bytes that XLA says a program needs which does not fit; None for another complaint.

    XLA may complain before it has counted everything, so the program needs at least so much.
    """
    matches = [match for pattern in _USED if (match := pattern.search(message))]
    return round(float(matches[0][1]) * _UNITS[matches[0][2]]) if matches else None


def main(folder: Path) -> None:
    """Run as the process: read the job from the folder, compile, and write the result there."""
    job = json.loads((folder / "job.json").read_text())
    try:
        result = _compile(configs.from_json(job["config"]), parse_slice(job["slice"]), folder / "dump")
    except UserError as error:
        result = {"error": str(error)}
    (folder / "result.json").write_text(json.dumps(result))


def _compile(config: Config, slice_: Slice, dump: Path) -> dict[str, Any]:
    """Compile the step; return {code, flops, bytes_accessed}, or {used} if it does not fit."""
    import jax
    import jax.numpy as jnp

    from mhc import sharding
    from mhc.train.step import Trainer

    mesh = sharding.make_mesh(config.mesh, devices_of(slice_))
    sharding.check_batch(
        config.train.batch_size // config.train.accumulation, mesh, "train.batch_size / train.accumulation"
    )
    trainer = Trainer(config, mesh)
    layout = sharding.batch_sharding(mesh)
    shape = (config.train.batch_size, config.data.sequence_length)
    fields = {"tokens": "int32", "targets": "int32", "segment_ids": "int32", "positions": "int32", "weights": "float32"}
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.dtype(d), sharding=layout) for name, d in fields.items()}
    state = jax.tree.map(
        lambda leaf, layout: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout),
        trainer.abstract,
        trainer.layout,
    )
    lowered = trainer.step.lower(state, batch)  # type: ignore[attr-defined]
    try:
        compiled = lowered.compile(compiler_options={"xla_dump_to": str(dump)})
    except jax.errors.JaxRuntimeError as error:
        used = used_bytes(str(error))
        if used is None:
            raise
        return {"used": used}
    cost = compiled.cost_analysis() or {}
    return {
        "code": compiled.memory_analysis().generated_code_size_in_bytes,
        "flops": cost.get("flops"),
        "bytes_accessed": cost.get("bytes accessed"),
    }


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main(Path(sys.argv[1]))
