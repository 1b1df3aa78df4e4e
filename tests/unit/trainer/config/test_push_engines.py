"""Several vLLM engines behind one proxy: which are named, and what is refused."""

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
    ("engines", "gpus", "words"),
    [
        (["127.0.0.1:8101"], {}, "is no base URL: write it as http://HOST:PORT"),
        (["http://a:1", "http://a:1/"], {}, "push.engines: names an engine twice"),
        (["http://a:1"], {"share": True}, "push.engines: with gpus.share vLLM sleeps"),
    ],
)
def test_what_cannot_be_pushed_together_is_refused(
    engines: list[str], gpus: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        trainer_settings(tmp_path, push={"engines": engines}, gpus=gpus)
