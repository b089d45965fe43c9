#!/usr/bin/env bash
# Prints the Debian packages, one a line, of the shared libraries that programs use.
# usage: deploy/runtime_packages.sh PROGRAM...
set -euo pipefail

(($#)) || { sed -n '2,/^set /s/^# //p' "$0" >&2; exit 2; }
libraries=$(ldd "$@")
if grep -F 'not found' <<< "$libraries" >&2; then
  echo "runtime_packages: these are missing here" >&2
  exit 1
fi
# A package's files are listed under /lib or /usr/lib, which are one folder.
awk '$2 == "=>" { print $3 }' <<< "$libraries" | sort -u | while read -r path; do
  dpkg-query -S "$(realpath "$path")" 2>/dev/null || dpkg-query -S "$(realpath "$path" | sed 's|^/usr||')"
done | cut -d: -f1 | sort -u
