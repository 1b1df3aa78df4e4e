import json
from pathlib import Path

from warehouse import tasks

if __name__ == "__main__":
    lines = [
        json.dumps(
            {
                "prompt": task["question"],
                "label": task["expected"],
                "metadata": {"expected": task["expected"]},
            }
        )
        for task in tasks()
    ]
    Path("train.jsonl").write_text("\n".join(lines), encoding="utf-8")
