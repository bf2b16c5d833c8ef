"""Start a run: from fresh weights, or from those of another run (``train.init_from``), also under another residual.

A plain model can go on as a model with streams (upcycling) if the new maps begin as the plain residual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from mhc import kinds, remote
from mhc.config import Config, ResidualConfig
from mhc.data.pipeline import TrainIterator
from mhc.errors import UserError
from mhc.model.decoder import DecoderDefinition
from mhc.remote import Folder
from mhc.sharding import path_of
from mhc.train.checkpoint import find_checkpoint, restore_parts, standing_of
from mhc.train.optimizer import make_optimizer
from mhc.train.step import Trainer, TrainState
from mhc.xla_options import known_options


def preserving(kind: str) -> dict[str, Any]:
    """Return the fields of config.residual under which a kind, freshly made, computes what the plain residual does.

    Empty where the kind is unknown or has no such initial maps.
    """
    return dict(kinds.known()[kind].preserving) if kind in kinds.known() else {}


def check_preserving(residual: ResidualConfig) -> None:
    """Refuse a residual that, freshly made, does not compute the plain residual's function. Raises UserError."""
    kind = residual.spec
    if not kind.preserving or kind.own_norms:
        can = ", ".join(name for name, other in kinds.known().items() if other.preserving and not other.own_norms)
        why = "has no initial maps that make it the plain residual"
        why = "has norms of its own in the place of those that the source has trained" if kind.own_norms else why
        raise UserError(f"residual.kind: given {kind.name!r}, allowed: {can}: it {why}")
    for name, (given, wanted) in residual.apart_from_plain.items():
        raise UserError(
            f"residual.{name}: given {given!r}, allowed: {wanted!r} with kind={kind.name}, to compute the source's "
            "function"
        )


def fresh(definition: DecoderDefinition, seed: int, layout: Any, wanted: Callable[[str], bool]) -> dict[str, jax.Array]:
    """Return {path: initial value} of the wanted parameters alone, in their shards."""
    paths = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(definition.abstract())]
    chosen = [path for path in paths if wanted(path)]
    if not chosen:
        return {}
    by_path = {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(layout)}

    def init(key: jax.Array) -> dict[str, jax.Array]:
        leaves = jax.tree_util.tree_leaves_with_path(definition.init(key))
        return {path_of(path): leaf for path, leaf in leaves if path_of(path) in chosen}

    # Compiled, so that of the other parameters nothing is made; once, so that optimising costs more than it saves.
    once = known_options({"xla_backend_optimization_level": 0}) if jax.default_backend() == "cpu" else {}
    compiled = jax.jit(init, out_shardings={path: by_path[path] for path in chosen}, compiler_options=once)
    return dict(compiled(jax.random.key(seed)))


# Another run's weights ------------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """Describes the checkpoint that ``train.init_from`` names."""

    run: Folder
    step: int
    config: Config


def source(config: Config) -> Source | None:
    """Return the checkpoint that a resolved config starts from, None for fresh weights.

    Raises:
      UserError: no such run or checkpoint, parameters of other shapes (listed by name), a residual that would not
      compute the source's function, an optimiser whose state is another, a schedule that has ended where it is
      entered, or positions that do not fit the length.
    """
    text = config.train.init_from
    if text is None:
        return None
    run, at, step = text.rpartition("@")
    numbered = bool(at) and step.isdigit()
    try:
        if at and not numbered and remote.read(remote.path(run) / "config.json") is not None:
            raise UserError(f"{text}: given step {step!r}, allowed: an int >= 0")
        stored, last = find_checkpoint(run if numbered else text, int(step) if numbered else None)
    except UserError as error:
        raise UserError(f"train.init_from: {error}") from None
    checkpoint = Source(remote.path(run if numbered else text), last, stored)
    _check_positions(config, stored)
    ours, theirs = _shapes(config), _shapes(stored)
    if not _same_maps(config, stored) and not _same_residual(config, stored):
        _check_upcycling(config, stored)
        ours, theirs = ({p: s for p, s in shapes.items() if not _is_residual(p)} for shapes in (ours, theirs))
    apart = [
        f"{path} {list(theirs[path]) if path in theirs else 'absent'} there, "
        f"{list(ours[path]) if path in ours else 'absent'} here"
        for path in sorted({*ours, *theirs})
        if ours.get(path) != theirs.get(path)
    ]
    if apart:
        fields = [
            f"model.{name}={getattr(stored.model, name)} there, {getattr(config.model, name)} here"
            for name in ("width", "layers", "vocab_size")
            if getattr(stored.model, name) != getattr(config.model, name)
        ]
        more = f" and {len(apart) - 8} more" if len(apart) > 8 else ""
        named = f"{'; '.join(fields)}: " if fields else ""
        raise UserError(f"train.init_from: {text}: {named}parameters of other shapes: {'; '.join(apart[:8])}{more}")
    if config.train.init_optimizer:
        _check_optimizer(config, checkpoint)
        _check_schedule(config, checkpoint)
    return checkpoint


def notes(config: Config, found: Source, tokenizer: str) -> Iterator[str]:
    """Yield warnings for the user about settings that are allowed but may not be meant.

    Args:
      tokenizer: ``content_hash`` of the run's own.
    """
    position = standing_of(found.run, found.step).data
    if position is not None and position["tokenizer"] != tokenizer:
        yield (
            f"data.tokenizer={config.data.tokenizer} gives other ids than that of {config.train.init_from}: the "
            "embedding and the head were learned for those"
        )
    if config.positions.scaling in ("linear", "ntk", "yarn", "llama3") and config.positions.factor == 1.0:
        yield f"positions.scaling={config.positions.scaling}: positions.factor=1.0 leaves the angles as they are"
    if config.train.init_optimizer and config.schedule.kind == "wsd":
        early = found.step - (config.decay_steps - config.wsd_steps)
        if early > 0:
            yield (
                f"schedule.wsd_steps: the decay has begun {early:g} steps before step {found.step}, where "
                f"{config.train.init_from} enters the schedule (the branch's own steps: {config.train.steps})"
            )


def set_data(data: TrainIterator, config: Config, found: Source) -> None:
    """Set the data to the source's position at its checkpoint, as ``train.init_data`` asks.

    Raises: UserError where the two do not read the same batches, or the source has read none.
    """
    position = standing_of(found.run, found.step).data
    if position is None:
        raise UserError(f"train.init_data: {config.train.init_from} holds weights alone, and no place in the data")
    theirs = found.config.data  # what older positions do not have
    position = {"sequence_length": theirs.sequence_length, "holdout": theirs.holdout, **position}
    try:
        data.set_state(
            position, remedy="restore what it was, or set train.init_data=False to begin with the first batch"
        )
    except UserError as error:
        raise UserError(f"train.init_data: {config.train.init_from} reads other batches: {error}") from None


def initial_state(trainer: Trainer) -> TrainState:
    """Return the first state, in its shards: fresh from seed.init, or from what ``train.init_from`` names.

    Raises: UserError as ``source``.
    """
    config = trainer.config
    checkpoint = source(config)
    if checkpoint is None:
        return trainer.init(config.seed.init)
    new_maps = not _same_maps(config, checkpoint.config)
    layouts = trainer.layout.params
    new = fresh(trainer.definition, config.seed.init, layouts, lambda path: new_maps and _is_residual(path))
    wanted: dict[str, Any] = {"params": trainer.abstract.params}
    if config.train.init_optimizer:
        wanted |= {name: getattr(trainer.abstract, name) for name in ("opt_state", "step", "skipped")}
    layout = {name: getattr(trainer.layout, name) for name in wanted}
    # What is new is not looked for in the source.
    wanted["params"], layout["params"] = (_without(tree, set(new)) for tree in (wanted["params"], layout["params"]))
    restored = restore_parts(checkpoint.run, checkpoint.step, wanted, layout)
    params = _joined(trainer.abstract.params, restored["params"], new)
    state = trainer.begin(params)
    return state._replace(**{name: leaf for name, leaf in restored.items() if name != "params"})


def state_of_weights(trainer: Trainer, run: Folder, step: int) -> TrainState:
    """Return the state that begins with the parameters of a checkpoint which holds nothing else."""
    wanted, layout = {"params": trainer.abstract.params}, {"params": trainer.layout.params}
    return trainer.begin(restore_parts(run, step, wanted, layout)["params"])


def _is_residual(path: str) -> bool:
    """Return whether a parameter is one of the residual's: of its connections, or of a link between layers."""
    return kinds.parameter(path) is not None or "/core/links/" in path


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(DecoderDefinition(config).abstract())
    return {path_of(path): leaf.shape for path, leaf in leaves}


def _same_maps(config: Config, other: Config) -> bool:
    """Return whether two residuals are of one kind, with parameters of the same shapes, so that maps are taken over."""

    def maps(one: Config) -> dict[str, tuple[int, ...]]:
        return {path: shape for path, shape in _shapes(one).items() if _is_residual(path)}

    return config.residual.kind == other.residual.kind and maps(config) == maps(other)


def _same_residual(config: Config, other: Config) -> bool:
    """Return whether two residuals differ in shapes at most."""
    ours, theirs = config.residual, other.residual
    return (ours.kind, config.streams, ours.value_residual) == (theirs.kind, other.streams, theirs.value_residual)


def _check_upcycling(config: Config, found: Config) -> None:
    if not found.residual.is_plain:
        apart = found.residual.apart_from_plain if found.residual.spec.is_plain else {}
        theirs = ", ".join(
            [
                f"residual.kind={found.residual.kind}",
                f"n={found.streams}",
                *(["value_residual=True"] if found.residual.value_residual else []),
                *(f"{name}={value}" for name, (value, _) in apart.items()),
            ]
        )
        raise UserError(
            f"train.init_from: {config.train.init_from} has {theirs}; allowed for kind={config.residual.kind}: "
            "a source with the same, or one with the plain residual, whose function the new residual can begin with"
        )
    try:
        check_preserving(config.residual)
    except UserError as error:
        raise UserError(f"train.init_from: {config.train.init_from} is plain: {error}") from None


def _check_optimizer(config: Config, found: Source) -> None:
    def state(of_run: Config) -> Any:
        abstract = DecoderDefinition(of_run).abstract()
        shapes = jax.eval_shape(make_optimizer(of_run, abstract).init, abstract)
        return jax.tree.structure(shapes), [leaf.shape for leaf in jax.tree.leaves(shapes)]

    if state(config) != state(found.config):
        raise UserError(
            f"train.init_optimizer: the optimiser's state of {config.train.init_from} is another: "
            f"{found.config.optimizer.name} with residual.kind={found.config.residual.kind}"
        )


def _check_schedule(config: Config, found: Source) -> None:
    """Refuse a schedule that is over at the step where it is entered: the run would stay at its last rate."""
    if config.schedule.kind != "constant" and config.decay_steps <= found.step:
        raise UserError(
            f"schedule.decay_steps: given {config.decay_steps}, allowed: above {found.step}, where "
            f"{config.train.init_from} enters the schedule with its optimiser (None with RUN@STEP: the run's last step)"
        )


def _check_positions(config: Config, found: Config) -> None:
    """Refuse positions that the source does not have, or was not trained with at the length that scaling starts from.

    Parameters of other shapes are refused anyway, but not in words that say what to do.
    """
    length, positions, run = config.data.sequence_length, config.positions, config.train.init_from
    if positions.kind == found.positions.kind == "learned" and config.max_length != found.max_length:
        if length > found.max_length:
            raise UserError(
                f"data.sequence_length: given {length}, allowed: at most {found.max_length}, "
                f"the positions that {run} has learned"
            )
        raise UserError(
            f"positions.max_length: given {config.max_length}, allowed: {found.max_length}, "
            f"the positions that {run} has learned"
        )
    scaled = positions.kind == "rope" and positions.scaling in ("dynamic", "yarn", "llama3")
    if scaled and config.original_length > found.original_length:
        raise UserError(
            f"positions.original_length: given {config.original_length}, allowed: at most {found.original_length} "
            f"with positions.scaling={positions.scaling}, the length that {run} was trained with unscaled"
        )


def _without(tree: Any, paths: set[str]) -> Any:
    """Return a nested dict without some of its leaves."""

    def kept(node: Any, path: str) -> Any:
        if not isinstance(node, dict):
            return node
        below = {name: kept(child, f"{path}/{name}" if path else name) for name, child in node.items()}
        return {
            name: child
            for name, child in below.items()
            if (f"{path}/{name}" if path else name) not in paths and child != {}
        }

    return kept(tree, "")


def _joined(abstract: Any, some: Any, others: dict[str, jax.Array]) -> Any:
    """Return the tree of ``abstract`` from leaves of two sources."""
    by_path = {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(some)} | others
    return jax.tree_util.tree_map_with_path(lambda path, _: by_path[path_of(path)], abstract)
