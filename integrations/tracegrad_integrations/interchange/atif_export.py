"""Rollouts as ATIF trajectories, one each.

A rollout is a tree of turns, a trajectory is one conversation. The path with the most turns is the
trajectory, every other one a trajectory embedded in it. What paths share belongs to the first; in
the others it is copied context, which trainers leave out. A step that is a turn says in its `extra`
what format 1 of our own says of the turn, but for tokens and texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import msgspec

from tracegrad.events import Json, Turn
from tracegrad.store.copy.export_records import RolloutRecord
from tracegrad.transfer.layouts import ExportLayout, ReasonCounter
from tracegrad.transfer.serialize import logprobs_json, rollout_object
from tracegrad.turn_tree import TurnTree
from tracegrad_integrations.exports.conversations import ChatTurn
from tracegrad_integrations.interchange.atif_format import (
    COLUMNS,
    OURS,
    VERSION,
    AtifAgent,
    AtifFinalMetrics,
    AtifMetrics,
    AtifObservation,
    AtifResult,
    AtifStep,
    AtifToolCall,
    AtifTrajectory,
)
from tracegrad_integrations.interchange.chat_text import texts_of

UNKNOWN = "unknown"  # where ATIF wants a word and we have none
# Of a turn, what stands in fields of ATIF's.
_IN_STEP = ("model", "new_token_ids", "completion_token_ids", "completion_logprobs")


def trajectory_rows(copies: Sequence[RolloutRecord], left_out: ReasonCounter) -> Iterator[Json]:
    for copy in copies:
        if copy.turns:
            yield trajectory_of(copy, left_out)
        else:
            left_out["rollouts: no_turns"] += 1


def trajectory_of(copy: RolloutRecord, left_out: ReasonCounter) -> Json:
    """Without what this store did with the rollout, and without its spans."""
    copy = copy.untrained().without_spans()
    about = rollout_object(copy, text=False)
    turns = about.pop("turns")
    texts = texts_of(copy, left_out)
    details = {
        turn["turn_id"]: {
            "index": index,
            **{key: value for key, value in turn.items() if value not in (None, {}, [])},
        }
        for index, turn in enumerate(turns)
    }
    for turn_id, detail in details.items():
        detail |= {} if turn_id in texts else {"no_text": True}
        for name in _IN_STEP:
            detail.pop(name, None)
    return _Writer(copy, texts, details).trajectory(about)


class _Writer:
    def __init__(
        self, copy: RolloutRecord, texts: Mapping[str, ChatTurn], details: Mapping[str, Json]
    ) -> None:
        self._copy = copy
        self._texts = texts
        self._details = details
        self._written: set[str] = set()

    def trajectory(self, about: Json) -> Json:
        copy = self._copy
        first, *others = sorted(self._paths(), key=len, reverse=True)
        main = self._one(first, copy.rollout_id)
        main.session_id = copy.rollout_id
        main.extra = {OURS: {key: item for key, item in about.items() if item not in (None, [])}}
        if copy.reward is not None:
            main.extra["reward"] = copy.reward
        embedded = [self._one(path, None) for path in others]
        if embedded:
            main.subagent_trajectories = embedded
            main.notes = (
                "Embedded trajectories are other branches of the same rollout: forks, and calls of "
                "sub-agents. Steps that they share with an earlier one are copied context."
            )
        made = msgspec.to_builtins(main)
        assert isinstance(made, dict)
        return made

    def _paths(self) -> Iterator[Sequence[Turn]]:
        """Root-to-leaf paths, which end where the texts do not continue."""
        by_id = {turn.turn_id: turn for turn in self._copy.turns}
        return TurnTree.of(
            turn if self._continues(turn, by_id.get(turn.parent_id or "")) else _root(turn)
            for turn in self._copy.turns
        ).paths()

    def _continues(self, turn: Turn, parent: Turn | None) -> bool:
        if parent is None:
            return False
        said, before = self._texts.get(turn.turn_id), self._texts.get(parent.turn_id)
        if said is None or before is None:
            return said is None
        known = len(before.prompt)
        return (
            said.prompt[:known] == before.prompt
            and len(said.prompt) > known
            and said.prompt[known]["role"] == "assistant"
        )

    def _one(self, path: Sequence[Turn], trajectory_id: str | None) -> AtifTrajectory:
        steps = _Steps()
        own = [turn for turn in path if turn.turn_id not in self._written]
        before: ChatTurn | None = None
        for turn in path:
            said = self._texts.get(turn.turn_id)
            copied = turn.turn_id in self._written
            if said is not None:
                for message in said.prompt[len(before.prompt) + 1 if before else 0 :]:
                    steps.message(message, copied=copied)
                before = said
            steps.turn(turn, said, None if copied else self._details[turn.turn_id])
            self._written.add(turn.turn_id)
        return AtifTrajectory(
            schema_version=VERSION,
            trajectory_id=trajectory_id or f"{self._copy.rollout_id}.{own[0].turn_id}",
            agent=AtifAgent(
                name=self._agent_of(own) or UNKNOWN,
                version=UNKNOWN,
                model_name=path[-1].model or None,
                tool_definitions=(before.tools or None) if before else None,
            ),
            steps=steps.steps,
            final_metrics=AtifFinalMetrics(
                total_prompt_tokens=sum(len(turn.prompt_token_ids) for turn in own),
                total_completion_tokens=sum(len(turn.completion_token_ids) for turn in own),
                total_steps=len(steps.steps),
            ),
        )

    def _agent_of(self, turns: Sequence[Turn]) -> str | None:
        """That called in all of them; the rollout's, where several did. Each step says its own."""
        names = {turn.agent_name or self._copy.agent for turn in turns}
        return names.pop() if len(names) == 1 else self._copy.agent


def _root(turn: Turn) -> Turn:
    return replace(turn, parent_id=None)


class _Steps:
    """The steps of one trajectory, message by message."""

    def __init__(self) -> None:
        self.steps: list[AtifStep] = []

    def message(self, message: Json, *, copied: bool) -> None:
        """One that no turn of this trajectory gave."""
        match message["role"]:
            case "tool":
                self._result(message)
            case "assistant":
                self._reply(message, is_copied_context=True)
            case role:
                self._add(
                    AtifStep(
                        step_id=0,
                        source="system" if role == "system" else "user",
                        message=message["content"] or "",
                        is_copied_context=copied or None,
                        extra=_ours(name=message.get("name")),
                    )
                )

    def turn(self, turn: Turn, said: ChatTurn | None, detail: Json | None) -> None:
        """`detail` None: it is another trajectory's."""
        reply = {"content": None} if said is None else said.reply
        if detail is None:
            self._reply(reply, is_copied_context=True)
            return
        self._reply(
            reply,
            timestamp=_iso(turn.created_at),
            model_name=turn.model or None,
            metrics=_metrics(turn),
            llm_call_count=1,
            extra={OURS: detail},
        )

    def _reply(self, reply: Json, **more: object) -> None:
        calls = [_call(call) for call in reply.get("tool_calls", ())]
        self._add(
            AtifStep(
                step_id=0,
                source="agent",
                message=reply["content"] or "",
                reasoning_content=reply.get("reasoning_content"),
                tool_calls=calls or None,
                **more,  # type: ignore[arg-type]
            )
        )

    def _result(self, message: Json) -> None:
        if not self.steps or self.steps[-1].source != "agent":
            self._add(AtifStep(step_id=0, source="system", message=""))
        step = self.steps[-1]
        call_id = message.get("tool_call_id", "")
        known = call_id in {call.tool_call_id for call in step.tool_calls or ()}
        if step.observation is None:
            step.observation = AtifObservation(results=[])
        step.observation.results.append(
            AtifResult(
                source_call_id=call_id if known else None,
                content=message["content"],
                extra=_ours(tool_call_id=None if known else call_id, name=message.get("name")),
            )
        )

    def _add(self, step: AtifStep) -> None:
        step.step_id = len(self.steps) + 1
        self.steps.append(step)


def _iso(seconds: float) -> str | None:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat()
    except (OverflowError, ValueError, OSError):
        return None  # beyond the year 9999


def _ours(**fields: str | None) -> Json | None:
    found = {key: value for key, value in fields.items() if value is not None}
    return {OURS: found} if found else None


def _metrics(turn: Turn) -> AtifMetrics:
    logprobs = list(logprobs_json(turn.completion_logprobs))
    exact = None not in logprobs  # ATIF has no word for what is not a number
    return AtifMetrics(
        prompt_tokens=len(turn.prompt_token_ids) or None,
        completion_tokens=len(turn.completion_token_ids) or None,
        prompt_token_ids=turn.prompt_token_ids.tolist() or None,
        completion_token_ids=turn.completion_token_ids.tolist() or None,
        logprobs=(logprobs or None) if exact else None,  # type: ignore[arg-type]
        extra=None if exact else {OURS: {"logprobs": logprobs}},
    )


def _call(call: Json) -> AtifToolCall:
    text = call["function"]["arguments"]
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    is_object = isinstance(arguments, dict)
    return AtifToolCall(
        tool_call_id=call["id"],
        function_name=call["function"]["name"],
        arguments=arguments if is_object else {},
        # What the model wrote where it is no object.
        extra=_ours(arguments=None if is_object else text),
    )


ATIF = ExportLayout(
    name="atif",
    reader="harbor.models.trajectories.Trajectory (ATIF 1.7)",
    columns=COLUMNS,
    rows=trajectory_rows,
)
