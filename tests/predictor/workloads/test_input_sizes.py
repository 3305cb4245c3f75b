import math

import pytest

from precision_time.predictor.workloads.input_sizes import parse_input_size, read_padded_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("224", 224), ("seq 384 (script default)", 384), ("COCO 800x1333", 1032.7), ("~800x1333", 1032.7),
        ("BraTS 128x128x128x4 volumes", 128), ("572x572x1 images", 572), ("KiTS19 128x128x128", 128),
        ("COCO images (short side 800, long side max 1333)", 1032.7), ("168 history + 24 horizon steps", 192),
        ("WikiText-103, tgt_len 192, mem_len 192", 192), ("LJSpeech, segments of 8000 audio samples", 8000),
        ("Criteo 1TB, 13 dense + 26 categorical", math.nan), ("Task01 BrainTumour 2D slices", math.nan),
        ("ML-20M", math.nan), ("", math.nan), ("LibriSpeech 960h, variable length", math.nan),
    ],
)  # fmt: skip
def test_the_size_of_an_input_is_read_from_its_text(text: str, size: float) -> None:
    assert parse_input_size(text) == pytest.approx(size, nan_ok=True)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("224", 224),
        ("seq 128 (script default)", 128),
        ("128x128x128x4 volumes", 128),
        ("512x1024", math.sqrt(512 * 1024)),
        ("~800x1333", math.sqrt(800 * 1088)),
        ("COCO images (short side 800, long side max 1333)", math.sqrt(800 * 1088)),
        ("segments of 8192 audio samples", 8192),
        ("WMT16 en-de", None),
        ("", None),
    ],
)
def test_the_padded_size_of_an_input_is_read_from_its_text(text, size):
    assert read_padded_size(text) == (None if size is None else pytest.approx(size))


def test_only_an_input_of_coco_means_its_padded_size():
    coco = read_padded_size("COCO images (short side 800, long side max 1333)")
    assert coco == read_padded_size("~800x1333") == pytest.approx(math.sqrt(800 * 1088))
    assert read_padded_size("1333") == read_padded_size("1333x1333") == 1333
