"""deploy/haproxy.cfg in Debian's HAProxy, before servers on loopback."""

from __future__ import annotations

import re
import signal
import socketserver
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from support.deploy.compose import seconds
from support.deploy.haproxy import CONFIG, check, haproxy, haproxy_process
from support.proxy.servers import eventually, serving
from tracegrad.protocol import ROLLOUT_HEADER
from tracegrad.proxy.auth import middleware
from tracegrad.proxy.config import ProxySettings
from tracegrad_trainer.utils.network import find_free_port

TEXT = CONFIG.read_text(encoding="utf-8")
ROLLOUTS = [f"rollout-{n}" for n in range(24)]
# Each call on a connection of its own.
CLIENT = httpx.Client(
    headers={"connection": "close"},
    limits=httpx.Limits(max_keepalive_connections=0),
    timeout=60,
    verify=False,
)


class Answering:
    """A server that says which one it is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.left = 0  # whose client hung up
        self.next_chunk = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        if request.url.path == "/healthz":
            await Response()(scope, receive, send)
            return
        answer = await self._answer(request)
        await answer(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        await request.body()
        if request.url.path == "/slow":
            message = await request.receive()
            self.left += message["type"] == "http.disconnect"
        if request.url.path == "/stream":
            return StreamingResponse(self._chunks())
        return JSONResponse({"name": self.name})

    def _chunks(self) -> Iterator[bytes]:
        yield b"first"
        self.next_chunk.wait(30)
        yield b"second"


class HangingUp(socketserver.ThreadingTCPServer):
    """Closes the connection over each call, as a proxy does that is killed."""

    calls = 0
    daemon_threads = True


class HangUp(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        if self.request.recv(65536).startswith(b"GET /healthz"):
            self.request.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        else:
            assert isinstance(self.server, HangingUp)
            self.server.calls += 1


@pytest.fixture
def pair() -> list[Answering]:
    return [Answering("0"), Answering("1")]


@pytest.fixture
def address(pair: list[Answering], tmp_path: Path) -> Iterator[str]:
    """Before both of `pair`."""
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(each, lifespan="off")) for each in pair]
        yield stack.enter_context(haproxy(urls, tmp_path / "haproxy.log"))


def answered_by(address: str, path: str = "/v1/models", **headers: str) -> str:
    answer = CLIENT.get(f"{address}{path}", headers=headers)
    assert answer.status_code == 200, answer.text
    name: str = answer.json()["name"]
    return name


def bearer(rollout: str) -> dict[str, str]:
    return {"authorization": f"Bearer tg-{rollout}"}


@pytest.mark.parametrize("proxies", [1, 2, 16])
def test_haproxy_takes_the_file(proxies: int) -> None:
    done = check([f"127.0.0.{n + 1}:4141" for n in range(proxies)])
    assert done.returncode == 0, done.stdout
    assert "[ALERT]" not in done.stdout
    assert "[WARNING]" not in done.stdout, done.stdout


def test_haproxy_takes_both_families(tmp_path: Path) -> None:
    with haproxy(["http://127.0.0.1:9"], tmp_path / "log", host="::") as address:
        port = address.rpartition(":")[2]
        for host in ("127.0.0.1", "[::1]"):
            assert CLIENT.get(f"http://{host}:{port}/haproxy/healthz").status_code in (200, 503)


def test_haproxy_starts_before_a_proxy_has_an_address() -> None:
    done = check(["proxy-0.invalid:4141", "proxy-1.invalid:4141"])
    assert done.returncode == 0, done.stdout


def test_haproxy_refuses_a_wrong_file(tmp_path: Path) -> None:
    """The check before this one can fail."""
    wrong = tmp_path / "haproxy.cfg"
    wrong.write_text(TEXT.replace("hash-type consistent", "hash-type steady"))
    assert check(["127.0.0.1:4141"], wrong).returncode != 0


def test_a_rollouts_calls_go_to_one_proxy(address: str) -> None:
    homes = {each: answered_by(address, **bearer(each)) for each in ROLLOUTS}
    assert set(homes.values()) == {"0", "1"}
    for _ in range(2):
        assert {each: answered_by(address, **bearer(each)) for each in ROLLOUTS} == homes


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/rollouts/{}/v1/models", {}),
        ("/v1/models", {"x-tracegrad-rollout": "{}"}),
        ("/v1/models", {"x-tracegrad-key": "tg-{}"}),
        ("/v1/models", {"authorization": "Bearer tg-{}"}),
        ("/v1/models", {"authorization": "tg-{}"}),
        ("/v1/models", {"x-api-key": "tg-{}"}),
        ("/v1/models", {"x-goog-api-key": "tg-{}"}),
        ("/v1beta/models?key=tg-{}", {}),
        # What names the rollout counts before a key that all rollouts share.
        ("/rollouts/{}/v1/models", {"authorization": "Bearer shared"}),
        ("/v1/models", {"x-tracegrad-rollout": "{}", "authorization": "Bearer shared"}),
        ("/v1/models", {"x-tracegrad-key": "tg-{}", "authorization": "Bearer shared"}),
    ],
)
def test_a_rollout_is_known_wherever_it_is_named(
    address: str, path: str, headers: dict[str, str]
) -> None:
    def ask(rollout: str) -> str:
        named = {name: value.format(rollout) for name, value in headers.items()}
        return answered_by(address, path.format(rollout), **named)

    homes = {each: ask(each) for each in ROLLOUTS}
    assert set(homes.values()) == {"0", "1"}
    assert {each: ask(each) for each in ROLLOUTS} == homes


def test_calls_without_a_key_go_by_the_clients_address(address: str) -> None:
    assert len({answered_by(address) for _ in range(20)}) == 1


def test_every_place_of_a_key_is_read() -> None:
    read = set(re.findall(r"req\.fhdr\(([\w-]+)\)", TEXT))
    places = {name.decode() for name in middleware._HEADERS}
    assert read == {*places, ROLLOUT_HEADER}
    assert f"url_param({middleware._QUERY})" in TEXT


def test_when_a_proxy_ends_only_its_rollouts_move(pair: list[Answering], tmp_path: Path) -> None:
    with serving(pair[0], lifespan="off") as stays, ExitStack() as stack:
        ends = stack.enter_context(serving(pair[1], lifespan="off"))
        with haproxy([stays, ends], tmp_path / "haproxy.log") as address:
            before = {each: answered_by(address, **bearer(each)) for each in ROLLOUTS}
            assert set(before.values()) == {"0", "1"}
            stack.close()
            # At once: no call fails before HAProxy's own checks have found out.
            assert {answered_by(address, **bearer(each)) for each in ROLLOUTS} == {"0"}
            answers = [httpx.get(f"{address}/haproxy/healthz").status_code for _ in range(2)]
    assert answers == [200, 200]


def test_a_call_that_was_sent_is_not_sent_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(HangingUp(("127.0.0.1", 0), HangUp)) for _ in range(2)]
        for each in servers:
            threading.Thread(target=each.serve_forever, daemon=True).start()
            stack.callback(each.shutdown)
        urls = [f"http://127.0.0.1:{each.server_address[1]}" for each in servers]
        address = stack.enter_context(haproxy(urls, tmp_path / "haproxy.log"))
        answer = httpx.post(f"{address}/v1/x", headers=bearer("r"), json={}, timeout=30)
    assert answer.status_code == 502
    assert sum(each.calls for each in servers) == 1


def test_without_a_proxy_clients_are_told_to_come_again(tmp_path: Path) -> None:
    closed = f"http://127.0.0.1:{find_free_port()}"
    with haproxy([closed], tmp_path / "haproxy.log") as address:
        answer = httpx.get(f"{address}/v1/models", timeout=60)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert answer.json()["error"]["code"] == "no_proxy"


def test_each_chunk_goes_on_at_once(address: str, pair: list[Answering]) -> None:
    with httpx.stream("GET", f"{address}/stream", headers=bearer("r"), timeout=30) as answer:
        chunks = answer.iter_raw()
        assert next(chunks) == b"first"
        for each in pair:
            each.next_chunk.set()
        assert next(chunks) == b"second"


@pytest.mark.parametrize("drain", ["60s", "1s"])
def test_calls_may_go_on_when_haproxy_is_to_end(
    pair: list[Answering], tmp_path: Path, drain: str
) -> None:
    log = tmp_path / "haproxy.log"
    with ExitStack() as stack:
        url = stack.enter_context(serving(pair[0], lifespan="off"))
        address, process = stack.enter_context(haproxy_process([url], log, drain))
        answer = stack.enter_context(CLIENT.stream("GET", f"{address}/stream"))
        chunks = answer.iter_raw()
        assert next(chunks) == b"first"
        process.send_signal(signal.SIGUSR1)
        if drain == "60s":
            eventually(lambda: refuses(address))
            pair[0].next_chunk.set()
            assert next(chunks) == b"second"
        else:
            with pytest.raises(httpx.TransportError):
                next(chunks)
            pair[0].next_chunk.set()
        process.wait(30)


def refuses(address: str) -> bool:
    try:
        CLIENT.get(f"{address}/v1/models")
    except httpx.TransportError:
        return True
    return False


def test_a_proxy_is_told_that_its_client_hung_up(address: str, pair: list[Answering]) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(f"{address}/slow", headers=bearer("r"), timeout=0.5)
    eventually(lambda: pair[0].left + pair[1].left == 1, 30)


def test_what_the_proxy_takes_gets_through(address: str) -> None:
    limits = ProxySettings.model_fields
    long = limits["max_head_kib"].default * 1024 - 2048
    assert answered_by(address, **bearer("r"), **{"x-long": "x" * long})
    many = {f"x-{n}": "1" for n in range(limits["max_headers"].default - 10)}
    assert answered_by(address, **bearer("r"), **many)


def test_no_time_out_is_shorter_than_the_proxys_longest_wait() -> None:
    fields = ProxySettings.model_fields
    longest = fields["max_wait_s"].default + fields["read_timeout_s"].default
    for side in ("client", "server"):
        [limit] = re.findall(rf"^ *timeout {side} (\S+)$", TEXT, re.M)
        assert seconds(limit) > longest
    [head] = re.findall(r"^ *timeout http-request (\S+)$", TEXT, re.M)
    assert seconds(head) >= fields["head_timeout_s"].default
