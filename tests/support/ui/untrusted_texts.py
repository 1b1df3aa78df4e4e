"""What an agent, its model or a tool may write to have a script run, or a page fall apart."""

from __future__ import annotations

import json

from tracegrad.events import (
    Json,
    Reward,
    RolloutFinished,
    RolloutStarted,
    Turn,
    logprob_array,
    token_id_array,
)

HOSTILE_ROLLOUT = "hostile"
# Each would set `window.owned` or open a dialog, if it ran.
PAYLOADS = (
    "<script>window.owned=1</script>",
    "<img src=x onerror=window.owned=1>",
    "<svg onload=window.owned=1>",
    "<svg><script>window.owned=1</script></svg>",
    "</script><script>window.owned=1</script>",
    "</style><script>window.owned=1</script>",
    "</title><script>window.owned=1</script>",
    "</textarea><script>window.owned=1</script>",
    "</template><script>window.owned=1</script>",
    "--><script>window.owned=1</script><!--",
    "]]><script>window.owned=1</script>",
    '" onmouseover="window.owned=1" autofocus onfocus="window.owned=1" x="',
    "' onmouseover='window.owned=1' autofocus onfocus='window.owned=1' x='",
    "` onmouseover=window.owned=1 `",
    "javascript:window.owned=1",
    "data:text/html,<script>window.owned=1</script>",
    '<a href="javascript:window.owned=1">x</a>',
    '<iframe srcdoc="<script>parent.owned=1</script>"></iframe>',
    "<meta http-equiv=refresh content='0;url=javascript:window.owned=1'>",
    "<base href='https://evil.example/'>",
    "<form action='https://evil.example/'><button autofocus>",
    "<link rel=stylesheet href=https://evil.example/x.css>",
    "<style>*{display:none}</style>",
    "<details open ontoggle=window.owned=1>",
    "<math><mi xlink:href='javascript:window.owned=1'>",
    "<video><source onerror=window.owned=1></video>",
    "{{7*7}}{% for x in () %}${window.owned=1}",
    "&lt;script&gt;window.owned=1&lt;/script&gt;",
    "&#60;script&#62;window.owned=1&#60;/script&#62;",
    "\x00<scr\x00ipt>window.owned=1</script>",
    "\u202e<script>window.owned=1</script>",
    "\ud800<script>window.owned=1</script>",
    "<ScRiPt >window.owned=1</sCrIpT >",
    "<<script>window.owned=1//<</script>",
    "<x onclick=window.owned=1 tabindex=1 id=x>#x",
    "\u2028<script>window.owned=1</script>\u2029",
)
ALL = "\n".join(PAYLOADS)


def hostile_rollout() -> list[RolloutStarted | Turn | Reward | RolloutFinished]:
    """Has them in every text that a page shows."""
    messages = [
        {"role": "system", "content": ALL},
        {"role": PAYLOADS[1], "content": ALL},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PAYLOADS[14]}}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [_call(n, payload) for n, payload in enumerate(PAYLOADS)],
        },
        *({"role": "tool", "tool_call_id": f"c{n}", "content": p} for n, p in enumerate(PAYLOADS)),
    ]
    reply = {"role": "assistant", "content": ALL, "reasoning": ALL, "tool_calls": [_call(0, ALL)]}
    tools = [{"type": "function", "function": {"name": payload}} for payload in PAYLOADS]
    turn = Turn(
        turn_id=PAYLOADS[0],
        rollout_id=HOSTILE_ROLLOUT,
        dialect="chat",
        model=PAYLOADS[2],
        prompt_token_ids=token_id_array(range(8)),
        completion_token_ids=token_id_array(range(len(PAYLOADS))),
        completion_logprobs=logprob_array([-0.3 * n for n in range(len(PAYLOADS))]),
        policy_versions=((3, len(PAYLOADS)),),
        finish_reason=PAYLOADS[3],
        fork_reason=PAYLOADS[4],
        untrainable=PAYLOADS[5],
        agent_name=PAYLOADS[11],
        request={"model": "m", "messages": messages, "tools": tools},
        response={"choices": [{"index": 0, "message": reply}]},
    )
    reward = Reward(
        rollout_id=HOSTILE_ROLLOUT,
        value=1.0,
        name=PAYLOADS[6],
        label=PAYLOADS[7],
        comment=ALL,
        source=PAYLOADS[12],
    )
    return [
        RolloutStarted(
            rollout_id=HOSTILE_ROLLOUT,
            task_id=PAYLOADS[8],
            agent=PAYLOADS[9],
            tags={payload[:60]: payload for payload in PAYLOADS},
            task={"question": ALL},
        ),
        turn,
        reward,
        RolloutFinished(rollout_id=HOSTILE_ROLLOUT, error=ALL),
    ]


def _call(number: int, payload: str) -> Json:
    arguments = json.dumps({payload: payload}) if number % 2 else payload
    return {
        "id": f"c{number}",
        "type": "function",
        "function": {"name": payload, "arguments": arguments},
    }


def payload_pieces(ids: list[int]) -> list[str]:
    """A tokenizer whose tokens are these texts."""
    return [PAYLOADS[token % len(PAYLOADS)] for token in ids]
