"""Where metrics go besides the store."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class WandbSettings(BaseModel):
    """A run at Weights & Biases. Its key comes from WANDB_API_KEY or ~/.netrc, never from here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    project: str = Field(min_length=1, description="project that the run is put in")
    entity: str | None = Field(None, description="team or user; default: the key's own")
    name: str | None = Field(None, description="of the run; default: one that they make up")
    mode: Literal["online", "offline"] = Field(
        "online", description="offline: files in state_dir, for `wandb sync` later"
    )


class MetricsSettings(BaseModel):
    """The store has every step's metrics in any case; `trainer status` reads them there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensorboard: Path | None = Field(
        None, description="folder of event files; a relative one lies in state_dir"
    )
    wandb: WandbSettings | None = None
    prometheus_port: int | None = Field(
        None, ge=0, le=65535, description="serve GET /metrics; 0: any free port"
    )
    prometheus_host: str = Field("127.0.0.1", description="address that it listens on")

    @field_validator("tensorboard", "wandb")
    @classmethod
    def _is_installed(cls, value: object, info: object) -> object:
        name = getattr(info, "field_name", "")
        if value is not None and importlib.util.find_spec(name) is None:
            raise ValueError(f"{name} is not installed: pip install 'tracegrad[{name}]'")
        return value
