#!/usr/bin/env bash
# Collects into a folder the wheels that benchmarks/gpu.py needs on a machine without a network that has Python 3.12,
# torch, transformers, accelerate and safetensors: bash benchmarks/gpu_wheels.sh FOLDER [PYTHON_VERSION]
# pyarrow and pandas are repacked without parts that nothing here imports (tests, headers, Flight), so that
# all wheels together stay under 64 MB.
set -euo pipefail
folder=${1:?usage: bash benchmarks/gpu_wheels.sh FOLDER [PYTHON_VERSION]}
version=${2:-3.12}
here=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$folder"
platforms=()
for glibc in 28 27 24 17 5; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
    "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --dest "$folder" \
    peft==0.21.2 trl==1.16.0 datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1 multiprocess==0.70.19 dill==0.4.1 \
    python-dateutil six xxhash==4.1.0 msgspec
python3 -m pip wheel --quiet --no-deps --wheel-dir "$folder" "$here"
python3 - "$folder" <<'PYTHON'
"""Repacks the wheels of pyarrow and pandas; pip --no-deps --target does not read their RECORD."""
import pathlib
import re
import sys
import zipfile

unused = re.compile(r"^(pyarrow/(tests|include|includes|src)/|pandas/tests/|pyarrow/.*flight)")
total = 0
for wheel in sorted(pathlib.Path(sys.argv[1]).glob("*.whl")):
    if wheel.name.startswith(("pyarrow", "pandas")):
        smaller = wheel.with_suffix(".part")
        with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as new:
            for entry in old.infolist():
                if not unused.match(entry.filename):
                    new.writestr(entry.filename, old.read(entry))
        smaller.replace(wheel)
    total += wheel.stat().st_size
print(f"{total / 1e6:.1f} MB in {sys.argv[1]}")
sys.exit(total > 64e6)
PYTHON
