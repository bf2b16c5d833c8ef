"""Refuse combinations of fields, each with the reason."""

from __future__ import annotations

import dataclasses
import itertools

from mhc import attention_impls
from mhc.config.derived import GATED, Groups
from mhc.config.fields import AttentionConfig, DistributedConfig, ModelConfig
from mhc.config.group import refuse_unused
from mhc.config.scales import NormConfig, UpdateConfig
from mhc.errors import UserError, failure
from mhc.rules import refuse


def check(config: Groups) -> None:
    """Check everything that depends on more than one field. Raises UserError for the first mistake."""
    _check_heads(config)
    if config.attention.kind == "mla":
        _check_latent_attention(config)
    else:
        _check_no_latents(config)
    _check_head(config)
    _check_mask(config)
    _check_positions(config)
    _check_feed_forward(config)
    _check_norm(config.norm, config.model.layers)
    _check_update(config.update, config.model.layers)
    _check_remat(config.model)
    _check_kind(config)
    _check_value_residual(config)
    _check_schedule(config)
    _check_start(config)
    _check_distributed(config.distributed)
    _check_batch(config)
    _check_monitor(config)


def _check_kind(config: Groups) -> None:
    """Run the check of the residual kind, if it has one. Raises UserError, for whatever it raises."""
    check = config.residual.spec.check
    if check is None:
        return
    try:
        check(config)
    except UserError:
        raise
    except Exception as error:  # a kind from elsewhere is the user's code
        raise UserError(f"residual.kind={config.residual.kind}: its check failed{failure(error)}") from error


def _check_value_residual(config: Groups) -> None:
    residual, kind = config.residual, config.attention.kind
    if not residual.value_residual:
        refuse_unused(residual, ("value_init",), "without residual.value_residual")
    elif kind == "mla":
        refuse("residual.value_residual", True, "False with attention.kind=mla: its cache holds latents, not values")
    elif kind != "heads":
        refuse("residual.value_residual", True, f"False with attention.kind={kind}: no token reads another's values")


# Model ----------------------------------------------------------------------------------------------------------------


def _check_heads(config: Groups) -> None:
    width, heads = config.model.width, config.attention.heads
    kv_heads, head_dim = config.attention.kv_heads, config.attention.head_dim
    if head_dim is None and width % heads:
        refuse("attention.heads", heads, f"a divisor of model.width={width}, or set attention.head_dim")
    if kv_heads is not None and heads % kv_heads:
        refuse("attention.kv_heads", kv_heads, f"a divisor of attention.heads={heads}")
    if config.attention.kind == "tokenwise" and config.kv_heads != heads:
        refuse("attention.kv_heads", kv_heads, "None with attention.kind=tokenwise")
    if config.positions.kind == "rope" and config.attention.kind == "heads" and config.head_dim % 2:
        if head_dim is None:
            refuse("model.width", width, f"an even multiple of attention.heads={heads}, since rope rotates pairs")
        refuse("attention.head_dim", head_dim, "an even number, since rope rotates pairs")


def _check_latent_attention(config: Groups) -> None:
    attention, rope = config.attention, config.positions.kind == "rope"
    if attention.kv_heads not in (None, attention.heads):
        refuse("attention.kv_heads", attention.kv_heads, "None with attention.kind=mla: every head has its own keys")
    refuse_unused(attention, ("bias", "qk_norm"), "with attention.kind=mla: its latents are normalised instead")
    if rope and (config.rope_dim == 0 or config.rope_dim % 2):
        refuse("attention.rope_dim", attention.rope_dim, "an even number from 2 with positions.kind=rope")
    if not rope and config.rope_dim:
        refuse("attention.rope_dim", attention.rope_dim, "None or 0 unless positions.kind=rope: nothing is rotated")


def _check_no_latents(config: Groups) -> None:
    derived = {"value_dim": config.value_dim, "rope_dim": 0}  # `resolve` fills these in, which asks for nothing
    defaults = {declared.name: declared.default for declared in dataclasses.fields(AttentionConfig)}
    for name in ("value_dim", "kv_rank", "q_rank", "rope_dim"):
        value = getattr(config.attention, name)
        if value not in (defaults[name], derived.get(name, defaults[name])):
            kind = config.attention.kind
            refuse(f"attention.{name}", value, f"{defaults[name]} with attention.kind={kind}: it is a choice of mla")


def _check_head(config: Groups) -> None:
    if config.head.classes is not None and config.head.tied:
        refuse("head.tied", True, "False with head.classes: the embedding has a row for each id, not for each class")


def _check_mask(config: Groups) -> None:
    attention, length = config.attention, config.data.sequence_length
    if attention.global_every == 1 or (attention.global_every and attention.window is None):
        refuse("attention.global_every", attention.global_every, "0, or from 2 with attention.window set")
    if attention.prefix >= length:
        refuse("attention.prefix", attention.prefix, f"below data.sequence_length={length}")
    missing = attention_impls.lacks(attention.impl, config.attention_needs)
    if missing is not None:
        refuse("attention.impl", attention.impl, f"auto or xla: {attention.impl} has no {missing}")


def _check_positions(config: Groups) -> None:
    positions, length = config.positions, config.data.sequence_length
    if positions.kind != "rope":
        refuse_unused(positions, ("scaling", "factor", "attention_factor"), "unless positions.kind=rope")
    if positions.scaling == "none":
        refuse_unused(positions, ("factor",), "with positions.scaling=none")
    if positions.scaling != "yarn":
        refuse_unused(positions, ("attention_factor", "beta_fast", "beta_slow"), "unless positions.scaling=yarn")
    if positions.scaling != "llama3":
        refuse_unused(positions, ("low_frequency", "high_frequency"), "unless positions.scaling=llama3")
    if positions.beta_slow >= positions.beta_fast:
        refuse("positions.beta_slow", positions.beta_slow, f"below positions.beta_fast={positions.beta_fast}")
    low, high = positions.low_frequency, positions.high_frequency
    if low >= high:
        refuse("positions.low_frequency", low, f"below positions.high_frequency={high}")
    if positions.kind == "learned" and config.max_length < length:
        refuse("positions.max_length", positions.max_length, f"at least data.sequence_length={length}")
    if positions.kind not in ("rope", "sinusoidal", "alibi"):
        why = "it has no positions" if positions.kind == "none" else "it has rows for whole numbers alone"
        refuse_unused(positions, ("noise",), f"with positions.kind={positions.kind}: {why}")
    if positions.kind == "relative_bias" and positions.max_distance <= positions.buckets // 2:
        refuse("positions.max_distance", positions.max_distance, f"above half of positions.buckets={positions.buckets}")


def _check_feed_forward(config: Groups) -> None:
    moe, layers = config.moe, config.model.layers
    if config.mlp.kind not in GATED:
        refuse_unused(config.mlp, ("clamp",), f"with mlp.kind={config.mlp.kind}: it has no gate")
    if not moe.experts:
        refuse_unused(moe, ("shared", "dense_layers", "z_loss"), "with moe.experts=0")
        return
    if moe.top_k > moe.experts:
        refuse("moe.top_k", moe.top_k, f"at most moe.experts={moe.experts}")
    if moe.dense_layers >= layers:
        refuse("moe.dense_layers", moe.dense_layers, f"below model.layers={layers}, or moe.experts=0")
    if moe.experts % config.mesh.expert:
        refuse("mesh.expert", config.mesh.expert, f"a divisor of moe.experts={moe.experts}")
    refuse_unused(config.mlp, ("bias",), "with moe.experts > 0: experts have no biases")


def _check_norm(norm: NormConfig, layers: int) -> None:
    if norm.kind == "layernorm":
        refuse_unused(norm, ("bias",), "with norm.kind=layernorm: it has one anyway")
    elif not norm.bias:
        refuse_unused(norm, ("beta_frozen",), "with norm.kind=rmsnorm, unless norm.bias: there is no bias")
    if norm.gamma_schedule is not None:
        refuse_unused(norm, ("gamma_frozen",), "with norm.gamma_schedule: a schedule is never trained")
    else:
        refuse_unused(norm, ("gamma_shape",), "without norm.gamma_schedule")
    if norm.gamma_init == 1.0 and not norm.gamma_frozen and norm.gamma_schedule is None:
        refuse_unused(norm, ("gamma_layers",), "unless another gamma field is set")
    _check_layers("norm.gamma_layers", norm.gamma_layers, layers)


def _check_update(update: UpdateConfig, layers: int) -> None:
    if update.schedule is not None:
        refuse_unused(update, ("trained",), "with update.schedule: a schedule is never trained")
    else:
        refuse_unused(update, ("shape",), "without update.schedule")
    if not update.on:
        refuse_unused(update, ("layers",), "unless update.scale, update.trained or update.schedule is set")
    _check_layers("update.layers", update.layers, layers)


def _check_layers(name: str, chosen: tuple[int, ...], layers: int) -> None:
    if any(later <= earlier for earlier, later in itertools.pairwise(chosen)) or max(chosen, default=0) >= layers:
        refuse(name, chosen, f"increasing layers from 0 to {layers - 1}")


def _check_remat(model: ModelConfig) -> None:
    if model.remat != "streams":
        refuse_unused(model, ("remat_blocks",), f"with model.remat={model.remat}: it is for streams")


# Training -------------------------------------------------------------------------------------------------------------


def _check_schedule(config: Groups) -> None:
    schedule, warmup, end = config.schedule, config.schedule.warmup_steps, config.decay_steps
    run_end = "train.steps" if config.last_step == config.train.steps else "STEP + train.steps"
    if warmup > end:
        limit = run_end if schedule.decay_steps is None else "schedule.decay_steps"
        refuse("schedule.warmup_steps", warmup, f"at most {limit}={end}")
    if schedule.kind != "wsd":
        refuse_unused(schedule, ("wsd_steps", "wsd_shape"), "unless schedule.kind=wsd")
    elif schedule.wsd_steps is not None:
        if warmup + schedule.wsd_steps > end:
            longest = end - warmup
            refuse("schedule.wsd_steps", schedule.wsd_steps, f"at most {longest}: {warmup} of {end} steps warm up")
    elif warmup + schedule.wsd_fraction * end > end:
        most = (end - warmup) / end
        refuse("schedule.wsd_fraction", schedule.wsd_fraction, f"at most {most:.3g}: {warmup} of {end} steps warm up")
    if schedule.kind == "step":
        fractions, ratios = schedule.step_fractions, schedule.step_ratios
        if len(fractions) != len(ratios) or not fractions:
            refuse("schedule.step_ratios", ratios, f"as many as schedule.step_fractions={fractions}, at least one")
        if any(later <= earlier for earlier, later in itertools.pairwise(fractions)):
            refuse("schedule.step_fractions", fractions, "increasing fractions of the run")


def _check_start(config: Groups) -> None:
    if config.train.init_from is None:
        refuse_unused(config.train, ("init_optimizer", "init_data"), "without train.init_from")


def _check_distributed(distributed: DistributedConfig) -> None:
    if distributed.cluster != "address":
        refuse_unused(distributed, ("coordinator", "processes", "process_id"), "unless distributed.cluster=address")
        return
    host, colon, port = (distributed.coordinator or "").rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 2**16):
        refuse("distributed.coordinator", distributed.coordinator, "HOST:PORT with distributed.cluster=address")
    if distributed.process_id >= distributed.processes:
        refuse("distributed.process_id", distributed.process_id, f"below distributed.processes={distributed.processes}")


def _check_batch(config: Groups) -> None:
    size, parts, mesh = config.train.batch_size, config.train.accumulation, config.mesh
    if size % parts:
        refuse("train.accumulation", parts, f"a divisor of train.batch_size={size}")
    if mesh.data == 0:
        refuse("mesh.data", 0, "-1 or an int >= 1")
    split = max(mesh.data, 1) * mesh.fsdp * mesh.expert
    if (size // parts) % split:
        refuse("train.batch_size", size, f"a multiple of {parts * split}: accumulation × mesh data × fsdp × expert")


def _check_monitor(config: Groups) -> None:
    if not config.watchdog.seconds:
        refuse_unused(config.watchdog, ("abort",), "with watchdog.seconds=0: nothing is watched")
    if not config.monitor.probe_every:
        refuse_unused(config.monitor, ("gamma",), "with monitor.probe_every=0: there are no probes")
    window, least = config.monitor.zscore_window, config.monitor.zscore_min_history
    if least is not None and least > window:
        refuse("monitor.zscore_min_history", least, f"at most monitor.zscore_window={window}")
