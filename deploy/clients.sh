#!/bin/sh
# Set up the agents' SDKs and frameworks that the tests run, away from Ratchet's own environment: deploy/clients.sh VENV.
#
# One virtual environment VENV/clients/NAME per tests/clients/requirements/NAME.txt, since their needs conflict;
# VENV/clients/mipro with what Ratchet's small part and its extra tune-mipro need, for the same reason; and
# VENV/clients/node from tests/clients/node where node is installed. Does nothing for what is up to date.
# pip's own PIP_INDEX_URL and PIP_EXTRA_INDEX_URL apply to the first, npm's own settings to the second.
set -eu

venv=$1
tests=tests/clients
home=$venv/clients
python=$venv/bin/python

export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-}}"
[ -n "$UV_DEFAULT_INDEX" ] || unset UV_DEFAULT_INDEX
export UV_INDEX="${UV_INDEX:-${PIP_EXTRA_INDEX_URL:-}}"
[ -n "$UV_INDEX" ] || unset UV_INDEX

key() {
    "$python" -c 'import hashlib, pathlib, sys
print(hashlib.sha256(b"".join(pathlib.Path(name).read_bytes() for name in sys.argv[1:])).hexdigest()[:16])' "$0" "$@"
}
failed() {
    echo "make: setting up $home/$1 failed; the message above says why. Run the same make target again to go on," >&2
    echo "make: or leave these tests out: RATCHET_SKIP_CLIENTS=1 make test" >&2
    exit 1
}

if [ -n "${RATCHET_SKIP_CLIENTS:-}" ]; then exit 0; fi

environment() { # NAME FILE [OPTIONS...]
    name=$1
    file=$2
    shift 2
    stamp=$home/$name/.ratchet-$(key "$file")
    if [ -f "$stamp" ]; then return 0; fi
    echo "Setting up $home/$name for the tests of real clients ..."
    rm -rf "$home/$name"
    mkdir -p "$home"
    "$venv/bin/uv" venv --quiet --python "$python" "$home/$name" || failed "$name"
    "$venv/bin/uv" pip install --quiet --python "$home/$name/bin/python" --requirement "$file" "$@" || failed "$name"
    touch "$stamp"
}

bfcl() { # by the command that users set it up with: pip's own settings apply
    stamp=$home/bfcl/.ratchet-$(key tuner/environments/bfcl/requirements.txt)
    if [ -f "$stamp" ]; then return 0; fi
    echo "Setting up $home/bfcl for the test of \`ratchet eval bfcl\` ..."
    "$python" -m ratchet eval bfcl --setup --environment "$home/bfcl" || failed bfcl
    touch "$stamp"
}

node() {
    stamp=$home/node/.ratchet-$(key "$tests/node/package.json" "$tests/node/package-lock.json")
    if [ -f "$stamp" ]; then return 0; fi
    echo "Setting up $home/node for the tests of real clients ..."
    rm -rf "$home/node"
    mkdir -p "$home/node"
    cp "$tests/node/package.json" "$tests/node/package-lock.json" "$home/node/"
    (cd "$home/node" && npm ci --silent --no-audit --no-fund) || failed node
    touch "$stamp"
}

# Side by side: each mostly waits for downloads.
running=
begin() {
    "$@" &
    running="$running $!"
}
begin bfcl
if command -v npm >/dev/null 2>&1; then begin node; fi
for file in "$tests"/requirements/*.txt; do
    begin environment "$(basename "$file" .txt)" "$file"
done
begin environment mipro pyproject.toml --extra tune-mipro
status=0
for process in $running; do
    wait "$process" || status=1
done
exit $status
