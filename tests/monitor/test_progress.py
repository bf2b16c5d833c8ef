"""Test the progress line under an injected clock."""

from __future__ import annotations

import io

import pytest

from mhc.monitor.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress(stream: io.StringIO, *, total: int = 30, every: int = 10, seconds: float = 2.0) -> str:
    now = [100.0]
    line = Progress(total, every=every, label="mhc", stream=stream, clock=lambda: now[0])
    for step in range(1, total + 1):
        record = {"step": step, "loss": 3.0, "tokens_per_second": 12345.6}
        if step == 15:
            record["val_bits_per_byte"] = 3.21
        line.write(record)
        now[0] += seconds
    line.close()
    return stream.getvalue()


def test_progress_off_a_terminal() -> None:
    lines = progress(io.StringIO()).splitlines()
    assert lines == [
        "mhc  step 10/30  loss 3.0000  12,346 tokens/s  40s left",
        "mhc  step 15/30  loss 3.0000  val 3.2100 bits/byte  12,346 tokens/s  30s left",
        "mhc  step 20/30  loss 3.0000  val 3.2100 bits/byte at step 15  12,346 tokens/s  20s left",
        "mhc  step 30/30  loss 3.0000  val 3.2100 bits/byte at step 15  12,346 tokens/s",
    ]


def test_progress_rewrites_one_line_on_a_terminal() -> None:
    text = progress(Terminal())
    assert text.count("\r") == 30 and text.count("\n") == 1 and text.endswith("\x1b[K\n")
    assert progress(Terminal(), seconds=0.01).count("\r") < 10  # ten a second, validation and the last


def test_progress_off_and_a_note_that_tears_no_line() -> None:
    assert progress(io.StringIO(), every=0) == ""
    stream = Terminal()
    line = Progress(5, stream=stream, clock=lambda: 0.0)
    line.write({"step": 1, "loss": 1.0, "tokens_per_second": 1.0})
    line.note("spike at step 1")
    assert stream.getvalue().endswith("\x1b[K\nspike at step 1\n")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (185, "3m05s"), (7640, "2h07m"), (273600, "3d04h")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
