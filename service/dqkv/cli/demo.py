"""`dqkv demo`: starts a server, sends it three problems by three transports, and shows what came back."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dqkv import errors
from dqkv.check import Outcome, Verdict, judge
from dqkv.cli.own_server import NotServing, OwnServer
from dqkv.client.capabilities import Capabilities
from dqkv.courier import Answer, Courier, Door, Transport
from dqkv.problem import Options, Window
from dqkv.trials import Drawn, Trial, draw

CAUSAL = Options(window=Window(right=0))
REQUESTS = (
    (
        Transport.UNARY,
        Trial(name="dense", shows="2 sequences of 256 rows, 8 heads over 2 key heads", seqlen_q=256, seqlen_k=256,
              num_heads_q=8, num_heads_kv=2, options=CAUSAL),
    ),
    (
        Transport.STREAM,
        Trial(name="packed", shows="sequences of 300, 17 and 195 rows in one tensor", seqlens_q=(300, 17, 195),
              seqlens_k=(300, 17, 195), num_heads_q=8, num_heads_kv=2, options=CAUSAL),
    ),
    (
        Transport.REGION,
        Trial(name="shared", shows="512 rows that never leave this machine's memory", batch_size=1,
              seqlen_q=512, seqlen_k=512, head_dim=128, head_dim_v=128, options=CAUSAL),
    ),
)  # fmt: skip


def run() -> int:
    """Prints two tables; 0 when every gradient is within its budget, else 1."""
    console = Console()
    try:
        with OwnServer() as at, Courier(Door(address=at.grpc)) as courier:
            _introduce(console, at.grpc, courier.client.capabilities())
            return _show(console, courier)
    except (NotServing, errors.DqkvError) as error:
        console.print(Text(str(error), style="bold red"))
        return 1


def _introduce(console: Console, address: str, capabilities: Capabilities) -> None:
    devices = ", ".join(f"{device.name} ({', '.join(device.archs)})" for device in capabilities.devices)
    console.print(f"A server of dqkv {capabilities.version} listens at {address} and computes on {devices}.")
    for note in capabilities.notes:
        console.print(note, markup=False)


def _show(console: Console, courier: Courier) -> int:
    near = Table("request", "by", title="largest error against float64 / error it may have", box=box.SIMPLE)
    for name in ("dq", "dk", "dv"):
        near.add_column(name, justify="right")
    near.add_column("verdict")
    spent = Table("request", title="where the time went, in milliseconds", box=box.SIMPLE)
    for name in ("bytes", "queued", "transfer", "device", "server total", "round trip"):
        spent.add_column(name, justify="right")
    good = True
    for transport, trial in REQUESTS:
        console.print(f"{trial.name}, by {transport}: {trial.shows}")
        drawn = draw(trial)
        with courier.load(drawn.problem, transport) as load:
            load.send()  # the first of its size touches fresh memory on both sides
            answer = load.send()
            verdict = judge(trial, drawn, transport, answer)
        good = good and verdict.outcome is Outcome.RIGHT
        style = "green" if verdict.outcome is Outcome.RIGHT else "bold red"
        said = Text(verdict.says or str(verdict.outcome), style)
        near.add_row(trial.name, str(transport), *_errors(drawn, verdict), said)
        spent.add_row(trial.name, *_times(drawn, answer))
    console.print(near)
    console.print(spent)
    return 0 if good else 1


def _errors(drawn: Drawn, verdict: Verdict) -> list[str]:
    budget = drawn.expected.budget
    return [f"{ratio * budget[role]:.2g}/{budget[role]:.2g}" for role, ratio in verdict.ratios.items()]


def _times(drawn: Drawn, answer: Answer) -> list[str]:
    tensors = [*drawn.problem.tensors.values(), *drawn.problem.gradients.values()]
    report = answer.gradients.report
    parts = (report.queued_s, report.transfer_s, report.device_s, report.total_s, answer.round_trip_s)
    return [f"{sum(tensor.nbytes for tensor in tensors):,}", *(f"{part * 1e3:.1f}" for part in parts)]
