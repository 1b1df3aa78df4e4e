"""Chat templates that tests read: the files beside this module, and some of TRL's package."""

from __future__ import annotations

from functools import cache
from importlib.metadata import files
from pathlib import Path

FOLDER = Path(__file__).parent / "templates"
IN_TRL = {
    "Qwen-Qwen2.5-7B-Instruct": "qwen2_5",
    "Qwen-Qwen3.5-4B": "qwen3_5_think",
    "google-gemma-3-it": "gemma3",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_1",
    "openai-gpt-oss-120b": "gptoss",
}


@cache
def chat_template(name: str) -> str:
    """Its text, by the file's name without `.jinja`."""
    if name not in IN_TRL:
        return (FOLDER / f"{name}.jinja").read_text()
    # Not by importing it: TRL takes seconds.
    wanted = f"trl/chat_templates/{IN_TRL[name]}.jinja"
    found = [file for file in files("trl") or [] if str(file) == wanted]
    assert found, f"the installed trl has no {wanted}: see requirements/cpu.txt for its version"
    return found[0].read_text()
