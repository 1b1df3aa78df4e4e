from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from warehouse import STOCK, reward, tasks


def stock(item: str, city: str) -> str:
    """Units on hand.

    Args:
        item: what is counted
        city: where

    Returns:
        The number of units.
    """
    return str(STOCK.get((item, city), "error"))


def rewards(completions: list[Any], expected: list[str], **_: Any) -> list[float]:
    return [
        reward(messages[-1]["content"], answer)
        for messages, answer in zip(completions, expected, strict=True)
    ]


if __name__ == "__main__":
    rows = [
        {
            "prompt": [{"role": "user", "content": task["question"]}],
            "expected": task["expected"],
        }
        for task in tasks()
    ]
    trainer = GRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        reward_funcs=rewards,
        train_dataset=Dataset.from_list(rows),
        tools=[stock],
        args=GRPOConfig(
            output_dir="out",
            learning_rate=1e-6,
            num_train_epochs=3,
            num_generations=8,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=16,
            max_completion_length=1024,
            max_tool_calling_iterations=4,
            use_vllm=True,
            vllm_mode="colocate",
        ),
    )
    trainer.train()
