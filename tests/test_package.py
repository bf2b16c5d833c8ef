"""Test what is installed: a wheel of ``mhc`` alone, a sdist that can be tested, and a line if an extra is missing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
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
    """Folders named eval, tpu, bench or configs are other people's, in whose environment this is installed."""
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
    """Every extra brings the trainer, since none is of use without it."""

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
    """It goes by what pip prints and by what lies in the environment, since pip is silent while it unpacks."""
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


# Built and installed --------------------------------------------------------------------------------------------------

# The demo's model and rate, for twenty steps.
MY_CONFIG = """
from mhc.config import default

def get_config():
    config = default()
    config.model.layers = 16
    config.model.width = 32
    config.attention.heads = 2
    config.data.sequence_length = 64
    config.optimizer.lr = 1e-2
    config.schedule.warmup_steps = 5
    config.train.steps = 20
    config.train.batch_size = 8
    config.validation.every = 10
    config.validation.batches = 2
    config.monitor.probe_every = 5
    return config
"""
MY_GRID = """
from mhc.grid import Grid, axis

def get_grid():
    return Grid("my.py", axis("residual.kind", "plain", "mhc"))
"""


class Environment:
    """Runs the Python of a fresh virtual environment, in a folder that has nothing to do with this checkout."""

    def __init__(self, folder: Path):
        venv.create(folder / "venv", with_pip=True)
        self.python = folder / "venv/bin/python"
        self.work = folder / "work"
        self.work.mkdir()

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run Python with these arguments; return what it printed."""
        kept = ("HOME", "PATH", "LANG", "PIP_CERT", "SSL_CERT_FILE", "http_proxy", "https_proxy", "no_proxy")
        names = {name: value for name, value in os.environ.items() if name in kept or name.startswith("PIP_")}
        done = subprocess.run(
            [self.python, *arguments],
            cwd=self.work,
            env={**names, "JAX_PLATFORMS": "cpu", "MHC_CACHE": str(self.work / "cache")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1800,
        )
        assert done.returncode == code, f"{arguments}: {done.stdout[-4000:]}"
        return done.stdout

    def install(self, *requirements: str) -> None:
        """Install packages from the registry."""
        self.run("-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements)

    def packages(self) -> dict[str, str]:
        """Return the version of each package, those of the environment itself left out."""
        listed = json.loads(self.run("-m", "pip", "list", "--format=json", "--disable-pip-version-check"))
        return {entry["name"]: entry["version"] for entry in listed if entry["name"] not in ("pip", "setuptools")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist and the wheel of this tree, as ``python -m build`` makes them."""
    folder = tmp_path_factory.mktemp("built")
    tools = Environment(folder)
    try:
        tools.install("build", "twine")
    except AssertionError as error:
        pytest.skip(f"no package registry: {error}")
    left_out = (".*", "runs", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*left_out))
    for name in (".ci", ".gitignore"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / "tree" / name)
    tools.run("-m", "build", "--outdir", str(folder / "dist"), str(folder / "tree"))
    tools.run("-m", "twine", "check", "--strict", *map(str, (folder / "dist").iterdir()))
    return folder / "dist"


@pytest.fixture(scope="module")
def environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment with the wheel and what it brings."""
    made = Environment(tmp_path_factory.mktemp("environment"))
    made.install(str(next(built.glob("*.whl"))))
    return made


@pytest.mark.long
def test_the_built_wheel_holds_every_module_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    files = {path for path in (ROOT / "mhc").rglob("*") if path.suffix == ".py" or path.name == "py.typed"}
    assert sorted(names) == sorted(path.relative_to(ROOT).as_posix() for path in files)


@pytest.mark.long
def test_the_built_sdist_is_the_checkout_and_can_be_tested(built: Path, tmp_path: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    inside = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    if (ROOT / ".git").exists():
        tracked = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split("\0")
        assert {name for name in tracked if name and (ROOT / name).exists()} - inside == set()
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    here, there = (
        subprocess.run(collect, cwd=folder, capture_output=True, text=True, timeout=600) for folder in (ROOT, root)
    )
    assert there.returncode == 0, there.stdout[-4000:]
    assert there.stdout.splitlines()[-1].split()[:3] == here.stdout.splitlines()[-1].split()[:3]


@pytest.mark.long
def test_the_package_alone_is_light_and_trains_a_layer(environment: Environment) -> None:
    """The example of README runs with the wheel in a fresh environment."""
    assert len(environment.packages()) <= 40
    (site,) = (environment.work.parent / "venv/lib").glob("python*/site-packages")
    assert not {"eval", "tpu", "bench", "configs", "tools", "examples", "tests"} & {
        path.name for path in site.iterdir()
    }
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert any("losses[-1] < losses[0]" in block for block in blocks)
    environment.run("-c", "\n".join(blocks))
    environment.run("-c", "import mhc.kernels, mhc.residual.functional")
    for program in ("mhc.train", "mhc.grid", "mhc.eval.compare", "mhc.data.prepare", "mhc.interop.export"):
        said = environment.run("-m", program, code=2)
        assert said.startswith("error: ") and "pip install 'mhc-jax[train]'" in said and said.count("\n") == 1, said
    said = environment.run("-c", "import mhc.config; mhc.config.default()", code=2)
    assert said.startswith("error: mhc.config.default() needs") and said.count("\n") == 1, said


@pytest.mark.long
def test_with_the_extra_a_file_of_the_user_s_is_trained_compared_and_varied(
    environment: Environment, built: Path
) -> None:
    environment.install(f"{next(built.glob('*.whl'))}[train]")
    (environment.work / "my.py").write_text(MY_CONFIG)
    (environment.work / "my_grid.py").write_text(MY_GRID)
    environment.run("-m", "mhc.train", "--config", "my.py", "--config.residual.kind=mhc", "--workdir", "runs/a")
    summary = json.loads((environment.work / "runs/a/summary.json").read_text())
    assert summary["steps"] == 20, summary
    environment.run("-m", "mhc.grid", "run", "my_grid.py", "--workdir", "grid")
    environment.run("-m", "mhc.eval.compare", "grid")
    assert (environment.work / "grid/report.html").is_file()
    assert len(json.loads((environment.work / "grid/summary.json").read_text())["arms"]) == 2
    said = environment.run("-m", "mhc.eval.harness", "--checkpoint", "runs/a", "--tasks", "hellaswag", code=2)
    assert "pip install 'mhc-jax[eval]'" in said and said.count("\n") == 1, said
    said = environment.run("-m", "mhc.train", "--config", "configs/demo.py", "--workdir", "runs/b", code=2)
    assert "configs/ lies in a checkout of the project" in said and said.count("\n") == 1, said
