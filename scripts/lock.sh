#!/bin/sh
# Resolves requirements/*.txt again. Needs `uv` (pip install uv); installing does not.
# torch is left to scripts/install.py, which takes it from where pip is set up to look.
set -eu
cd "$(dirname "$0")/.."
uv="${UV:-uv}"
skip=""
for name in torch $(sed -n "s/ ; sys_platform == 'never'//p" requirements/cpu.overrides); do
    skip="$skip --no-emit-package $name"
done
# shellcheck disable=SC2086
"$uv" pip compile pyproject.toml requirements/cpu.in --extra dev \
    --overrides requirements/cpu.overrides --universal --python-version 3.11 \
    --generate-hashes --no-annotate --no-header $skip "$@" -q -o requirements/cpu.txt
