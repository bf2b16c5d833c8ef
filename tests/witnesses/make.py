"""Make the witnesses, which was done once: see README.md. It refuses to make them again."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

from tests import witnessed
from tests.witnessed import FOLDER, RUNS

WORDS = ("stream", "width", "of", "the", "norm", "is", "—", "depth", "and", "gain", "a", "sum")


def main(code: Path) -> None:
    """Train the runs with the code in a folder, and store what it finds in them."""
    import mhc

    if any((FOLDER / kind).exists() for kind in RUNS):
        sys.exit("the witnesses are there, and never change")
    assert Path(str(mhc.__file__)).is_relative_to(code), mhc.__file__
    os.chdir(FOLDER)
    rng = random.Random(0)
    texts = (" ".join(rng.choice(WORDS) for _ in range(rng.randint(3, 30))) for _ in range(120))
    Path("corpus").mkdir()
    Path("corpus/texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for kind in RUNS:
        config = ["--config", str(code / "configs" / "default.py")]
        command = [sys.executable, str(code / "train.py"), *config, *witnessed.overrides(kind), "--workdir", kind]
        subprocess.run(command, check=True)
        strip(Path(kind))
    expected = {"runs": {kind: witnessed.measured(kind) for kind in RUNS}}
    copy = Path("compared")
    for kind in RUNS:
        shutil.copytree(kind, copy / kind)
    expected["compare"] = witnessed.compared(copy)
    shutil.rmtree(copy)
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def strip(run: Path) -> None:
    """Leave out of a run where, and on which machine, it was made."""
    (run / ".lock").unlink()
    for file in run.rglob("commit_success.txt"):  # that it is there is what counts
        file.write_text("Checkpoint commit was successful\n")
    record = json.loads((run / "run.json").read_text())
    for start in record["starts"]:
        command = ["python", "train.py", "--config", "configs/default.py", *witnessed.overrides(run.name)]
        start |= {"command": [*command, "--workdir", run.name], "folder": "tests/witnesses", "host": "host"}
    (run / "run.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
