"""Checks of a GPU that need vLLM, with its CPU build, whose sleep only pauses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench.gpu_check import sharing
from bench.gpu_check.check import Machine

pytestmark = pytest.mark.vllm


def test_a_refused_push_into_a_sleep_leaves_what_was_served(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    found = sharing.check(Machine(torch.device("cpu"), True, tmp_path))
    assert found.verdict == "right", found
    assert [row[2:] for row in found.rows] == [["within"] * 3 + [""]] * 2
