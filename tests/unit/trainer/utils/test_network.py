"""Ports that are free until somebody takes them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tracegrad_trainer.utils import network


def test_a_free_port_is_none_that_the_kernel_hands_out() -> None:
    ports = {network.find_free_port() for _ in range(50)}
    assert len(ports) > 45, "two that look at once take different ones"
    assert max(ports) < network._first_ephemeral_port()
    assert min(ports) >= network._FIRST_PORT
    port = ports.pop()
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_port_in_use_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = network.find_free_port()
    with socket.create_server(("127.0.0.1", taken)):
        monkeypatch.setattr(network, "_FIRST_PORT", taken)
        monkeypatch.setattr(network, "_first_ephemeral_port", lambda: taken + 1)
        assert network.find_free_port() != taken


@pytest.mark.parametrize("content", ["", "a b", "1024 65535", None])
def test_without_room_below_the_kernels_any_port_will_do(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "range"
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr(network, "Path", lambda _: file)
    assert network._first_ephemeral_port() in (49152, 1 << 16)
