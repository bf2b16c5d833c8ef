"""Test long contexts: models that are known to solve the questions, and losses and caches that are known otherwise."""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings

from mhc import cli
from mhc.config import PositionsConfig
from mhc.data.tokenizers import ByteTokenizer, JsonTokenizer
from mhc.eval.common import checkpoints
from mhc.eval.common import rows as corpora
from mhc.eval.common.statistics import share_interval
from mhc.eval.longcontext import __main__ as longcontext
from mhc.eval.longcontext import corpus as corpus_of_text
from mhc.eval.longcontext import evaluate as evaluation
from mhc.eval.longcontext import needles, positions, sentences, tables
from mhc.eval.longcontext.cost import Clock
from mhc.eval.perplexity.score import score
from mhc.files import read_json
from mhc.sharding import make_mesh
from tests.small import definition, random_params, with_fields
from tests.small_runs import config, on_demand, resolved, run, snapshot

BYTES = ByteTokenizer()
RNG = np.random.default_rng(0)
DOCUMENTS = [RNG.integers(97, 123, size).astype(np.int32) for size in (300, 0, 41, 500, 7)]
LANGUAGES: dict[str, sentences.Language] = {
    "text": sentences.Text(BYTES),
    "other words": sentences.Text(BYTES, "{key}={value};", "{key}->{value}"),
    "ids": sentences.RandomIds(np.arange(128, 160)),
}
QUERY = {"text": len("\nThe secret number of Abcdef is"), "other words": len("\nAbcdef="), "ids": 5}


def exam(language: str, score: needles.Score, samples: int = 6, candidates: int = 10) -> needles.Exam:
    haystack = corpus_of_text.Haystack(DOCUMENTS.__getitem__, len(DOCUMENTS), BYTES.encode("\n\n"))
    return needles.Exam(LANGUAGES[language], haystack, score, BYTES.bos_id, samples, candidates)


def copier(query: int, window: int | None = None, blind: slice | None = None) -> needles.Score:
    """Return a model that looks for its last ``query`` tokens in the last ``window`` ones, and copies what follows.

    It is sure of what it found, and otherwise finds all tokens alike. ``blind``: part of the query that it ignores.
    """

    def score(rows: Iterable[needles.Row]) -> list[needles.ValueScore]:
        found = []
        for context, value in rows:
            asked, body = context[-query:], context[len(context) - (window or len(context)) : -query]
            copied = None
            if len(body) >= query + len(value):
                every = np.lib.stride_tricks.sliding_window_view(body, query + len(value))
                keep = np.ones(query, bool)
                keep[blind or slice(0)] = False
                places = np.flatnonzero((every[:, :query] == asked)[:, keep].all(axis=1))
                copied = every[places[-1], query:] if len(places) else None
            exact = copied is not None and np.array_equal(copied, value)
            each = -5.0 if copied is None else 0.0 if exact else -20.0
            found.append(needles.ValueScore(each * len(value), exact))
        return found

    return score


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("length", [96, 400, 1501])
def test_full_memory_finds_every_needle_and_a_window_those_within(language: str, length: int) -> None:
    depths = (0.0, 0.31, 0.5, 1.0)
    found = needles.retrieval(exam(language, copier(QUERY[language])), length, depths)
    for part, expected in zip(found, (1.0, 1.0, 1.0, 0.0, -5.0), strict=True):
        np.testing.assert_array_equal(part, np.full((6, 4), expected))
    np.testing.assert_array_equal(found.gain, 5.0)

    query, value = QUERY[language], 3 if language == "ids" else 5 + (language == "text")
    sentence = query + value + {"text": 2, "other words": 2, "ids": 0}[language]
    room = length - 1 - sentence - query - value
    window = length - value - 1 - room // 2  # from the middle of the text on
    inside = [False, False, True, True]
    found = needles.retrieval(exam(language, copier(query, window)), length, depths)
    np.testing.assert_array_equal(found.exact, np.tile(inside, (6, 1)))
    np.testing.assert_array_equal(found.gain, 5.0 * np.tile(inside, (6, 1)))


@given(
    st.lists(st.tuples(st.integers(0, 12), st.floats(0, 1)), min_size=1, max_size=5),
    st.integers(0, 60),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60)
def test_sentences_lie_at_their_depths_and_the_text_is_whole(sizes, room, seed):
    """Without its sentences a context is bos, the text and the query; a control has more text in place of one."""
    hay = exam("text", copier(1)).haystack
    start = hay.start(np.random.default_rng(seed))
    sentences = tuple(np.full(size, 1000 + i, np.int32) for i, (size, _) in enumerate(sizes))
    depths = tuple(depth for _, depth in sizes)
    query, candidates = np.array([7, 8, 9], np.int32), np.zeros((2, 4), np.int32)
    question = needles.Question(sentences, depths, query, candidates, start)
    length = question.needed + room
    context = question.context(hay, length, 256)
    text = hay.read(start, room)
    assert len(context) == length - 4
    np.testing.assert_array_equal(context[context < 1000], np.concatenate([[256], text, query]))
    for i, depth in enumerate(depths):
        (places,) = np.nonzero(context == 1000 + i)
        if len(places):
            assert len(places) == len(sentences[i]) and np.ptp(places) == len(places) - 1
            assert int((context[: places[0]] < 1000).sum()) - 1 == int(depth * room + 0.5)
    without = question.context(hay, length, 256, without=0)
    assert len(without) == length - 4 and 1000 not in without
    np.testing.assert_array_equal(without[without < 1000][1:-3], hay.read(start, room + len(sentences[0])))


def test_a_haystack_is_its_documents_round_and_round():
    hay = exam("text", copier(1)).haystack
    whole = np.concatenate([np.concatenate([one, [10, 10]]) for one in DOCUMENTS if len(one)])
    np.testing.assert_array_equal(hay.read((0, 0), 2 * len(whole) + 5), np.concatenate([whole, whole, whole[:5]]))
    np.testing.assert_array_equal(hay.read((3, 499), 9), np.concatenate([DOCUMENTS[3][-1:], [10, 10], whole[-9:-3]]))
    assert hay.read((4, 7), 0).shape == (0,)
    empty = corpus_of_text.Haystack(lambda number: np.zeros(0, np.int32), 3, BYTES.encode("\n\n"))
    with pytest.raises(sentences.UserError, match="the split has no token"):
        empty.read((0, 0), 4)


@pytest.mark.parametrize("language", LANGUAGES)
def test_distractors_mislead_a_model_that_ignores_the_key(language: str) -> None:
    counts, query = (0, 1, 4), QUERY[language]
    found = needles.distracted(exam(language, copier(query), samples=40), 400, counts)
    assert all((one.exact == 1).all() and (one.gain == 5).all() for one in found.values())

    blind = {"text": slice(-len("Abcdef is"), -len(" is")), "other words": slice(1, 7), "ids": slice(1, 5)}[language]
    found = needles.distracted(exam(language, copier(query, blind=blind), samples=40), 400, counts)
    for count, one in found.items():
        low, high = share_interval(40 / (1 + count), 40)  # it takes the last sentence, whichever that is
        assert low <= one.exact.mean() <= high
        assert (one.rank[one.exact == 0] > 1).all()  # what it takes is among the candidates
    np.testing.assert_array_equal(found[0].exact, 1)
    needed = 1 + 5 * len(LANGUAGES[language].fact(*_one(language)).sentence) + query + len(_one(language)[1])
    assert list(needles.distracted(exam(language, copier(query)), needed, counts)) == [0, 1, 4]
    assert list(needles.distracted(exam(language, copier(query)), needed - 1, counts)) == [0, 1]
    with pytest.raises(needles.TooShort):
        needles.distracted(exam(language, copier(query)), needed // 4, counts)


def _one(language: str) -> tuple[Any, np.ndarray]:
    """Return a key and a value."""
    rng = np.random.default_rng(0)
    return LANGUAGES[language].keys(rng, 1)[0], LANGUAGES[language].values(rng, 1)[0]


def joiner(rows: Iterable[needles.Row]) -> list[needles.ValueScore]:
    """Return a model that reads the sentences of ``sentences.Text``, links too."""
    found = []
    for context, value in rows:
        text = BYTES.decode(context)
        key = re.search(r"number of (\w+) is$", text)[1]  # type: ignore[index]
        numbers = dict(re.findall(r"\nThe secret number of (\w+) is (\d+)\.\n", text))
        links = dict(re.findall(r"\n(\w+) belongs to (\w+)\.\n", text))
        known = numbers.get(links.get(key, key))
        exact = known is not None and BYTES.decode(value) == f" {known}"
        found.append(needles.ValueScore(0.0 if exact else -20.0 * len(value) if known else -5.0 * len(value), exact))
    return found


def any_number(rows: Iterable[needles.Row]) -> list[needles.ValueScore]:
    """Return a model that takes any number of the text to be as likely as another."""
    seen = [BYTES.decode(value) in BYTES.decode(context) for context, value in rows]
    return [needles.ValueScore(-6.0 if one else -30.0, False) for one in seen]


def test_a_joined_question_needs_both_needles():
    joined, direct = needles.joined(exam("text", joiner), 800)
    for one in (joined, direct):
        assert (one.exact == 1).all() and (one.first == 1).all() and (one.gain == 5).all()
    joined, direct = needles.joined(exam("text", copier(QUERY["text"])), 800)
    assert (direct.exact == 1).all() and (direct.gain == 5).all()
    assert (joined.exact == 0).all() and (joined.gain == 0).all()
    joined, direct = needles.joined(exam("text", any_number), 800)
    assert (joined.gain == 0).all() and (
        direct.gain == 4
    ).all()  # the number is there without the link, not without y's
    with pytest.raises(needles.TooShort) as short:
        needles.joined(exam("text", joiner), 200)
    needles.joined(exam("text", joiner, samples=1), short.value.needed)


def test_a_model_that_knows_nothing_is_at_chance():
    def alike(rows: Iterable[needles.Row]) -> list[needles.ValueScore]:
        return [needles.ValueScore(-3.0 * len(value), False) for _, value in rows]

    found = needles.retrieval(exam("text", alike, candidates=8), 200, (0.0, 1.0))
    np.testing.assert_allclose(found.first, 1 / 8)
    np.testing.assert_allclose(found.rank, 4.5)
    np.testing.assert_array_equal(found.gain, 0.0)
    bias = needles.position_bias(found.gain, (0.0, 1.0))
    assert bias["spread"] == {"value": 0.0, "low": 0.0, "high": 0.0} and bias["p"] == 1.0


def test_the_effect_of_a_place_is_found_and_none_is_not():
    rng, depths = np.random.default_rng(1), (0.0, 0.5, 1.0)
    samples = rng.normal(0, 5, (30, 1))  # what a sample has at every depth cancels
    held = 0
    for _ in range(30):
        bias = needles.position_bias(samples + rng.normal(0, 0.5, (30, 3)) + [0.0, 1.0, 0.5], depths)
        assert (bias["best"], bias["worst"]) == (0.5, 0.0) and bias["p"] < 0.01
        low, high = bias["spread"]["low"], bias["spread"]["high"]
        assert [one["depth"] for one in bias["depths"]] == list(depths) and high - low < 0.8
        held += low < 1.0 < high
    assert held >= 25  # of 95 % intervals, less of few samples
    p = [needles.position_bias(rng.normal(0, 1, (12, 3)), depths)["p"] for _ in range(40)]
    assert sum(one < 0.05 for one in p) <= 6 and 0.3 < np.mean(p) < 0.7


def test_intervals_of_shares_are_wilsons():
    np.testing.assert_allclose(share_interval(0, 20), (0.0, 0.16113), atol=1e-4)
    np.testing.assert_allclose(share_interval(10, 20), (0.29930, 0.70070), atol=1e-4)
    np.testing.assert_allclose(share_interval(20, 20), (0.83887, 1.0), atol=1e-4)


# Models ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(corpus: str) -> checkpoints.Checkpoint:
    """Return a plain model of random weights, on one device."""
    made = resolved(config(corpus, "plain"))
    return checkpoints.Checkpoint("a", made, (0,), random_params(made), make_mesh(made.mesh, jax.devices()[:1]))


def rows_of(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    return rng.integers(97, 123, (rows, length + 1)).astype(np.int32)


def test_values_are_scored_as_by_the_whole_logits(checkpoint):
    rng = np.random.default_rng(0)
    decoder = definition(checkpoint.config).bind(checkpoint.params)
    rows = [needles.Row(one[:20], one[20:]) for one in rows_of(rng, 5, 22)]
    found = evaluation.ModelScore(checkpoint, 4)(rows)
    for row, told in zip(rows, found, strict=True):
        ids = np.concatenate(row)
        log_p = np.asarray(jax.nn.log_softmax(decoder(jnp.asarray(ids[None, :-1]))[0]))[len(row.context) - 1 :]
        np.testing.assert_allclose(told.log_prob, log_p[range(len(row.value)), row.value].sum(), rtol=1e-5)
        assert told.exact == (log_p.argmax(axis=1) == row.value).all()
    # What greedy decoding gives is exact, and nothing else: not with another first or last token.
    ids = np.concatenate(rows[0])
    for place in (20, 21, 22):
        ids[place] = np.asarray(decoder(jnp.asarray(ids[None, :-1]))[0, place - 1]).argmax()
    others = [
        needles.Row(ids[:20], ids[20:] + np.array(change, np.int32)) for change in ([0] * 3, [1, 0, 0], [0, 0, 1])
    ]
    assert [one.exact for one in evaluation.ModelScore(checkpoint, 4)(others)] == [True, False, False]


def test_at_the_trained_length_it_is_the_loss_by_context(checkpoint, tmp_path):
    """On documents that fill one row each, it is the loss that eval.perplexity has."""
    length = checkpoint.config.data.sequence_length
    for number in range(60):
        (tmp_path / f"{number}.txt").write_bytes(
            rows_of(np.random.default_rng(number), 1, length - 2)[0].astype(np.uint8)
        )
    source = with_fields(checkpoint.config, data={"source": f"text:{tmp_path}/*.txt", "holdout": 0.3})
    here = checkpoint._replace(config=source)
    corpus = corpora.sliding(source, "validation", rows=0, batch_size=8, stride=length)
    known = score(here, corpus)
    rows = positions.loss_rows(corpus_of_text.open_corpus(source, "validation"), length, 1 + len(known.documents), 0)
    assert rows is not None and not rows.joined and rows.ids.shape == (len(known.documents), 1, length + 1)
    nll = positions.position_losses(here, rows.ids, batch_size=8)
    np.testing.assert_allclose(nll.mean(axis=0), known.by_position[:, 0] / known.by_position[:, 1], rtol=1e-5)
    (first, second) = positions.buckets(nll, positions.octaves(length, length))
    assert (first["from"], first["to"], second["from"], second["to"]) == (1, length // 2, length // 2 + 1, length)
    np.testing.assert_allclose((first["loss"]["value"] + second["loss"]["value"]) / 2, nll.mean(), rtol=1e-12)
    assert first["loss"]["low"] < first["loss"]["value"] < first["loss"]["high"]


def test_rows_of_the_loss_are_stretches_of_documents_or_all_of_them_joined(checkpoint):
    corpus = corpus_of_text.open_corpus(checkpoint.config, "train")
    every = [corpus.documents(number) for number in range(corpus.size)]
    long = [ids for ids in every if len(ids) > 100]
    for rows, shape in ((10, (10, 1, 101)), (3 * len(long) + 1, (len(long), 3, 101))):
        alone = positions.loss_rows(corpus, 100, rows, 3)
        assert alone is not None and not alone.joined and alone.ids.shape == shape
        for own, ids in zip(alone.ids, long, strict=False):
            stretches = np.lib.stride_tricks.sliding_window_view(ids, 101)
            assert all((stretches == row).all(axis=1).any() for row in own)
        assert len({row.tobytes() for own in alone.ids for row in own}) > 0.8 * rows
    joined = positions.loss_rows(corpus, 500, 4, 3)
    assert joined is not None and joined.joined and (joined.ids[..., 0] == BYTES.bos_id).all()
    text = BYTES.decode(joined.ids[..., 1:].ravel())
    assert "\n\n".join(BYTES.decode(ids) for ids in every).startswith(text[:-4])  # a character may be cut at the end
    assert positions.loss_rows(corpus, 10**6, 4, 3) is None


def test_edges_of_positions():
    assert positions.octaves(64, 256) == [0, 32, 64, 128, 256]
    assert positions.octaves(64, 200) == [0, 32, 64, 128, 200]
    assert positions.octaves(64, 64) == [0, 32, 64]
    assert positions.octaves(64, 48) == [0, 48]
    # Of a prefix that is seen both ways nothing counts but its last token, which sees no target.
    nll = np.arange(12.0).reshape(2, 6)
    (one, other) = positions.buckets(nll, [0, 2, 4, 6], least=4)
    assert (one["from"], one["to"], one["loss"]["value"]) == (4, 4, nll[:, 3].mean())
    assert (other["from"], other["to"], other["loss"]["value"]) == (5, 6, nll[:, 4:].mean())


def test_scalings_are_those_of_the_config(checkpoint):
    rule = PositionsConfig.__dataclass_fields__["scaling"].metadata["rule"]
    assert set(positions.SCALINGS) == set(rule.allowed())
    own = checkpoint.config
    found = positions.scalings(own, 64)
    assert list(found) == ["none (as trained)", "linear ×4", "ntk ×4", "dynamic", "yarn ×4", "llama3 ×4"]
    assert found["none (as trained)"] is own
    trained = with_fields(own, positions={"scaling": "yarn", "factor": 2.0, "beta_fast": 16.0})
    found = positions.scalings(trained, 64, ["none", "yarn", "linear"])
    assert list(found) == ["yarn ×2 (as trained)", "none", "linear ×4"] and found["none"].positions == own.positions
    assert list(positions.scalings(own, 16)) == ["none (as trained)"]
    alibi = with_fields(own, positions={"kind": "alibi"})
    assert list(positions.scalings(alibi, 64)) == ["alibi (as trained)"]


@pytest.mark.long
def test_each_scaling_changes_what_is_beyond_the_trained_length(checkpoint):
    length = 4 * checkpoint.config.data.sequence_length
    ids = rows_of(np.random.default_rng(0), 6, length).reshape(3, 2, length + 1)
    names = ["ntk", "dynamic"]
    losses = {
        name: positions.position_losses(checkpoint._replace(config=one), ids, batch_size=8)
        for name, one in positions.scalings(checkpoint.config, length, names).items()
    }
    own, ntk, dynamic = losses.values()
    # Dynamic: as trained up to the trained length; in rows of four times that, as ntk of factor 4.
    np.testing.assert_allclose(dynamic[:, : length // 4], own[:, : length // 4], rtol=1e-5)
    np.testing.assert_allclose(dynamic[:, length // 2 :], ntk[:, length // 2 :], rtol=1e-5)
    assert np.abs(ntk[:, length // 2 :] - own[:, length // 2 :]).max() > 1e-3


def test_a_cache_has_the_bytes_of_its_keys_and_values(checkpoint):
    model, attention = checkpoint.config.model, checkpoint.config.attention
    ids = rows_of(np.random.default_rng(0), 1, 39)[0]
    found = Clock(checkpoint).measure(ids, new=7, repeats=2)
    each = 2 * model.layers * attention.kv_heads * attention.head_dim * 4
    assert found["cache_bytes"] == 40 * each + 8  # the row's length and prefix, int32
    assert (found["length"], found["prompt"], found["steps"]) == (40, 33, 14)
    for name in ("first_token_seconds", "step_seconds_median", "step_seconds_p95"):
        assert 0 < found[name]["low"] <= found[name]["value"] <= found[name]["high"]
    assert found["step_seconds_median"]["value"] <= found["step_seconds_p95"]["value"]


# The program ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes a run of two steps of a kind and positions when it is first asked for."""
    root = tmp_path_factory.mktemp("runs")

    @on_demand
    def of(kind: str = "plain", positions: str = "rope") -> Path:
        made = config(
            corpus,
            kind,
            positions={"kind": positions, **({"max_length": 40} if positions == "learned" else {})},
            train={"steps": 2, "batch_size": 8},
            validation={"every": 0},
            monitor={"probe_every": 0, "tensorboard": False, "progress_every": 0},
        )
        assert run(made, root / f"{kind}-{positions}") == 0
        return root / f"{kind}-{positions}"

    return of


SMALL = ["--ids", "--samples", "3", "--candidates", "3", "--depths", "0", "1", "--rows", "3", "--repeats", "2"]


def report(runs: Sequence[Path], file: Path, *more: str) -> list[dict[str, Any]]:
    assert longcontext.main(["--checkpoint", *map(str, runs), *SMALL, "--json", str(file), *more]) == 0
    return read_json(file)["checkpoints"]


def test_a_report_has_what_the_model_scored(checkpoint):
    """Each cell holds what the questions give when they are asked directly, and what does not fit is reported."""
    options = longcontext._parser().parse_args(
        ["--checkpoint", "x", *SMALL, "--parts", "needles", "--lengths", "9", "32"]
    )
    found = evaluation.evaluate(checkpoint, options)
    corpus = corpus_of_text.open_corpus(checkpoint.config, "validation")
    score = evaluation.ModelScore(checkpoint, options.batch_size)
    direct = needles.retrieval(evaluation._exam(corpus, options, score, 0), 32, options.depths)
    assert np.abs(direct.gain).min() > 0
    for place, cell in enumerate(found.report["retrieval"]):
        assert (cell["length"], cell["depth"], cell["samples"]) == (32, options.depths[place], 3)
        for measure in ("exact", "first", "gain"):
            np.testing.assert_allclose(cell[measure]["value"], getattr(direct, measure)[:, place].mean(), rtol=1e-6)
    assert found.report["notes"] == ["no needle in 9 tokens: needle and question alone take up to 17"]
    lines = tables.text(found.report).splitlines()
    assert sum(line.startswith("32 ") for line in lines) == 4 and lines[-1].startswith("note: no needle in 9 tokens")
    assert {one["value"] for one in evaluation.difference(found, found)} == {0.0}
    assert evaluation.difference(found, found._replace(identity=("bytes", "other text"))) == []


@pytest.mark.long
def test_the_program_tells_writes_and_leaves_the_run_alone(trained, tmp_path, capsys):
    folder, out = trained(), tmp_path / "out"
    before = snapshot(folder)
    (found,) = report([folder], tmp_path / "found.json", "--out", str(out), "--at", "128", "--new", "3")
    assert snapshot(folder) == before
    assert found["lengths"] == [4, 8, 16, 32, 64] and found["trained_length"] == 16
    cells = {(one["length"], one["depth"]) for one in found["retrieval"]}
    assert cells == {(32, 0), (32, 1), (64, 0), (64, 1)}
    short = [f"no needle in {n} tokens: needle and question alone take up to 17" for n in (4, 8, 16)]
    assert found["notes"] == [*short, "no 16 distractors in 128 tokens (--at)"]
    assert [one["distractors"] for one in found["distractors"]["rows"]] == [0, 1, 4]
    assert len(found["joined"]["rows"]) == 2 and found["joined"]["length"] == 128
    assert [series["scaling"] for series in found["loss"]["series"]][:2] == ["none (as trained)", "linear ×4"]
    assert [one["to"] for one in found["loss"]["series"][0]["buckets"]] == [8, 16, 32, 64]
    assert [one["length"] for one in found["cost"]] == found["lengths"]
    drawn = {path.name for path in out.iterdir()}
    assert drawn == {f"{name}.{end}" for name in ("needles_1", "loss_by_position") for end in ("png", "csv")}
    said = capsys.readouterr().out
    assert said.count("note: no needle in") == 3 and "first of 3, % (chance 33)" in said


@pytest.mark.long
def test_neither_batch_nor_mesh_matters(trained, tmp_path):
    parts = ["--parts", "needles", "loss", "cost", "--lengths", "32", "64", "--new", "2", "--scalings", "yarn"]
    one, other = (
        report([trained("mhc")], tmp_path / f"{size}.json", *parts, "--batch_size", str(size), *mesh)[0]
        for size, mesh in ((8, []), (3, ["--config.mesh.fsdp=4"]))
    )
    alone = checkpoints.load(str(trained("mhc")), devices=jax.devices()[:1])
    options = longcontext._parser().parse_args(["--checkpoint", "x", *SMALL, *parts])
    third = evaluation.evaluate(alone, options).report
    for part in ("retrieval", "loss"):
        for found in (other, third):
            a, b = (jax.tree.leaves(tree[part]) for tree in (one, found))
            numbers = [(x, y) for x, y in zip(a, b, strict=True) if not isinstance(x, str)]
            ours, theirs = np.array(numbers, np.float64).T
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert [x["cache_bytes"] for x in one["cost"]] == [x["cache_bytes"] for x in third["cost"]]


@pytest.mark.long
def test_checkpoints_are_compared_sample_by_sample(trained, tmp_path, capsys):
    parts = ["--parts", "needles", "loss", "--lengths", "32", "--scalings"]
    first, second, same = report([trained(), trained("hc"), trained()], tmp_path / "found.json", *parts)
    assert "minus_first" not in first and all(one["value"] == one["low"] == 0 for one in same["minus_first"])
    gap = {one["measure"]: one for one in second["minus_first"]}
    assert set(gap) == {
        "gain, 32 tokens",
        "first, 32 tokens",
        *(f"loss, {s} of 32 tokens" for s in ("1-8", "9-16", "17-32")),
    }

    def gain(found: dict[str, Any]) -> float:
        return float(np.mean([one["gain"]["value"] for one in found["retrieval"]]))

    np.testing.assert_allclose(gap["gain, 32 tokens"]["value"], gain(second) - gain(first), atol=1e-12)
    ends = [one["loss"]["series"][0]["buckets"][-1]["loss"]["value"] for one in (first, second)]
    np.testing.assert_allclose(gap["loss, 17-32 of 32 tokens"]["value"], ends[1] - ends[0], atol=1e-12)
    assert f"Minus {first['checkpoint']}" in capsys.readouterr().out


@pytest.mark.long
def test_learned_positions_end_where_their_table_does(trained, tmp_path, capsys):
    folder = trained("plain", "learned")
    (found,) = report([folder], tmp_path / "found.json", "--parts", "needles", "loss", "cost")
    assert found["lengths"] == [4, 8, 16, 32]
    assert found["notes"][0] == "no rows of 64 tokens: the learned positions end at 40"
    assert [one["scaling"] for one in found["loss"]["series"]] == ["learned (as trained)"]
    alone = ["--samples", "1", "--rows", "1", "--repeats", "1", "--new", "1", "--out", str(tmp_path / "out")]
    (found,) = report(
        [folder], tmp_path / "found.json", "--parts", "needles", "loss", "cost", "--lengths", "40", *alone
    )
    assert (
        found["cost"][0]["steps"] == 1 and found["cost"][0]["step_seconds_p95"]["low"] is None
    )  # nothing to draw from
    capsys.readouterr()
    with pytest.raises(SystemExit):
        cli.run_main(longcontext.main, ["--checkpoint", str(folder), "--lengths", "41"])
    assert "--lengths: given 41, allowed: at most 40, the learned positions of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--depths", "1.5"], "--depths: given 1.5, allowed: 0 (before the text) to 1"),
        (["--lengths", "1"], "--lengths: given 1, allowed: 2 tokens or more"),
        (["--candidates", "1"], "--candidates: given 1, allowed: 2 or more"),
        (["--statement", "{value} is of {key}"], "allowed: a sentence with {key}, then {value}, once each"),
        (["--link", "{key} {key} {value}"], "--link: given '{key} {key} {value}', allowed:"),
        (["--parts", "needle"], "invalid choice: 'needle'"),
        (["--scalings", "yarm"], "invalid choice: 'yarm'"),
        (["--json", "/nowhere/at/all.json"], "--json: cannot write /nowhere/at/all.json"),
        (["--config.positions.scaling=ntk"], "--config.positions.scaling: the weights fix it"),
        (["--sample", "3"], "unknown argument --sample (did you mean --samples?)"),
        ([], "nowhere: not a run folder"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_loaded(given: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        cli.run_main(longcontext.main, ["--checkpoint", "nowhere", *given])
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert left.value.code == 2 and said.out == "" and message in line


def test_a_corpus_of_ids_has_needles_of_its_own_ids(tmp_path, checkpoint):
    (tmp_path / "ids").mkdir()
    rng = np.random.default_rng(0)
    for number in range(20):
        np.save(tmp_path / "ids" / f"{number}.npy", rng.integers(40, 60, 90))
    source = with_fields(checkpoint.config, data={"source": f"tokens:{tmp_path}/ids/*.npy"})
    corpus = corpus_of_text.open_corpus(source, "validation")
    options = longcontext._parser().parse_args(["--checkpoint", "x"])
    made = evaluation._exam(corpus, options, copier(5), 0)
    assert isinstance(made.language, sentences.RandomIds)
    contexts: list[np.ndarray] = []

    def score(rows: Iterable[needles.Row]) -> list[needles.ValueScore]:
        every = list(rows)
        contexts.extend(np.concatenate(row) for row in every)
        return list(copier(5)(every))

    assert needles.retrieval(dataclasses.replace(made, score=score), 60, (0.5,)).exact.all()
    ids = np.stack(contexts)
    assert (ids[:, 0] == BYTES.bos_id).all() and set(ids[:, 1:].ravel()) <= set(range(40, 60))


@pytest.mark.parametrize("pieces", ["bytes", "spaces"])
def test_a_question_of_pieces_is_the_beginning_of_its_sentence(pieces: str, tmp_path: Path) -> None:
    """It is, under byte-level BPE, and where a space belongs to the next word; values have equally many pieces."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    if pieces == "bytes":
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    else:
        made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
        alphabet = [*string.printable, "▁"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    numbers = [f"The secret number of a is {n}." for n in range(10_000, 99_999, 97)]
    made.train_from_iterator(numbers, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = JsonTokenizer(tmp_path / "tokenizer.json")
    language = sentences.Text(tokenizer)
    rng = np.random.default_rng(0)
    values = language.values(rng, 30)
    assert values.shape[0] == 30 and len({row.tobytes() for row in values}) == 30
    for key, value in zip(language.keys(rng, 30), values, strict=True):
        fact = language.fact(key, value)
        text = tokenizer.decode(fact.sentence)
        assert re.fullmatch(rf" ?\nThe secret number of {key} is +\d{{5}} ?\.\n", text), text
        assert text.startswith(tokenizer.decode(fact.query))


def test_numbers_are_told_apart_or_it_says_so():
    class Deaf(ByteTokenizer):
        def encode(self, text: bytes | str) -> np.ndarray:
            return np.minimum(super().encode(text), 48)

    with pytest.raises(sentences.UserError, match="does not tell numbers apart; allowed: --ids"):
        sentences.Text(Deaf()).values(np.random.default_rng(0), 3)
    with pytest.raises(sentences.UserError, match="the text has 3 different ids, allowed: 4 or more"):
        sentences.RandomIds(np.arange(3))
    with pytest.raises(sentences.UserError, match="too few different ids"):
        sentences.RandomIds(np.arange(4)).values(np.random.default_rng(0), 9)


def test_an_answer_among_tokens_that_are_seen_both_ways_is_none(checkpoint):
    short = dataclasses.replace(exam("ids", copier(5)), prefix=200)
    with pytest.raises(needles.TooShort) as error:
        needles.retrieval(short, 150, (0.5,))
    assert error.value.needed == 204
