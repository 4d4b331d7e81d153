#!/usr/bin/env bash
# Step 1 of the visit: bash benchmarks/gpu/step1.sh [SECONDS]   (carries .gpu1)
# vLLM 0.26 with adapters on the GPU, with a bf16 and an fp32 LM head side by side; meanwhile the questions that measure no
# time; then logprobs, amplified copies, throughput and adapters loaded under load.
limit=${1:-280}
. "$(dirname "$0")/common.sh"
SHAPE=${SHAPE:-1.5b}
tar -xJf "${BUNDLE:-.gpu1/bundle.tar.xz}" -C "$SITE" && say unpacked
"$PYTHON" -m compileall -q -j 16 "$SITE" >/dev/null 2>&1 & compiling=$!
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
"$PYTHON" -m benchmarks.gpu.make_model "$WORK/random" "$SHAPE" "$DEVICE" 2>&1 | tail -2
# The learner sets this for itself; a virtual machine may not have it.
[ "$DEVICE" = cuda ] && { PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "$PYTHON" -c 'import torch; torch.ones(2**28, device="cuda").sum().item()' \
    && say "expandable segments work" || touch "$WORK/no-expandable-segments"; }
wait $compiling; say "model made, modules compiled"
server bf16 "$WORK/random" 8101 --enforce-eager
server fp32head "$WORK/random" 8102 --enforce-eager --hf-overrides '{"head_dtype": "float32"}'
timeout $(($(left) - 90)) "$PYTHON" -m benchmarks.gpu.measure ${QUESTIONS:-noise moves head} --at-once --seconds 110 \
    --shape "${TINY:-7b}" --device "$DEVICE" >"$OUT/questions.txt" 2>&1 &
questions=$!
if ready bf16 8101 $((150 * ${PATIENCE:-1})); then
    grep -aoE "Using [A-Z_0-9]+ .*backend[^\"]*" "$WORK/logs/bf16.log" | sort | uniq -c | head -5
    urls="http://localhost:8101" labels=bf16
    ready fp32head 8102 $((60 * ${PATIENCE:-1})) && urls="$urls http://localhost:8102" labels="$labels fp32-head"
    timeout $((75 * ${PATIENCE:-1})) "$PYTHON" -m benchmarks.gpu.served_change "$WORK/random" "$WORK/adapters" $urls --label $labels \
        --device "$DEVICE" --rows "${ROWS:-64}" 2>&1 | tee -a "$OUT/served.jsonl" | cut -c1-330
    say "served changes read"
    wait $questions; say "questions answered"
    timeout $((60 * ${PATIENCE:-1})) "$PYTHON" -m benchmarks.gpu.served_load http://localhost:8101 "$WORK/adapters" ${LOAD:-} 2>&1 | tee -a "$OUT/served.jsonl"
    say "load measured"
fi
wait $questions
ended bf16 fp32head
logs
cut -c1-300 "$OUT/questions.txt" | tail -${TAIL:-70}
say "step 1 is over"
