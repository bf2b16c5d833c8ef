"""Test which accelerator or cores an arm gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhc.errors import UserError
from mhc.grid import devices
from mhc.grid.devices import slots


@given(st.integers(1, 40), st.integers(1, 40))
def test_cores_are_shared_evenly(jobs: int, count: int) -> None:
    shares = [slot.cores for slot in slots(jobs, [], list(range(count)))]
    assert len(shares) == jobs
    if jobs == 1:
        assert shares == [()]  # the machine to itself
    elif jobs <= count:
        assert len({core for share in shares for core in share}) == sum(map(len, shares)) == jobs * (count // jobs)
    else:
        assert all(len(share) == 1 and share[0] < count for share in shares)
        busiest = [sum(core in share for share in shares) for core in range(count)]
        assert max(busiest) - min(busiest) <= 1


def test_several_jobs_get_an_accelerator_each() -> None:
    machine = ["cuda:4", "cuda:6"]
    both = slots(None, machine, [0, 1, 2])
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in both] == ["4", "6"]
    assert [slot.devices for slot in both] == [("cuda:4",), ("cuda:6",)]
    alone = slots(1, machine, [0])
    assert (alone[0].devices, alone[0].environment) == (("cuda:4", "cuda:6"), {})
    with pytest.raises(UserError, match="--jobs 3: allowed: at most 2"):
        slots(3, machine, [0])


def test_a_chip_of_a_tpu_host_is_told_that_it_is_alone() -> None:
    (_, second) = slots(2, ["tpu:0", "tpu:1"], [])
    assert second.environment == {
        "TPU_VISIBLE_CHIPS": "1",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
    }


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, ["cuda:0", "cuda:1", "cuda:2"]),
        ({"JAX_PLATFORMS": "cpu"}, []),
        ({"JAX_PLATFORMS": "cuda,cpu"}, ["cuda:0", "cuda:1", "cuda:2"]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, ["cuda:2", "cuda:0"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, ["cuda:1"]),
    ],
)
def test_accelerators_are_those_that_jax_would_use(
    environment: dict[str, str], found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: name if "cuda" in name else None)
    monkeypatch.setattr(
        devices.glob, "glob", lambda pattern: [f"/dev/nvidia{n}" for n in range(3)] if "nvidia" in pattern else []
    )
    assert devices.accelerators(environment) == found


def test_without_a_plugin_a_gpu_is_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(devices.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    assert devices.accelerators({}) == []
