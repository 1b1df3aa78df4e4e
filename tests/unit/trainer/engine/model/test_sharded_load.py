"""Each rank reads its own part of a model: equal to the plain load, and in the memory of a part."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from transformers import AutoModelForCausalLM, DeepseekV3Config, DiffLlamaConfig, Qwen3Config
from transformers.core_model_loading import Chunk, Concatenate, WeightConverter

from support.trainer import load_ranks
from support.trainer.ranks import run_on_ranks
from support.trainer.stand_in_ranks import as_rank
from support.trainer.tiny_model import tiny_sizes
from support.trainer.tiny_models import CONFIGS, plain
from tracegrad_trainer.engine.config import FsdpSettings
from tracegrad_trainer.engine.model import hf_weights
from tracegrad_trainer.engine.model.hf_weights import HfWeights
from tracegrad_trainer.engine.model.memory import check_fits_memory, loading_bytes, meta_model
from tracegrad_trainer.engine.model.sharded_load import _replace, empty_model, load_shards

NAMES = ["qwen3", *(name for name in CONFIGS if name != "qwen3")]
# Of the plain load a rank held all of it, and the files' pages.
LARGE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
Files = dict[str, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loads")
    for name in NAMES:
        plain(name).save_pretrained(folder / name, max_shard_size="40KB")
    plain("qwen3").bfloat16().save_pretrained(folder / "rounded")
    config = Qwen3Config(**tiny_sizes(8000, head_dim=64, **LARGE), tie_word_embeddings=False)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder / "large")
    shapes = meta_model(folder / "large").state_dict()
    zeros = {name: torch.zeros(tensor.shape) for name, tensor in shapes.items()}
    save_file(zeros, folder / "large" / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=[2, 4])
def seen(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Any]]:
    """What each rank saw. With four, one of them has none of six experts; all kinds of models
    are loaded by these alone."""
    ranks: int = request.param
    run_on_ranks(
        load_ranks.main, ranks, folder, NAMES if ranks == 4 else NAMES[:1], "large", "rounded"
    )
    return [json.loads((folder / f"{ranks}-{rank}.json").read_text()) for rank in range(ranks)]


def test_every_rank_has_its_part_of_the_plain_load(seen: list[dict[str, Any]]) -> None:
    """Of every kind of model, bit by bit: weights and buffers."""
    for rank, one in enumerate(seen):
        assert one["differ"] == {name: [] for name in one["differ"]}, rank
    assert len(seen[0]["differ"]) == (len(NAMES) if len(seen) == 4 else 1)


def test_adapters_and_value_heads_begin_as_on_one_rank(seen: list[dict[str, Any]]) -> None:
    assert [one["adapted"] for one in seen] == [[]] * len(seen)


def test_what_is_frozen_can_be_kept_in_half_the_memory(seen: list[dict[str, Any]]) -> None:
    for one in seen:
        assert one["half"] == {
            "frozen": ["torch.bfloat16"],
            "trained": ["torch.float32"],
            "without gradient": [],
            "served": ["torch.float32"],
            "differ": [],
        }


def test_a_reference_in_half_the_memory_is_the_one_in_the_files(seen: list[dict[str, Any]]) -> None:
    """Bit by bit, where the files are in bfloat16: it is computed with in float32 either way."""
    for one in seen:
        assert one["reference"] == {"kept": ["torch.bfloat16"], "apart": 0.0}


def test_no_rank_holds_more_than_its_shards_and_a_bucket(
    seen: list[dict[str, Any]], folder: Path
) -> None:
    ranks = len(seen)
    bucket = loading_bytes(meta_model(folder / "large"), ranks) / 2**20
    for one in seen:
        found = one["memory"]
        assert found["whole"] > 100
        assert found["own"] < 1.01 * found["whole"] / ranks
        assert 2 * found["largest"] <= 1.01 * bucket
        # What is allocated beside it is a few MiB; the whole model would be far beyond.
        assert 0.8 * found["own"] < found["rise"] < found["own"] + bucket + 12
        assert found["own"] + bucket + 12 < found["whole"]


def changed(folder: Path, into: Path, change: Callable[[Files], object], **config: Any) -> Path:
    """The folder's model with other tensors in its file."""
    shutil.copytree(folder, into)
    for index in into.glob("*.index.json"):
        index.unlink()
    tensors: Files = {}
    for file in sorted(into.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    change(tensors)
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    read = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(read | config))
    return into


EMBEDDED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("name", "change", "config", "message"),
    [
        (
            "qwen3",
            lambda files: files.pop("model.norm.weight"),
            {},
            r"files lack 1 of the tensors .* \(the first: model\.norm\.weight\): download it again",
        ),
        (
            "qwen3",
            lambda files: None,
            {"intermediate_size": 40},
            r"mlp\.\w+\.weight has the shape \[\d+, \d+\] in its files and \[\d+, \d+\] by its"
            r" config\.json",
        ),
        (
            "qwen3_moe",
            lambda files: files.pop("model.layers.1.mlp.experts.5.down_proj.weight"),
            {},
            r"layers\.1\.mlp\.experts\.down_proj has the shape \[5, 32, 24\] in its files and \[6,",
        ),
        (
            "qwen3",
            lambda files: files.update({HEAD: files[EMBEDDED] + 1}),
            {"tie_word_embeddings": True},
            r"ties .*lm_head\.weight.* hold both with different values: set tie_word_embeddings",
        ),
        (
            "qwen3_moe",
            lambda files: files.pop("model.layers.1.mlp.experts.3.gate_proj.weight"),
            {},
            r"layers\.1\.mlp\.experts\.gate_up_proj has the shape \[5, 48, 32\] in its files and",
        ),
        (
            "qwen3_moe",
            lambda files: [
                files.pop(f"model.layers.1.mlp.experts.{i}.up_proj.weight") for i in range(6)
            ],
            {},
            r"layers\.1\.mlp\.experts\.gate_up_proj has the shape \[0, 48, 32\] in its files and",
        ),
        (
            "llama",
            lambda files: files.update({HEAD: files[HEAD].to(torch.int8)}),
            {},
            r"cannot be loaded: lm_head\.weight is torch\.int8, .* no quantization_config",
        ),
    ],
    ids=["missing", "shape", "expert", "tied", "gate", "ups", "quantized"],
)
def test_files_of_another_model_are_refused_before_they_are_read(
    folder: Path, tmp_path: Path, name: str, change: Any, config: dict[str, Any], message: str
) -> None:
    other = changed(folder / name, tmp_path / "other", change, **config)
    with pytest.raises(ValueError, match=message) as error:
        check_fits_memory(other, FsdpSettings(device="cpu"), ranks=2, local_ranks=2, tokens=9)
    assert str(error.value).startswith(f"model = '{other}'")
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "tensor", "own"),
    [
        ("llama", "model.layers.0.mlp.down_proj.weight", (8, 32)),
        # Gate and up of two experts.
        ("qwen3_moe", "model.layers.0.mlp.experts.gate_up_proj", (2, 6)),
    ],
)
def test_of_a_tensor_nothing_but_the_part_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, tensor: str, own: tuple[int, int]
) -> None:
    model = empty_model(folder / name)
    weights = HfWeights(folder / name, model)
    counts: list[int] = []

    def counted(file: int, buffers: Any, at: int) -> int:
        counts.append(preadv(file, buffers, at))
        return counts[-1]

    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", counted)
    rows, of = own
    expected = model.get_parameter(tensor)
    assert expected.shape[0] == of
    part = (slice(of - rows, of), *(slice(0, size) for size in expected.shape[1:]))
    found = weights.read(tensor, part)
    assert found.shape == (rows, *expected.shape[1:])
    assert sum(counts) == found.nbytes


def test_a_damaged_file_is_named_before_anything_is_read(folder: Path, tmp_path: Path) -> None:
    """On all ranks: of a file that ends early not all would notice, and those wait for the rest."""
    other = changed(folder / "llama", tmp_path / "other", lambda files: None)
    file = other / "model.safetensors"
    whole = file.read_bytes()
    weights = HfWeights(other, empty_model(other))
    file.write_bytes(whole[:-64])
    with pytest.raises(ValueError, match=r"loaded: .*model\.safetensors ends early .* again"):
        HfWeights(other, empty_model(other))

    def read_all() -> None:  # it was whole when it was looked at
        for name, tensor in meta_model(other).named_parameters():
            weights.read(name, tuple(slice(0, size) for size in tensor.shape))

    with pytest.raises(ValueError, match=r"cannot be read: .*model\.safetensors ends early"):
        read_all()
    norm = b'"shape":[32],"data_offsets":['
    file.write_bytes(whole.replace(norm, norm.replace(b"32", b"16")))
    with pytest.raises(ValueError, match=r"model\.safetensors holds 128 bytes of .*norm\.weight"):
        HfWeights(other, empty_model(other))
    file.write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match=r"cannot be loaded: .*is no safetensors file"):
        HfWeights(other, empty_model(other))


@pytest.mark.parametrize(
    "index", ["{", "{}", "[]", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}']
)
def test_an_index_that_is_none_is_named(folder: Path, tmp_path: Path, index: str) -> None:
    other = changed(folder / "llama", tmp_path / "other", lambda files: None)
    (other / "model.safetensors").unlink()
    (other / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"index\.json is no index of safetensors") as error:
        HfWeights(other, empty_model(other))
    assert str(error.value).startswith(f"model = '{other}'")


@pytest.mark.parametrize("both", [False, True])
def test_tied_weights_are_found_under_either_name(folder: Path, tmp_path: Path, both: bool) -> None:
    """Files of some trainers hold the head, or both, where the config ties them."""

    def change(files: Files) -> None:
        files.pop(HEAD, None)
        files[HEAD] = files[EMBEDDED].clone()
        if not both:
            del files[EMBEDDED]

    other = changed(folder / "qwen3", tmp_path / "other", change, tie_word_embeddings=True)
    weights = HfWeights(other, empty_model(other))
    part = (slice(3, 9), slice(0, 32))
    assert torch.equal(weights.read(EMBEDDED, part), weights.read(HEAD, part))


HALVES, FUSED = ["mlp.gate_proj.weight", "mlp.up_proj.weight"], "mlp.gate_up_proj.weight"


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("llama", WeightConverter(FUSED, HALVES, operations=[Chunk(dim=0)])),
        ("phi3", WeightConverter(HALVES, FUSED, operations=[Concatenate(dim=0)])),
    ],
    ids=["split", "joined"],
)
def test_a_part_of_what_a_rule_splits_or_joins_is_that_part_of_the_whole(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rule: WeightConverter
) -> None:
    """Along the rows that ranks have parts of: a part of the file's tensor would be another."""
    whole: Files = {}

    def change(files: Files) -> None:
        whole.update(files)
        for layer in ("model.layers.0.", "model.layers.1."):
            if name == "llama":
                halves = [files.pop(layer + half) for half in HALVES]
                files[layer + FUSED] = torch.cat(halves)
            else:
                halves = list(files.pop(layer + FUSED).chunk(2))
                files |= {
                    layer + key: half.clone() for key, half in zip(HALVES, halves, strict=True)
                }

    other = changed(folder / name, tmp_path / "other", change)
    monkeypatch.setattr(hf_weights, "get_model_conversion_mapping", lambda model: [rule])
    weights = HfWeights(other, empty_model(other))
    for key, tensor in whole.items():
        part = (slice(5, 27), *(slice(0, size) for size in tensor.shape[1:]))
        assert torch.equal(weights.read(key, part), tensor[part]), key


DEEPSEEK = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
}


@pytest.mark.parametrize(
    ("kind", "own"), [(DiffLlamaConfig, {}), (DeepseekV3Config, DEEPSEEK)], ids=["drawn", "buffers"]
)
def test_tensors_that_are_made_in_other_ways_are_those_of_the_files(
    tmp_path: Path, kind: Any, own: dict[str, Any]
) -> None:
    """Parameters drawn on the host in spite of a meta device (DiffLlama), buffers that files hold
    (the routers' biases of DeepSeek)."""
    made: Any = AutoModelForCausalLM.from_config(kind(**tiny_sizes(61, **own)))
    for tensor in made.state_dict().values():
        tensor.normal_()
    made.save_pretrained(tmp_path)
    model = empty_model(tmp_path)
    load_shards(model, HfWeights(tmp_path, model), torch.device("cpu"))
    found = model.state_dict()
    assert found.keys() == made.state_dict().keys()
    for name, tensor in made.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_tensors_that_are_no_part_of_the_model_are_counted(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(files: Files) -> None:
        files["mtp.norm.weight"] = torch.ones(3)
        files["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # of old files

    HfWeights(other := changed(folder / "llama", tmp_path / "other", change), empty_model(other))
    assert "1 of its tensors are no part of LlamaForCausalLM" in caplog.text
    assert "mtp.norm.weight" in caplog.text


def test_offloaded_parameters_stay_in_the_hosts_memory_on_a_gpus_mesh() -> None:
    """There is no GPU here: who moved them to one would fail."""
    model = nn.Linear(3, 4, bias=False)
    with as_rank(0, 2):
        mesh = init_device_mesh("cuda", (2,))
        kept = TensorMeta(torch.Size((4, 3)), (3, 1), torch.float32)
        shard = DTensor(
            torch.empty(2, 3, device="meta"),
            DTensorSpec(mesh, (Shard(0),), kept),
            requires_grad=False,
        )
        before = nn.Parameter(shard, requires_grad=False)
        _replace(model, ["weight"], before, torch.ones(2, 3))
    found: Any = model.weight
    assert found.device.type == "cpu", "FSDP refuses others"
    assert (found.shape, found.placements) == ((4, 3), (Shard(0),))
    assert torch.equal(found.to_local(), torch.ones(2, 3))
    assert not found.requires_grad


def test_of_an_offloaded_model_buffers_are_where_it_computes(tmp_path: Path) -> None:
    """FSDP moves parameters alone to and fro. Of a GPU stands in what no weight is left on."""
    made: Any = AutoModelForCausalLM.from_config(DeepseekV3Config(**tiny_sizes(61, **DEEPSEEK)))
    made.save_pretrained(tmp_path)
    model = empty_model(tmp_path)
    of_files = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    assert of_files
    load_shards(model, HfWeights(tmp_path, model), torch.device("meta"), offload=True)
    assert {one.device.type for one in model.parameters()} == {"cpu"}
    assert {model.get_buffer(name).device.type for name in of_files} == {"meta"}
