import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shop import agent, model, supervised, tasks, warm_start

HELD_OUT = tasks.exam("held_out", 12)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return model.train_tokenizer(warm_start.corpus(), warm_start.Recipe().vocab_size)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "a  b\n\tc",
        '{"item": "lamp"}',
        "Grüße, 東京 🙂",
        "12345",
        "<tool_call>x</tool_call>",
    ],
)
def test_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("name", [*tasks.ITEMS, *tasks.CITIES])
def test_a_name_is_one_token_wherever_it_stands(tokenizer: Any, name: str) -> None:
    forms = [f' "{name}",', f" {name}", f" {name}s"] if name in tasks.ITEMS else []
    forms += [f' "{name}"}}}}', f" {name}?", f" {name}."] if name in tasks.CITIES else []
    for text in forms:
        assert len(tokenizer(text)["input_ids"]) == 1, text


def test_the_model_can_say_no_word_that_the_tokenizer_lacks(tokenizer: Any) -> None:
    weights = model.new_model(tokenizer, hidden=32, layers=1)
    assert weights.lm_head.weight.shape[0] == len(tokenizer)
    assert weights.lm_head.weight.data_ptr() != weights.model.embed_tokens.weight.data_ptr()


def test_the_template_renders_tools_calls_and_results(tokenizer: Any) -> None:
    call = {"name": "stock", "arguments": {"item": "rug", "city": "Oslo"}}
    messages = [
        {"role": "user", "content": "How many rugs are in Oslo?"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "content": "47"},
    ]
    text = tokenizer.apply_chat_template(
        messages, tools=agent.TOOLS, tokenize=False, add_generation_prompt=True
    )
    tools, _, rest = text.partition("<|end|>")
    assert tools.startswith("<|system|>stock(item, city) units on hand\nforecast(item, city) ")
    assert tools.endswith("\nmultiply(a, b) a times b")
    assert rest == (
        "<|user|>How many rugs are in Oslo?<|end|><|assistant|><tool_call>"
        + json.dumps(call)
        + "</tool_call><|end|><|tool|>47<|end|><|assistant|>"
    )


@pytest.mark.parametrize("task", HELD_OUT, ids=lambda task: task.task_id)
def test_the_second_prompt_extends_the_first_turns_tokens(tokenizer: Any, task: Any) -> None:
    def prompt(messages: list[dict[str, Any]]) -> list[int]:
        return list(
            tokenizer.apply_chat_template(
                messages, tools=agent.TOOLS, add_generation_prompt=True, return_dict=False
            )
        )

    said = f'<tool_call>{{"name": "price", "arguments": {json.dumps({"city": task.city})}}}'
    sampled = tokenizer(said + "</tool_call><|end|>")["input_ids"]
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.question}]
    first = prompt(messages)
    call = {"name": "price", "arguments": {"city": task.city}}
    messages.append({"role": "assistant", "content": None, "tool_calls": [{"function": call}]})
    messages.append({"role": "tool", "content": "47"})
    assert prompt(messages)[: len(first) + len(sampled)] == first + sampled


def test_only_what_the_assistant_says_is_learnt(tokenizer: Any) -> None:
    text = "<|user|>Hi<|end|><|assistant|>12<|end|><|tool|>3<|end|><|assistant|>4<|end|><|pad|>"
    input_ids = tokenizer([text], return_tensors="pt")["input_ids"]
    labels = supervised.labels_of(input_ids, tokenizer)
    learnt = input_ids[labels != supervised.IGNORED]
    assert torch.equal(labels[labels != supervised.IGNORED], learnt)
    assert tokenizer.decode(learnt) == "12<|end|>4<|end|>"


def test_demonstrations_use_train_pairs_only_and_are_mostly_wrong() -> None:
    rng = random.Random(0)
    train, careful = set(tasks.pairs("train")), 0
    for _ in range(600):
        messages = warm_start.demonstration(rng, mistakes=0.6, totals=0.5)
        calls = [m["tool_calls"][0]["function"] for m in messages if m.get("tool_calls")]
        where = calls[0]["arguments"]
        assert (where["item"], where["city"]) in train
        assert where["city"] in messages[0]["content"]
        assert messages[-1]["content"] == messages[-2]["content"]
        names = [call["name"] for call in calls]
        total = any(character.isdigit() for character in messages[0]["content"])
        careful += names == ["price", "multiply"] if total else names in (["stock"], ["price"])
    assert careful / 600 == pytest.approx(0.4, abs=0.06)


def test_a_warm_start_is_made_once_and_can_be_loaded(tmp_path: Path) -> None:
    recipe = warm_start.Recipe(steps=2, batch_size=2, hidden=32, layers=1)
    losses: list[float] = []
    directory = warm_start.warm_start(tmp_path, recipe, lambda *seen: losses.append(seen[2]))
    again = warm_start.warm_start(tmp_path, recipe, lambda *seen: losses.append(seen[2]))
    assert directory == again
    assert len(losses) == 2
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]

    tokenizer = AutoTokenizer.from_pretrained(directory)
    weights = AutoModelForCausalLM.from_pretrained(directory)
    assert type(weights).__name__ == "Qwen3ForCausalLM"
    assert weights.dtype == torch.float32
    assert weights.config.vocab_size == len(tokenizer)
    assert weights.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer.eos_token_id) == model.END
    assert tokenizer.chat_template == model.CHAT_TEMPLATE


def test_another_recipe_is_another_directory() -> None:
    digests = {warm_start.Recipe(seed=seed).directory(Path()) for seed in range(3)}
    assert len(digests) == 3
    assert warm_start.Recipe().directory(Path()) == warm_start.Recipe(seed=0).directory(Path())
