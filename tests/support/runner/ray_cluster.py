"""A Ray cluster of several hosts on this machine, without its dashboard."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

# Half a gibibyte, of which next to nothing is used.
_NODE: dict[str, Any] = {
    "num_cpus": 1,
    "num_gpus": 0,
    "object_store_memory": 80 << 20,
    "include_dashboard": False,
}
_ENVIRON = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_MEMORY_MONITOR": "1",  # other tests' memory is not its business
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    # Ray takes what is slow for dead: a head that does not answer for a minute, or an agent that
    # needs half a minute to start; and a driver whose host is dead ends its process, which is
    # pytest's. A host that was killed refuses the connection, and is noticed as before.
    "RAY_health_check_timeout_ms": "300000",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
    "RAY_gcs_server_request_timeout_seconds": "300",
}


@contextmanager
def ray_cluster(nodes: int, **node: Any) -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster` with a head and as many hosts as make `nodes`."""
    with (
        pytest.MonkeyPatch.context() as patch,
        # Its own would stay; a short one, for a socket's path may have 108 bytes.
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as temp,
    ):
        for name, value in _ENVIRON.items():
            patch.setenv(name, value)
        patch.setenv("RAY_TMPDIR", temp)
        import ray
        from ray.cluster_utils import Cluster

        cluster = Cluster()
        try:
            for _ in range(nodes):
                _add_node(cluster, {**_NODE, **node})
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def _add_node(cluster: Any, node: dict[str, Any]) -> None:
    """Ray gives it 30 seconds to start, whatever else this machine does."""
    for is_last in (False, False, True):
        try:
            cluster.add_node(**node)
            return
        except Exception as error:
            if is_last or "timed out during startup" not in str(error):
                raise
