"""Who answers the calls: engines over HTTP, or any provider through litellm."""

from tracegrad.proxy.engine.upstreams.base import (
    Capabilities,
    QueueLimits,
    Upstream,
    UpstreamResponse,
    UpstreamTimeouts,
)
from tracegrad.proxy.engine.upstreams.pool import UpstreamPool

__all__ = [
    "Capabilities",
    "QueueLimits",
    "Upstream",
    "UpstreamPool",
    "UpstreamResponse",
    "UpstreamTimeouts",
]
