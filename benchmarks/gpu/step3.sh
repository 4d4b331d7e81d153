#!/usr/bin/env bash
# Step 3 of the visit: bash benchmarks/gpu/step3.sh [SECONDS]   (carries .gpu3: the other half)
# Real weights: the whole of Ratchet on one GPU learns; what vLLM serves of small steps; then the questions of speed.
limit=${1:-420}
. "$(dirname "$0")/common.sh"
if [ ! -f "$WORK/smollm2/config.json" ]; then
    tar -xJf .gpu3/gguf.tar.xz -C "$SITE" && cp .gpu3/part.01 "$WORK/"
    mkdir -p "$WORK/gguf" && cat "$WORK"/part.0? >"$WORK/gguf/m.gguf"
    "$PYTHON" -m ratchet.demo.pretrained_model "$WORK/gguf/m.gguf" "$WORK/smollm2" 2>&1 | tail -1
fi
say "real weights"
server bf16 "$WORK/smollm2" 8101 --enforce-eager
server fp32head "$WORK/smollm2" 8102 --enforce-eager --hf-overrides '{"head_dtype": "float32"}'
# The demo with its own settings, but for vLLM's command.
demo=$(($(left) - ${AFTER:-190}))
timeout -s INT $demo "$PYTHON" -m ratchet demo --real --model "$WORK/smollm2" --dtype bfloat16 --minutes "${MINUTES:-2}" \
    --state-dir "$WORK/state" --set "vllm.command=[$PYTHON, $PWD/benchmarks/gpu/vllm26.py]" \
    --set "vllm.extra_args=[--enforce-eager]" ${DEMO:-} >"$OUT/demo.txt" 2>&1 &
playing=$!
if ready bf16 8101 $((120 * ${PATIENCE:-1})); then
    urls="http://localhost:8101" labels=bf16
    ready fp32head 8102 $((60 * ${PATIENCE:-1})) && urls="$urls http://localhost:8102" labels="$labels fp32-head"
    timeout $((75 * ${PATIENCE:-1})) "$PYTHON" -m benchmarks.gpu.served_change "$WORK/smollm2" "$WORK/small" $urls --label $labels \
        --device "$DEVICE" --rows "${ROWS:-64}" 2>&1 | tee -a "$OUT/served.jsonl" | cut -c1-330
    say "served changes read"
fi
ended bf16 fp32head
timeout 60 "$PYTHON" -m benchmarks.gpu.measure noise moves --at-once --seconds 55 --model "$WORK/smollm2" \
    --shape "${TINY:-7b}" --device "$DEVICE" >"$OUT/questions.txt" 2>&1
say "noise and moves of real weights"
wait $playing; say "demo over: exit code $?"
cat "$OUT/demo.txt" | tail -60
cp "$WORK"/state/demo-real/result.json "$OUT/" 2>/dev/null
# At most eight files come back: the logs of the demo are one archive.
tar -C "$WORK/state/demo-real" -czf "$OUT/demo-logs.tar.gz" --exclude "*.db*" --exclude "*.safetensors" --exclude "*.pt" . 2>/dev/null
timeout $(($(left) - 5)) "$PYTHON" -m benchmarks.gpu.measure step trl beside experts --seconds $(($(left) - 8)) \
    --shape "${TINY:-7b}" --device "$DEVICE" >>"$OUT/questions.txt" 2>&1
[ "$(left)" -gt 70 ] && timeout 60 "$PYTHON" -m benchmarks.gpu.worker_scaling 4 1 2 4 7 2>&1 | tee "$OUT/workers.txt"
cut -c1-300 "$OUT/questions.txt" | tail -45
say "step 3 is over"
