"""A teacher's text as tokens: what is learnt is what the engine would have sampled there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.trainer.char_model import char_tokenizer
from support.trainer.sft_samples import char_model, said, store_at, teach
from tracegrad.events import Turn
from tracegrad.store import Store
from tracegrad_trainer.batches import BatchSettings, Row, select, unit_advantages
from tracegrad_trainer.sft.dataset import ChosenExamples, choose_examples
from tracegrad_trainer.sft.tokenize import load_reply_tokenizer, tokenize_replies

TOKENIZER = char_tokenizer()
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return char_model(tmp_path_factory.mktemp("text") / "model")


def with_template(model: Path, folder: Path, template: str) -> Path:
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(template)
    return folder


def taught(store: Store, model: Path) -> ChosenExamples:
    from tracegrad.store import ALL

    return choose_examples(store, ALL, writer=lambda: load_reply_tokenizer(model), compared=False)


def rows_of(found: ChosenExamples) -> list[Row]:
    settings = BatchSettings(tokens_per_micro_batch=2048, drop_equal_reward=False)
    return select(found.groups, settings, advantages=unit_advantages, current_version=0).rows


def learnt(row: Row) -> list[str]:
    """The text of each turn that is learnt."""
    return [
        TOKENIZER.decode(row.input_ids[row.keep & (row.turn_index == i)])
        for i in range(len(row.turn_ids))
    ]


def test_a_whole_conversation_is_one_row_and_only_the_assistants_words_are_learnt(
    tmp_path: Path, model: Path
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *said("2+2?", "4", "3+3?", "6 or so")]
    with store_at(tmp_path) as store:
        teach(store, {"messages": messages})
        found = taught(store, model)
    [row] = rows_of(found)
    whole = TOKENIZER.apply_chat_template(messages, tokenize=False)
    assert TOKENIZER.decode(row.input_ids) + "\n" == whole
    assert learnt(row) == ["4<|im_end|>", "6 or so<|im_end|>"]
    assert not found.reasons


def test_what_leads_to_a_reply_is_the_prompt_that_the_engine_would_be_given(
    tmp_path: Path, model: Path
) -> None:
    messages = said("a", "b", "c", "d")
    with store_at(tmp_path) as store:
        teach(store, {"messages": messages})
        turns = store.rollout_turns(store.rollouts()[0].rollout_id)
    made, _ = tokenize_replies(turns, load_reply_tokenizer(model))
    for place, turn in zip((1, 3), made, strict=True):
        prompt = TOKENIZER.apply_chat_template(
            messages[:place], add_generation_prompt=True, return_dict=False
        )
        assert turn.prompt_token_ids.tolist() == prompt
    assert made[1].parent_id == made[0].turn_id


def test_tool_calls_are_learnt_and_what_tools_say_is_not(tmp_path: Path, model: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "17"},
        {"role": "assistant", "content": "It is 17."},
    ]
    with store_at(tmp_path) as store:
        teach(store, {"messages": messages, "tools": [TOOL]})
        [row] = rows_of(taught(store, model))
    said_there = learnt(row)
    assert '"name": "add"' in said_there[0]
    assert '{"a": 1}' in said_there[0]
    assert said_there[1] == "It is 17.<|im_end|>"
    assert "17" in TOKENIZER.decode(row.input_ids[~row.keep])


def test_a_template_that_drops_earlier_reasoning_forks_the_tree_instead_of_lying(
    tmp_path: Path, model: Path
) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} "
        "{% if m.role == 'assistant' and loop.last %}({{ m.reasoning_content }}){% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    messages = said("a", "b", "c", "d")
    messages[1]["reasoning_content"], messages[3]["reasoning_content"] = "x", "y"
    with store_at(tmp_path) as store:
        teach(store, {"messages": messages})
        found = taught(store, with_template(model, tmp_path / "forks", template))
    rows = rows_of(found)
    assert [learnt(row) for row in rows] == [["(x)b<|im_end|>"], ["(y)d<|im_end|>"]]
    assert "(x)" not in TOKENIZER.decode(rows[1].input_ids)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        # Another beginning than the generation prompt's.
        (
            "{% for m in messages %}[{{ m.content }}]<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}say:{% endif %}",
            "template",
        ),
        # The reply is not there, or not as it was.
        (
            "{% for m in messages %}{{ m.role }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}assis{% endif %}",
            "template",
        ),
        # Words of the template's own behind the end.
        (
            "{% for m in messages %}:{{ m.content }}<|im_end|>over{% endfor %}"
            "{% if add_generation_prompt %}:{% endif %}",
            "template",
        ),
        ("{% for m in messages %}:{{ m.content }}{% endfor %}"
         "{% if add_generation_prompt %}:{% endif %}", "no_end_token"),
        ("{{ raise_exception('no') }}", "template"),
    ],
)  # fmt: skip
def test_what_cannot_be_proven_is_counted_and_not_learnt(
    tmp_path: Path, model: Path, template: str, reason: str
) -> None:
    with store_at(tmp_path) as store:
        teach(store, {"messages": said("a?", "b!")})
        found = taught(store, with_template(model, tmp_path / "odd", template))
    assert rows_of(found) == []
    assert found.reasons == {f"turns: {reason}": 1}


def test_an_end_token_within_a_reply_is_no_reply(tmp_path: Path, model: Path) -> None:
    with store_at(tmp_path) as store:
        teach(
            store,
            {"messages": said("a", "b<|im_end|>c"), "rollout_id": "inside"},
            {"messages": said("a", ""), "rollout_id": "empty"},
        )
        found = taught(store, model)
    assert found.reasons == {"turns: template": 1, "turns: empty_reply": 1}


def test_of_a_captured_call_only_the_answer_is_learnt(tmp_path: Path, model: Path) -> None:
    captured = _captured("captured", said("a", "mine", "b"), "theirs")
    made, left_out = tokenize_replies([captured], load_reply_tokenizer(model))
    assert [TOKENIZER.decode(t.completion_token_ids) for t in made] == ["theirs<|im_end|>"]
    assert not left_out
    assert made[0].sampling == {"source": "demonstration"}


def test_calls_that_continue_each_other_are_one_path(tmp_path: Path, model: Path) -> None:
    calls = [_captured("1", said("a"), "b"), _captured("2", said("a", "b", "c"), "d")]
    made, _ = tokenize_replies(calls, load_reply_tokenizer(model))
    assert made[1].parent_id == made[0].turn_id


def test_a_call_that_replaces_the_template_or_shows_pictures_is_not_guessed_at(
    tmp_path: Path, model: Path
) -> None:
    picture = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
    calls = [
        _captured("1", said("a"), "b", chat_template="{{ 1 }}"),
        _captured("2", [{"role": "user", "content": picture}], "b"),
    ]
    made, left_out = tokenize_replies(calls, load_reply_tokenizer(model))
    assert made == []
    assert left_out == {"own_rendering": 1, "media": 1}


def test_text_needs_a_chat_template(tmp_path: Path, model: Path) -> None:
    bare = with_template(model, tmp_path / "bare", "")
    (bare / "chat_template.jinja").unlink()
    config = json.loads((bare / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    with store_at(tmp_path) as store:
        teach(store, {"messages": said("a", "b")})
        with pytest.raises(ValueError, match=r"no chat template.*give a folder with one"):
            taught(store, bare)


def _captured(turn_id: str, messages: list[dict[str, Any]], reply: str, **body: Any) -> Turn:
    """As the proxy stores a call to a provider that tells no tokens."""
    from tracegrad.events import logprob_array, token_id_array

    return Turn(
        turn_id=turn_id,
        rollout_id="r",
        dialect="chat",
        model="m",
        prompt_token_ids=token_id_array(),
        completion_token_ids=token_id_array(),
        completion_logprobs=logprob_array(),
        policy_versions=(),
        untrainable="no_tokens",
        request={"model": "m", "messages": messages, **body},
        response={"choices": [{"message": {"role": "assistant", "content": reply}}]},
    )
