"""Compile the train and validation steps: pure functions of state and batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from mhc.config import Config, shares
from mhc.model.decoder import STACKS, DecoderDefinition, Params
from mhc.model.parameters import GROUPS, parameter
from mhc.monitor import guard
from mhc.sharding import batch_sharding, jit, replicated, shardings, traced_for
from mhc.train import scales
from mhc.train.loss import LossSums, cross_entropy
from mhc.train.optimizer import learning_rate, make_optimizer, map_paths
from mhc.xla_options import known_options

Batch = dict[str, jax.Array]


class TrainState(NamedTuple):
    """Holds all that a step changes. Counters are int32 scalars."""

    step: jax.Array  # completed updates, skipped ones included
    params: Params
    opt_state: Any
    skipped: jax.Array  # updates not applied
    nonfinite: jax.Array  # steps whose loss or gradient was not finite
    guard: guard.GuardState


class LossParts(NamedTuple):
    """Holds the results of a forward pass over a batch, float32.

    Attributes:
      sums: of the cross-entropy over the valid targets.
      weight: number of valid targets.
      source_weight: number of valid targets [K] by source of a mixture; [0] without one.
      router: load [L', E] in tokens, balance and z [L'] of the L' layers with experts; empty without.
    """

    sums: LossSums
    weight: jax.Array
    source_weight: jax.Array
    router: dict[str, jax.Array]

    def join(self, other: LossParts) -> LossParts:
        """Return the parts of both batches together; balance and z add up."""
        return jax.tree.map(jnp.add, self, other)._replace(sums=self.sums.join(other.sums))


def counted(config: Config, batch: Batch) -> Batch:
    """Return the batch with no weight on targets within ``attention.prefix``, which the tokens before them see."""
    prefix = config.attention.prefix
    if not prefix:
        return batch
    return {**batch, "weights": jnp.where(batch["positions"] + 1 < prefix, 0.0, batch["weights"])}


def loss_parts(definition: DecoderDefinition, params: Params, batch: Batch) -> LossParts:
    """Return the cross-entropy of a batch, and statistics of its experts' routers.

    Args:
      batch: tokens, targets, segment_ids, positions [B, T] int32 and weights [B, T] float32; of a mixture also sources
        [B] int32, the number of each row's source. A posterior [B, T, C] float32, where there is one, stands for the
        targets. With ``position_noise`` [B, T] float32 that is added to what positions encode.
    """
    decoder = definition.bind(params)
    hidden = decoder.forward(
        batch["tokens"], batch["segment_ids"], batch["positions"], noise=batch.get("position_noise")
    )
    member = None
    if "sources" in batch:
        member = jax.nn.one_hot(batch["sources"], len(shares(definition.config.data.source)))
    targets = batch.get("posterior", batch["targets"])
    with jax.named_scope("loss"):
        sums = cross_entropy(decoder, hidden.h, targets, batch["weights"], member)
    weights = batch["weights"]
    by_source = jnp.zeros(0) if member is None else jnp.sum(jnp.sum(weights, axis=1, keepdims=True) * member, axis=0)
    return LossParts(sums, weight=jnp.sum(weights), source_weight=by_source, router=hidden.router)


def micro_batches(batch: Batch, accumulation: int) -> Batch:
    """Return leaves [A, B / A, …] of [B, …]: row r is in micro-batch r mod A, so that each device keeps its rows."""
    return jax.tree.map(
        lambda a: jnp.moveaxis(a.reshape(a.shape[0] // accumulation, accumulation, *a.shape[1:]), 1, 0), batch
    )


def loss_and_gradients(
    definition: DecoderDefinition, params: Params, batch: Batch, accumulation: int
) -> tuple[LossParts, Params]:
    """Return (sums over the batch, gradient of the objective), micro-batch by micro-batch.

    The objective is nll / weight, plus the z-loss of the head and what keeps experts even, where configured. Every
    micro-batch is divided by the token count of the *whole* batch, so accumulating equals the big batch whatever the
    padding; the experts' losses are means over micro-batches.
    """
    config = definition.config
    batch = counted(config, batch)
    total = jnp.maximum(jnp.sum(batch["weights"]), 1.0)

    def objective(params: Params, micro: Batch) -> tuple[jax.Array, LossParts]:
        parts = loss_parts(definition, params, micro)
        router = {name: leaf if name == "load" else leaf / accumulation for name, leaf in parts.router.items()}
        value = parts.sums.objective / total
        if router and config.moe.balance == "auxiliary":
            value += config.moe.balance_loss * jnp.sum(router["balance"])
        if router and config.moe.z_loss:
            value += config.moe.z_loss * jnp.sum(router["z"])
        return value, parts._replace(router=router)

    gradient = jax.grad(objective, has_aux=True)
    if accumulation == 1:
        grads, parts = gradient(params, batch)
        return parts, grads

    micro = micro_batches(batch, accumulation)

    def add(carry: tuple[Params, LossParts], one: Batch) -> tuple[tuple[Params, LossParts], None]:
        grads, parts = gradient(params, one)
        sums, so_far = carry
        return (jax.tree.map(jnp.add, sums, grads), so_far.join(parts)), None

    shapes = jax.eval_shape(objective, params, jax.tree.map(lambda a: a[0], micro))[1]
    parts = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    parts = parts._replace(sums=parts.sums._replace(logit_max=jnp.full((), -jnp.inf)))
    start = (jax.tree.map(jnp.zeros_like, params), parts)
    (grads, parts), _ = jax.lax.scan(add, start, micro)
    return parts, grads


class Norms(NamedTuple):
    """Holds norms of a tree shaped like the parameters: by sublayer [S] (F and its maps), and by parameter group."""

    sublayers: jax.Array
    groups: dict[str, jax.Array]


def norms(tree: Params) -> Norms:
    """Return the norms of gradients, updates or parameters, float32."""
    groups: dict[str, jax.Array] = {}
    sublayers: dict[str, jax.Array] = {}

    def add(path: str, leaf: jax.Array) -> None:
        square = jnp.square(leaf.astype(jnp.float32))
        name = parameter(path).group
        groups[name] = groups.get(name, jnp.zeros(())) + jnp.sum(square)
        stack, _, rest = path.partition("/")
        if stack in STACKS:
            part = f"{stack}/attention" if rest.startswith("attention") else f"{stack}/mlp"
            each = jnp.sum(square, axis=tuple(range(1, square.ndim)))  # [L]
            sublayers[part] = sublayers.get(part, jnp.zeros_like(each)) + each

    map_paths(add, tree)
    pairs = [(sublayers[f"{stack}/attention"], sublayers[f"{stack}/mlp"]) for stack in STACKS if stack in tree]
    by_depth = jnp.concatenate([jnp.stack(pair, axis=1).reshape(-1) for pair in pairs])
    return Norms(jnp.sqrt(by_depth), {name: jnp.sqrt(groups[name]) for name in GROUPS if name in groups})


def balanced(config: Config, params: Params, router: dict[str, jax.Array]) -> Params:
    """Move each router's bias a step towards an even load (arXiv:2408.15664).

    It goes up where an expert got less than the mean, and down where it got more.
    """
    if not router or config.moe.balance != "loss_free":
        return params
    load = router["load"]
    move = config.moe.balance_rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
    return map_paths(lambda path, leaf: leaf + move if path.endswith("/router_bias") else leaf, params)


@dataclasses.dataclass(frozen=True)
class Faults:
    """Holds faults that tests put into the compiled step.

    Each gets the number of completed steps and returns its second argument, changed or not; None compiles to nothing.
    """

    params: Callable[[jax.Array, Params], Params] | None = None  # before the forward pass
    loss: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    gradients: Callable[[jax.Array, Params], Params] | None = None


class Trainer:
    """Holds the compiled functions of a config on a mesh: ``init``, ``step``, ``validate``.

    ``step(state, batch) -> (state, metrics)`` donates the state. Metrics are device arrays: the scalars loss,
    target_tokens (int32), grad_norm before clipping, update_norm, param_norm, lr, logit_max, log_z, skipped,
    nonfinite; ``grad`` (Norms); with experts ``router`` (load [L', E] in tokens, balance and z [L']); with
    ``monitor.probe_every`` also ``update`` and ``param`` (Norms); with ``monitor.gamma`` also ``gamma`` [S], the norms
    of the gradient in the sublayers' norm scales, frozen ones included; of a mixture of K sources source_nll and
    source_tokens [K]; and what the guard's action adds: z_loss, z_grad_norm and skip, or clip_scale. A step whose loss
    or gradient is not finite changes no parameter and no optimiser state; the check is part of the step.
    """

    def __init__(self, config: Config, mesh: Mesh, faults: Faults | None = None):
        self.config, self.mesh = config, mesh
        self.faults = faults or Faults()
        self.definition = DecoderDefinition(config)
        self.optimizer = make_optimizer(config, self.definition.abstract())
        self.abstract = jax.eval_shape(self._init, jax.random.key(0))
        self.layout = shardings(self.abstract, mesh)
        batch = batch_sharding(mesh)
        everywhere = replicated(mesh)  # what is measured: every process reads it
        # The initialiser runs once; on CPU, optimising its many random draws costs more than they do.
        once = known_options({"xla_backend_optimization_level": 0}) if mesh.devices.flat[0].platform == "cpu" else {}
        self._jit_init = jit(traced_for(self._init, mesh), mesh, out_shardings=self.layout, compiler_options=once)
        self.step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]] = jit(
            traced_for(self._step, mesh),
            mesh,
            donate_argnums=0,
            in_shardings=(self.layout, batch),
            out_shardings=(self.layout, everywhere),
        )
        self.validate: Callable[[Params, Batch], dict[str, jax.Array]] = jit(
            traced_for(self._validate, mesh),
            mesh,
            in_shardings=(self.layout.params, batch),
            out_shardings=everywhere,
        )

    def init(self, seed: int) -> TrainState:
        """Return a fresh state, made in its shards: the same weights on any mesh."""
        return self._jit_init(jax.random.key(seed))

    def begin(self, params: Params) -> TrainState:
        """Return the state that starts from these parameters, which are donated."""
        begin = jax.jit(self._begin, in_shardings=(self.layout.params,), out_shardings=self.layout, donate_argnums=0)
        return begin(params)

    def _init(self, key: jax.Array) -> TrainState:
        return self._begin(self.definition.init(key))

    def _begin(self, params: Params) -> TrainState:
        params = scales.begin(self.config, params)
        # One buffer each: the state is donated, and a buffer cannot be donated twice.
        step, skipped, nonfinite = (jnp.zeros((), jnp.int32) for _ in range(3))
        return TrainState(step, params, self.optimizer.init(params), skipped, nonfinite, guard.initial(self.config))

    def _step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        config, faults = self.config, self.faults
        start = state.params if faults.params is None else faults.params(state.step, state.params)
        noisy = scales.with_noise(config, batch, state.step)
        parts, grads = loss_and_gradients(self.definition, start, noisy, config.train.accumulation)
        loss = parts.sums.nll / jnp.maximum(parts.weight, 1.0)
        loss = loss if faults.loss is None else faults.loss(state.step, loss)
        grads = grads if faults.gradients is None else faults.gradients(state.step, grads)
        in_gamma = scales.gamma_norms(grads) if config.monitor.gamma else None  # before `hold`: also of frozen scales
        grads = scales.hold(config, grads)
        grad_norm = optax.tree.norm(grads)
        metrics: dict[str, Any] = {"grad": norms(grads)}
        verdict, guard_state = guard.judge(config, state.guard, loss, grad_norm)

        with jax.named_scope("optimizer"):
            scale = jnp.ones(()) if verdict.scale is None else verdict.scale
            if config.optimizer.clip_norm is not None:
                scale = scale * jnp.minimum(1.0, config.optimizer.clip_norm / jnp.maximum(scale * grad_norm, 1e-30))
            grads = jax.tree.map(lambda g: g * scale, grads)
            updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
            applied = state.step - state.skipped  # a skipped update leaves the schedule where it was
            rate = learning_rate(config, applied)
            updates = jax.tree.map(lambda u: rate * u, updates)
            params = optax.apply_updates(state.params, updates)
            params = scales.scheduled(config, balanced(config, params, parts.router), applied + 1)

        def keep(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(verdict.apply, a, b), new, old)

        count = (~verdict.apply).astype(jnp.int32)
        following = TrainState(
            step=state.step + 1,
            params=keep(params, state.params),
            opt_state=keep(opt_state, state.opt_state),
            skipped=state.skipped + count,
            nonfinite=state.nonfinite + (~verdict.finite).astype(jnp.int32),
            guard=guard_state,
        )
        frozen = state.guard.frozen
        if frozen is not None:
            # A step before this one is to be acted on: this one did not happen.
            counters = ("step", "skipped", "nonfinite", "guard")
            kept = {
                name: jax.tree.map(lambda a, b: jnp.where(frozen, b, a), getattr(following, name), getattr(state, name))
                for name in counters
            }
            following = following._replace(**kept)
        metrics |= {
            "loss": loss,
            "target_tokens": parts.weight.astype(jnp.int32),
            "grad_norm": grad_norm,
            "update_norm": jnp.where(verdict.apply, optax.tree.norm(updates), 0.0),
            "param_norm": optax.tree.norm(following.params),
            "lr": rate,
            "logit_max": parts.sums.logit_max,
            "log_z": parts.sums.log_z / jnp.maximum(parts.weight, 1.0),
            "skipped": following.skipped,
            "nonfinite": following.nonfinite,
        }
        if config.monitor.probe_every:
            metrics |= {"update": norms(updates), "param": norms(following.params)}
        if in_gamma is not None:
            metrics["gamma"] = in_gamma
        if parts.router:
            metrics["router"] = parts.router
        if "sources" in batch:
            metrics |= {"source_nll": parts.sums.by_source, "source_tokens": parts.source_weight.astype(jnp.int32)}
        if verdict.spike is not None:
            metrics |= {"z_loss": verdict.z_loss, "z_grad_norm": verdict.z_grad_norm, "skip": ~verdict.apply}
        if verdict.scale is not None:
            metrics["clip_scale"] = verdict.scale
        return following, metrics

    def _validate(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
        batch = counted(self.config, batch)
        parts = loss_parts(self.definition, params, batch)
        text = jnp.sum(jnp.where(batch["weights"] > 0, batch["target_bytes"], 0))
        return {"nll": parts.sums.nll, "weight": parts.weight, "bytes": text}
