"""Conditions of a block of steps, read outside of them: load, CPU time of other processes, state of the GPU."""

import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from precision_time.tasks.ranks.device_state import GpuMonitor, GpuState

__all__ = ["Conditions", "CpuTimes", "MachineWatch", "read_cpu_times"]

#: The kernel counts CPU time in ticks of 10 ms: shares are taken over at least this long.
LEAST_WINDOW_S = 0.2
#: A block is contended when other processes take more than this share of the machine's CPU time, ...
OTHERS_SHARE = 0.1
#: ... or the hypervisor gives more than this share of it to other machines, ...
STEAL_SHARE = 0.05
#: ... or the load average exceeds the cell's cores by more than this, which the scheduler and its workers may cause.
LOAD_MARGIN = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """CPU seconds of a machine since it booted (all, busy, stolen) and of this process (``own_s``)."""

    at: float
    total_s: float
    busy_s: float
    steal_s: float
    own_s: float


def read_cpu_times(path: Path = Path("/proc/stat")) -> CpuTimes | None:
    """The counters now; None where the system has none (not Linux)."""
    try:
        fields = path.read_text(encoding="ascii").split("\n", 1)[0].split()
        # cpu user nice system idle iowait irq softirq steal ...; guests are counted in user (man 5 proc_stat).
        user, nice, system, idle, iowait, irq, softirq, steal = (int(field) for field in fields[1:9])
    except (OSError, ValueError):
        return None
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    busy = user + nice + system + irq + softirq
    own = os.times()
    return CpuTimes(
        at=time.monotonic(),
        total_s=(busy + idle + iowait + steal) * tick_s,
        busy_s=busy * tick_s,
        steal_s=steal * tick_s,
        own_s=own.user + own.system,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The state of the machine while a block ran.

    ``other_cpu_share`` is the share of the machine's CPU time that processes other than the cell's ranks took,
    ``steal_share`` the share that a hypervisor gave to other machines; None where unknown. ``contended`` marks a block
    in which one of them, or the load average, was above its bound.
    """

    load_average: float
    other_cpu_share: float | None = None
    steal_share: float | None = None
    contended: bool = False
    gpu: GpuState = field(default_factory=GpuState)

    def row_columns(self) -> dict[str, Any]:
        """The conditions as columns of a row."""
        return {
            "load_average": self.load_average,
            "other_cpu_share": self.other_cpu_share,
            "steal_share": self.steal_share,
            "contended": self.contended,
            "gpu_clock_hz": self.gpu.clock_hz,
            "power_w": self.gpu.power_w,
            "temperature_c": self.gpu.temperature_c,
            "throttled": self.gpu.throttled,
            "throttle_reasons": self.gpu.reasons,
        }


class MachineWatch:
    """Reads the state of the machine before and after each block.

    ``ranks_here`` ranks of the cell run on this host; they are alike, so this rank's CPU time stands for each of them.
    ``cores`` is the number of cores that they use together.
    """

    def __init__(self, *, monitor: GpuMonitor | None, ranks_here: int, cores: int) -> None:
        self._monitor, self._ranks_here, self._cores = monitor, ranks_here, cores
        self._readings: deque[CpuTimes] = deque(maxlen=64)
        self._gpu = GpuState()
        self._note()

    def look(self) -> None:
        """Read the GPU; called while it still works on the block that the host has queued."""
        if self._monitor is not None:
            self._gpu = self._monitor.read()

    def end_block(self) -> Conditions:
        """The conditions since the block began, or over the last ``LEAST_WINDOW_S`` where it was shorter."""
        self._note()
        others, steal = self._shares()
        load = os.getloadavg()[0]
        return Conditions(
            load_average=load,
            other_cpu_share=others,
            steal_share=steal,
            contended=load > self._cores + LOAD_MARGIN
            or (others is not None and others > OTHERS_SHARE)
            or (steal is not None and steal > STEAL_SHARE),
            gpu=self._gpu,
        )

    def start_block(self) -> None:
        """Note the counters before a block."""
        self._note()

    def _note(self) -> None:
        reading = read_cpu_times()
        if reading is not None:
            self._readings.append(reading)

    def _shares(self) -> tuple[float | None, float | None]:
        """The shares (others, stolen) between the last reading and the latest one ``LEAST_WINDOW_S`` before it."""
        if not self._readings:
            return None, None
        last = self._readings[-1]
        old = [reading for reading in self._readings if last.at - reading.at >= LEAST_WINDOW_S]
        if not old or last.total_s <= old[-1].total_s:
            return None, None
        first = old[-1]
        total_s = last.total_s - first.total_s
        own_s = (last.own_s - first.own_s) * self._ranks_here
        others_s = max(0.0, last.busy_s - first.busy_s - own_s)
        return min(1.0, others_s / total_s), min(1.0, max(0.0, last.steal_s - first.steal_s) / total_s)
