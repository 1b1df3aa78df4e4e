"""The check of a GPU, as far as it can be run without one."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from bench.trainer import gpu_check, kernel_check


def test_without_a_gpu_it_says_so_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    said = capsys.readouterr()
    assert said.err == "gpu-check: there is no CUDA device here\n"
    assert said.out == ""


def test_kernels_and_loops_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    assert gpu_check.main(["--tiny", "--device", "cpu", "--steps", "1", "--json"]) == 0
    assert not dist.is_initialized()
    report = json.loads(capsys.readouterr().out)
    forms = ("", ", window", ", soft cap", ", sinks, window")
    named = [f"{kind}{form}" for kind in ("packed", "tree") for form in forms]
    assert [one["name"] for one in report["kernels"]] == named
    # Rounded as bfloat16 is, not exact by comparing something with itself.
    assert all(1e-4 < one["output"] < 3e-2 for one in report["kernels"])
    assert [run["name"] for run in report["runs"]] == [
        "tracegrad, all activations kept",
        "plain loop, all activations kept",
        "tracegrad, blocks recomputed",
        "plain loop, blocks recomputed",
    ]
    assert all(run["tokens_per_s"] > 0 for run in report["runs"])
    assert all(run["mfu"] is None for run in report["runs"])


def test_a_kernel_that_is_off_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "_runs", lambda *_: [gpu_check.Run("slow", None, None, None)])
    monkeypatch.setitem(kernel_check.BOUND, torch.bfloat16, 1e-6)
    assert gpu_check.main(["--tiny", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert out.count("WRONG") == 8
    assert "does not fit" in out


def test_in_float32_the_kernels_are_exact() -> None:
    for one in kernel_check.kernels(torch.device("cpu"), torch.float32):
        assert max(one.output, one.gradients) < 1e-5, one


def test_operations_are_those_of_a_model_of_that_size() -> None:
    """6 a parameter and token of the body, 6 of the head, and attention on top."""
    made = gpu_check._rows(gpu_check.LARGE)
    tokens = sum(gpu_check.LARGE.rows)
    operations = gpu_check._operations(gpu_check.LARGE, made)
    assert 6 * 0.596e9 * tokens < operations < 1.6 * 6 * 0.596e9 * tokens
