"""Chat templates grown from parts, friendly and hostile ones, which can say where a reply ends.

Each puts the variable `seam` where a reply of the model ends, before whatever follows. Left
undefined it is nothing; set, it shows the truth that a splice is measured by.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hypothesis import strategies as st

from support.chat.tokenizers import core
from tracegrad.chat.model import ChatFormat
from tracegrad.chat.template import ChatTemplate
from tracegrad.chat.tokenizer import Tokenizer

SEAM = "\ue000"

HEADS = {
    "plain": "<s>",
    "date": "<s>Today is {{ strftime_now('%d %B') }}. ",
    "count": "<s>{{ messages|length }} messages. ",
    "tools": "<s>{% for tool in tools or [] %}{{ tool|tojson }}{% endfor %}",
    "last": "<s>{{ messages[-1].role }} ",
}
USERS = {
    "plain": "<|user|>{{ m.content }}<|end|>",
    "trimmed": "<|user|>\n{{ m.content|trim }}\n<|end|>\n",
    "open": "<|user|>{{ m.content }}",
    "last_differs": "<|user|>{{ m.content }}{% if loop.last %}!{% endif %}<|end|>",
}
OPENINGS = {
    "plain": "<|assistant|>",
    "line": "<|assistant|>\n",
    "stub": "<|assistant|><think>\n\n</think>",
    "none": "",
}
REASONINGS = {
    "kept": "{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}",
    "trimmed": "{% if m.reasoning %}<think>\n{{ m.reasoning|trim }}\n</think>\n\n{% endif %}",
    "none": "",
    "recent": "{% if m.reasoning and loop.index0 > ns.user %}<think>{{ m.reasoning }}</think>"
    "{% endif %}",
    "last_only": "{% if m.reasoning and loop.last %}<think>{{ m.reasoning }}</think>{% endif %}",
}
TEXTS = {
    "plain": "{{ m.content }}",
    "trimmed": "{{ m.content|trim }}",
    "split": "{{ m.content.split('</think>')[-1] }}",
    "not_beside_calls": "{% if not m.tool_calls %}{{ m.content }}{% endif %}",
    "shouted": "{{ m.content|upper }}",
}
_CALL = '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments%s }}}'
CALLS = {
    "json": "{% for c in m.tool_calls or [] %}" + _CALL % "|tojson" + "{% endfor %}",
    "sorted": "{% for c in m.tool_calls or [] %}"
    + _CALL % "|tojson(sort_keys=true)"
    + "</tool_call>{% endfor %}",
    "bare": "{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments|items %}"
    "{{ k }}={{ v }};{% endfor %}{% endfor %}",
    "ignored": "",
    "names": "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}",
    "counted": "{% for c in m.tool_calls or [] %}{{ loop.index }}:"
    + _CALL % "|tojson"
    + "{% endfor %}",
}
# `seam` is where the model's own end token belongs.
ENDS = {
    "always": "{{ seam }}<|end|>",
    "line": "{{ seam }}<|end|>\n",
    "spaced": " {{ seam }}<|end|>",
    "not_after_calls": "{{ seam }}{% if not m.tool_calls %}<|end|>{% endif %}",
    "not_before_last": "{{ seam }}{% if loop.last or not m.tool_calls %}<|end|>{% endif %}",
    "twice": "{{ seam }}<|end|><|end|>",
    "none": "{{ seam }}",
    "next_role": "{{ seam }}",
}
RESULTS = {
    "plain": "<|tool|>{{ m.content }}<|end|>",
    "json": "<|tool|>{{ m.content|tojson }}<|end|>",
    "open": "<|tool|>{{ m.content }}",
    "ignored": "",
    "only_a_header": "<|tool|><|end|>",
    "echo_before": "<|tool|>{{ ns.said }} {{ m.content }}<|end|>",
    "echo_after": "<|tool|>{{ m.content }} {{ ns.said }}<|end|>",
    "echo_only": "<|tool|>{{ ns.said }}<|end|>",
    "by_length": "<|tool|>{% if m.content|length > 30 %}(cut){% else %}{{ m.content }}{% endif %}"
    "<|end|>",
}
CLOSINGS = {
    "plain": "",
    "long": "{% if ns.said|length > 30 %}(long){% endif %}",
    "short": "{% if ns.said|length < 30 %}(short){% endif %}",
    "count": "({{ messages|length }})",
    "said": "{{ ns.said }}",
}


@dataclass(frozen=True)
class Parts:
    head: str
    user: str
    opening: str
    reasoning: str
    text: str
    calls: str
    end: str
    result: str
    closing: str
    text_last: bool

    @property
    def source(self) -> str:
        said = (
            CALLS[self.calls] + TEXTS[self.text]
            if self.text_last
            else (TEXTS[self.text] + CALLS[self.calls])
        )
        reply = (
            "<|assistant|>"
            + ("\n" if self.opening == "line" else "")
            + REASONINGS[self.reasoning]
            + said
            + ENDS[self.end]
            + "{% set ns.said = m.content %}"
            + "{% for c in m.tool_calls or [] %}{% for v in c.function.arguments.values() %}"
            + "{% set ns.said = ns.said ~ v %}{% endfor %}{% endfor %}"
        )
        return (
            "{% set ns = namespace(user=-1, said='') %}"
            "{% for m in messages %}{% if m.role == 'user' %}{% set ns.user = loop.index0 %}"
            "{% endif %}{% endfor %}"
            + HEADS[self.head]
            + "{% for m in messages %}{% if m.role == 'user' %}"
            + USERS[self.user]
            + "{% elif m.role == 'assistant' %}"
            + reply
            + "{% elif m.role == 'tool' %}"
            + RESULTS[self.result]
            + "{% endif %}{% endfor %}"
            + CLOSINGS[self.closing]
            + "{% if add_generation_prompt %}"
            + OPENINGS[self.opening]
            + "{% endif %}"
        )

    @property
    def stop(self) -> str:
        """What the model samples at the end of a reply: of a template whose replies end with the
        next role's token, that of users."""
        return "<|user|>" if self.end == "next_role" else "<|end|>"


_CHOICES: dict[str, Any] = {
    "head": HEADS,
    "user": USERS,
    "opening": OPENINGS,
    "reasoning": REASONINGS,
    "text": TEXTS,
    "calls": CALLS,
    "end": ENDS,
    "result": RESULTS,
    "closing": CLOSINGS,
}


@st.composite
def grown(draw: st.DrawFn) -> Parts:
    """A friendly template with up to four parts exchanged: one that is hostile all over forks at
    once and shows nothing."""
    names = draw(st.sets(st.sampled_from(sorted(_CHOICES)), max_size=4))
    changed = {name: draw(st.sampled_from(list(_CHOICES[name]))) for name in sorted(names)}
    return friendly(**changed, text_last=draw(st.booleans()))


def friendly(**changed: Any) -> Parts:
    plain = {name: next(iter(options)) for name, options in _CHOICES.items()}
    assert changed.keys() <= {field.name for field in fields(Parts)}
    return Parts(**{"text_last": False, **plain, **changed})


def model_of(source: str, kind: str = "bytes") -> ChatFormat:
    return ChatFormat(Tokenizer(core(kind)), ChatTemplate(source))
