"""Collect the groups of a run, and derive values from several fields, such as those of fields that are None."""

from __future__ import annotations

import dataclasses
import math

from mhc import attention_impls
from mhc.config.fields import (
    AttentionConfig,
    CheckpointConfig,
    DataConfig,
    DistributedConfig,
    GuardConfig,
    HeadConfig,
    InitConfig,
    KernelsConfig,
    MeshConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    MonitorConfig,
    OptimizerConfig,
    PositionsConfig,
    ResidualConfig,
    ScheduleConfig,
    SeedConfig,
    TrainConfig,
    ValidationConfig,
    WatchdogConfig,
)
from mhc.config.scales import NormConfig, UpdateConfig

GATED = ("glu", "geglu", "swiglu")  # kinds of the feed-forward that have a gate
ZSCORE_HISTORY = 64  # steps before the first z-score, in a run that is not short


@dataclasses.dataclass(frozen=True)
class Groups:
    """Holds every group of a run, with the values that derive from them; the subclass `Config` checks them too."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    positions: PositionsConfig = dataclasses.field(default_factory=PositionsConfig)
    mlp: MlpConfig = dataclasses.field(default_factory=MlpConfig)
    moe: MoeConfig = dataclasses.field(default_factory=MoeConfig)
    norm: NormConfig = dataclasses.field(default_factory=NormConfig)
    update: UpdateConfig = dataclasses.field(default_factory=UpdateConfig)
    head: HeadConfig = dataclasses.field(default_factory=HeadConfig)
    init: InitConfig = dataclasses.field(default_factory=InitConfig)
    residual: ResidualConfig = dataclasses.field(default_factory=ResidualConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    validation: ValidationConfig = dataclasses.field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = dataclasses.field(default_factory=MonitorConfig)
    guard: GuardConfig = dataclasses.field(default_factory=GuardConfig)
    watchdog: WatchdogConfig = dataclasses.field(default_factory=WatchdogConfig)
    kernels: KernelsConfig = dataclasses.field(default_factory=KernelsConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    seed: SeedConfig = dataclasses.field(default_factory=SeedConfig)

    # Model ------------------------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Return V. Raises ValueError before ``resolve``, since the tokeniser decides it."""
        if self.model.vocab_size is None:
            raise ValueError("model.vocab_size is not known before mhc.config.resolve")
        return self.model.vocab_size

    @property
    def outputs(self) -> int:
        """Return how many logits a position has: those of the vocabulary, or head.classes."""
        return self.head.classes or self.vocab_size

    @property
    def kv_heads(self) -> int:
        """Return G, the key and value heads."""
        return self.attention.kv_heads or self.attention.heads

    @property
    def head_dim(self) -> int:
        """Return K, the width of a head."""
        return self.attention.head_dim or self.model.width // self.attention.heads

    @property
    def value_dim(self) -> int:
        """Return the width of a head's values."""
        return (self.attention.value_dim if self.attention.kind == "mla" else None) or self.head_dim

    @property
    def rope_dim(self) -> int:
        """Return R, the width of a head's rotary part under mla, which adds to its K."""
        if self.attention.kind != "mla":
            return 0
        derived = (self.head_dim // 4) * 2 if self.positions.kind == "rope" else 0
        return derived if self.attention.rope_dim is None else self.attention.rope_dim

    @property
    def attention_needs(self) -> frozenset[str]:
        """Return what an implementation of attention must be able to do, as named in `mhc.attention_impls`."""
        needs = {
            attention_impls.SOFTCAP: self.attention.softcap is not None,
            attention_impls.VALUE_WIDTH: self.value_dim != self.head_dim + self.rope_dim,
            attention_impls.BIAS: self.positions.kind in ("alibi", "relative_bias"),
            attention_impls.PREFIX: self.attention.prefix > 0,
        }
        return frozenset(feature for feature, needed in needs.items() if needed)

    @property
    def local_layers(self) -> tuple[bool, ...]:
        """Return for each layer whether it sees only a window."""
        every, windowed = self.attention.global_every, self.attention.window is not None
        return tuple(windowed and not (every and (layer + 1) % every == 0) for layer in range(self.model.layers))

    @property
    def original_length(self) -> int:
        """Return the length for which rotary frequencies are not scaled."""
        return self.positions.original_length or self.data.sequence_length

    @property
    def max_length(self) -> int:
        """Return how many rows a learned position table has."""
        return self.positions.max_length or self.data.sequence_length

    @property
    def mlp_width(self) -> int:
        """Return F, the hidden width of the dense feed-forward."""
        derived = -(-8 * self.model.width // 24) * 8 if self.mlp.kind in GATED else 4 * self.model.width
        return self.mlp.width or derived

    @property
    def expert_width(self) -> int:
        """Return the hidden width of an expert."""
        return self.moe.width or max(self.mlp_width // self.moe.top_k, 1)

    @property
    def leading_layers(self) -> int:
        """Return the number of blocks with a dense feed-forward before those with experts."""
        return self.moe.dense_layers if self.moe.experts else 0

    @property
    def streams(self) -> int:
        """Return N."""
        return self.residual.n or self.residual.spec.default_streams

    @property
    def remat_blocks(self) -> int:
        """Return after how many blocks remat=streams keeps the streams again.

        They are L_r = sqrt(N S / (N + 2)) sublayers (arXiv:2512.24880, section 4.3), two in each block.
        """
        sublayers = math.sqrt(self.streams * 2 * self.model.layers / (self.streams + 2))
        return self.model.remat_blocks or max(1, round(sublayers / 2))

    # Training ---------------------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> int:
        """Return the step of the schedule at which the run ends.

        A run that takes the optimiser of RUN@STEP over starts in the schedule at STEP.
        """
        _, at, step = (self.train.init_from or "").rpartition("@")
        takes_over = self.train.init_optimizer and bool(at) and step.isdigit()
        return self.train.steps + (int(step) if takes_over else 0)

    @property
    def decay_steps(self) -> int:
        """Return the step of the schedule at which the decay of the rate has ended."""
        return self.schedule.decay_steps or self.last_step

    @property
    def wsd_steps(self) -> float:
        """Return the number of steps for which a wsd schedule decays."""
        return self.schedule.wsd_steps or self.schedule.wsd_fraction * self.decay_steps

    @property
    def validation_rows(self) -> int:
        """Return the rows of each validation set; 0: all of them."""
        batches = self.validation.batches
        return self.validation.rows if batches is None else batches * self.train.batch_size

    @property
    def zscore_min_history(self) -> int:
        """Return the steps of history before the first z-score: fewer in a short run, so that most of it is judged."""
        given = self.monitor.zscore_min_history
        return given or min(ZSCORE_HISTORY, max(16, self.train.steps // 4), self.monitor.zscore_window)
