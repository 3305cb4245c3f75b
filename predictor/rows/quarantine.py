"""Reasons to set a row of the public table aside, and whether it can be predicted all the same."""

from typing import NamedTuple

__all__ = ["REASONS", "Reason"]


class Reason(NamedTuple):
    """Why a row is set aside, and whether it can be predicted and compared all the same."""

    meaning: str
    can_predict: bool


#: Reasons by the word that the column ``reason`` holds. Rows that cannot be understood are never predicted; doubtful
#: ones teach nothing but may be predicted.
REASONS: dict[str, Reason] = {
    # not understood
    "hardware unknown": Reason("no data of this device", False),
    "precision unknown": Reason("blank, or no spelling of a policy", False),
    "precision unsupported": Reason("the device has no unit for this format: the label or the device is wrong", False),
    "device count missing": Reason("blank", False),
    "batch missing": Reason("no batch per GPU, and none can be derived", False),
    "parallelism unknown": Reason("not understood, or its degrees do not fill the GPUs", False),
    "number unusable": Reason("no positive number, a broken count, or devices that nodes do not divide", False),
    "time missing": Reason("neither seconds nor samples per second", False),
    # in doubt, by the transcriber's flag
    "suspect": Reason("the transcriber doubts the figure", True),
    "suspect_value": Reason("the figure contradicts its neighbours in the same table", True),
    "batch_missing": Reason("the batch was not told; the one here is derived from the global batch", True),
    "precision_ambiguous": Reason("the source names two precisions, or none", True),
    "gpu_ambiguous": Reason("the source names two devices, or leaves the variant open", True),
    "table_inconsistent": Reason("batch, devices and accumulation do not give the printed global batch", True),
    "printed_ratio_mismatch": Reason("the printed speed-up is not the ratio of the printed figures", True),
    "duplicate": Reason("the same figure as in another document", True),
    "length_varies": Reason("samples of varying length: no certain work per sample", True),
    "length_binned": Reason("padded to bins: the mean length is below the nominal one", True),
    "unit_ambiguous": Reason("the unit of the printed throughput is open", True),
    "superlinear_scaling": Reason("more than linear over devices: this figure or the single-device one is wrong", True),
    # in doubt, found here
    "exact repeat": Reason("every fact, figure and note as in an earlier row", True),
    "time not converted": Reason("only a throughput, which the transcriber did not turn into seconds", True),
    "another network": Reason("parameters and speed of ConvNeXt-Base under the name of a smaller one", True),
    "utilisation above 0.95": Reason("more FLOP/s than the device has: not these convolutions, or not these samples",
                                     True),
}  # fmt: skip
