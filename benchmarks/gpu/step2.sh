#!/usr/bin/env bash
# Step 2 of the visit: bash benchmarks/gpu/step2.sh   (carries .gpu2: half of the real model)
. "$(dirname "$0")/common.sh"
cp .gpu2/part.00 "$WORK/" && ls -l "$WORK"
