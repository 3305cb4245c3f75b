"""Read the size of an input out of its text: the side of an image or volume, or the length of a sequence."""

import math
import re

from precision_time.storage.errors import InputError

__all__ = ["check_input", "parse_input_size", "read_image_side", "read_padded_size", "read_sequence_length"]

_SIDES = re.compile(r"(?<![0-9A-Za-z])[1-9][0-9]{0,5}(?:x[1-9][0-9]{0,5})+")
_LENGTH = re.compile(
    r"(?:^\s*|\bseq(?:uence)?(?:[ _]length)? |\btgt_len |\bsegments of )([1-9][0-9]{0,8}(?:\.0+)?)(?=$|\s|,)"
)
_SHORT_AND_LONG_SIDE = re.compile(r"short side ([0-9]+), long side max ([0-9]+)")
_HISTORY_AND_HORIZON = re.compile(r"([0-9]+) history \+ ([0-9]+) horizon")
#: Images of COCO differ in size; a batch pads them to this side on average.
_COCO = re.compile(r"800\D{1,40}1333")
_COCO_SIDE = math.sqrt(800.0 * 1088.0)
#: What a question may ask for: a side or a length, or sides joined by x.
_QUESTION = re.compile(r"\d{1,7}(x\d{1,7}){0,2}")
_SMALLEST, _LARGEST = 16, 2**20


def _read_side(text: str) -> float | None:
    """Side of the square or cube with as many pixels as ``800x1333`` has; a last size up to 4 is channels."""
    match = _SIDES.search(text)
    if match is None:
        return None
    sides = [float(side) for side in match.group(0).split("x")]
    if len(sides) > 2 and sides[-1] <= 4:
        sides.pop()
    return math.prod(sides) ** (1 / len(sides))


def _read_length(text: str) -> float | None:
    match = _LENGTH.search(text)
    return float(match.group(1)) if match else None


def parse_input_size(text: str) -> float:
    """Side of the square or cube with as many pixels (rounded to 0.1), or the length of a sequence; NaN for neither.

    ``224``, ``seq 128``, ``COCO 800x1333`` (1033), ``128x128x128x4 volumes`` (128: up to 4 channels do not count),
    ``168 history + 24 horizon steps`` (192), ``segments of 8192 audio samples``.
    """
    side = _read_side(text)
    if side is not None:
        return round(side, 1)
    if match := _SHORT_AND_LONG_SIDE.search(text):
        return round(math.sqrt(float(match.group(1)) * float(match.group(2))), 1)
    if match := _HISTORY_AND_HORIZON.search(text):
        return float(match.group(1)) + float(match.group(2))
    length = _read_length(text)
    return math.nan if length is None else length


def read_padded_size(text: str) -> float | None:
    """Side or length as ``parse_input_size`` reads it, not rounded, and of COCO's images that of a padded batch.

    None where the text names neither.
    """
    if _COCO.search(text):
        return _COCO_SIDE
    side = _read_side(text)
    return _read_length(text) if side is None else side


def read_image_side(text: str) -> float | None:
    """Side in pixels of the square with the area of the image in ``text``; None for volumes and for no image."""
    sizes = [[int(number) for number in size.split("x")] for size in re.findall(r"\d+(?:x\d+)+", text)]
    if sizes:
        size = sizes[0]
        return math.sqrt(size[0] * size[1]) if len(size) == 2 or size[2] <= 4 else None
    numbers = [int(number) for number in re.findall(r"(?<![\dA-Za-z])\d{2,}(?![\dA-Za-z])", text)]
    if len(numbers) == 2 and "side" in text:
        return math.sqrt(numbers[0] * numbers[1])
    return float(numbers[0]) if len(numbers) == 1 else None


def read_sequence_length(text: str) -> int | None:
    """Tokens of the sequence in ``text``; None where it names none."""
    match = re.search(r"^(\d+)$|(?:seq(?:uence)?(?:_len\w*)?|tgt_len)\W*(\d+)", text)
    return int(match[1] or match[2]) if match else None


def check_input(task_input: str) -> None:
    """Raise ``InputError`` unless a question's ``task_input`` is a side, sides joined by x, or a length."""
    if not _QUESTION.fullmatch(task_input) or not all(
        _SMALLEST <= int(number) <= _LARGEST for number in task_input.split("x")
    ):
        raise InputError(
            "this input names no size",
            got=repr(task_input[:200]),
            expected="a resolution such as 224 or 800x1333, or a sequence length such as 512, from 16 to 1048576",
        )
