"""The HTTP face: liveness, readiness with reasons, metrics, and what this server is; it moves no tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import FastAPI, Response
from fastapi_offline import FastAPIOffline
from pydantic import BaseModel, Field

from dqkv.metrics import CONTENT_TYPE
from dqkv.server.health import Failing
from dqkv.server.limits import LimitsInfo


class Live(BaseModel):
    """The process answers."""

    status: str = Field("live", description="always live: a server that is not does not answer")


class Check(BaseModel):
    """A check that fails."""

    check: str = Field(description="draining, devices or queue")
    reason: str = Field(description="what is wrong, for people")


class Ready(BaseModel):
    """Whether the server takes work."""

    ready: bool
    failing: list[Check] = Field(description="the checks that fail; none when ready")


class DeviceInfo(BaseModel):
    """One device."""

    name: str
    model: str = Field(description="what its maker calls it; empty for a CPU and before it was ready")
    state: str = Field(description="starting, ok or lost")
    fault: str = Field(description="why it takes no work; empty when it does")
    archs: list[str] = Field(description="the families of kernels it runs, best first")
    dtypes: list[str] = Field(description="element types of inputs that it takes")
    queue_s: float = Field(description="predicted seconds of work that wait or run")
    waiting: int = Field(description="requests that wait")
    running: int = Field(description="requests that run")


class Info(BaseModel):
    """What this server is and can do."""

    version: str
    grpc_port: int
    stream_port: int
    devices: list[DeviceInfo]
    limits: LimitsInfo
    notes: list[str] = Field(description="why a kind of device that one may expect is absent")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Where the answers come from; each is asked for every answer anew, on the loop."""

    failing: Callable[[], list[Failing]]
    info: Callable[[], Info]
    exposition: Callable[[], bytes]


def make_app(sources: Sources, *, version: str) -> FastAPI:
    """The application; needs no authentication, and says nothing about callers, tensors or regions' names."""
    # FastAPI's own page loads its script from another host, which a cluster of its own does not reach.
    app = FastAPIOffline(
        title="dqkv",
        version=version,
        description="Health, metrics and facts of an attention-gradient server. Gradients are served over gRPC.",
        docs_url="/docs",
        redoc_url=None,
        static_url="/docs/static",
        # It would ask a host elsewhere whether the description is valid.
        swagger_ui_parameters={"validatorUrl": None},
    )

    @app.get("/livez", tags=["health"])
    async def livez() -> Live:
        """Whether the process answers; restart it when it does not."""
        return Live(status="live")

    @app.get("/readyz", tags=["health"], responses={503: {"model": Ready, "description": "Not ready, with reasons"}})
    async def readyz(response: Response) -> Ready:
        """Whether the server takes work; send it none while it does not."""
        failing = sources.failing()
        response.status_code = 503 if failing else 200
        checks = [Check(check=item.check, reason=item.reason) for item in failing]
        return Ready(ready=not failing, failing=checks)

    @app.get("/metrics", tags=["metrics"], response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Every metric in the text format of Prometheus."""
        return Response(sources.exposition(), headers={"content-type": CONTENT_TYPE})

    @app.get("/v1/info", tags=["info"])
    async def info() -> Info:
        """Version, devices and limits."""
        return sources.info()

    return app
