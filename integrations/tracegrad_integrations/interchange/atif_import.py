"""ATIF trajectories as rollouts: Harbor's, other producers', and our own back.

Each step of an agent's that called a model is a turn, each embedded trajectory a branch of the same
rollout with its own agent's turns. What has no place in a rollout is kept in its task, under
"atif".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tracegrad.events import Json
from tracegrad.jsonutil import dump_json
from tracegrad.transfer.readers import ForeignReader, ForeignRollout
from tracegrad.transfer.validation import InvalidObject, validate
from tracegrad_integrations.interchange.atif_format import (
    COLUMNS,
    OURS,
    READ_VERSIONS,
    AtifResult,
    AtifStep,
    AtifToolCall,
    AtifTrajectory,
    unplaced,
)
from tracegrad_integrations.interchange.chat_text import request_of, response_of
from tracegrad_integrations.interchange.foreign_rollout import (
    NO_SAMPLED_TOKENS,
    SampledTokens,
    TurnObjects,
    check_logprobs,
    dated,
    digest,
    finished_rollout,
    object_in,
    record_of,
    reward_object,
    task_id_of,
    undated,
    with_parsed_columns,
)

_IN_TURN = f".extra.{OURS}"


def is_trajectory(value: Json) -> bool:
    version = value.get("schema_version")
    return isinstance(version, str) and version.startswith("ATIF")


def read_trajectory(value: Json) -> ForeignRollout:
    """Raises InvalidObject."""
    if not value["schema_version"].startswith(READ_VERSIONS):
        problem = f"{value['schema_version']!r}; this tracegrad reads {READ_VERSIONS}x: update it"
        raise InvalidObject("schema_version", problem)
    value = with_parsed_columns(value, COLUMNS)
    trajectory = validate(value, AtifTrajectory)
    ours = _our_fields(trajectory.extra, f"extra.{OURS}")
    # Of all of it: the same file is the same rollout, whatever its producer calls it.
    rollout_id = str(ours["rollout_id"]) if "rollout_id" in ours else digest(value)
    agent = ours.get("agent") if "rollout_id" in ours else trajectory.agent.name
    reader = _Reader(rollout_id, agent)
    reader.trajectory(trajectory, "")
    if not reader.found:
        raise InvalidObject("steps", "no step is an agent's call of a model; write one or more")
    turns = reader.turns()
    rest = unplaced(value)
    if "rollout_id" in ours:
        if rest := _without_our_words(rest):
            ours = {**ours, "task": {"task": ours.get("task"), "atif": rest}}
        return dated(record_of(ours, turns, _IN_TURN))
    times = sorted(reader.times)
    at = (times[0], times[-1]) if times else (0.0, 0.0)
    rollout = _foreign(trajectory, rollout_id, at, rest, task_id_of(reader.asked))
    record = record_of(rollout, turns, _IN_TURN)
    return dated(record) if times else undated(record)


def _foreign(
    trajectory: AtifTrajectory,
    rollout_id: str,
    at: tuple[float, float],
    rest: Json | None,
    asked: str | None,
) -> Json:
    extra = trajectory.extra or {}
    reward, task_id = extra.get("reward"), extra.get("task_id", asked)
    if task_id is not None and not isinstance(task_id, str):
        raise InvalidObject("extra.task_id", "write a text")
    names = {"session_id": trajectory.session_id, "trajectory_id": trajectory.trajectory_id}
    return finished_rollout(
        rollout_id,
        at,
        agent=trajectory.agent.name,
        task_id=task_id,
        tags={key: name for key, name in names.items() if name},
        task={"atif": rest} if rest else None,
        rewards=None
        if reward is None
        else [reward_object(rollout_id, reward, at[1], "extra.reward")],
    )


def _without_our_words(rest: Json | None) -> Json | None:
    """Without what the export writes for readers alone, and makes again."""
    if rest is None:
        return None
    words = ("notes", "final_metrics", "trajectory_id")
    found = {key: item for key, item in rest.items() if key not in words}
    agent = found.pop("agent", {})
    if agent := {key: item for key, item in agent.items() if key not in ("name", "version")}:
        found["agent"] = agent
    embedded = found.pop("subagent_trajectories", {})
    if embedded := {
        at: left for at, each in embedded.items() if (left := _without_our_words(each))
    }:
        found["subagent_trajectories"] = embedded
    return found or None


@dataclass(slots=True)
class _FoundTurn:
    order: int  # in the rollout
    turn: Json
    tokens: SampledTokens
    where: str
    after: str | None
    ours: bool


@dataclass(slots=True)
class _Reader:
    """Walks through trajectories, and gathers turns and times. `agent`: the rollout's."""

    rollout_id: str
    agent: str | None
    found: list[_FoundTurn] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    asked: list[Json] = field(default_factory=list)  # before the first turn

    def trajectory(self, trajectory: AtifTrajectory, where: str) -> None:
        """`where`: its place, for errors; empty, or with a dot at its end."""
        messages: list[Json] = []
        after: str | None = None
        media = False
        for number, step in enumerate(trajectory.steps):
            place = f"{where}steps[{number}]"
            if step.step_id != number + 1:
                problem = f"{step.step_id}; write {number + 1}: steps are numbered from 1"
                raise InvalidObject(f"{place}.step_id", problem)
            at = _time(step.timestamp, f"{place}.timestamp")
            self.times += [] if at is None else [at]
            content, has_media = _content(step.message, f"{place}.message")
            media |= has_media
            if step.source != "agent":
                if content or step.observation is None:
                    messages.append(_named({"role": step.source, "content": content}, step.extra))
            else:
                reply = _reply(step, content)
                if not step.is_copied_context and step.llm_call_count != 0:
                    after = self._turn(trajectory, step, place, messages, reply, after, at, media)
                messages.append(reply)
            for index, result in enumerate(step.observation.results if step.observation else ()):
                message, has_media = _result(result, f"{place}.observation.results[{index}]")
                media |= has_media
                messages.append(message)
        for number, inner in enumerate(trajectory.subagent_trajectories or ()):
            self.trajectory(inner, f"{where}subagent_trajectories[{number}].")

    def turns(self) -> TurnObjects:
        objects = TurnObjects()
        for each in sorted(self.found, key=lambda each: each.order):
            if each.ours:
                objects.ours(each.turn, each.tokens, each.where, "metrics.prompt_token_ids")
            else:
                objects.foreign(each.turn, each.tokens, each.where, each.after)
        return objects

    def _turn(
        self,
        trajectory: AtifTrajectory,
        step: AtifStep,
        where: str,
        messages: list[Json],
        reply: Json,
        after: str | None,
        at: float | None,
        media: bool,
    ) -> str:
        """Its id."""
        ours = dict(_our_fields(step.extra, where + _IN_TURN))
        is_ours = "turn_id" in ours
        if not self.found:
            self.asked = list(messages)
        model = step.model_name or trajectory.agent.model_name or ""
        turn: Json = {"model": model}
        if not is_ours:
            turn |= {
                "turn_id": digest([self.rollout_id, where]),
                "created_at": at or (self.times[-1] if self.times else 0.0),
                "finish_reason": "tool_calls" if reply.get("tool_calls") else "stop",
                **({"untrainable": "media"} if media else {}),
            }
            if trajectory.agent.name != self.agent:
                turn["agent_name"] = trajectory.agent.name
        turn |= ours
        if not turn.pop("no_text", False):
            tools = trajectory.agent.tool_definitions
            turn |= {
                "dialect": "chat",
                "request": request_of(model, list(messages), tools),
                "response": response_of(model, reply, turn.get("finish_reason")),
            }
        order = turn.pop("index", len(self.found))
        if not isinstance(order, int):
            raise InvalidObject(f"{where}{_IN_TURN}.index", "write a whole number")
        tokens = _tokens(step, where, exact=is_ours)
        self.found.append(_FoundTurn(order, turn, tokens, where, after, is_ours))
        return str(turn["turn_id"])


def _tokens(step: AtifStep, where: str, *, exact: bool) -> SampledTokens:
    """`exact`: tokens that could not be trained, too, since we wrote them ourselves."""
    metrics = step.metrics
    if metrics is None or (step.llm_call_count or 1) > 1:  # of several calls together
        return NO_SAMPLED_TOKENS
    logprobs: Any = metrics.logprobs
    if exact and logprobs is None:
        logprobs = _our_fields(metrics.extra, f"{where}.metrics.extra.{OURS}").get("logprobs")
    tokens = SampledTokens.of(metrics.prompt_token_ids, metrics.completion_token_ids, logprobs)
    check_logprobs(tokens, f"{where}.metrics.logprobs")
    return tokens


def _our_fields(extra: Json | None, where: str) -> Json:
    return object_in((extra or {}).get(OURS, {}), where)


def _reply(step: AtifStep, content: Any) -> Json:
    calls = [_call(call) for call in step.tool_calls or ()]
    reply: Json = {"role": "assistant", "content": content or (None if calls else "")}
    if step.reasoning_content:
        reply["reasoning_content"] = step.reasoning_content
    return reply | ({"tool_calls": calls} if calls else {})


def _call(call: AtifToolCall) -> Json:
    written = _our_text(call.extra, "arguments")
    arguments = dump_json(call.arguments) if written is None else written
    function = {"name": call.function_name, "arguments": arguments}
    return {"id": call.tool_call_id, "type": "function", "function": function}


def _result(result: AtifResult, where: str) -> tuple[Json, bool]:
    """What came of a tool call; without one it was said to the agent as a user says it."""
    content, media = _content(result.content, f"{where}.content")
    call_id = result.source_call_id
    call_id = _our_text(result.extra, "tool_call_id") if call_id is None else call_id
    if call_id is None:
        return {"role": "user", "content": content}, media
    message = {"role": "tool", "tool_call_id": call_id, "content": content}
    return _named(message, result.extra), media


def _named(message: Json, extra: Json | None) -> Json:
    name = _our_text(extra, "name")
    return message if name is None else message | {"name": name}


def _our_text(extra: Json | None, name: str) -> str | None:
    ours = (extra or {}).get(OURS)
    text = ours.get(name) if isinstance(ours, dict) else None
    return text if isinstance(text, str) else None


def _content(content: str | list[Any] | None, where: str) -> tuple[Any, bool]:
    """As chat completions have it, and whether there are media in it."""
    if content is None or isinstance(content, str):
        return content or "", False
    parts = list(_parts(content, where))
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts), False
    return parts, True


def _parts(content: list[Any], where: str) -> Iterable[Json]:
    for number, part in enumerate(content):
        place = f"{where}[{number}]"
        kind = object_in(part, place).get("type")
        if kind == "text" and isinstance(part.get("text"), str):
            yield {"type": "text", "text": part["text"]}
        elif kind in ("image", "audio"):
            path = str(object_in(part.get("source"), f"{place}.source").get("path", ""))
            yield {"type": f"{kind}_url", f"{kind}_url": {"url": path}}
        else:
            raise InvalidObject(f"{place}.type", f"{kind!r}; write a text, image or audio part")


def _time(timestamp: str | None, where: str) -> float | None:
    if timestamp is None:
        return None
    try:
        at = datetime.fromisoformat(timestamp)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise InvalidObject(where, f"{timestamp!r}; write a time as ISO 8601 does") from None


READER = ForeignReader(name="atif", matches=is_trajectory, read=read_trajectory)
