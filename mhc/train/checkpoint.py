"""Save and restore train state, data position and config together, through orbax; readers see committed steps only."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from mhc import config as configs
from mhc import full_disk, remote
from mhc.config import CheckpointConfig, Config, ModuleError
from mhc.errors import UserError
from mhc.model.decoder import Decoder, DecoderDefinition, Params
from mhc.remote import Folder
from mhc.train import orbax_reads
from mhc.train.standing import Standing
from mhc.train.step import TrainState

FOLDER = "checkpoints"
ITEMS = ("state", "host", "config")


orbax_reads.hide_housekeeping()


class Checkpoints:
    """Reads and writes the checkpoints of a run folder.

    A checkpoint of step s holds the state after s updates, where the run stands then (`Standing`, as JSON) and the
    resolved config. Saves are asynchronous; ``wait`` returns when the last one is committed. Where the disk is full,
    ``save``, ``wait`` and ``close`` raise DiskFull, for this save or the one before.
    """

    def __init__(self, workdir: Folder, policy: CheckpointConfig, *, read_only: bool = False):
        """Open the folder.

        Args:
          policy: how many checkpoints are kept.
          read_only: nothing is saved, deleted or cleaned up: the run of the folder may be going on.
        """
        options = ocp.CheckpointManagerOptions(
            max_to_keep=policy.keep,
            # Step 0, with which an imported model begins, is a multiple of everything and always kept.
            keep_period=policy.keep_every or 2**62,
            cleanup_tmp_directories=not read_only,
            enable_async_checkpointing=True,
            read_only=read_only,
        )
        self._workdir = workdir
        self._saving: int | None = None  # the step of the last save that was begun
        self._quiet = contextlib.ExitStack()  # saves go on in other threads
        self._quiet.enter_context(orbax_reads.quiet())
        self._manager = ocp.CheckpointManager(_folder(workdir), item_names=ITEMS, options=options)

    def latest(self) -> int | None:
        """Return the last committed step, None without one."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Return the committed steps, ascending."""
        return sorted(self._manager.all_steps())

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        """Turn what a full disk raises into a DiskFull that names the last good checkpoint."""
        try:
            yield
        except Exception as error:
            if full_disk.reason(error) is None or isinstance(error, full_disk.DiskFull):
                raise
            orbax_reads.await_leftovers(error)
            place = str(self._workdir)
            with full_disk.reporting(f"{place}: checkpoint {self._saving}", place, self.left(self._saving)):
                raise

    def left(self, failed: int | None = None) -> str:
        """Return in words where a run that must end now will go on from; ``failed``: a step that was not saved."""
        steps = [step for step in committed_steps(self._workdir) if step != failed]
        last = f"the last good checkpoint is {steps[-1]}" if steps else "there is no good checkpoint"
        return f"{last}; with room again the same command goes on from there"

    def drop_after(self, step: int) -> None:
        """Delete the checkpoints of later steps: a rewound run takes them again."""
        for later in self.steps():
            if later > step:
                self._manager.delete(later)

    def save(self, state: TrainState, standing: Standing, config: Config) -> None:
        """Start saving the checkpoint of ``standing.step``; the state may be donated as soon as this returns."""
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state._asdict()),
            host=ocp.args.JsonSave(standing.to_json()),
            config=ocp.args.JsonSave(configs.to_dict(config)),
        )
        with self._room():
            self._manager.wait_until_finished()  # the last one, whose failure is its own
            self._saving = standing.step
            self._manager.save(standing.step, args=args, force=True)

    def restore(self, step: int, abstract: TrainState, layout: TrainState) -> tuple[TrainState, Standing]:
        """Return the state of a step in its layout, and the `Standing` of the run then.

        Args:
          abstract: shapes and dtypes of the state.
          layout: a sharding for each leaf.

        Raises:
          UserError: the checkpoint is damaged.
        """
        target = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            abstract._asdict(),
            layout._asdict(),
        )
        args = ocp.args.Composite(state=ocp.args.StandardRestore(target), host=ocp.args.JsonRestore())
        with _reading(self._workdir, step, "state"):
            restored = self._manager.restore(step, args=args)
            return TrainState(**restored["state"]), Standing.from_json(step, restored["host"])

    def standing(self, step: int) -> Standing:
        """Return the `Standing` of the run at a step. Raises UserError if the checkpoint is damaged."""
        return _standing(self._manager, self._workdir, step)

    def wait(self) -> None:
        """Wait until every save that was begun is committed."""
        with self._room():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait until every save is committed, and close the folder."""
        with self._quiet, self._room():
            self._manager.wait_until_finished()
            self._manager.close()


class LoadedRun(NamedTuple):
    """Holds the model of a run at a step, for evaluation."""

    config: Config  # resolved
    step: int
    params: Params

    def decoder(self) -> Decoder:
        """Return the model with these parameters."""
        return DecoderDefinition(self.config).bind(self.params)


def committed_steps(run: Folder) -> list[int]:
    """Return the steps of a run folder's committed checkpoints, ascending. Raises UserError as `remote.check`."""
    remote.check(run)
    folder = _folder(run)
    return sorted(set(ocp.utils.checkpoint_steps(folder))) if folder.is_dir() else []


def _folder(run: Folder) -> Folder:
    folder = run / FOLDER
    return folder.absolute() if isinstance(folder, Path) else folder


# How TensorStore speaks of files that are not whole.
_DAMAGE = ("OUT_OF_RANGE", "DATA_LOSS", "NOT_FOUND", "Error opening", "Error reading", "CRC", "checksum", "corrupt")


# What TensorStore's codes say of a checkpoint's files.
_CODES = {
    "OUT_OF_RANGE": "a file is cut off",
    "DATA_LOSS": "a file is not as it was written",
    "NOT_FOUND": "a file is missing",
}
_ARRAY = re.compile(r'"([\w.]+)/(?:\.zarray|[\d.]+)"')


@contextlib.contextmanager
def _reading(run: Folder, step: int, part: str) -> Iterator[None]:
    """Turn the errors of a damaged checkpoint into a UserError that names the run's other checkpoints.

    ``part`` is state or host.
    """
    try:
        with orbax_reads.quiet():
            try:
                yield
            except Exception as error:
                orbax_reads.await_leftovers(error)
                raise
    except UserError:
        raise
    except Exception as error:  # of orbax, tensorstore, json: each has its own, orbax also bare ones
        text = str(error)
        signs = any(sign in text for sign in _DAMAGE)
        if not (signs or type(error) is Exception or isinstance(error, (KeyError, FileNotFoundError, ValueError))):
            raise
        raise _damaged(run, step, f"{run / FOLDER / str(step) / part}: {_why(error)}") from None


def _why(error: BaseException) -> str:
    """Return in a few words why reading failed, from an error and those that led to it."""
    texts = []
    chain: BaseException | None = error
    while chain is not None:
        texts.append(" ".join(str(chain).partition("See full")[0].split()) or type(chain).__name__)
        chain = chain.__cause__ or chain.__context__
    whole = " ".join(texts)
    code = next((words for code, words in _CODES.items() if code in whole), None)
    array = _ARRAY.search(whole)
    if code is None and "reading array index" in whole:
        return "an array cannot be read: a file is missing, or not as it was written"
    if code is None:
        shown = f"lacks {texts[0]}" if isinstance(error, KeyError) else texts[0].rstrip(".")
        return shown if len(shown) <= 160 else f"{shown[:160]} …"
    return code + (f" ({array[1]} cannot be read)" if array else "")


def _damaged(run: Folder, step: int, why: str) -> UserError:
    steps = [other for other in committed_steps(run) if other != step]
    others = ", ".join(map(str, steps)) or "none"
    onwards = ""
    if steps and steps[-1] < step:  # which a run, and whoever names no step, takes
        onwards = f"; to go on from {steps[-1]}, move or delete {run / FOLDER / str(step)}"
    return UserError(f"{run}: checkpoint {step} is damaged: {why}; other steps: {others}{onwards}")


# Groups of the config that decide the shapes of the weights and what they compute.
_MODEL_GROUPS = ("model", "attention", "positions", "norm", "mlp", "moe", "head", "residual")


def _check_step(run: Folder, step: int, config: Config) -> None:
    """Raise UserError where a checkpoint lacks a part, or its own config describes another model than ``config``."""
    folder = run / FOLDER / str(step)
    stored = remote.read(folder / "config" / "metadata")
    if stored is None or not (folder / "state").is_dir():
        missing = "config" if stored is None else "state"
        raise _damaged(run, step, f"{folder / missing} is missing")
    try:
        saved = configs.from_json(stored.decode())
    except (UserError, UnicodeDecodeError) as error:
        raise _damaged(run, step, f"{folder / 'config'}: {error}") from None
    for name, (there, here) in configs.diff(saved, config).items():
        if name.partition(".")[0] in _MODEL_GROUPS:
            raise UserError(
                f"{run / 'config.json'}: it is not of the checkpoint of step {step}, which was written with "
                f"{name}={there!r}, not {here!r}"
            )


def find_checkpoint(run: str | os.PathLike[str], step: int | None = None) -> tuple[Config, int]:
    """Return the resolved config and the step of a run's checkpoint: of ``step``, or of the last committed one.

    Raises:
      UserError: no such run, no checkpoint, or not this step (the message lists the steps there are); a checkpoint
      that lacks a part or was written with another model than config.json describes.
    """
    place = remote.path(run)
    stored = remote.read(place / "config.json")
    if stored is None:
        raise UserError(f"{run}: not a run folder (it has no config.json)")
    try:
        config = configs.from_json(stored.decode(), place / "config.json")
    except ModuleError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{place / 'config.json'}: it is not UTF-8 (byte {error.start})") from None
    except UserError as error:
        raise UserError(f"{place / 'config.json'}: {error}; was it written by another version?") from None
    steps = committed_steps(place)
    if not steps:
        raise UserError(f"{run}: no committed checkpoint in {place / FOLDER}")
    if step is None:
        step = steps[-1]
    elif step not in steps:
        raise UserError(f"{run}: no checkpoint of step {step}; there are {', '.join(map(str, steps))}")
    _check_step(place, step, config)
    return config, step


def restore_parts(run: Folder, step: int, abstract: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    """Return parts of the train state of a checkpoint, in their layout.

    Args:
      abstract: {field of TrainState: shapes and dtypes}; ``params`` may have any subset of the leaves.
      layout: a sharding for each leaf.

    Raises:
      UserError: the checkpoint is damaged, or holds weights alone, and more is asked for.
    """
    target = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, layout
    )
    if set(abstract) != {"params"} and standing_of(run, step).weights_only:
        raise UserError(f"{run}: the checkpoint of step {step} holds weights alone, no optimiser's state")
    with ocp.CheckpointManager(_folder(run), item_names=ITEMS) as manager:
        args = ocp.args.PyTreeRestore(
            item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=True
        )
        with _reading(run, step, "state"):
            return dict(manager.restore(step, args=ocp.args.Composite(state=args))["state"])


def standing_of(run: Folder, step: int) -> Standing:
    """Return the `Standing` of a run at a checkpoint. Raises UserError if the checkpoint is damaged."""
    with ocp.CheckpointManager(_folder(run), item_names=ITEMS) as manager:
        return _standing(manager, run, step)


def _standing(manager: ocp.CheckpointManager, run: Folder, step: int) -> Standing:
    args = ocp.args.Composite(host=ocp.args.JsonRestore())
    with _reading(run, step, "host"):
        return Standing.from_json(step, manager.restore(step, args=args)["host"])


def load_run(run: str | os.PathLike[str], step: int | None = None) -> LoadedRun:
    """Return config and parameters of a run folder on one device, at ``step`` or the last committed one.

    Raises:
      UserError: no such run, no checkpoint, or not this step; the message lists the steps there are.
    """
    config, step = find_checkpoint(run, step)
    abstract = {"params": DecoderDefinition(config).abstract()}
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    restored = restore_parts(remote.path(run), step, abstract, jax.tree.map(lambda leaf: device, abstract))
    return LoadedRun(config, step, restored["params"])


def save_weights(workdir: Path, params: Params, config: Config, **about: Any) -> None:
    """Write a checkpoint of step 0 with parameters alone: a run that goes on from it begins with a fresh optimiser.

    It is written in small pieces, so that saving takes little memory beside the parameters.

    Args:
      config: resolved.
      about: where the parameters come from; JSON.
    """
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    piece = max(size // 256, 2**22)  # bytes
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(_folder(workdir), item_names=ITEMS, options=options) as manager:
        state = ocp.args.PyTreeSave(
            {"params": params},
            save_args=jax.tree.map(lambda leaf: ocp.SaveArgs(chunk_byte_size=piece), {"params": params}),
            ocdbt_target_data_file_size=4 * piece,
        )
        args = ocp.args.Composite(
            state=state,
            host=ocp.args.JsonSave(Standing(weights_only=True, about=about).to_json()),
            config=ocp.args.JsonSave(configs.to_dict(config)),
        )
        manager.save(0, args=args, force=True)
