"""Export the kernels of the residual stream. ``mhc.kernels.xla`` implements them on every platform."""

from mhc.kernels.xla import add, project, read, sinkhorn, write

__all__ = ["add", "project", "read", "sinkhorn", "write"]
