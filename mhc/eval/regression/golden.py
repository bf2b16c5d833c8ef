"""Write and read golden files: the outputs of a checkpoint for fixed tokens."""

from __future__ import annotations

import json
import zipfile
import zlib
from pathlib import Path

import numpy as np

from mhc.errors import UserError
from mhc.eval.regression.outputs import FORMAT, Logits, Outputs
from mhc.eval.regression.rows import Rows

# What reading a damaged file, or one of another form, may raise.
_MALFORMED = (
    zipfile.BadZipFile,
    zlib.error,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
)


def save(file: Path, outputs: Outputs) -> None:
    """Write a golden file, whole or not at all."""
    arrays = {**outputs.rows._asdict(), **{name: a for name, a in outputs.logits._asdict().items() if a is not None}}
    if outputs.hidden is not None:
        arrays["hidden"] = outputs.hidden
    about = np.frombuffer(json.dumps(outputs.about).encode(), np.uint8)
    part = file.with_name(f"{file.name}.part")
    try:
        with part.open("wb") as stream:
            np.savez(stream, about=about, **arrays)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def read(file: Path) -> Outputs:
    """Return the content of a golden file. Raises UserError for any other file, a damaged one, or another format."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as opened:
            arrays = {name: opened[name] for name in opened.files}
        about = json.loads(arrays["about"].tobytes())
        rows = Rows(*(arrays[name] for name in Rows._fields))
        logits = Logits(arrays["values"], arrays.get("ids"), arrays["log_z"], arrays["best"])
        version = int(about["format"])
        about["vocabulary"], about["tokenizer"], about["points"], about["config"]["residual"]["collapse"]
    except OSError as error:
        raise UserError(f"--against {file}: cannot be read ({error.strerror or error})") from None
    except _MALFORMED as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"--against {file}: no golden file, or not whole ({reason})") from None
    if version != FORMAT:
        raise UserError(f"--against {file}: of format {version}, allowed: {FORMAT}; save it again")
    outputs = Outputs(about, rows, logits, arrays.get("hidden"))
    if reason := _inconsistent(outputs):
        raise UserError(f"--against {file}: no golden file, or not whole ({reason})")
    return outputs


def _inconsistent(outputs: Outputs) -> str:
    """Return in words which entry of a golden file contradicts the others; "" if none does."""
    rows, logits, vocabulary = outputs.rows, outputs.logits, outputs.about["vocabulary"]
    if rows.tokens.ndim != 2 or len({part.shape for part in rows}) > 1:
        return "tokens, segments and positions differ in shape"
    if rows.tokens.size and not (rows.tokens.min() >= 0 and rows.tokens.max() < vocabulary):
        return f"a token is not among its {vocabulary}"
    count = int(rows.valid.sum())
    lengths = {"values": logits.values, "log_z": logits.log_z, "best": logits.best}
    if logits.ids is not None:
        lengths["ids"] = logits.ids
    for name, array in lengths.items():
        if array.shape[:1] != (count,):
            return f"{name} is not of {count} tokens"
    if logits.ids is None and logits.values.shape[1:] != (vocabulary,):
        return f"values does not have {vocabulary} logits a token"
    if logits.ids is not None and logits.ids.shape != logits.values.shape:
        return "values and ids differ in shape"
    if outputs.hidden is not None and outputs.hidden.shape[:2] != (len(outputs.about["points"]), count):
        return "hidden does not have the number of points or tokens"
    return ""
