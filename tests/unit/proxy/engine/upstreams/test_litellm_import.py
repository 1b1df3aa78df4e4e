"""Which litellm is imported at all, and that it talks to nobody but the provider."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tracegrad.proxy.engine.upstreams.litellm import LiteLLMUpstream

# Without importing it: that is the adapter's, which sees to it that it keeps to itself.
if importlib.util.find_spec("litellm") is None:
    pytest.skip("litellm is not installed", allow_module_level=True)


@pytest.mark.parametrize("version", ["1.82.7", "1.82.8", "1.61.20"])
def test_a_litellm_from_before_the_break_in_is_not_imported(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(importlib, "import_module", pytest.fail)
    with pytest.raises(ValueError, match=f"litellm {version} is older"):
        LiteLLMUpstream().open()


def test_without_litellm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ValueError, match=r"pip install 'tracegrad\[litellm\]'"):
        LiteLLMUpstream().open()


ALONE = """
import asyncio, json, sys

went = []
def watch(event, args):
    if event == "socket.getaddrinfo":
        went.append(args[0])
    elif event == "socket.connect" and isinstance(args[1], tuple):
        went.append(args[1][0])
sys.addaudithook(watch)

sys.path[:0] = json.loads(sys.argv[1])
from tracegrad.proxy.engine.upstreams import UpstreamPool
assert "litellm" not in sys.modules, "kept out until it is opened"
from support.engines.raw_http_engine import RawHttpEngine
from support.proxy.litellm_provider import STREAM, TOOLS, Provider, call, chunks, whole
from tracegrad.proxy.engine.upstreams.litellm import LiteLLMUpstream

async def main():
    for name in ("openai", "anthropic"):
        engine = await RawHttpEngine().start()
        provider = Provider(name, engine)
        upstream = LiteLLMUpstream(api_base=provider.api_base, api_key="k")
        upstream.open()
        await whole(upstream, call(provider, tools=TOOLS))
        await chunks(upstream, call(provider, **STREAM))
        # A model with features that litellm looks up the headers for.
        schema = {"name": "s", "schema": {"type": "object", "properties": {}}}
        wanted = {"type": "json_schema", "json_schema": schema}
        latest = {"model": f"{name}/claude-sonnet-4-5", "response_format": wanted}
        await whole(upstream, call(provider, **latest))
        await upstream.close()
        engine.kill()

asyncio.run(main())
import os
print(json.dumps({"went": sorted(set(map(str, went))), "dotenv": os.environ.get("LEAKED")}))
"""


def test_litellm_talks_to_nobody_but_the_provider(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("LEAKED=yes\n")
    root = Path(__file__).resolve().parents[5]
    paths = json.dumps([str(root / "tests"), str(root / "sdk")])
    plain = {k: v for k, v in os.environ.items() if not k.startswith("LITELLM_")}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALONE, paths],
        cwd=tmp_path,
        env=plain,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    reported = json.loads(ran.stdout.splitlines()[-1])
    assert set(reported["went"]) <= {"127.0.0.1", "None"}
    assert "127.0.0.1" in reported["went"]
    assert reported["dotenv"] is None
