"""Plan a grid: read and check a grid file, and record the plan in the grid's folder.

``grid.json`` holds the base config as the command line changed it, and what each arm changes. Arms run from that file,
so that an edit of a config while a grid runs does not change half of its arms.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mhc import checkout, cli, python_files
from mhc import config as configs
from mhc.config import Config, ModuleError
from mhc.errors import UserError, did_you_mean
from mhc.files import read_json, write_json
from mhc.grid.arms import Arm, Grid, name_of, options_unknown, source_of
from mhc.grid.folder import begun

FILE = cli.GRID


@dataclasses.dataclass(frozen=True)
class Plan:
    """Holds a valid grid: every arm has a valid config and a name of its own."""

    name: str
    """The name of the grid: the grid file without folder and ending, and the text after it."""
    base_file: str
    """The config file of the base, absolute, perhaps with ``:text``; GKE jobs read it again."""
    overrides: Mapping[str, Any]
    """What the command line changed in the base: {dotted name: value}."""
    base: Mapping[str, Mapping[str, Any]]
    """The base with these, as a nested dict."""
    arms: Mapping[str, Arm]
    """What each arm changes, by its name."""

    def config(self, arm: str) -> Config:
        """Return the Config of an arm. Raises UserError, which names the arm, for fields that contradict each other."""
        if arm not in self._configs:
            try:
                self._configs[arm] = _with(self.base, self.arms[arm])
            except UserError as error:
                raise UserError(f"arm {arm}: {error}") from None
        return self._configs[arm]

    def source(self, arm: str) -> tuple[str, int] | None:
        """Return (name, step) of the arm that an arm branches from; None if it does not."""
        return source_of(self.arms[arm])

    def placed(self, arm: str, workdir: Path) -> Config:
        """Return the Config of an arm in the grid's folder, with the path of the arm that it branches from.

        A run that has begun keeps the path that it began with, so that the folder of a grid may move.
        """
        config, source = self.config(arm), self.source(arm)
        if source is None:
            return config
        path = f"{workdir.resolve() / source[0]}@{source[1]}"
        if (workdir / arm / "config.json").is_file():
            path = read_json(workdir / arm / "config.json")["train"]["init_from"]
        return dataclasses.replace(config, train=dataclasses.replace(config.train, init_from=path))

    @functools.cached_property
    def _configs(self) -> dict[str, Config]:
        return {}


def load(path: str, arguments: Sequence[str], parser: cli.Parser | None = None) -> Plan:
    """Return the plan of a grid file with the overrides of the command line.

    Args:
        path: a Python file with ``get_grid() -> Grid``; ``file.py:text`` calls ``get_grid(text)``.
        arguments: the rest of the command line: ``--config.group.field=value``, for every arm.
        parser: of the program, for messages; None if the caller is no program.
    Raises:
        UserError: the file cannot be loaded, two arms have one name, an arm is invalid, or an override sets a field in
            which the arms differ.
    """
    with options_unknown() as unknown:
        grid = _run_grid_file(path)
    file, colon, text = path.partition(":")
    base_path, base_colon, base_text = grid.base.partition(":")
    base_file = f"{(Path(file).parent / base_path).resolve()}{base_colon}{base_text}"
    given = cli.load_config(base_file, (), parser)
    base = cli.load_config(base_file, arguments, parser)
    if unknown:  # now the modules of its kinds are imported
        grid = _run_grid_file(path)
    overrides = {name: new for name, (_, new) in configs.diff(given, base).items()}
    tree = configs.to_dict(base)

    arms: dict[str, Arm] = {}
    spelled: dict[str, str] = {}
    for fields in grid.arms:
        try:
            config = _with(tree, fields)
        except UserError as error:
            raise UserError(f"grid file {file}: arm {name_of(fields)}: {error}") from None
        for field in fields:
            if any(argument.lstrip("-").partition("=")[0] == f"config.{field}" for argument in arguments):
                raise UserError(f"--config.{field}: the arms of {file} set this field themselves; change it there")
        # Values as the config holds them: an int that is given for a float field makes the same arm.
        exact = {field: configs.value_of(config, field) for field in fields}
        name = name_of(exact)
        # Some file systems do not distinguish upper and lower case.
        if name.lower() in spelled:
            raise UserError(f"grid file {file}: two arms are named {name}; their fields are the same: {_words(exact)}")
        spelled[name.lower()] = name
        arms[name] = exact
    if not arms:
        raise UserError(f"grid file {file}: get_grid() gives no arm")
    plan = Plan(Path(file).stem + colon + text, base_file, overrides, tree, arms)
    for name in arms:
        _check_source(plan, name, f"grid file {file}: arm {name}")
    return plan


def _check_source(plan: Plan, arm: str, where: str) -> None:
    """Refuse a branch from an arm that the grid does not have, or from a checkpoint that its trunk will not keep."""
    source = plan.source(arm)
    if source is None:
        return
    name, step = source
    if name not in plan.arms:
        raise UserError(f"{where}: train.init_from: no arm {name} in this grid{did_you_mean(name, plan.arms)}")
    config = plan.config(name)
    steps, policy = config.train.steps, config.checkpoint
    written = sorted({*range(policy.every, steps, policy.every), steps}) if policy.every else [steps]
    fields = f"train.steps={steps}, checkpoint.every={policy.every}"
    if step not in written:
        raise UserError(f"{where}: train.init_from: {name} has no checkpoint of step {step} with {fields}")
    if step not in written[-policy.keep :] and not (policy.keep_every and step % policy.keep_every == 0):
        keep = f"checkpoint.keep={policy.keep}, checkpoint.keep_every={policy.keep_every}"
        raise UserError(
            f"{where}: train.init_from: {name} does not keep its checkpoint of step {step} with {fields}, {keep}"
        )


def _with(base: Mapping[str, Mapping[str, Any]], fields: Arm) -> Config:
    tree = {group: dict(values) for group, values in base.items()}
    modules = fields.get("residual.module", base.get("residual", {}).get("module"))
    configs.load_kinds({"residual": {"module": modules}})
    for field, value in fields.items():
        configs.describe(field)
        group, _, leaf = field.partition(".")
        tree[group][leaf] = value
    return configs.from_config_dict(tree)


def _words(fields: Arm) -> str:
    return ", ".join(f"{field}={value}" for field, value in fields.items()) or "none"


def _run_grid_file(path: str) -> Grid:
    """Return the grid of a file's get_grid. Raises UserError with file and line for whatever goes wrong in it."""
    file = path.partition(":")[0]
    ready = (checkout.ROOT / "configs" / "grids").glob("*.py")
    near = {str(entry) for entry in Path(file).parent.glob("*.py")} | {os.path.relpath(entry) for entry in ready}
    near = {entry for entry in near if Path(entry).stem not in ("__init__", "base")}
    grid = python_files.result_of(path, "get_grid", "grid", near=sorted(near), locate=True)
    if not isinstance(grid, Grid):
        raise UserError(f"grid file {file}: get_grid() gives {type(grid).__name__}, allowed: mhc.grid.Grid")
    return grid


# In the folder --------------------------------------------------------------------------------------------------------


def read(workdir: Path) -> Plan:
    """Return the plan in a grid's folder. Raises UserError where there is none."""
    if not (workdir / FILE).is_file():
        raise UserError(f"{workdir}: no grid here (it has no {FILE}); `run` makes one")
    stored = read_json(workdir / FILE)
    if stored.keys() != {field.name for field in dataclasses.fields(Plan)}:
        raise UserError(f"{workdir / FILE}: not the plan of a grid, or one of another version")
    python_files.look_beside(stored["base_file"].partition(":")[0])
    try:
        configs.load_kinds(stored["base"])
    except ModuleError as error:
        raise ModuleError(f"{workdir / FILE}: {error}") from None
    return Plan(**stored)


def store(plan: Plan, workdir: Path) -> Plan:
    """Put a plan into a grid's folder, which is made if missing. Arms that the folder already has stay in it.

    Returns:
        The plan as stored: the new arms and those that only the folder knows.

    Raises:
        UserError: the folder holds a run or another grid, or an arm has begun and the base is no longer the same.
    """
    if (workdir / "config.json").is_file():
        raise UserError(f"--workdir {workdir}: it holds a run, not a grid; name another folder")
    workdir.mkdir(parents=True, exist_ok=True)
    with _locked(workdir):
        if (workdir / FILE).is_file():
            old = read(workdir)
            if any(begun(workdir / arm) for arm in old.arms):
                validation = configs.kept_validation(old.base["validation"], plan.base["validation"])
                plan = dataclasses.replace(plan, base={**plan.base, "validation": validation})
                _check_same(old, plan, workdir)
                plan = dataclasses.replace(plan, arms={**plan.arms, **old.arms})
        write_json(workdir / FILE, dataclasses.asdict(plan))
    return plan


def _check_same(old: Plan, new: Plan, workdir: Path) -> None:
    if old.name != new.name:
        raise UserError(f"--workdir {workdir}: it holds the grid {old.name}, given: {new.name}; name another folder")
    try:
        configs.check_resume(configs.from_config_dict(configs.upgraded(old.base)), configs.from_config_dict(new.base))
    except UserError as error:
        raise UserError(f"--workdir {workdir}: {error}") from None


@contextlib.contextmanager
def _locked(workdir: Path) -> Iterator[None]:
    """Let one process at a time write grid.json. On a file system without locks the last one to write wins."""
    with (workdir / ".grid.lock").open("a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
