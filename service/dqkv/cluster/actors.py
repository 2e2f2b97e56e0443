"""The front of a Ray cluster: `dqkv ray` makes an actor of each worker, and serves with them as its devices."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions
import ray.util
import structlog

from dqkv.cluster.device import Post, WorkerDevice
from dqkv.cluster.worker import Worker
from dqkv.server import app, logs
from dqkv.server.core import OnRestart
from dqkv.settings import Settings

TOKEN_NBYTES = 32
AGAIN_S = 0.5
"""Pause before an actor that Ray is restarting is asked again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A cluster ("host:port" of its head, or "auto" on one of its nodes), and the workers that it shall run.

    cpus are the cores of a worker, and its threads. gpus is 1 for workers that compute on a GPU, a whole one each, and
    0 for those that compute on the CPU.
    """

    address: str
    workers: int
    cpus: int
    gpus: int


def run(settings: Settings, plan: Plan) -> int:
    """Serves until SIGTERM or SIGINT with the plan's workers as devices, and returns the exit code.

    It is 0 after a drain, and 1 when the cluster cannot be reached or the front cannot start.
    """
    logs.configure(level=settings.log_level, form=settings.log_format)
    try:
        ray.init(address=plan.address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        structlog.get_logger("dqkv.server").error("cannot start", reason=f"no Ray cluster at {plan.address}: {error}")
        return 1
    token = secrets.token_urlsafe(TOKEN_NBYTES)

    def workers(on_restart: OnRestart) -> list[WorkerDevice]:
        return [
            WorkerDevice(Post(name=f"ray:{index}", token=token), ActorSeat(plan, token), on_restart=on_restart)
            for index in range(plan.workers)
        ]

    try:
        return app.run(settings, workers)
    finally:
        ray.shutdown()


class ActorSeat:
    """A `Seat` that is a Ray actor: Ray finds it a node, and starts it again, there or elsewhere, when it dies."""

    def __init__(self, plan: Plan, token: str) -> None:
        self._plan = plan
        self._token = token
        self._actor: Any = None

    async def address(self) -> str:
        """See Seat. Raises RayError when the worker cannot start, or will not be started again."""
        if self._actor is None:
            self._actor = self._create()
        while True:
            try:
                return str(await self._actor.address.remote())
            except ray.exceptions.ActorUnavailableError:
                await asyncio.sleep(AGAIN_S)

    async def restart(self) -> None:
        """See Seat."""
        if self._actor is not None:
            ray.kill(self._actor, no_restart=False)

    async def end(self) -> None:
        """See Seat."""
        if self._actor is not None:
            try:
                await self._actor.stop.remote()
            finally:
                ray.kill(self._actor)

    def _create(self) -> Any:
        plan = self._plan
        given = {
            "cpu_devices": 0 if plan.gpus else 1,
            # The only one that Ray lets the actor see.
            "gpus": "0" if plan.gpus else "none",
            "cpu_threads": plan.cpus,
            "tokens": f"front:gradient:{self._token}",
        }
        return (
            ray.remote(_NodeWorker)
            .options(
                num_cpus=plan.cpus,
                num_gpus=plan.gpus,
                scheduling_strategy="SPREAD",
                max_restarts=-1,
                # A worker's calls are about the worker that was there: they are asked anew of the next one.
                max_task_retries=0,
            )
            .remote(given)
        )


class _NodeWorker(Worker):
    """A worker at the address that Ray knows its node by."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(ray.util.get_node_ip_address(), given)
