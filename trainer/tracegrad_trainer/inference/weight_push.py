"""New weights into a serving vLLM, without an error for anyone who is sampling.

Calls wait at the proxy; the engine is frozen with its running requests, takes the weights, drops
the cache that the old weights made, and goes on. If anything fails, the weights that were served
before are put back, under their old version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from tracegrad_trainer.inference.weight_files import WeightFiles
from tracegrad_trainer.utils.network import http_client
from tracegrad_trainer.utils.stopwatch import Stopwatch


class PushError(RuntimeError):
    """The new weights are not served; those from before are. One clear line."""


class EngineLostError(PushError):
    """vLLM does not serve any more, or was left paused with unusable weights: restart it."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """Seconds by stage, in order: write, hold, pause, load, set_version, resume, verify,
    release."""

    version: int
    seconds: dict[str, float]


class WeightPusher:
    """Pushes from the one process that holds whole tensors (the trainer's rank 0).

    `version` and `checkpoint` are what is served now: what a failed first push returns to.
    `directory` is where the weight files go (see `WeightFiles`). Without `proxy_url`, only the
    engine's own queue holds calls; `proxy_key` is the proxy's control key, or its admin key.
    """

    def __init__(
        self,
        vllm_url: str,
        proxy_url: str | None = None,
        *,
        proxy_key: str | None = None,
        version: int = 0,
        checkpoint: Path | None = None,
        directory: Path | None = None,
        drain_s: float = 2.0,
        hold_ttl_s: float = 120.0,
        timeout_s: float = 300.0,
    ) -> None:
        self.version = version
        self._served = sorted(checkpoint.glob("*.safetensors")) if checkpoint else []
        if checkpoint and not self._served:
            raise ValueError(f"checkpoint: no *.safetensors in {checkpoint}")
        self._files = WeightFiles(directory)
        self._vllm = _Peer("vLLM", vllm_url, timeout_s)
        self._proxy = _Peer("the proxy", proxy_url, timeout_s, proxy_key) if proxy_url else None
        self._hold = {"ttl_s": hold_ttl_s, "drain_s": drain_s}

    def push(
        self,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        verify: Callable[[], object] | None = None,
    ) -> PushReport:
        """Serves `tensors`, (checkpoint name, whole tensor) pairs, as policy `version`.

        `verify` runs on the new weights while other calls still wait; if it raises, the old
        weights return. Raises PushError (then `self.version` is still served) or
        EngineLostError.
        """
        if version == self.version:
            raise ValueError(f"version: {version} is served already; give new weights a new number")
        watch = Stopwatch()
        try:
            paths = self._write(version, tensors, watch)
            with self._held(watch):
                self._swap(version, paths, watch)
                if verify:
                    self._verify(version, verify, watch)
            self.version, self._served = version, paths
        finally:
            self._files.keep_only(self.version)
        return PushReport(version, watch.seconds)

    def close(self) -> None:
        """Removes the weight files. Nothing can be put back afterwards."""
        self._files.close()
        self._vllm.close()
        if self._proxy:
            self._proxy.close()

    def __enter__(self) -> WeightPusher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(
        self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], watch: Stopwatch
    ) -> list[Path]:
        try:
            with watch.stage("write"):
                return self._files.write(version, tensors)
        except (OSError, ValueError) as error:
            raise PushError(f"version {version} is not pushed: {error}") from error

    @contextmanager
    def _held(self, watch: Stopwatch) -> Iterator[None]:
        if self._proxy is None:
            yield
            return
        try:
            with watch.stage("hold"):
                self._proxy.post("/api/push/hold", json=self._hold)
            yield
        finally:
            # Also after a hold that failed half way: releasing twice does no harm.
            with watch.stage("release"):
                self._proxy.try_post("/api/push/release")

    def _swap(self, version: int, paths: list[Path], watch: Stopwatch) -> None:
        """Pause, load, set the version, resume; after a failure with the previous weights."""
        with watch.stage("pause"):
            # keep: running requests are frozen, not aborted; with the cache cleared they are
            # computed again under the new weights when they go on.
            self._vllm.post("/pause", params={"mode": "keep", "clear_cache": "true"})
        intact = True  # between start and finish the engine has no weights and must not run
        try:
            with watch.stage("load"):
                intact = False
                self._load(version, paths)
                intact = True
            with watch.stage("set_version"):
                self._set_version(version)
        except Exception as error:
            intact = False
            self._put_back(error)
            intact = True
            raise PushError(
                f"version {version} is not served, version {self.version} still is: {error}"
            ) from error
        finally:
            if intact:
                with watch.stage("resume"):
                    self._vllm.post("/resume")

    def _load(self, version: int, paths: list[Path]) -> None:
        try:
            self._vllm.post("/start_weight_update")
        except PushError:
            # A pusher that was killed, or a finish that failed, leaves the update open, and vLLM
            # takes no second one. An update of nothing fails, which ends it.
            with contextlib.suppress(PushError):
                self._update([])
            self._vllm.post("/start_weight_update")
        self._update(paths)
        self._vllm.post("/finish_weight_update", json={"weight_version": str(version)})

    def _update(self, paths: list[Path]) -> None:
        files = {"paths": [str(path) for path in paths]}
        self._vllm.post("/update_weights", json={"update_info": files})

    def _set_version(self, version: int) -> None:
        if self._proxy:
            self._proxy.post("/api/push/version", json={"version": version})

    def _put_back(self, cause: Exception) -> None:
        """Loads what was served before. The engine is paused."""
        if isinstance(cause, EngineLostError):
            raise cause
        if not self._served:
            raise EngineLostError(
                f"vLLM is paused without usable weights, restart it (no checkpoint to return to): "
                f"{cause}"
            ) from cause
        try:
            self._load(self.version, self._served)
            self._set_version(self.version)
        except PushError as error:
            raise EngineLostError(
                f"vLLM is paused without usable weights, restart it: {error} (after: {cause})"
            ) from error

    def _verify(self, version: int, verify: Callable[[], object], watch: Stopwatch) -> None:
        try:
            with watch.stage("verify"):
                verify()
        except Exception as error:
            self._vllm.post("/pause", params={"mode": "keep", "clear_cache": "true"})
            self._put_back(error)
            self._vllm.post("/resume")
            raise PushError(
                f"version {version} was served wrongly, version {self.version} is back: {error}"
            ) from error


class _Peer:
    """A server that we drive. One client is kept, because making one takes longer than most
    calls."""

    def __init__(self, name: str, url: str, timeout_s: float, key: str | None = None) -> None:
        self._name = name
        self._url = url
        self._client = http_client(url, timeout_s=timeout_s, key=key)

    def post(self, path: str, **request: Any) -> None:
        """EngineLostError if nobody answers, PushError with the server's words if it refuses."""
        try:
            response = self._client.post(path, **request)
        except httpx.TransportError as error:
            words = f"{self._name} at {self._url} does not answer {path}: {error!r}"
            raise (EngineLostError if self._name == "vLLM" else PushError)(words) from error
        if response.is_error:
            raise PushError(f"{self._name} refused {path}: {_reason(response)}")

    def close(self) -> None:
        self._client.close()

    def try_post(self, path: str) -> None:
        # Without effect? A hold opens by itself after its ttl.
        with contextlib.suppress(PushError):
            self.post(path)


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
