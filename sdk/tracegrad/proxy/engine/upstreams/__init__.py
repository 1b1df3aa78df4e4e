"""Who answers the calls: engines over HTTP, or any provider through litellm."""

from tracegrad.proxy.engine.upstreams.base import Capabilities, Incoming, Queue, Timeouts, Upstream
from tracegrad.proxy.engine.upstreams.pool import Upstreams

__all__ = ["Capabilities", "Incoming", "Queue", "Timeouts", "Upstream", "Upstreams"]
