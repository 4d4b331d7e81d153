#!/usr/bin/env bash
# Step 2 of the visit: bash benchmarks/gpu/step2.sh   (carries .gpu2: the other half, and what reads it)
# Makes the real weights. If that fails the visit can end here; step 3 tries once more, with the bundle's packages.
. "$(dirname "$0")/common.sh"
real_weights
# The learner sets this for itself; a virtual machine may not have it.
[ "$DEVICE" = cuda ] && { PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "$PYTHON" -c 'import torch; torch.ones(2**28, device="cuda").sum().item()' \
    && say "expandable segments work" || touch "$WORK/no-expandable-segments"; }
[ -f "$REAL/tokenizer_config.json" ]
