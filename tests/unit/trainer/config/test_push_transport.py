"""How a push goes where the settings leave it open, and what the ranks see for it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from support.trainer.step_samples import trainer_settings
from tracegrad_trainer.config.push_transport import (
    choose_transport,
    engine_devices,
    is_local,
    visible_gpus,
)
from tracegrad_trainer.inference.live_weights import LiveWeights
from tracegrad_trainer.inference.m2n_push import m2n_missing
from tracegrad_trainer.inference.transports import of_ranks
from tracegrad_trainer.launch.torchrun import RankProcesses

HERE, ELSEWHERE = "http://127.0.0.1:8000", "http://10.0.0.1:8000"
CUDA: dict[str, Any] = {"vllm": {"device": "cuda"}}


@pytest.mark.parametrize(
    ("changes", "engine_on_gpu", "train_on_gpu", "expected"),
    [
        ({}, True, True, "ipc"),
        ({}, False, False, "files"),
        ({}, True, False, "files"),
        ({}, False, True, "files"),
        ({"push": {"engines": [HERE]}}, True, True, "files"),
        ({"push": {"engines": [ELSEWHERE]}}, True, True, "nccl"),
        ({"push": {"engines": [ELSEWHERE]}}, False, True, "gloo"),
        ({"vllm": {"urls": [HERE]}}, True, True, "files"),
        ({"vllm": {"urls": [ELSEWHERE]}}, True, True, "nccl"),
        ({"vllm": {"urls": [ELSEWHERE]}}, True, False, "gloo"),
        ({"vllm": {"urls": [ELSEWHERE]}, "push": {"folder": "/shared"}}, True, True, "files"),
        ({"push": {"transport": "gloo"}}, True, True, "gloo"),
        ({"push": {"transport": "nccl_m2n"}}, True, True, "nccl_m2n"),
        ({"fsdp": {"lora": {"rank": 4}}}, True, True, "files"),  # the adapter alone
        ({"fsdp": {"lora": {"rank": 4}}, "push": {"lora": "merged"}}, True, True, "ipc"),
    ],
)
def test_transport_by_where_engines_and_ranks_are(
    changes: dict[str, Any], engine_on_gpu: bool, train_on_gpu: bool, expected: str, tmp_path: Path
) -> None:
    settings = trainer_settings(
        tmp_path, **changes | {"vllm": {"device": "cuda"} | changes.get("vllm", {})}
    )
    where = {"engine_on_gpu": engine_on_gpu, "train_on_gpu": train_on_gpu}
    assert choose_transport(settings, **where) == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vllm": {"device": "cpu"}}, "'ipc' goes from GPU to GPU, and vLLM serves on a CPU"),
        ({"push": {"engines": [HERE]}}, "'ipc': GPUs of servers that others started"),
        ({"vllm": {"device": "cuda", "urls": [HERE]}}, "'ipc': GPUs of servers that others"),
    ],
)
def test_what_ipc_does_not_go_with_is_named(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    push = {"transport": "ipc"} | changes.get("push", {})
    with pytest.raises(ValueError, match=f"push.transport = {words}"):
        trainer_settings(tmp_path, **CUDA | changes | {"push": push})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": {"share": True}}, "with gpus.share vLLM sleeps, and is woken with files"),
        ({"fsdp": {"lora": {"rank": 4}}}, r"sends shards as they are, and \[fsdp.lora\]"),
        ({"push": {"engines": [HERE]}}, "all ranks send to one server together, and 2 are named"),
        ({"vllm": {"device": "cpu"}}, "goes from GPU to GPU"),
    ],
)
def test_what_nccl_m2n_does_not_go_with_is_named(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    push = {"transport": "nccl_m2n"} | changes.get("push", {})
    with pytest.raises(ValueError, match=f"push.transport = 'nccl_m2n'.*{words}"):
        trainer_settings(tmp_path, **CUDA | changes | {"push": push})


def test_ranks_see_the_engines_gpus_for_ipc_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d")
    gpus = {"vllm": "0,2", "train": "1,3"}
    for transport, seen in (("ipc", (1, 3, 0, 2)), ("files", (1, 3)), ("nccl", (1, 3))):
        settings = trainer_settings(tmp_path, gpus=gpus, push={"transport": transport}, **CUDA)
        assert visible_gpus(settings) == seen
        ranks = RankProcesses(settings, tmp_path / "settings.json")
        names = ",".join(f"GPU-{'abcd'[gpu]}" for gpu in seen)
        assert ranks.env["CUDA_VISIBLE_DEVICES"] == names, "rank i trains on the one numbered i"
    settings = trainer_settings(tmp_path, gpus=gpus, push={"transport": "ipc"}, **CUDA)
    assert engine_devices(settings) == [2, 3]
    live = LiveWeights(lambda _: None, lambda: iter(()), lambda gathered: gathered)
    control = of_ranks("ipc", settings, torch.device("cuda", 0), live)
    assert isinstance(control, partial)
    assert control.keywords["engine_devices"] == [torch.device("cuda", i) for i in (2, 3)]
    assert of_ranks("files", settings, torch.device("cuda", 0), live) is None
    gpus = {"vllm": "0,1", "train": "0,1", "share": True}
    settings = trainer_settings(tmp_path, gpus=gpus, push={"transport": "ipc"}, **CUDA)
    assert (visible_gpus(settings), engine_devices(settings)) == ((0, 1), [0, 1])
    settings = trainer_settings(tmp_path, push={"transport": "ipc"}, **CUDA)
    with pytest.raises(ValueError, match="needs GPUs that `trainer serve` has planned"):
        engine_devices(settings)


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("unix:///run/vllm.sock", True),
        ("http://127.0.0.2:1", True),
        ("http://[::1]:1", True),
        ("http://localhost:1", True),
        ("http://10.0.0.1:1", False),
        ("http://gpu-host:1", False),
    ],
)
def test_what_is_on_this_machine(url: str, local: bool) -> None:
    assert is_local(url) is local


def test_what_nccl_m2n_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if "nccl" in name else name)
    assert "nccl-extensions" in str(m2n_missing())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert m2n_missing() is None
