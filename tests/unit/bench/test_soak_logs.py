"""Which lines of a soak's logs are errors, and which are what vLLM says of requests it refuses."""

from __future__ import annotations

from pathlib import Path

from bench.soak.run import complaints

VLLM = """\
(APIServer pid=7) INFO 11-24 00:39:45 [loggers.py:1] Engine 000: 1 running
(APIServer pid=7) ERROR 11-24 00:39:46 [exception.py:16] Exception caught. Request id: None
(APIServer pid=7) ERROR 11-24 00:39:46 [validation.py:151] RequestValidationError caught.
(EngineCore pid=8) INFO 11-24 00:45:24 [core.py:1454] [shutdown] EngineCore: received SIGTERM
(APIServer pid=7) ERROR 11-24 00:45:25 [async_llm.py:906] AsyncLLM output_handler failed.
"""


def logs(folder: Path, **texts: str) -> list[str]:
    (folder / "logs").mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / "logs" / f"{name}.log").write_text(text)
    return complaints(folder)


def test_what_is_refused_and_what_stops_is_no_error(tmp_path: Path) -> None:
    assert logs(tmp_path, vllm=VLLM, proxy="tracegrad proxy on http://127.0.0.1:1\n") == []


def test_errors_are_found_where_they_are(tmp_path: Path) -> None:
    dead = "(EngineCore pid=8) ERROR 11-24 00:39:47 [core.py:9] EngineCore failed\n"
    found = logs(
        tmp_path,
        vllm=dead + VLLM,
        proxy="Traceback (most recent call last):\n  File ...\n",
        ranks="2026-11-23 23:31:25,686 ERROR rank 0 tracegrad_trainer.rl: no\n",
        serve="stopped by SIGTERM\n",
    )
    assert [line.partition(":")[0] for line in found] == ["proxy.log", "ranks.log", "vllm.log"]
