"""Test JobSet manifests: valid YAML, names that Kubernetes takes, and a command that trains exactly the arm."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from mhc import cli
from mhc.errors import UserError
from mhc.grid import gke, plan
from mhc.grid.__main__ import main
from mhc.grid.gke import Pod
from mhc.grid.plan import Plan

yaml = pytest.importorskip("yaml")  # comes with flax

ROOT = Path(__file__).parents[2]
GRIDS = ROOT / "configs" / "grids"
TPU = Pod("registry/image:1", "runs", "tpu-v5p-slice", chips=4, topology="2x2x1")
GPU = Pod("registry/image:1", "runs", "nvidia-h100-80gb", chips=8)


@functools.cache
def load(grid: str, *overrides: str) -> Plan:
    """Return the plan of a ready grid."""
    return plan.load(str(GRIDS / grid), overrides)


def manifests(planned: Plan, pod: Pod) -> dict[str, Any]:
    """Return the parsed manifest of each arm."""
    return {arm: yaml.safe_load(text) for arm, text in gke.documents(planned, planned.arms, pod).items()}


@pytest.mark.parametrize("grid", ["controls.py:cluster", "topologies.py:cluster", "wsd.py:cluster"])
def test_the_command_of_a_manifest_trains_the_arm(grid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """train.py reads the command in the project's root, with the overrides of the grid's command line."""
    planned = load(grid, "--config.optimizer.clip_norm=None", "--config.data.source=text:/data/*.txt")
    monkeypatch.chdir(ROOT)
    for arm, manifest in manifests(planned, TPU).items():
        (container,) = pod_of(manifest)["containers"]
        supervisor, entry = container["command"][:6], container["command"][6:]
        assert supervisor == ["bash", "tpu/worker.sh", "pod", "--workdir", entry[-1], "--"]
        assert (ROOT / supervisor[1]).is_file()
        python, program, flag, config, *overrides, last, workdir = entry
        assert (python, program, flag, last) == ("python", "train.py", "--config", "--workdir")
        assert workdir.startswith("/runs/") and workdir.endswith(f"/{arm}")
        assert cli.load_config(config, overrides) == planned.placed(arm, Path(workdir).parent)


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the pod of a manifest's one job."""
    (job,) = manifest["spec"]["replicatedJobs"]
    return job["template"]["spec"]["template"]["spec"]


def test_values_of_every_type_survive_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = (
        "arm({'schedule.step_ratios': (0.5, 0.25), 'model.scan': False, 'optimizer.clip_norm': None, 'mesh.data': -1,"
        " 'optimizer.lr': 1e-7, 'residual.kind': 'mhc', 'residual.init': 'v4'})"
    )
    (tmp_path / "g.py").write_text(
        f"from mhc.grid import *\ndef get_grid():\n    return Grid('{GRIDS / 'base.py'}', {arms})\n"
    )
    planned = plan.load(str(tmp_path / "g.py"), ())
    (arm,) = planned.arms
    monkeypatch.chdir(ROOT)
    command = gke.command(planned, arm, "/runs/a")
    assert cli.load_config(command[3], command[4:-2]) == planned.config(arm)


def test_a_pod_asks_for_its_accelerators() -> None:
    planned = load("topologies.py:cluster")
    label = "cloud.google.com/gke-"
    tpu = {f"{label}tpu-accelerator": "tpu-v5p-slice", f"{label}tpu-topology": "2x2x1"}
    gpu = {f"{label}accelerator": "nvidia-h100-80gb"}
    for pod, resource, selector in ((TPU, {"google.com/tpu": 4}, tpu), (GPU, {"nvidia.com/gpu": 8}, gpu)):
        manifest = manifests(planned, pod)["mhc,seed=0"]
        spec = pod_of(manifest)
        assert (manifest["kind"], manifest["apiVersion"]) == ("JobSet", "jobset.x-k8s.io/v1alpha2")
        assert spec["nodeSelector"] == selector
        assert spec["containers"][0]["resources"]["limits"] == resource
        assert spec["volumes"][0]["persistentVolumeClaim"] == {"claimName": "runs"}
        assert spec["containers"][0]["volumeMounts"] == [{"name": "runs", "mountPath": "/runs"}]
        assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 10
        (rule,) = manifest["spec"]["failurePolicy"]["rules"]
        assert rule == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
        (job,) = manifest["spec"]["replicatedJobs"]
        (rule,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
        assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [2, 3]
        assert rule["onExitCodes"]["containerName"] == spec["containers"][0]["name"]


def test_names_are_those_of_kubernetes_and_different() -> None:
    names = [
        manifest["metadata"]["name"]
        for grid in ("controls.py", "lr.py:cluster", "lr.py")
        for manifest in manifests(load(grid), GPU).values()
    ]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name) for name in names)


def test_a_slice_without_its_topology_is_refused() -> None:
    with pytest.raises(UserError, match="--gke_topology: given None, allowed: a TPU topology"):
        Pod("i", "c", "tpu-v5p-slice")
    with pytest.raises(UserError, match="--gke_topology: given 2x2, allowed: none"):
        Pod("i", "c", "nvidia-l4", topology="2x2")


def test_a_base_that_the_image_lacks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text((GRIDS / "base.py").read_text())
    (tmp_path / "g.py").write_text("from mhc.grid import *\ndef get_grid():\n    return Grid('base.py', arm({}))\n")
    with pytest.raises(UserError, match="lies outside of the project"):
        gke.command(plan.load(str(tmp_path / "g.py"), ()), "base", "/runs/a")


POD = ["--launcher", "gke", "--gke_image", "i", "--gke_claim", "c", "--gke_accelerator", "nvidia-l4"]


def test_run_writes_the_manifests_of_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", str(GRIDS / "topologies.py"), "--workdir", str(tmp_path), *POD]
    assert main(command) == 0
    folder = tmp_path / gke.FOLDER
    assert len(list(folder.iterdir())) == 18
    done = tmp_path / "mhc,seed=0"
    done.mkdir()
    (done / "summary.json").write_text('{"exit_reason": "finished", "steps": 300}')
    assert main(command) == 0
    assert len(list(folder.iterdir())) == 17
    assert not (folder / "mhc,seed=0.yaml").exists()
    assert "kubectl apply -f" in capsys.readouterr().out


def test_a_dry_run_prints_yaml_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", str(GRIDS / "topologies.py"), "--workdir", str(tmp_path / "w"), "--dry_run", *POD]
    assert main(command) == 0
    found = [document for document in yaml.safe_load_all(capsys.readouterr().out) if document]
    assert len(found) == 18
    assert not (tmp_path / "w").exists()
