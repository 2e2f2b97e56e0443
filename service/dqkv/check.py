"""Whether a running server's gradients are right: every trial by every transport, held against the oracle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from dqkv import errors, oracle
from dqkv.courier import Answer, Courier, Transport
from dqkv.trials import Drawn, Trial, draw


class Outcome(StrEnum):
    """What came of a trial; SKIPPED is what this server, or its distance, rules out."""

    RIGHT = "right"
    WRONG = "wrong"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One trial by one transport: ratios are errors as parts of their budgets, by gradient; round_trip_s seconds."""

    trial: Trial
    transport: Transport
    outcome: Outcome
    says: str = ""
    ratios: dict[str, float] = field(default_factory=dict)
    round_trip_s: float = 0.0

    @property
    def is_bad(self) -> bool:
        """Whether an operator must not trust this server."""
        return self.outcome in (Outcome.WRONG, Outcome.FAILED)


def check(courier: Courier, trials: Sequence[Trial]) -> Iterator[Verdict]:
    """Sends every trial by every transport. Raises TransportError only when the server cannot be asked at all."""
    devices = courier.client.capabilities().devices
    dtypes = {dtype for device in devices for dtype in device.dtypes}
    for trial in trials:
        if trial.dtype not in dtypes:
            for transport in Transport:
                yield _verdict(trial, transport, Outcome.SKIPPED, f"no device of this server takes {trial.dtype}")
            continue
        drawn = draw(trial)
        for transport in Transport:
            yield _try(courier, trial, drawn, transport)


def _try(courier: Courier, trial: Trial, drawn: Drawn, transport: Transport) -> Verdict:
    try:
        load = courier.load(drawn.problem, transport)
    except errors.RegionInvalid as error:
        return _verdict(trial, transport, Outcome.SKIPPED, error.message)
    except errors.DqkvError as error:
        return _verdict(trial, transport, Outcome.FAILED, f"{error.reason}: {error.message}")
    with load:
        try:
            answer = load.send()
        except errors.DqkvError as error:
            return _verdict(trial, transport, Outcome.FAILED, f"{error.reason}: {error.message}")
        return judge(trial, drawn, transport, answer)


def judge(trial: Trial, drawn: Drawn, transport: Transport, answer: Answer) -> Verdict:
    """Holds an answer against what it must be."""
    roles = {role: getattr(answer.gradients, role) for role in drawn.expected.gradients}
    wrong = oracle.complaints(drawn.expected, roles)
    return Verdict(
        trial=trial,
        transport=transport,
        outcome=Outcome.WRONG if wrong else Outcome.RIGHT,
        says="; ".join(wrong),
        ratios=oracle.ratios(drawn.expected, roles),
        round_trip_s=answer.round_trip_s,
    )


def _verdict(trial: Trial, transport: Transport, outcome: Outcome, says: str) -> Verdict:
    return Verdict(trial=trial, transport=transport, outcome=outcome, says=says)
