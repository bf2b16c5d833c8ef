"""Run a grid of arms and report its progress: ``python -m mhc.grid run | status | retry | collect``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from mhc import checkout, cli, stdio
from mhc.errors import UserError, did_you_mean
from mhc.grid import collect as tables
from mhc.grid import devices, gke, local, plan, slurm
from mhc.grid import folder as folders
from mhc.grid.plan import Plan

LAUNCHERS = ("local", "slurm", "gke")
PROGRAM = "python -m mhc.grid"
USAGE = """python -m mhc.grid COMMAND ...

  run FILE --workdir DIR [--config.GROUP.FIELD=VALUE ...]   run what is not finished; --dry_run tells sizes and cost
  status --workdir DIR                                      print a line for each arm
  retry [ARM ...] --workdir DIR                             run failed arms again, from their checkpoints
  collect --workdir DIR                                     write results.csv

FILE is a grid such as configs/grids/topologies.py; FILE:TEXT calls its get_grid(TEXT). COMMAND --help lists options.

example:
  python -m mhc.grid run configs/grids/topologies.py --workdir runs/topologies
"""


def say(line: str) -> None:
    """Write a line for the user at once. Raises OSError where nobody reads it any more."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says.

    Returns:
      The exit code: 0 if every arm finished or was halted by its guard (or was submitted, or written), 1 if some did
      not, 2 for a user's mistake, 6 for a full disk, and 128 + the signal after a signal.
    """
    commands = {"run": run, "status": status, "retry": retry, "collect": collect}
    if not arguments or arguments[0] in ("-h", "--help"):
        say(USAGE.rstrip())
        return 0 if arguments else 2
    if arguments[0] not in commands:
        near = did_you_mean(arguments[0], commands)
        raise UserError(f"unknown command {arguments[0]}{near}; allowed: {', '.join(commands)}")
    return commands[arguments[0]](arguments[1:])


def run(arguments: Sequence[str]) -> int:
    """Plan a grid and launch the arms that are not finished: the command ``run``."""
    parser = cli.Parser(
        prog=f"{PROGRAM} run",
        description="Run the arms of a grid that are not finished; interrupted ones continue from their checkpoint.",
        example="{prog} configs/grids/topologies.py --workdir runs/topologies --config.train.steps=200",
        fields=cli.EVERY_FIELD,
    )
    parser.add_argument("file", help="grid file with get_grid(), or FILE:TEXT for get_grid(TEXT)")
    parser.add_argument("--workdir", metavar="DIR", help="folder of the grid; each arm is a folder in it")
    _launcher_options(parser)
    dry = parser.add_argument_group("what it would cost")
    dry.add_argument("--dry_run", action="store_true", help="list the arms with sizes and cost; allocate nothing")
    dry.add_argument("--tokens_per_second", type=float, help="measured on one device; device-hours follow from it")
    dry.add_argument("--chip", help="or: the chip (default: NVIDIA H100) …")
    dry.add_argument("--mfu", type=float, help="… and the share of its peak that training reaches (default: 0.4)")
    options, overrides = parser.parse_known_args(arguments)
    _check_launcher(options)
    for name in ("tokens_per_second", "chip", "mfu"):
        if getattr(options, name) is not None and not options.dry_run:
            raise UserError(f"--{name}: allowed: only with --dry_run")
    if not options.dry_run:
        _workdir(options)
    planned = plan.load(options.file, overrides, parser)
    pod = _pod(options)
    if options.dry_run:
        _dry_run(planned, options, pod)
        return 0
    workdir = cli.check_writable(options.workdir)
    slots = _slots(options)
    stored = plan.store(planned, workdir)
    others = len(stored.arms) - len(planned.arms)
    if others:
        stdio.write_line(f"{workdir}: keeps {others} arms that {options.file} no longer lists")
    return _launch(planned, stored, workdir, options, slots, pod, retry=())


def retry(arguments: Sequence[str]) -> int:
    """Run failed arms, or the named ones, again: the command ``retry``."""
    parser = cli.Parser(
        prog=f"{PROGRAM} retry",
        description="Run the failed arms of a grid again, or the named ones, failed or halted, from their checkpoints.",
        example="{prog} --workdir runs/topologies",
    )
    parser.add_argument("arm", nargs="*", help="names of arms; none: all failed ones")
    parser.add_argument("--workdir", metavar="DIR", help="folder of the grid")
    _launcher_options(parser)
    options = parser.parse_args(arguments)
    _check_launcher(options)
    workdir = _workdir(options)
    stored = plan.read(workdir)
    for arm in options.arm:
        if arm not in stored.arms:
            raise UserError(f"no arm {arm} in {workdir}{did_you_mean(arm, stored.arms)}")
    states = {arm: folders.state(workdir / arm, stored.config(arm).train.steps) for arm in options.arm or stored.arms}
    unfit = [arm for arm in options.arm if states[arm] not in ("failed", "halted")]
    if unfit:
        raise UserError(f"arm {unfit[0]} is {states[unfit[0]]}, allowed: arms that failed or were halted")
    wanted = options.arm or [arm for arm, state in states.items() if state == "failed"]
    if not wanted:
        say(f"{workdir}: no arm has failed")
        return 0
    chosen = Plan(stored.name, stored.base_file, stored.overrides, stored.base, {a: stored.arms[a] for a in wanted})
    return _launch(chosen, stored, workdir, options, _slots(options), _pod(options), retry=wanted)


def status(arguments: Sequence[str]) -> int:
    """Print a line for each arm: the command ``status``."""
    parser = cli.Parser(
        prog=f"{PROGRAM} status",
        description="Print the state of each arm of a grid.",
        example="{prog} --workdir runs/topologies",
    )
    parser.add_argument("--workdir", metavar="DIR", help="folder of the grid")
    workdir = _workdir(parser.parse_args(arguments))
    lines, states = tables.status(plan.read(workdir), workdir)
    for line in lines:
        say(line)
    say(f"{sum(states.values())} arms: {tables.count_words(states)}")
    return 0


def collect(arguments: Sequence[str]) -> int:
    """Write results.csv: the command ``collect``."""
    parser = cli.Parser(
        prog=f"{PROGRAM} collect",
        description="Write a table with one row for each arm: the fields it varies, its summary, and its state.",
        example="{prog} --workdir runs/topologies",
    )
    parser.add_argument("--workdir", metavar="DIR", help="folder of the grid")
    parser.add_argument("--out", metavar="FILE", type=Path, help="the table (default: results.csv in the workdir)")
    options = parser.parse_args(arguments)
    workdir = _workdir(options)
    stored = plan.read(workdir)
    out = options.out or workdir / "results.csv"
    cli.check_writable(str(out.parent))
    states = tables.collect(stored, workdir, out)
    say(f"{out}: {sum(states.values())} arms: {tables.count_words(states)}")
    return 0


# Launching ------------------------------------------------------------------------------------------------------------


def _launcher_options(parser: cli.Parser) -> None:
    parser.add_argument("--launcher", default="local", help=f"one of {', '.join(LAUNCHERS)} (default: local)")
    parser.add_argument("--jobs", type=_positive, help="local: arms at a time (default: one an accelerator, or one)")
    group = parser.add_argument_group("slurm")
    group.add_argument("--slurm_partition", metavar="NAME", help="partition (default: the cluster's)")
    group.add_argument("--slurm_account", metavar="NAME", help="account (default: the user's)")
    group.add_argument("--slurm_minutes", metavar="N", type=_positive, help="time limit of a job (default: 240)")
    group.add_argument("--slurm_gpus", metavar="N", type=_positive, help="GPUs of an arm, on one node (default: none)")
    group.add_argument("--slurm_cpus", metavar="N", type=_positive, help="cores of an arm (default: 8)")
    group = parser.add_argument_group("gke")
    group.add_argument("--gke_image", metavar="IMAGE", help="container image; its working directory is the project")
    group.add_argument("--gke_claim", metavar="NAME", help="PersistentVolumeClaim for the runs")
    group.add_argument("--gke_accelerator", metavar="LABEL", help="tpu-v5p-slice, nvidia-h100-80gb, …")
    group.add_argument("--gke_topology", metavar="AxBxC", help="of the TPU slice of one host, such as 2x2x1")
    group.add_argument("--gke_chips", metavar="N", type=_positive, help="accelerators of an arm (default: 1)")
    group.add_argument("--gke_restarts", metavar="N", type=_positive, help="most restarts of an arm (default: 10)")


def _workdir(options: argparse.Namespace) -> Path:
    if options.workdir is None:
        raise UserError("--workdir is required: the folder of the grid, e.g. --workdir runs/topologies")
    return Path(options.workdir)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"given {text!r}, allowed: an int >= 1")
    return int(text)


def _check_launcher(options: argparse.Namespace) -> None:
    """Refuse an unknown launcher, and options that the launcher does not use."""
    launcher = options.launcher
    if launcher not in LAUNCHERS:
        near = did_you_mean(launcher, LAUNCHERS)
        raise UserError(f"--launcher: given {launcher!r}, allowed: one of {', '.join(LAUNCHERS)}{near}")
    owners = {
        "jobs": "local",
        **{name: name.partition("_")[0] for name in vars(options) if name[:4] in ("slur", "gke_")},
    }
    for name, owner in owners.items():
        if getattr(options, name) is not None and owner != launcher:
            raise UserError(f"--{name}: allowed: only with --launcher {owner}")


def _pod(options: argparse.Namespace) -> gke.Pod | None:
    if options.launcher != "gke":
        return None
    if not checkout.exists():
        raise UserError(
            "--launcher gke needs a checkout of the project: its manifests run train.py and tpu/worker.sh of an image "
            "made from one"
        )
    for name in ("gke_image", "gke_claim", "gke_accelerator"):
        if getattr(options, name) is None:
            raise UserError(f"--{name} is required with --launcher gke")
    return gke.Pod(
        options.gke_image,
        options.gke_claim,
        options.gke_accelerator,
        chips=options.gke_chips or 1,
        topology=options.gke_topology,
        restarts=options.gke_restarts or 10,
    )


def _slots(options: argparse.Namespace) -> list[devices.Slot]:
    if options.launcher != "local":
        return []
    return devices.slots(options.jobs, devices.accelerators(os.environ), devices.own_cores())


def _launch(
    planned: Plan,
    whole: Plan,
    workdir: Path,
    options: argparse.Namespace,
    slots: Sequence[devices.Slot],
    pod: gke.Pod | None,
    retry: Collection[str],
) -> int:
    steps = {arm: planned.config(arm).train.steps for arm in planned.arms}
    sources = {
        arm: (source[0], whole.config(source[0]).train.steps) for arm in steps if (source := planned.source(arm))
    }
    if options.launcher != "local":
        early = [arm for arm, (source, count) in sources.items() if not folders.finished(workdir / source, count)]
        steps = {arm: count for arm, count in steps.items() if arm not in early}
        if early:
            stdio.write_line(
                f"{len(early)} arms branch from arms that have not finished: the same command submits them later"
            )
    if pod is not None:
        left = [arm for arm in steps if _wanted(workdir / arm, steps[arm], arm in retry)]
        files = gke.write(planned, left, pod, workdir)
        say(f"{workdir / gke.FOLDER}: {len(files)} manifests; kubectl apply -f {workdir / gke.FOLDER}")
        return 0
    if options.launcher == "slurm":
        parameters: dict[str, Any] = {
            "timeout_min": options.slurm_minutes or 240,
            "cpus_per_task": options.slurm_cpus or 8,
            "slurm_signal_delay_s": slurm.SAVE_SECONDS,
        }
        if options.slurm_gpus:
            parameters["gpus_per_node"] = options.slurm_gpus
        for name in ("partition", "account"):
            if getattr(options, f"slurm_{name}"):
                parameters[f"slurm_{name}"] = getattr(options, f"slurm_{name}")
        jobs = slurm.submit(workdir, steps, parameters, retry=retry, say=stdio.write_line)
        stdio.write_line(f"{workdir}: {len(jobs)} jobs submitted")
        return 0
    code = local.Runner(workdir, steps, slots, retry=retry, sources=sources, say=stdio.write_line).run()
    states = {arm: folders.state(workdir / arm, count) for arm, count in steps.items()}
    stdio.write_line(f"{workdir}: {_counts(states.values())}")
    if any(state == "failed" for state in states.values()):
        stdio.write_line(f"failed arms: their output is in arm.log; python -m mhc.grid retry --workdir {workdir}")
    return code


def _wanted(folder: Path, steps: int, again: bool) -> bool:
    state = folders.state(folder, steps)
    return state not in ("finished", "running") and (again or state not in ("failed", "halted"))


def _counts(states: Iterable[str]) -> str:
    listed = list(states)
    return tables.count_words({state: listed.count(state) for state in listed})


def _dry_run(planned: Plan, options: argparse.Namespace, pod: gke.Pod | None) -> None:
    from mhc.grid import estimate

    assumed = estimate.speed(
        options.tokens_per_second, options.chip or "NVIDIA H100", 0.4 if options.mfu is None else options.mfu
    )
    costs = estimate.costs(planned, assumed)
    rows = [("arm", "parameters", "tokens", "FLOPs", "device-hours", "checkpoint")]
    for arm, cost in costs.items():
        rows.append(
            (
                arm,
                f"{cost.params:,}",
                f"{cost.tokens:,}",
                f"{cost.flops:.3g}",
                f"{cost.device_hours:.3g}",
                _bytes(cost.checkpoint_bytes),
            )
        )
    kept = sum(cost.kept_bytes for cost in costs.values())
    lines = [
        *tables.table(rows, right=range(1, 6)),
        f"{len(costs)} arms: {sum(cost.flops for cost in costs.values()):.3g} FLOPs, "
        f"{sum(cost.device_hours for cost in costs.values()):.3g} device-hours, "
        f"up to {_bytes(kept)} of checkpoints kept at the end",
        f"device-hours assume {assumed.words()}; compilation, validation and probes come on top",
    ]
    for line in lines:
        say(f"# {line}" if pod is not None else line)
    if pod is not None:
        for text in gke.documents(planned, planned.arms, pod).values():
            say("---\n" + text.rstrip())


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


if __name__ == "__main__":
    cli.run_main(main)
