"""A full disk: agents are told to try later, the trainer ends with one line, nothing is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from support.agents.group_load import missing_calls
from support.agents.toy_agents import Message, ToyAgents, plainly, streaming
from support.system.small_disk import SmallDisk, small_disk
from support.trainer.trainer_serve import trainer_serve
from tracegrad_trainer.engine import list_checkpoints

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]
MIB = 1 << 20
ENOUGH_FOR_THE_STORE = 3 * MIB  # and not for a checkpoint
KEEP_ONE = {"checkpoint.keep": 1, "promotion.keep": 0}  # versions to return to keep theirs, too


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallDisk | None]:
    with small_disk(request, tmp_path / "small", mib=64) as disk:
        yield disk


def test_a_full_disk(disk: SmallDisk | None, char_model: Path) -> None:
    if disk is None:
        return
    settings = {"model": char_model, **KEEP_ONE, "max_restarts": 0}
    with trainer_serve(disk.folder / "state", settings) as run:
        run.wait_serving()
        toys = ToyAgents(run.url)
        asyncio.run(two_groups(toys, 1))
        run.wait(lambda: run.is_idle_after(step=1))

        with disk.filled():
            asyncio.run(all_are_refused(toys))
            run.wait(lambda: run.doing() == "waiting")
        asyncio.run(two_groups(toys, 2))  # there is room again, and it goes on by itself
        run.wait(lambda: run.is_idle_after(step=2))
        folder = run.state_dir / "checkpoints"
        assert sum(file.stat().st_size for file in folder.rglob("*")) > ENOUGH_FOR_THE_STORE

        with disk.filled(leave=ENOUGH_FOR_THE_STORE):
            asyncio.run(two_groups(toys, 3))
            ended = run.ended()
        ended.is_clean()
        assert ended.code == 1
        errors = [line for line in ended.lines if line.startswith("trainer serve: ")]
        assert errors == [ended.last_line]
        assert "checkpoint" in ended.last_line
        assert "No space left on device" in ended.last_line
        assert missing_calls(run.store_url, [toys]) == []
        assert run.last_step() == 2
        kept = [one.name for one in list_checkpoints(folder)]
        # That of the version that was served when the newer one became whole stays until the next.
        assert kept in (["step-00000002"], ["step-00000001", "step-00000002"])
        assert sorted(left.name for left in folder.iterdir()) == kept, "no half of one"


@pytest.mark.slow
def test_what_a_full_disk_kept_from_being_trained_is_trained_by_the_next_start(
    disk: SmallDisk | None, char_model: Path
) -> None:
    if disk is None:
        return
    settings = {"model": char_model, **KEEP_ONE, "max_restarts": 0}
    with trainer_serve(disk.folder / "state", settings) as run:
        run.wait_serving()
        toys = ToyAgents(run.url)
        asyncio.run(two_groups(toys, 1))
        run.wait(lambda: run.is_idle_after(step=1))
        with disk.filled(leave=ENOUGH_FOR_THE_STORE):
            asyncio.run(two_groups(toys, 2))
            assert run.ended().code == 1
    with trainer_serve(disk.folder / "state", settings) as run:
        run.wait(lambda: run.is_idle_after(step=2), within_s=180)
        run.signal(signal.SIGTERM)
        assert run.ended().code == 0
    assert missing_calls(run.store_url, [toys]) == []


async def two_groups(toys: ToyAgents, number: int) -> None:
    for task in (f"task {number}a", f"task {number}b"):
        await asyncio.gather(*(toys.by_path(task) for _ in range(2)))
        await asyncio.gather(*(toys.by_key(task) for _ in range(2)))


async def all_are_refused(toys: ToyAgents) -> None:
    """Rollouts go on until SQLite has used up the room in the files that it has; then nobody is
    told that anything is done."""
    question: list[Message] = [{"role": "user", "content": "hello"}]
    await until_refused(lambda: toys.by_path("full"))
    async with openai.AsyncOpenAI(
        base_url=f"{toys.url}/rollouts/full/v1", api_key="none", max_retries=0
    ) as client:
        whole = await until_refused(lambda: plainly(client, question))
        assert isinstance(whole, openai.InternalServerError)
        assert (whole.status_code, whole.code) == (503, "store_unavailable")
        assert int(whole.response.headers["retry-after"]) >= 1

        streamed = await until_refused(lambda: streaming(client, question))
        assert isinstance(streamed, openai.APIError)
        assert "the store cannot be written" in streamed.message
        assert "disk is full" in streamed.message

        told = await until_refused(
            lambda: toys.events({"type": "reward", "rollout_id": "full", "value": 1.0})
        )
        assert isinstance(told, httpx.HTTPStatusError)
        assert told.response.status_code == 503
        assert int(told.response.headers["retry-after"]) >= 1


async def until_refused(call: Callable[[], Awaitable[object]]) -> Exception:
    for _ in range(400):
        try:
            await call()
        except (openai.OpenAIError, httpx.HTTPError) as error:
            return error
    pytest.fail("the disk is full, and nobody was told")
