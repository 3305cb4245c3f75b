import dataclasses

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from precision_time.predictor.workloads.families import find_family
from precision_time.storage.errors import InputError, UnknownNameError
from precision_time.tasks.zoo.stand_ins.by_name import STAND_INS, build_stand_in, stand_in_inputs
from precision_time.tasks.zoo.stand_ins.detection import GRIDS, make_anchors, score_boxes
from precision_time.tasks.zoo.stand_ins.forecasting import build_tft
from precision_time.tasks.zoo.stand_ins.recommendation import CRITEO_ROWS, Dcnv2, Dlrm
from precision_time.tasks.zoo.stand_ins.recurrent import build_gnmt, build_rnnt, build_tacotron2
from precision_time.tasks.zoo.stand_ins.transformers import RelativeLayer, build_transformer_big, make_sinusoids

#: Parameters by name, and the source of each figure. "counted": no source has a figure, so a network of library parts
#: with the same sizes was counted; "recalled": the figure of the source from memory, not re-checked.
PUBLISHED = {
    "gnmt": 160_671_297,  # recalled: training log of NVIDIA/DeepLearningExamples
    "ssd300_resnet50": 22_894_902,  # counted
    "ssd-resnet34-300": 19_972_534,  # counted
    "tacotron2": 28_193_153,  # recalled: training log of NVIDIA/DeepLearningExamples
    "waveglow": 268e6,  # recalled: NVIDIA/DeepLearningExamples
    "hifigan": 13.92e6 + 70.7e6,  # generator: HiFi-GAN paper; discriminators: recalled
    "fastpitch": 45e6 + 1.005e6 + 0.495e6,  # recalled: 45 M (version 1.0); aligner and energy by hand
    "jasper10x5": 332_632_349,  # tests of osmr/imgclsmob
    "quartznet15x5": 18_924_381,  # osmr/imgclsmob; the paper gives 18.9 M
    "rnnt": 49e6,  # recalled: mlcommons/training
    "transformerxl_base": 191_950_298,  # recalled: training log of NVIDIA/DeepLearningExamples
    "transformerxl_large": 285e6,  # by hand from the sizes; the paper gives 257 M
    "transformer_big": 210e6,  # by hand from the sizes of NVIDIA/DeepLearningExamples
    "ncf": 31.8e6,  # by hand from the sizes of NVIDIA/DeepLearningExamples
    "vae_cf": 24_489_600,  # by hand from the sizes, without biases
    "wide_and_deep": 90.9e6,  # by hand from the sizes of NVIDIA/DeepLearningExamples
    "dlrm": 187.8e6 * 128,  # rows of MLPerf's tables
    "dlrm_small": 4.2e9,  # README of NVIDIA/DeepLearningExamples
    "dlrm_large": 22.8e9,  # README of NVIDIA/DeepLearningExamples
    "dlrm_xlarge": 113e9,  # README of NVIDIA/DeepLearningExamples
    "dlrm-dcnv2": 204.2e6 * 128,  # rows of MLPerf's tables
    "dcnv2_small": 4.2e9,  # README of NVIDIA/DeepLearningExamples
    "dcnv2_large": 22.8e9,  # README of NVIDIA/DeepLearningExamples
    "nnunet_2d": 20.6e6,  # counted
    "nnunet_3d": 31.2e6,  # recalled: nnU-Net of BraTS
    "unet3d": 31.2e6,  # recalled: mlcommons/training
    "unet2d_medical": 34_512_258,  # counted
    "unet_industrial": 1_824_945,  # README of NVIDIA/DeepLearningExamples
    "vnet": 3_599_747,  # counted
    "insightface_resnet100": 65.2e6 + 85_742 * 512,  # recalled: deepinsight/insightface, and the head
    "insightface_mobilefacenet": 0.99e6 + 85_742 * 128,  # MobileFaceNets paper, and the head
    "tft_electricity": 1.61e6,  # by hand from the sizes of NVIDIA/DeepLearningExamples
    "tft_traffic": 1.69e6,  # by hand from the sizes of NVIDIA/DeepLearningExamples
}
ALIASES = {"ncf_ml20m": "ncf", "transformer-big": "transformer_big", "transformer_big_wmt": "transformer_big"}
#: Networks with long loops, built with few steps.
SHORT = {
    "gnmt": lambda: build_gnmt(source=3, target=4),
    "tft_electricity": lambda: build_tft(past=6, future=3),
    "tft_traffic": lambda: build_tft(series=963, past=6, future=3),
    "tacotron2": lambda: build_tacotron2(frames=3, characters=8),
    "rnnt": lambda: build_rnnt(frames=6, words=4),
}


def build(name):
    with torch.device("meta"):
        return SHORT[name]() if name in SHORT else build_stand_in(name)


@pytest.mark.parametrize("name", STAND_INS)
def test_a_stand_in_has_the_published_parameters_and_trains_all_of_them(name):
    workload = build(name)
    parameters = dict(workload.module.named_parameters())
    expected = PUBLISHED[ALIASES.get(name, name)]
    assert sum(parameter.numel() for parameter in parameters.values()) == pytest.approx(expected, rel=0.015)
    with torch.device("meta"):
        loss = workload.compute_loss(workload.module, workload.make_batch(2, "meta"))
        loss.backward()
    assert loss.shape == ()
    assert not [place for place, parameter in parameters.items() if parameter.grad is None]


@pytest.mark.parametrize("name", STAND_INS)
def test_a_stand_in_is_of_the_family_that_the_predictor_lists(name):
    listed = find_family(name)
    assert listed is None or build(name).family == listed.family


@pytest.mark.parametrize("name", ["ncf", "vnet", "insightface_mobilefacenet"])
def test_a_step_of_a_stand_in_is_finite(name):
    torch.manual_seed(0)
    workload = build_stand_in(name)
    loss = workload.compute_loss(workload.module, workload.make_batch(2, "cpu"))
    loss.backward()
    workload.make_optimizer(workload.module.parameters()).step()
    assert loss.isfinite()
    assert all(parameter.isfinite().all() for parameter in workload.module.parameters())


def test_every_input_of_a_name_has_batches_of_its_own_shape():
    shapes = {}
    for task_input in stand_in_inputs("unet3d"):
        with torch.device("meta"):
            workload = build_stand_in("unet3d", task_input)
        assert (workload.name, workload.task_input) == ("unet3d", task_input)
        shapes[task_input.split()[0]] = workload.make_batch(2, "meta")[0].shape
    assert shapes == {"BraTS": (2, 4, 128, 128, 128), "KiTS19": (2, 1, 128, 128, 128)}


def test_a_name_without_a_stand_in_is_answered_with_the_nearest():
    with pytest.raises(UnknownNameError, match="tacotron2"):
        stand_in_inputs("tacotron")


def test_an_unlisted_input_is_refused_with_the_listed_ones():
    with pytest.raises(InputError, match="300x300"):
        build_stand_in("ssd300_resnet50", "512")


class Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def count_operations(workload):
    with torch.device("meta"), Counter() as counter:
        workload.compute_loss(workload.module, workload.make_batch(2, "meta"))
    return counter.names


def test_the_decoder_of_tacotron_runs_frame_after_frame():
    with torch.device("meta"):
        short, long = (count_operations(build_tacotron2(frames=frames, characters=4)) for frames in (2, 7))
    # Eight products a frame: two to each cell, query, place, frame and gate (and two batched for energies and context).
    added = sum(name in ("aten::mm", "aten::addmm") for name in long) - sum(
        name in ("aten::mm", "aten::addmm") for name in short
    )
    assert added / 5 >= 8


@pytest.mark.parametrize("hot", [(1, 1, 1), (1, 4, 2)])
@pytest.mark.parametrize("network", [Dlrm, Dcnv2])
def test_tables_are_looked_up_by_one_gather_and_get_sparse_gradients(network, hot):
    module = network((10, 5, 3), hot=hot)
    values = torch.tensor([[0] * sum(hot), [2] * sum(hot)])
    with Counter() as counter:
        logits = module(torch.rand(2, 13), values)
    lookups = [name for name in counter.names if "embedding" in name]
    assert lookups == ["aten::_embedding_bag" if max(hot) > 1 else "aten::embedding"]
    logits.sum().backward()
    gradient = module.tables.table.weight.grad
    assert gradient.is_sparse
    assert set(gradient.coalesce().indices()[0].tolist()) == {0, 2, 10, 12, 15, 17}
    torch.optim.Adagrad(module.parameters(), lr=0.1).step()


def test_multi_hot_values_are_summed_table_by_table():
    module = Dlrm((4, 4, 4), hot=(1, 2, 1))
    weight = module.tables.table.weight
    pooled = module.tables(torch.tensor([[3, 0, 1, 2]]))
    expected = torch.stack([weight[3], weight[4] + weight[5], weight[10]])
    torch.testing.assert_close(pooled[0], expected)


@pytest.mark.parametrize(("size", "rows"), [("mlperf", 187_767_399), ("mlperf_multi_hot", 204_184_588)])
def test_the_tables_of_criteo_have_26_columns(size, rows):
    assert len(CRITEO_ROWS[size]) == 26
    assert sum(CRITEO_ROWS[size]) == rows


def test_ssd_has_8732_boxes_inside_the_paper_s_scales():
    anchors = make_anchors(GRIDS)
    assert anchors.shape == (4, 8732)
    assert anchors[:2].min() > 0
    assert anchors[:2].max() < 1
    assert anchors[2, 0] == pytest.approx(21 / 300)


def test_the_box_loss_counts_objects_and_the_hardest_three_negatives_of_each():
    torch.manual_seed(0)
    anchors = torch.rand(4, 12) + 0.1
    labels = torch.zeros(1, 12, dtype=torch.long)
    labels[0, 0] = 1
    classes = torch.randn(1, 81, 12)
    loss = score_boxes((torch.zeros(1, 4, 12), classes, anchors), anchors.unsqueeze(0), labels)
    each = nn.functional.cross_entropy(classes, labels, reduction="none")[0]
    torch.testing.assert_close(loss, each[0] + each[1:].sort(descending=True)[0][:3].sum())


def test_relative_attention_scores_a_place_by_its_distance():
    torch.manual_seed(0)
    layer = RelativeLayer(64, heads=1, inner=8, dropout=0.0).double()
    tokens, memory = torch.randn(1, 3, 64).double(), torch.randn(1, 2, 64).double()
    places = make_sinusoids(torch.arange(4, -1, -1), width=64).double()
    hidden = torch.ones(3, 5, dtype=torch.bool).triu(3)
    output = layer(tokens, memory, places, torch.randn(2, 1, 64).double() * 0, hidden)
    query, key, value = layer.projection(torch.cat([memory, tokens], dim=1)[0]).chunk(3, dim=-1)
    distance = layer.place(places)
    rows = []
    for row in range(3):
        row_query = query[2 + row]
        # The key at column j is 2 + row - j steps away; places run from distance 4 down to 0.
        scores = torch.stack([row_query @ key[j] + row_query @ distance[4 - (2 + row - j)] for j in range(3 + row)]) / 8
        rows.append(scores.softmax(dim=0) @ value[: 3 + row])
    mixed = layer.attention_norm(tokens[0] + layer.mix(torch.stack(rows)))
    torch.testing.assert_close(output[0], layer.norm(mixed + layer.mlp(mixed)))


@pytest.mark.parametrize(("tokens", "shape"), [(2, (1, 2)), (32, (1, 32)), (64, (2, 32)), (70, (3, 32))])
def test_a_sample_of_the_translator_is_one_token(tokens, shape):
    with torch.device("meta"):
        workload = build_transformer_big()
    assert workload.make_batch(tokens, "meta")[1].shape == shape


def test_stand_ins_are_workloads_like_any_other():
    workload = build("ncf")
    assert {field.name for field in dataclasses.fields(workload)} >= {"module", "make_batch", "compute_loss"}
    assert workload.optimizer_name == "adam"
