"""Test the file format: what is written equals the reference implementation's, and damage is named in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhc.errors import UserError
from mhc.interop.safetensors import SafetensorsFile, listed, widen, write
from tests.interop.models import GOLDEN

PUBLISHED = GOLDEN / "hf_published" / "llama" / "model.safetensors"


def test_a_published_file_is_written_again_byte_for_byte(tmp_path: Path) -> None:
    file = SafetensorsFile(PUBLISHED)
    write(tmp_path / "x", {name: entry.shape for name, entry in file.entries.items()}, file.read, file.metadata)
    assert (tmp_path / "x").read_bytes() == PUBLISHED.read_bytes()


@given(st.dictionaries(st.text(min_size=1, max_size=5), st.lists(st.integers(0, 4), max_size=3), max_size=5))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, list[int]]) -> None:
    path = tmp_path_factory.mktemp("file") / "x"
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    arrays.pop("__metadata__", None)
    write(path, {name: array.shape for name, array in arrays.items()}, arrays.__getitem__)
    file = SafetensorsFile(path)
    assert set(file.entries) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(file.read(name), array, strict=True)


@given(st.lists(st.floats(width=16), min_size=1))
def test_sixteen_bits_are_widened_exactly(values: list[float]) -> None:
    half = np.array(values, np.float16)
    np.testing.assert_array_equal(widen(half.view(np.uint8), "F16"), half.astype(np.float32))
    upper = np.array(values, np.float32).view(np.uint32) >> 16  # bfloat16 is the upper half of float32
    expected = (upper << 16).view(np.float32)
    np.testing.assert_array_equal(widen(upper.astype(np.uint16).view(np.uint8), "BF16"), expected)


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    whole = PUBLISHED.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for length in (0, 5, 8, 100, header - 1, header, header + 1, len(whole) - 1):
        path = tmp_path / "cut.safetensors"
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"cut\.safetensors: .*(cut off|truncated|no JSON)"):
            SafetensorsFile(path)


def _file(path: Path, header: object, data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ([], b"", "no JSON object"),
        ({"a": ENTRY}, b"\0" * 5, "longer than its header says"),
        ({"a": {**ENTRY, "shape": [2]}}, b"\0" * 4, "entry of a is not valid"),
        ({"a": {**ENTRY, "shape": [-1]}}, b"\0" * 4, "entry of a is not valid"),
        ({"a": {**ENTRY, "data_offsets": [4, 0]}}, b"\0" * 4, "entry of a is not valid"),
        ({"a": {**ENTRY, "data_offsets": [4, 8]}}, b"\0" * 8, "a does not begin"),
        ({"a": ENTRY, "b": ENTRY}, b"\0" * 4, "b does not begin"),
        ({"a": {"dtype": "F32"}}, b"", "entry of a is not valid"),
        ({"a": 3}, b"", "entry of a is not valid"),
    ],
)
def test_a_header_that_does_not_describe_the_file_is_refused(
    tmp_path: Path, header: object, data: bytes, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        SafetensorsFile(_file(tmp_path / "x", header, data))


def test_a_dtype_that_is_no_weight_is_refused_when_it_is_read(tmp_path: Path) -> None:
    file = SafetensorsFile(_file(tmp_path / "x", {"a": {**ENTRY, "dtype": "I32"}}, b"\0" * 4))
    with pytest.raises(UserError, match="a is I32, allowed: F32, F16, BF16"):
        file.read("a")


def test_long_lists_are_counted() -> None:
    assert listed("abc", 3) == "a, b, c"
    assert listed("abcd", 3) == "a, b, c and 1 more"
