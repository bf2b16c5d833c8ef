"""Declare every field of a run: its type, default, meaning and allowed values.

``python train.py --fields [GROUP]`` prints this list. ``None`` means "derive it" or "none", as the field's words say.
The groups ``norm`` and ``update`` are in ``mhc/config/scales.py``. The options of residual kinds, such as
``residual.iters``, are declared with their kinds in ``mhc/kinds.py``. The combinations that are refused are listed in
``mhc/config/checks.py``. The list is read as a whole, and so it may pass 450 lines.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mhc import attention_impls, kinds
from mhc.config.group import Group, setting
from mhc.config.kind_modules import check_modules
from mhc.config.residual import ResidualGroup
from mhc.config.sources import source_field

# Model ----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ModelConfig(Group, group="model"):
    """Sets the decoder's size and how it is computed."""

    layers: int = setting(12, "blocks L; each has two sublayers, so S = 2L", low=1)
    width: int = setting(256, "model width D", low=1)
    vocab_size: int | None = setting(None, "vocabulary V, at least the tokeniser's; None: the tokeniser's size", low=2)
    dtype: str = setting("float32", "compute dtype (parameters and maps stay float32)", choices=("float32", "bfloat16"))
    remat: str = setting(
        "none",
        "what the backward pass recomputes; full: all but each block's input; dots: all but the results of matrix "
        "products; streams: the residual connections",
        choices=("none", "full", "dots", "streams"),
    )
    remat_blocks: int | None = setting(
        None,
        "remat=streams: blocks between two kept copies of the streams; None: the mHC paper's formula",
        low=1,
    )
    scan: bool = setting(True, "scan over blocks; False unrolls them: same numbers, longer compilation")
    embed_scale: bool = setting(False, "multiply embeddings by sqrt(D)")


@dataclasses.dataclass(frozen=True)
class AttentionConfig(Group, group="attention"):
    """Sets causal self-attention."""

    kind: str = setting(
        "heads",
        "heads: multi-head, grouped-query or multi-query, by kv_heads; mla: multi-head latent attention, with latent "
        "keys and values; tokenwise: a feed-forward of as many parameters in place of attention, which sees no other "
        "token",
        choices=("heads", "mla", "tokenwise"),
    )
    heads: int = setting(4, "query heads H", low=1)
    kv_heads: int | None = setting(None, "kind=heads: key and value heads G, a divisor of heads; None: heads", low=1)
    head_dim: int | None = setting(None, "width K of a head (mla: without its rotary part); None: width / heads", low=1)
    value_dim: int | None = setting(None, "mla: width of a head's values; None: head_dim", low=1)
    kv_rank: int = setting(512, "mla: width C of the latent that keys and values are projected from", low=1)
    q_rank: int | None = setting(
        None, "mla: width of the latent that queries are projected from; None: they come straight from the input", low=1
    )
    rope_dim: int | None = setting(
        None,
        "mla: width R of a head's rotary part, whose key all heads share; None: head_dim / 2 with positions.kind=rope, "
        "else 0",
        low=0,
    )
    qk_norm: bool = setting(False, "RMSNorm with a weight on each head's queries and keys, before rotation")
    softcap: float | None = setting(None, "cap c of the logits, c tanh(logits / c); None: no cap", above=0)
    scale: float | None = setting(None, "factor of the logits; None: 1 / sqrt(width of a query head)", above=0)
    bias: bool = setting(False, "biases on the four projections")
    window: int | None = setting(None, "positions that a query sees, its own and those before; None: all", low=1)
    global_every: int = setting(
        0, "each global_every-th layer sees all positions despite the window; 0: no layer does", low=0
    )
    prefix: int = setting(
        0, "first positions of a document that see one another in both directions; they count as no targets", low=0
    )
    impl: str = setting(
        "auto",
        "implementation; auto: by platform; xla: the reference; sdpa: jax.nn.dot_product_attention; flash: JAX's "
        "splash kernel for TPU",
        choices=attention_impls.NAMES,
    )


@dataclasses.dataclass(frozen=True)
class PositionsConfig(Group, group="positions"):
    """Sets how attention knows positions."""

    kind: str = setting(
        "rope",
        "rope: rotary; learned, sinusoidal: added to the embedding; relative_bias (T5), alibi: added to the logits",
        choices=("rope", "learned", "sinusoidal", "relative_bias", "alibi", "none"),
    )
    theta: float = setting(10_000.0, "rope: base of the rotary frequencies", above=0)
    scaling: str = setting(
        "none",
        "rope: how the frequencies are scaled for contexts longer than original_length",
        choices=("none", "linear", "ntk", "dynamic", "yarn", "llama3"),
    )
    factor: float = setting(1.0, "rope with scaling: how many times longer the context is", low=1)
    original_length: int | None = setting(
        None, "dynamic, yarn, llama3: longest context without scaling; None: data.sequence_length", low=1
    )
    low_frequency: float = setting(
        1.0, "llama3: frequencies with fewer turns within original_length are scaled in full", above=0
    )
    high_frequency: float = setting(
        4.0, "llama3: frequencies with more turns within original_length are not scaled", above=0
    )
    beta_fast: float = setting(32.0, "yarn: frequencies with more turns within original_length are not scaled", above=0)
    beta_slow: float = setting(
        1.0, "yarn: frequencies with fewer turns within original_length are scaled in full", above=0
    )
    attention_factor: float | None = setting(
        None, "yarn: factor of cosines and sines; None: 0.1 ln(factor) + 1", above=0
    )
    max_length: int | None = setting(None, "learned: rows of the table; None: data.sequence_length", low=1)
    buckets: int = setting(32, "relative_bias: number of buckets; half of them hold one distance each", low=2)
    max_distance: int = setting(128, "relative_bias: distance at which the last bucket begins", low=2)
    noise: float = setting(
        0.0,
        "rope, sinusoidal, alibi: standard deviation, in positions, of normal noise on each token's position while "
        "training; 0: none",
        low=0,
    )


@dataclasses.dataclass(frozen=True)
class MlpConfig(Group, group="mlp"):
    """Sets the dense feed-forward sublayer."""

    kind: str = setting(
        "swiglu",
        "two matrices with relu, gelu or silu, or three with a gate: glu (sigmoid), geglu (gelu), swiglu (silu)",
        choices=("relu", "gelu", "silu", "glu", "geglu", "swiglu"),
    )
    width: int | None = setting(
        None, "hidden width F; None: 4 D, with a gate 8/3 D rounded up to a multiple of 8", low=1
    )
    clamp: float | None = setting(None, "with a gate: bound of the gate's input, ±clamp; None: no bound", above=0)
    bias: bool = setting(False, "biases on the projections")


@dataclasses.dataclass(frozen=True)
class MoeConfig(Group, group="moe"):
    """Sets a mixture of experts in place of the dense feed-forward: dropless, each token to its top_k experts."""

    experts: int = setting(0, "routed experts E; 0: a dense feed-forward", low=0)
    top_k: int = setting(2, "routed experts that a token goes to", low=1)
    width: int | None = setting(None, "hidden width F of an expert; None: mlp.width / top_k", low=1)
    shared: int = setting(0, "experts of that width that every token goes to", low=0)
    dense_layers: int = setting(0, "first layers that have a dense feed-forward", low=0)
    score: str = setting("softmax", "function of the router's logits that gives scores", choices=("softmax", "sigmoid"))
    normalize: bool = setting(True, "divide the chosen scores by their sum")
    scale: float = setting(1.0, "factor of the routed experts' sum", above=0)
    balance: str = setting(
        "loss_free",
        "how the load is balanced; loss_free: a bias in the choice of experts, moved against the load "
        "(arXiv:2408.15664); auxiliary: a loss",
        choices=("loss_free", "auxiliary", "none"),
    )
    balance_rate: float = setting(1e-3, "loss_free: step size of the bias", above=0)
    balance_loss: float = setting(1e-2, "auxiliary: coefficient of the loss of each layer (arXiv:2101.03961)", above=0)
    z_loss: float = setting(0.0, "coefficient of each layer's mean squared log-sum-exp of the router's logits", low=0)


@dataclasses.dataclass(frozen=True)
class HeadConfig(Group, group="head"):
    """Sets the projection to the vocabulary."""

    tied: bool = setting(False, "use the embedding as the head's weight")
    softcap: float | None = setting(None, "cap c of the logits, c tanh(logits / c); None: no cap", above=0)
    z_loss: float = setting(0.0, "coefficient of the mean squared log-sum-exp of the logits in the objective", low=0)
    classes: int | None = setting(
        None, "outputs of the model where they are not the vocabulary, such as a task's hidden states", low=2
    )
    chunk: int | None = setting(
        None, "tokens of a row whose logits are in memory at once; None: as many as keep 2^25 logits on a device", low=1
    )


@dataclasses.dataclass(frozen=True)
class InitConfig(Group, group="init"):
    """Sets the initial weights of everything but the residual maps, which residual.init sets."""

    kind: str = setting(
        "normal", "standard deviation; normal: `std`; fan_in: 1/sqrt(fan-in)", choices=("normal", "fan_in")
    )
    std: float = setting(0.02, "standard deviation of `normal`", above=0)
    scale_residual: bool = setting(True, "divide the sublayers' output projections by sqrt(2L)")
    scale_streams: bool = setting(
        False, "multiply the sublayers' output projections by sqrt(N), as the HC paper does (arXiv:2409.19606)"
    )


@dataclasses.dataclass(frozen=True, init=False)
class ResidualConfig(ResidualGroup, group="residual"):
    """Sets the residual topology, which is what this project compares."""

    kind: str = setting("mhc", "topology", choices=kinds.names)
    n: int | None = setting(None, "streams N; None: the kind's default", low=1)
    init: str | None = setting(None, "preset of the initial maps; None: the kind's first preset", choices=kinds.inits)
    collapse: str | None = setting(
        None, "how the streams become one after the last block; None: the kind's first way", choices=kinds.collapses
    )
    value_residual: bool = setting(
        False, "mix the values of block 0 into those of every later block's attention, with learned weights"
    )
    value_init: str | None = setting(
        None,
        "initial weights of value_residual; home: half and half; equivalent: nothing of block 0; None: equivalent with "
        "init=equivalent, else home",
        choices=("home", "equivalent"),
    )
    module: str | None = setting(
        None,
        "modules that register kinds from elsewhere, separated by commas; None: the module that registered the kind",
        words="names of modules as `import` takes them",
        further=check_modules,
    )
    options: tuple[tuple[str, Any], ...] = ()  # set through the names of the options, which are fields too


# Data -----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DataConfig(Group, group="data"):
    """Sets where text comes from and how it becomes batches."""

    source: str = source_field("stdlib", "training set, or a mixture of several", several="mix")
    validation: str | None = source_field(
        None,
        "validation set, or several by name; None: the share that `source` holds out, for each part of a mixture",
        several="sets",
    )
    field: str = setting("text", "field of a jsonl line or TFDS example that holds the text")
    tokenizer: str = setting("bytes", "`bytes`, or the path of a tokenizer.json")
    sequence_length: int = setting(256, "tokens T of a sequence", low=1)
    cache_dir: str | None = setting(None, "folder of prepared datasets; None: $MHC_CACHE or ~/.cache/mhc")
    holdout: float = setting(
        0.05,
        "share of files (in a single file: of its documents) that are held out, by hash, where no split exists",
        low=0,
        below=1,
    )
    token_dtype: str = setting(
        "uint16", "tokens: dtype of .bin files", choices=("uint8", "uint16", "uint32", "int32", "int64")
    )
    end_token: int | None = setting(None, "tokens: id that ends a document; None: each file is one document", low=0)
    start_token: int | None = setting(
        None, "tokens: id that begins a document and is left out, since every document is given a bos", low=0
    )
    stop_tokens: tuple[int, ...] = setting((), "ids that end a generated text, beside the tokeniser's eos", low=0)
    prefetch: int = setting(2, "batches that a thread prepares ahead; 0: none", low=0)
    workers: int = setting(0, "processes that read and tokenise; 0: the thread that prepares batches does it", low=0)


# Training -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Group, group="optimizer"):
    """Sets the update rule."""

    name: str = setting(
        "adamw", "optimiser; muon updates matrices with Muon and the rest with AdamW", choices=("adamw", "sgd", "muon")
    )
    lr: float = setting(1e-3, "peak learning rate", low=0)
    b1: float = setting(0.9, "decay of AdamW's first moment", low=0, below=1)
    b2: float = setting(0.95, "decay of AdamW's second moment", low=0, below=1)
    eps: float = setting(1e-8, "AdamW: added to the root of the second moment", above=0)
    weight_decay: float = setting(0.1, "decoupled weight decay of matrices; never of norms, biases and maps", low=0)
    momentum: float = setting(0.9, "momentum of sgd and muon", low=0, below=1)
    clip_norm: float | None = setting(1.0, "largest global gradient norm; None: no clipping", above=0)


@dataclasses.dataclass(frozen=True)
class ScheduleConfig(Group, group="schedule"):
    """Sets the learning rate over steps: a linear warm-up, then one of the kinds."""

    kind: str = setting("cosine", "what follows the warm-up", choices=("constant", "cosine", "linear", "step", "wsd"))
    warmup_steps: int = setting(0, "steps until the peak rate", low=0)
    decay_steps: int | None = setting(
        None,
        "step at which the decay has ended; None: the run's last (with train.init_optimizer: STEP + train.steps)",
        low=1,
    )
    final_ratio: float = setting(0.1, "cosine, linear, wsd: last rate over peak rate", low=0, high=1)
    step_fractions: tuple[float, ...] = setting(
        (0.8, 0.9), "step: where the rate falls, as fractions of decay_steps", low=0, high=1
    )
    step_ratios: tuple[float, ...] = setting((0.316, 0.1), "step: rate over peak rate after each fraction", low=0)
    wsd_fraction: float = setting(0.2, "wsd: fraction of decay_steps that the decay takes", above=0, high=1)
    wsd_steps: int | None = setting(None, "wsd: steps of the decay; None: wsd_fraction of decay_steps", low=1)
    wsd_shape: str = setting("linear", "wsd: shape of the decay; sqrt: 1 - sqrt(progress)", choices=("linear", "sqrt"))


@dataclasses.dataclass(frozen=True)
class TrainConfig(Group, group="train"):
    """Sets how long a run trains, on how much, and from which weights."""

    steps: int = setting(1000, "optimiser steps", low=1)
    batch_size: int = setting(32, "sequences per optimiser step, over all devices", low=1)
    accumulation: int = setting(1, "micro-batches per optimiser step, a divisor of batch_size", low=1)
    init_from: str | None = setting(
        None, "RUN or RUN@STEP: start with the weights of another run; a plain run's also under another residual"
    )
    init_optimizer: bool = setting(False, "init_from: also take its optimiser's state and place in the schedule")
    init_data: bool = setting(False, "init_from: also take its place in the data; False: start at the first batch")


@dataclasses.dataclass(frozen=True)
class ValidationConfig(Group, group="validation"):
    """Sets when the validation loss is computed, and on which rows."""

    every: int = setting(100, "steps between validations; 0: only at the end", low=0)
    rows: int = setting(512, "rows of the fixed validation set, spread over its documents; 0: all rows", low=0)
    batches: int | None = setting(None, "instead of rows: batches of train.batch_size rows; 0: all rows", low=0)
    rule: str | None = setting(
        None,
        "which rows; spread: evenly over the documents; first: the first ones, as in older versions; None: spread, but "
        "first in the run of an older version",
        choices=("spread", "first"),
    )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Group, group="checkpoint"):
    """Sets when checkpoints are written and which are kept."""

    every: int = setting(200, "steps between checkpoints; 0: only at the end", low=0)
    keep: int = setting(2, "number of latest checkpoints that are kept", low=1)
    keep_every: int = setting(0, "also keep each checkpoint whose step is a multiple of this; 0: none", low=0)


@dataclasses.dataclass(frozen=True)
class MonitorConfig(Group, group="monitor"):
    """Sets what is measured and shown while training."""

    probe_every: int = setting(50, "steps between probes of the maps' gains; 0: no probe", low=0)
    probe_sequences: int = setting(4, "sequences of the fixed probe batch", low=1)
    zscore_window: int = setting(128, "steps of history behind the rolling z-score", low=2)
    zscore_min_history: int | None = setting(
        None,
        "steps of history before the first z-score; None: 64, or a quarter of a run under 256 steps, at least 16",
        low=2,
    )
    zscore_threshold: float = setting(6.0, "z-score above which a step is called a spike", above=0)
    gamma: bool = setting(False, "probes also hold the gradient in the scales of each sublayer's norms, and its share")
    tensorboard: bool = setting(True, "write TensorBoard event files beside metrics.jsonl")
    wandb: str = setting(
        "off",
        "Weights & Biases (extra [wandb]); offline: write files for `wandb sync`",
        choices=("off", "offline", "online"),
    )
    progress_every: int = setting(10, "steps between progress lines; 0: none", low=0)


@dataclasses.dataclass(frozen=True)
class GuardConfig(Group, group="guard"):
    """Sets what a run does about spikes and non-finite values, and which probed values raise an alarm."""

    on_spike: str = setting(
        "log",
        "clip: scale the update by the zclip rule; skip: leave the update out; rewind: go back to a checkpoint; halt: "
        "end the run",
        choices=("log", "clip", "skip", "rewind", "halt"),
    )
    on_nonfinite: str = setting(
        "halt",
        "what follows a non-finite loss or gradient, whose update is always left out",
        choices=("skip", "rewind", "halt"),
    )
    rewind_steps: int = setting(100, "rewind: go back to the last checkpoint at least this many steps earlier", low=0)
    skip_batches: int = setting(200, "rewind: batches that are left out from there on", low=0)
    max_rewinds: int = setting(3, "rewinds after which the run halts", low=0)
    zclip_alpha: float = setting(0.97, "clip: decay of the running mean and variance", low=0.0, below=1.0)
    zclip_threshold: float = setting(2.5, "clip: standard deviations up to which nothing is clipped", above=0.0)
    zclip_warmup: int = setting(25, "clip: steps that give the first mean and variance", low=1)
    forward_gain: float = setting(100.0, "alarm above this forward composite gain, mean over tokens", above=0.0)
    backward_gain: float = setting(100.0, "alarm above this backward composite gain, mean over tokens", above=0.0)
    residual_rms: float = setting(1e3, "alarm above this root mean square of the residual stream", above=0.0)
    attention_logit: float = setting(100.0, "alarm above this attention logit", above=0.0)


# Machine --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class WatchdogConfig(Group, group="watchdog"):
    """Sets when a run that makes no progress is reported."""

    seconds: float = setting(
        600.0,
        "seconds without progress after which the stacks of all threads go to train.log and stderr; 0: never",
        low=0,
    )
    compile_seconds: float = setting(3600.0, "the same during compilation, where this is longer", low=0)
    abort: bool = setting(False, "end the run then, with exit code 5; False: report and wait")


@dataclasses.dataclass(frozen=True)
class KernelsConfig(Group, group="kernels"):
    """Sets how the passes over residual streams are computed."""

    impl: str = setting(
        "auto",
        "implementation; auto: xla; xla: as XLA fuses them; pallas_tpu: kernels for one TPU, never run on one",
        choices=("auto", "xla", "pallas_tpu"),
    )


@dataclasses.dataclass(frozen=True)
class MeshConfig(Group, group="mesh"):
    """Sets the number of devices along each axis; the batch is split over data, fsdp and expert."""

    data: int = setting(-1, "devices that split the batch alone; -1: those that the other axes leave", low=-1)
    fsdp: int = setting(1, "devices that also split parameters", low=1)
    tensor: int = setting(1, "devices that split heads and the feed-forward's width", low=1)
    expert: int = setting(1, "devices that split experts", low=1)


@dataclasses.dataclass(frozen=True)
class DistributedConfig(Group, group="distributed"):
    """Sets how the processes of a run find each other (jax.distributed): one for each host, or several."""

    cluster: str = setting(
        "none",
        "none: one process; auto: by the environment (TPU, Slurm, Kubernetes, MPI); slurm, k8s: by that environment; "
        "address: by the fields below",
        choices=("none", "auto", "slurm", "k8s", "address"),
    )
    coordinator: str | None = setting(None, "address: HOST:PORT at which process 0 listens")
    processes: int = setting(1, "address: number of processes", low=1)
    process_id: int = setting(0, "address: number of this process, from 0", low=0)
    timeout: int = setting(100, "seconds without a heartbeat after which a process counts as lost", low=1)
    start_timeout: int = setting(300, "seconds that processes wait for each other at the start", low=1)


@dataclasses.dataclass(frozen=True)
class SeedConfig(Group, group="seed"):
    """Sets the seeds, one for each purpose; the arms of a comparison share them."""

    init: int = setting(0, "initial weights; each parameter's key is folded in from its path", low=0, below=2**32)
    data: int = setting(0, "order of documents", low=0, below=2**32)
    noise: int = setting(0, "positions.noise, with the number of the step", low=0, below=2**32)
