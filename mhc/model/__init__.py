"""Hold the decoder around the residual stream."""

from mhc.model.decoder import Decoder

__all__ = ["Decoder"]
