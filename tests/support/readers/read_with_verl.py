"""Run by verl's Python: reads a file by one of verl's dataset classes, prints what comes out.

read_with_verl.py CLASS FILE TOKENIZER [NAME=JSON ...]
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.trainer.sft_trainer import create_sft_dataset
from verl.utils.dataset.dataset_utils import SFTTensorCollator
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn


def main(kind: str, file: str, tokenizer: str, *settings: str) -> None:
    given = {name: json.loads(value) for name, _, value in (s.partition("=") for s in settings)}
    config = OmegaConf.create({"custom_cls": {"path": None, "name": None}, **given})
    model = AutoTokenizer.from_pretrained(tokenizer)
    if kind == "RLHFDataset":
        dataset = RLHFDataset(file, model, config)
        batch = collate_fn([dataset[index] for index in range(len(dataset))])
    else:
        dataset = create_sft_dataset([file], config, model, None)
        batch = SFTTensorCollator(config.pad_mode)([dataset[i] for i in range(len(dataset))])
    print(json.dumps({name: _plain(values) for name, values in batch.items()}))


def _plain(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return [row.tolist() for row in values.unbind()]
    return values.tolist()


main(*sys.argv[1:])
