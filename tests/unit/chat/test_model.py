"""What is read of a model folder is what transformers reads of it, or a refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from support.chat.tokenizers import KINDS, TAGS, core
from support.trainer.char_model import char_tokenizer
from support.trainer.tiny_model import tiny_tokenizer
from tracegrad.chat.model import NotReproducible, load_chat_format

NOW = datetime(2026, 11, 20, tzinfo=UTC)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}"
    "{% endfor %}{{ image_token }}{{ pad_token is defined }}"
)
TEXT = "<s><|user|> How many lamps?<|end|>\n<|assistant|> 17 <|more|> lamps. <extra>x"
MESSAGES = [{"role": "user", "content": "How many lamps?"}]


def save(folder: Path, kind: str = "bytes", **config: Any) -> Path:
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=core(kind), bos_token="<s>", eos_token="<|end|>", chat_template=TEMPLATE
    )
    theirs.save_pretrained(folder)
    change(folder / "tokenizer_config.json", **config)
    return folder


def change(path: Path, **fields: Any) -> None:
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in (known | fields).items() if v is not None}))


def assert_as_transformers(folder: Path) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_chat_format(folder)
    for text in (TEXT, "plain", "".join(TAGS)):
        assert ours.tokenizer.encode(text).tolist() == theirs.encode(text, add_special_tokens=False)
        ids = ours.tokenizer.encode(text)
        assert ours.tokenizer.decode(ids) == theirs.decode(ids.tolist())
    for tools in (None, [{"type": "function"}]):
        rendered = ours.template_for(tools).render(
            MESSAGES, tools=tools, add_generation_prompt=False, now=NOW
        )
        assert rendered == theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "word_pieces"])
def test_a_folder_of_any_kind_is_read_as_transformers_reads_it(kind: str, tmp_path: Path) -> None:
    assert_as_transformers(save(tmp_path, kind))


@pytest.mark.parametrize("make", [char_tokenizer, tiny_tokenizer])
def test_the_models_of_the_tests_are_read(
    make: Callable[[], PreTrainedTokenizerFast], tmp_path: Path
) -> None:
    make().save_pretrained(tmp_path)
    assert_as_transformers(tmp_path)


MORE = {"content": "<|more|>", "lstrip": True, "rstrip": True, "normalized": False, "special": True}
CHANGES: dict[str, dict[str, Any]] = {
    "a token that only the configuration lists": {"added_tokens_decoder": {"9000": MORE}},
    "a special token that nothing lists": {"pad_token": "<|more|>"},
    "a special token with its own manners": {"pad_token": MORE | {"__type": "AddedToken"}},
    "further special tokens": {"extra_special_tokens": ["<|more|>", "<extra>"]},
    "further special tokens by the old name": {"additional_special_tokens": ["<|more|>"]},
    "a token of the model's own": {"extra_special_tokens": {"image_token": "<|more|>"}},
    "a token of the model's own in the open": {"image_token": "<|more|>"},
    "named templates": {
        "chat_template": [
            {"name": "default", "template": TEMPLATE},
            {"name": "tool_use", "template": "tools: " + TEMPLATE},
        ]
    },
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_configuration_is_read_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    fields = CHANGES[name]
    save(tmp_path, **fields)
    if "chat_template" in fields:
        (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    assert_as_transformers(tmp_path)


def test_other_manners_of_a_known_token_are_those_of_transformers(tmp_path: Path) -> None:
    save(tmp_path)
    end = core("bytes").token_to_id("<|end|>")
    stripping = {"content": "<|end|>", "rstrip": True, "special": True, "normalized": False}
    change(tmp_path / "tokenizer_config.json", added_tokens_decoder={str(end): stripping})
    assert_as_transformers(tmp_path)


def test_special_tokens_of_an_old_folder_are_in_a_file_of_their_own(tmp_path: Path) -> None:
    save(tmp_path, bos_token=None, added_tokens_decoder=None)
    change(tmp_path / "special_tokens_map.json", bos_token={"content": "<|system|>"})
    assert_as_transformers(tmp_path)


def test_templates_in_files_go_before_the_configuration(tmp_path: Path) -> None:
    save(tmp_path, chat_template="from the configuration")
    (tmp_path / "chat_template.jinja").write_text("from the file" + TEMPLATE)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    assert_as_transformers(tmp_path)


def test_all_tokens_that_end_a_reply_are_known(tmp_path: Path) -> None:
    folder = save(tmp_path)
    assert load_chat_format(folder).end_tokens == {"<|end|>"}
    encode = load_chat_format(folder).tokenizer.encode
    change(folder / "config.json", eos_token_id=encode("<s>")[0])
    change(folder / "generation_config.json", eos_token_id=[encode("<|user|>")[0], 10**6])
    assert load_chat_format(folder).end_tokens == {"<|end|>", "<s>", "<|user|>"}


def test_an_engines_own_template_takes_the_models_place(tmp_path: Path) -> None:
    text = load_chat_format(save(tmp_path), chat_template="{{ eos_token }}!")
    assert text.template_for([]).render(MESSAGES, now=NOW) == "<|end|>!"


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _with(name: str, **fields: Any) -> Callable[[Path], None]:
    return lambda folder: change(folder / name, **fields)


def _written(name: str, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_text(text)

    return write


def _mistral(folder: Path) -> None:
    (folder / "consolidated.safetensors").touch()
    (folder / "tekken.json").touch()


def _dropout(folder: Path) -> None:
    written = json.loads((folder / "tokenizer.json").read_text())
    written["model"]["dropout"] = 0.5
    (folder / "tokenizer.json").write_text(json.dumps(written))


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "slow": (_without("tokenizer.json"), "no tokenizer.json: slow tokenizers"),
    "no template": (_without("chat_template.jinja"), "no chat template"),
    "own code": (
        _with("tokenizer_config.json", auto_map={"AutoTokenizer": ["x.Slow", None]}),
        "Python code of its own",
    ),
    "splitting": (_with("tokenizer_config.json", split_special_tokens=True), "splits special"),
    "gpt-oss": (_with("config.json", model_type="gpt_oss"), "its own Harmony code"),
    "deepseek": (
        _with("config.json", architectures=["DeepseekV32ForCausalLM"]),
        "its own DeepSeek V3.2 code",
    ),
    "mistral": (_mistral, "Mistral's own tokenizer"),
    "dropout": (_dropout, "at random"),
    "bad template": (
        _written("chat_template.jinja", "{% if %}"),
        "does not compile",
    ),
    "bad tokenizer": (
        _written("tokenizer.json", "{}"),
        "tokenizer.json cannot be read",
    ),
    "bad configuration": (
        _written("tokenizer_config.json", "{"),
        "tokenizer_config.json is no JSON",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    spoil, message = REFUSED[name]
    spoil(save(tmp_path))
    with pytest.raises(NotReproducible, match=message) as caught:
        load_chat_format(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotReproducible, match="nowhere is no folder"):
        load_chat_format(tmp_path / "nowhere")
