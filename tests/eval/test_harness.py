"""Test lm-evaluation-harness: likelihoods of each request as if it were alone, stops, local tasks, the paper's."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import jax
import jax.numpy as jnp
import lm_eval.tasks
import numpy as np
import pytest
from huggingface_hub import constants
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from mhc import cli
from mhc.config import resolve
from mhc.data.tokenizers import load as load_tokenizer
from mhc.errors import UserError
from mhc.eval.common import checkpoints
from mhc.eval.common import rows as corpora
from mhc.eval.common.scoring import windows
from mhc.eval.harness import __main__ as harness
from mhc.eval.harness import lm
from mhc.eval.harness import scores as harness_scores
from mhc.eval.harness import tasks as harness_tasks
from mhc.eval.harness.lm import LanguageModel, generation
from mhc.eval.perplexity.score import score
from tests.small import random_params
from tests.small_runs import config, snapshot, untrained, write_corpus

WORDS = ["the", "width", "of", "a", "stream", "is", "what", "its", "norm", "mixing", "keeps", "mean", "—", "naïve"]


@pytest.fixture(scope="module", autouse=True)
def _no_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make the hub unreachable, and let the data library prepare into a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a byte-level BPE, so that stop strings span tokens and tokens span the end of a context."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    library.save(str(file))
    return str(file)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tokenizer: str) -> Path:
    """Write a checkpoint of random weights: training leaves so small a model that hardly depends on the context."""
    folder = tmp_path_factory.mktemp("runs")
    corpus = write_corpus(folder / "texts")
    made = resolve(config(corpus, data={"tokenizer": tokenizer}), load_tokenizer(tokenizer).vocab_size)
    return untrained(made, random_params(made), folder / "a")


@pytest.fixture(scope="module")
def model(trained: Path) -> LanguageModel:
    return made(checkpoints.load(str(trained), devices=jax.devices()[:1]))


def made(checkpoint: checkpoints.Checkpoint, **options: Any) -> LanguageModel:
    """Return the harness's model of a checkpoint."""
    return LanguageModel(checkpoint, batch_size=4, **options)


def request(kind: str, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def words(count: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


@functools.cache
def alone(model: LanguageModel, tokens: tuple[int, ...]) -> np.ndarray:
    """Return the log-probabilities [T, V] of a forward pass of one row without padding."""
    return np.asarray(_forward(model)(model.checkpoint.params, jnp.array([tokens])))


@functools.cache
def _forward(model: LanguageModel) -> Callable[[Any, jax.Array], jax.Array]:
    definition = model.checkpoint.definition
    return jax.jit(lambda params, tokens: jax.nn.log_softmax(definition.bind(params)(tokens)[0].astype(jnp.float32)))


# Likelihoods ----------------------------------------------------------------------------------------------------------

# Contexts and continuations of every kind of length: none, one token, several, beyond the context of 16.
PAIRS = [
    ("", " mean width"),
    (words(3, 0), " stream"),
    (words(3, 0), " norm"),
    (words(3, 0) + " ", "what is"),
    (words(40, 2), " " + words(3, 3)),
    (words(40, 2), " norm"),
    (words(2, 4), " " + words(60, 5)),
    ("naïve", "—"),
    ("", " " + words(50, 6)),
]


def test_what_is_empty_costs_nothing(model):
    """Without a token in continuation, context or text nothing is predicted, and greedy decoding agrees."""
    asked = [request("loglikelihood", *pair) for pair in (("a stream", ""), ("", ""), ("a", " stream"))]
    found = model.loglikelihood(asked)
    assert found[:2] == [(0.0, True), (0.0, True)] and found[2][0] < 0
    empty, other = model.loglikelihood_rolling([request("loglikelihood_rolling", text) for text in ("", "a")])
    assert empty == 0.0 > other
    (text,) = model.generate_until([request("generate_until", "", {"until": ["", "\n"], "max_gen_toks": 2})])
    assert "\n" not in text


def test_a_text_that_has_no_ids_is_named_by_its_document(model):
    """It is named before anything is computed: for half a character here, for a letter without an id elsewhere."""
    fine = request("loglikelihood", "a", " stream")
    for kind, ask, arguments in (
        ("loglikelihood", model.loglikelihood, ("a\ud83d", " b")),
        ("loglikelihood", model.loglikelihood, ("", "\ud83d")),
        ("loglikelihood_rolling", model.loglikelihood_rolling, ("a\ud83d",)),
        ("generate_until", model.generate_until, ("a\ud83d", {"until": [], "max_gen_toks": 2})),
    ):
        broken = Instance(request_type=kind, doc={}, arguments=arguments, idx=0, metadata=("mine", 7, 1))
        with pytest.raises(UserError, match=r"^task mine, document 7: not UTF-8: character \d is an unpaired"):
            ask([fine, broken] if kind == "loglikelihood" else [broken])


# Each length is a program of its own.
@pytest.mark.parametrize("pairs", [PAIRS[6:7], pytest.param(PAIRS, marks=pytest.mark.product)], ids=["long", "every"])
def test_a_likelihood_is_that_of_the_request_alone(pairs, model):
    found = model.loglikelihood([request("loglikelihood", *pair) for pair in pairs])
    longest = model.max_length
    lengths = set()
    for (context, continuation), (total, greedy) in zip(pairs, found, strict=True):
        before = model.tok_encode(context.rstrip())
        tokens = [*before, *model.tok_encode(context[len(context.rstrip()) :] + continuation, add_special_tokens=False)]
        lengths.add((len(tokens) - len(before) == 1, len(tokens) > longest + 1))
        expected, all_greedy = 0.0, True
        for place in range(len(before), len(tokens)):  # each target with as much before it as the window lets it see
            window = next(
                one for one in windows(len(tokens) - 1, longest, longest, len(before) - 1) if place <= one.end
            )
            log_p = alone(model, tuple(tokens[window.start : window.end]))[place - 1 - window.start]
            expected += float(log_p[tokens[place]])
            all_greedy &= int(np.argmax(log_p)) == tokens[place]
        assert total == pytest.approx(expected, abs=1e-4), (context, continuation)
        assert greedy == all_greedy
    assert pairs != PAIRS or lengths == {(True, True), (True, False), (False, True), (False, False)}


@pytest.mark.long
def test_what_greedy_decoding_gives_is_greedy(model):
    for context in (words(3, 0), words(30, 2)):
        (text,) = model.generate_until([request("generate_until", context, {"max_gen_toks": 3, "until": []})])
        before = model.tok_encode(context)[-(model.max_length - 3) :]
        new: list[int] = []
        for _ in range(3):
            new.append(int(np.argmax(alone(model, (*before, *new))[-1])))
        wrong = [*new[:-1], (new[-1] + 1) % 300]
        found = model._loglikelihood_tokens([(None, before, new), (None, before, wrong)])
        assert [greedy for _, greedy in found] == [True, False]
        end = new.index(model.eot_token_id) if model.eot_token_id in new else None
        assert text == model._tokenizer.decode(new[:end])


@pytest.mark.long
def test_batches_change_nothing(model):
    compare(model, LanguageModel(model.checkpoint, batch_size=7))


@pytest.mark.long  # a minute of compilation
@pytest.mark.parametrize(
    "mesh",
    [{"data": 8}, {"fsdp": 2, "tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 4, "expert": 2}],
    ids=lambda mesh: "-".join(f"{axis}{size}" for axis, size in mesh.items()),
)
def test_meshes_change_nothing(trained, model, mesh):
    loaded = checkpoints.load(str(trained), changes={f"mesh.{axis}": size for axis, size in mesh.items()})
    compare(model, made(loaded))


def compare(model: LanguageModel, other: LanguageModel) -> None:
    requests = [request("loglikelihood", *pair) for pair in PAIRS]
    texts = [request("generate_until", context, {"max_gen_toks": 4}) for context, _ in PAIRS]
    expected = [total for total, _ in model.loglikelihood(requests)]
    np.testing.assert_allclose([total for total, _ in other.loglikelihood(requests)], expected, atol=1e-4)
    assert other.generate_until(texts) == model.generate_until(texts)


def test_rolling_is_perplexity_without_the_ends_of_documents(trained, tmp_path, model):
    """Sums of nats agree on the same text by windows: longer and shorter than the context, and empty."""
    texts = [words(count, count) for count in (1, 5, 17, 60)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text, "utf-8")
    source = {"data.validation": f"text:{tmp_path}/*.txt"}
    checkpoint = checkpoints.load(str(trained), changes=source, devices=jax.devices()[:1])
    checkpoint = checkpoint._replace(params=model.checkpoint.params)
    length = checkpoint.config.data.sequence_length
    corpus = corpora.sliding(checkpoint.config, "validation", rows=0, batch_size=4, stride=length, eos=False)
    expected = score(checkpoint, corpus)
    rolling = model.loglikelihood_rolling([request("loglikelihood_rolling", text) for text in [*texts, ""]])
    assert rolling[-1] == 0.0
    np.testing.assert_allclose(sorted(rolling[:-1]), sorted(-expected.sums.nll), rtol=1e-6)
    assert expected.sums.bytes.sum() == sum(len(text.encode()) for text in texts)


def test_single_tokens_behind_one_context_take_one_pass(model, monkeypatch):
    seen: list[Any] = []
    each = model._scorer.each

    def noted(batches: Any) -> Any:
        every = list(batches)
        seen.extend(every)
        return each(every)

    monkeypatch.setattr(model._scorer, "each", noted)
    model.loglikelihood([request("loglikelihood", words(3, 0), " " + word) for word in ("norm", "of", "is", "its")])
    (batch,) = seen
    assert (batch["segment_ids"].sum(axis=1) > 0).sum() == 1


# Generation -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_stop_string_ends_the_text_also_inside_tokens(model):
    """Text ends where a stop occurs in what is written without stops: at any place, over one token or several."""
    context = words(3, 7)
    (text,) = model.generate_until([request("generate_until", context, {"max_gen_toks": 8})])
    pieces = [model._tokenizer.decode([token]) for token in model._tokenizer.encode(text)]
    assert len(text) > 8 and max(map(len, pieces)) > 1
    stops = [text[first : first + size] for first in range(1, len(text) - 4) for size in (1, 2, 4)]
    asked = [{"max_gen_toks": 8, "until": [stop, "never there"]} for stop in stops]
    written = model.generate_until([request("generate_until", context, how) for how in asked])
    assert written == [text[: text.index(stop)] for stop in stops]


def test_how_a_task_asks_for_text():
    greedy = generation({"until": "\n", "do_sample": False, "temperature": 0.7, "max_gen_toks": 9}, None)
    assert (greedy.sampling.temperature, greedy.stop, greedy.new) == (0.0, ("\n",), 9)
    assert generation({}, None).new == 256 and generation({"max_new_tokens": 40}, 30).new == 30
    sampled = generation({"do_sample": True, "top_p": 0.9, "top_k": 0}, None).sampling
    assert (sampled.temperature, sampled.top_p, sampled.top_k) == (1.0, 0.9, None)
    assert generation({"temperature": 0.5}, None).sampling.temperature == 0.5
    for arguments, message in (
        ({"num_beams": 4}, r"num_beams=4, allowed: until.*, or num_beams=1, which asks for nothing"),
        ({"repetition_penalty": 1.2}, r"repetition_penalty=1.2, allowed: until"),
        ({"stop_token_ids": [3]}, r"stop_token_ids=\[3\], allowed"),
        ({"temprature": 1.0}, r"temprature=1.0, allowed: .*did you mean temperature"),
        ({"temperature": "hot"}, r"temperature='hot', allowed: a number"),
        ({"max_gen_toks": "many"}, r"max_gen_toks='many', allowed: a number"),
        ({"do_sample": True, "top_k": [1]}, r"top_k=\[1\], allowed: a number"),
        ({"until": 3}, r"until=3, allowed: a string or a list of strings"),
        ({"max_gen_toks": 0}, r"0 new tokens, allowed: 1 or more"),
        ({"max_gen_toks": -4}, r"-4 new tokens, allowed: 1 or more"),
    ):
        with pytest.raises(UserError, match=message):
            generation(arguments, None)


def test_what_asks_for_nothing_passes():
    nothing = generation({}, None)
    for name, neutral in lm._NEUTRAL.items():
        assert generation({name: neutral}, None) == generation({name: None}, None) == nothing
    asked = {"num_beams": 1, "repetition_penalty": 1.0, "length_penalty": 1.0, "early_stopping": False}
    assert generation(asked, None) == nothing
    everything = dict.fromkeys((*lm._KNOWN, *lm._LENGTHS, *lm._WITHOUT_EFFECT, *lm._NEUTRAL))
    assert generation(everything, None) == nothing
    sampled = generation({"do_sample": True, "temperature": None, "top_k": -1, "top_p": 1.0, "min_p": 0}, None).sampling
    assert (sampled.temperature, sampled.top_k) == (1.0, None)


@pytest.mark.long
def test_what_is_asked_for_several_times_is_another_sample_each_time(model):
    how = {"max_gen_toks": 8, "do_sample": True}
    asked = [request("generate_until", words(3, 7), how)] * 3
    texts = model.generate_until(asked)
    assert len(set(texts)) == 3 and model.generate_until(asked) == texts
    assert model.generate_until(asked[:1]) == texts[:1]


# Local tasks, end to end ----------------------------------------------------------------------------------------------

TASKS = {
    "choose": """
task: choose
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choose.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{options}}"
doc_to_target: "{{right}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "write": """
task: write
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choose.jsonl}}
test_split: test
fewshot_split: test
num_fewshot: 2
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{options[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 5}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "read": """
task: read
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choose.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
- metric: bits_per_byte
""",
    "lost": """
task: lost
dataset_path: nobody/nowhere
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{options}}"
doc_to_target: "{{right}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
}


def write_tasks(folder: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    rows = [
        {"question": words(4, k), "options": [" " + words(1, k), " " + words(2, 50 + k)], "right": 0} for k in range(5)
    ]
    folder.mkdir(exist_ok=True)
    (folder / "choose.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    for name in names:
        (folder / f"{name}.yaml").write_text(TASKS[name].replace("FOLDER", str(folder)), "utf-8")
    return rows


def test_local_tasks_of_three_kinds_end_to_end(trained, tmp_path, capsys):
    assert importlib.util.find_spec("torch") is None
    rows = write_tasks(tmp_path / "tasks", list(TASKS))
    before = snapshot(trained)
    file, samples = tmp_path / "found.json", tmp_path / "samples.jsonl"
    arguments = ["--checkpoint", str(trained), "--tasks", str(tmp_path / "tasks"), "--average", "1"]
    assert harness.main([*arguments, "--json", str(file), "--samples", str(samples)]) == 1  # one is missing
    assert snapshot(trained) == before
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith("left out")]
    assert line.startswith("left out: lost: ") and "nobody/nowhere" in line
    found = json.loads(file.read_text())
    assert list(found["missing"]) == ["lost"]
    by_name = {one["name"]: one for one in found["scores"]}
    assert {one["questions"] for one in found["scores"]} == {5} and set(by_name) == {"choose", "write", "read"}
    assert by_name["write"]["shots"] == 2 and "write" in out
    # The same by hand.
    model = LanguageModel(checkpoints.load(str(trained), devices=jax.devices()[:1]))
    right = 0
    for row in rows:
        first, second = model.loglikelihood([request("loglikelihood", row["question"], one) for one in row["options"]])
        right += first[0] > second[0]
    assert by_name["choose"]["value"] == pytest.approx(right / len(rows))
    texts = [row["question"] for row in rows]
    total = sum(model.loglikelihood_rolling([request("loglikelihood_rolling", text) for text in texts]))
    bits = -total / math.log(2) / sum(len(text.encode()) for text in texts)
    assert by_name["read"]["value"] == pytest.approx(bits, rel=1e-6)
    written = [json.loads(line) for line in samples.read_text("utf-8").splitlines()]
    assert len(written) == 15 and {one["task"] for one in written} == set(by_name)


def test_mistakes_are_one_line(trained, tmp_path, capsys, monkeypatch):
    write_tasks(tmp_path / "tasks", ["lost", "write"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.yaml").write_text("- 1\n")
    tasks = str(tmp_path / "tasks")
    # Listing all that lm-eval knows takes a quarter of a minute: it knows nothing here.
    everything = lm_eval.tasks.TaskManager
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **how: everything(**how | {"include_defaults": False}))
    cases: list[tuple[list[str], str]] = [
        (["--tasks", "mhc_papers"], "a YAML file or a folder of them (did you mean mhc_paper?)"),
        (["--tasks", str(tmp_path / "empty")], "has no YAML file with a task"),
        (["--tasks", str(tmp_path / "none.yaml")], "no such file"),
        (["--tasks", str(tmp_path / "list.yaml")], "is no task of lm-eval"),
        (["--tasks", f"{tasks}/lost.yaml"], "none of the 1"),
        (["--tasks", f"{tasks}/write.yaml,{tasks}/write.yaml"], "write is named twice"),
        (["--tasks", f"{tasks}/write.yaml", "--max_length", "5"], "none of the 1"),
        (["--tasks", tasks, "--limit", "0"], "--limit: given 0, allowed: 1 or more"),
        (["--tasks", tasks, "--data", str(tmp_path / "none")], "--data: no such folder"),
        (["--tasks", tasks, "--json", str(tmp_path / "none" / "a.json")], "--json"),
        (["--tasks", tasks, "--step", "3"], "no checkpoint of step 3"),
        (["--tasks", tasks, "--config.model.width=4"], "the weights fix it"),
    ]
    for arguments, expected in cases:
        with pytest.raises(SystemExit) as raised:
            cli.run_main(harness.main, ["--checkpoint", str(trained), *arguments])
        assert raised.value.code == 2
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert last.startswith("error: ") and expected in last, last


# The mHC paper's benchmarks -------------------------------------------------------------------------------------------

_LETTERS = ("A", "B", "C", "D")
_SPLIT_ROWS = 12  # of splits that examples are drawn from: more than the most shots


def _drop(k: int) -> dict[str, Any]:
    answer = {"number": str(k), "date": {"day": "", "month": "", "year": ""}, "spans": []}
    several = {"number": [str(k)], "date": [answer["date"]], "spans": [[]]}
    return {
        "section_id": "s",
        "query_id": f"q{k}",
        "passage": f"The team scored {k} points.",
        "question": "How many points?",
        "answer": answer,
        "validated_answers": several,
    }


def _mmlu(k: int) -> dict[str, Any]:
    return {"question": f"What is {k}?", "choices": [f"{k}", "red", "blue", "green"], "answer": 0}


def write_paper_data(folder: Path) -> None:
    """Write a few rows of each dataset in its own schema; of those with parts, two of MMLU and BBH, one of MATH."""
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {
        "EleutherAI/drop": {split: [_drop(k) for k in range(_SPLIT_ROWS)] for split in ("train", "validation")},
        "openai/gsm8k/main": {
            split: [{"question": f"What is {k} + 1?", "answer": f"It is {k + 1}.\n#### {k + 1}"} for k in range(3)]
            for split in ("train", "test")
        },
        "Rowan/hellaswag": {
            split: [
                {
                    "ind": k,
                    "activity_label": "Skating",
                    "ctx_a": f"A skater {k} jumps.",
                    "ctx_b": "she",
                    "endings": [f"lands {k}.", "is a lemon.", "melts.", "swims in tea."],
                    "label": "0",
                }
                for k in range(_SPLIT_ROWS)
            ]
            for split in ("train", "validation")
        },
        "EleutherAI/hendrycks_math/algebra": {
            split: [
                {
                    "problem": f"Find ${k}+1$.",
                    "level": "1",
                    "type": "Algebra",
                    "solution": f"It is $\\boxed{{{k + 1}}}$.",
                }
                for k in range(3)
            ]
            for split in ("train", "test")
        },
        "baber/piqa": {
            split: [
                {"goal": f"Open jar {k}", "sol1": "turn the lid", "sol2": "eat the jar", "label": 0} for k in range(3)
            ]
            for split in ("train", "validation")
        },
        "mandarjoshi/trivia_qa/rc.nocontext": {
            split: [
                {"question": f"Who is number {k}", "answer": {"value": f"Ann{k}", "aliases": [f"Ann{k}", f"An{k}"]}}
                for k in range(_SPLIT_ROWS)
            ]
            for split in ("train", "validation")
        },
    }
    for subject in ("anatomy", "virology"):
        rows[f"cais/mmlu/{subject}"] = {"dev": [_mmlu(k) for k in range(5)], "test": [_mmlu(9 + k) for k in range(3)]}
    for subset in ("boolean_expressions", "word_sorting"):
        rows[f"SaylorTwift/bbh/{subset}"] = {"test": [{"input": f"item {k}", "target": f"({k})"} for k in range(3)]}
    for name, splits in rows.items():
        (folder / name).mkdir(parents=True)
        for split, content in splits.items():
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content), "utf-8")


_OTHER_DIGITS = str.maketrans("0123456789", "5678901234")


class Scholar(LM):
    """Knows the answers, and gives them as each benchmark wants them; with ``wrong`` it gives wrong ones likewise."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self._wrong = wrong
        self.prompts: dict[str, str] = {}

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        for one in requests:
            self.prompts.setdefault(one.task_name, one.args[0])
        wanted = 1 if self._wrong else 0
        return [(0.0 if one.idx == wanted else -1e3, one.idx == wanted) for one in requests]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise NotImplementedError

    def generate_until(self, requests: list[Instance]) -> list[str]:
        out = []
        for one in requests:
            self.prompts.setdefault(one.task_name, one.args[0])
            doc, task = one.doc, str(one.task_name)
            if task == "drop":
                text = doc["answers"][0][0]
            elif task == "gsm8k_cot":
                text = f" It is so. The answer is {doc['answer'].split('#### ')[1]}."
            elif task.startswith("minerva_math"):
                text = f"Final Answer: The final answer is ${doc['answer']}$. I hope it is correct."
            elif task == "triviaqa":
                text = f" {doc['answer']['aliases'][1].upper()} "
            else:
                text = f"So the answer is {doc['target']}."
            out.append(text.translate(_OTHER_DIGITS) if self._wrong else text)
        return out


def test_the_eight_of_the_paper(tmp_path):
    """Shots, filters and metrics of each work on rows of its own schema: right answers score 1, wrong ones 0."""
    write_paper_data(tmp_path)
    tasks = harness_tasks.load_tasks([harness_tasks.GROUP], tmp_path)
    assert [one.task for one in harness_tasks.MHC_PAPER] == list(tasks.asked)
    shots = {"BBH": 3, "DROP": 3, "GSM8K": 8, "HellaSwag": 10, "MATH": 4, "MMLU": 5, "PIQA": 0, "TriviaQA": 5}
    assert {one.title: one.shots for one in harness_tasks.MHC_PAPER} == shots
    assert len(tasks.asked["mmlu"]) == 57 and len(tasks.asked["bbh_cot_fewshot"]) == 27
    assert len(tasks.asked["minerva_math"]) == 7 and len(tasks.loaded) == 2 + 2 + 1 + 5
    gone = harness_tasks.missing_lines(tasks)
    assert [line.split(":")[0] for line in gone] == ["bbh_cot_fewshot", "minerva_math", "mmlu"]
    assert gone[2].startswith("mmlu: 55 of its 57 parts left out: ") and "cais/mmlu" in gone[2]

    scholar = Scholar()
    every = harness_scores.scores(harness_scores.evaluate(scholar, tasks), tasks)
    for one in harness_scores.paper(every, tasks):
        assert one["value"] == 1.0, one
        shown = next(score for score in every if (score.name, score.metric) == (one["task"], one["key"]))
        assert shown.shots == one["shots"]
    # The examples are there, each once, before the question.
    marks = {
        "bbh_cot_fewshot_boolean_expressions": "Q: ",
        "drop": "How many points?",
        "gsm8k_cot": "Q: ",
        "hellaswag": "Skating: ",
        "minerva_math_algebra": "Problem:",
        "mmlu_anatomy": "Answer:",
        "piqa": "Question: ",
        "triviaqa": "Question: ",
    }
    for (name, mark), benchmark in zip(marks.items(), harness_tasks.MHC_PAPER, strict=True):
        assert scholar.prompts[name].count(mark) == benchmark.shots + 1, name

    dunce = harness_tasks.load_tasks([harness_tasks.GROUP], tmp_path)
    every = harness_scores.scores(harness_scores.evaluate(Scholar(wrong=True), dunce), dunce)
    assert {one["value"] for one in harness_scores.paper(every, dunce)} == {0.0}


def test_the_paper_without_data_names_each_benchmark(trained, tmp_path, capsys):
    with pytest.raises(UserError, match="none of the 8"):
        harness.main(["--checkpoint", str(trained), "--tasks", "mhc_paper", "--data", str(tmp_path)])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("left out: ")]
    assert [line.split(":")[1].strip() for line in lines] == [one.task for one in harness_tasks.MHC_PAPER]
    assert all("Hub" in line for line in lines)
    logging.getLogger("lm_eval").setLevel(logging.NOTSET)
