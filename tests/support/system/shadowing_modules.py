"""A working directory in which somebody has put modules under the names of libraries."""

from __future__ import annotations

from pathlib import Path

NAMES = ("safetensors", "numpy", "torch", "pydantic", "httpx", "tracegrad", "tracegrad_trainer",
         "vllm", "uvicorn", "json")  # fmt: skip
_MODULE = """
import os, pathlib
with open(pathlib.Path(__file__).with_name("ran"), "a") as ran:
    ran.write(f"{__name__} {os.environ.get('TRACEGRAD_API_KEY')}\\n")
raise ImportError("a planted module was imported")
"""


def write_modules(folder: Path, **modules: str) -> Path:
    """Also `modules`, name -> text, which may be wanted there."""
    folder.mkdir(exist_ok=True)
    for name, text in {**dict.fromkeys(NAMES, _MODULE), **modules}.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def modules_run(folder: Path) -> str:
    """What of it was run."""
    file = folder / "ran"
    return file.read_text() if file.exists() else ""
