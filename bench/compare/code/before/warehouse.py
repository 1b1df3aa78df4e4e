"""What the agent works with, and what its answers are worth."""

import json
from typing import Any

ITEMS = ("lamp", "chair", "table", "clock")
CITIES = ("Oslo", "Rome", "Lima", "Cairo", "Paris")
UNITS = (17, 42, 8, 31, 5, 64, 12, 90, 27, 3, 71, 19, 55, 38, 23, 46, 9, 83, 14, 60)
STOCK = dict(zip(((item, city) for item in ITEMS for city in CITIES), UNITS, strict=True))

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "stock",
            "description": "units on hand",
            "parameters": {
                "type": "object",
                "properties": {"item": {"type": "string"}, "city": {"type": "string"}},
                "required": ["item", "city"],
            },
        },
    }
]


def run_tool(name: str, arguments: str) -> str:
    try:
        given = json.loads(arguments)
        return str({"stock": STOCK}[name][given["item"], given["city"]])
    except (KeyError, TypeError, ValueError):
        return "error"


def tasks() -> list[dict[str, str]]:
    return [
        {"question": f"How many {item}s are in {city}?", "expected": str(units)}
        for (item, city), units in STOCK.items()
    ]


def reward(answer: str | None, expected: str) -> float:
    return float(answer is not None and answer.strip() == expected)
