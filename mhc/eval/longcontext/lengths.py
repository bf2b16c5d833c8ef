"""Choose lengths of rows: those that a model has positions for."""

from __future__ import annotations

from mhc.config import Config

TIMES = (0.25, 0.5, 1, 2, 4)  # the trained length


def default_lengths(config: Config) -> tuple[list[int], str | None]:
    """Return (lengths of rows, what limits them): 1/4 to 4 times the trained length, as far as there are positions."""
    trained = config.data.sequence_length
    wanted = [max(int(trained * times), 1) for times in TIMES]
    most = most_positions(config)
    if most is None or wanted[-1] <= most:
        return wanted, None
    left = [length for length in wanted if length > most]
    return [length for length in wanted if length <= most], (
        f"no rows of {', '.join(map(str, left))} tokens: the learned positions end at {most}"
    )


def most_positions(config: Config) -> int | None:
    """Return the length of the longest row that a model can read; None: any."""
    return config.max_length if config.positions.kind == "learned" else None
