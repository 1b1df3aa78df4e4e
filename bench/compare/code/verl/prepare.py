from datasets import Dataset
from warehouse import tasks

if __name__ == "__main__":
    rows = [
        {
            "data_source": "warehouse",
            "agent_name": "tool_agent",
            "prompt": [{"role": "user", "content": task["question"]}],
            "reward_model": {"style": "rule", "ground_truth": task["expected"]},
        }
        for task in tasks()
    ]
    Dataset.from_list(rows).to_parquet("train.parquet")
