#!/bin/sh
# Installs the validators into a directory: `deploy/tools.sh .venvs/tools`. Its bin/ has those of tools.txt, and its
# programs/ promtool and prometheus of Debian's package, unpacked and not installed, so that no service is started.
set -eu
there=$1
here=$(dirname "$0")

test -x "$there/bin/python" || "${PYTHON:-python3}" -m venv "$there"
"$there/bin/pip" --disable-pip-version-check --quiet install -r "$here/tools.txt"

mkdir -p "$there/programs"
if command -v promtool >/dev/null; then
  ln -sf "$(command -v promtool)" "$there/programs/promtool"
elif command -v apt-get >/dev/null; then
  cd "$there"
  # The lists of packages may never have been fetched on this machine.
  apt-get -qq download prometheus 2>/dev/null || { apt-get -qq update && apt-get -qq download prometheus; }
  dpkg -x prometheus_*.deb debian
  rm prometheus_*.deb
  ln -sf ../debian/usr/bin/promtool ../debian/usr/bin/prometheus programs/
else
  echo "promtool is not on the path, and there is no apt-get to bring it" >&2
  exit 1
fi
