"""Who reaches a real vLLM's routes that replace its weights: this user alone, and no TCP port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.engines.vllm_server import VllmServer
from support.system.shadowing_modules import modules_run
from tracegrad.private_files import is_private
from tracegrad.urls import unix_socket
from tracegrad_trainer.utils.network import http_client

pytestmark = pytest.mark.vllm
NOBODY = 65534
# Becomes another user, then calls; as whom, says the second argument.
CONNECT = """
import os, socket, sys
path, user = sys.argv[1], int(sys.argv[2])
if user:
    os.setgroups([]); os.setgid(user); os.setuid(user)
with socket.socket(socket.AF_UNIX) as client:
    try:
        client.connect(path)
    except PermissionError:
        sys.exit("permission denied")
"""


def socket_of(server: VllmServer) -> Path:
    path = unix_socket(server.url)
    assert path is not None
    return Path(path)


def test_it_answers_on_no_tcp_port(vllm_server: VllmServer) -> None:
    """Gloo listens for other processes of its groups, on loopback; that is no way in."""
    assert vllm_server.process.pid is not None
    server = psutil.Process(vllm_server.process.pid)
    family = [server, *server.children(recursive=True)]
    listening = {
        each.laddr
        for process in family
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN or not each.raddr
    }
    assert {address.ip for address in listening} <= {"127.0.0.1", "::1"}
    for address in listening:
        with socket.create_connection(address, timeout=10) as caller:
            caller.sendall(b"POST /pause HTTP/1.1\r\nhost: localhost\r\n\r\n")
            caller.shutdown(socket.SHUT_WR)
            caller.settimeout(1)
            try:
                said = caller.recv(100)
            except (TimeoutError, ConnectionResetError):
                said = b""
            assert b"HTTP" not in said
    with http_client(vllm_server.url, timeout_s=10) as client:
        assert client.get("/is_paused").json() == {"is_paused": False}


def test_its_folder_is_ours_alone(vllm_server: VllmServer) -> None:
    path = socket_of(vllm_server)
    assert path.is_socket()
    assert is_private(path.parent)


def test_another_user_cannot_connect(vllm_server: VllmServer) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    command = [sys.executable, "-S", "-c", CONNECT, str(socket_of(vllm_server))]
    for user, words in ((0, ""), (NOBODY, "permission denied\n")):
        done = subprocess.run([*command, str(user)], capture_output=True, text=True, check=False)
        assert done.stderr == words


def test_no_module_of_the_working_directory_ran_in_it(vllm_server: VllmServer) -> None:
    assert modules_run(vllm_server.planted) == ""
