"""OpenEnv's training traces, in its own models, in its own capture, and in what trains on them.

TRL's worker needs both packages. It runs in OpenEnv's Python, with ours behind it, where TRL is.
"""

from __future__ import annotations

import json
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.environments.openenv_python import SCRIPTS, openenv_python
from support.transfer.rollout_records import rollout_records
from support.transfer.template_store import (
    STOCK,
    TOOLS,
    answer,
    call,
    fill,
    rollout,
    turn,
    user,
)
from tracegrad.events import Event, Turn
from tracegrad.store import Store
from tracegrad.store.copy.export_records import RolloutRecord
from tracegrad.transfer.export_rollouts import RolloutExport
from tracegrad.transfer.jsonl import line_of
from tracegrad_integrations.interchange.training_trace import (
    TRAINING_TRACE,
    read_trace,
    trace_rows,
)

pytestmark = [pytest.mark.agents, pytest.mark.slow, pytest.mark.timeout(900)]


def answered(command: Sequence[str | Path], lines: bytes) -> list[bytes]:
    done = subprocess.run(command, input=lines, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout.splitlines()


def test_openenv_reads_our_traces() -> None:
    command = [openenv_python(), SCRIPTS / "validate_traces.py"]
    turns = []

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(rollout_records(), min_size=1, max_size=8))
    def check(records: list[RolloutRecord]) -> None:
        lines = b"".join(map(line_of, trace_rows(records, Counter())))
        turns.append(sum(map(int, answered(command, lines))))

    check()
    assert sum(turns) >= 20


def interleaved(rollout_id: str) -> list[Event]:
    """An agent with a tool and its helper take turns; one turn of the agent's was greedy."""
    asked, plan = STOCK, call("stock", '{"item": "lamp"}')
    first = turn(f"{rollout_id}.0", rollout_id, asked, plan, tools=TOOLS)
    doubt = [user("Are 17 many?")]
    helper = turn(f"{rollout_id}.00", rollout_id, doubt, answer("Yes"))
    asked = [*asked, plan, {"role": "tool", "tool_call_id": "call_1", "content": "17"}]
    greedy = turn(
        f"{rollout_id}.000", rollout_id, asked, answer("17"),
        parent=first, tools=TOOLS, untrainable="greedy",
    )  # fmt: skip
    asked = [*asked, answer("17"), user("Sure?")]
    sure = turn(
        f"{rollout_id}.0000", rollout_id, asked, answer("Sure."), parent=greedy, tools=TOOLS
    )
    doubt = [*doubt, answer("Yes"), user("Why?")]
    again = turn(f"{rollout_id}.00000", rollout_id, doubt, answer("So."), parent=helper)
    turns = [first, helper, greedy, sure, again]
    return rollout(rollout_id, turns, task="stock", reward=0.75)


def test_trl_trains_on_exactly_our_tokens(tmp_path: Path) -> None:
    ours = sysconfig.get_path("purelib")
    command = [openenv_python(), SCRIPTS / "trl_rows.py", ours]
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        fill(store)
        store.append(interleaved("e1"))
        traces = list(RolloutExport(store=store).layout(TRAINING_TRACE))
        lines = answered(command, b"".join(map(line_of, traces)))
        made = dict(zip(map(rollout_of, traces), map(json.loads, lines), strict=True))
        rewards = {row.rollout_id: row.reward for row in store.rollouts()}
        for rollout_id, found in made.items():
            turns = store.rollout_turns(rollout_id)
            assert list(trained(found["rows"])) == [
                sample(turn) for turn in turns if turn.untrainable is None
            ]
            assert found["sampled"] == [i for turn in turns for i in turn.completion_token_ids]
            assert found["reward"] == rewards[rollout_id]
    # A tool call; a fork; and one row each time that another branch goes on.
    assert {name: len(made[name]["rows"]) for name in ("c1", "d1", "e1")} == {
        "c1": 1,
        "d1": 2,
        "e1": 4,
    }
    assert (made["c1"]["tool_calls"], made["c1"]["tool_failures"]) == (1, 0)
    assert made["c1"]["completion"][-1] == {"role": "assistant", "content": "17 lamps"}
    assert made["a4"]["rows"] == []  # greedy: nothing of it may be trained


def rollout_of(trace: dict[str, Any]) -> str:
    found = trace["turns"][0]["metadata"]["rollout_id"]
    assert isinstance(found, str)
    return found


# The whole context of some sampled tokens, these tokens, and their log-probabilities.
Sample = tuple[list[int], list[int], list[float]]


def sample(turn: Turn) -> Sample:
    prompt, completion = turn.prompt_token_ids.tolist(), turn.completion_token_ids.tolist()
    return prompt, completion, turn.completion_logprobs.tolist()


def trained(rows: Sequence[dict[str, Any]]) -> Iterator[Sample]:
    """Each stretch of ones in the masks of TRL's rows."""
    for row in rows:
        ids, mask, logprobs = row["input_ids"], row["completion_mask"], row["old_log_probs"]
        assert len(ids) == len(mask) == len(logprobs)
        bounds = [i for i in range(1, len(mask)) if mask[i] != mask[i - 1]]
        for start, end in zip([0, *bounds], [*bounds, len(mask)], strict=True):
            if mask[start]:
                yield ids[:start], ids[start:end], logprobs[start:end]


CALLS: list[dict[str, Any]] = [
    {
        "node": {
            "node_id": "n0",
            "prompt_ids": [1, 2],
            "sampled_ids": [3, 4, 5],
            "sampled_logprobs": [-0.5, -0.25, -1.0],
            "model": "policy",
            "sampling_params": {"temperature": 0.5},
            "request_messages": [{"role": "user", "content": "2+2?"}],
            "response_message": {"role": "assistant", "content": "4"},
        },
        "metadata": {"policy_versions": [[6, 1], [7, 2]]},
    },
    {
        "node": {
            "node_id": "n1",
            "prompt_ids": [1, 2, 3, 4, 5, 8],
            "sampled_ids": [9],
            "sampled_logprobs": [-2.0],
            "index": 1,
            "request_messages": [
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": "4"},
                {"role": "user", "content": "Sure?"},
            ],
            "response_message": {"role": "assistant", "content": "Yes"},
        },
        "metadata": {"policy_versions": [[7, 1]]},
    },
]


def test_what_openenv_captures_is_a_rollout() -> None:
    command = [openenv_python(), SCRIPTS / "capture_traces.py"]
    [line] = answered(command, json.dumps(CALLS).encode())
    first, second = read_trace(json.loads(line)).as_record(1.0).turns
    assert sample(first) == ([1, 2], [3, 4, 5], [-0.5, -0.25, -1.0])
    assert sample(second) == ([1, 2, 3, 4, 5, 8], [9], [-2.0])
    assert (first.policy_versions, second.policy_versions) == (((6, 1), (7, 2)), ((7, 1),))
    assert (first.untrainable, second.untrainable) == (None, None)
    assert (first.parent_id, second.parent_id) == (None, first.turn_id)
    assert (first.model, first.sampling) == ("policy", {"temperature": 0.5})
