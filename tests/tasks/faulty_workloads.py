"""Workloads that fail in one way each; ranks load them as ``faulty_workloads:<name>``."""

import os
import signal
import time

import torch
import torch.distributed as dist

from precision_time.tasks.workloads import OPTIMIZERS, Workload


class _Module(torch.nn.Module):
    def __init__(self, trouble=lambda: None):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        self.trouble = trouble
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        # The first calls count the feature card, on fake tensors.
        if type(inputs) is torch.Tensor:
            self.trouble()
        return self.layers(inputs)


def _workload(trouble=lambda: None):
    return Workload(
        name="tiny",
        family="mlp",
        task_input="64",
        module=_Module(trouble),
        make_batch=lambda samples, device: torch.randn(samples, 64, device=device),
        compute_loss=lambda module, batch: module(batch).square().mean(),
        make_optimizer=OPTIMIZERS["adamw"],
        optimizer_name="adamw",
    )


def _rank():
    return dist.get_rank() if dist.is_initialized() else 0


def tiny():
    return _workload()


def raises_on_rank_1():
    def trouble():
        if _rank() == 1:
            raise ValueError("the data of rank 1 are gone")

    return _workload(trouble)


def killed_on_rank_0():
    def trouble():
        if _rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return _workload(trouble)


def sleeps_on_rank_1():
    def trouble():
        if _rank() == 1:
            time.sleep(3600)

    return _workload(trouble)


def allocates_without_end():
    tensors = []

    def trouble():
        tensors.append(torch.ones(2**30))

    return _workload(trouble)


def not_a_workload():
    return "resnet50"
