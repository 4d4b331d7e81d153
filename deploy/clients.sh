#!/bin/sh
# Set up the agent SDKs and frameworks for the tests of real clients: deploy/clients.sh VENV. Skips what is up to date.
#
# Their requirements conflict with each other and with Ratchet's, so each has an environment of its own:
# VENV/clients/NAME for each tests/clients/requirements/NAME.txt, for plug-ins whose packages conflict with others, and
# VENV/clients/node from tests/clients/node if npm is installed.
# pip's PIP_INDEX_URL and PIP_EXTRA_INDEX_URL apply to the Python ones, npm's own settings to node.
set -eu

venv=$1
tests=tests/clients
home=$venv/clients
python=$venv/bin/python

. deploy/index.sh

key() {
    "$python" -c 'import hashlib, pathlib, sys
paths = [pathlib.Path(name.partition("[")[0]) for name in sys.argv[1:]]
paths = [path / "pyproject.toml" if path.is_dir() else path for path in paths]
files = [path for path in paths if path.is_file()]
print(hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16])' "$0" "$@"
}
failed() {
    echo "make: setting up $home/$1 failed; see the message above. Run the same make target again to continue," >&2
    echo "make: or skip these tests: RATCHET_SKIP_CLIENTS=1 make test-all" >&2
    exit 1
}

if [ -n "${RATCHET_SKIP_CLIENTS:-}" ]; then exit 0; fi

environment() { # NAME OPTIONS...: what uv installs
    name=$1
    shift
    stamp=$home/$name/.ratchet-$(key "$@")
    if [ -f "$stamp" ]; then return 0; fi
    echo "Setting up $home/$name for the tests of real clients ..."
    rm -rf "$home/$name"
    mkdir -p "$home"
    "$venv/bin/uv" venv --quiet --python "$python" "$home/$name" || failed "$name"
    "$venv/bin/uv" pip install --quiet --python "$home/$name/bin/python" "$@" || failed "$name"
    touch "$stamp"
}

bfcl() { # with the command that users run; pip's own settings apply
    stamp=$home/bfcl/.ratchet-$(key plugins/bfcl/ratchet_bfcl/requirements.txt)
    if [ -f "$stamp" ]; then return 0; fi
    echo "Setting up $home/bfcl for the test of \`ratchet eval bfcl\` ..."
    "$python" -m ratchet eval bfcl --setup --environment "$home/bfcl" || failed bfcl
    touch "$stamp"
}

plugins() { # one after the other: each builds Ratchet in this folder
    environment mipro --editable . --editable plugins/mipro
    environment verifiers --editable . --editable "plugins/verifiers[openenv]"
    for file in plugins/agentscope/tests/*.txt; do
        environment "$(basename "$file" .txt)" --editable . --editable plugins/agentscope --requirement "$file"
    done
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

# In parallel: each mostly waits for downloads.
running=
begin() {
    "$@" &
    running="$running $!"
}
begin bfcl
if command -v npm >/dev/null 2>&1; then begin node; fi
for file in "$tests"/requirements/*.txt; do
    begin environment "$(basename "$file" .txt)" --requirement "$file"
done
begin environment openjudge --requirement plugins/openjudge/tests/openjudge.txt
begin plugins
status=0
for process in $running; do
    wait "$process" || status=1
done
exit $status
