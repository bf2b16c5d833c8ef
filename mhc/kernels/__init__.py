"""Provide kernels of the residual stream: ``mhc.kernels.xla`` everywhere, or another implementation by ``target``."""

from mhc.kernels.dispatch import TARGETS, add, current_target, project, read, sinkhorn, target, write

__all__ = ["TARGETS", "add", "current_target", "project", "read", "sinkhorn", "target", "write"]
