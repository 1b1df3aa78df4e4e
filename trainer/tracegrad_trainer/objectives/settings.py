"""The objective's settings: a preset fills what is not said, and everything is printable."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from .advantages import ADVANTAGES
from .aggregation import AGGREGATIONS
from .corrections import CORRECTIONS, LEVELS
from .ratios import RATIOS
from .registry import Registry
from .surrogates import SURROGATES

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {
        "advantage": "grpo",
        "ratio": "token",
        "surrogate": "ppo",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "correction": "tis",
        "correction_level": "turn",
        "correction_cap": 2.0,
        "aggregation": "token_mean",
    },
}

_PARTS: dict[str, Registry[Any]] = {
    "advantage": ADVANTAGES,
    "ratio": RATIOS,
    "surrogate": SURROGATES,
    "correction": CORRECTIONS,
    "correction_level": LEVELS,
    "aggregation": AGGREGATIONS,
}


class ObjectiveSettings(BaseModel):
    """loss = AGG( W(w) * S(ratio, A, log pi) ), each part by its name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    preset: str = Field("grpo", description="fills every field that is not given")
    advantage: str = Field("", description="grpo | dr_grpo")
    ratio: str = Field("", description="token | turn")
    surrogate: str = Field("", description="ppo")
    clip_low: float = Field(0.0, ge=0, lt=1)
    clip_high: float = Field(0.0, ge=0)
    dual_clip: float | None = Field(None, gt=1)
    correction: str = Field("", description="tis | none")
    correction_level: str = Field("", description="token | turn")
    correction_cap: float = Field(0.0, gt=0)
    aggregation: str = Field("", description="token_mean | turn_mean")

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        name = data.get("preset", "grpo")
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}: use one of {', '.join(PRESETS)}")
        return PRESETS[name] | data

    @field_validator(*_PARTS)
    @classmethod
    def _known(cls, value: str, info: Any) -> str:
        _PARTS[info.field_name][value]
        return value


def preset(name: str, **changes: Any) -> ObjectiveSettings:
    """A preset, parts of it overridden: `preset("grpo", advantage="dr_grpo")`."""
    return ObjectiveSettings.model_validate({"preset": name, **changes})
