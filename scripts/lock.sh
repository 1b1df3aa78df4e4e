#!/bin/sh
# Resolves requirements/ again: {cpu,cuda}.txt is what `make demo` needs, {cpu,cuda}-dev.txt what the
# development set has besides, in versions that fit together; proxy.txt and trainer-cpu.txt what images
# hold, tools.txt what builds distributions, docs.txt what the site needs beyond both. Needs `uv` (pip
# install uv); installing from them does not. On a CPU machine torch itself is left to
# scripts/install.py, which takes the
# CPU build from wherever pip is set up to look.
set -eu
cd "$(dirname "$0")/.."
uv="${UV:-uv}"
whole=$(mktemp)
trap 'rm -f "$whole"' EXIT

compile() { # OUTPUT ARGUMENTS...
    output=$1
    shift
    "$uv" pip compile "$@" --universal --python-version 3.11 --generate-hashes \
        --no-annotate --no-header -q -o "$output"
}

without() { # LOCK: flags that leave its packages out
    sed -n 's/^\([a-z0-9._-]*\)==.*/--no-emit-package \1/p' "$1" | sort -u
}

lock() { # NAME ARGUMENTS...: NAME.txt and NAME-dev.txt
    name=$1
    shift
    # What is locked now stays, unless `--upgrade` or the like is among the arguments.
    cat "requirements/$name.txt" "requirements/$name-dev.txt" >"$whole" 2>/dev/null || true
    compile "$whole" pyproject.toml --extra dev "$@"
    compile "requirements/$name.txt" pyproject.toml --extra demo --constraints "$whole" "$@"
    # shellcheck disable=SC2046
    compile "requirements/$name-dev.txt" pyproject.toml --extra dev --constraints "$whole" "$@" \
        $(without "requirements/$name.txt")
}

never=$(sed -n "s/ ; sys_platform == 'never'//p" requirements/cpu.overrides)
# shellcheck disable=SC2046
lock cpu requirements/cpu.in --overrides requirements/cpu.overrides \
    $(for each in torch $never; do echo "--no-emit-package $each"; done) "$@"
lock cuda requirements/cuda.in --extra vllm "$@"

# What images hold, in the versions of the CPU lock; and what builds distributions.
part() { # NAME ARGUMENTS...
    name=$1
    shift
    compile "requirements/$name.txt" "$@" --constraints requirements/cpu.txt \
        --constraints requirements/cpu-dev.txt
}
part proxy pyproject.toml --extra proxy --extra postgres
part trainer-cpu pyproject.toml --extra trainer --extra postgres \
    --overrides requirements/cpu.overrides --no-emit-package torch
part tools requirements/tools.in

# shellcheck disable=SC2046
compile requirements/docs.txt pyproject.toml --extra docs --constraints requirements/cpu.txt \
    --constraints requirements/cpu-dev.txt \
    $(without requirements/cpu.txt) $(without requirements/cpu-dev.txt) "$@"
