"""Describe how far a run has come: what a checkpoint holds beside the train state, as an object and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass
class Standing:
    """Holds how far a run has come.

    Attributes:
      step: completed updates. A checkpoint is named by it and does not store it.
      tokens: target tokens so far.
      source_tokens: target tokens so far by source of a mixture; empty without one.
      seconds: seconds of training in all processes that took the run on, one after the other.
      rewinds: how often the run went back to an older checkpoint.
      data: position in the data, as `TrainIterator.get_state` gives it; None: nothing was read.
      weights_only: the checkpoint holds parameters alone, as that of an imported model does.
      about: what else was stored, such as where imported weights come from; JSON.
    """

    step: int = 0
    tokens: int = 0
    source_tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    rewinds: int = 0
    data: dict[str, Any] | None = None
    weights_only: bool = False
    about: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that a checkpoint stores."""
        return {
            "data": self.data,
            "tokens": self.tokens,
            "source_tokens": dict(self.source_tokens),
            "seconds": self.seconds,
            "rewinds": self.rewinds,
            **({"weights_only": True} if self.weights_only else {}),
            **self.about,
        }

    @classmethod
    def from_json(cls, step: int, stored: Mapping[str, Any]) -> Standing:
        """Return the standing from the JSON that a checkpoint of ``step`` holds. Raises KeyError for a missing part."""
        names = [field.name for field in dataclasses.fields(cls) if field.name not in ("step", "about")]
        return cls(
            step=step,
            tokens=stored["tokens"],
            source_tokens=dict(stored.get("source_tokens", {})),  # older checkpoints have none
            seconds=stored["seconds"],
            rewinds=stored["rewinds"],
            data=stored["data"],
            weights_only=stored.get("weights_only", False),
            about={name: value for name, value in stored.items() if name not in names},
        )
