"""What one caller may ask for: said once, and told over HTTP and over gRPC."""

from __future__ import annotations

from pydantic import BaseModel, Field

from dqkv.problem import HEAD_DIM_LIMIT
from dqkv.settings import Settings
from dqkv.v1 import gradient_pb2 as pb


class LimitsInfo(BaseModel):
    """What one caller may ask for."""

    message_bytes: int = Field(description="largest unary message, both ways")
    inline_bytes: int = Field(description="inline bytes above which a request should be streamed")
    request_bytes: int = Field(description="largest request, inputs and gradients together")
    staging_bytes: int = Field(description="memory of all requests in flight that do not lie in regions")
    queue_s: float = Field(description="predicted seconds of work that a queue takes on")
    regions: int = Field(description="regions of one caller")
    lease_s: float = Field(description="longest lease in seconds")
    head_dim: int
    stream_idle_s: float = Field(description="seconds without a frame after which a stream is ended")

    @staticmethod
    def of(settings: Settings) -> LimitsInfo:
        """The limits of a server with these settings."""
        return LimitsInfo(
            message_bytes=settings.message_bytes,
            inline_bytes=settings.inline_bytes,
            request_bytes=settings.request_bytes,
            staging_bytes=settings.staging_bytes,
            queue_s=settings.queue_seconds,
            regions=settings.regions_per_caller,
            lease_s=settings.lease_limit_s,
            head_dim=HEAD_DIM_LIMIT,
            stream_idle_s=settings.stream_idle_s,
        )

    def message(self) -> pb.Limits:
        """Those that the wire has a field for, which has the same name."""
        return pb.Limits(**{field.name: getattr(self, field.name) for field in pb.Limits.DESCRIPTOR.fields})
