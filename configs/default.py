"""Every field of a run, with its default. ``mhc/config.py`` checks what is set here, field by field and in combination.

``None`` in a comment means "derive it" or "none", as the comment says; from a command line: ``--config.residual.n=4``,
``--config.optimizer.clip_norm=None``. A file of your own changes what it needs to and keeps the rest: configs/demo.py.
"""

from __future__ import annotations

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    """The default configuration, locked: a field that does not exist cannot be set by mistake."""
    config = ConfigDict()

    config.model = model = ConfigDict()
    model.layers = 12  # blocks L; each has two sublayers (attention, feed-forward), so S = 2L
    model.width = 256  # model width D
    model.vocab_size = placeholder(int)  # vocabulary V, at least the tokeniser's; None: the tokeniser's size
    model.dtype = "float32"  # compute dtype: float32 | bfloat16; parameters and maps stay float32
    model.remat = "none"  # what the backward pass computes again: none | full | dots
    model.scan = True  # scan over blocks; False unrolls them: same numbers, longer compile

    config.attention = attention = ConfigDict()
    attention.heads = 4  # query heads H
    attention.kv_heads = placeholder(int)  # key and value heads G, a divisor of heads; None: heads
    attention.head_dim = placeholder(int)  # width K of a head, even under rope; None: width / heads
    attention.impl = "auto"  # auto | xla | sdpa (jax.nn.dot_product_attention)

    config.positions = positions = ConfigDict()
    positions.kind = "rope"  # rope | none
    positions.theta = 10_000.0  # base of the rotary frequencies

    config.mlp = mlp = ConfigDict()
    mlp.kind = "swiglu"  # swiglu (three matrices) | gelu (two)
    mlp.width = placeholder(int)  # hidden width F; None: 4 D (gelu), 8/3 D rounded up to a multiple of 8 (swiglu)

    config.norm = norm = ConfigDict()
    norm.eps = 1e-6  # RMSNorm: added to the mean square inside the root

    config.head = head = ConfigDict()
    head.tied = False  # use the embedding as the head's weight

    config.init = init = ConfigDict()
    init.kind = "normal"  # normal | fan_in (standard deviation 1/sqrt(fan-in))
    init.std = 0.02  # standard deviation of `normal`
    init.scale_residual = True  # divide the sublayers' output projections by sqrt(2L)

    config.residual = residual = ConfigDict()
    residual.kind = "mhc"  # topology: plain | hc | mhc | mhc_lite | kromhc | identity
    residual.n = placeholder(int)  # streams N, 1 to 8 (mhc_lite: to 5; kromhc: 1, 2, 4, 8); None: 1 for plain, else 4
    residual.scale = 1.0  # plain only: x' = scale x + F(x); 0 is the no-residual control
    residual.init = placeholder(str)  # initial maps: hc (of hc) | home | equivalent | fanin | v4 (of mhc and its kin)
    residual.alpha = placeholder(float)  # gate of the maps' input-dependent part at init; None: the preset's
    residual.res_gap = 4.0  # init equivalent: how far the logits off the diagonal lie below it
    residual.sinkhorn = "paper"  # order of normalisations: paper | deepseek (with eps; also adds map_eps to pre)
    residual.iters = 20  # mhc: Sinkhorn iterations
    residual.collapse = placeholder(str)  # streams to one: sum | mean | head (learned); None: sum for hc, else mean
    residual.dynamic = True  # hc: maps depend on the input; False leaves the biases alone
    residual.tanh = True  # hc: tanh around the input-dependent part
    residual.rms_eps = 1e-6  # inside the root of the maps' norm
    residual.map_eps = 1e-6  # sinkhorn=deepseek, and collapse=head: added to the read weights
    residual.sinkhorn_eps = 1e-6  # sinkhorn=deepseek: added to the sums that are divided by
    residual.decay_dynamic = False  # hc: weight decay also on the input-dependent part's weights

    config.data = data = ConfigDict()
    data.source = "stdlib"  # training set: stdlib | tfds:<name> | text:<glob> | tokens:<glob>
    data.validation = placeholder(str)  # validation set, a source; None: the held-out split of data.source
    data.field = "text"  # field of a jsonl line or TFDS example that holds the text
    data.tokenizer = "bytes"  # bytes | path of a tokenizer.json
    data.sequence_length = 256  # tokens T of a sequence
    data.cache_dir = placeholder(str)  # where prepared datasets live; None: $MHC_CACHE or ~/.cache/mhc
    data.holdout = 0.05  # share of files (one file: of its documents) held out by hash where no split exists
    data.token_dtype = "uint16"  # tokens: dtype of .bin files: uint8 | uint16 | uint32 | int32 | int64
    data.end_token = placeholder(int)  # tokens: id that ends a document; None: a file is one document
    data.prefetch = 2  # batches that a thread prepares ahead; 0: none

    config.optimizer = optimizer = ConfigDict()
    optimizer.name = "adamw"  # adamw | sgd | muon (matrices; AdamW takes the rest)
    optimizer.lr = 1e-3  # peak learning rate
    optimizer.b1 = 0.9  # AdamW: decay of the first moment
    optimizer.b2 = 0.95  # AdamW: decay of the second moment
    optimizer.eps = 1e-8  # AdamW: added to the root of the second moment
    optimizer.weight_decay = 0.1  # decoupled; on matrices, never on norms, biases and maps
    optimizer.momentum = 0.9  # sgd and muon
    optimizer.clip_norm = 1.0  # largest global gradient norm; None: no clipping

    config.schedule = schedule = ConfigDict()
    schedule.kind = "cosine"  # what follows the warm-up: constant | cosine | linear | step | wsd
    schedule.warmup_steps = 0  # steps of linear warm-up until the peak rate
    schedule.decay_steps = placeholder(int)  # step at which the decay has ended; None: train.steps
    schedule.final_ratio = 0.1  # cosine, linear, wsd: last rate over peak rate
    schedule.step_fractions = (0.8, 0.9)  # step: where the rate falls, as shares of decay_steps
    schedule.step_ratios = (0.316, 0.1)  # step: rate over peak rate from there on
    schedule.wsd_fraction = 0.2  # wsd: share of decay_steps spent decaying

    config.train = train = ConfigDict()
    train.steps = 1000  # optimiser steps
    train.batch_size = 32  # sequences per optimiser step, over all devices
    train.accumulation = 1  # micro-batches per optimiser step, a divisor of batch_size

    config.validation = validation = ConfigDict()
    validation.every = 100  # steps between validations; 0: only at the end
    validation.batches = 16  # batches of the fixed validation set; 0: the whole set

    config.checkpoint = checkpoint = ConfigDict()
    checkpoint.every = 200  # steps between checkpoints; 0: only at the end
    checkpoint.keep = 2  # latest checkpoints kept
    checkpoint.keep_every = 0  # also keep each checkpoint whose step is a multiple; 0: none

    config.monitor = monitor = ConfigDict()
    monitor.probe_every = 50  # steps between probes of the maps' gains; 0: no probe
    monitor.probe_sequences = 4  # sequences of the fixed probe batch
    monitor.zscore_window = 128  # steps of history behind the rolling z-score
    monitor.zscore_min_history = 64  # steps of history before the first z-score
    monitor.zscore_threshold = 6.0  # z-score above which a step is called a spike
    monitor.tensorboard = True  # write TensorBoard event files beside metrics.jsonl
    monitor.wandb = "off"  # Weights & Biases: off | offline (files for `wandb sync`) | online; needs the extra [wandb]
    monitor.progress_every = 10  # steps between progress lines; 0: none

    config.guard = guard = ConfigDict()
    guard.on_spike = "log"  # log | clip (zclip rule) | skip (leave the update out) | rewind | halt
    guard.on_nonfinite = "halt"  # skip | rewind | halt; whatever it is, the update is left out
    guard.rewind_steps = 100  # rewind: to the last checkpoint at least so many steps back
    guard.skip_batches = 200  # rewind: batches left out from there on
    guard.max_rewinds = 3  # rewinds before the run halts
    guard.zclip_alpha = 0.97  # clip: decay of the running mean and variance of the gradient norm
    guard.zclip_threshold = 2.5  # clip: standard deviations that pass unclipped
    guard.zclip_warmup = 25  # clip: steps that give the first mean and variance
    guard.forward_gain = 100.0  # alarm: forward composite gain, token mean
    guard.backward_gain = 100.0  # alarm: backward composite gain, token mean
    guard.residual_rms = 1e3  # alarm: root mean square of the residual stream
    guard.attention_logit = 100.0  # alarm: largest attention logit

    config.mesh = mesh = ConfigDict()
    mesh.data = -1  # devices along the data axis; -1: those that the other axes leave
    mesh.fsdp = 1  # devices along which parameters are split
    mesh.tensor = 1  # devices along which heads and feed-forward width are split
    mesh.expert = 1  # devices along which experts are split

    config.seed = seed = ConfigDict()
    seed.init = 0  # initial weights; each parameter's key is folded in from its path
    seed.data = 0  # order of documents

    return config.lock()
