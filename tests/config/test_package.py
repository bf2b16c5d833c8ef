"""Test the package mhc.config: it needs only the standard library, and no two of its modules need each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mhc import config as config_lib
from mhc.errors import UserError

ROOT = Path(__file__).parents[2]
MODULES = sorted(file.stem for file in (ROOT / "mhc" / "config").glob("[a-z]*.py"))


def python(code: str) -> str:
    """Run code in a process of its own and return what it prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout


def test_it_loads_no_package_of_others() -> None:
    code = (
        "import sys; before = set(sys.modules); import mhc.config; mhc.config.Config();"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    assert set(python(code).split()) <= {"mhc"} | sys.stdlib_module_names


def test_each_module_can_be_imported_first() -> None:
    """Each module is imported first, since a circle of imports would then fail; the package's __init__ is left out."""
    assert len(MODULES) > 5
    code = (
        "import sys, types\n"
        f"for name in {MODULES!r}:\n"
        "    for loaded in [loaded for loaded in sys.modules if loaded.startswith('mhc.config')]:\n"
        "        del sys.modules[loaded]\n"
        "    package = sys.modules['mhc.config'] = types.ModuleType('mhc.config')\n"
        "    package.__path__ = ['mhc/config']\n"
        "    __import__(f'mhc.config.{name}')\n"
        "    print(name)\n"
    )
    assert python(code).split() == MODULES


def test_the_default_config_names_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_collections", None)
    with pytest.raises(UserError, match=r"needs .*: pip install 'mhc-jax\[train\]' \(not installed: ml_collections\)"):
        config_lib.default()


def test_the_default_config_is_a_new_one_each_time() -> None:
    first = config_lib.default()
    first.train.steps = 7
    assert config_lib.from_config_dict(first).train.steps == 7
    assert config_lib.from_config_dict(config_lib.default()) == config_lib.Config()
