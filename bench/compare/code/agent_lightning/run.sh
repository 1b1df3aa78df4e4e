#!/usr/bin/env bash
set -euo pipefail

ray start --head
trap 'kill $(jobs -p); ray stop' EXIT
export PYTHONPATH="$PWD"
agl-server key=secret default_proxy.model_name=Qwen/Qwen3-0.6B &
until curl -sf http://localhost:8080/healthz >/dev/null; do sleep 1; done
agl-controller runner_type=local agl_server.key=secret &
python train.py
