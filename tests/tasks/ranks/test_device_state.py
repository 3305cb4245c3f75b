"""Readings of a GPU through a stand-in for NVML; no GPU is needed, and none was used."""

import sys

import pytest

from precision_time.tasks.ranks.device_state import EnergyMeter, GpuMonitor, open_monitor


class FakeNvml:
    """The functions of pynvml that are called, for one made-up GPU."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, reasons=0, energy=(), missing=()):
        self.reasons, self.energy, self.missing = reasons, list(energy), set(missing)

    def _answer(self, name, value):
        if name in self.missing:
            raise self.NVMLError("Not Supported")
        return value

    def nvmlInit(self):
        self._answer("init", None)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return self._answer("handle", uuid)

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return self._answer("clock", 1410)

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._answer("power", 400_000)

    def nvmlDeviceGetTemperature(self, handle, kind):
        return self._answer("temperature", 64)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self._answer("reasons", self.reasons)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return self._answer("energy", self.energy.pop(0) if self.energy else 0)


def monitor(**options):
    return GpuMonitor(FakeNvml(**options), "handle")


def test_a_look_at_a_gpu_comes_in_hertz_watts_and_degrees():
    state = monitor().read()
    assert (state.clock_hz, state.power_w, state.temperature_c) == (1.41e9, 400.0, 64.0)
    assert (state.throttled, state.reasons) == (False, "")


@pytest.mark.parametrize(
    ("bits", "throttled", "reasons"),
    [
        (0x1, False, ""),  # idle
        (0x4, False, "power cap"),  # usual at the power limit
        (0x20, True, "software thermal slowdown"),
        (0x40 | 0x4, True, "hardware thermal slowdown, power cap"),
        (0x8, True, "hardware slowdown"),
    ],
)
def test_heat_and_hardware_throttle_a_gpu_and_its_power_cap_is_only_named(bits, throttled, reasons):
    state = monitor(reasons=bits).read()
    assert (state.throttled, state.reasons) == (throttled, reasons)


def test_what_a_gpu_does_not_tell_is_none_and_no_failure():
    state = monitor(missing={"clock", "power", "temperature", "reasons"}).read()
    assert (state.clock_hz, state.power_w, state.temperature_c, state.throttled) == (None, None, None, None)


def test_a_host_without_nvml_has_no_monitor_and_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_monitor("GPU-1") == (None, "nvidia-ml-py is not installed")
    found, reason = open_monitor("GPU-1", nvml=FakeNvml(missing={"init"}))
    assert found is None
    assert "Not Supported" in reason


@pytest.mark.parametrize("uuid", ["1234-5678", "GPU-1234-5678"])
def test_a_gpu_is_found_by_its_uuid_as_torch_or_nvml_spells_it(uuid):
    found, reason = open_monitor(uuid, nvml=FakeNvml())
    assert reason == ""
    assert found._handle == "GPU-1234-5678"


def measured(meter, *, blocks, steps=6, seconds=1.0):
    for _ in range(blocks):
        meter.add(meter.start(), steps=steps, seconds=seconds)
    return meter.per_step()


def test_energy_is_what_the_counter_moved_over_the_steps_that_ran():
    meter = EnergyMeter(monitor(energy=[1_000, 601_000, 700_000, 1_300_000]), reason="")
    assert measured(meter, blocks=2) == (1_200.0 / 12, "")


@pytest.mark.parametrize(
    ("energy", "seconds", "reason"),
    [
        ([5_000, 5_000], 2.0, "did not move"),
        ([5_000, 9_000], 0.1, "needs 1 s"),
        ([9_000, 5_000], 2.0, "set back"),
    ],
)
def test_energy_that_is_not_known_is_none_with_a_reason_and_never_zero(energy, seconds, reason):
    joules, why = measured(EnergyMeter(monitor(energy=energy), reason=""), blocks=1, seconds=seconds)
    assert joules is None
    assert reason in why


def test_a_gpu_without_an_energy_counter_says_so():
    joules, why = measured(EnergyMeter(monitor(missing={"energy"}), reason=""), blocks=3)
    assert (joules, why) == (None, "this GPU has no energy counter")
    assert measured(EnergyMeter(None, reason="no GPU"), blocks=3) == (None, "no GPU")
