"""Kernels of the residual stream: one signature each, ``mhc.kernels.xla`` the implementation on every platform."""

from mhc.kernels.xla import add, project, read, sinkhorn, write

__all__ = ["add", "project", "read", "sinkhorn", "write"]
