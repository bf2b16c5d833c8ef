"""Test import_hf: a folder becomes a run, or one line says why not and nothing is written."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mhc import cli, interop
from mhc.data import tokenizers
from mhc.errors import UserError
from mhc.full_disk import DiskFull
from mhc.interop import export, import_hf
from mhc.interop.safetensors import SafetensorsFile, write
from mhc.interop.tensors import Layout
from mhc.train.checkpoint import committed_steps, load_run
from tests import small_runs
from tests.interop.models import GOLDEN, random_config, random_weights, write_folder
from tests.small import assert_identical, relative_error
from tests.small_runs import small_disk, write_corpus

LLAMA = GOLDEN / "hf_published" / "llama"
ROOT = Path(__file__).parents[2]


def tiny_llama(folder: Path, vocab: int = 258, shards: int = 1) -> Path:
    """Return a folder with a model as large as the byte tokeniser wants, and its tokenizer.json."""
    raw = random_config("llama", 1) | {"vocab_size": vocab, "rope_parameters": None, "rope_scaling": None}
    write_folder(folder, raw, random_weights(raw, Layout("llama", head=not raw["tie_word_embeddings"]), 0), shards)
    export.write_tokenizer(folder / "tokenizer.json", "bytes")
    return folder


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return (exit code, stderr) of the program, run in this process."""

    def run(*arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as left:
            cli.run_main(import_hf.main, [str(argument) for argument in arguments])
        return int(left.value.code or 0), capsys.readouterr().err

    return run


Program = Callable[..., tuple[int, str]]


def test_the_run_computes_the_source_under_mhc(program: Program, tmp_path: Path) -> None:
    code, said = program(
        LLAMA, "--workdir", tmp_path / "a" / "x", "--config.residual.kind=mhc", "--config.residual.iters=2"
    )
    assert (code, said) == (0, "")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["x"]
    loaded = load_run(tmp_path / "a" / "x")
    assert (loaded.step, loaded.config.residual.iters, loaded.config.residual.init) == (0, 2, "equivalent")
    with np.load(LLAMA / "expected.npz") as expected:
        logits = loaded.decoder()(jnp.asarray(expected["tokens"][:, :16]))
        assert relative_error(logits, expected["logits"][:, :16]) < 1e-4


def test_the_run_trains_resumes_and_keeps_its_beginning(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "texts")
    folder, run = tiny_llama(tmp_path / "hf", shards=3), tmp_path / "x"
    fields = small_runs.tiny(corpus, "plain", train={"steps": 4, "batch_size": 8}, checkpoint={"every": 1, "keep": 1})
    fields["monitor"]["probe_every"] = fields["validation"]["every"] = 0
    wanted = ("data", "optimizer", "schedule", "train", "validation", "checkpoint", "monitor")
    overrides = {f"{group}.{name}": value for group in wanted for name, value in fields[group].items()}
    import_hf.import_hf(folder, run, overrides)
    assert load_run(run).config.data.tokenizer == str(run / "tokenizer.json")
    # The config of the run, as a user names it on the command line.
    config = cli.load_config(f"{ROOT / 'configs' / 'of_run.py'}:{run}", [])
    before = load_run(run).params
    assert small_runs.run(config, run) == 0
    metrics = small_runs.lines(run, "metrics")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    # Step 0 stays, whatever checkpoint.keep says: a rewind may come back to it.
    assert committed_steps(run) == [0, 4]
    np.testing.assert_array_equal(load_run(run, 0).params["embed"]["table"], before["embed"]["table"])
    assert np.any(np.asarray(load_run(run).params["embed"]["table"]) != np.asarray(before["embed"]["table"]))


def test_a_field_that_changes_the_function_is_refused(program: Program, tmp_path: Path) -> None:
    for field, words in (
        ("attention.window=4", "attention.window: given 4, allowed: None"),
        ("model.layers=3", "model.layers: given 3, allowed: 2"),
        ("norm.eps=1e-3", "norm.eps: given 0.001"),
        ("residual.init=home", "residual.kind=plain"),
        ("data.tokenizer=bytes", "model.vocab_size: given 97, allowed: at least 258"),
    ):
        code, said = program(LLAMA, "--workdir", tmp_path / "x", f"--config.{field}")
        assert code == 2 and words in said, (field, said)
    assert not list(tmp_path.iterdir())


def test_a_workdir_that_holds_something_is_left_alone(program: Program, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.tex").write_text("x")
    code, said = program(LLAMA, "--workdir", tmp_path / "x")
    assert code == 2 and "holds something already" in said
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["thesis.tex"]


def test_begin_and_end_are_the_models(tmp_path: Path) -> None:
    """The ids in config.json decide, whatever the tokens are called; the run's own tokeniser has them."""
    folder = tiny_llama(tmp_path / "hf")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"bos_token_id": 7, "eos_token_id": [9, 11]}))
    import_hf.import_hf(folder, tmp_path / "x")
    made = tokenizers.load(load_run(tmp_path / "x").config.data.tokenizer)
    assert (made.bos_id, made.eos_id, made.vocab_size) == (7, 9, 258)


def test_every_end_of_a_text_is_kept_and_written_back(tmp_path: Path) -> None:
    """They come from config.json, generation_config.json and tokenizer_config.json; an id without token is left out."""
    folder = tiny_llama(tmp_path / "hf")
    described = json.loads((folder / "config.json").read_text())
    for number, (config, generation, named, ends) in enumerate(
        [
            ([9, 11], None, None, (9, 11)),
            (9, [12, 11, 9], None, (9, 12, 11)),
            (None, 13, None, (13,)),
            (None, None, "</s>", (257,)),
            ([9, 999], [-1], {"content": "</s>"}, (9, 257)),
            (None, None, None, ()),
        ]
    ):
        (folder / "config.json").write_text(json.dumps(described | {"eos_token_id": config}))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation, "top_p": 0.9}))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
        run = import_hf.import_hf(folder, tmp_path / f"x{number}")
        loaded = load_run(run).config
        assert loaded.data.stop_tokens == ends
        eos = tokenizers.load(loaded.data.tokenizer).eos_id
        assert eos in ends or not ends
        out = export.export(run, tmp_path / f"out{number}")
        for name in ("config.json", "generation_config.json"):
            written = json.loads((out / name).read_text())["eos_token_id"]
            assert written == eos if len(ends) < 2 else (written[0], set(written)) == (eos, set(ends))
        again = load_run(import_hf.import_hf(out, tmp_path / f"again{number}")).config
        assert set(again.data.stop_tokens) == set(ends or (eos,))
        assert tokenizers.load(again.data.tokenizer).eos_id == eos


def test_an_end_that_is_no_id_is_refused(program: Program, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "hf")
    for content, words in (
        ('{"eos_token_id": ["</s>"]}', "generation_config.json: eos_token_id: given ['</s>'], allowed: an id"),
        ('{"eos_token_id": true}', "eos_token_id: given True"),
        ("{", "generation_config.json: not JSON"),
    ):
        (folder / "generation_config.json").write_text(content)
        code, said = program(folder, "--workdir", tmp_path / "x")
        assert code == 2 and words in said and said.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_what_a_killed_import_left_is_swept(program: Program, tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for left in (f".x.{ended.pid}", f".y.{ended.pid}", ".x.notes"):
        (tmp_path / left).mkdir()
    assert program(LLAMA, "--workdir", tmp_path / "x")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".x.notes", f".y.{ended.pid}", "x"]


def test_mistakes_that_only_writing_shows_are_one_line(program: Program, tmp_path: Path) -> None:
    code, said = program(LLAMA, "--workdir", tmp_path / "x", "--config.train.init_from=runs/a")
    assert code == 2 and "train.init_from: given 'runs/a', allowed: nothing" in said
    if Path("/proc").is_dir():
        code, said = program(LLAMA, "--workdir", "/proc/x")
        assert code == 2 and said.startswith("error: /proc/x: the folder cannot be made") and said.count("\n") == 1


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    """The disk is full where a run is imported to, and where it is exported to."""
    folder = tiny_llama(tmp_path / "hf")
    with small_disk(1000), pytest.raises(DiskFull, match=r"/runs/x: cannot be written: File too large; .* free in"):
        import_hf.import_hf(folder, tmp_path / "runs" / "x")
    assert not list((tmp_path / "runs").iterdir())
    import_hf.import_hf(folder, tmp_path / "runs" / "x")
    with small_disk(1000), pytest.raises(DiskFull, match=r"/out/x: cannot be written: File too large"):
        export.export(tmp_path / "runs" / "x", tmp_path / "out" / "x")
    assert not list((tmp_path / "out").iterdir())


# Damaged folders ------------------------------------------------------------------------------------------------------


def _truncate(folder: Path) -> None:
    path = next(iter(sorted(folder.glob("*.safetensors"))))
    path.write_bytes(path.read_bytes()[:-8])


def _retype(folder: Path) -> None:
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"', 1))


def _lose_shard(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def _lose_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


def _edit(file: str, change: Callable[[Any], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        change(content)
        (folder / file).write_text(json.dumps(content))

    return edit


def _pointer(file: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n")

    return write


INDEX = "model.safetensors.index.json"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (_truncate, "model-00001-of-00003.safetensors: truncated"),
    "dtype": (_retype, "is I32, allowed: F32, F16, BF16"),
    "shard": (_lose_shard, "missing shards: model-00002-of-00003.safetensors"),
    "index": (_lose_index, "neither model.safetensors nor model.safetensors.index.json; there is model-00001"),
    "map": (_edit(INDEX, lambda index: index.pop("weight_map")), "weight_map is missing"),
    "outside": (_edit(INDEX, lambda index: index["weight_map"].update(x="../x")), "outside of the folder"),
    "lost": (
        _edit(INDEX, lambda index: index["weight_map"].update(x="model-00001-of-00003.safetensors")),
        "not in the shard it names for them: x",
    ),
    "family": (_edit("config.json", lambda raw: raw.update(model_type="lama")), "did you mean llama"),
    "option": (_edit("config.json", lambda raw: raw.update(attn_softcap=3.0)), "attn_softcap: given 3.0"),
    "layer": (_edit("config.json", lambda raw: raw.update(num_hidden_layers=9)), "missing: model.layers."),
    "size": (_edit("config.json", lambda raw: raw.update(intermediate_size=9)), "of another shape: model.layers.0"),
    "json": (lambda folder: (folder / "config.json").write_text("{"), "config.json: not JSON"),  # type: ignore[dict-item]
    "list": (lambda folder: (folder / "config.json").write_text("[]"), "not a JSON object"),  # type: ignore[dict-item]
    "config": (lambda folder: (folder / "config.json").unlink(), "config.json: cannot be read: No such file"),
    "pointer": (_pointer("config.json"), "config.json: a git-lfs pointer, not the file itself"),
    "pointers": (_pointer("model-00001-of-00003.safetensors"), "00003.safetensors: a git-lfs pointer, not the file"),
    "deep": (lambda folder: (folder / "config.json").write_text("[" * 100_000), "nested too deeply"),  # type: ignore[dict-item]
    "tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "is not a tokenizer.json"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_one_line_and_nothing_is_written(damage: str, program: Program, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "hf", shards=3)
    harm, words = DAMAGE[damage]
    harm(folder)
    code, said = program(folder, "--workdir", tmp_path / "runs" / "x")
    assert code == 2
    assert words in said
    assert said.startswith("error: ") and said.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def add_tensors(folder: Path, added: dict[str, tuple[str, list[int], int]]) -> None:
    """Put tensors {name: (dtype, shape, bytes)}, all zero, behind those of model.safetensors."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8:start]), content[start:]
    for name, (dtype, shape, size) in added.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + size]}
        data += bytes(size)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("dtype", ["BOOL", "U8", "I64", "F64", "F8_E4M3", "F8_E4M3FNUZ", "F4"])
def test_what_is_left_out_may_have_any_dtype(dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    size = 8 if dtype in ("F64", "I64") else 1
    llama = tiny_llama(tmp_path / "llama")
    layers = json.loads((llama / "config.json").read_text())["num_hidden_layers"]
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": (dtype, [2], 2 * size) for i in range(layers)}
    buffers |= {"model.rotary_emb.cos_cached": (dtype, [1, 1], size)}
    gpt2 = random_config("gpt2", 3)
    folder = write_folder(tmp_path / "gpt2", gpt2, random_weights(gpt2, Layout("gpt2", bare=True), 0))
    further = random_config("deepseek_v3", 3) | {"num_nextn_predict_layers": 1}
    behind = f"model.layers.{further['num_hidden_layers']}"
    write_folder(tmp_path / "deepseek", further, random_weights(further, Layout("deepseek_v3"), 0))
    for where, added in (
        (llama, buffers),
        (folder, {"h.0.attn.bias": (dtype, [1, 1, 1, 1], size), "h.0.attn.masked_bias": (dtype, [], size)}),
        (
            tmp_path / "deepseek",
            {f"{behind}.eh_proj.weight": (dtype, [1], size), f"{behind}.eh_proj.weight_scale_inv": ("F32", [1], 4)},
        ),
    ):
        before = interop.load_hf(where)
        caplog.clear()
        add_tensors(where, added)
        assert_identical(nnx.to_pure_dict(nnx.state(interop.load_hf(where))), nnx.to_pure_dict(nnx.state(before)))
        (warning,) = [record.getMessage() for record in caplog.records]
        assert all(name in warning for name in added)


def test_a_weight_of_another_dtype_is_named_and_so_is_a_tensor_too_many(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "hf")
    add_tensors(folder, {"model.extra.weight": ("F8_E4M3", [1], 1)})
    with pytest.raises(UserError, match=r"1 not of this model: model\.extra\.weight"):
        interop.load_hf(folder)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content.replace(b'"F32"', b'"U32"', 1))
    with pytest.raises(UserError, match=r"model\.safetensors: .* is U32, allowed: F32, F16, BF16"):
        interop.load_hf(folder)


def test_the_index_says_which_shard_has_a_tensor(tmp_path: Path) -> None:
    """Shards that several models share hold tensors that the index gives to other files."""
    folder, plain = tiny_llama(tmp_path / "hf", shards=3), tiny_llama(tmp_path / "plain")
    shards = [SafetensorsFile(file) for file in sorted(folder.glob("*.safetensors"))]
    for shard, other in zip(shards, [*shards[1:], shards[0]], strict=True):
        arrays = {name: shard.read(name) for name in shard.entries}
        arrays |= {name: other.read(name) + 1 for name in list(other.entries)[:3]}
        write(tmp_path / shard.path.name, {name: array.shape for name, array in arrays.items()}, arrays.__getitem__)
    for shard in shards:
        shutil.move(tmp_path / shard.path.name, shard.path)
    expected = nnx.to_pure_dict(nnx.state(interop.load_hf(plain)))
    assert_identical(nnx.to_pure_dict(nnx.state(interop.load_hf(folder))), expected)


def test_one_file_beside_an_index_of_others_is_read_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, plain = tiny_llama(tmp_path / "hf", shards=3), tiny_llama(tmp_path / "plain")
    shutil.copyfile(plain / "model.safetensors", folder / "model.safetensors")
    interop.HfFolder(folder)
    assert "model.safetensors is read, not the files that model.safetensors.index.json names" in caplog.text
    caplog.clear()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    interop.HfFolder(folder)
    assert not caplog.records


def test_a_byte_order_mark_is_no_part_of_a_config(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "hf", shards=2)
    expected = interop.HfFolder(folder).config
    for name in ("config.json", INDEX):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    assert interop.HfFolder(folder).config == expected


def test_a_tensor_too_many_in_two_shards(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "hf", shards=3)
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    second.write_bytes(first.read_bytes())
    with pytest.raises(UserError, match="not in the shard it names"):
        import_hf.import_hf(folder, tmp_path / "x")


def test_no_such_folder(program: Program, tmp_path: Path) -> None:
    assert program(tmp_path / "no", "--workdir", tmp_path / "x")[0] == 2
    assert not list(tmp_path.iterdir())


# Memory ---------------------------------------------------------------------------------------------------------------

PEAK = """
import resource, sys
import jax, flax.nnx, orbax.checkpoint
import mhc.interop.hf, mhc.train.run
from mhc.interop.import_hf import import_hf
jax.block_until_ready(jax.jit(lambda x: x + 1)(jax.numpy.zeros(8)))
def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
import_hf(sys.argv[1], sys.argv[2])
print(peak() - before)
"""


@pytest.mark.process
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_importing_takes_little_more_than_the_parameters(family: str, tmp_path: Path) -> None:
    raw: dict[str, Any] = {"model_type": family, "hidden_size": 1024, "num_attention_heads": 8, "vocab_size": 1000}
    raw |= {"num_key_value_heads": 8, "max_position_embeddings": 64, "num_hidden_layers": 8, "intermediate_size": 2816}
    if family == "mixtral":  # most of its numbers are in three parameters
        raw |= {"num_local_experts": 16, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    layout = Layout(family)
    weights = random_weights(raw | {"tie_word_embeddings": False}, layout, 0)
    folder = write_folder(tmp_path / "hf", raw, weights, shards=8)
    size = sum(weight.nbytes for weight in weights.values())
    shard = max(path.stat().st_size for path in folder.glob("*.safetensors"))
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(folder), str(tmp_path / "x")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert size > 3e8
    assert int(done.stdout.splitlines()[-1]) <= 1.3 * size + shard
    assert math.prod(load_run(tmp_path / "x").params["embed"]["table"].shape) == 1000 * raw["hidden_size"]
