#!/usr/bin/env bash
# Step 1 of the visit: bash benchmarks/gpu/step1.sh   (carries .gpu1: half of the real model)
. "$(dirname "$0")/common.sh"
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
cp .gpu1/part.00 "$WORK/" && ls -l "$WORK"
