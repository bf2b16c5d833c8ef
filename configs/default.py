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
    model.remat = "none"  # what the backward pass computes again: none | full | dots | streams (residual connections)
    model.remat_blocks = placeholder(int)  # remat=streams: blocks between kept streams; None: the mHC paper's formula
    model.scan = True  # scan over blocks; False unrolls them: same numbers, longer compile
    model.embed_scale = False  # multiply embeddings by sqrt(D)

    config.attention = attention = ConfigDict()
    attention.kind = "heads"  # heads (multi-head, grouped, multi-query by kv_heads) | mla (latent keys and values)
    attention.heads = 4  # query heads H
    attention.kv_heads = placeholder(int)  # key and value heads G, a divisor of heads; None: heads
    attention.head_dim = placeholder(int)  # width K of a head (mla: without its rotary part); None: width / heads
    attention.value_dim = placeholder(int)  # mla: width of a head's values; None: head_dim
    attention.kv_rank = 512  # mla: width C of the latent that keys and values come from
    attention.q_rank = placeholder(int)  # mla: width of the latent that queries come from; None: straight from D
    attention.rope_dim = placeholder(int)  # mla: width R of the rotary part; None: head_dim / 2 under rope, else 0
    attention.qk_norm = False  # RMSNorm with a weight on each head's queries and keys
    attention.softcap = placeholder(float)  # c tanh(logits / c); None: no cap
    attention.scale = placeholder(float)  # of the logits; None: 1 / sqrt(width of a query head)
    attention.bias = False  # biases on the four projections
    attention.window = placeholder(int)  # a query sees the last `window` positions, its own included; None: all
    attention.global_every = 0  # each global_every-th layer sees all positions whatever the window; 0: none
    attention.prefix = 0  # first positions of a document that see one another; targets among them do not count
    attention.impl = "auto"  # auto | xla | sdpa (jax.nn.dot_product_attention) | flash (JAX's TPU kernel)

    config.positions = positions = ConfigDict()
    positions.kind = "rope"  # rope | learned | sinusoidal | relative_bias (T5) | alibi | none
    positions.theta = 10_000.0  # rope: base of the rotary frequencies
    positions.scaling = "none"  # rope: none | linear | ntk | dynamic | yarn | llama3
    positions.factor = 1.0  # rope with scaling: how much longer than original_length
    positions.original_length = placeholder(int)  # dynamic, yarn, llama3: length trained unscaled; None: T
    positions.low_frequency = 1.0  # llama3: turns within original_length below which all is scaled
    positions.high_frequency = 4.0  # llama3: turns within original_length above which nothing is scaled
    positions.beta_fast = 32.0  # yarn: turns within original_length above which nothing is scaled
    positions.beta_slow = 1.0  # yarn: turns within original_length below which all is scaled
    positions.attention_factor = placeholder(float)  # yarn: of cosines and sines; None: 0.1 ln(factor) + 1
    positions.max_length = placeholder(int)  # learned: rows of the table; None: T
    positions.buckets = 32  # relative_bias: buckets, half of them one distance each
    positions.max_distance = 128  # relative_bias: distance at which the last bucket begins

    config.mlp = mlp = ConfigDict()
    mlp.kind = "swiglu"  # two matrices: relu | gelu | silu; three: glu (sigmoid gate) | geglu | swiglu
    mlp.width = placeholder(int)  # hidden width F; None: 4 D, with a gate 8/3 D rounded up to a multiple of 8
    mlp.clamp = placeholder(float)  # with a gate: its input is clipped to ±clamp; None: not
    mlp.bias = False  # biases on the projections

    config.moe = moe = ConfigDict()
    moe.experts = 0  # routed experts E; 0: dense
    moe.top_k = 2  # routed experts a token goes to; none is dropped
    moe.width = placeholder(int)  # hidden width F of an expert; None: mlp.width / top_k
    moe.shared = 0  # experts of that width that every token goes to
    moe.dense_layers = 0  # leading layers with a dense feed-forward
    moe.score = "softmax"  # of the router's logits: softmax | sigmoid
    moe.normalize = True  # the chosen scores are divided by their sum
    moe.scale = 1.0  # factor of the routed experts' sum
    moe.balance = "loss_free"  # loss_free (a bias in the choice, moved against the load) | auxiliary (a loss) | none
    moe.balance_rate = 1e-3  # loss_free: step of the bias
    moe.balance_loss = 1e-2  # auxiliary: coefficient of the loss, a layer
    moe.z_loss = 0.0  # coefficient of the mean squared log-sum-exp of the router's logits, a layer

    config.norm = norm = ConfigDict()
    norm.kind = "rmsnorm"  # rmsnorm | layernorm
    norm.placement = "pre"  # pre F(norm u) | post norm F(u) | sandwich norm F(norm u): always inside F
    norm.final = True  # a norm before the head
    norm.embedding = False  # a norm after the embedding
    norm.eps = 1e-6  # added to the mean square inside the root
    norm.gamma_init = 1.0  # initial scale of the sublayers' norms
    norm.gamma_frozen = False  # the sublayers' scales are not trained
    norm.gamma_schedule = placeholder(float)  # their scale at train.steps, linearly from gamma_init; None: trained

    config.head = head = ConfigDict()
    head.tied = False  # use the embedding as the head's weight
    head.softcap = placeholder(float)  # c tanh(logits / c); None: no cap
    head.z_loss = 0.0  # coefficient of the mean squared log-sum-exp of the logits in the objective
    head.chunk = placeholder(int)  # tokens of a row whose logits are held at once; None: 2^25 logits a device

    config.init = init = ConfigDict()
    init.kind = "normal"  # normal | fan_in (standard deviation 1/sqrt(fan-in))
    init.std = 0.02  # standard deviation of `normal`
    init.scale_residual = True  # divide the sublayers' output projections by sqrt(2L)
    init.scale_streams = False  # multiply them by sqrt(N), as the HC paper does

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
    data.source = "stdlib"  # stdlib | tfds:<name> | text:<glob> | tokens:<glob> | prepared:<folder> | mix:…
    data.validation = placeholder(str)  # a source, or sets:NAME=SOURCE;…; None: what data.source holds out
    data.field = "text"  # field of a jsonl line or TFDS example that holds the text
    data.tokenizer = "bytes"  # bytes | path of a tokenizer.json
    data.sequence_length = 256  # tokens T of a sequence
    data.cache_dir = placeholder(str)  # where prepared datasets live; None: $MHC_CACHE or ~/.cache/mhc
    data.holdout = 0.05  # share of files (one file: of its documents) held out by hash where no split exists
    data.token_dtype = "uint16"  # tokens: dtype of .bin files: uint8 | uint16 | uint32 | int32 | int64
    data.end_token = placeholder(int)  # tokens: id that ends a document; None: a file is one document
    data.stop_tokens = ()  # ids that end a generated text, beside the tokeniser's eos; an import sets them
    data.prefetch = 2  # batches that a thread prepares ahead; 0: none
    data.workers = 0  # processes that read and tokenise; 0: the thread that prepares batches does

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
    schedule.decay_steps = placeholder(int)  # step at which the decay has ended; None: the run's last
    schedule.final_ratio = 0.1  # cosine, linear, wsd: last rate over peak rate
    schedule.step_fractions = (0.8, 0.9)  # step: where the rate falls, as shares of decay_steps
    schedule.step_ratios = (0.316, 0.1)  # step: rate over peak rate from there on
    schedule.wsd_fraction = 0.2  # wsd: share of decay_steps spent decaying
    schedule.wsd_steps = placeholder(int)  # wsd: steps spent decaying; None: wsd_fraction of decay_steps
    schedule.wsd_shape = "linear"  # wsd: linear | sqrt, 1 - sqrt(progress)

    config.train = train = ConfigDict()
    train.steps = 1000  # optimiser steps
    train.batch_size = 32  # sequences per optimiser step, over all devices
    train.accumulation = 1  # micro-batches per optimiser step, a divisor of batch_size
    train.init_from = placeholder(str)  # RUN or RUN@step: start with another run's weights (docs/interop.md)
    train.init_optimizer = False  # init_from: also with its optimiser's state and place in the schedule
    train.init_data = False  # init_from: also with its place in the data; False: from the first batch

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
    monitor.zscore_min_history = placeholder(int)  # steps before the first z-score; None: 64, fewer under 256 steps
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

    config.watchdog = watchdog = ConfigDict()
    watchdog.seconds = 600.0  # without progress, until all threads' stacks go to train.log and stderr; 0: off
    watchdog.compile_seconds = 3600.0  # the same while a program is compiled, if longer
    watchdog.abort = False  # end the run then, with exit code 5; False: report it and wait

    config.mesh = mesh = ConfigDict()
    mesh.data = -1  # devices along the data axis; -1: those that the other axes leave
    mesh.fsdp = 1  # devices along which parameters are split
    mesh.tensor = 1  # devices along which heads and feed-forward width are split
    mesh.expert = 1  # devices along which experts are split

    config.distributed = distributed = ConfigDict()
    distributed.cluster = "none"  # none: one process; auto, slurm, k8s: by the environment; address: as below
    distributed.coordinator = placeholder(str)  # address: HOST:PORT of process 0, which listens there
    distributed.processes = 1  # address: their number
    distributed.process_id = 0  # address: which of them this is, from 0
    distributed.timeout = 100  # seconds without a sign of life after which a process counts as lost
    distributed.start_timeout = 300  # seconds that processes wait for each other at the start

    config.seed = seed = ConfigDict()
    seed.init = 0  # initial weights; each parameter's key is folded in from its path
    seed.data = 0  # order of documents

    return config.lock()
