"""Warn about a corpus once in a process."""

from __future__ import annotations

import functools
import logging

_log = logging.getLogger(__name__)


@functools.cache  # a corpus is opened for training, for validation and for the probes
def warn_once(line: str) -> None:
    """Log a warning unless it was logged before."""
    _log.warning("%s", line)
