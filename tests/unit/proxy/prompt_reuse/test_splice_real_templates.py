"""Every real template in every shape of conversation: what must continue and what must fork.

S: the prompt is the engine's own rendering, token for token. S*: the template shows nothing of
the model's calls, the prompt keeps them. Forks: g generation prompt not kept, h history
rewritten, r reasoning dropped, s end token not rendered, x the template refuses. The table
is that of an earlier study of these templates, made with other code; gpt-oss differs
where there is reasoning, which vLLM does not hand to its template.

The truth is independent of the code under test: prompts are rendered by transformers, and where
a reply ends was written down for each model by hand (`FAMILIES`).
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from random import Random

import pytest
from jinja2 import TemplateError

from support.chat.conversations import CELLS, SYSTEM, Cell, Json, call, result, says, user
from support.chat.real_templates import (
    FAMILIES,
    NOW,
    byte_tokenizer,
    engine_text,
    fresh_ids,
    model,
)
from tracegrad.chat.call import RecordedTurn
from tracegrad.chat.messages import RenderOptions
from tracegrad.chat.model import ChatFormat
from tracegrad.chat.template import RenderError
from tracegrad.proxy.prompt_reuse.fork_reasons import ForkReason
from tracegrad.proxy.prompt_reuse.splice import SplicedPrompt, splice_prompt

#                     text  text,tools  call  parallel  R call  R loop  loop  R→user  calls→user
#                     loop→user  R loop→user
EXPECTED = """
Qwen2.5             | S  | S  | S  | S  | r  | r  | S  | r  | S  | S  | r
Qwen3-Coder         | S  | S  | S  | S  | r  | r  | S  | r  | S  | S  | r
Kimi-K2             | S  | S  | S  | S  | r  | r  | S  | r  | S  | S  | r
Granite 4           | S  | S  | S  | S  | r  | r  | S  | r  | S  | S  | r
DeepSeek-V3.1       | S  | S  | S  | S  | r  | r  | S  | r  | S  | S  | r
DeepSeek-V3.1 think | S  | S  | S  | S  | r  | r  | S  | r  | S  | S  | r
Qwen3               | S  | S  | S  | S  | S  | S  | S  | r  | S  | S  | h
Qwen3 no-think      | g  | g  | g  | g  | g  | g  | g  | g  | g  | g  | h
GLM-4.6             | S  | S  | S  | S  | S  | S  | S  | r  | S  | S  | h
GLM no-think        | S  | S  | S  | S  | g  | g  | S  | r  | S  | S  | h
Gemma 4             | g  | g  | g  | g  | g  | S  | S  | g  | g  | S  | h
Gemma 4 think       | S  | S  | S  | S  | S  | S  | S  | r  | S  | S  | h
Qwen3.5             | g  | g  | S  | S  | S  | S  | S  | g  | g  | h  | h
Qwen3.5 no-think    | g  | g  | S  | S  | g  | g  | S  | g  | g  | h  | h
MiniMax-M2          | g  | g  | g  | g  | S  | S  | g  | g  | g  | g  | h
gpt-oss             | s  | s  | S  | S* | r  | r  | S  | s  | S* | s  | s
Llama-3.1           | S  | S  | S  | x  | r  | r  | S  | r  | x  | S  | r
Mistral Small 3.2   | S  | h  | S  | S  | r  | r  | S  | r  | x  | h  | h
Mistral Nemo        | h  | h  | h  | h  | h  | r  | S  | h  | x  | h  | h
Hermes-3            | x  | S  | S  | S  | r  | h  | h  | x  | S  | h  | h
Phi-4-mini          | S  | S  | S* | S* | r  | r  | S* | r  | S* | S  | r
SmolLM3             | S  | S  | S* | S* | r  | r  | S* | r  | S* | S  | r
LFM2                | S  | S  | S* | S* | r  | r  | S* | r  | S* | S  | r
Gemma 3             | S  | S  | x  | x  | x  | x  | x  | r  | x  | x  | x
R1-Distill          | g  | g  | g  | g  | g  | r  | S* | g  | g  | S  | r
Nemotron-Nano-v2    | g  | g  | g  | g  | g  | g  | g  | g  | g  | g  | g
"""
ROWS = {
    row[0]: dict(zip(CELLS, row[1:], strict=True))
    for row in ([part.strip() for part in line.split("|")] for line in EXPECTED.split("\n") if line)
}
REASONS = {
    "g": ForkReason.GENERATION_PROMPT,
    "h": ForkReason.HISTORY_REWRITTEN,
    "r": ForkReason.REASONING_DROPPED,
    "s": ForkReason.STOP_NOT_RENDERED,
    "x": ForkReason.TEMPLATE_ERROR,
}


# A template may also fail as Python does: Hermes-3 loops over the tools, given or not.
REFUSALS = (TemplateError, TypeError)


def test_the_table_covers_every_template() -> None:
    assert ROWS.keys() == FAMILIES.keys()


def _said(name: str, cell: Cell, before: str, whole: str, stop: str) -> str:
    """What the model writes: where it is shown, the text that the template has for it."""
    if not whole.startswith(before):
        return "something else"
    at = whole.find(cell.last_said, len(before))
    end = whole.find(stop, at)
    if at < 0 or end < 0:
        return '<tool_call>{"city": "Oslo"}</tool_call>'
    return whole[len(before) : end]


@pytest.mark.parametrize("shape", CELLS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_cell_of_the_table(name: str, shape: str) -> None:
    cell, family, text = CELLS[shape], FAMILIES[name], model(name)
    expected = ROWS[name][shape]
    messages = [*cell.before, cell.reply, *cell.new]
    try:
        before = engine_text(name, cell.before, cell.tools)
    except REFUSALS:
        assert expected == "x", "the engine could not have served the turn"
        return
    stop = family.stop["tool_calls" in cell.reply]
    try:
        whole = engine_text(name, messages, cell.tools)
    except REFUSALS:
        whole = ""
    said = _said(name, cell, before, whole, stop)
    encode = text.tokenizer.encode
    turn = RecordedTurn(
        "t", encode(before), encode(said) + encode(stop), cell.reply, len(cell.before), "stop"
    )
    spliced = splice_prompt(text, [turn], messages, RenderOptions(cell.tools, family.kwargs), NOW)

    if expected in REASONS:
        assert not isinstance(spliced, SplicedPrompt)
        assert spliced.reason == REASONS[expected], spliced.detail
        return
    assert isinstance(spliced, SplicedPrompt), spliced
    context = turn.prompt_ids + turn.completion_ids
    assert spliced.ids[: len(context)] == context
    assert len(spliced.ids) == len(context) + spliced.new
    assert spliced.lossy == (expected == "S*")
    if expected == "S":
        assert text.tokenizer.decode(spliced.ids) == whole
        assert spliced.ids == encode(whole)
    else:
        # What is new is the end of the engine's own prompt.
        new = spliced.ids[len(context) :]
        assert whole.endswith(stop + text.tokenizer.decode(new))
        assert cell.new[-1]["content"] in text.tokenizer.decode(new)


@pytest.mark.parametrize(
    "name", [name for name, row in ROWS.items() if "S" in row["call"] and "S" in row["loop"]]
)
def test_a_tool_loop_goes_on_for_as_long_as_it_likes(name: str) -> None:
    """The model writes its calls otherwise than the template does; its own tokens stay."""
    cell, family, text = CELLS["call"], FAMILIES[name], model(name)
    frame = RenderOptions(cell.tools, family.kwargs)
    messages, chain = list(cell.before), []
    prompt = text.tokenizer.encode(engine_text(name, messages, cell.tools))
    for step in range(5):
        sampled = text.tokenizer.encode(f"(call {step}, as the model wrote it)" + family.stop[True])
        reply = says(calls=[call(step, item="lamp", city=f"town {step}")])
        chain.append(RecordedTurn(f"t{step}", prompt, sampled, reply, len(messages), "tool_calls"))
        messages += [reply, result(step, f"{step} pieces")]
        spliced = splice_prompt(text, chain, messages, frame, NOW)
        assert isinstance(spliced, SplicedPrompt), (step, spliced)
        context = prompt + sampled
        assert spliced.ids[: len(context)] == context
        new = text.tokenizer.decode(spliced.ids[len(context) :])
        assert engine_text(name, messages, cell.tools).endswith(family.stop[True] + new)
        prompt = spliced.ids


def test_llamas_end_of_a_message_stays_where_its_template_ends_a_turn() -> None:
    """With tools its template says "Environment: ipython", under which the model ends its calls
    with a token that the template never writes."""
    cell, known = CELLS["call"], model("Llama-3.1")
    tags = [
        "<|eom_id|>",
        "<|eot_id|>",
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
    ]
    text = replace(
        known, tokenizer=byte_tokenizer(tags), end_tokens=frozenset({"<|eom_id|>", "<|eot_id|>"})
    )
    encode = text.tokenizer.encode
    messages, chain = list(cell.before), []
    prompt = encode(engine_text("Llama-3.1", messages, cell.tools))
    for step in range(3):
        sampled = encode(f"(call {step}, as the model wrote it)<|eom_id|>")
        reply = says(calls=[call(step, item="lamp", city=f"town {step}")])
        chain.append(RecordedTurn(f"t{step}", prompt, sampled, reply, len(messages), "tool_calls"))
        messages += [reply, result(step, f"{step} pieces")]
        frame = RenderOptions(cell.tools)
        spliced = splice_prompt(text, chain, messages, frame, NOW)
        assert isinstance(spliced, SplicedPrompt), (step, spliced)
        assert spliced.lossy
        context = prompt + sampled
        assert spliced.ids[: len(context)] == context
        new = text.tokenizer.decode(spliced.ids[len(context) :])
        assert new.startswith("<|start_header_id|>ipython")
        assert engine_text("Llama-3.1", messages, cell.tools).endswith("<|eot_id|>" + new)
        unknown = splice_prompt(replace(text, end_tokens=frozenset()), chain, messages, frame, NOW)
        assert getattr(unknown, "reason", None) in (
            ForkReason.STOP_NOT_RENDERED,
            ForkReason.NOT_AS_SENT,
        )
        prompt = spliced.ids


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("shape", ["text", "call", "parallel", "R call", "calls→user"])
def test_an_end_token_that_opens_the_next_message_is_not_taken_for_another(
    name: str, shape: str
) -> None:
    """What the model sampled in its place would leave that message without its opening."""
    cell, family, text = CELLS[shape], FAMILIES[name], model(name)
    ends = frozenset({family.end, family.call_end or family.end, "<bos>"})
    text = replace(text, end_tokens=ends)
    messages = [*cell.before, cell.reply, *cell.new]
    try:
        before = engine_text(name, cell.before, cell.tools)
        whole = engine_text(name, messages, cell.tools)
    except REFUSALS:
        return
    own = family.stop["tool_calls" in cell.reply]
    for stop in ends - {own}:
        said = text.tokenizer.encode(_said(name, cell, before, whole, own) + stop)
        turn = RecordedTurn(
            "t", text.tokenizer.encode(before), said, cell.reply, len(cell.before), "stop"
        )
        frame = RenderOptions(cell.tools, family.kwargs)
        spliced = splice_prompt(text, [turn], messages, frame, NOW)
        if isinstance(spliced, SplicedPrompt):
            new = text.tokenizer.decode(spliced.ids[len(turn.prompt_ids) + len(said) :])
            assert whole.endswith(own + new), new
            assert own not in ("<|user|>", "<|observation|>", "<|tool_response>"), own


@pytest.mark.parametrize("name", FAMILIES)
def test_random_text_that_is_cut_short_is_closed_as_plain_text_is(name: str) -> None:
    """As a model says it that knows nothing yet: white space at its ends, special tokens, half
    characters. Where a template continues plain words it continues these, with the same tokens
    behind them but for white space that it puts there itself."""
    text = model(name)
    frame = RenderOptions(kwargs=FAMILIES[name].kwargs)
    before = [SYSTEM, user("Say something.")]
    try:
        prompt = fresh_ids(text, before, frame, NOW)
    except RenderError:
        return
    closed = {_closing(text, before, prompt, text.tokenizer.encode("17 lamps"), frame)}
    random = Random(name)
    for _ in range(24):
        words = random.choices(["lamp", " 17", "\n", " ", ".", "\t", "é", "中", "{", '"'], k=12)
        sampled = text.tokenizer.encode("a" + "".join(words))
        if random.random() < 0.3:
            sampled += text.tokenizer.encode("é")[:1]
        if random.random() < 0.2:
            sampled.insert(random.randrange(len(sampled)), text.tokenizer.encode("<bos>")[0])
        closed.add(_closing(text, before, prompt, sampled, frame))
    assert len(closed) == 1


def _closing(
    text: ChatFormat,
    before: list[Json],
    prompt: array[int],
    sampled: array[int],
    frame: RenderOptions,
) -> str:
    """What follows a reply that was cut short, or why it forks."""
    said = text.tokenizer.decode(sampled, skip_special=True).rstrip("\ufffd")
    turn = RecordedTurn("t", prompt, sampled, says(said), len(before), "length")
    messages = [*before, says(said), user("Go on.")]
    spliced = splice_prompt(text, [turn], messages, frame, NOW)
    if not isinstance(spliced, SplicedPrompt):
        return spliced.reason
    assert spliced.ids[: len(prompt) + len(sampled)] == prompt + sampled
    return text.tokenizer.decode(spliced.ids[len(prompt) + len(sampled) :])
