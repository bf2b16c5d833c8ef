"""Wait for the reads and writes that orbax leaves behind when an array fails, and hide their tracebacks.

Orbax closes its event loop at the first array that fails. The reads and writes of other arrays then end in a closed
loop, or when they are collected as garbage, each with a traceback of its own, at once or later.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

from mhc import full_disk


def hide_housekeeping() -> None:
    """Hide orbax's reports of saves and housekeeping, and its errors of a full disk, which `Checkpoints` reports."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    logging.getLogger("absl").addFilter(_not_full_disk)


def _not_full_disk(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return full_disk.reason(error or Exception(record.getMessage())) is None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the errors of reads and writes that orbax leaves behind."""
    show, asyncio_log = sys.unraisablehook, logging.getLogger("asyncio")

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        loop_closed = isinstance(error, RuntimeError) and "loop is closed" in str(error)
        collected = isinstance(error, GeneratorExit) or isinstance(error and error.__cause__, GeneratorExit)
        if not (loop_closed or collected):
            show(unraisable)

    def is_other(record: logging.LogRecord) -> bool:
        return "never retrieved" not in record.getMessage() and "was destroyed" not in record.getMessage()

    sys.unraisablehook = hook
    asyncio_log.addFilter(is_other)
    try:
        yield
    finally:
        if sys.unraisablehook is hook:
            sys.unraisablehook = show
        asyncio_log.removeFilter(is_other)


def await_leftovers(error: Exception) -> None:
    """Wait until what orbax left behind at this error has ended too."""
    time.sleep(0.3)
    chain: BaseException | None = error
    while chain is not None:  # its frames hold the leftovers
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        gc.collect()
