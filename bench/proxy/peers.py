"""What stands side by side: nothing, the plainest pass-through, tracegrad's proxy, LiteLLM's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.pages import ROOT, our_path
from bench.proxy.calls import MODEL
from bench.proxy.servers import Server, python
from tracegrad_trainer.utils.network import find_free_port

DIRECT = "direct"
PLAIN = "pass-through"
OURS = "tracegrad"
OURS_TWO = "tracegrad, 2 workers"
LITELLM = "LiteLLM"
LITELLM_TWO = "LiteLLM, 2 workers"

CACHE = ROOT / ".cache" / "bench"
# 1.82.7 and 1.82.8 of LiteLLM were malicious uploads: the lock pins a later one by its hash.
LITELLM_LOCK = Path(__file__).with_name("litellm.txt")

_LITELLM_CONFIG = """\
model_list:
  - model_name: {model}
    litellm_params:
      model: hosted_vllm/{model}
      api_base: {url}/v1
      api_key: none
litellm_settings:
  set_verbose: false
  num_retries: 0
  request_timeout: 600
general_settings:
  disable_spend_logs: true
  disable_error_logs: true
"""
# As little as it can do: no database, no key to check, no telemetry, no fetched price list.
_LITELLM_ENVIRONMENT = {
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_TELEMETRY": "False",
    "DISABLE_ADMIN_UI": "True",
    "NO_DOCS": "True",
    "PYTHONPATH": "",
}


def engine(folder: Path) -> Server:
    """The mock engine, which is also what `direct` calls."""
    port = find_free_port()
    command = python("bench.proxy.engine", "--port", str(port))
    return Server(DIRECT, command, port=port, folder=folder, environment=our_path())


def pass_through(folder: Path, upstream: str) -> Server:
    port = find_free_port()
    command = python("bench.proxy.passthrough", "--port", str(port), "--upstream", upstream)
    return Server(PLAIN, command, port=port, folder=folder, environment=our_path())


def tracegrad(folder: Path, upstream: str, *, workers: int = 1) -> Server:
    """As users start it; its store is `store.db` in `folder`, that of two workers another."""
    port = find_free_port()
    name = OURS if workers == 1 else OURS_TWO
    store = store_path(folder) if workers == 1 else folder / f"store-{workers}.db"
    command = python(
        "tracegrad.cli",
        *("proxy", "--upstream", upstream, "--store", f"sqlite:///{store}"),
        *("--port", str(port), "--workers", str(workers)),
    )
    return Server(name, command, port=port, folder=folder)


def store_path(folder: Path) -> Path:
    return folder / "store.db"


def litellm(folder: Path, upstream: str, *, workers: int = 1) -> Server:
    port = find_free_port()
    name = LITELLM if workers == 1 else LITELLM_TWO
    config = folder / "litellm.yaml"
    config.write_text(_LITELLM_CONFIG.format(model=MODEL, url=upstream))
    command = [str(litellm_python().with_name("litellm"))]
    command += ["--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--num_workers", str(workers)]
    return Server(name, command, port=port, folder=folder, environment=_LITELLM_ENVIRONMENT)


def litellm_python() -> Path:
    """The interpreter of LiteLLM's own environment, made from the lock if it is not there.

    Raises `subprocess.CalledProcessError` when its packages cannot be had.
    """
    venv = CACHE / f"litellm-{litellm_version()}"
    interpreter = venv / "bin" / "python"
    done = venv / ".installed"
    if not done.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        (CACHE.parent / ".gitignore").write_text("*\n")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
        pip = [str(interpreter), "-m", "pip", "install", "--quiet"]
        # The lock has all of them: pip trips over a dependency's extra (pydantic[email]).
        subprocess.run([*pip, "--require-hashes", "--no-deps", "-r", str(LITELLM_LOCK)], check=True)
        done.touch()
    return interpreter


def litellm_version() -> str:
    for line in LITELLM_LOCK.read_text().splitlines():
        if line.startswith("litellm=="):
            return line.split("==")[1].split()[0]
    raise AssertionError(f"{LITELLM_LOCK.name} pins no litellm")
