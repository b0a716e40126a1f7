#!/usr/bin/env bash
# Installs the dependencies of the browser tests: Chromium and two npm packages. Prints what could not be installed; the
# tests that need it are then skipped with the same message.
set -u
cd "$(dirname "$0")/.."

missing() {
  echo "The page is not tested in a browser: $1" >&2
  exit 0
}

if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null && ! command -v google-chrome >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null \
      || missing "apt-get could not install chromium."
  else
    missing "install Chromium (Debian: apt-get install chromium)."
  fi
fi
command -v npm >/dev/null || missing "install Node.js with npm."
npm --prefix tests/browser ci --no-audit --no-fund --ignore-scripts --silent || missing "npm could not install playwright-core."
touch tests/browser/node_modules/.installed
