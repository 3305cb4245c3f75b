"""The reasons to set a row of the public table aside, and whether such a row can be predicted all the same."""

from typing import NamedTuple

__all__ = ["REASONS", "Reason"]


class Reason(NamedTuple):
    """Why a row is set aside, and whether a prediction of it can be compared with it all the same."""

    meaning: str
    can_predict: bool


#: Reasons by the word in the column ``reason``. Rows that cannot be understood are never predicted; doubtful rows are
#: not trained on but may be predicted.
REASONS: dict[str, Reason] = {
    # not understood
    "hardware unknown": Reason("this device is not in the list of hardware", False),
    "precision unknown": Reason("blank, or not the spelling of a policy", False),
    "precision unsupported": Reason("the device has no unit for this format: the label or the device is wrong", False),
    "device count missing": Reason("blank", False),
    "batch missing": Reason("no batch per GPU, and none can be derived", False),
    "parallelism unknown": Reason("not understood, or its degrees do not fill the GPUs", False),
    "number unusable": Reason("not a positive number, a fractional count, or devices not divisible by nodes", False),
    "time missing": Reason("neither seconds nor samples per second", False),
    # in doubt, by the transcriber's flag
    "suspect": Reason("the transcriber doubts the figure", True),
    "suspect_value": Reason("the figure contradicts its neighbours in the same table", True),
    "batch_missing": Reason("the batch was not stated; this one is derived from the global batch", True),
    "precision_ambiguous": Reason("the source names two precisions, or none", True),
    "gpu_ambiguous": Reason("the source names two devices, or does not name the variant", True),
    "table_inconsistent": Reason("batch, devices and accumulation do not give the printed global batch", True),
    "printed_ratio_mismatch": Reason("the printed speed-up is not the ratio of the printed figures", True),
    "duplicate": Reason("the same figure as in another document", True),
    "length_varies": Reason("samples of varying length: the work per sample is not certain", True),
    "length_binned": Reason("padded to bins: the mean length is below the nominal one", True),
    "unit_ambiguous": Reason("the unit of the printed throughput is not certain", True),
    "superlinear_scaling": Reason("more than linear over devices: this figure or the single-device one is wrong", True),
    # in doubt, found here
    "exact repeat": Reason("every fact, figure and note as in an earlier row", True),
    "time not converted": Reason("only a throughput, which the transcriber did not turn into seconds", True),
    "another network": Reason("parameters and speed of ConvNeXt-Base under the name of a smaller one", True),
    "utilisation above 0.95": Reason("more FLOP/s than the device has: other work, or other samples, than stated",
                                     True),
}  # fmt: skip
