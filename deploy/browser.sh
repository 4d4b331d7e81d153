#!/bin/sh
# Set up the Chromium in which the tests look at the console: deploy/browser.sh VENV. Does nothing when it is up to date.
#
# It stands in VENV/clients/browser, comes from npm as tests/clients/browser says, and needs no root. Where it cannot be
# had (no npm, another kind of machine, CHROMIUM names another one) nothing fails: the tests that need it say what is
# missing and are left out. npm's own settings apply.
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
    echo "make: no Chromium could be set up; the tests of the console that need one are left out" >&2
fi
