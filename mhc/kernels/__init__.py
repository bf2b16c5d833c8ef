"""Provide kernels of the residual stream: ``mhc.kernels.xla`` everywhere, or another implementation by ``target``."""

from mhc.kernels.dispatch import (
    TARGETS,
    add,
    current_target,
    enter,
    follow,
    fuses,
    project,
    read,
    sinkhorn,
    target,
    write,
)
from mhc.kernels.form import Form

__all__ = [
    "TARGETS",
    "Form",
    "add",
    "current_target",
    "enter",
    "follow",
    "fuses",
    "project",
    "read",
    "sinkhorn",
    "target",
    "write",
]
