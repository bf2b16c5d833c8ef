"""Act on a flagged step: write the event, rewind or halt (config group ``guard``)."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from mhc import distributed
from mhc.sharding import put_batch
from mhc.train.diagnose import first_nonfinite
from mhc.train.opened import Opened, Pending
from mhc.train.record import Alarm, batch_hash


def act(run: Opened, alarm: Alarm, flagged: Pending, following: Pending | None) -> Pending | None:
    """Write the alarm's event and do what the guard's config says.

    Args:
      flagged: the step of the alarm.
      following: the step that the devices were given after it, if any.

    Returns:
      The step whose metrics are still to be read, if any.
    """
    event = dict(alarm.event)
    if not alarm.finite:
        batch, metrics = put_batch(flagged.batch, run.setup.mesh), jax.device_get(flagged.metrics)
        event["tensor"] = first_nonfinite(run.trainer, run.state.params, batch, flagged.step - 1, metrics)
    event["batch"] = _describe(run, flagged)
    run.record.event(**event)
    if alarm.action == "rewind":
        if _rewind(run, alarm):
            return None
        reason = f"{alarm.event['cause']} at step {alarm.step}, after {run.standing.rewinds} rewinds"
    elif alarm.action == "halt":
        reason = f"{alarm.event['cause']} at step {alarm.step}"
    else:
        return following
    if not alarm.finite:
        # The flagged step froze the state: the step after it did not happen.
        run.standing.step = alarm.step
        if following is not None:
            run.setup.data.set_state(following.position)
        frozen = jax.device_put(np.zeros((), bool), run.trainer.layout.guard.frozen)
        run.state = run.state._replace(guard=run.state.guard._replace(frozen=frozen))
        reason += f"; first non-finite: {event['tensor']}"
    elif following is not None:
        run.log(following)
    run.halted = reason
    run.save()
    run.record.event("halt", run.standing.step, reason=reason)
    return None


def _describe(run: Opened, pending: Pending) -> dict[str, Any]:
    """Return the hash of a step's whole batch, and where each of its rows begins."""
    several = jax.process_count() > 1
    ours = {name: pending.batch[name].tolist() for name in ("tokens", "targets")} if several else {}
    places = run.setup.data.describe(pending.position)
    parts = distributed.gather({"rows": pending.position["rows"], "documents": places, **ours})
    documents = {document["row"]: document for part in parts for document in part["documents"]}
    batch = pending.batch
    if several:
        batch = {}
        for name in ours:
            by_row = {row: ids for part in parts for row, ids in zip(part["rows"], part[name], strict=True)}
            batch[name] = np.asarray([by_row[row] for row in sorted(by_row)], np.int32)
    return {"hash": batch_hash(batch), "documents": [documents[row] for row in sorted(documents)]}


def _rewind(run: Opened, alarm: Alarm) -> bool:
    """Go back to the last checkpoint at least ``rewind_steps`` before the alarm, and leave out ``skip_batches``.

    If no checkpoint is old enough, the run begins anew from its seed. A second rewind to the same step leaves out as
    many batches more, since those after the first ones led to an alarm too.

    Returns:
      Whether the run went back; False if the rewinds are used up.
    """
    guard = run.setup.config.guard
    if run.standing.rewinds >= guard.max_rewinds:
        return False
    with run.phases("checkpoint"):
        run.checkpoints.wait()
    old = [step for step in run.checkpoints.steps() if step <= alarm.step - guard.rewind_steps]
    run.go_back(max(old, default=None))
    to = run.standing.step
    skipped = run.left_out[to] = run.left_out.get(to, 0) + guard.skip_batches
    with run.phases("rewind"):
        for _ in range(skipped):
            next(run.setup.data)
            run.phases.beat()
    cause, rewinds = alarm.event["cause"], run.standing.rewinds
    run.record.event("rewind", alarm.step, cause=cause, to=to, skipped_batches=skipped, rewinds=rewinds)
    run.progress.note(f"{run.setup.place}: {cause} at step {alarm.step}: back to step {to}, {skipped} batches left out")
    run.last_time = time.perf_counter()
    return True
