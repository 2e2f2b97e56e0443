"""Which device a request goes to, and what is said when there is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

from dqkv import errors
from dqkv.backend.base import DeviceState
from dqkv.problem import Arch
from dqkv.scheduler.cost import Estimate, Work
from dqkv.scheduler.lane import Lane
from dqkv.tensor import DType


def place(lanes: Sequence[Lane], work: Work, wanted: Arch, owner: str) -> tuple[Lane, Estimate]:
    """The device that is predicted to be done first among those that are OK, or else among those that start; and when.

    Raises ArchUnavailable when no device runs the arch and dtype, DeviceLost while all that could are down.
    """
    able = [(lane, arch) for lane in lanes if (arch := lane.arch_for(wanted, work.dtype)) is not None]
    if not able:
        _refuse(lanes, wanted, work.dtype)
    for state in (DeviceState.OK, DeviceState.STARTING):
        there = [(lane, lane.estimate(work, arch, owner)) for lane, arch in able if lane.state is state]
        if there:
            return min(there, key=lambda entry: finish_s(entry[1]))
    raise errors.DeviceLost(f"no device that could run this works: {_faults(lane for lane, _ in able)}")


def finish_s(estimate: Estimate) -> float:
    """Predicted seconds from now to the end of the work."""
    return estimate.queue_s + estimate.device_s


def _refuse(lanes: Sequence[Lane], wanted: Arch, dtype: DType) -> NoReturn:
    unknown = [lane for lane in lanes if lane.device.info is None]
    if unknown:
        raise errors.DeviceLost(f"what this server runs is not known yet: {_faults(unknown)}")
    infos = [lane.device.info for lane in lanes if lane.device.info is not None]
    there = "; ".join(f"{info.name} (arch {', '.join(info.archs)}; {', '.join(info.dtypes)})" for info in infos)
    if wanted is not Arch.AUTO and not any(wanted in info.archs for info in infos):
        raise errors.ArchUnavailable(
            f"arch is {wanted}, which no device of this server runs; there is {there or 'none'}", field="arch"
        )
    takers = "" if wanted is Arch.AUTO else f" that runs {wanted}"
    raise errors.ArchUnavailable(
        f"q is {dtype}, which no device{takers} of this server takes; there is {there or 'none'}", field="q"
    )


def _faults(lanes: Iterable[Lane]) -> str:
    return "; ".join(f"{lane.device.name}: {lane.fault or lane.state}" for lane in lanes)
