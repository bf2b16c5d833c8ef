"""Write a JobSet manifest for each arm, for Kubernetes on GKE; ``kubectl apply`` submits them.

A manifest runs ``train.py`` of the project in a container image whose working directory is the project, on one host,
with the runs on a volume. A pod that fails or is evicted is started again and continues from its checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mhc import checkout
from mhc.errors import UserError
from mhc.grid.plan import Plan

FOLDER = "jobsets"
MOUNT = "/runs"
GRACE_SECONDS = 300  # between SIGTERM and SIGKILL, for the checkpoint


@dataclasses.dataclass(frozen=True)
class Pod:
    """Describes the pod that every arm runs in."""

    image: str
    """Container image with the project, its Python dependencies and bash; its working directory is the project's."""
    claim: str
    """PersistentVolumeClaim that holds the runs; arms write to <mount>/<grid>/<arm>."""
    accelerator: str
    """Value of the node label, such as tpu-v5p-slice or nvidia-h100-80gb; one with ``tpu`` in it is a TPU."""
    chips: int = 1
    """Accelerators of the pod: the whole host for TPUs."""
    topology: str | None = None
    """Topology of a TPU slice of one host, such as 2x2x1."""
    restarts: int = 10
    """Times that an arm may be started again."""

    def __post_init__(self) -> None:
        if self.tpu != (self.topology is not None):
            what = "a TPU topology such as 2x2x1" if self.tpu else f"none with --gke_accelerator {self.accelerator}"
            raise UserError(f"--gke_topology: given {self.topology}, allowed: {what}")

    @property
    def tpu(self) -> bool:
        """Return whether the accelerator is a TPU."""
        return "tpu" in self.accelerator


def command(plan: Plan, arm: str, workdir: str) -> list[str]:
    """Return the train.py command that trains an arm, run in the project's root.

    Raises:
      UserError: the base config lies outside of the project, so that an image does not have it.
    """
    path, colon, text = plan.base_file.partition(":")
    base = os.path.relpath(path, checkout.ROOT)
    if base.startswith(".."):
        raise UserError(f"--launcher gke: the base config {path} lies outside of the project, so images do not have it")
    fields = {**plan.overrides, **plan.arms[arm]}
    if source := plan.source(arm):
        fields["train.init_from"] = f"{os.path.dirname(workdir)}/{source[0]}@{source[1]}"
    overrides = [f"--config.{field}={_text(value)}" for field, value in fields.items()]
    return ["python", "train.py", "--config", f"{base}{colon}{text}", *overrides, "--workdir", workdir]


def manifest(plan: Plan, arm: str, pod: Pod) -> dict[str, Any]:
    """Return the JobSet of an arm."""
    grid = re.sub(r"[^A-Za-z0-9._-]", "-", plan.name)
    if pod.tpu:
        resource = "google.com/tpu"
        selector = {
            "cloud.google.com/gke-tpu-accelerator": pod.accelerator,
            "cloud.google.com/gke-tpu-topology": pod.topology,
        }
    else:
        resource, selector = "nvidia.com/gpu", {"cloud.google.com/gke-accelerator": pod.accelerator}
    workdir = f"{MOUNT}/{grid}/{arm}"
    container = {
        "name": "train",
        "image": pod.image,
        # train.py also exits with 0 when it was told to stop and saved, which Kubernetes would take for the arm's end.
        "command": ["bash", "tpu/worker.sh", "pod", "--workdir", workdir, "--", *command(plan, arm, workdir)],
        "resources": {"limits": {resource: pod.chips}},
        "volumeMounts": [{"name": "runs", "mountPath": MOUNT}],
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "nodeSelector": selector,
        "containers": [container],
        "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": pod.claim}}],
    }
    # A user's mistake (2) or the guard's halt (3) would happen again; anything else is worth a restart.
    final = {"containerName": "train", "operator": "In", "values": [2, 3]}
    job = {
        "parallelism": 1,
        "completions": 1,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": final}]},
        "template": {"spec": spec},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": object_name(plan.name, arm),
            "labels": {"mhc-grid": _slug(plan.name, 63)},
            "annotations": {"mhc-arm": arm},
        },
        "spec": {
            "failurePolicy": {
                "maxRestarts": pod.restarts,
                "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [{"name": "train", "replicas": 1, "template": {"spec": job}}],
        },
    }


def object_name(grid: str, arm: str) -> str:
    """Return the name of an arm's JobSet: lower case, unique, at most 40 characters, to which its pods' names add."""
    return f"{_slug(f'{grid}-{arm}', 31)}-{hashlib.sha256(f'{grid}/{arm}'.encode()).hexdigest()[:8]}"


def _slug(text: str, longest: int) -> str:
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"g-{plain}"
    return plain[:longest].rstrip("-")


def _text(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, (tuple, list)) else str(value)


def documents(plan: Plan, arms: Iterable[str], pod: Pod) -> dict[str, str]:
    """Return {arm: its manifest as YAML text}."""
    return {arm: "\n".join(_yaml(manifest(plan, arm, pod))) + "\n" for arm in arms}


def write(plan: Plan, arms: Iterable[str], pod: Pod, workdir: Path) -> list[Path]:
    """Write the manifests into ``workdir/jobsets``, one file an arm; files of other arms there are removed.

    Returns:
        The files.
    """
    texts = documents(plan, arms, pod)
    folder = workdir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.yaml"):
        old.unlink()
    files = []
    for arm, text in texts.items():
        file = folder / f"{arm}.yaml"
        file.write_text(text, encoding="utf-8")
        files.append(file)
    return files


def _yaml(value: Mapping[str, Any], indent: str = "") -> list[str]:
    """Return lines of block-style YAML for mappings, lists and scalars; strings are quoted as in JSON."""
    lines: list[str] = []
    for key, item in value.items():
        if isinstance(item, Mapping):
            lines += [f"{indent}{key}:", *_yaml(item, indent + "  ")]
        elif isinstance(item, list):
            lines.append(f"{indent}{key}:")
            for entry in item:
                if isinstance(entry, Mapping):
                    first, *rest = _yaml(entry, indent + "    ")
                    lines += [f"{indent}  - {first.strip()}", *rest]
                else:
                    lines.append(f"{indent}  - {json.dumps(entry)}")
        else:
            lines.append(f"{indent}{key}: {json.dumps(item)}")
    return lines
