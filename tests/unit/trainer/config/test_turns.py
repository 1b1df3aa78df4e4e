"""Settings of a trainer that are about turns: anchors in groups, and failures that are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tracegrad.proxy.config import ProxySettings
from tracegrad.store.anchors.schedule import AnchorSettings
from tracegrad_trainer.cli.serve import proxy_process
from tracegrad_trainer.config.trainer import TrainerSettings


def settings(folder: Path, **tables: Any) -> TrainerSettings:
    return TrainerSettings.model_validate({"model": folder, "state_dir": folder} | tables)


def test_anchors_come_in_the_groups_that_are_compared(model: Path) -> None:
    batches = {"group_size": 4}
    given = settings(model, batches=batches, proxy={"anchors": {"mode": "parallel"}})
    assert given.proxy.anchors == AnchorSettings(mode="parallel", group_size=4)
    own = settings(model, batches=batches, proxy={"anchors": {"group_size": 2}})
    assert own.proxy.anchors is not None
    assert own.proxy.anchors.group_size == 2
    assert settings(model, batches=batches).proxy.anchors is None


def test_the_proxy_process_has_the_anchors(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings(model, proxy={"anchors": {"refresh": 5}})
    for name, value in given.proxy.environment().items():
        monkeypatch.setenv(name, value)
    assert ProxySettings().anchors == given.proxy.anchors


def test_the_proxy_process_renders_as_vllm_is_told_to(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages }}")
    asked = [f"--chat-template={template}", "--default-chat-template-kwargs", '{"thinking": true}']
    given = settings(model, vllm={"extra_args": asked})
    for name, value in proxy_process(given).env.items():
        monkeypatch.setenv(name, value)
    assert ProxySettings().chat_template == template
    assert ProxySettings().chat_template_kwargs == {"thinking": True}
    # What is set for the proxy itself goes first.
    own = {"chat_template_kwargs": {"thinking": False}}
    env = proxy_process(settings(model, vllm={"extra_args": asked}, proxy=own)).env
    assert env["TRACEGRAD_PROXY_CHAT_TEMPLATE_KWARGS"] == '{"thinking": false}'


def test_a_wrong_anchor_setting_is_named() -> None:
    with pytest.raises(ValidationError, match=r"anchors\.threshold"):
        ProxySettings(anchors={"threshold": 2})


@pytest.mark.parametrize("name", ["negative_max_tokens", "negative_max_turns"])
def test_long_failures_need_advantages(model: Path, name: str) -> None:
    assert getattr(settings(model, batches={name: 5}).batches, name) == 5
    for preset in ("ppo", "sft", "dpo", "kto"):
        with pytest.raises(ValidationError, match=rf"batches\.{name}: objective '{preset}'"):
            settings(model, batches={name: 5}, objective={"preset": preset})
