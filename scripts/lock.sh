#!/bin/sh
# Resolves requirements/cpu.txt and requirements/cuda.txt again. Needs `uv` (pip install uv);
# installing from them does not. On a CPU machine torch itself is left to scripts/install.py,
# which takes the CPU build from wherever pip is set up to look.
set -eu
cd "$(dirname "$0")/.."
uv="${UV:-uv}"
never=$(sed -n "s/ ; sys_platform == 'never'//p" requirements/cpu.overrides)
skip=""
for name in torch $never; do skip="$skip --no-emit-package $name"; done
common="--universal --python-version 3.11 --generate-hashes --no-annotate --no-header -q"
# shellcheck disable=SC2086
"$uv" pip compile pyproject.toml requirements/cpu.in --extra dev \
    --overrides requirements/cpu.overrides $common $skip "$@" -o requirements/cpu.txt
# shellcheck disable=SC2086
"$uv" pip compile pyproject.toml requirements/cuda.in --extra dev --extra vllm \
    $common -o requirements/cuda.txt
