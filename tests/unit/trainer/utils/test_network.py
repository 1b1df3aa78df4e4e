"""Ports that are free until somebody takes them, and whose certificates clients trust."""

from __future__ import annotations

import socket
import ssl
import subprocess
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tracegrad_trainer.utils import network
from tracegrad_trainer.utils.subprocesses import why_silent


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


def test_the_systems_certificates_are_trusted_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the SDK, which reads SSL_CERT_FILE, too."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    named = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *named]
    out = ["-out", str(certificate), "-keyout", str(key)]
    subprocess.run([*made, *out], check=True, capture_output=True)
    server = HTTPServer(("127.0.0.1", 0), Healthy)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url = f"https://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        assert "CERTIFICATE_VERIFY_FAILED" in str(why_silent(url, "/healthz"))
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert why_silent(url, "/healthz") is None
        assert why_silent(url, "/elsewhere") == "it answers 404"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 404)
        self.end_headers()

    def log_message(self, *said: object) -> None:
        pass
