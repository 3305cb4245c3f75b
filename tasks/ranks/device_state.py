"""State of the rank's GPU by NVML: clock, power, temperature, throttling, energy; None and a reason where unknown."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["EnergyMeter", "GpuMonitor", "GpuState", "open_monitor"]

#: Bits of nvmlClocksEventReasons (nvml.h; recalled, not re-checked) that slow a GPU below what it may do.
SLOWDOWNS = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
#: Usual for a GPU at its power limit: named in the row, but no throttling.
POWER_CAP = {0x4: "power cap"}

SM_CLOCK = 1
GPU_TEMPERATURE = 0

#: Least seconds of measured blocks: the energy counter may move only ten times a second (recalled, not re-checked).
LEAST_ENERGY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One reading of a GPU. ``throttled`` is None where NVML has no answer; ``reasons`` says why the clock is low."""

    clock_hz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttled: bool | None = None
    reasons: str = ""


class GpuMonitor:
    """One GPU, read by ``nvml`` (the module ``pynvml``, or a stand-in with its functions). Nothing here raises."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def read(self) -> GpuState:
        """The state now, by a few host calls for which the device does not wait."""
        nvml = self._nvml
        mhz = self._ask(lambda: nvml.nvmlDeviceGetClockInfo(self._handle, SM_CLOCK))
        milliwatts = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(self._handle))
        celsius = self._ask(lambda: nvml.nvmlDeviceGetTemperature(self._handle, GPU_TEMPERATURE))
        # Drivers before 535 have the second name (recalled, not re-checked).
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        ask = next((getattr(nvml, name) for name in names if hasattr(nvml, name)), None)
        bits = None if ask is None else self._ask(lambda: ask(self._handle))
        reasons = [] if bits is None else [name for bit, name in (SLOWDOWNS | POWER_CAP).items() if int(bits) & bit]
        return GpuState(
            clock_hz=None if mhz is None else mhz * 1e6,
            power_w=None if milliwatts is None else milliwatts / 1e3,
            temperature_c=None if celsius is None else float(celsius),
            throttled=None if bits is None else any(name in SLOWDOWNS.values() for name in reasons),
            reasons=", ".join(reasons),
        )

    def energy_j(self) -> float | None:
        """Joules that the GPU has taken since its driver was loaded."""
        millijoules = self._ask(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        return None if millijoules is None else millijoules / 1e3

    def _ask(self, question: Callable[[], Any]) -> float | None:
        try:
            return float(question())
        except Exception:  # an NVMLError for what a GPU does not support; its kinds differ by driver
            return None


def open_monitor(uuid: str, *, nvml: Any = None) -> tuple[GpuMonitor | None, str]:
    """A monitor of the GPU with ``uuid`` (with or without ``GPU-``), or None and the reason; needs ``nvidia-ml-py``."""
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
        full = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        return GpuMonitor(nvml, nvml.nvmlDeviceGetHandleByUUID(full)), ""
    except ImportError:
        return None, "nvidia-ml-py is not installed"
    except Exception as error:  # no driver, no permission, another container's GPU
        return None, f"NVML does not answer: {str(error).splitlines()[0] if str(error) else type(error).__name__}"


class EnergyMeter:
    """Joules per iteration over all measured blocks, since the counter is too coarse for a single short block."""

    def __init__(self, monitor: GpuMonitor | None, *, reason: str) -> None:
        self._monitor, self._reason = monitor, reason
        self._joules, self._steps, self._seconds = 0.0, 0, 0.0

    def start(self) -> float | None:
        """The counter before a block."""
        return None if self._monitor is None else self._monitor.energy_j()

    def add(self, before: float | None, *, steps: int, seconds: float) -> None:
        """Count a block of ``steps`` iterations, the thrown-away one included, that took ``seconds``."""
        if self._monitor is None:
            return
        after = self._monitor.energy_j()
        if before is None or after is None:
            self._reason = "this GPU has no energy counter"
        elif after < before:
            self._reason = "the energy counter was set back"
        else:
            self._joules += after - before
            self._steps += steps
            self._seconds += seconds

    def per_step(self) -> tuple[float | None, str]:
        """(joules of one iteration, "") or (None, the reason); never 0 joules."""
        if self._reason:
            return None, self._reason
        if self._seconds < LEAST_ENERGY_S:
            return None, f"measured for {self._seconds:.2g} s, the energy counter needs {LEAST_ENERGY_S:g} s"
        if self._joules <= 0:
            return None, "the energy counter did not move"
        return self._joules / self._steps, ""
