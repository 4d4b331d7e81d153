#!/bin/sh
# Set up Chromium for the tests of the console: deploy/browser.sh VENV. Does nothing if it is up to date.
#
# Installed in VENV/clients/browser from npm (tests/clients/browser), without root. If it cannot be installed (no npm,
# another platform, CHROMIUM is set), nothing fails: the tests that need it are skipped with the reason.
# npm's own settings apply.
set -eu

here=tests/clients/browser
home=$1/clients/browser

if [ -n "${CHROMIUM:-}${RATCHET_SKIP_CLIENTS:-}" ] || [ "$(uname -sm)" != "Linux x86_64" ]; then exit 0; fi
command -v npm >/dev/null 2>&1 || exit 0

stamp=$home/.ratchet-$(cat "$0" "$here/package.json" "$here/package-lock.json" "$here/unpack.mjs" | cksum | cut -d ' ' -f 1)
if [ -f "$stamp" ]; then exit 0; fi
echo "Setting up $home for the tests of the console ..."
rm -rf "$home"
mkdir -p "$home/unpacked"
cp "$here/package.json" "$here/package-lock.json" "$here/unpack.mjs" "$home/"
if (cd "$home" && npm ci --silent --no-audit --no-fund && TMPDIR=$PWD/unpacked node unpack.mjs >/dev/null); then
    rm -rf "$home/node_modules"
    touch "$stamp"
else
    echo "make: Chromium could not be set up; the browser tests of the console are skipped" >&2
fi
