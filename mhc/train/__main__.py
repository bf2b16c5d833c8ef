"""Train one model: flags → config → mhc.train.run.

    python -m mhc.train --config my.py --config.residual.kind=mhc --workdir runs/a

The same command on an existing workdir resumes it. ``--dry_run`` prints the model's size and cost as JSON instead;
``--from RUN/run.json`` takes the config of a run that was; ``--fields`` lists every field of a config. In a checkout
``train.py`` is the same program.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from mhc import cli, provenance
from mhc.errors import UserError


def main(arguments: Sequence[str]) -> int:
    """Read the command line and train. Returns the exit code; raises UserError for a user's mistake."""
    parser = cli.Parser(
        description="Train a transformer under one residual topology.",
        example="{prog} --config configs/demo.py --config.residual.kind=mhc --workdir runs/a",
        fields=cli.EVERY_FIELD,
    )
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--config", metavar="FILE", help="config file with get_config(), or RUN/config.json")
    either.add_argument(
        "--from", dest="origin", metavar="RUN/run.json", help="start a run anew as another one was started"
    )
    either.add_argument(
        "--fields",
        nargs="?",
        const="",
        metavar="GROUP",
        help="print every field of the config, or those of one group: its default, what it means, what is allowed",
    )
    parser.add_argument("--workdir", metavar="DIR", help="folder of the run, or gs://BUCKET/PATH; resumes a run there")
    parser.add_argument(
        "--dry_run", action="store_true", help="print parameters, FLOPs and mesh as JSON; train nothing"
    )
    parser.add_argument(
        "--print_shardings", action="store_true", help="with --dry_run: also how each array lies on the devices"
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="have XLA make programs for GPUs that give the same bits each time, at some cost in speed",
    )
    options, overrides = parser.parse_known_args(arguments)
    if options.fields is not None:
        cli.overrides(overrides, parser)  # residual.module among them, whose options are listed too
        print("\n".join(cli.field_lines(options.fields)))
        return 0
    origin = None if options.origin is None else provenance.read(options.origin)
    if origin is None:
        config = cli.load_config(options.config, overrides, parser)
    else:
        config = cli.override(origin.config, overrides, parser)
    if options.workdir is None and not options.dry_run:
        raise UserError("--workdir is required: the folder of the run, e.g. --workdir runs/a")
    if options.print_shardings and not options.dry_run:
        raise UserError("--print_shardings: allowed: only with --dry_run")
    if options.workdir is not None:
        cli.check_workdir(options.workdir)

    if options.deterministic or (origin is not None and origin.deterministic):
        provenance.make_deterministic()

    # jax takes seconds to import: only a command without mistakes waits for it.
    from mhc import distributed
    from mhc.train import plan, run

    if options.dry_run:
        print(json.dumps(plan.dry_run(config, shardings=options.print_shardings), indent=2))
        return 0
    distributed.initialize(config.distributed)
    return run.run(config, options.workdir, origin)


if __name__ == "__main__":
    cli.run_main(main)
