"""`[gpus]`: which GPUs of this machine vLLM serves on, and which the ranks train on."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def parse_gpus(text: str) -> tuple[int, ...]:
    """`0-5`, `0,2` or `0-3,6` -> the numbers, in order.

    Raises:
        ValueError: it is no such list, or names a GPU twice.
    """
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{text!r} is no list of GPUs: write it as 0-5, or 0,2")
        found += range(int(first), int(last or first) + 1)
    if not found or len(set(found)) < len(found):
        raise ValueError(f"{text!r} names no GPU, or one of them twice: write it as 0-5, or 0,2")
    return tuple(found)


def _checked(text: str) -> str:
    parse_gpus(text)
    return text


def _as_text(value: object) -> object:
    """`0` and `[0, 2]`, as TOML and the command line have them, are lists of GPUs too."""
    numbers = value if isinstance(value, list) else [value]
    if numbers and all(type(number) is int for number in numbers):
        return ",".join(map(str, numbers))
    return value


GpuList = Annotated[str, BeforeValidator(_as_text), AfterValidator(_checked)]


class GpuSettings(BaseModel):
    """Left out: chosen by the number of GPUs and the model's size."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vllm: GpuList | None = Field(
        None, description="GPUs that vLLM serves on, such as 0-5; default: chosen"
    )
    train: GpuList | None = Field(
        None, description="GPUs that train, one rank each, such as 6-7; default: chosen"
    )
    share: bool | None = Field(
        None,
        description="both on the same GPUs: vLLM sleeps, and calls wait, while the ranks work;"
        " default: where there is one GPU, or the model does not fit otherwise",
    )

    sleep_level: Literal[1, 2] | None = Field(
        None,
        description="of vLLM's sleep with gpus.share. 1: all that it loaded waits in host memory;"
        " 2: it is thrown away, since a push brings new weights, and what no push brings is gone;"
        " default: 1, or 2 where the host has no room and nothing is known to be missed",
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.vllm is None or self.train is None:
            return self
        serving, training = set(parse_gpus(self.vllm)), set(parse_gpus(self.train))
        if self.share and serving != training:
            raise ValueError(
                f"gpus.share = true needs the same GPUs for both: gpus.vllm = {self.vllm!r},"
                f" gpus.train = {self.train!r}; leave one of them out"
            )
        if not self.share and serving & training:
            raise ValueError(
                f"gpus.vllm = {self.vllm!r} and gpus.train = {self.train!r} both name GPU"
                f" {min(serving & training)}: name each once, or set gpus.share = true"
            )
        return self

    @property
    def planned_sleep_level(self) -> Literal[1, 2]:
        """Where nobody has planned, as for ranks of a launcher of one's own, nothing is lost."""
        return self.sleep_level or 1

    @property
    def vllm_gpus(self) -> tuple[int, ...] | None:
        return None if self.vllm is None else parse_gpus(self.vllm)

    @property
    def train_gpus(self) -> tuple[int, ...] | None:
        return None if self.train is None else parse_gpus(self.train)
