"""Small file tasks: count something of a file, and write the number into another one.

Every (count, file, answer) belongs to exactly one split, so a held-out task is one of which the
model has never seen the command; each count, file and answer is equally frequent in each split.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Split = Literal["train", "held_out"]
Count = Literal["lines", "words", "bytes"]
COUNTS: tuple[Count, ...] = get_args(Count)
FLAGS: dict[Count, str] = {"lines": "-l", "words": "-w", "bytes": "-c"}
FILES = tuple(
    f"{name}.txt"
    for name in (
        *("lamp", "chair", "table", "clock", "mug", "sofa", "desk", "kettle", "vase", "stool"),
        *("rug", "mirror", "pillow", "basket", "oslo", "rome", "lima", "cairo", "paris", "tokyo"),
    )
)
ANSWERS = ("answer.txt", "count.txt", "result.txt")
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
TRAJECTORY = "trajectory.json"  # mini's own record


@dataclass(frozen=True, slots=True)
class Task:
    count: Count
    file: str
    answer: str

    @property
    def split(self) -> Split:
        places = COUNTS.index(self.count), FILES.index(self.file), ANSWERS.index(self.answer)
        return "train" if sum(places) % 3 else "held_out"

    @property
    def task_id(self) -> str:
        return f"{self.count}-{self.file}-{self.answer}".replace(".txt", "")

    @property
    def prompt(self) -> str:
        return f"Write the number of {self.count} of {self.file} into {self.answer}"

    @property
    def command(self) -> str:
        return f"wc {FLAGS[self.count]} < {self.file} > {self.answer}"

    @property
    def careless_command(self) -> str:
        """`wc` prints the file's name behind the number, if it is told the name."""
        return f"wc {FLAGS[self.count]} {self.file} > {self.answer}"

    @property
    def number(self) -> int:
        text = contents(self.file)
        return {
            "lines": text.count("\n"),
            "words": len(text.split()),
            "bytes": len(text.encode()),
        }[self.count]

    @property
    def reward(self) -> str:
        """A line for the shell: right number, nothing else, and submitted."""
        return (
            f'test "$(cat {self.answer})" = {self.number}'
            f""" && grep -q '"exit_status": "Submitted"' {TRAJECTORY}"""
        )


ALL = tuple(Task(count, file, answer) for count in COUNTS for file in FILES for answer in ANSWERS)


def of(split: Split) -> list[Task]:
    return [task for task in ALL if task.split == split]


def held_out(count: int = 60) -> list[Task]:
    """Always the same ones."""
    return random.Random("held out").sample(of("held_out"), count)


def train_tasks(seed: int = 0) -> Iterator[Task]:
    """Training tasks without end; none repeats before all were asked."""
    rng = random.Random(f"train {seed}")
    while True:
        yield from rng.sample(of("train"), len(of("train")))


def contents(file: str) -> str:
    rng = random.Random(file)
    lines = rng.randrange(3, 30)
    return "".join(" ".join(["word"] * rng.randrange(1, 6)) + "\n" for _ in range(lines))


def workspace(folder: Path) -> Path:
    """Writes the files that every task is about."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in FILES:
        (folder / file).write_text(contents(file))
    return folder
