#!/bin/sh
# Write deploy/constraints.txt: the versions that VENV holds, with hashes: deploy/constraints.sh VENV.
#
# The base package, the trainer, the demo and the development tools; vLLM is not in it, because its CPU and GPU builds
# need different versions of torch's companions. Packages of other platforms carry markers.
set -eu

uv=$1/bin/uv
python=$1/bin/python
. deploy/index.sh

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# A local version such as 2.13.0+cpu is a build of the same release; triton belongs to the build of torch.
"$uv" pip freeze --python "$python" --exclude-editable | grep '==' | grep -v '^triton==' | sed 's/+.*//' >"$folder/installed.txt"
{
    echo "# Written by deploy/constraints.sh: versions that pass the tests, with hashes. CONTRIBUTING.md says how to use it."
    "$uv" pip compile --quiet --universal --python "$python" --python-version 3.11.9 --generate-hashes --no-annotate --no-header \
        --no-emit-index-url --no-emit-find-links --constraint "$folder/installed.txt" \
        --extra trainer --extra demo --extra postgres --group dev pyproject.toml
} >"$folder/constraints.txt"
cp "$folder/constraints.txt" deploy/constraints.txt
