"""The routes of vLLM that a weight push and a sleep drive. Those of our proxy: `proxy_control`.

No torch here: the process that wakes vLLM when the trainer is gone (`wake_guard`) needs them too.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from tracegrad_trainer.utils.network import http_client

SleepLevel = Literal[1, 2]
MemoryTag = Literal["weights", "kv_cache"]
# For an answer that takes no work. Who restarts the proxy holds its port open: a question waits.
LOOK_TIMEOUT_S = 10.0


class PushError(RuntimeError):
    """The new weights are not served; those from before are. One clear line."""


class ProxyGoneError(PushError):
    """The proxy's port refuses connections, or its name is nobody's: it serves nobody."""


class EngineLostError(PushError):
    """vLLM does not serve any more, or was left paused with unusable weights: restart it."""


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """`version`: what the engine serves; `paths`: the files that it can be loaded from again."""

    version: int
    paths: tuple[str, ...]

    @property
    def number(self) -> int:
        """What is sampled by it is of that version. Before a first push it is the model's folder,
        from which a run's version 0 is."""
        return max(0, self.version)


class Peer:
    """A server that we drive. One client is kept, because making one takes longer than most
    calls."""

    def __init__(self, name: str, url: str, timeout_s: float, key: str | None = None) -> None:
        self._name = name
        self.url = url
        self._client = http_client(url, timeout_s=timeout_s, key=key)

    def post(self, path: str, **request: Any) -> None:
        """EngineLostError if nobody answers, PushError with the server's words if it refuses."""
        self._ask("POST", path, **request)

    def get(self, path: str, **request: Any) -> dict[str, Any]:
        """A JSON object; an empty one for any other answer. Raises as `post`."""
        try:
            answer = self._ask("GET", path, **request).json()
        except ValueError:
            return {}
        return answer if isinstance(answer, dict) else {}

    def _ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            response = self._client.request(method, path, **request)
        except httpx.TransportError as error:
            words = f"{self._name} at {self.url} does not answer {path}: {error!r}"
            raise self._error(error)(words) from error
        if response.is_error:
            raise PushError(f"{self._name} refused {path}: {_reason(response)}")
        return response

    def _error(self, error: httpx.TransportError) -> type[PushError]:
        if self._name == "vLLM":
            return EngineLostError
        return ProxyGoneError if _is_refused(error) else PushError

    def close(self) -> None:
        self._client.close()


class VllmControl:
    """vLLM 0.32's development routes. Each raises PushError, EngineLostError."""

    # Whether the engine can be loaded by others from the files of what it serves.
    sees_files = True

    def __init__(self, url: str, timeout_s: float) -> None:
        self._peer = Peer("vLLM", url, timeout_s)

    def pause(self, *, keep_cache: bool = False) -> None:
        # keep: running requests are frozen, not aborted; with the cache cleared they are
        # computed again under the new weights when they go on.
        clear = "false" if keep_cache else "true"
        self._peer.post("/pause", params={"mode": "keep", "clear_cache": clear})

    def resume(self) -> None:
        self._peer.post("/resume")

    def sleep(self, level: SleepLevel) -> None:
        """Pauses as `pause` does, and gives up the memory of weights and cache: level 1 keeps the
        weights in host memory, 2 nowhere. An engine that sleeps already goes on sleeping, with
        what it had kept."""
        # The default, abort, would end every running request.
        self._peer.post("/sleep", params={"level": level, "mode": "keep"})

    def wake(self, tag: MemoryTag) -> None:
        """Takes one kind of memory back. With the last of them vLLM runs again, by itself: also
        one that was only paused, so that this must not be asked of an engine that is awake and
        has no usable weights."""
        self._peer.post("/wake_up", params={"tags": tag})

    def connect(self) -> None:
        """Whatever a load needs that takes time; of an engine that runs. Files need nothing."""

    def load(self, served: ServedWeights) -> None:
        """Of an engine that is paused. If it fails, the engine has no usable weights."""
        self._start()
        self._send(served)
        self.load_staged(served)

    def _start(self) -> None:
        try:
            self._peer.post("/start_weight_update")
        except EngineLostError:
            raise  # one that hangs would be waited for three times
        except PushError:
            # A pusher that was killed, or a finish that failed, leaves the update open, and vLLM
            # takes no second one. An update of nothing fails, which ends it.
            with contextlib.suppress(PushError):
                self._update({"paths": []})
            self._peer.post("/start_weight_update")

    def stage(self, served: ServedWeights, parts: Sequence[Sequence[str]]) -> None:
        """Has an engine that runs make the weights ready, beside those that it serves, some names
        at a time, with forward passes between them. If it fails, those are still served. What the
        engine cannot make ready it leaves to `load_staged`."""
        self._start()
        for number, names in enumerate(parts, start=1):
            info = {"names": names, "part": number, "parts": len(parts)}
            self._update({"paths": list(served.paths), **info})

    def forget_staged(self) -> None:
        """What was made ready and is not wanted: its memory is free again."""
        # An update of nothing fails, which ends it; where none is open it is refused.
        with contextlib.suppress(PushError):
            self._update({"paths": []})

    def load_staged(self, served: ServedWeights) -> None:
        """As `load`, of what was staged."""
        self._finish(str(served.version))

    def close(self) -> None:
        self._peer.close()

    def weight_version(self) -> str:
        """Set by each `load`; an engine that was started since has that of its start."""
        return str(self._peer.get("/weight_info").get("weight_version")).partition("+")[0]

    def weight_version_soon(self) -> str | None:
        """As `weight_version`; None where it does not say, or not soon."""
        said = self._said_soon()
        return None if said is None else said.partition("+")[0]

    def _said_soon(self) -> str | None:
        """`7`, or `7+8` with version 8 beside it as a candidate."""
        try:
            found = self._peer.get("/weight_info", timeout=LOOK_TIMEOUT_S).get("weight_version")
        except PushError:
            return None
        return found if isinstance(found, str) else None

    def world_size(self) -> int:
        """Workers, with those of data parallelism."""
        size = self._peer.get("/get_world_size").get("world_size")
        if not isinstance(size, int):
            raise PushError("no world_size at /get_world_size")
        return size

    def join_group(self, info: dict[str, Any]) -> None:
        self._peer.post("/init_weight_transfer_engine", json={"init_info": info})

    def _send(self, served: ServedWeights) -> None:
        self._update({"paths": list(served.paths)})

    def _update(self, info: dict[str, Any]) -> None:
        self._peer.post("/update_weights", json={"update_info": info})

    def _finish(self, said: str) -> None:
        self._peer.post("/finish_weight_update", json={"weight_version": said})


class CandidateControl(VllmControl):
    """Of the second adapter of an engine, which has a name of its own in calls: as of an engine
    that serves nothing else. What the first one is stays as it is."""

    def load_staged(self, served: ServedWeights) -> None:
        self._finish(f"{self.weight_version()}+{served.version}")

    def weight_version_soon(self) -> str | None:
        """Empty: a load of the first adapter, or a start, has replaced it since."""
        said = self._said_soon()
        return None if said is None else said.partition("+")[2]

    def _send(self, served: ServedWeights) -> None:
        self._update({"paths": list(served.paths), "candidate": True})


def _is_refused(error: BaseException) -> bool:
    """Whether nobody listens there, or the name is nobody's. Not where this host has no descriptor
    left, or its resolver does not answer: the server may be well."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ConnectionRefusedError):
            return True
        if isinstance(seen, socket.gaierror):
            # No name, or one without an address, which not every C library distinguishes.
            return seen.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", None))
        seen = seen.__cause__ or seen.__context__
    return False


def _reason(response: httpx.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        body = response.text
    if isinstance(body, dict):
        body = body.get("error", body.get("detail", body))
    if isinstance(body, dict):
        body = body.get("message", body)
    return f"{response.status_code} {' '.join(str(body).split())[:300]}"
