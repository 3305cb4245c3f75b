import pytest
import torch
from torch import nn

from precision_time.storage.errors import InputError
from precision_time.tasks.zoo.network import build_light, label_loss


class _ReadsValues(nn.Module):
    """Computes with values while it is built, as networks with ranges of dropped paths do."""

    def __init__(self) -> None:
        super().__init__()
        steps = int(torch.ones(3).sum().item())
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(steps))
        nn.init.constant_(self.layers[0].weight, 7.0)


def test_modules_end_on_the_meta_device_and_initialisers_work_again():
    module = build_light(_ReadsValues)
    assert len(module.layers) == 3
    assert all(parameter.is_meta for parameter in module.parameters())
    assert float(nn.init.constant_(torch.zeros(1), 7.0)) == 7.0


def test_every_output_of_a_classifier_is_scored():
    scores = torch.zeros(2, 10)
    labels = torch.zeros(2, dtype=torch.long)
    loss = float(label_loss(scores, labels))
    assert float(label_loss((scores, {"aux": scores}), labels)) == pytest.approx(2 * loss)
    assert float(label_loss(torch.zeros(2, 10, 4, 4), labels)) == pytest.approx(loss)
    with pytest.raises(InputError, match="returns no scores"):
        label_loss([], labels)
