"""A command that scores a rollout: JSON on stdin, a number by its exit code or its last line."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import suppress

from tracegrad_trainer.rewards.attempt import AttemptFailed
from tracegrad_trainer.rewards.child_process import (
    LOG,
    describe_end,
    kill,
    prepare,
    scorer_environment,
)
from tracegrad_trainer.rewards.config import CommandSettings
from tracegrad_trainer.rewards.result import NoScore, Score, number
from tracegrad_trainer.rewards.rollout import ScoredRollout

ROLLOUT_VARIABLE, TASK_VARIABLE = "TRACEGRAD_ROLLOUT_ID", "TRACEGRAD_TASK_ID"
_MOST_KEPT = 64 << 10  # bytes of what it prints: the last line is in them


class CommandScorer:
    """`secret`: a variable of the environment that the command does not get."""

    def __init__(
        self, name: str, command: CommandSettings, *, timeout_s: float, secret: str | None = None
    ) -> None:
        self.name = name
        self.label = f"command {name}"
        self.command = command
        self.timeout_s = timeout_s
        self.secret = secret
        self.digest = hashlib.sha256(f"{command.read}\n{command.run}".encode()).hexdigest()

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def score(self, rollout: ScoredRollout, _number: int) -> Score:
        """Raises AttemptFailed."""
        process = await asyncio.create_subprocess_shell(
            self.command.run,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE if self.command.read == "last_line" else LOG,
            env=scorer_environment(
                self.secret,
                {ROLLOUT_VARIABLE: rollout.rollout_id, TASK_VARIABLE: rollout.task_id or ""},
            ),
            start_new_session=True,
            preexec_fn=prepare,
        )
        try:
            async with asyncio.timeout(self.timeout_s):
                printed, _ = await asyncio.gather(
                    _last_bytes(process.stdout), _give(process.stdin, rollout)
                )
                code = await process.wait()
        except TimeoutError:
            raise AttemptFailed(f"{self.name} timed out after {self.timeout_s:g} s") from None
        finally:
            await kill(process)  # and what it left behind
        return self._score(code, printed)

    def _score(self, code: int, printed: bytes) -> Score:
        if self.command.read == "exit_code" and code in (0, 1):
            return Score({self.name: 1.0 - code}, {})
        if self.command.read == "exit_code" or code != 0:
            raise AttemptFailed(f"{self.name} {describe_end(code)}")
        last = printed.decode(errors="replace").strip().rpartition("\n")[2].strip()
        try:
            return Score({self.name: number(self.name, float(last))}, {})
        except NoScore as error:
            raise AttemptFailed(str(error), final=True) from None
        except ValueError:
            raise AttemptFailed(
                f"{self.name}: its last line is {last!r:.60}, which is no number", final=True
            ) from None


async def _give(stdin: asyncio.StreamWriter | None, rollout: ScoredRollout) -> None:
    """A command need not read it."""
    assert stdin is not None
    with suppress(ConnectionError):
        stdin.write(json.dumps(rollout.as_json()).encode())
        await stdin.drain()
    with suppress(ConnectionError):
        stdin.close()
        await stdin.wait_closed()


async def _last_bytes(stdout: asyncio.StreamReader | None) -> bytes:
    kept = b""
    while stdout is not None and (some := await stdout.read(_MOST_KEPT)):
        kept = (kept + some)[-_MOST_KEPT:]
    return kept
