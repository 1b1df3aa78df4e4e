"""The main job as it is played for its test: two starts of `trainer serve`, agents at work.

`Job` is what the play leaves: the folder with the store, and what was seen meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

from support.agents.toy_agents import MAX_TOKENS, SPLIT, CompletedToyCall, ToyAgents, plainly
from support.trainer.trainer_serve import Ended, TrainerServe, cli, cli_json
from tracegrad import flush, rollout
from tracegrad.store import Ledger, RolloutDetail, StepRecord, Store
from tracegrad_trainer.inference.logprob_probe import sample_probe
from tracegrad_trainer.utils.network import http_client

PROMPT = [5 + 7 * i % 90 for i in range(40)]


@dataclass
class Job:
    """What the run left, and what was seen of it while it ran."""

    model: Path
    state_dir: Path
    seen: list[CompletedToyCall] = field(default_factory=list)
    during: dict[str, Any] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)
    version_stopped: int = -1
    version_resumed: int = -1
    served: list[float] = field(default_factory=list)  # log-probs of the same tokens, before ...
    served_again: list[float] = field(default_factory=list)  # ... and after the second start
    early_rollout: str = ""  # the first call that the second start answered

    @property
    def store_url(self) -> str:
        return f"sqlite:///{self.state_dir}/store.db"

    def details(self) -> dict[str, RolloutDetail]:
        with Store.open(self.store_url, create=False) as store:
            rows = store.rollouts(limit=None)
            return {row.rollout_id: store.rollout(row.rollout_id) for row in rows}

    def steps(self) -> list[StepRecord]:
        with Store.open(self.store_url, create=False) as store:
            return Ledger(store).steps()


def first_start(job: Job, run: TrainerServe) -> None:
    """Two steps while agents work on, a third on policy; and rollouts that are not trained."""
    toys = ToyAgents(run.url)
    asyncio.run(others(toys))
    asyncio.run(batch(toys, 1, temperature=0.0))
    asyncio.run(batch(toys, 2))
    run.wait(lambda: run.is_idle_after(step=2))
    asyncio.run(batch(toys, 3))
    run.wait(lambda: run.is_idle_after(step=3))
    job.seen = toys.seen
    sample = sample_probe(run.vllm_url, PROMPT, tokens=16)
    job.served = served_logprobs(run, sample.token_ids)
    with Store.open(run.store_url, create=False) as store:
        job.version_stopped = store.current_version() or 0
    rollouts = ["tracegrad", "rollouts"]
    store_option = ["--store", run.store_url]
    job.during = {
        "status": cli_json("trainer", "status", "--state-dir", str(job.state_dir), "--json"),
        "text": cli("trainer", "status", "--state-dir", str(job.state_dir)),
        "ls": cli_json(*rollouts, "ls", *store_option, "--json", "--limit", "100"),
        "show": cli(*rollouts, "show", job.seen[0].rollout_id, *store_option),
        "sample": sample.token_ids,
        "mark": httpx.post(f"{run.url}/api/push/version", json={"version": 77}).status_code,
        "environments": {name: environment_of(run, name) for name in ("vllm", "proxy", "ranks")},
        "command_lines": [" ".join(each.cmdline()) for each in run.family.alive()],
    }


def environment_of(run: TrainerServe, child: str) -> dict[str, str]:
    return psutil.Process(run.pid_of(child)).environ()


async def batch(toys: ToyAgents, number: int, temperature: float = 1.0) -> None:
    """What one step takes: two groups of four."""
    tasks = (f"task {number}a", f"task {number}b")
    await asyncio.gather(toys.group(tasks[0], temperature), toys.group(tasks[1]))
    flush()


async def others(toys: ToyAgents) -> None:
    """Rollouts that must not be trained: held out, failed by no fault of the policy, open."""
    client = openai.AsyncOpenAI(base_url=f"{toys.url}/v1", api_key="not-needed")
    question = [{"role": "user", "content": "hello"}]
    async with client:
        with rollout(task="exam", tags={"split": "test"}) as exam:
            await plainly(client, question)
            exam.reward(1.0)
        for name, finished in (("failed", True), ("open", False)):
            me = {"rollout_id": name}
            await toys.events({"type": "rollout_started", **me, "task_id": name, "tags": SPLIT})
            await plainly(client.with_options(api_key=f"tg-{name}"), question)
            if finished:
                await toys.events({"type": "rollout_finished", **me, "outcome": "env_error"})
    flush()


def second_start(job: Job, run: TrainerServe) -> None:
    """An agent that never noticed calls on; then the served weights are asked, then a step."""
    eager = threading.Thread(target=call_until_answered, args=(job, run))
    eager.start()
    run.wait_serving()
    eager.join(60)
    with Store.open(run.store_url, create=False) as store:
        job.version_resumed = store.current_version() or 0
    job.served_again = served_logprobs(run, job.during["sample"])
    toys = ToyAgents(run.url)
    asyncio.run(batch(toys, 4))
    run.wait(lambda: run.is_idle_after(step=4))
    job.seen += toys.seen


def call_until_answered(job: Job, run: TrainerServe) -> None:
    url = f"{run.url}/rollouts/early/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        while run.process.poll() is None:
            try:
                client.chat.completions.create(
                    model="policy",
                    messages=[{"role": "user", "content": "are you there?"}],
                    max_tokens=MAX_TOKENS,
                )
            except (openai.APIConnectionError, openai.InternalServerError):
                continue
            job.early_rollout = "early"
            return


def served_logprobs(run: TrainerServe, completion: list[int]) -> list[float]:
    """What vLLM now thinks of `completion` after PROMPT, in nats."""
    request = {
        "model": "policy",
        "prompt": PROMPT + completion,
        "max_tokens": 1,
        "prompt_logprobs": 0,
    }
    with http_client(run.vllm_url, timeout_s=60) as client:
        answer = client.post("/v1/completions", json=request)
    answer.raise_for_status()
    [choice] = answer.json()["choices"]
    tail = choice["prompt_logprobs"][len(PROMPT) :]
    return [each[str(token)]["logprob"] for each, token in zip(tail, completion, strict=True)]
