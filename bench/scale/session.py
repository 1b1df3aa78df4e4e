"""A rollout of the day as it happens: its events and calls, one after another."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tokenizers import Tokenizer

from bench.scale.client import Client
from bench.scale.tokenizer import corpus
from bench.scale.workload import EngineRates, Rollout
from bench.soak.dialects import DIALECTS, Conversation, Dialect

_BY_NAME: dict[str, Dialect] = {dialect.name: dialect for dialect in DIALECTS}
_TOKENS = 300_000


class Texts:
    """Texts of so many tokens, pieces of a long one; where a piece meets another, a token more or
    less."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = tokenizer.encode(corpus(_TOKENS, "agents")).ids
        self._instructions: dict[tuple[int, int], str] = {}

    def of(self, tokens: int, seed: str) -> str:
        start = Random(seed).randrange(len(self._ids) - tokens)
        text: str = self._tokenizer.decode(self._ids[start : start + tokens])
        return text

    def instructions(self, program: int, tokens: int) -> str:
        """The same in each rollout of the program."""
        key = program, tokens
        if key not in self._instructions:
            self._instructions[key] = self.of(tokens, f"program {program}")
        return self._instructions[key]


@dataclass(frozen=True, slots=True)
class Scene:
    """What the rollouts of a day have in common. `label`: no other day of the same proxy has it,
    and no other day's agents say the same. `instructions`: tokens of those of a program."""

    label: str
    client: Client
    texts: Texts
    engine: EngineRates
    instructions: int


class Session:
    """`step` does what is due, and says when it goes on."""

    def __init__(self, rollout: Rollout, scene: Scene) -> None:
        self.rollout = rollout
        self._client, self._texts, self._engine = scene.client, scene.texts, scene.engine
        self._name = f"{scene.label}-{rollout.agent}-{rollout.number}"
        self._instructions = scene.instructions
        self._talk = Conversation(tools=False)
        self._done = 0  # steps: the calls, then the end, then the reward
        self.prompt_tokens = 0  # of the last call
        self.new_tokens = 0  # of the last call: those that the engine has not read or written
        self.sampled_tokens = 0  # of the last call
        self.engine_s = 0.0  # of an engine, for the last call

    @property
    def calls_next(self) -> bool:
        """Whether the next step is a call."""
        return self._done < len(self.rollout.turns)

    @property
    def is_first_call(self) -> bool:
        """Whether the last step was the rollout's first call."""
        return self._done == 1

    @property
    def name(self) -> str | None:
        return self._name if self.rollout.named else None

    async def step(self, now: float) -> float | None:
        """`now` and the time of the next step are virtual seconds of the day. None: it has ended.
        Raises CallFailed."""
        at, turns = self._done, self.rollout.turns
        self._done += 1
        if at == 0 and self.rollout.named:
            await self._say({"type": "rollout_started", "task_id": f"task {self.rollout.number}"})
        if at < len(turns):
            answered = now + await self._call(at)
            if at + 1 < len(turns):
                return answered + turns[at].tool_s
            return answered if self.rollout.named else None
        if at == len(turns):
            self._talk.messages.clear()  # its reward may be hours away
            await self._say({"type": "rollout_finished"})
            delay = self.rollout.reward_after_s
            return None if delay is None else now + delay
        await self._say({"type": "reward", "value": (self.rollout.number % 5) / 4})
        return None

    async def _call(self, at: int) -> float:
        """Seconds until an engine would have answered."""
        rollout, turn = self.rollout, self.rollout.turns[at]
        if at == 0:
            self._talk.instructions = self._texts.instructions(rollout.program, self._instructions)
        self._talk.messages.append(self._texts.of(turn.said, f"{self._name} {at}"))
        self._talk.max_tokens = turn.completion
        reply = await self._client.call(
            _BY_NAME[rollout.dialect], self._talk, stream=turn.streamed, rollout_id=self.name
        )
        self._talk.messages.append(reply)
        self.new_tokens = turn.said + (self._instructions if at == 0 else 0)
        before = rollout.turns[at - 1].completion if at else 0
        self.prompt_tokens += before + self.new_tokens
        self.sampled_tokens = turn.completion
        self.engine_s = self._engine.busy_s(self.new_tokens, turn.completion)
        return self._engine.latency_s(self.new_tokens, turn.completion)

    async def _say(self, event: dict[str, object]) -> None:
        await self._client.post_events([{**event, "rollout_id": self._name}])
