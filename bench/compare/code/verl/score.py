from typing import Any

from warehouse import reward


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    # All that was said after the prompt, as text: the last turn has to be cut out.
    said = solution_str.rsplit("assistant\n", 1)[-1]
    return reward(said, ground_truth)
