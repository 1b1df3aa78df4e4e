#!/usr/bin/env bash
set -euo pipefail

trainer serve &
trap 'kill %1' EXIT
export OPENAI_BASE_URL=http://127.0.0.1:4141/v1 OPENAI_API_KEY=unused
until curl -sf http://127.0.0.1:4141/healthz >/dev/null; do sleep 1; done
python train.py
