#!/usr/bin/env bash
set -euo pipefail

accelerate launch --num_processes 1 train.py
