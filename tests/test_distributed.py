"""Test the processes of a run, as far as one process shows it; tests/faults/test_hosts.py runs several."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from mhc import distributed
from mhc.config import DistributedConfig
from mhc.distributed import StopRequest
from mhc.errors import UserError
from mhc.full_disk import DiskFull
from mhc.sharding import local_rows, make_mesh, put_batch
from mhc.train.setup import check_same, resumed_changes
from tests.small import with_fields
from tests.small_runs import config


@pytest.mark.parametrize("cluster", ["auto", "slurm", "k8s"])
def test_an_environment_without_a_cluster_is_refused_in_a_line(cluster, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "JAX_COORD", "TPU_", "OMPI_"))]:
        monkeypatch.delenv(name)

    def not_begun_yet() -> bool:
        return False

    # jax refuses to look at the environment once its devices were used, which tests before this one did.
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", not_begun_yet)
    with pytest.raises(UserError, match=rf"distributed.cluster: given '{cluster}', .* allowed: none, or address"):
        distributed.initialize(DistributedConfig(cluster=cluster))
    assert jax.process_count() == 1


def test_a_host_without_an_address_is_waited_for_and_then_given_up(capsys, monkeypatch):
    """The exit code is that of a lost process, which is worth another try, and not that of a mistake."""
    given = DistributedConfig(cluster="address", coordinator="later.invalid:1234", processes=2, start_timeout=3)
    tries: list[float] = []
    clock = iter(range(100))
    monkeypatch.setattr(distributed.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(distributed.time, "sleep", tries.append)
    with pytest.raises(SystemExit) as left:
        distributed.initialize(given)
    assert left.value.code == distributed.LOST and len(tries) == 2
    waiting, error = capsys.readouterr().err.splitlines()
    assert "trying for at most 3 s" in waiting and error.startswith(
        "error: distributed.coordinator: host later.invalid"
    )


@pytest.mark.parametrize("process", [0, pytest.param(1, marks=pytest.mark.process)])
def test_processes_that_do_not_come_are_given_up_with_a_line_of_ours(process: int) -> None:
    """This holds where process 0 does not come, too; jax alone would end in a stack trace and SIGABRT."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = f"cluster='address', coordinator='127.0.0.1:{port}', processes=2, process_id={process}, start_timeout=1"
    code = f"from mhc import config, distributed; distributed.initialize(config.DistributedConfig({given}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == distributed.LOST
    joining, line = done.stderr.splitlines()
    assert joining.startswith(f"process {process} of 2: joining")
    assert line.startswith(
        f"error: distributed.start_timeout: not all processes have joined at 127.0.0.1:{port} after 1"
    )


def test_how_processes_find_each_other_is_no_change_of_a_run():
    """It is neither noted on a resume nor kept in its event, unlike a change that may matter."""
    run_config = config("text:/nowhere/*.txt")
    cluster = {"cluster": "address", "coordinator": "a:80", "processes": 2, "process_id": 1}
    changed = with_fields(run_config, distributed=cluster, mesh={"fsdp": 2})
    assert resumed_changes(run_config, changed) == {"mesh.fsdp": (1, 2)}


@pytest.mark.parametrize(
    ("text", "raised"), [("UNKNOWN: Failed to start RPC server", UserError), ("INTERNAL: a bug", RuntimeError)]
)
def test_a_taken_port_is_a_mistake_and_another_error_is_not(text, raised, monkeypatch):
    def fails(**given: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(jax.distributed, "initialize", fails)
    given = DistributedConfig(cluster="address", coordinator="127.0.0.1:1", processes=2)
    with pytest.raises(raised) as caught:
        distributed.initialize(given)
    assert (raised is RuntimeError) == (str(caught.value) == text)
    assert raised is RuntimeError or "127.0.0.1:1 cannot be listened on: is the port taken?" in str(caught.value)


def test_another_folder_or_config_than_process_0_has_is_refused():
    run_config = config("text:/nowhere/*.txt")
    check_same(run_config, "runs/a", run_config, "runs/a")
    with pytest.raises(UserError, match=r"--workdir: given runs/a, allowed: what process 0 has, runs/b"):
        check_same(run_config, "runs/a", run_config, "runs/b")
    with pytest.raises(UserError, match=r"optimizer.lr: given 0.01, allowed: what process 0 has, 0.5"):
        check_same(run_config, "runs/a", with_fields(run_config, optimizer={"lr": 0.5}), "runs/a")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cluster": "address"}, "distributed.coordinator: given None, allowed: HOST:PORT"),
        ({"cluster": "address", "coordinator": "host"}, "distributed.coordinator: given 'host', allowed: HOST:PORT"),
        ({"cluster": "address", "coordinator": ":80"}, "distributed.coordinator: given ':80', allowed: HOST:PORT"),
        ({"cluster": "address", "coordinator": "a:70000"}, "distributed.coordinator: given 'a:70000'"),
        (
            {"cluster": "address", "coordinator": "a:80", "processes": 2, "process_id": 2},
            "distributed.process_id: given 2, allowed: below distributed.processes=2",
        ),
        ({"processes": 2}, "distributed.processes: given 2, allowed: 1 unless distributed.cluster=address"),
        ({"cluster": "auto", "coordinator": "a:80"}, "distributed.coordinator: given 'a:80', allowed: None unless"),
    ],
)
def test_fields_that_do_not_go_together(fields, message):
    with pytest.raises(UserError) as refused:
        with_fields(config("text:/nowhere/*.txt"), distributed=fields)
    assert message in str(refused.value)


def test_one_process_agrees_with_itself():
    assert distributed.primary() and distributed.gather({"a": (1, None)}) == [{"a": (1, None)}]
    distributed.wait("nobody else")
    with pytest.raises(UserError, match=r"^mine$"), distributed.together():
        raise UserError("mine")
    with pytest.raises(ZeroDivisionError), distributed.together():
        _ = 1 // 0


def gathered(monkeypatch: pytest.MonkeyPatch, *others: object) -> None:
    """Let `gather` return the value of this process, and then `others`."""
    monkeypatch.setattr(distributed, "gather", lambda value: [value, *others])


def test_a_mistake_of_another_process_is_raised_here_too(monkeypatch):
    gathered(monkeypatch, None, ["the corpus is not there", False])
    with pytest.raises(UserError, match=r"^process 2: the corpus is not there$") as caught, distributed.together():
        pass
    assert caught.type is UserError
    gathered(monkeypatch, None, ["no room", True])
    with pytest.raises(DiskFull, match=r"^process 2: no room$"), distributed.together():
        pass
    with pytest.raises(UserError, match=r"^mine$"), distributed.together():
        raise UserError("mine")


def test_values_of_different_length_are_gathered_whole(monkeypatch):
    """The others give longer and shorter values: lengths are gathered first, then values padded to the longest."""
    values = ["a", {"é": [1.5, None, "—" * 40]}, []]
    monkeypatch.setattr(jax, "process_count", lambda: len(values))
    sent: list[np.ndarray] = []

    def allgather(ours: np.ndarray) -> np.ndarray:
        sent.append(ours)
        raw = [json.dumps(value).encode() for value in values]
        if len(sent) % 2:
            return np.asarray([[len(data)] for data in raw], np.int32)
        return np.stack([np.frombuffer(data.ljust(ours.size, b"\0"), np.uint8) for data in raw])

    monkeypatch.setattr(multihost_utils, "process_allgather", allgather)
    for value in values:
        assert distributed.gather(value) == values
    assert {array.size for array in sent[1::2]} == {max(int(array[0]) for array in sent[::2])}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_interrupts(number):
    stop = StopRequest()
    before = signal.getsignal(number)
    with stop.listening():
        assert not stop.poll()
        os.kill(os.getpid(), number)
        assert stop.poll() and stop.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_several_processes_stop_when_the_service_says_so(monkeypatch):
    """The service is polled with a count that all share; an interrupt becomes the notice that tells the others."""
    asked: list[int] = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def reached(count: int) -> bool:
        asked.append(count)
        return count == 3

    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", reached)
    notices: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: notices.append(number))
    try:
        stop = StopRequest()
        with stop.listening():
            assert [stop.poll() for _ in range(5)] == [False, False, True, True, True]
            assert asked == [1, 2, 3]
            os.kill(os.getpid(), signal.SIGINT)
            assert notices == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    "text",
    [
        "UNKNOWN: Gloo AllGather failed: Connection reset by peer",
        "INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited",
        "DEADLINE_EXCEEDED: Barrier timed out",
        "UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats)",
    ],
)
def test_a_lost_process_ends_this_one_in_a_line(text, monkeypatch, capsys):
    ended: list[int] = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(os, "_exit", ended.append)
    with distributed.leaving_when_lost("runs/a"):
        raise jax.errors.JaxRuntimeError(f"{text}\nmore")
    message = capsys.readouterr().err
    assert ended == [distributed.LOST] and message.count("\n") == 1
    assert message.startswith("error: runs/a: process 0 of 2 stops: another process is lost") and text in message


@pytest.mark.parametrize(("processes", "text"), [(2, "RESOURCE_EXHAUSTED: out of memory"), (1, "Gloo failed")])
def test_other_errors_keep_their_traceback(processes, text, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    with pytest.raises(jax.errors.JaxRuntimeError), distributed.leaving_when_lost("runs/a"):
        raise jax.errors.JaxRuntimeError(text)


def test_rows_of_a_process_are_those_of_its_devices():
    """One process has all devices, and so all rows, in any mesh; arrays come out as they went in."""
    for axes in ({"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"data": 1, "tensor": 8}):
        mesh = make_mesh(config("text:/nowhere/*.txt", train={"batch_size": 16}, mesh=axes).mesh)
        assert local_rows(mesh, 16) == list(range(16))
        batch = {"tokens": np.arange(48).reshape(16, 3), "weights": np.arange(16.0)}
        for name, array in put_batch(batch, mesh).items():
            np.testing.assert_array_equal(array, batch[name])
