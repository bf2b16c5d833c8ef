"""Test options of XLA that come and go from release to release."""

from __future__ import annotations

import os

import jax
import pytest

from mhc import provenance, sharding
from mhc.config import MeshConfig
from mhc.errors import UserError
from mhc.sharding import jit, make_mesh
from mhc.xla_options import known_options, unknown_flags


def test_flags_that_xla_does_not_know_are_named() -> None:
    made_up = ["--xla_no_such_flag=1", "--xla_nor_this=true"]
    assert unknown_flags(["--xla_force_host_platform_device_count=2"]) == set()
    assert unknown_flags([made_up[0]]) == {made_up[0]}
    assert unknown_flags([made_up[0], "--xla_backend_optimization_level=0", made_up[1]]) == set(made_up)


def test_the_flags_of_the_tests_are_known() -> None:
    """If they were not, the processes that tests start would end at once."""
    assert unknown_flags(os.environ["XLA_FLAGS"].split()) == set()


def test_compiler_options_that_xla_does_not_know_are_left_out() -> None:
    level = {"xla_backend_optimization_level": 0}
    assert known_options({**level, "xla_no_such_option": False}) == level


def test_what_only_fixes_an_order_is_left_out_where_xla_has_no_such_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "_IN_ORDER", {"xla_no_such_option": False})
    mesh = make_mesh(MeshConfig())
    assert int(jit(lambda x: x + 1, mesh)(1)) == 2


def test_deterministic_is_refused_where_xla_cannot_be_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "DETERMINISTIC", "--xla_no_such_flag")
    environment: dict[str, str] = {}
    with pytest.raises(UserError, match=r"--deterministic: the XLA of jaxlib [0-9.]+ has no --xla_no_such_flag"):
        provenance.make_deterministic(environment)
    assert environment == {}


def test_another_failure_of_the_probe_is_not_taken_for_an_unknown_option() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="backend_optimization_level"):
        known_options({"xla_backend_optimization_level": "no number"})  # type: ignore[dict-item]
