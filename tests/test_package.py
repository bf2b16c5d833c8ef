"""What is installed: a wheel of ``mhc`` alone, a sdist that can be tested, and a line where an extra is missing."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mhc import checkout, cli, extras
from mhc.errors import UserError
from mhc.grid.__main__ import main as grid_main
from tools import install

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]

# Run before a program: what flax does not bring of the packages of [train] is found no more.
ABSENT = sorted(set(extras.TRAIN) - {"absl", "optax", "orbax", "scipy"})
WITHOUT_TRAIN = f"""
import importlib.util, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {ABSENT} else find_spec(name, package)
sys.meta_path.insert(0, Absent())
"""


def name_of(requirement: str) -> str:
    """Return the name of the distribution that a requirement asks for, in the spelling of an import."""
    match = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert match is not None, requirement
    return match[0].lower().replace("-", "_")


def test_a_wheel_holds_the_package_alone() -> None:
    """Folders of the names eval, tpu, bench or configs are other people's, in whose environment this is installed."""
    options = PROJECT["tool"]["setuptools"]["packages"]["find"]
    code = f"import setuptools; print(*setuptools.find_packages({str(ROOT)!r}, **{options}))"
    chosen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {name.partition(".")[0] for name in chosen} == {"mhc"}
    folders = {path.parent for path in (ROOT / "mhc").rglob("*.py")}
    assert {name.replace(".", "/") for name in chosen} == {path.relative_to(ROOT).as_posix() for path in folders}


def test_every_file_of_the_package_that_is_no_module_is_in_the_wheel() -> None:
    declared = PROJECT["tool"]["setuptools"]["package-data"]["mhc"]
    stray = [path for path in (ROOT / "mhc").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert {path.relative_to(ROOT / "mhc").as_posix() for path in stray} == set(declared)
    assert "py.typed" in declared


def test_the_package_alone_needs_jax_flax_and_numpy() -> None:
    assert [name_of(requirement) for requirement in PROJECT["project"]["dependencies"]] == ["flax", "jax", "numpy"]


def test_every_extra_trains() -> None:
    """No extra is of use without: what brought the trainer before, brings it still."""

    def brings(extra: str) -> bool:
        inner = [match[1].split(",") for entry in EXTRAS[extra] if (match := re.match(r"mhc-jax\[(.*)\]", entry))]
        return extra == "train" or any(brings(name) for names in inner for name in names)

    assert all(brings(extra) for extra in EXTRAS)
    assert set(EXTRAS) >= {"train", "tpu", "cuda", "corpora", "gcs", "eval", "slurm", "wandb", "dev"}


def test_the_packages_that_are_looked_for_are_those_of_the_extra() -> None:
    imports = importlib.metadata.packages_distributions()
    wanted = [name_of(requirement) for requirement in EXTRAS["train"]]
    found = [{name_of(distribution) for distribution in imports[module]} for module in extras.TRAIN]
    assert len(found) == len(wanted)
    assert all(name in names for name, names in zip(wanted, found, strict=True)), (wanted, found)


@pytest.mark.parametrize(
    "command",
    [
        "mhc.train",
        "mhc.grid",
        "mhc.data.prepare",
        "mhc.interop.export",
        "eval.compare",
        "mhc.eval.perplexity",
        "bench.step --config configs/demo.py",
    ],
)
def test_a_program_without_its_extra_ends_in_a_line(command: str) -> None:
    module, *arguments = command.split()
    code = (
        f"{WITHOUT_TRAIN}\nimport runpy\nsys.argv = ['', *{arguments}]\nrunpy.run_module({module!r}, None, '__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    line = (
        r"error: [\w./ ]+ needs more than jax and flax: pip install 'mhc-jax\[train\]' \(not installed: .*grain.*\)\n"
    )
    assert re.fullmatch(line, done.stderr), done.stderr
    assert not done.stdout


def test_an_import_without_the_extra_is_an_import_error_and_the_library_rooms_work() -> None:
    code = f"""{WITHOUT_TRAIN}
import json
import mhc.residual, mhc.kernels, mhc.model.decoder, mhc.config
try:
    import mhc.train
except ImportError as error:
    print(json.dumps(str(error)))
raise ValueError("of their own")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "pip install 'mhc-jax[train]'" in json.loads(done.stdout)
    # What Python prints of other exceptions stays.
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and done.stderr.endswith("ValueError: of their own\n")


# Without a checkout ---------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have the package believe that it lies in a site-packages folder; work in an empty folder, which is returned."""
    monkeypatch.setattr(checkout, "ROOT", tmp_path / "site-packages")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        (
            "configs/demo.py",
            None,
            "config file configs/demo.py: no such file (configs/ lies in a checkout of the project",
        ),
        (
            "my.py",
            "import tpu.nothing_there\n",
            "tpu/ lies in a checkout of the project, not in the installed package)",
        ),
        ("my.py", "import eval.nothing_there\n", "installed package; mhc.eval has the programs)"),
    ],
)
def test_what_only_a_checkout_has_is_told(installed: Path, file: str, text: str | None, said: str) -> None:
    if text is not None:
        Path(file).write_text(text)
    with pytest.raises(UserError) as caught:
        cli.load_config(file, ())
    assert said in str(caught.value)


def test_a_ready_grid_and_the_manifests_of_a_grid_need_a_checkout(installed: Path) -> None:
    with pytest.raises(UserError, match=r"grids/lr\.py: no such file \(configs/ lies in a checkout of the project"):
        grid_main(["run", "configs/grids/lr.py", "--workdir", "g"])
    Path("base.py").write_text("from mhc.config import default as get_config\n")
    Path("grid.py").write_text(
        "from mhc.grid import Grid, axis\ndef get_grid():\n    return Grid('base.py', axis('seed.init', 0, 1))\n"
    )
    arguments = ["run", "grid.py", "--workdir", "g", "--dry_run"]
    with pytest.raises(UserError, match=r"--launcher gke needs a checkout of the project"):
        grid_main([*arguments, "--launcher", "gke", "--gke_image", "i", "--gke_claim", "c", "--gke_accelerator", "gpu"])


def test_a_checkout_is_told_from_an_installed_package(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not checkout.exists()
    monkeypatch.setattr(checkout, "ROOT", ROOT)
    assert checkout.exists()
    with pytest.raises(UserError, match=r"config file configs/demo\.py: no such file$"):
        cli.load_config("configs/demo.py", ())


def test_in_a_checkout_a_config_file_elsewhere_imports_the_ready_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my.py").write_text("from configs.demo import get_config\n")
    code = "from mhc import cli; print(cli.load_config('my.py', ()).model.layers)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(ROOT / 'tests/..')!r}); {code}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == "16\n", done.stderr


# The installer of make ------------------------------------------------------------------------------------------------


def test_the_install_says_how_far_it_is(tmp_path: Path) -> None:
    """By what pip prints, and by what lies in the environment: pip is silent while it unpacks."""
    (tmp_path / "pip-25.0.dist-info").mkdir()
    progress = install.Progress(tmp_path)
    progress.hear("Obtaining file:///home/me/mhc")
    assert progress.words() == "looking for packages"
    for line in (
        "Collecting flax<0.14,>=0.12.5 (from mhc-jax==0.1.0)",
        "  Downloading flax-0.12.8-py3-none-any.whl.metadata (11 kB)",
        "Collecting jaxlib",
        "  Downloading jaxlib-0.10.2-cp311-cp311-manylinux_2_27_x86_64.whl.metadata (1.3 kB)",
        "Collecting flax",  # pip looks again
    ):
        progress.hear(line)
    assert progress.words() == "2 packages found"
    progress.hear("Downloading jaxlib-0.10.2-cp311-cp311-manylinux_2_27_x86_64.whl (84.3 MB)")
    progress.hear("Downloading flax-0.12.8-py3-none-any.whl (700 kB)")
    assert progress.words() == "2 packages found, 85 MB downloaded"
    progress.hear("Installing collected packages: jaxlib, flax, mhc-jax")
    assert progress.words() == "0 of 3 packages installed"
    (tmp_path / "jaxlib-0.10.2.dist-info").mkdir()
    assert progress.words() == "1 of 3 packages installed"


@pytest.mark.skipif("pip" not in importlib.metadata.packages_distributions(), reason="no pip in this environment")
def test_an_install_that_fails_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    assert install.main("./no_such_folder") == 1
    lines = capfd.readouterr().err.splitlines()
    assert any(line.startswith("ERROR: ") and "no_such_folder" in line for line in lines)
    assert lines[-1] == "error: pip could not install ./no_such_folder (exit code 1)"
