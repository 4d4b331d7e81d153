# Sourced by the steps: environment, and what they have in common. OUT is the folder whose files come back.
set -u
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_ALLOW_RUNTIME_LORA_UPDATING=True TOKENIZERS_PARALLELISM=false
SITE=${SITE:-/tmp/site} WORK=${WORK:-/tmp/gpu} OUT=${OUT:-$PWD/.gpu-out} PYTHON=${PYTHON:-python3} DEVICE=${DEVICE:-cuda}
export PYTHONPATH=$PWD:$SITE${PYTHONPATH:+:$PYTHONPATH} OUT
REAL=$WORK/smollm2 # the folder of the real model; its tokenizer is written last
mkdir -p "$SITE" "$WORK/logs" "$OUT"
began=$SECONDS
say() { echo "[$((SECONDS - began)) s] $*"; }
left() { echo $((limit - (SECONDS - began))); }  # seconds of this step

# real_weights: makes the folder $REAL of the halves of its GGUF file
real_weights() {
    tar -xJf .gpu2/gguf.tar.xz -C "$SITE" && cp .gpu2/part.01 "$WORK/"
    mkdir -p "$WORK/gguf" && cat "$WORK"/part.0? >"$WORK/gguf/m.gguf"
    "$PYTHON" -m ratchet.demo.pretrained_model "$WORK/gguf/m.gguf" "$REAL" 2>&1 | tail -3
    [ -f "$REAL/tokenizer_config.json" ] && say "real weights" || say "NO real weights"
}

# server NAME MODEL PORT [ARGUMENTS]: starts vLLM in a process group of its own; its log is $WORK/logs/NAME.log
server() {
    local name=$1 model=$2 port=$3
    shift 3
    setsid "$PYTHON" benchmarks/gpu/vllm26.py --model "$model" --served-model-name base@0 --port "$port" --dtype bfloat16 \
        --enable-lora --max-lora-rank 16 --max-loras 4 --max-cpu-loras 8 --logprobs-mode processed_logprobs \
        --generation-config vllm --max-model-len 2048 --max-num-seqs 256 --disable-uvicorn-access-log \
        $([ "$DEVICE" = cuda ] && echo --kv-cache-memory-bytes 4294967296 --gpu-memory-utilization 0.1) "$@" >"$WORK/logs/$name.log" 2>&1 &
    echo $! >"$WORK/$name.pid"
}

# ready NAME PORT SECONDS: waits for a server; says what its log says if it does not come
ready() {
    for _ in $(seq "$3"); do
        curl -sf "localhost:$2/health" >/dev/null && { say "$1 is ready, vLLM $(curl -s "localhost:$2/version")"; return 0; }
        kill -0 "$(cat "$WORK/$1.pid")" 2>/dev/null || break
        sleep 1
    done
    say "$1 is NOT ready"
    grep -aE "Error|error|assert" "$WORK/logs/$1.log" | tail -15
    return 1
}

# ended NAME ...: ends the process groups of servers, which are their own
ended() {
    local name
    for name in "$@"; do kill -- -"$(cat "$WORK/$name.pid")" 2>/dev/null; done
    sleep 2
    for name in "$@"; do kill -KILL -- -"$(cat "$WORK/$name.pid")" 2>/dev/null; done  # one that is starting ignores it
    return 0
}

# logs FOLDER ...: puts the servers' logs, and other folders, into one archive: at most eight files come back
logs() {
    tar -czf "$OUT/logs.tar.gz" --exclude "*.db*" --exclude "*.safetensors" --exclude "*.pt" -C / \
        $(for folder in "$WORK/logs" "$@"; do [ -d "$folder" ] && echo "${folder#/}"; done)
}
