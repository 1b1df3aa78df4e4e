"""Log lines of ranks: once where every rank notices the same, and errors of each."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tracegrad_trainer.utils.distributed import configure_logging


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    logger = logging.getLogger("tracegrad_trainer")
    before = logger.handlers, logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate = before[:2]
    logger.setLevel(before[2])


@pytest.mark.parametrize(
    ("rank", "seen"), [("0", ["INFO", "WARNING", "ERROR"]), ("1", ["ERROR"])], ids=str
)
def test_below_an_error_rank_0_alone_writes(
    rank: str, seen: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    configure_logging()
    logger = logging.getLogger("tracegrad_trainer.rl.train_loop")
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        logger.log(level, "a step of %d", 3)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in lines] == seen
    assert all(
        f"rank {rank} tracegrad_trainer.rl.train_loop: a step of 3" in line for line in lines
    )
