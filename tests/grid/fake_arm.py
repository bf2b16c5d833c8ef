"""Run an arm that trains nothing: ``fake_arm.py WORKDIR ARM`` leaves a run's files, as its name or a file asks.

Behaviours, by what stands in ``WORKDIR/behaviour.json`` for the arm: ``finish`` (the default), ``fail``, ``full`` (of
the disk), ``halt`` and ``hang`` (until WORKDIR/go exists; SIGTERM ends it as a stopped run). Every start appends a line
to WORKDIR/starts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType


def stop(number: int, frame: FrameType | None) -> None:
    """Save and end, as a run does."""
    sys.stderr.write("saved\n")
    sys.exit(0)


signal.signal(signal.SIGTERM, stop)
workdir, arm = Path(sys.argv[1]), sys.argv[2]
folder = workdir / arm
asked = workdir / "behaviour.json"
behaviour = json.loads(asked.read_text()).get(arm, "finish") if asked.exists() else "finish"
(folder / "config.json").write_text("{}")
cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
seen = {"arm": arm, "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"), "cores": cores, "pid": os.getpid()}
with (workdir / "starts").open("a") as starts:
    starts.write(json.dumps(seen) + "\n")
while behaviour == "hang" and not (workdir / "go").exists():
    time.sleep(0.02)
if behaviour == "fail":
    for line in range(50):
        sys.stderr.write(f"line {line}\n")
    sys.exit("Traceback: out of luck")
if behaviour == "full":
    sys.stderr.write("error: checkpoint 4: cannot be written: No space left on device\n")
    sys.exit(6)
if behaviour == "halt":
    sys.exit(3)
(folder / "metrics.jsonl").write_text('{"step": 10, "loss": 2.5}\n')
(folder / "summary.json").write_text(
    json.dumps({"exit_reason": "finished", "steps": 10, "final_loss": 2.5, "kind": "x"})
)
