"""Settings of rewards: who scores finished rollouts, and how the parts become one reward."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    field_validator,
    model_validator,
)

from tracegrad.events import MAX_REWARD
from tracegrad.import_path import is_import_path
from tracegrad_trainer.rewards.result import FORMAT, JUDGE, LENGTH, MAIN

# Settings any of which makes the counting reward a sum of parts.
COMPOSING = ("functions", "commands", "judge", "length", "format", "weights")
# Lowest and highest.
Range = tuple[FiniteFloat, FiniteFloat]


def _named_functions(given: Any) -> Any:
    """A list of import paths names each by its function."""
    if not isinstance(given, list | tuple):
        return given
    named: dict[str, Any] = {}
    for path in given:
        name = str(path).rpartition(":")[2].rpartition(".")[2]
        if name in named:
            raise ValueError(
                f"two functions are named {name!r}: write them as a table, NAME = {path!r}"
            )
        named[name] = path
    return named


def _commands(given: Any) -> Any:
    if not isinstance(given, Mapping):
        return given
    return {
        name: {"run": command} if isinstance(command, str) else command
        for name, command in given.items()
    }


class CommandSettings(BaseModel):
    """A command that scores a rollout."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str = Field(min_length=1, description="for the shell")
    read: Literal["exit_code", "last_line"] = Field(
        "exit_code",
        description="the reward: 1 for exit code 0 and 0 for exit code 1, or the number on the last"
        " line of what it prints",
    )


class LengthTerm(BaseModel):
    """The part `length`: how far a rollout's replies are over a target."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target_tokens: int = Field(ge=1, description="of all replies together: up to here it is 0")
    over_tokens: int | None = Field(
        None, ge=1, description="so many more, and it is 1; default: the target again"
    )


class FormatTerm(BaseModel):
    """The part `format`: whether the last reply has a form."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pattern: str = Field(
        description="regular expression that is searched for in the last reply (^ and $ are the"
        " ends of the text): 1 if it is there, else 0"
    )

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return pattern


class JudgeSettings(BaseModel):
    """The part `judge`: a model that compares the rollouts of a group with each other."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(
        description="base URL of an OpenAI-compatible API, such as https://api.openai.com/v1"
    )
    model: str = Field(min_length=1, description="its name there")
    rubric: str = Field(min_length=1, description="what a good attempt is, in words")
    key_variable: str | None = Field(
        None, description="the variable of the environment that holds the API's key"
    )
    temperature: float | None = Field(0.0, ge=0, description="left out of the request: null")
    max_tokens: int | None = Field(None, ge=1, description="of the judge's reply; default: its own")
    groups: Literal["task", "similar"] = Field(
        "task",
        description="what is compared: task: attempts at one task, as somebody named it where the"
        " rollouts were opened; similar: also rollouts without a task, with those that were asked"
        " something similar under the same system prompt; they become a group of"
        " batches.group_size, or a smaller one after data.incomplete_after_s",
    )
    similarity: float = Field(
        0.5,
        gt=0,
        le=1,
        description="with groups similar: least share of words that the first user messages of a"
        " group's rollouts have in common with its first one's, of all words of both",
    )
    max_chars: int = Field(
        20_000, ge=200, description="of each attempt that it reads; the middle of more is left out"
    )

    @field_validator("url")
    @classmethod
    def _is_base_url(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is no base URL: write it as https://HOST/v1")
        return url.rstrip("/").removesuffix("/chat/completions")

    @model_validator(mode="after")
    def _similarity_is_used(self) -> Self:
        unused = JudgeSettings.model_fields["similarity"].default
        if self.groups == "task" and self.similarity != unused:
            raise ValueError(
                "similarity: groups are made by task, and nothing is compared by its words: set"
                " rewards.judge.groups = 'similar', or leave it out"
            )
        return self


class RewardSettings(BaseModel):
    """Who scores finished rollouts, how parts become one reward, and what crashes are worth."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    agent_error: float | None = Field(
        None,
        ge=-MAX_REWARD,
        le=MAX_REWARD,
        allow_inf_nan=False,
        description="reward of a rollout that ended with agent_error and that nobody rewarded,"
        " data.incomplete_after_s after its end; left out: its reward is unknown, and it is not"
        " trained",
    )
    functions: Annotated[dict[str, str], BeforeValidator(_named_functions)] = Field(
        {},
        description="functions over a finished rollout, package.module:function, each named by its"
        " function, or a table of names and paths",
    )
    commands: Annotated[dict[str, CommandSettings], BeforeValidator(_commands)] = Field(
        {},
        description="commands over a finished rollout, by name: each a string, or a table of `run`"
        " (the command) and `read` (exit_code or last_line)",
    )
    judge: JudgeSettings | None = Field(None, description="compares the rollouts of a group")
    length: LengthTerm | None = Field(None, description="a term for long replies")
    format: FormatTerm | None = Field(None, description="a term for the last reply's form")
    weights: dict[str, FiniteFloat] = Field(
        {},
        description="the reward is the sum of the parts, each times its weight; default: all parts"
        " that functions, commands and the judge give, times 1",
    )
    optional: tuple[str, ...] = Field(
        (), description="parts without which there is a sum; without any other one there is none"
    )
    clamp: Range | None = Field(None, description="lowest and highest that the sum may be")
    clamp_parts: dict[str, Range] = Field(
        {}, description="lowest and highest of a part, by name, before its weight"
    )
    timeout_s: float = Field(
        30,
        gt=0,
        allow_inf_nan=False,
        description="an attempt to score that takes longer has failed",
    )
    retries: int = Field(2, ge=0, description="further attempts, before a scoring has failed")
    concurrency: int = Field(2, ge=1, description="attempts of one scorer at a time")
    per_minute: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="attempts of one scorer that begin in a minute"
    )

    @property
    def composes(self) -> bool:
        """Whether the counting reward is a sum of parts."""
        return any(getattr(self, name) for name in COMPOSING)

    @property
    def scorers(self) -> tuple[str, ...]:
        """Names of all that score."""
        built_in = [
            name
            for name, given in ((JUDGE, self.judge), (LENGTH, self.length), (FORMAT, self.format))
            if given is not None
        ]
        return (*self.functions, *self.commands, *built_in)

    @property
    def terms(self) -> tuple[str, ...]:
        """Built-in ones, which alone say nothing of how a rollout went."""
        given = ((LENGTH, self.length), (FORMAT, self.format))
        return tuple(name for name, term in given if term is not None)

    @model_validator(mode="after")
    def _functions_are_paths(self) -> Self:
        for name, path in self.functions.items():
            if not is_import_path(path):
                raise ValueError(
                    f"rewards.functions.{name}: {path!r}: write package.module:function"
                )
        return self

    @model_validator(mode="after")
    def _names_are_apart(self) -> Self:
        seen: set[str] = set()
        for name in self.scorers:
            if not name or name == MAIN:
                raise ValueError(
                    f"rewards: {name!r} is no name for a scorer ({MAIN!r} is the sum's own):"
                    " give it another in rewards.functions or rewards.commands"
                )
            if name in seen:
                raise ValueError(f"rewards: two scorers are named {name!r}: rename one of them")
            seen.add(name)
        return self

    @model_validator(mode="after")
    def _clamps_are_ranges(self) -> Self:
        ranges = {f"clamp_parts.{name}": each for name, each in self.clamp_parts.items()}
        if self.clamp is not None:
            ranges["clamp"] = self.clamp
        for name, (low, high) in ranges.items():
            if low > high:
                raise ValueError(
                    f"rewards.{name}: [{low:g}, {high:g}] has its highest first: write"
                    f" [{high:g}, {low:g}]"
                )
        return self

    @model_validator(mode="after")
    def _weights_are_of_use(self) -> Self:
        for name in self.terms:
            if name not in self.weights:
                raise ValueError(
                    f"rewards.{name} has no weight, and so no effect: set rewards.weights, such as"
                    f" {{{name} = -0.1}}, or leave it out"
                )
        named = (("optional", self.optional), ("clamp_parts", tuple(self.clamp_parts)))
        for field, names in named:
            for name in names:
                if self.weights and name not in self.weights:
                    raise ValueError(
                        f"rewards.{field}: {name!r} has no weight in rewards.weights, and so no"
                        " effect: give it one, or leave it out"
                    )
                if not self.composes:
                    raise ValueError(f"rewards.{field}: there is no sum: set rewards.weights")
        if self.clamp is not None and not self.composes:
            raise ValueError("rewards.clamp: there is no sum: set rewards.weights")
        if self.weights and not any(self.weights.values()):
            raise ValueError("rewards.weights: all are 0: leave them out, or give one")
        return self
