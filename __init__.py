"""How long a training job will take, at any precision and GPU count, before it starts, and why."""

from typing import TYPE_CHECKING

__all__ = ["Calibration", "PrecisionTimeError", "TimeEstimate", "__version__", "calibrate", "predict_time"]

if TYPE_CHECKING:
    from precision_time.predictor.answering.calibration import Calibration, calibrate
    from precision_time.predictor.answering.estimate import TimeEstimate
    from precision_time.predictor.api import predict_time
    from precision_time.storage.errors import PrecisionTimeError

    __version__: str
else:
    # Type checkers read the branch above, so an unknown attribute stays an error for them.
    _HOMES = {
        "Calibration": "precision_time.predictor.answering.calibration",
        "PrecisionTimeError": "precision_time.storage.errors",
        "TimeEstimate": "precision_time.predictor.answering.estimate",
        "calibrate": "precision_time.predictor.answering.calibration",
        "predict_time": "precision_time.predictor.api",
    }

    def __getattr__(name: str) -> object:
        import importlib
        import importlib.metadata

        if name == "__version__":
            value: object = importlib.metadata.version("precision-time")
        elif name in _HOMES:
            value = getattr(importlib.import_module(_HOMES[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
