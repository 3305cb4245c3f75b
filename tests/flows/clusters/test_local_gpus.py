import os
from collections.abc import Callable
from pathlib import Path

import pytest

from precision_time.flows.clusters.local_gpus import count_gpus, name_devices

LISTED = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa-1)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bbbb-2)
  MIG 1g.10gb     Device  0: (UUID: MIG-cccc-3)
"""

ListGpus = Callable[..., None]


@pytest.fixture
def list_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ListGpus:
    """Install an ``nvidia-smi`` that prints ``listed``, and set ``CUDA_VISIBLE_DEVICES`` to ``visible``."""

    def prepare(listed: str, *, visible: str | None, code: int = 0) -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{listed}END\nexit {code}\n", encoding="utf-8")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    return prepare


@pytest.mark.parametrize(
    ("visible", "count", "names"),
    [
        (None, None, ("GPU-aaaa-1", "GPU-bbbb-2")),
        (None, 1, ("GPU-aaaa-1",)),
        ("1,0", 1, ("GPU-bbbb-2",)),
        ("GPU-bbbb", None, ("GPU-bbbb-2",)),
        ("MIG-cccc-3, 0", None, ("MIG-cccc-3", "GPU-aaaa-1")),
        ("-1", None, ()),
        ("7", None, ("GPU-7",)),
    ],
)
def test_gpus_go_by_their_uuid_however_they_are_named(
    list_gpus: ListGpus, visible: str | None, count: int | None, names: tuple[str, ...]
) -> None:
    list_gpus(LISTED, visible=visible)
    assert name_devices("cuda", count=count) == names


def test_a_gpu_without_a_uuid_goes_by_its_place(list_gpus: ListGpus) -> None:
    list_gpus("GPU 0: Orin (nvgpu)\nGPU 1: H200 (UUID: GPU-1)\n", visible=None)
    assert name_devices("cuda") == ("GPU-0", "GPU-1")
    assert count_gpus() == 2


def test_without_nvidias_tool_gpus_go_by_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert name_devices("cuda", count=2) == ("GPU-0", "GPU-1")
    assert name_devices("cpu", count=2) == ("cpu",)
    assert count_gpus() == 0


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("0", 1), ("", 0), ("-1", 0), ("0,1,2,3", 2), ("GPU-bbbb-2,MIG-cccc-3", 2)]
)
def test_gpus_are_counted_that_the_driver_has_and_that_are_visible(
    list_gpus: ListGpus, visible: str | None, count: int
) -> None:
    list_gpus(LISTED, visible=visible)
    assert count_gpus() == count


def test_a_driver_that_fails_has_no_gpus(list_gpus: ListGpus) -> None:
    list_gpus("GPU 0: not to be believed (UUID: GPU-1)\n", visible=None, code=9)
    assert count_gpus() == 0
