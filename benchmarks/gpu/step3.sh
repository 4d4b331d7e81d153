#!/usr/bin/env bash
# Step 3 of the visit: bash benchmarks/gpu/step3.sh [SECONDS]   (carries .gpu3: the other half)
# Real weights: the whole of Ratchet on one GPU learns; while its agent works, what vLLM serves of small steps; then the
# questions of speed, alone on the GPU; then proxy workers.
limit=${1:-420}
. "$(dirname "$0")/common.sh"
if [ ! -f "$WORK/smollm2/config.json" ]; then
    tar -xJf .gpu3/gguf.tar.xz -C "$SITE" && cp .gpu3/part.01 "$WORK/"
    mkdir -p "$WORK/gguf" && cat "$WORK"/part.0? >"$WORK/gguf/m.gguf"
    "$PYTHON" -m ratchet.demo.pretrained_model "$WORK/gguf/m.gguf" "$WORK/smollm2" 2>&1 | tail -1
fi
say "real weights"
# The demo with its own settings, but for vLLM's command and share: the plan gives a model this small 83% of 80 GB.
[ -f "$WORK/no-expandable-segments" ] && export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False
timeout -s INT -k 30 $(($(left) - 60)) "$PYTHON" -m ratchet demo --real --model "$WORK/smollm2" --dtype bfloat16 \
    --minutes "${MINUTES:-2}" --state-dir "$WORK/state" ${DEMO:-} \
    --set "vllm.command=[$PYTHON, $PWD/benchmarks/gpu/vllm26.py]" --set "vllm.extra_args=[--enforce-eager]" \
    --set vllm.gpu_memory_utilization=0.35 \
    >"$OUT/demo.txt" 2>&1 &
playing=$!
# Another process must not take or give back memory while the demo's vLLM measures what is free: wait for the traffic.
until grep -q "the agent works" "$OUT/demo.txt" || ! kill -0 $playing 2>/dev/null; do sleep 1; done
say "the demo's agent works"
server bf16 "$WORK/smollm2" 8101 --enforce-eager
server fp32head "$WORK/smollm2" 8102 --enforce-eager --hf-overrides '{"head_dtype": "float32"}'
if ready bf16 8101 $((90 * ${PATIENCE:-1})); then
    urls="http://localhost:8101" labels=bf16
    ready fp32head 8102 $((30 * ${PATIENCE:-1})) && urls="$urls http://localhost:8102" labels="$labels fp32-head"
    timeout $((75 * ${PATIENCE:-1})) "$PYTHON" -m benchmarks.gpu.served_change "$WORK/smollm2" "$WORK/small" $urls \
        --label $labels --device "$DEVICE" --rows "${ROWS:-64}" >>"$OUT/served.jsonl" 2>"$WORK/logs/served.txt"
    say "served changes read: exit code $?"
fi
ended bf16 fp32head
wait $playing
say "demo over: exit code $?"
tail -60 "$OUT/demo.txt"
cp "$WORK"/state/demo-real/result.json "$OUT/" 2>/dev/null
logs "$WORK/state/demo-real"
for part in "noise moves --at-once --model $WORK/smollm2" "${QUESTIONS:-step trl beside experts}"; do
    [ "$(left)" -gt 20 ] && timeout $(($(left) - 5)) "$PYTHON" -m benchmarks.gpu.measure $part --seconds $(($(left) - 10)) \
        --shape "${TINY:-7b}" --device "$DEVICE" >>"$OUT/questions.txt" 2>&1
    say "$part: exit code $?"
done
[ "$(left)" -gt 60 ] && timeout 55 "$PYTHON" -m benchmarks.gpu.worker_scaling 4 1 2 4 7 2>&1
grep -h '"change"' "$OUT/served.jsonl" | grep '"fp32"' | cut -c1-290
cut -c1-290 "$OUT/questions.txt" | tail -45
say "step 3 is over"
