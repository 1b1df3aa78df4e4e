import asyncio

import art
from agent import rollout
from art.local import LocalBackend
from art.utils.iterate_dataset import iterate_dataset
from warehouse import tasks


async def main() -> None:
    backend = LocalBackend()
    model = art.TrainableModel(
        name="assistant",
        run_name="assistant",
        project="warehouse",
        base_model="Qwen/Qwen3-0.6B",
    )
    await model.register(backend)
    for batch in iterate_dataset(
        tasks(), groups_per_step=16, num_epochs=3, initial_step=await model.get_step()
    ):
        groups = await art.gather_trajectory_groups(
            [art.trajectory_group(rollout(model, task) for _ in range(8)) for task in batch.items],
            max_exceptions=8 * len(batch.items),
        )
        result = await backend.train(model, groups, learning_rate=1e-6, loss_fn="ppo")
        await model.log(groups, metrics=result.metrics, step=result.step, split="train")
    await backend.close()


if __name__ == "__main__":
    asyncio.run(main())
