"""The zoo's own networks: stand-ins, the workloads of campaigns, and variants of library networks."""

import functools
from collections.abc import Callable

from torch import nn

from precision_time.tasks.workloads import BUILDERS, Workload
from precision_time.tasks.zoo.libraries.variants import VARIANTS, build_variant
from precision_time.tasks.zoo.network import Built, Network, build_light
from precision_time.tasks.zoo.stand_ins.by_name import STAND_INS, build_stand_in

__all__ = ["find_own", "list_own"]

SOURCE = "ours"
#: The input of each workload of campaigns, as the workload names it.
_INPUTS = {
    "resnet18": "224", "resnet50": "224", "vit_b16": "224", "vit_tiny": "64", "bert_base": "128", "bert_mini": "64",
    "gpt2": "1024", "gpt2_mini": "128", "mlp": "1024",
}  # fmt: skip


def list_own() -> list[Network]:
    """Every stand-in at each of its own inputs, every variant, and every workload of campaigns."""
    inputs = [(name, texts[0]) for name, builds in STAND_INS.items() for _, texts in builds]
    networks = [find_own(name, text) for name, text in (*inputs, *((name, "") for name in VARIANTS))]
    workloads = [
        Network(
            name=name,
            task_input=_INPUTS[name],
            source=SOURCE,
            builds=f"workload {name}",
            build=functools.partial(_build_workload, BUILDERS[name]),
        )
        for name in BUILDERS
    ]
    return [network for network in networks if network is not None] + workloads


def find_own(name: str, task_input: str = "") -> Network | None:
    """The stand-in or variant called ``name`` at ``task_input``, else at its usual input; None for an unknown name."""
    if name in STAND_INS:
        inputs = [texts for _, texts in STAND_INS[name]]
        texts = next((texts for texts in inputs if task_input in texts), inputs[0])
        return Network(
            name=name,
            task_input=task_input or texts[0],
            source=SOURCE,
            builds=f"stand-in {name} at {texts[0]}",
            build=functools.partial(_build_workload, functools.partial(build_stand_in, name, texts[0])),
        )
    if name in VARIANTS:
        variant = VARIANTS[name]
        return Network(
            name=name,
            task_input=task_input or variant.task_input,
            source=SOURCE,
            builds=f"variant {variant.network} at {variant.task_input}",
            build=functools.partial(build_variant, name),
            params=variant.params,
        )
    return None


def _build_workload(build: Callable[[], Workload]) -> Built:
    workloads: list[Workload] = []

    def make() -> nn.Module:
        workloads.append(build())
        return workloads[-1].module

    module = build_light(make)
    workload = workloads[-1]
    return Built(
        module=module,
        make_batch=lambda samples: workload.make_batch(samples, "cpu"),
        loss_of=workload.compute_loss,
    )
