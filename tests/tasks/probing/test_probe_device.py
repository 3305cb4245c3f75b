from dataclasses import replace

import pytest

from precision_time.storage.errors import InputError
from precision_time.tasks.probing import probe_device as probe
from precision_time.tasks.probing.probe_device import ProbeReport, cpu_hardware_name, probe_device


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("AMD EPYC", "cpu-amd-epyc-2c"),
        ("Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz", "cpu-intel-xeon-platinum-8375c-2c"),
        ("AMD Ryzen 9 7950X 16-Core Processor", "cpu-amd-ryzen-9-7950x-16-core-2c"),
        ("", "cpu-unknown-2c"),
    ],
)
def test_a_cpu_is_named_after_its_model_and_cores(model, name):
    assert cpu_hardware_name(model, 2) == name


def test_a_cpu_is_measured_and_says_what_it_cannot_do(monkeypatch):
    # No GPU is visible, so auto is a CPU.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    report = probe_device("auto", seconds=0.3)
    assert report.environment.device_type == "cpu"
    assert report.environment.backend == "gloo"
    assert report.environment.gpu == report.hardware.name
    assert report.hardware.name.startswith("cpu-")
    assert report.hardware.name.endswith(f"-{report.environment.cpu_cores}c")
    assert report.device_count == report.environment.cpu_cores == report.most_ranks
    assert {"tf32", "fp8", "nvfp4"} <= set(report.unsupported)
    assert not {"fp32", "amp_bf16"} & set(report.unsupported)
    # Loose bounds: a rate under 0.1 GFLOP/s or over 1 PFLOP/s is no measurement of a CPU.
    assert 1e8 < report.hardware.peak_flops_per_s["fp32"] < 1e15
    assert 1e8 < report.hardware.memory_bytes_per_s < 1e13
    assert report.hardware.launch_overhead_s < 1e-3
    assert ProbeReport.from_dict(report.to_dict()) == report
    on_cluster = replace(report, worker_count=64, host_count=8)
    assert ProbeReport.from_dict(on_cluster.to_dict()) == on_cluster


def test_a_cpu_never_stands_in_for_a_gpu_that_was_asked_for(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(InputError, match="no CUDA GPU can be used here") as caught:
        probe_device("cuda")
    assert caught.value.exit_code == 2


def test_an_unknown_device_is_bad_input_before_anything_runs(monkeypatch):
    monkeypatch.setattr(probe.subprocess, "run", None)
    with pytest.raises(InputError, match="auto, cpu, cuda"):
        probe_device("gpu")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13 16:14:05 UTC 2021\n", "470.57.02"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\n", "580.82.07"),
        ("something else\n", ""),
    ],
)
def test_the_driver_of_either_kernel_module_is_read(tmp_path, text, version):
    path = tmp_path / "version"
    path.write_text(text, encoding="utf-8")
    assert probe._driver_version(str(path)) == version


def test_without_a_driver_its_version_is_blank(tmp_path):
    assert probe._driver_version(str(tmp_path / "none")) == ""
