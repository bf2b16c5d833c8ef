"""Configuration: frozen, validated dataclasses that everything below the command line reads.

It is long because every field stands here once, with its rule, beside the checks of combinations.

A run is described by an ``ml_collections.ConfigDict`` at the edge (``configs/*.py`` and ``--config.field=value``);
``from_config_dict`` turns it into the dataclasses below. Nothing below that line sees a ``ConfigDict``. ``None`` always
means "derive it" or "none": the text of the field says which, and ``resolve`` fills in what derives from other fields.

A group checks its fields when it is made and a ``Config`` their combinations, so that one that exists is valid, also
after ``dataclasses.replace``. Every complaint is a ``UserError`` of one line: field, what was given, what is allowed.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from mhc import kinds
from mhc.errors import UserError, did_you_mean
from mhc.rules import Rule, refuse

ZSCORE_HISTORY = 64  # steps before the first z-score of a run that is not short
SOURCES = ("stdlib", "tfds:<name>", "text:<glob>", "tokens:<glob>", "prepared:<folder>")


class Share(NamedTuple):
    """A source among several."""

    name: str  # in metrics; "" of a source that is alone
    weight: float  # of the sequences; all of a mixture add up to 1
    source: str


def shares(value: str, field: str = "data.source") -> tuple[Share, ...]:
    """The sources of ``mix:NAME=WEIGHT*SOURCE;…`` or ``sets:NAME=SOURCE;…``; of any other, that one alone.

    A ``;`` may end the last part. Raises UserError for a part that is not of that form, a name used twice, or a weight
    that is no positive number.
    """
    kind, _, rest = value.partition(":")
    if kind not in ("mix", "sets"):
        return (Share("", 1.0, value),)
    form = "NAME=WEIGHT*SOURCE" if kind == "mix" else "NAME=SOURCE"
    found: list[Share] = []
    parts = rest.strip().removesuffix(";").split(";")
    for place, part in enumerate(parts, start=1):
        if not part.strip():
            which = f"part {place} of {len(parts)} is empty" if len(parts) > 1 else f"{value!r} names no source"
            raise UserError(f"{field}: {which}, allowed: {kind}:{form};{form};…")
        name, equals, source = part.partition("=")
        name = name.strip()
        weight, star, rest_of = source.partition("*") if kind == "mix" else ("1", "*", source)
        if source.strip() and (":" in weight or weight.strip() in ("", "stdlib")):  # a glob may have stars as well
            given = (rest_of if star and not weight.strip() else source).strip()
            raise UserError(f"{field}: the part {name!r} has no weight, allowed: {form}, e.g. {name}=1*{given}")
        if not (name and equals and star and rest_of.strip()):
            refuse(field, part.strip(), f"{kind}:{form};{form};… with {form} in each part")
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            refuse(field, name, f"{form} with a name of letters, digits, '_', '-' and '.'")
        if name in [one.name for one in found]:
            raise UserError(
                f"{field}: the name {name!r} is used twice, allowed: {form} with a name of its own in each part"
            )
        try:
            number = float(weight)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and number > 0):
            refuse(field, weight.strip(), f"{form} with a weight above 0 ({name})")
        _check_source(field, rest_of.strip(), ", ".join(SOURCES))
        found.append(Share(name, number, rest_of.strip()))
    total = sum(one.weight for one in found)
    if not math.isfinite(total) or not all(one.weight / total for one in found):
        weights = ", ".join(f"{one.weight:g}" for one in found)
        raise UserError(f"{field}: the weights {weights} are too large or too far apart, allowed: e.g. 0.7 and 0.3")
    return tuple(one._replace(weight=one.weight / total) for one in found)


def _check_source(name: str, value: str, allowed: str) -> None:
    prefix, colon, rest = value.partition(":")
    kinds_of = [name.partition(":")[0] for name in SOURCES]
    if colon and prefix in ("mix", "sets"):
        where = {"mix": "data.source", "sets": "data.validation"}[prefix]
        refuse(name, value, f"{allowed}; {prefix}: is for {where} as a whole")
    if value != "stdlib" and not (prefix in kinds_of[1:] and rest):
        refuse(name, value, allowed, did_you_mean(prefix, kinds_of) if not colon or rest else "")


def _field(default: Any, doc: str, *, source: str = "", **rule: Any) -> Any:
    """Return a dataclass field with its rule; ``source``: it names a source, or several by ``mix:`` or ``sets:``."""
    if source:
        several = {"mix": "mix:<name>=<weight>*<source>;…", "sets": "sets:<name>=<source>;…"}[source]
        rule["words"] = words = f"one of {', '.join(SOURCES)}, {several}"

        def check(name: str, value: str) -> None:
            if value.startswith(f"{source}:"):
                shares(value, name)
            else:
                _check_source(name, value, words)

        rule["further"] = check
    return dataclasses.field(default=default, metadata={"rule": Rule(doc, **rule)})


@functools.cache
def _hints(group: Any) -> Mapping[str, Any]:
    """Types of a group's fields; looked up once, for a config is made anew wherever one is changed."""
    return typing.get_type_hints(group)


# Groups ---------------------------------------------------------------------------------------------------------------


class _Group:
    """A group of fields: checks each one's type and range when it is made, under the name ``<group>.<field>``."""

    group: ClassVar[str]

    def __init_subclass__(cls, *, group: str) -> None:
        cls.group = group

    def __post_init__(self) -> None:
        hints = _hints(type(self))  # type: ignore[arg-type]  # a class is hashable
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            rule: Rule = field.metadata["rule"]
            name = f"{self.group}.{field.name}"
            object.__setattr__(self, field.name, rule.check(name, hints[field.name], getattr(self, field.name)))


@dataclasses.dataclass(frozen=True)
class ModelConfig(_Group, group="model"):
    """The decoder's size and how it is computed."""

    layers: int = _field(12, "blocks L; each has two sublayers, so S = 2L", low=1)
    width: int = _field(256, "model width D", low=1)
    vocab_size: int | None = _field(None, "vocabulary V, at least the tokeniser's; None: the tokeniser's size", low=2)
    dtype: str = _field("float32", "compute dtype (parameters and maps stay float32)", choices=("float32", "bfloat16"))
    remat: str = _field(
        "none",
        "what the backward pass computes again: all but each block's input; all but products; the residual connections",
        choices=("none", "full", "dots", "streams"),
    )
    remat_blocks: int | None = _field(
        None, "remat=streams: blocks between streams that are kept; None: the mHC paper's formula", low=1
    )
    scan: bool = _field(True, "scan over blocks; False unrolls them: same numbers, longer compile")
    embed_scale: bool = _field(False, "multiply embeddings by sqrt(D)")


@dataclasses.dataclass(frozen=True)
class AttentionConfig(_Group, group="attention"):
    """Causal self-attention."""

    kind: str = _field(
        "heads",
        "heads: multi-head, grouped or multi-query by kv_heads; mla: latent keys and values",
        choices=("heads", "mla"),
    )
    heads: int = _field(4, "query heads H", low=1)
    kv_heads: int | None = _field(None, "heads: key and value heads G, a divisor of heads; None: heads", low=1)
    head_dim: int | None = _field(None, "width K of a head (mla: without its rotary part); None: width / heads", low=1)
    value_dim: int | None = _field(None, "mla: width of a head's values; None: head_dim", low=1)
    kv_rank: int = _field(512, "mla: width C of the latent that keys and values come from", low=1)
    q_rank: int | None = _field(None, "mla: width of the latent that queries come from; None: straight from D", low=1)
    rope_dim: int | None = _field(
        None, "mla: width R of the rotary part, one key for all heads; None: head_dim / 2 under rope, else 0", low=0
    )
    qk_norm: bool = _field(False, "RMSNorm with a weight on each head's queries and keys, before rotation")
    softcap: float | None = _field(None, "c tanh(logits / c); None: no cap", above=0)
    scale: float | None = _field(None, "of the logits; None: 1 / sqrt(width of a query head)", above=0)
    bias: bool = _field(False, "biases on the four projections")
    window: int | None = _field(None, "a query sees the last `window` positions, its own included; None: all", low=1)
    global_every: int = _field(0, "each global_every-th layer sees all positions whatever the window; 0: none", low=0)
    prefix: int = _field(
        0, "first positions of a document that see one another both ways; targets among them do not count", low=0
    )
    impl: str = _field(
        "auto",
        "xla: the reference; sdpa: jax.nn.dot_product_attention; flash: JAX's splash kernel for TPU",
        choices=("auto", "xla", "sdpa", "flash"),
    )


@dataclasses.dataclass(frozen=True)
class PositionsConfig(_Group, group="positions"):
    """How attention knows positions."""

    kind: str = _field(
        "rope",
        "rope: rotary; learned, sinusoidal: added to the embedding; relative_bias (T5), alibi: added to the logits",
        choices=("rope", "learned", "sinusoidal", "relative_bias", "alibi", "none"),
    )
    theta: float = _field(10_000.0, "rope: base of the rotary frequencies", above=0)
    scaling: str = _field(
        "none",
        "rope: frequencies for contexts longer than original_length",
        choices=("none", "linear", "ntk", "dynamic", "yarn", "llama3"),
    )
    factor: float = _field(1.0, "rope with scaling: how much longer", low=1)
    original_length: int | None = _field(
        None, "dynamic, yarn, llama3: length trained without scaling; None: data.sequence_length", low=1
    )
    low_frequency: float = _field(1.0, "llama3: turns within original_length below which all is scaled", above=0)
    high_frequency: float = _field(4.0, "llama3: turns within original_length above which nothing is scaled", above=0)
    beta_fast: float = _field(32.0, "yarn: turns within original_length above which nothing is scaled", above=0)
    beta_slow: float = _field(1.0, "yarn: turns within original_length below which all is scaled", above=0)
    attention_factor: float | None = _field(
        None, "yarn: factor of cosines and sines; None: 0.1 ln(factor) + 1", above=0
    )
    max_length: int | None = _field(None, "learned: rows of the table; None: data.sequence_length", low=1)
    buckets: int = _field(32, "relative_bias: buckets, half of them one distance each", low=2)
    max_distance: int = _field(128, "relative_bias: distance at which the last bucket begins", low=2)


@dataclasses.dataclass(frozen=True)
class MlpConfig(_Group, group="mlp"):
    """The dense feed-forward sublayer."""

    kind: str = _field(
        "swiglu",
        "two matrices with relu, gelu or silu, or three with a gate: glu (sigmoid), geglu (gelu), swiglu (silu)",
        choices=("relu", "gelu", "silu", "glu", "geglu", "swiglu"),
    )
    width: int | None = _field(None, "F; None: 4 D, with a gate 8/3 D rounded up to a multiple of 8", low=1)
    clamp: float | None = _field(None, "with a gate: its input is clipped to ±clamp; None: not", above=0)
    bias: bool = _field(False, "biases on the projections")


@dataclasses.dataclass(frozen=True)
class MoeConfig(_Group, group="moe"):
    """Mixture of experts in place of the dense feed-forward: dropless, each token to its top_k experts."""

    experts: int = _field(0, "routed experts E; 0: dense", low=0)
    top_k: int = _field(2, "routed experts a token goes to", low=1)
    width: int | None = _field(None, "hidden width F of an expert; None: mlp.width / top_k", low=1)
    shared: int = _field(0, "experts of that width that every token goes to", low=0)
    dense_layers: int = _field(0, "leading layers with a dense feed-forward", low=0)
    score: str = _field("softmax", "of the router's logits", choices=("softmax", "sigmoid"))
    normalize: bool = _field(True, "the chosen scores are divided by their sum")
    scale: float = _field(1.0, "factor of the routed experts' sum", above=0)
    balance: str = _field(
        "loss_free",
        "loss_free: a bias in the choice, moved against the load (arXiv:2408.15664); auxiliary: a loss; none",
        choices=("loss_free", "auxiliary", "none"),
    )
    balance_rate: float = _field(1e-3, "loss_free: step of the bias", above=0)
    balance_loss: float = _field(1e-2, "auxiliary: coefficient of the loss (arXiv:2101.03961), a layer", above=0)
    z_loss: float = _field(0.0, "coefficient of the mean squared log-sum-exp of the router's logits, a layer", low=0)


@dataclasses.dataclass(frozen=True)
class NormConfig(_Group, group="norm"):
    """Norms of the sublayers (always inside F, the streams are never normalised) and before the head."""

    kind: str = _field("rmsnorm", "layernorm also centres and has a bias", choices=("rmsnorm", "layernorm"))
    placement: str = _field(
        "pre", "pre: F(norm u); post: norm F(u); sandwich: norm F(norm u)", choices=("pre", "post", "sandwich")
    )
    final: bool = _field(True, "a norm before the head")
    embedding: bool = _field(False, "a norm after the embedding")
    eps: float = _field(1e-6, "added to the mean square inside the root", low=0)
    gamma_init: float = _field(1.0, "initial scale of the sublayers' norms")
    gamma_frozen: bool = _field(False, "the sublayers' scales are not trained")
    gamma_schedule: float | None = _field(
        None, "scale of the sublayers' norms at train.steps, reached linearly from gamma_init, untrained; None: trained"
    )


@dataclasses.dataclass(frozen=True)
class HeadConfig(_Group, group="head"):
    """The projection to the vocabulary."""

    tied: bool = _field(False, "use the embedding as the head's weight")
    softcap: float | None = _field(None, "c tanh(logits / c); None: no cap", above=0)
    z_loss: float = _field(0.0, "coefficient of the mean squared log-sum-exp of the logits in the objective", low=0)
    chunk: int | None = _field(
        None, "tokens of a row whose logits are held at once; None: as many as keep 2^25 logits a device", low=1
    )


@dataclasses.dataclass(frozen=True)
class InitConfig(_Group, group="init"):
    """Initial weights of everything but the residual maps (those: residual.init)."""

    kind: str = _field("normal", "standard deviation `std`, or 1/sqrt(fan-in)", choices=("normal", "fan_in"))
    std: float = _field(0.02, "standard deviation of `normal`", above=0)
    scale_residual: bool = _field(True, "divide the sublayers' output projections by sqrt(2L)")
    scale_streams: bool = _field(False, "multiply them by sqrt(N), as the HC paper does (arXiv:2409.19606)")


@dataclasses.dataclass(frozen=True, init=False)
class ResidualConfig(_Group, group="residual"):
    """The residual topology: what this project compares.

    These fields every kind has. Its own, such as ``scale`` of plain, are declared with it (``mhc.kinds.Kind.options``)
    and are attributes here too. A kind from elsewhere is registered by importing ``module``, which making this does.
    """

    kind: str = _field("mhc", "topology", choices=kinds.names)
    n: int | None = _field(None, "streams N; None: the kind's default", low=1)
    init: str | None = _field(None, "initial maps; None: the kind's first preset", choices=kinds.inits)
    collapse: str | None = _field(None, "streams to one; None: the kind's first way", choices=kinds.collapses)
    module: str | None = _field(
        None,
        "modules that register kinds from elsewhere, separated by commas; None: the one that registered the kind",
        words="names of modules as `import` takes them",
        further=kinds.check_modules,
    )
    options: tuple[tuple[str, Any], ...] = ()
    """Every option of the kind with its value, then what was set for other kinds and may stand here."""

    def __init__(
        self,
        kind: str = "mhc",
        n: int | None = None,
        init: str | None = None,
        collapse: str | None = None,
        module: str | None = None,
        options: Iterable[tuple[str, Any]] = (),
        **named: Any,
    ):
        """Check and set the fields; options of kinds by name, or as pairs in ``options``, over which names count.

        Raises:
          UserError: a module that cannot be imported, an unknown field, or a value that a field may not hold.
        """
        fields = {"kind": kind, "n": n, "init": init, "collapse": collapse, "module": module}
        if isinstance(module, str):
            kinds.load(module)
        if isinstance(kind, str) and kind not in kinds.names():
            more = "residual.module names what registers others" if module is None else f"{module} registers no other"
            refuse(
                "residual.kind",
                kind,
                f"one of {', '.join(kinds.names())}",
                f"{did_you_mean(kind, kinds.names())}; {more}",
            )
        hints = _hints(type(self))  # type: ignore[arg-type]
        for name, value in fields.items():
            rule = type(self).__dataclass_fields__[name].metadata["rule"]
            object.__setattr__(self, name, rule.check(f"residual.{name}", hints[name], value))
        for name in ("n", "init", "collapse"):
            allowed = self.spec.refusal(name, getattr(self, name))
            if allowed is not None:
                refuse(f"residual.{name}", getattr(self, name), allowed)
        object.__setattr__(self, "options", _kind_options(self.spec, dict(options) | named))

    def __post_init__(self) -> None:
        """Do nothing: ``__init__`` has checked every field."""

    def __getattr__(self, name: str) -> Any:
        own = dict(self.__dict__.get("options", ()))
        if name in own:
            return own[name]
        if name in kinds.options():
            return kinds.options()[name].default
        raise AttributeError(f"no residual kind has an option {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the fields, so that a process that unpickles imports the module of the kind."""
        return _residual_config, (self.flat(),)

    def flat(self) -> dict[str, Any]:
        """Return {field: value}, options beside the others; ``module`` is left out where there is none."""
        common = {name: getattr(self, name) for name in kinds.COMMON}
        if self.module is None:
            del common["module"]
        return common | dict(self.options)

    def changed(self, **fields: Any) -> ResidualConfig:
        """Return this with other values of fields, options among them. Raises UserError as ``__init__``."""
        return ResidualConfig(**{**self.flat(), **fields})

    @property
    def spec(self) -> kinds.Kind:
        """The row of the kind: what it declares."""
        return kinds.known()[self.kind]

    @property
    def is_plain(self) -> bool:
        """Whether this is the plain residual, x' = x + F(x)."""
        return self.spec.is_plain and not self.apart_from_plain

    @property
    def apart_from_plain(self) -> dict[str, tuple[Any, Any]]:
        """{field: (value here, value needed)} of what keeps a fresh model from computing the plain residual's
        function."""
        wanted, spec = self.spec.preserving, self.spec
        first = {"init": next(iter(spec.inits), None), "collapse": spec.collapses[0], "n": spec.default_streams}
        given = {name: getattr(self, name) for name in wanted}
        # What is not said is chosen so that the function is kept, or is the kind's first choice.
        given = {name: first.get(name, wanted[name]) if value is None else value for name, value in given.items()}
        return {name: (given[name], wanted[name]) for name in wanted if given[name] != wanted[name]}


def _residual_config(fields: Mapping[str, Any]) -> ResidualConfig:
    return ResidualConfig(**fields)


def _kind_options(kind: kinds.Kind, given: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the options of a kind with their values, and after them those of other kinds that may stand beside it.

    Raises: UserError for an unknown option, a wrong value, or one of another kind that would silently do nothing.
    """
    values = {name: option.default for name, option in kind.options.items()}
    for name, value in sorted(given.items()):
        _, hint, default, rule = _find(f"residual.{name}")
        checked = rule.check(f"residual.{name}", hint, value)
        if name in values or (checked != default and rule.anywhere):
            values[name] = checked
        elif checked != default:
            has = " and ".join(kinds.owners(name))
            refuse(f"residual.{name}", value, f"{default} with residual.kind={kind.name}: it is a choice of {has}")
    return tuple(values.items())


@dataclasses.dataclass(frozen=True)
class DataConfig(_Group, group="data"):
    """Where text comes from and how it becomes batches."""

    source: str = _field("stdlib", "training set, or a mixture of several", source="mix")
    validation: str | None = _field(
        None, "validation set, or several by name; None: what `source` holds out, of a mixture by part", source="sets"
    )
    field: str = _field("text", "field of a jsonl line or TFDS example that holds the text")
    tokenizer: str = _field("bytes", "`bytes`, or the path of a tokenizer.json")
    sequence_length: int = _field(256, "tokens T of a sequence", low=1)
    cache_dir: str | None = _field(None, "where prepared datasets live; None: $MHC_CACHE or ~/.cache/mhc")
    holdout: float = _field(
        0.05, "share of files (one file: of its documents) held out by hash where no split exists", low=0, below=1
    )
    token_dtype: str = _field(
        "uint16", "tokens: dtype of .bin files", choices=("uint8", "uint16", "uint32", "int32", "int64")
    )
    end_token: int | None = _field(None, "tokens: id that ends a document; None: a file is one document", low=0)
    stop_tokens: tuple[int, ...] = _field((), "ids that end a generated text, beside the tokeniser's eos", low=0)
    prefetch: int = _field(2, "batches that a thread prepares ahead; 0: none", low=0)
    workers: int = _field(0, "processes that read and tokenise; 0: the thread that prepares batches does", low=0)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(_Group, group="optimizer"):
    """The update rule."""

    name: str = _field("adamw", "muon takes matrices, AdamW the rest", choices=("adamw", "sgd", "muon"))
    lr: float = _field(1e-3, "peak learning rate", low=0)
    b1: float = _field(0.9, "decay of AdamW's first moment", low=0, below=1)
    b2: float = _field(0.95, "decay of AdamW's second moment", low=0, below=1)
    eps: float = _field(1e-8, "AdamW: added to the root of the second moment", above=0)
    weight_decay: float = _field(0.1, "decoupled; on matrices, never on norms, biases and maps", low=0)
    momentum: float = _field(0.9, "sgd and muon", low=0, below=1)
    clip_norm: float | None = _field(1.0, "largest global gradient norm; None: no clipping", above=0)


@dataclasses.dataclass(frozen=True)
class ScheduleConfig(_Group, group="schedule"):
    """Learning rate over steps: a linear warm-up, then one of the kinds."""

    kind: str = _field("cosine", "what follows the warm-up", choices=("constant", "cosine", "linear", "step", "wsd"))
    warmup_steps: int = _field(0, "steps until the peak rate", low=0)
    decay_steps: int | None = _field(
        None, "step at which the decay has ended; None: the run's last (with init_optimizer: STEP + train.steps)", low=1
    )
    final_ratio: float = _field(0.1, "cosine, linear, wsd: last rate over peak rate", low=0, high=1)
    step_fractions: tuple[float, ...] = _field(
        (0.8, 0.9), "step: where the rate falls, as shares of decay_steps", low=0, high=1
    )
    step_ratios: tuple[float, ...] = _field((0.316, 0.1), "step: rate over peak rate from there on", low=0)
    wsd_fraction: float = _field(0.2, "wsd: share of decay_steps spent decaying", above=0, high=1)
    wsd_steps: int | None = _field(None, "wsd: steps spent decaying; None: wsd_fraction of decay_steps", low=1)
    wsd_shape: str = _field("linear", "wsd: how it decays; sqrt: 1 - sqrt(progress)", choices=("linear", "sqrt"))


@dataclasses.dataclass(frozen=True)
class TrainConfig(_Group, group="train"):
    """How long and on how much."""

    steps: int = _field(1000, "optimiser steps", low=1)
    batch_size: int = _field(32, "sequences per optimiser step, over all devices", low=1)
    accumulation: int = _field(1, "micro-batches per optimiser step, a divisor of batch_size", low=1)
    init_from: str | None = _field(
        None, "RUN or RUN@step: start with the weights of another run; a plain one's also under another residual"
    )
    init_optimizer: bool = _field(False, "init_from: also with its optimiser's state and place in the schedule")
    init_data: bool = _field(False, "init_from: also with its place in the data; False: from the first batch")


@dataclasses.dataclass(frozen=True)
class ValidationConfig(_Group, group="validation"):
    """When and on how much the validation loss is taken."""

    every: int = _field(100, "steps between validations; 0: only at the end", low=0)
    rows: int = _field(
        512, "rows of the fixed validation set, spread evenly over its documents; 0: the whole set", low=0
    )
    batches: int | None = _field(None, "in place of rows: batches of train.batch_size rows; 0: the whole set", low=0)
    rule: str | None = _field(None, "which rows; None: spread, of older runs first", choices=("spread", "first"))


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(_Group, group="checkpoint"):
    """When checkpoints are written and which are kept."""

    every: int = _field(200, "steps between checkpoints; 0: only at the end", low=0)
    keep: int = _field(2, "latest checkpoints kept", low=1)
    keep_every: int = _field(0, "also keep each checkpoint whose step is a multiple; 0: none", low=0)


@dataclasses.dataclass(frozen=True)
class MonitorConfig(_Group, group="monitor"):
    """What is measured and shown while training."""

    probe_every: int = _field(50, "steps between probes of the maps' gains; 0: no probe", low=0)
    probe_sequences: int = _field(4, "sequences of the fixed probe batch", low=1)
    zscore_window: int = _field(128, "steps of history behind the rolling z-score", low=2)
    zscore_min_history: int | None = _field(
        None,
        "steps of history before the first z-score; None: 64, in a run of under 256 steps a quarter of them, >= 16",
        low=2,
    )
    zscore_threshold: float = _field(6.0, "z-score above which a step is called a spike", above=0)
    tensorboard: bool = _field(True, "write TensorBoard event files beside metrics.jsonl")
    wandb: str = _field(
        "off", "Weights & Biases (extra [wandb]); offline: files for `wandb sync`", choices=("off", "offline", "online")
    )
    progress_every: int = _field(10, "steps between progress lines; 0: none", low=0)


@dataclasses.dataclass(frozen=True)
class GuardConfig(_Group, group="guard"):
    """What is done about spikes and non-finite values, and what counts as an alarm of the probes."""

    on_spike: str = _field(
        "log",
        "log | clip (scale the update by the zclip rule) | skip (leave the update out) | rewind | halt",
        choices=("log", "clip", "skip", "rewind", "halt"),
    )
    on_nonfinite: str = _field(
        "halt", "skip | rewind | halt; whatever it is, the update is left out", choices=("skip", "rewind", "halt")
    )
    rewind_steps: int = _field(100, "rewind: to the last checkpoint at least so many steps back", low=0)
    skip_batches: int = _field(200, "rewind: batches left out from there on", low=0)
    max_rewinds: int = _field(3, "rewinds before the run halts", low=0)
    zclip_alpha: float = _field(0.97, "clip: decay of the running mean and variance", low=0.0, below=1.0)
    zclip_threshold: float = _field(2.5, "clip: standard deviations that pass unclipped", above=0.0)
    zclip_warmup: int = _field(25, "clip: steps that give the first mean and variance", low=1)
    forward_gain: float = _field(100.0, "alarm: forward composite gain, token mean", above=0.0)
    backward_gain: float = _field(100.0, "alarm: backward composite gain, token mean", above=0.0)
    residual_rms: float = _field(1e3, "alarm: root mean square of the residual stream", above=0.0)
    attention_logit: float = _field(100.0, "alarm: largest attention logit", above=0.0)


@dataclasses.dataclass(frozen=True)
class WatchdogConfig(_Group, group="watchdog"):
    """When a run that does not get on is reported."""

    seconds: float = _field(
        600.0, "without progress, until all threads' stacks go to train.log and stderr; 0: off", low=0
    )
    compile_seconds: float = _field(3600.0, "the same while a program is compiled, if longer", low=0)
    abort: bool = _field(False, "end the run then, with exit code 5; False: report it and wait")


@dataclasses.dataclass(frozen=True)
class MeshConfig(_Group, group="mesh"):
    """Devices along each axis; the batch is split over data, fsdp and expert."""

    data: int = _field(-1, "-1: the devices that the other axes leave", low=-1)
    fsdp: int = _field(1, "parameters split", low=1)
    tensor: int = _field(1, "heads and feed-forward width split", low=1)
    expert: int = _field(1, "experts split", low=1)


@dataclasses.dataclass(frozen=True)
class DistributedConfig(_Group, group="distributed"):
    """How the processes of a run find each other (jax.distributed), one for each host or for some of its devices."""

    cluster: str = _field(
        "none",
        "none: one process; auto: by the environment (TPU, Slurm, Kubernetes, MPI); slurm | k8s: by this one's; "
        "address: by the fields below",
        choices=("none", "auto", "slurm", "k8s", "address"),
    )
    coordinator: str | None = _field(None, "address: HOST:PORT of process 0, which listens there")
    processes: int = _field(1, "address: their number", low=1)
    process_id: int = _field(0, "address: which of them this is, from 0", low=0)
    timeout: int = _field(100, "seconds without a sign of life after which a process counts as lost", low=1)
    start_timeout: int = _field(300, "seconds that processes wait for each other at the start", low=1)


@dataclasses.dataclass(frozen=True)
class SeedConfig(_Group, group="seed"):
    """Seeds, one a purpose: arms of a comparison share them."""

    init: int = _field(0, "initial weights (each parameter's key is folded in from its path)", low=0, below=2**32)
    data: int = _field(0, "order of documents", low=0, below=2**32)


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run. Raises UserError where fields do not go together."""

    model: ModelConfig = ModelConfig()
    attention: AttentionConfig = AttentionConfig()
    positions: PositionsConfig = PositionsConfig()
    mlp: MlpConfig = MlpConfig()
    moe: MoeConfig = MoeConfig()
    norm: NormConfig = NormConfig()
    head: HeadConfig = HeadConfig()
    init: InitConfig = InitConfig()
    residual: ResidualConfig = ResidualConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()
    guard: GuardConfig = GuardConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    mesh: MeshConfig = MeshConfig()
    distributed: DistributedConfig = DistributedConfig()
    seed: SeedConfig = SeedConfig()

    def __post_init__(self) -> None:
        _check_shapes(self)
        _check_attention(self)
        _check_positions(self)
        _check_feed_forward(self)
        _check_norm(self.norm)
        _check_remat(self.model)
        _check_residual(self)
        _check_schedule(self)
        _check_batch(self)

    @property
    def vocab_size(self) -> int:
        """V. Raises ValueError before ``resolve``, since the tokeniser decides it."""
        if self.model.vocab_size is None:
            raise ValueError("model.vocab_size is not known before mhc.config.resolve")
        return self.model.vocab_size

    @property
    def kv_heads(self) -> int:
        """G, derived where the field is None, as are the following."""
        return self.attention.kv_heads or self.attention.heads

    @property
    def head_dim(self) -> int:
        """K."""
        return self.attention.head_dim or self.model.width // self.attention.heads

    @property
    def mlp_width(self) -> int:
        """F."""
        derived = -(-8 * self.model.width // 24) * 8 if self.mlp.kind in GATED else 4 * self.model.width
        return self.mlp.width or derived

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return (self.attention.value_dim if self.attention.kind == "mla" else None) or self.head_dim

    @property
    def rope_dim(self) -> int:
        """R: the rotary part of a head under mla, in addition to its K."""
        if self.attention.kind != "mla":
            return 0
        derived = (self.head_dim // 4) * 2 if self.positions.kind == "rope" else 0
        return derived if self.attention.rope_dim is None else self.attention.rope_dim

    @property
    def expert_width(self) -> int:
        """Hidden width of an expert."""
        return self.moe.width or max(self.mlp_width // self.moe.top_k, 1)

    @property
    def original_length(self) -> int:
        """The length for which rotary frequencies are not scaled."""
        return self.positions.original_length or self.data.sequence_length

    @property
    def max_length(self) -> int:
        """Rows of a learned position table."""
        return self.positions.max_length or self.data.sequence_length

    @property
    def streams(self) -> int:
        """N."""
        return self.residual.n or self.residual.spec.default_streams

    @property
    def remat_blocks(self) -> int:
        """Blocks between the streams that remat=streams keeps: L_r = sqrt(N S / (N + 2)) sublayers (arXiv:2512.24880,
        section 4.3), two a block."""
        sublayers = math.sqrt(self.streams * 2 * self.model.layers / (self.streams + 2))
        return self.model.remat_blocks or max(1, round(sublayers / 2))

    @property
    def leading_layers(self) -> int:
        """Blocks with a dense feed-forward before those with experts."""
        return self.moe.dense_layers if self.moe.experts else 0

    @property
    def local_layers(self) -> tuple[bool, ...]:
        """Of each layer, whether it sees only a window."""
        every, windowed = self.attention.global_every, self.attention.window is not None
        return tuple(windowed and not (every and (layer + 1) % every == 0) for layer in range(self.model.layers))

    @property
    def validation_rows(self) -> int:
        """Rows of each validation set; 0: all of it."""
        batches = self.validation.batches
        return self.validation.rows if batches is None else batches * self.train.batch_size

    @property
    def decay_steps(self) -> int:
        """The step of the schedule at which the decay of the rate has ended."""
        return self.schedule.decay_steps or self.last_step

    @property
    def last_step(self) -> int:
        """The step of the schedule at which the run ends: after that of RUN@STEP where it takes the optimiser over."""
        _, at, step = (self.train.init_from or "").rpartition("@")
        taken = self.train.init_optimizer and bool(at) and step.isdigit()
        return self.train.steps + (int(step) if taken else 0)

    @property
    def zscore_min_history(self) -> int:
        """Steps of history before the first z-score: fewer in a short run, so that most of it is judged."""
        given = self.monitor.zscore_min_history
        return given or min(ZSCORE_HISTORY, max(16, self.train.steps // 4), self.monitor.zscore_window)

    @property
    def wsd_steps(self) -> float:
        """Steps that a wsd schedule decays for."""
        return self.schedule.wsd_steps or self.schedule.wsd_fraction * self.decay_steps


# What says how a run is computed and watched, and not what: names of fields or, ending in a dot, of groups.
MACHINE = ("watchdog.", "mesh.", "distributed.", "data.prefetch", "data.workers", "data.cache_dir")
# What may differ between a stored run and the command that resumes it: names of fields or, ending in a dot, of groups.
RESUMABLE = (
    "residual.module",
    "train.steps",
    "validation.every",
    "checkpoint.",
    "monitor.probe_every",
    "monitor.probe_sequences",
    "monitor.tensorboard",
    "monitor.wandb",
    "monitor.progress_every",
    *MACHINE,
)


# Checks of combinations ---------------------------------------------------------------------------------------------


def _check_shapes(config: Config) -> None:
    width, heads = config.model.width, config.attention.heads
    kv_heads, head_dim = config.attention.kv_heads, config.attention.head_dim
    if head_dim is None and width % heads:
        refuse("attention.heads", heads, f"a divisor of model.width={width}, or set attention.head_dim")
    if kv_heads is not None and heads % kv_heads:
        refuse("attention.kv_heads", kv_heads, f"a divisor of attention.heads={heads}")
    if config.positions.kind == "rope" and config.attention.kind == "heads" and config.head_dim % 2:
        if head_dim is None:
            refuse("model.width", width, f"an even multiple of attention.heads={heads}, since rope rotates pairs")
        refuse("attention.head_dim", head_dim, "an even number, since rope rotates pairs")


def _only_with(group: _Group, fields: Sequence[str], reason: str) -> None:
    """Refuse a field that would silently do nothing: any of ``fields`` that differs from its default."""
    for field in dataclasses.fields(group):  # type: ignore[arg-type]
        value = getattr(group, field.name)
        if field.name in fields and value != field.default:
            refuse(f"{group.group}.{field.name}", value, f"{field.default} {reason}")


def _check_attention(config: Config) -> None:
    attention, rope = config.attention, config.positions.kind == "rope"
    if attention.kind == "mla":
        if attention.kv_heads not in (None, attention.heads):
            refuse(
                "attention.kv_heads", attention.kv_heads, "None with attention.kind=mla: every head has its own keys"
            )
        if attention.bias:
            refuse("attention.bias", True, "False with attention.kind=mla: its latents are normalised instead")
        if attention.qk_norm:
            refuse("attention.qk_norm", True, "False with attention.kind=mla: its latents are normalised instead")
        if rope and (config.rope_dim == 0 or config.rope_dim % 2):
            refuse("attention.rope_dim", attention.rope_dim, "an even number from 2 with positions.kind=rope")
        if not rope and config.rope_dim:
            refuse("attention.rope_dim", attention.rope_dim, "None or 0 unless positions.kind=rope: nothing is rotated")
    else:
        latent = ("value_dim", "kv_rank", "q_rank", "rope_dim")
        defaults = {field.name: field.default for field in dataclasses.fields(AttentionConfig)}
        # What `resolve` filled in says nothing.
        given = {"value_dim": config.value_dim, "rope_dim": 0}
        for name in latent:
            value = getattr(attention, name)
            if value not in (defaults[name], given.get(name, defaults[name])):
                refuse(f"attention.{name}", value, f"{defaults[name]} with attention.kind=heads: it is a choice of mla")
    if attention.global_every == 1 or (attention.global_every and attention.window is None):
        refuse("attention.global_every", attention.global_every, "0, or from 2 with attention.window set")
    if attention.prefix >= config.data.sequence_length:
        refuse("attention.prefix", attention.prefix, f"below data.sequence_length={config.data.sequence_length}")
    if attention.impl in _IMPLEMENTATION_LIMITS:
        lacks = implementation_lacks(config, attention.impl)
        if lacks:
            refuse("attention.impl", attention.impl, f"auto or xla: {attention.impl} has no {lacks}")


# What an implementation of attention cannot do. `auto` never chooses one for a model that needs it.
_IMPLEMENTATION_LIMITS: dict[str, tuple[str, ...]] = {
    "sdpa": ("softcap", "values of another width than the keys"),
    "flash": ("additive bias (alibi, relative_bias)", "prefix mask"),
}


def implementation_lacks(config: Config, impl: str) -> str | None:
    """What of the config ``impl`` (sdpa or flash) cannot honour, in words; None where it can do all."""
    needs = {
        "softcap": config.attention.softcap is not None,
        "values of another width than the keys": config.value_dim != config.head_dim + config.rope_dim,
        "additive bias (alibi, relative_bias)": config.positions.kind in ("alibi", "relative_bias"),
        "prefix mask": config.attention.prefix > 0,
    }
    return next((what for what in _IMPLEMENTATION_LIMITS.get(impl, ()) if needs.get(what)), None)


def _check_distributed(distributed: DistributedConfig) -> None:
    if distributed.cluster != "address":
        _only_with(distributed, ("coordinator", "processes", "process_id"), "unless distributed.cluster=address")
        return
    host, colon, port = (distributed.coordinator or "").rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 2**16):
        refuse("distributed.coordinator", distributed.coordinator, "HOST:PORT with distributed.cluster=address")
    if distributed.process_id >= distributed.processes:
        refuse("distributed.process_id", distributed.process_id, f"below distributed.processes={distributed.processes}")


def _check_positions(config: Config) -> None:
    positions, length = config.positions, config.data.sequence_length
    if positions.kind != "rope":
        _only_with(positions, ("scaling", "factor", "attention_factor"), "unless positions.kind=rope")
    if positions.scaling == "none" and positions.factor != 1.0:
        refuse("positions.factor", positions.factor, "1.0 with positions.scaling=none")
    if positions.scaling != "yarn":
        _only_with(positions, ("attention_factor", "beta_fast", "beta_slow"), "unless positions.scaling=yarn")
    if positions.scaling != "llama3":
        _only_with(positions, ("low_frequency", "high_frequency"), "unless positions.scaling=llama3")
    if positions.beta_slow >= positions.beta_fast:
        refuse("positions.beta_slow", positions.beta_slow, f"below positions.beta_fast={positions.beta_fast}")
    if positions.low_frequency >= positions.high_frequency:
        refuse(
            "positions.low_frequency",
            positions.low_frequency,
            f"below positions.high_frequency={positions.high_frequency}",
        )
    if positions.kind == "learned" and config.max_length < length:
        refuse("positions.max_length", positions.max_length, f"at least data.sequence_length={length}")
    if positions.kind == "relative_bias" and positions.max_distance <= positions.buckets // 2:
        refuse("positions.max_distance", positions.max_distance, f"above half of positions.buckets={positions.buckets}")


GATED = ("glu", "geglu", "swiglu")


def _check_feed_forward(config: Config) -> None:
    moe, layers = config.moe, config.model.layers
    if config.mlp.kind not in GATED and config.mlp.clamp is not None:
        refuse("mlp.clamp", config.mlp.clamp, f"None with mlp.kind={config.mlp.kind}: it has no gate")
    if not moe.experts:
        _only_with(moe, ("shared", "dense_layers", "z_loss"), "with moe.experts=0")
        return
    if moe.top_k > moe.experts:
        refuse("moe.top_k", moe.top_k, f"at most moe.experts={moe.experts}")
    if moe.dense_layers >= layers:
        refuse("moe.dense_layers", moe.dense_layers, f"below model.layers={layers}, or moe.experts=0")
    if moe.experts % config.mesh.expert:
        refuse("mesh.expert", config.mesh.expert, f"a divisor of moe.experts={moe.experts}")
    if config.mlp.bias:
        refuse("mlp.bias", True, "False with moe.experts > 0: experts have no biases")


def _check_remat(model: ModelConfig) -> None:
    if model.remat_blocks is not None and model.remat != "streams":
        refuse("model.remat_blocks", model.remat_blocks, f"None with model.remat={model.remat}: it is for streams")


def _check_norm(norm: NormConfig) -> None:
    if norm.gamma_frozen and norm.gamma_schedule is not None:
        refuse("norm.gamma_frozen", True, "False with norm.gamma_schedule: a schedule is never trained")


def _check_residual(config: Config) -> None:
    check = config.residual.spec.check
    if check is not None:
        check(config)


def _check_schedule(config: Config) -> None:
    schedule, warmup, end = config.schedule, config.schedule.warmup_steps, config.decay_steps
    entered = "train.steps" if config.last_step == config.train.steps else "STEP + train.steps"
    name = entered if schedule.decay_steps is None else "schedule.decay_steps"
    if warmup > end:
        refuse("schedule.warmup_steps", warmup, f"at most {name}={end}")
    if schedule.kind != "wsd":
        _only_with(schedule, ("wsd_steps", "wsd_shape"), "unless schedule.kind=wsd")
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
            refuse("schedule.step_fractions", fractions, "increasing shares of the run")


def _check_batch(config: Config) -> None:
    if config.train.init_from is None:
        _only_with(config.train, ("init_optimizer", "init_data"), "without train.init_from")
    _check_distributed(config.distributed)
    if not config.watchdog.seconds:
        _only_with(config.watchdog, ("abort",), "with watchdog.seconds=0: nothing is watched")
    size, parts, mesh = config.train.batch_size, config.train.accumulation, config.mesh
    if size % parts:
        refuse("train.accumulation", parts, f"a divisor of train.batch_size={size}")
    if mesh.data == 0:
        refuse("mesh.data", 0, "-1 or an int >= 1")
    split = max(mesh.data, 1) * mesh.fsdp * mesh.expert
    if (size // parts) % split:
        refuse("train.batch_size", size, f"a multiple of {parts * split}: accumulation × mesh data × fsdp × expert")
    window, least = config.monitor.zscore_window, config.monitor.zscore_min_history
    if least is not None and least > window:
        refuse("monitor.zscore_min_history", least, f"at most monitor.zscore_window={window}")


# From and to the edge -----------------------------------------------------------------------------------------------


@functools.cache
def groups() -> Mapping[str, type]:
    """The class of every group by its name, in the order of ``Config``."""
    return types.MappingProxyType(typing.get_type_hints(Config))


class Field(NamedTuple):
    """A field of a group."""

    name: str
    hint: Any
    """Its type."""
    default: Any
    rule: Any
    """A ``Rule``; an ``Option`` where the field belongs to residual kinds."""


def fields_of(group: str) -> Mapping[str, Field]:
    """Return the fields of a group by name; those of ``residual`` hold the options of every kind that is known."""
    made, hints = groups()[group], _hints(groups()[group])
    fields = {
        field.name: Field(field.name, hints[field.name], field.default, field.metadata["rule"])
        for field in dataclasses.fields(made)
        if "rule" in field.metadata
    }
    if group == ResidualConfig.group:
        fields |= {name: Field(name, option.type, option.default, option) for name, option in kinds.options().items()}
    return fields


def field_names() -> Iterator[str]:
    """Yield the dotted name of every field, in the order of ``Config``; options of kinds at the end of theirs."""
    for group in groups():
        yield from (f"{group}.{name}" for name in fields_of(group))


def value_of(config: Config, name: str) -> Any:
    """Return the value of a field by its dotted name; of an option that the kind lacks, the default."""
    group, _, leaf = name.partition(".")
    return getattr(getattr(config, group), leaf)


def default_of(name: str) -> Any:
    """Return the default of a field by its dotted name. Raises UserError for an unknown one."""
    return _find(name).default


def describe(name: str) -> str:
    """Return what a field means, and what it may hold, in one line. Raises UserError for an unknown name."""
    field = _find(name)
    return f"{field.rule.doc} [{field.rule.type_words(field.hint)}]"


def _find(name: str) -> Field:
    known = groups()
    group, _, leaf = name.partition(".")
    if group not in known:
        # A field given without its group: the places where it stands are the better hint.
        same_leaf = [full for full in field_names() if full.partition(".")[2] == (leaf or group)]
        hint = f" (did you mean {' or '.join(same_leaf)}?)" if same_leaf and not leaf else did_you_mean(group, known)
        raise UserError(f"{name}: unknown group {group}{hint}; groups: {', '.join(known)}")
    fields = fields_of(group)
    if leaf not in fields:
        nearest = did_you_mean(leaf, fields) if leaf else ""
        hint = nearest.replace("did you mean ", f"did you mean {group}.")
        what = "unknown field" if leaf else "is a group, not a field"
        raise UserError(f"{name}: {what}{hint}; {group} has: {', '.join(fields)}")
    return fields[leaf]


def parse_value(name: str, text: str) -> Any:
    """The value of field `name` that `text` stands for on a command line, checked as far as one field can be.

    Raises: UserError for an unknown field, another type, or a value out of range.
    """
    field = _find(name)
    options = typing.get_args(field.hint) if isinstance(field.hint, types.UnionType) else (field.hint,)
    value: Any = text
    if type(None) in options and text == "None":
        value = None
    elif bool in options:
        value = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}.get(text.lower(), text)
    elif str not in options:
        # `check` refuses what is no number in the words of every other refusal.
        with contextlib.suppress(ValueError, SyntaxError):
            value = float(text) if float in options else ast.literal_eval(text)
    return field.rule.check(name, field.hint, value)


def from_config_dict(raw: Any) -> Config:
    """The validated Config of an ``ml_collections.ConfigDict`` or a nested Mapping; missing fields take their defaults.

    Raises: UserError for an unknown group or field (with the nearest name and the group's fields), a value of another
    type or out of range, or fields that do not go together.
    """
    tree = raw.to_dict() if hasattr(raw, "to_dict") else raw
    if not isinstance(tree, Mapping):
        raise UserError(f"config: given {type(raw).__name__}, allowed: a ConfigDict or a nested dict")
    made = {}
    load_kinds(tree)
    for group, fields in tree.items():
        if group not in groups() or not isinstance(fields, Mapping):
            _find(str(group))  # refuses an unknown group, and a value where the group's fields belong
        for leaf in fields:
            _find(f"{group}.{leaf}")
        made[group] = groups()[group](**fields)
    return Config(**made)


def load_kinds(tree: Mapping[str, Any]) -> None:
    """Import the modules that ``residual.module`` of a nested config names, so that its kinds and options are known.

    Raises: UserError where one cannot be imported.
    """
    fields = tree.get("residual")
    modules = fields.get("module") if isinstance(fields, Mapping) else None
    if modules is not None:
        rule: Rule = ResidualConfig.__dataclass_fields__["module"].metadata["rule"]
        kinds.load(rule.check("residual.module", str | None, modules))


def resolve(config: Config, vocab_size: int) -> Config:
    """The Config with every None filled in that derives from other fields.

    Args:
        config: a valid configuration.
        vocab_size: tokens of the tokeniser.
    Raises: UserError where model.vocab_size is too small for the tokeniser.
    """
    model, residual = config.model, config.residual
    kind = residual.spec
    if model.vocab_size is not None and model.vocab_size < vocab_size:
        refuse("model.vocab_size", model.vocab_size, f"at least {vocab_size}, the tokeniser's size")
    return dataclasses.replace(
        config,
        model=dataclasses.replace(model, vocab_size=model.vocab_size or vocab_size),
        attention=dataclasses.replace(
            config.attention,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            value_dim=config.value_dim,
            rope_dim=config.rope_dim,
        ),
        positions=dataclasses.replace(
            config.positions, original_length=config.original_length, max_length=config.max_length
        ),
        mlp=dataclasses.replace(config.mlp, width=config.mlp_width),
        moe=dataclasses.replace(config.moe, width=config.expert_width),
        residual=dataclasses.replace(
            residual,
            module=kinds.modules_for(residual.kind, residual.module),
            n=residual.n or kind.default_streams,
            init=residual.init or next(iter(kind.inits), None),
            collapse=residual.collapse or kind.collapses[0],
        ),
        schedule=dataclasses.replace(config.schedule, decay_steps=config.decay_steps),
        validation=dataclasses.replace(config.validation, rule=config.validation.rule or "spread"),
        monitor=dataclasses.replace(config.monitor, zscore_min_history=config.zscore_min_history),
    )


def is_derived(config: Config, name: str) -> bool:
    """Whether a field of a resolved config, by its dotted name, holds what ``resolve`` would put there.

    What was given and what was derived cannot be told apart otherwise. The vocabulary's size is never derived: it is
    the tokeniser's, or larger.
    """
    group, _, leaf = name.partition(".")
    part = getattr(config, group)
    if name == "model.vocab_size" or getattr(part, leaf) is None:
        return False
    try:
        without = dataclasses.replace(config, **{group: dataclasses.replace(part, **{leaf: None})})
        return resolve(without, config.vocab_size) == config
    except UserError:
        return False  # not a field that may be None, or not under the others


def change(config: Config, overrides: Mapping[str, Any]) -> Config:
    """A resolved config with other values, to be resolved: {dotted name: value}.

    What was derived is derived anew, and what only the old residual kind had goes back to its default.

    Raises: UserError for values that do not go together.
    """
    if not overrides:
        return config
    tree = to_dict(config)
    for name in field_names():
        group, _, leaf = name.partition(".")
        if is_derived(config, name):
            tree[group][leaf] = None
    load_kinds({"residual": {"module": overrides.get("residual.module")}})
    kind = kinds.known().get(overrides.get("residual.kind", ""), config.residual.spec)
    for name in config.residual.spec.options:
        if name not in kind.options and not kinds.options()[name].anywhere:
            del tree["residual"][name]
    for name, value in overrides.items():
        group, _, leaf = name.partition(".")
        tree[group][leaf] = value
    return from_config_dict(tree)


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Return the Config as a nested dict {group: {field: value}}."""
    parts = {group: getattr(config, group) for group in groups()}
    return {
        group: part.flat() if isinstance(part, ResidualConfig) else dataclasses.asdict(part)
        for group, part in parts.items()
    }


def to_json(config: Config) -> str:
    """The Config as indented JSON with a final newline; ``from_json`` gives it back exactly."""
    return json.dumps(to_dict(config), indent=2) + "\n"


def from_json(text: str, place: object = None) -> Config:
    """Return the Config of `to_json`.

    Args:
      place: the file that holds it, for the message where a module that it names is missing.

    Raises: UserError where the text is no JSON or no valid configuration; `kinds.ModuleError` where the module of its
      residual kind cannot be imported.
    """
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"config: not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise UserError("config: not JSON: nested too deep") from None
    try:
        return from_config_dict(as_stored(tree))
    except kinds.ModuleError as error:
        raise kinds.ModuleError(f"{place}: {error}" if place is not None else str(error)) from None


def as_stored(tree: Any) -> Any:
    """Return a stored config's tree; one from before ``validation.rule`` gets ``first``, the only rule of its time."""
    validation = tree.get("validation") if isinstance(tree, dict) else None
    if not isinstance(validation, dict) or "batches" not in validation or "rule" in validation:
        return tree
    return {**tree, "validation": {**validation, "rule": "first"}}


def keep_rule(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group ``validation`` as given, filled in with what the stored one of an older run settled."""
    kept = {"rule": "first", "batches": stored.get("batches")} if stored.get("rule", "first") == "first" else {}
    return {**given, **{name: value for name, value in kept.items() if given.get(name) is None}}


def diff(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Fields whose values differ: {dotted name: (old value, new value)}, in the order of ``Config``."""
    pairs = ((name, (value_of(old, name), value_of(new, name))) for name in field_names())
    return {name: (before, after) for name, (before, after) in pairs if before != after}


def going_on(old: Config, new: Config) -> Config:
    """Return `new`, not resolved yet, with what a run that was stored with `old` keeps where `new` leaves it open: the
    rule of validation of a run of an older version."""
    if old.validation.rule != "first":
        return new
    kept = keep_rule(vars(old.validation), vars(new.validation))
    return dataclasses.replace(new, validation=ValidationConfig(**kept))


def keeping(old: Config, new: Config) -> Config:
    """Return `new` with what the run that was stored with `old` keeps, although it follows from what may change: the
    history before its first z-score, unless another is asked for."""
    monitor = dataclasses.replace(new.monitor, zscore_min_history=None)
    if new.monitor.zscore_min_history not in (None, dataclasses.replace(new, monitor=monitor).zscore_min_history):
        return new
    kept = old.monitor.zscore_min_history
    kept = kept if kept is None else min(kept, new.monitor.zscore_window)
    return dataclasses.replace(new, monitor=dataclasses.replace(monitor, zscore_min_history=kept))


def check_resume(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """What changes when a run stored with `old` goes on with `new`, both resolved: {dotted name: (old, new)}.

    The end of the decay may move with train.steps where it stood at the last step before and does so again.

    Raises: UserError naming every changed field that is not of RESUMABLE, with both values.
    """
    changes = diff(old, keeping(old, new))
    follows = all(config.schedule.decay_steps in (None, config.last_step) for config in (old, new))
    refused = {
        name: pair
        for name, pair in changes.items()
        if not _resumable(name, RESUMABLE) and not (name == "schedule.decay_steps" and follows)
    }
    if refused:
        listed = "; ".join(f"{name}: stored {before!r}, given {after!r}" for name, (before, after) in refused.items())
        may = ", ".join(name + "*" if name.endswith(".") else name for name in RESUMABLE)
        raise UserError(f"this run was started with another config: {listed}. Only these may change on resume: {may}")
    return changes


def _resumable(name: str, allowed: Sequence[str]) -> bool:
    return any(name.startswith(entry) if entry.endswith(".") else name == entry for entry in allowed)
