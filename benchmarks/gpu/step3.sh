#!/usr/bin/env bash
# Step 3 of the visit: bash benchmarks/gpu/step3.sh [SECONDS]   (carries .gpu3: vLLM and the other packages)
# The whole of Ratchet learns on real weights, before anything else. While its agent works: rounding and small steps on
# these weights, in the learner and in vLLM, which measures no time. Then, alone on the GPU: throughput with CUDA graphs
# and adapters loaded under load, and the questions that are left.
limit=${1:-560}
. "$(dirname "$0")/common.sh"
SHAPE=${SHAPE:-1.5b}
[ -d "$SITE/vllm" ] || { tar -xJf "${BUNDLE:-.gpu3/bundle.tar.xz}" -C "$SITE" && "$PYTHON" -m compileall -q -j 16 "$SITE" >/dev/null 2>&1; }
say "unpacked, modules compiled"
[ -f "$REAL/tokenizer_config.json" ] || real_weights
[ -f "$WORK/no-expandable-segments" ] && export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False
# The demo with its own settings, but for vLLM's command and share: the plan gives a model this small 83% of 80 GB.
timeout -s INT -k 30 $(($(left) - 60)) "$PYTHON" -m ratchet demo --real --model "$REAL" --dtype bfloat16 \
    --minutes "${MINUTES:-2.5}" --state-dir "$WORK/state" ${DEMO:-} \
    --set "vllm.command=[$PYTHON, $PWD/benchmarks/gpu/vllm26.py]" --set "vllm.extra_args=[--enforce-eager]" \
    --set vllm.gpu_memory_utilization=0.35 \
    >"$OUT/demo.txt" 2>&1 &
playing=$!
# Another process must not take or give back memory while the demo's vLLM measures what is free: wait for the traffic.
until grep -q "the agent works" "$OUT/demo.txt" 2>/dev/null || ! kill -0 $playing 2>/dev/null; do sleep 1; done
kill -0 $playing 2>/dev/null && say "the demo's agent works" || { say "the demo FAILED"; tail -30 "$OUT/demo.txt"; }
logs "$WORK/state/demo-real"  # they come back even if this call is cut off
"$PYTHON" -m benchmarks.gpu.make_model "$WORK/random" "$SHAPE" "$DEVICE" 2>&1 | tail -1
server bf16 "$REAL" 8101 --enforce-eager
server graphs "$WORK/random" 8102 ${GRAPHS:--cc.mode=0 -cc.cudagraph_mode=FULL_DECODE_ONLY}
timeout 120 "$PYTHON" -m benchmarks.gpu.measure noise moves --at-once --seconds 110 --model "$REAL" --device "$DEVICE" \
    --shape "${TINY:-7b}" >>"$OUT/questions.txt" 2>&1 &
questions=$!
if ready bf16 8101 $((120 * ${PATIENCE:-1})); then
    timeout $((75 * ${PATIENCE:-1})) "$PYTHON" -m benchmarks.gpu.served_change "$REAL" "$WORK/small" http://localhost:8101 \
        --label bf16 --device "$DEVICE" --rows "${ROWS:-64}" >>"$OUT/served.jsonl" 2>"$WORK/logs/served.txt"
    say "served changes read: exit code $?"
fi
wait $questions
say "rounding of the real weights: exit code $?"
wait $playing
say "demo over: exit code $?"
tail -60 "$OUT/demo.txt"
cp "$WORK"/state/demo-real/result.json "$OUT/" 2>/dev/null
ended bf16
if ready graphs 8102 $((30 * ${PATIENCE:-1})); then
    timeout $((75 * ${PATIENCE:-1})) "$PYTHON" -m benchmarks.gpu.served_load http://localhost:8102 "$WORK/random-adapters" ${LOAD:-} 2>&1 | tee -a "$OUT/served.jsonl"
    say "load measured"
fi
ended graphs
logs "$WORK/state/demo-real"
for part in ${QUESTIONS:-beside}; do
    [ "$(left)" -gt 20 ] && timeout $(($(left) - 5)) "$PYTHON" -m benchmarks.gpu.measure $part --seconds $(($(left) - 10)) \
        --shape "${TINY:-7b}" --device "$DEVICE" >>"$OUT/questions.txt" 2>&1
    say "$part: exit code $?"
done
grep -h '"change"' "$OUT/served.jsonl" | cut -c1-290
cut -c1-290 "$OUT/questions.txt" | tail -${TAIL:-70}
say "step 3 is over"
