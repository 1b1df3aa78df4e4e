"""Started by tests, under a Python that has Harbor: one trial, told in one line of JSON.

run_trials.py AGENT MODEL TASK FOLDER CACHE
run_trials.py group ... : two trials of it by `tracegrad.run`; their rollouts are in the store
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import tracegrad
from support.harbor.overlay_sandboxes import OverlaySandboxes
from tracegrad.runner.agent_install import install_agent
from tracegrad.runner.agent_layer import agent_layer
from tracegrad.runner.recipe_files import find_recipe, recipe_paths
from tracegrad_integrations.harbor.trial import (
    TrialSettings,
    run_trial,
    trial_agent,
    trial_tasks,
)


async def main(
    agent: str, model: str, task: Path, folder: Path, cache: Path, *, as_group: bool
) -> None:
    recipe = find_recipe(agent) if agent in recipe_paths() else None
    layers = {}
    if recipe is not None:
        layers[recipe.id] = agent_layer(recipe, install_agent(recipe, cache))
    (folder / "sandboxes").mkdir()
    backend = OverlaySandboxes(folder / "sandboxes", layers)
    settings = TrialSettings(
        agent=agent, model=model, backend=backend, trials=folder / "trials", recipe=recipe
    )
    try:
        if as_group:
            report = await tracegrad.run_async(
                trial_agent(settings),
                train=trial_tasks(task.parent),
                name=agent,
                attempts=2,
                folder=folder / "run",
                said=lambda line: print(line, file=sys.stderr),
            )
            print(json.dumps({"outcomes": report.outcomes, "sandboxes": backend.started}))
            return
        done = await run_trial(task, settings)
    finally:
        await backend.close()
    tracegrad.flush()
    told = {"rollout": done.rollout_id, "outcome": done.outcome, "reason": done.reason}
    print(json.dumps({**told, "reward": done.reward, "sandboxes": backend.started}))


if __name__ == "__main__":
    as_group = sys.argv[1] == "group"
    agent, model, *paths = sys.argv[1 + as_group :]
    asyncio.run(main(agent, model, *map(Path, paths), as_group=as_group))
