"""Define Bayesian wind tunnels: tasks whose exact posterior is known at every position (arXiv:2512.22471).

``data.source=windtunnel:bijection`` or ``windtunnel:hmm`` trains on one; numbers of the task follow its name, e.g.
``windtunnel:hmm,observations=10``.
"""

from __future__ import annotations

from mhc.data.windtunnel.settings import check_model, config_sizes, fields
from mhc.data.windtunnel.tasks import (
    PREFIX,
    Bijection,
    HiddenMarkov,
    Sequences,
    Task,
    entropy_bits,
    hmm_posterior,
    is_windtunnel,
    task,
)

__all__ = [
    "PREFIX",
    "Bijection",
    "HiddenMarkov",
    "Sequences",
    "Task",
    "check_model",
    "config_sizes",
    "entropy_bits",
    "fields",
    "hmm_posterior",
    "is_windtunnel",
    "task",
]
