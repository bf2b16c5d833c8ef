"""Test what guides generation from within: entropies, thresholds and draws, the trace, the check of candidates."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.config import Config
from mhc.data import tokenizers
from mhc.errors import UserError
from mhc.eval.common.generator import Generator
from mhc.eval.common.prior_check import PriorCheck, of_file, of_regex
from mhc.eval.generate import __main__ as generate
from mhc.model.block import SublayerView
from mhc.model.layers import Mlp
from mhc.model.moe import Moe
from mhc.model.sampling import Draw, Sampling, activation_entropy, parse_draw
from mhc.rng import path_key
from tests.small import definition, random_params, relative_error, small
from tests.small_runs import untrained

BYTES = tokenizers.load("bytes")
PROMPTS = ["stream", "", "深さ", "x", "of a"]
NEW = 5
PLAIN = Sampling(temperature=0.8, top_k=50)


@functools.cache
def config_of(kind: str = "mhc", **more: Any) -> Config:
    return small(kind, model={"vocab_size": BYTES.vocab_size})


@functools.cache
def generator(sampling: Sampling, trace: bool = False, check: PriorCheck | None = None) -> Generator:
    config = config_of()
    return Generator(config, random_params(config), BYTES, sampling, batch_size=4, chunk=8, trace=trace, check=check)


# Entropy of activations -----------------------------------------------------------------------------------------------


def test_the_entropy_of_activations() -> None:
    """It is 0 for one, 1 for equal ones and for none, and knows neither sign nor size, however small."""
    a = np.random.default_rng(0).normal(size=(5, 12)).astype(np.float32)
    p = np.abs(a.astype(np.float64)) / np.abs(a.astype(np.float64)).sum(-1, keepdims=True)
    expected = -(p * np.log(p)).sum(-1) / np.log(12)
    for other in (a, -a, 1e6 * a, 1e-30 * a):
        np.testing.assert_allclose(activation_entropy(jnp.asarray(other)), expected, rtol=1e-5)
    edges = jnp.asarray([np.eye(12)[3], np.full(12, -2.0), np.zeros(12), np.eye(12)[0] + np.eye(12)[1]])
    np.testing.assert_allclose(activation_entropy(edges), [0.0, 1.0, 1.0, np.log(2) / np.log(12)], atol=1e-6)
    np.testing.assert_array_equal(activation_entropy(jnp.asarray([[0.0], [3.0]])), [1.0, 1.0])


@pytest.mark.parametrize("kind", ["relu", "swiglu"])
def test_activations_are_what_the_output_is_made_of(kind: str) -> None:
    """Times the second matrices they give the output: dense, and of routed and shared experts."""
    config = small(mlp={"kind": kind}, moe={"experts": 4, "shared": 1})
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 16)), jnp.float32)
    dense = Mlp(config, key=path_key(jax.random.key(0)))
    assert relative_error(dense.activations(x) @ dense.down[...], dense(x)) <= 1e-5
    moe = Moe(config, key=path_key(jax.random.key(1)))
    a, (_, f, _) = moe.activations(x), moe.experts.down.shape
    scores = jax.nn.softmax(x @ moe.router[...], axis=-1)
    chosen = jax.lax.top_k(scores, 2)[1]  # the bias is still 0
    y = a[..., 2 * f :] @ moe.shared.down[...]
    for k in range(2):
        y += jnp.einsum("btf,btfd->btd", a[..., k * f : (k + 1) * f], moe.experts.down[...][chosen[..., k]])
    assert relative_error(y, moe(x)) <= 1e-5


# Thresholds -----------------------------------------------------------------------------------------------------------

NEVER = replace(PLAIN, entropy_low=0.0, entropy_high=1.0, guide="hidden", lens_block=0)


def test_the_trace_has_the_values_of_the_full_forward() -> None:
    """Each token's entropies and norm are those of a pass over all tokens before it, without a cache."""
    config, params = config_of(), random_params(config_of())
    decoder = definition(config).bind(params)

    @jax.jit
    def full(tokens: jax.Array) -> dict[str, jax.Array]:
        def observe(view: SublayerView) -> dict[str, jax.Array]:
            return {"u": view.u, "collapsed": view.topology.collapse(view.state)}

        out = decoder.forward(tokens[None], observe=observe)
        return {"logits": decoder.logits(out.h), **out.observed}

    def bits(logits: np.ndarray) -> float:
        p = np.exp(logits - logits.max()).astype(np.float64)
        p /= p.sum()
        return float(-(p * np.log2(p)).sum())

    core = jax.tree.map(lambda leaf: np.asarray(leaf[-1], np.float64), params["blocks"]["mlp"])

    def normed(x: np.ndarray, scale: Any) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + config.norm.eps) * np.asarray(scale)

    for completion in generator(NEVER, trace=True).complete(PROMPTS, NEW, seed=5):
        ids = [BYTES.bos_id, *completion.prompt.encode()]
        assert completion.trace is not None and len(completion.trace) >= len(completion.tokens)
        for seen in completion.trace:
            row = np.zeros(16, np.int32)
            row[: len(ids)] = ids
            out = {name: np.asarray(leaf, np.float64) for name, leaf in full(jnp.asarray(row)).items()}
            at = len(ids) - 1
            # Of a sublayer's two observations the second is feed-forward's.
            u, end = out["u"][-1, 0, at], out["collapsed"][-1, 0, at]
            hidden = normed(u, core["norm"]["scale"])
            gate = hidden @ core["core"]["gate"]
            a = np.abs(gate / (1 + np.exp(-gate)) * (hidden @ core["core"]["up"]))
            lens = normed(out["collapsed"][1, 0, at], params["final_norm"]["scale"])
            p = a / a.sum()
            expected = {
                "output": bits(out["logits"][0, at]),
                "hidden": float(-(p * np.log(p)).sum() / np.log(a.size)),
                "lens": bits(lens @ np.asarray(params["head"]["kernel"], np.float64)),
                "norm": float(np.linalg.norm(end)),
            }
            assert {name: seen[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-4)
            assert (seen["drawn"], seen["check"]) == ("between", None)
            ids.append(seen["token"])


@pytest.mark.parametrize(
    "sampling",
    [
        NEVER,
        replace(NEVER, guide="lens", entropy_high=9.0),
        pytest.param(replace(PLAIN, entropy_low=0.0, entropy_high=9.0), marks=pytest.mark.long),
    ],
    ids=lambda sampling: sampling.guide,
)
def test_thresholds_that_are_never_reached_give_the_plain_text(sampling: Sampling) -> None:
    plain = generator(PLAIN).complete(PROMPTS, NEW, seed=5)
    guided = generator(sampling, trace=sampling == NEVER).complete(PROMPTS, NEW, seed=5)
    assert [(one.text, one.tokens, one.reason) for one in guided] == [
        (one.text, one.tokens, one.reason) for one in plain
    ]


@pytest.mark.parametrize("side", ["above", pytest.param("below", marks=pytest.mark.long)])
def test_what_lies_past_a_threshold_is_drawn_as_asked(side: str) -> None:
    """The text is that of a sampler with these options, if every token is past the threshold."""
    asked = Draw(0.5, top_k=5, min_p=0.01)
    limit: dict[str, Any] = {"above": {"entropy_high": 0.0}, "below": {"entropy_low": 1.0}}[side]
    guided = generator(replace(PLAIN, guide="hidden", **limit | {side: asked})).complete(PROMPTS, NEW, seed=5)
    plain = generator(Sampling(0.5, top_k=5, min_p=0.01)).complete(PROMPTS, NEW, seed=5)
    assert [one.tokens for one in guided] == [one.tokens for one in plain]
    assert [one.tokens for one in guided] != [one.tokens for one in generator(PLAIN).complete(PROMPTS, NEW, seed=5)]


# The check of candidates ----------------------------------------------------------------------------------------------

LETTERS = of_regex("[a-z ]")
ALWAYS = PriorCheck(1e9, LETTERS, candidates=300)


def test_a_row_gives_what_it_gives_alone_whatever_guides_it() -> None:
    made = generator(PLAIN, trace=True, check=ALWAYS)
    together = made.complete(PROMPTS, NEW, seed=5)
    assert together == made.complete(PROMPTS, NEW, seed=5)
    assert [made.complete([prompt], NEW, seed=5)[0].tokens for prompt in PROMPTS] == [one.tokens for one in together]
    assert made.complete(PROMPTS, NEW, seed=6) != together


def test_candidates_pass_the_filter_or_the_token_is_drawn_without_it() -> None:
    made = generator(PLAIN, trace=True, check=ALWAYS)
    before = dict(made.checks)
    seen = [step for one in made.complete(PROMPTS, NEW, seed=5) for step in one.trace or ()]
    assert {step["check"] for step in seen} <= {"filtered", "empty"}
    for step in seen:
        text = "" if step["token"] == BYTES.eos_id else BYTES.decode([step["token"]])
        assert bool(LETTERS("", text)) == (step["check"] == "filtered")
    asked = {word: made.checks[word] - before[word] for word in made.checks}
    assert asked["filtered"] == sum(step["check"] == "filtered" for step in seen) > 0


@pytest.mark.parametrize(
    "check",
    [PriorCheck(0.0, LETTERS), PriorCheck(1e9, of_regex("no such text"))],
    ids=["threshold never reached", "nothing passes"],
)
def test_without_an_effect_the_text_is_the_plain_one(check: PriorCheck) -> None:
    plain = generator(PLAIN).complete(PROMPTS, NEW, seed=5)
    checked = generator(PLAIN, check=check).complete(PROMPTS, NEW, seed=5)
    assert [one.tokens for one in checked] == [one.tokens for one in plain]
    assert all(one.trace is None for one in checked)


def test_a_filter_sees_the_text_so_far_and_what_it_leaves() -> None:
    asked: list[tuple[str, str]] = []

    def allows(text: str, candidate: str) -> bool:
        asked.append((text, candidate))
        return candidate in "ab"

    logits = np.full(BYTES.vocab_size, -np.inf, np.float32)
    logits[[ord("a"), ord("z"), ord("b"), ord("c")]] = [3.0, 2.0, 1.0, 0.0]
    kept, did = PriorCheck(1.0, allows, candidates=3).filtered(logits, "text", BYTES, frozenset({ord("z")}))
    assert did == "filtered" and np.flatnonzero(kept > -np.inf).tolist() == [ord("a"), ord("b"), ord("z")]
    assert asked == [("text", "a"), ("text", ""), ("text", "b")]
    same, did = PriorCheck(1.0, lambda text, candidate: False).filtered(logits, "", BYTES, frozenset())
    assert did == "empty" and same is logits


# The command ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["temperature=1.2,top_p=0.95", "top_k=3, min_p=0.1", "greedy", "temperature=0"])
def test_draws_in_words(text: str) -> None:
    drawn = parse_draw(text)
    expected = {"temperature=1.2,top_p=0.95": Draw(1.2, top_p=0.95), "top_k=3, min_p=0.1": Draw(top_k=3, min_p=0.1)}
    assert drawn == expected.get(text, Draw(0.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = config_of()
    return untrained(config, random_params(config), tmp_path_factory.mktemp("runs") / "run")


def filter_file(folder: Path, body: str) -> str:
    file = folder / "rules.py"
    file.write_text(body)
    return str(file)


MISTAKES: list[tuple[list[str], str]] = [
    (["--guide", "hiden", "--entropy_low", "0.2"], "--guide: given hiden, allowed: output, hidden, lens (did you mean"),
    (["--guide", "hidden"], "--guide hidden: needs --entropy_low or --entropy_high"),
    (["--guide", "hidden", "--entropy_high", "2"], "--entropy_high: given 2.0, allowed: from 0 to 1"),
    (["--guide", "lens", "--entropy_low", "1"], "--lens_block: given None, allowed: the number of a block"),
    (["--guide", "lens", "--entropy_low", "1", "--lens_block", "2"], "--lens_block: given 2, allowed: 0 to 1"),
    (["--above", "greedy"], "--above: needs --entropy_high"),
    (["--entropy_low", "1", "--below", "greedily"], "--below: given greedily, allowed: greedy, or temperature="),
    (["--entropy_low", "1", "--below", "top_k=x"], "--below: top_k: given x, allowed: a number"),
    (["--entropy_low", "1", "--below", "top_p=2"], "--below: top_p: given 2.0, allowed: above 0"),
    (["--trace"], "--trace: needs --json"),
    (["--prior_regex", "a"], "--prior_regex: needs --prior_norm"),
    (["--prior_norm", "1"], "--prior_norm: needs one of --prior_regex and --prior_file"),
    (["--prior_norm", "-1", "--prior_regex", "a"], "--prior_norm: given -1.0, allowed: 0 or more"),
    (["--prior_norm", "1", "--prior_regex", "("], "--prior_regex: given (, allowed: a regular expression"),
    (["--prior_norm", "1", "--prior_regex", "a", "--prior_candidates", "0"], "--prior_candidates: given 0, allowed: 1"),
    (["--prior_norm", "1", "--prior_file", "none.py"], "filter file none.py: no such file"),
]


@pytest.mark.parametrize(
    ("options", "words"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_mistake_is_one_line(folder: Path, options: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        generate.main(["--checkpoint", str(folder), "--prompt", "a", *options])
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_filter_file_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"get_filter\(\) returned 3, allowed: a callable"):
        of_file(filter_file(tmp_path, "def get_filter():\n    return 3\n"))
    with pytest.raises(UserError, match="it defines no get_filter"):
        of_file(filter_file(tmp_path, "x = 1\n"))
    allows = of_file(filter_file(tmp_path, "def get_filter():\n    return lambda text, candidate: text[9]\n"))
    with pytest.raises(UserError, match=r"--prior_file .*rules.py: the filter failed on 'b' .*line 2\): IndexError"):
        allows("a", "b")


@pytest.mark.long
def test_the_command_traces_and_checks(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = filter_file(tmp_path, "def get_filter():\n    return lambda text, candidate: candidate.isalpha()\n")
    out = tmp_path / "out.json"
    words = ["--checkpoint", str(folder), "--prompt", "a", "--max_new_tokens", "4", "--json", str(out), "--trace"]
    words += ["--guide", "hidden", "--entropy_high", "0.1", "--above", "top_k=200", "--lens_block", "0"]
    assert generate.main([*words, "--prior_norm", "1e9", "--prior_file", file]) == 0
    told = capsys.readouterr().err
    record = json.loads(out.read_text())
    (completion,) = record["completions"]
    assert {"token", "output", "hidden", "lens", "norm", "drawn", "check"} == set(completion["trace"][0])
    assert {step["drawn"] for step in completion["trace"]} == {"above"}
    assert record["prior_check"] == {"norm": 1e9, "regex": None, "file": file, "candidates": None}
    assert record["sampling"]["above"]["top_k"] == 200
    assert "prior check: " in told and "drawn without the filter" in told
