"""In which numbers is trained and served: chosen, recorded, corrected, and said at start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.trainer.step_samples import trainer_settings
from tracegrad.store import ALL, Store
from tracegrad_trainer.config.loading import parse_resolved
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.config.vllm import VllmSettings
from tracegrad_trainer.engine import FsdpSettings, destroy_process_group, init_process_group
from tracegrad_trainer.engine.distributed import compute_dtype, frozen_dtype
from tracegrad_trainer.rl.build_learner import build_learner
from tracegrad_trainer.rl.preflight import (
    check_before_training,
    check_precision,
    describe_precision,
)
from tracegrad_trainer.sft.config import load_sft_settings

FP8 = {"device": "cuda", "quantization": "fp8"}


@pytest.mark.parametrize(
    ("given", "device", "dtype"),
    [
        ("auto", "cpu", torch.float32),
        ("auto", "cuda", torch.bfloat16),
        ("float32", "cuda", torch.float32),
        ("bfloat16", "cpu", torch.bfloat16),
    ],
)
def test_the_dtype_follows_the_device_unless_it_is_given(
    given: Any, device: Any, dtype: torch.dtype
) -> None:
    assert compute_dtype(FsdpSettings(device=device, compute_dtype=given)) == dtype
    assert frozen_dtype(FsdpSettings(device=device, frozen_dtype=given)) == dtype
    here = torch.device("cuda" if device == "cpu" else "cpu")
    other = FsdpSettings(device=device, compute_dtype=given)
    assert (compute_dtype(other, here) == dtype) is (given != "auto")


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16")], ids=["cpu", "cuda"]
)
def test_a_step_is_recorded_with_the_dtypes_that_were_taken(
    tmp_path: Path, device: str, dtype: str
) -> None:
    settings = trainer_settings(tmp_path, fsdp={"device": device})
    recorded = settings.stored()["fsdp"]
    assert (recorded["compute_dtype"], recorded["frozen_dtype"]) == (dtype, dtype)
    # What the ranks are started with still says "auto": they know their own device.
    assert parse_resolved(settings.model_dump_json()).fsdp.compute_dtype == "auto"
    learned = trainer_settings(tmp_path, objective={"preset": "sft"}, fsdp={"device": device})
    asked = load_sft_settings(learned, ALL, preset="sft")
    assert asked.fingerprint()["fsdp"] == {"compute_dtype": dtype, "lora": None}


@pytest.mark.parametrize(
    ("compute", "served", "precision"),
    [
        ("auto", {"device": "cpu"}, "float32"),
        ("auto", {"device": "cuda"}, "bfloat16"),
        ("bfloat16", {"device": "cpu"}, "bfloat16"),
        ("bfloat16", {"device": "cuda", "quantization": "fp8"}, "fp8"),
    ],
)
def test_a_gap_is_held_against_the_coarser_of_trainer_and_engine(
    tmp_path: Path, compute: str, served: dict[str, Any], precision: str
) -> None:
    fsdp = {"device": "cpu", "threads": 1, "compute_dtype": compute}
    given = trainer_settings(tmp_path, fsdp=fsdp, vllm=served)
    mesh = init_process_group(given.fsdp)
    try:
        assert build_learner(given, mesh).precision == precision
    finally:
        destroy_process_group()


def test_products_in_tf32_are_asked_of_torch() -> None:
    try:
        init_process_group(FsdpSettings(device="cpu", float32_matmul="high"))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        destroy_process_group()
        torch.set_float32_matmul_precision("highest")


def vllm(folder: Path, **given: Any) -> VllmSettings:
    return VllmSettings.model_validate({"model": str(folder), "device": "cuda"} | given)


@pytest.mark.parametrize(
    ("config", "given", "served"),
    [
        ({}, {"device": "cpu"}, "float32"),
        ({}, {"device": "cpu", "dtype": "bfloat16"}, "bfloat16"),
        ({}, {}, "bfloat16"),
        ({"dtype": "bfloat16"}, {}, "bfloat16"),
        ({"torch_dtype": "float16"}, {}, "float16"),
        ({"text_config": {"dtype": "float16"}}, {"dtype": "auto"}, "float16"),
        ({"dtype": "float32"}, {}, "bfloat16"),  # as vLLM serves it
        ({"dtype": "float16"}, {"dtype": "float"}, "float32"),
        ({}, {"dtype": "float32", "extra_args": ["--dtype", "half"]}, "float16"),
        ({}, {"extra_args": ["--dtype=bfloat16", "--dtype=float32"]}, "float32"),
        ({}, {"dtype": "float32", "quantization": "fp8"}, "fp8"),
        ({}, {"extra_args": ["--quantization", "fp8"]}, "fp8"),
        ({}, {"extra_args": ["-q", "fp8_per_block"]}, "fp8"),
        ({}, {"extra_args": ["--kv-cache-dtype=fp8_e4m3"]}, "fp8"),
        ({}, {"extra_args": ["--kv_cache_dtype", "fp8"]}, "fp8"),
        ({}, {"extra_args": ["--kv-cache-dtype", "auto"]}, "bfloat16"),
    ],
)
def test_what_vllm_computes_in_is_known(
    tmp_path: Path, config: dict[str, Any], given: dict[str, Any], served: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert vllm(tmp_path, **given).serving_dtype == served
    (tmp_path / "config.json").write_text("[")
    vllm(tmp_path, **given).serving_dtype  # noqa: B018 - whoever loads it says what is wrong


@pytest.mark.parametrize(
    ("asked", "option"),
    [(None, None), ("fp8", "fp8_per_channel"), ("fp8_per_block", "fp8_per_block")],
)
def test_vllm_is_asked_to_quantize_what_it_is_given(
    tmp_path: Path, asked: str | None, option: str | None
) -> None:
    words = vllm(tmp_path, quantization=asked).arguments()
    assert ("--quantization" in words) is (option is not None)
    if option is not None:
        assert words[words.index("--quantization") + 1] == option


@pytest.mark.parametrize("words", [["--quantization", "awq"], ["-q=int8_per_channel_weight_only"]])
def test_a_quantization_without_bounds_is_refused(tmp_path: Path, words: list[str]) -> None:
    found = settings(tmp_path, {}, {"extra_args": words})
    with (
        Store.open(found.proxy.store) as store,
        pytest.raises(
            ValueError, match=r"no push could be checked; set vllm\.quantization = 'fp8'"
        ),
    ):
        check_before_training(found, store)


def settings(folder: Path, objective: dict[str, Any], served: dict[str, Any]) -> TrainerSettings:
    return trainer_settings(folder, objective=objective, vllm=served)


@pytest.mark.parametrize(
    "served", [FP8, {"extra_args": ["--kv-cache-dtype", "fp8"]}, {"extra_args": ["-q", "fp8"]}]
)
def test_fp8_without_a_correction_is_refused(tmp_path: Path, served: dict[str, Any]) -> None:
    uncorrected = {"correction": "none"}
    with (
        Store.open(f"sqlite:///{tmp_path}/store.db") as store,
        pytest.raises(ValueError, match=r"set objective\.correction = 'tis', or serve"),
    ):
        check_before_training(settings(tmp_path, uncorrected, served), store)
    check_precision(settings(tmp_path, uncorrected, {}))
    check_precision(settings(tmp_path, {}, served))


@pytest.mark.parametrize("preset", ["topr", "minirl", "decoupled_ppo", "signed_prob_mask", "dpo"])
def test_objectives_that_bound_the_ratio_themselves_need_none(tmp_path: Path, preset: str) -> None:
    found = settings(tmp_path, {"preset": preset}, FP8)
    assert found.objective.correction == "none"
    check_precision(found)


@pytest.mark.parametrize(
    ("objective", "served", "level"),
    [
        ({}, {}, "turn"),
        ({}, FP8, "token"),
        ({"correction": "mis"}, FP8, "token"),
        ({"correction_level": "turn"}, FP8, "turn"),
        ({"preset": "gspo"}, FP8, "sequence"),
        ({"preset": "ipa"}, FP8, "turn"),
        ({"preset": "dapo"}, {"extra_args": ["--quantization", "fp8_per_channel"]}, "token"),
    ],
)
def test_fp8_is_corrected_by_token_unless_told_otherwise(
    tmp_path: Path, objective: dict[str, Any], served: dict[str, Any], level: str
) -> None:
    found = settings(tmp_path, objective, served)
    assert found.objective.correction_level == level
    again = parse_resolved(found.model_dump_json())
    assert again.objective == found.objective


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"fsdp": {"device": "cpu"}, "vllm": {"device": "cpu"}},
            "trains in float32 (weights and sums of gradients in float32), attention packed; vLLM"
            " serves float32; correction tis by turn, at most 2",
        ),
        (
            {"fsdp": {"device": "cuda"}, "vllm": {"device": "cuda"}},
            "trains in bfloat16 (weights and sums of gradients in float32), attention varlen; vLLM"
            " serves bfloat16; correction tis by turn, at most 2",
        ),
        (
            {"fsdp": {"device": "cuda"}, "vllm": FP8, "objective": {"correction_cap": 3.0}},
            "trains in bfloat16 (weights and sums of gradients in float32), attention varlen; vLLM"
            " serves fp8; correction tis by token, at most 3",
        ),
        (
            {
                "fsdp": {"device": "cuda", "compute_dtype": "float32", "float32_matmul": "high"},
                "vllm": {"device": "cuda"},
                "objective": {"preset": "topr"},
            },
            "trains in float32 with products in TF32 (weights and sums of gradients in float32),"
            " attention packed; vLLM serves bfloat16; surrogate topr bounds the ratio itself",
        ),
        (
            {"vllm": {"device": "cpu"}, "objective": {"correction": "none"}},
            "trains in float32 (weights and sums of gradients in float32), attention packed; vLLM"
            " serves float32; no correction of the difference",
        ),
    ],
)
def test_one_line_says_it_at_start(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    assert describe_precision(trainer_settings(tmp_path, **changes)) == f"precision: {line}"
