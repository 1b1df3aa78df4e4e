from typing import Any

from agent import answer
from warehouse import reward, tasks

import tracegrad


async def solve(task: dict[str, Any]) -> float:
    return reward(await answer(task["question"]), task["expected"])


if __name__ == "__main__":
    tracegrad.run(solve, train=tasks(), epochs=3)
