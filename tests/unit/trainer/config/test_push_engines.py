"""Where pushes go and how: which engines are named, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.trainer.step_samples import trainer_settings


def test_calls_go_to_all_engines_that_a_push_goes_to(tmp_path: Path) -> None:
    others = ["http://127.0.0.1:8101/v1/", "http://127.0.0.1:8102"]
    settings = trainer_settings(tmp_path, push={"engines": others})
    expected = (settings.vllm.url, "http://127.0.0.1:8101", "http://127.0.0.1:8102")
    assert settings.engine_urls == settings.proxy.upstreams == expected


@pytest.mark.parametrize(
    ("push", "share", "words"),
    [
        ({"engines": ["127.0.0.1:8101"]}, False, "is no base URL: write it as http://HOST:PORT"),
        ({"engines": ["http://a:1", "http://a:1/"]}, False, "push.engines: names an engine twice"),
        ({"engines": ["http://a:1"]}, True, "push.engines: with gpus.share vLLM sleeps"),
        ({"transport": "gloo"}, True, "push.transport = 'gloo': with gpus.share vLLM sleeps"),
        ({"rollout": "rolling"}, False, "push.rollout = 'rolling': there is one engine"),
        (
            {"rollout": "rolling", "engines": ["http://a:1"], "kv_cache": "keep"},
            False,
            "push.kv_cache = 'keep': with push.rollout = 'rolling'",
        ),
        ({"transport": "nccl"}, False, "push.transport = 'nccl' goes from GPU to GPU"),
    ],
)
def test_what_cannot_be_pushed_together_is_refused(
    push: dict[str, object], share: bool, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        trainer_settings(tmp_path, push=push, gpus={"share": share}, vllm={"device": "cpu"})
