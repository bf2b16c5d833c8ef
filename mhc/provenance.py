"""run.json: what a run was started with, each time, so that it can be started again and compared with others.

    {"format": 1, "config": {…}, "starts": [{"time": …, "step": 0, "command": […], "code": {…}, …}, …]}

``config`` is that of the last start. Flags that make a GPU's programs deterministic are set here too.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mhc import config as configs
from mhc import remote
from mhc.config import Config
from mhc.errors import UserError
from mhc.kinds import ModuleError
from mhc.xla_options import unknown_flags

if TYPE_CHECKING:
    from jax.sharding import Mesh

FILE, FORMAT = "run.json", 1
DIFF_LIMIT = 2**18  # bytes of a diff that are kept

PACKAGES = (
    "mhc-jax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "tokenizers",
    "jax-cuda13-plugin",
    "libtpu",
)
# Variables that what XLA makes of a program, or how devices compute it, may depend on.
_PREFIXES = ("XLA_", "JAX_", "LIBTPU_", "NCCL_", "CUDA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE", "TF_CUDNN_")
# What jax's own options may change in the numbers, however they were set.
_OPTIONS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_jit",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)
# Variables that say where compiled programs are kept, which devices there are (``devices`` says so), or what is logged.
_NO_DIFFERENCE = ("CACHE", "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "JAX_TRACEBACK", "JAX_LOG", "NCCL_DEBUG")

_ROOT = Path(__file__).parents[1]


# What there is --------------------------------------------------------------------------------------------------------


def start(config: Config, mesh: Mesh, *, step: int, data: Mapping[str, Any]) -> dict[str, Any]:
    """A start of a run in this process, for JSON.

    Args:
      config: resolved. mesh: of all processes. step: updates done before. data: hashes of corpus and tokeniser.
    """
    import jax

    device = mesh.devices.flat[0]
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": step,
        "command": list(sys.orig_argv),
        "folder": os.getcwd(),
        "host": platform.node(),
        "config_hash": config_hash(config),
        "code": code(),
        "versions": {"python": platform.python_version(), **versions()},
        "devices": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": int(mesh.size),
            "mesh": {name: int(size) for name, size in mesh.shape.items()},
            "processes": jax.process_count(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "runtime": device.client.platform_version,
            "system": f"{platform.system()} {platform.machine()}",
        },
        "deterministic": is_deterministic(),
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_PREFIXES)},
        "options": {name: str(getattr(jax.config, name)) for name in _OPTIONS},
        "data": dict(data),
    }


def config_hash(config: Config) -> str:
    """The first 16 hex digits of the SHA-256 of a resolved config, but for how processes find each other."""
    return _hash(configs.to_dict(config))


def _hash(tree: Mapping[str, Any]) -> str:
    tree = {group: fields for group, fields in tree.items() if group != "distributed"}
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


@functools.cache
def versions() -> Mapping[str, str]:
    """Of the packages that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache  # as the process was started
def code() -> Mapping[str, Any] | None:
    """The git commit of this package's source, and what was changed since; None where it lies in no repository.

    ``diff`` is of tracked files, cut at ``DIFF_LIMIT`` bytes; ``changes`` a hash of the whole of it and of Python files
    that git does not know, ``untracked``.
    """
    return _code(_ROOT)


def _code(root: Path) -> dict[str, Any] | None:
    if _git(root, "ls-files", "--error-unmatch", "mhc/__init__.py") is None:
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:  # no commit yet
        return None
    diff = _git(root, "diff", "HEAD", "--no-ext-diff", "--no-color") or b""
    listed = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", "*.py") or b""
    untracked = sorted(name.decode(errors="replace") for name in listed.split(b"\0") if name)
    digest = hashlib.sha256(diff)
    for name in untracked:
        digest.update(name.encode() + b"\0")
        if (root / name).is_file():
            digest.update((root / name).read_bytes())
    dirty = bool(diff or untracked)
    return {
        "commit": commit.decode().strip(),
        "dirty": dirty,
        "changes": digest.hexdigest()[:16] if dirty else None,
        "diff": diff[:DIFF_LIMIT].decode(errors="replace"),
        "diff_cut": len(diff) > DIFF_LIMIT,
        "untracked": untracked[:100],
    }


def _git(root: Path, *arguments: str) -> bytes | None:
    """What git says; None where there is no git, no repository, or no such thing in it."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=30,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


# The file -------------------------------------------------------------------------------------------------------------


def append(file: Path, config: Config, entry: Mapping[str, Any]) -> None:
    """Add a start to a run's file, which is made when missing. Raises UserError where it holds something else."""
    from mhc.files import read_json, write_json  # numpy with it: not before a user's mistakes are told

    starts = list(_starts(_checked(read_json(file), file), file)) if file.is_file() else []
    write_json(file, {"format": FORMAT, "config": configs.to_dict(config), "starts": [*starts, entry]})


class Origin(NamedTuple):
    """A run.json to start from."""

    file: str
    config: Config  # resolved; processes find each other anew
    starts: Sequence[Mapping[str, Any]]

    @property
    def deterministic(self) -> bool:
        """Whether its last start was."""
        return bool(self.starts[-1]["deterministic"])


def read(file: str | os.PathLike[str]) -> Origin:
    """RUN/run.json, or that of the folder RUN, local or in a store. Raises UserError where it is none."""
    place = remote.path(file)
    if place.suffix not in (".json", ".jsonl"):  # the second: of a run too, but not this
        place = place / FILE
    content = remote.read(place)
    if content is None:
        raise UserError(f"{place}: no such file, allowed: RUN/{FILE}, e.g. runs/a/{FILE}")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise UserError(f"{place}: not JSON") from None
    found = _checked(found, place)
    try:
        config = configs.from_config_dict({**configs.upgraded(found["config"]), "distributed": {}})
    except ModuleError as error:
        raise ModuleError(f"{place}: {error}") from None
    except UserError as error:
        raise UserError(f"{place}: {error}; was it written by another version?") from None
    starts = _starts(found, place)
    if _hash(found["config"]) != starts[-1]["config_hash"]:
        raise UserError(
            f"{place}: its config is not the one of its last start (damaged, or edited); allowed: the file as it was "
            "written, with --config.GROUP.FIELD=VALUE for what shall be otherwise"
        )
    return Origin(str(place), config, starts)


def _checked(found: Any, file: Any) -> Mapping[str, Any]:
    if not isinstance(found, Mapping) or not isinstance(found.get("config"), Mapping) or not found.get("starts"):
        raise UserError(f"{file}: not the {FILE} of a run (it has no config and starts)")
    if found.get("format") != FORMAT:
        raise UserError(f"{file}: given format {found.get('format')!r}, allowed: {FORMAT}; another version wrote it")
    return found


def _starts(found: Mapping[str, Any], file: Any) -> Sequence[Mapping[str, Any]]:
    for number, entry in enumerate(found["starts"], start=1):
        try:
            comparable(entry), entry["config_hash"], entry["deterministic"]
        except (KeyError, TypeError, AttributeError):
            raise UserError(f"{file}: what it says of start number {number} is damaged") from None
    return found["starts"]


# Differences ----------------------------------------------------------------------------------------------------------


def comparable(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What of a start two equal runs have in common, flat: {name for people: value}."""
    code, devices = entry["code"] or {}, entry["devices"]
    environment = {
        name: _flags(value) if name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") else value
        for name, value in entry["environment"].items()
        if not any(part in name for part in _NO_DIFFERENCE)
    }
    return {
        "commit": code.get("commit"),
        "uncommitted changes": code.get("changes"),
        **entry["versions"],
        "devices": f"{devices['count']} × {devices['kind']}",
        "mesh": ", ".join(f"{name} {size}" for name, size in devices["mesh"].items() if size > 1) or "one device",
        "processes": devices["processes"],
        # Programs of a CPU are split over its cores.
        **({"cores": devices["cores"]} if devices["platform"] == "cpu" else {}),
        "runtime": devices["runtime"],
        "system": devices["system"],
        **environment,
        **entry["options"],
        **entry["data"],
    }


def _flags(text: str) -> str:
    return " ".join(sorted(text.split()))


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{name: (before, after)} of what two starts do not have in common."""
    old, new = comparable(before), comparable(after)
    return {name: (old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)}


def notes(now: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]], origin: Origin | None) -> Iterator[str]:
    """Lines for the user about a start.

    Args:
      now: this one. earlier: those of the same run before. origin: what the run was started from.
    """
    if earlier:
        for name, (before, after) in differences(earlier[-1], now).items():
            yield f"{name}: {_said(before)} at the last start, {_said(after)} now"
    elif origin is not None:
        there: dict[str, list[Any]] = {}
        for start in origin.starts:
            for name, (before, _) in differences(start, now).items():
                there.setdefault(name, []).append(before)
        here = comparable(now)
        for name, values in there.items():
            said = " and ".join(dict.fromkeys(map(_said, values)))
            yield f"{name}: {said} in {origin.file}, {_said(here.get(name))} here"
        if len({start["config_hash"] for start in origin.starts}) > 1:
            yield f"{origin.file}: the config changed between its starts; this run has the last one throughout"
    if now["deterministic"] and now["devices"]["platform"] != "gpu":
        yield (
            f"deterministic: nothing changes on {now['devices']['platform']}, whose programs are deterministic as they "
            "are; the flags are those of GPUs"
        )


def _said(value: Any) -> str:
    return "none" if value is None else str(value)


# Deterministic programs -----------------------------------------------------------------------------------------------

# No operation whose result depends on the order of threads, and no choice of kernels by their speed at the time.
DETERMINISTIC = "--xla_gpu_deterministic_ops"


def make_deterministic(environment: MutableMapping[str, str] = os.environ) -> None:
    """Ask XLA for deterministic programs on GPUs; before jax's first use of a device.

    Raises:
      UserError: XLA_FLAGS asks for the contrary, or the installed XLA does not know the flag.
    """
    given = environment.get("XLA_FLAGS", "")
    if _asked(given) is False:
        raise UserError(f"--deterministic: XLA_FLAGS has {DETERMINISTIC}=false, allowed: true, or neither of the two")
    if _asked(given) is None:
        flag = f"{DETERMINISTIC}=true"
        if unknown_flags([flag]):
            release = importlib.metadata.version("jaxlib")
            raise UserError(f"--deterministic: the XLA of jaxlib {release} has no {DETERMINISTIC}")
        environment["XLA_FLAGS"] = f"{given} {flag}".strip()


def is_deterministic() -> bool:
    """Whether XLA was asked for it, by `make_deterministic` or by the user's own flag."""
    return _asked(os.environ.get("XLA_FLAGS", "")) is True


def _asked(flags: str) -> bool | None:
    """The last word of XLA_FLAGS on it; None where it says nothing."""
    values = [flag.partition("=")[2] or "true" for flag in flags.split() if flag.partition("=")[0] == DETERMINISTIC]
    return values[-1].lower() in ("true", "1") if values else None
