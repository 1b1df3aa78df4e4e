"""A real vLLM that dies: one clear line, and nothing of it stays."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support.engines.vllm_server import tiny_settings
from support.proxy.servers import eventually
from tracegrad_trainer.inference.control_routes import EngineLostError
from tracegrad_trainer.inference.vllm_process import VllmProcess
from tracegrad_trainer.inference.weight_push import WeightPusher
from tracegrad_trainer.utils.subprocesses import ChildError

pytestmark = pytest.mark.vllm


def members(session: int) -> list[str]:
    """Command lines of the live processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if fields[3] == str(session) and fields[0] not in "ZX":
                found.append((entry / "cmdline").read_text())
        except (OSError, IndexError):
            continue
    return found


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("psm_*")}


def test_a_killed_server_is_one_clear_line_and_takes_its_engine_along(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    before = shared_memory()
    with VllmProcess(tiny_settings(tiny_model_dir, tmp_path / "vllm.log")) as process:
        process.wait_healthy(timeout=240)
        assert process.pid is not None
        assert len(members(process.pid)) >= 2, "a server and its engine"
        os.kill(process.pid, signal.SIGKILL)
        eventually(lambda: members(process.pid) == [])
        with pytest.raises(ChildError, match=r"^vllm \(pid \d+\) was killed by SIGKILL \(log: "):
            process.check()
        with (
            WeightPusher(process.url, checkpoint=tiny_model_dir) as pusher,
            pytest.raises(EngineLostError, match="does not answer /start_weight_update"),
        ):
            pusher.push(1, [])
    assert shared_memory() <= before


@pytest.mark.slow
def test_a_model_that_cannot_be_served_is_one_clear_line(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    settings = tiny_settings(tiny_model_dir, tmp_path / "vllm.log")
    settings = settings.model_copy(update={"kv_cache_memory_bytes": 1 << 50})
    with VllmProcess(settings) as process, pytest.raises(ChildError) as caught:
        process.wait_healthy(timeout=240)
    message = str(caught.value)
    assert "ValueError: Available memory" in message
    assert message.endswith(f"(log: {tmp_path / 'vllm.log'})")
    assert "\n" not in message
