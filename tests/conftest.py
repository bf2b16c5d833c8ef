"""Eight CPU devices and a compilation cache for every test, set before anything imports jax."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis

_FLAG = "--xla_force_host_platform_device_count"

if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()
os.environ["JAX_PLATFORMS"] = "cpu"
# Most of the suite's time is compilation; programs that tests start as subprocesses inherit these.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")

# Time limits of single examples say how loaded the machine is, not whether a property holds.
hypothesis.settings.register_profile("project", deadline=None)
hypothesis.settings.load_profile("project")
