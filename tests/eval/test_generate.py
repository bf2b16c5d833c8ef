"""Test generation: a prompt gives what a full forward and its own key give, however it is batched; stops, mistakes."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from mhc import cli
from mhc import config as configs
from mhc.config import CheckpointConfig, Config
from mhc.data import tokenizers
from mhc.data.tokenizers import Tokenizer
from mhc.errors import UserError
from mhc.eval.common.checkpoints import locate
from mhc.eval.common.generator import Completion, Generator, _row_key, chunks, padded
from mhc.eval.common.text_streams import StopStrings, text_stream
from mhc.eval.generate import __main__ as generate
from mhc.model.decoder import Params
from mhc.model.sampling import Sampling, sample, token_keys
from mhc.train.checkpoint import Checkpoints
from mhc.train.standing import Standing
from mhc.train.step import TrainState
from tests.small import definition, random_params, small

BYTES = tokenizers.load("bytes")
V = BYTES.vocab_size
PROMPTS = ["stream", "", "深さ x", "naïve", "x", "of a", "the"]  # with six new tokens all fit into the least cache


def config_of(**groups: dict[str, Any]) -> Config:
    return small("plain", model={"vocab_size": V + 2}, **groups)


@functools.cache
def generator(config: Config, sampling: Sampling | None = None) -> Generator:
    """Return a generator that reads prompts four tokens at a time; it is shared, so that programs are compiled once."""
    return Generator(config, random_params(config), BYTES, sampling or Sampling(), batch_size=4, chunk=4)


@functools.cache
def _empty_generator(config: Config, sampling: Sampling, batch_size: int) -> Generator:
    return Generator(config, {}, BYTES, sampling, batch_size=batch_size)


@pytest.fixture(scope="module", autouse=True)
def _commands_share_programs() -> Iterator[None]:
    def make(config: Config, params: Params, tokenizer: object, sampling: Sampling, *, batch_size: int) -> Generator:
        made = _empty_generator(config, sampling, batch_size)
        made._params = params
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "Generator", make)
        yield


# Tokens ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        config_of(attention={"window": 3}),
        config_of(attention={"prefix": 6}),  # more than a chunk; some prompts are shorter
        config_of(positions={"scaling": "dynamic", "factor": 2.0, "original_length": 8}),
    ],
    ids=["windows", "prefix", "dynamic"],
)
def test_tokens_are_those_of_the_full_forward(config: Config) -> None:
    """Each token is sampled, with its row's key at its position, from a full forward pass over all before it.

    Batches have four prompts of different lengths.
    """
    how, new = Sampling(temperature=0.8, top_k=50), 6
    made = generator(config, how).complete(PROMPTS, new, seed=5)
    params = random_params(config)

    @jax.jit
    def expected(tokens: jax.Array, length: jax.Array, prefix: jax.Array, key: jax.Array) -> jax.Array:
        segments = (jnp.arange(16) < length).astype(jnp.int32)[None]
        logits = definition(config).bind(params)(tokens[None], segments, prefix=prefix[None])[:, length - 1, :V]
        return sample(logits, token_keys(key[None], length[None]), how)[0]

    for prompt, completion in zip(PROMPTS, made, strict=True):
        ids = [BYTES.bos_id, *prompt.encode()]
        key, prefix = _row_key(5, ids), min(config.attention.prefix, len(ids))
        for token in completion.tokens:
            row = jnp.zeros(16, jnp.int32).at[: len(ids)].set(jnp.asarray(ids))
            assert expected(row, jnp.asarray(len(ids)), jnp.asarray(prefix), key) == token
            ids.append(token)
        assert len(completion.tokens) == new or completion.reason == "token"


def test_every_stop_token_of_the_run_ends_a_text() -> None:
    how = Sampling(temperature=0.8, top_k=50)
    free = generator(config_of(), how).complete(PROMPTS, 6, seed=5)
    ends = tuple({completion.tokens[2] for completion in free if len(completion.tokens) > 2})[:2]
    stopped = generator(config_of(data={"stop_tokens": ends}), how).complete(PROMPTS, 6, seed=5)
    for before, after in zip(free, stopped, strict=True):
        first = next((place for place, token in enumerate(before.tokens) if token in ends), None)
        assert after.tokens == before.tokens[:first]
        assert after.reason == (before.reason if first is None else "token")
    assert sum(before != after for before, after in zip(free, stopped, strict=True)) > 1


def test_a_prompt_gives_what_it_gives_alone() -> None:
    config = config_of(attention={"window": 3})
    how = Sampling(temperature=0.8, top_k=50)
    together = generator(config, how).complete(PROMPTS, 6, seed=5)
    assert together[::-1] == generator(config, how).complete(PROMPTS[::-1], 6, seed=5)
    for prompt, completion in zip(PROMPTS, together, strict=True):
        assert generator(config, how).complete([prompt], 6, seed=5) == [completion]
    other = generator(config, how).complete(PROMPTS, 6, seed=6)
    assert all(a.tokens != b.tokens for a, b in zip(together, other, strict=True))


def test_the_decode_step_is_compiled_once() -> None:
    """Batches and single prompts share it, whatever the lengths and the seed."""
    made = generator(config_of(attention={"window": 3}), Sampling(temperature=0.8, top_k=50))
    for call in range(3):
        made.complete(PROMPTS[: 7 - 2 * call], 6 - call, seed=call)  # four and three, four and one, three
        made.complete(PROMPTS[call : call + 1], 6 - call, seed=call)
    programs: Any = (made._step, made._prefill)
    assert [program._cache_size() for program in programs] == [2, 2]


def test_few_sizes() -> None:
    assert [padded(n) for n in (1, 16, 17, 24, 25, 33, 49, 100)] == [16, 16, 24, 24, 32, 48, 64, 128]
    assert chunks(5, 512) == [16] and chunks(512, 512) == [512] and chunks(1100, 512) == [512, 512, 128]
    assert all(sum(chunks(n, 8)) >= n and sum(chunks(n, 8)[:-1]) < n for n in range(1, 40))


# Stops ----------------------------------------------------------------------------------------------------------------


@hypothesis.given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    """Text ends as soon as it holds a stop string, and nothing is told before it is certain."""
    stream, told, text = StopStrings(stops), "", ""
    for piece in pieces:
        text += piece
        told += stream.push(piece)
        found = [text.find(stop) for stop in stops if stop in text]
        assert stream.found == bool(found)
        if found:
            assert told == text[: min(found)]
            return
        assert text.startswith(told) and len(text) - len(told) < max(map(len, stops), default=1)
    assert told + stream.end() == text


def told_by(
    made: Generator, prompt: str, new: int, stop: Sequence[str] = (), stop_tokens: Sequence[int] = ()
) -> tuple[Completion, str]:
    told: list[str] = []
    (completion,) = made.complete(
        [prompt], new, stop=stop, stop_tokens=stop_tokens, tell=lambda _, text: told.append(text)
    )
    return completion, "".join(told)


def test_stops_of_strings_and_tokens() -> None:
    made = generator(config_of(), Sampling(temperature=0))
    whole, told = told_by(made, "stream", 12)
    assert whole.reason == "length" and len(whole.tokens) == 12 and told == whole.text
    spelled = bytes(token for token in whole.tokens if token < 256)
    assert whole.text == spelled.decode(errors="replace")
    token = whole.tokens[5]
    first = whole.tokens.index(token)
    ended, _ = told_by(made, "stream", 12, stop_tokens=[token])
    assert ended.reason == "token" and ended.tokens == whole.tokens[:first]
    stop = whole.text[4:7]  # of several tokens
    cut, told = told_by(made, "stream", 12, stop=["never", stop])
    assert cut.reason == "stop" and told == cut.text == whole.text[: whole.text.index(stop)]
    assert whole.tokens[: len(cut.tokens)] == cut.tokens and len(cut.tokens) < 12


# Text -----------------------------------------------------------------------------------------------------------------


@hypothesis.given(st.one_of(st.text().map(str.encode), st.binary()))
@hypothesis.example(b"\xed\xa0")  # half a surrogate: never a character, and yet held back like the start of one
def test_bytes_become_text_as_soon_as_they_are_characters(data: bytes) -> None:
    stream, text = text_stream(BYTES, [BYTES.bos_id]), ""
    for count, byte in enumerate(data, start=1):
        text += stream.push(byte)
        whole = data[:count].decode(errors="replace")
        # At most an unfinished character is held back, of up to three bytes: all of them would be U+FFFD.
        assert whole.startswith(text) and whole[len(text) :] in (
            "",
            *("\N{REPLACEMENT CHARACTER}" * n for n in (1, 2, 3)),
        )
        assert text == whole or data[:count].decode(errors="ignore") == text.replace("\N{REPLACEMENT CHARACTER}", "")
    assert text + stream.end() == data.decode(errors="replace")


def library(kind: str) -> Library:
    if kind == "bytelevel":
        made = Library(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:  # a space belongs to the word behind it, and is dropped at the start
        made = Library(models.BPE(byte_fallback=True, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        alphabet = []
    special = ["<s>", "</s>", "<unk>"] + ([] if kind == "bytelevel" else [f"<0x{byte:02X}>" for byte in range(256)])
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["the width of a stream is not its depth, naïve still"] * 20, trainer)
    described = json.loads(made.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if not token["content"].startswith("<0x")]
    return Library.from_str(json.dumps(described))


@pytest.mark.parametrize("kind", ["bytelevel", "metaspace"])
def test_pieces_become_text(kind: str, tmp_path: Path) -> None:
    """The pieces of a text add the right text to those before, wherever it is cut: spaces, long characters."""
    library(kind).save(str(tmp_path / "tokenizer.json"))
    tokenizer, rng = tokenizers.load(str(tmp_path / "tokenizer.json")), random.Random(0)
    words = ["the", "stream", "naïve", "深さ", "🙂", "a", "its", "—"]
    for _ in range(40):
        ids = tokenizer.encode(" ".join(rng.choice(words) for _ in range(12))).tolist()
        cut = rng.randrange(1, len(ids))
        while tokenizer.decode(ids[:cut]).endswith("\N{REPLACEMENT CHARACTER}"):
            cut -= 1  # a prompt is a whole text
        before, told = tokenizer.decode(ids[:cut]), []
        stream = text_stream(tokenizer, [tokenizer.bos_id, *ids[:cut]])
        for token in [*ids[cut:], tokenizer.bos_id]:
            told.append(stream.push(token))
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in told)
        assert before + "".join(told) + stream.end() == tokenizer.decode(ids)
    if kind == "bytelevel":
        (*smile,) = tokenizer.encode("🙂").tolist()
        stream = text_stream(tokenizer, [])
        assert len(smile) > 1 and [stream.push(token) for token in smile[:-1]] == [""] * (len(smile) - 1)
        assert stream.end() == "\N{REPLACEMENT CHARACTER}"


SPACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
BYTES_OF, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
DECODERS = {  # of Gemma's kind, without a space that is stripped, and with bytes joined first
    "gemma": [SPACE, BYTES_OF, FUSE],
    "bytes first": [BYTES_OF, FUSE, SPACE, {"type": "Strip", "content": " ", "start": 1, "stop": 0}],
}
KINDS = ("bytes", "bytelevel", "metaspace", "llama2", "unigram_unk", "wordpiece_unk", "wordpiece", *DECODERS)
TOKENIZERS = Path(__file__).parents[1] / "data" / "tokenizers"


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("kinds")
    paths = {kind: str(TOKENIZERS / f"{kind}.json") for kind in KINDS} | {"bytes": "bytes"}
    described = json.loads((TOKENIZERS / "wordpiece_unk.json").read_text("utf-8"))
    described["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    for kind in ("bytelevel", "metaspace", "wordpiece"):
        paths[kind] = str(folder / f"{kind}.json")
        if kind != "wordpiece":
            library(kind).save(paths[kind])
    Path(paths["wordpiece"]).write_text(json.dumps(described))
    for kind, parts in DECODERS.items():
        described = json.loads((TOKENIZERS / "llama2.json").read_text("utf-8"))
        paths[kind] = str(folder / f"{kind}.json")
        Path(paths[kind]).write_text(json.dumps({**described, "decoder": {"type": "Sequence", "decoders": parts}}))
    return {kind: tokenizers.load(path) for kind, path in paths.items()}


def ids_of_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Return ids that spell bytes, whether they are UTF-8 or not; for other tokenisers some ids."""
    if isinstance(tokenizer, tokenizers.ByteTokenizer):
        return list(data)
    names = [tokenizer._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]  # type: ignore[attr-defined]
    return [byte % tokenizer.vocab_size if id_ is None else id_ for byte, id_ in zip(data, names, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(data=st.data())
def test_a_stream_gives_what_decoding_the_whole_gives(
    kinds: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    """It does so whatever the bytes and wherever they are cut, also within a character."""
    tokenizer = kinds[kind]
    some_bytes = st.one_of(st.text("a🙂é▁ ").map(str.encode), st.binary(max_size=40))
    some_ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40)
    ids = data.draw(st.one_of(some_bytes.map(lambda content: ids_of_bytes(tokenizer, content)), some_ids))
    cut = data.draw(st.integers(0, len(ids)))
    before = [tokenizer.bos_id, *ids[:cut]]
    stream = text_stream(tokenizer, before)
    text = "".join(map(stream.push, ids[cut:])) + stream.end()
    start, whole = tokenizer.decode(before), tokenizer.decode([*before, *ids[cut:]])
    shared = next(
        (n for n, (a, b) in enumerate(zip(start, whole, strict=False)) if a != b), min(map(len, (start, whole)))
    )
    assert text == whole[shared:]
    # Of what stands before, nothing but half a character may become another.
    assert start[shared:] in ("", *("\N{REPLACEMENT CHARACTER}" * n for n in (1, 2, 3)))


def test_characters_of_bytes_are_told_whole_behind_others(kinds: dict[str, Tokenizer]) -> None:
    """The text six tokens back from the new ones begins in the middle of a character."""
    tokenizer = kinds["llama2"]
    for prompt, new, told in (
        ("🙂🙂", "😀a".encode(), ["", "", "", "😀", "a"]),
        ("深さ深さ", b"\xff\xe6\xb7\xb1\xff", ["", "", "", "�深", ""]),
        ("a", b"\xe2\x96\x81a", ["", "", " ", "a"]),
    ):
        stream = text_stream(tokenizer, [tokenizer.bos_id, *tokenizer.encode(prompt).tolist()])
        assert [stream.push(id_) for id_ in ids_of_bytes(tokenizer, new)] == told
        assert stream.end() == ("�" if new.endswith(b"\xff") else "")


# The command line -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run folder with the checkpoints of two steps, with different parameters."""
    config = config_of(positions={"kind": "learned", "max_length": 40})
    folder = tmp_path_factory.mktemp("runs") / "a"
    folder.mkdir()
    (folder / "config.json").write_text(configs.to_json(config))
    checkpoints = Checkpoints(folder, CheckpointConfig(keep=5))
    zero: Any = jnp.zeros((), jnp.int32)
    for step in (3, 7):
        state = TrainState(zero, random_params(config, seed=step), zero, zero, zero, zero)
        checkpoints.save(state, Standing(step), config)
    checkpoints.close()
    return folder


def command(run: Path, *arguments: str, **options: object) -> list[str]:
    return ["--checkpoint", str(run), *arguments, *(f"--{name}={value}" for name, value in options.items())]


def test_one_prompt_is_streamed(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    texts = []
    for checkpoint in (run, run / "checkpoints" / "7", run / "checkpoints" / "3"):
        assert generate.main(command(checkpoint, prompt="stream", max_new_tokens=9, seed=2, json=out)) == 0
        said = capsys.readouterr()
        (record,) = json.loads(out.read_text("utf-8"))["completions"]
        assert said.out == record["text"] + "\n" and record["prompt"] == "stream" and len(record["tokens"]) == 9
        assert "9 tokens in" in said.err and "ended by --max_new_tokens" in said.err
        texts.append(said.out)
    assert texts[0] == texts[1] != texts[2]
    assert json.loads(out.read_text("utf-8"))["step"] == 3 and not list(tmp_path.glob("*.part"))


def test_a_file_of_prompts(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("stream\n\nnaïve\nof a\r\n", "utf-8")
    objects.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("stream", "naïve", "of a")), "utf-8")
    same = ("--max_new_tokens=6", "--seed=2", "--batch_size=2", "--temperature=0.5")
    assert generate.main(command(run, f"--prompts={lines}", *same)) == 0
    said = capsys.readouterr().out
    assert generate.main(command(run, f"--prompts={objects}", "--field=text", *same, json=tmp_path / "o.json")) == 0
    assert capsys.readouterr().out == said
    record = json.loads((tmp_path / "o.json").read_text("utf-8"))
    assert [one["prompt"] for one in record["completions"]] == ["stream", "naïve", "of a"]
    assert said == "".join(
        f"== {number}: {one['prompt']}\n{one['text']}\n" for number, one in enumerate(record["completions"], start=1)
    )
    assert record["sampling"]["temperature"] == 0.5 and record["step"] == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda run: ["--prompt=a"], "--checkpoint"),
        (lambda run: command(run), "--prompt or --prompts"),
        (lambda run: command(run, prompt="a", prompts="b"), "--prompt or --prompts"),
        (lambda run: command(run.parent / "b", prompt="a"), "not a run folder"),
        (lambda run: command(run, prompt="a", step=4), "no checkpoint of step 4; there are 3, 7"),
        (lambda run: command(run / "checkpoints" / "5", prompt="a"), "no checkpoint of step 5; there are 3, 7"),
        (lambda run: command(run / "checkpoints" / "3", prompt="a", step=7), "--step: given 7"),
        (lambda run: command(run, prompt="a", max_new_tokens=0), "--max_new_tokens: given 0, allowed: 1 or more"),
        (lambda run: command(run, prompt="a" * 30, max_new_tokens=10), "given 31 tokens (bos included) and 10 new"),
        (lambda run: command(run, prompt="a", temperature=-1), "--temperature: given -1.0, allowed: 0 (greedy)"),
        (lambda run: command(run, prompt="a", temprature=1), "did you mean --temperature?"),
        (lambda run: command(run, prompt="a", entropy_low=2, entropy_high=1), "--entropy_high: given 1.0"),
        (lambda run: command(run, prompt="a", stop=""), "--stop: given ''"),
        (lambda run: command(run, prompt="a", stop_token=258), "--stop_token: given 258, allowed: 0 to 257"),
        (lambda run: command(run, prompt="a\udcff"), "--prompt: not UTF-8"),
        (lambda run: command(run, prompt="a", stop="\udcff"), "--stop: not UTF-8: character 1 is an unpaired"),
        (lambda run: command(run, "--stop=b", "--stop=a\ud83d", prompt="a"), "--stop: not UTF-8: character 2"),
        (lambda run: command(run, prompts=written(run, "c.jsonl", b'{"prompt": "a"}\n\n{"prompt": "a\\ud83d"}')),
         "c.jsonl, line 3: not UTF-8: character 2 is an unpaired surrogate (U+D83D)"),
        (lambda run: command(run, prompts=written(run, "d.jsonl", b"[" * 100_000)), "d.jsonl, line 1: not JSON"),
        (lambda run: command(run, prompts=written(run, "a.txt", b"a\n\xed\xa0\x80")), "a.txt, line 2, is not UTF-8"),
        (lambda run: command(run, prompt="a", json=run), "--json: cannot write"),
        (lambda run: command(run, prompts=run / "none.txt"), "--prompts: cannot read"),
        (lambda run: command(run, prompts=written(run, "a.txt", b" \n\n")), "holds no prompt"),
        (lambda run: command(run, prompts=written(run, "a.txt", b"\xff")), "is not UTF-8 (byte 0)"),
        (lambda run: command(run, prompts=written(run, "a.jsonl", b'\n{"a"')), "line 2: not JSON"),
        (lambda run: command(run, prompts=written(run, "b.jsonl", b'{"text": "a"}')), "line 1: no text in field"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_2(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: Callable[[Path], list[str]], message: str
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.run_main(generate.main, arguments(run))
    assert left.value.code == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith("error: ") and message in line and not said.out


def written(run: Path, name: str, content: bytes) -> Path:
    path = run.parent / name
    path.write_bytes(content)
    return path


def test_where_a_checkpoint_is() -> None:
    assert locate("runs/a") == (Path("runs/a"), None) and locate("runs/a", 4) == (Path("runs/a"), 4)
    assert locate("runs/a/checkpoints/12/") == locate("runs/a/checkpoints/12", 12) == (Path("runs/a"), 12)
    with pytest.raises(UserError, match="--step: given 4"):
        locate("runs/a/checkpoints/12", 4)
    assert locate("checkpoints/exp") == (Path("checkpoints/exp"), None)


def test_a_tokenizer_that_the_model_is_too_small_for() -> None:
    with pytest.raises(UserError, match=r"data.tokenizer: given bytes of 258 tokens, allowed: at most the model's 32"):
        Generator(small(), random_params(small()), BYTES, Sampling())
