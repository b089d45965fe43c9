#!/usr/bin/env python3
"""clang-tidy over the project's sources, two at a time. usage: .ci/tidy.py BUILD_DIR [PREFIX...]

What passed once is remembered in the user's cache folder by the hash of everything that clang-tidy saw, as
ccache does for objects, so a second run costs only the preprocessing.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time

TIDY = "clang-tidy-14"
# Translation units with gRPC in them take a minute each, so the folders that have it are left out.
PREFIXES = ("kernels/", "server/model/", "server/planning/", "server/routing/", "server/comm/", "server/dispatch/",
            "server/rank/", "server/cluster/", "server/control/", "server/ops/")


def preprocessed(command, directory):
    arguments = shlex.split(command)
    # The compiler comes after its launcher (cmake -E env ... ccache).
    first = max(i for i, argument in enumerate(arguments) if re.search(r"(^|/)(c\+\+|g\+\+|cc|gcc)[^/]*$", argument))
    arguments = arguments[first:]
    for flag in ("-o", "-MF", "-MT"):
        while flag in arguments:
            at = arguments.index(flag)
            del arguments[at:at + 2]
    arguments = [argument for argument in arguments if argument not in ("-c", "-MD")]
    # -C: comments decide too (NOLINT).
    return subprocess.run([*arguments, "-E", "-P", "-C"], cwd=directory, check=True, capture_output=True).stdout


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    build = pathlib.Path(sys.argv[1]).resolve()
    prefixes = tuple(sys.argv[2:]) or PREFIXES
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "expertmesh" / "tidy"
    cache.mkdir(parents=True, exist_ok=True)
    settings = (root / ".clang-tidy").read_bytes()
    settings += subprocess.run([TIDY, "--version"], check=True, capture_output=True).stdout

    commands = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        path = pathlib.Path(entry["file"])
        if path.is_relative_to(root) and str(path.relative_to(root)).startswith(prefixes):
            commands.setdefault(str(path.relative_to(root)), entry)

    def check(name):
        entry = commands[name]
        digest = hashlib.sha256(settings + name.encode())
        digest.update(preprocessed(entry["command"], entry["directory"]))
        stamp = cache / digest.hexdigest()
        if stamp.exists():
            stamp.touch()
            return name, True, 0.0, ""
        start = time.monotonic()
        # The compile commands are GCC's.
        result = subprocess.run([TIDY, "-p", build, "--quiet", "--extra-arg=-Wno-unknown-warning-option",
                                 entry["file"]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode == 0:
            stamp.touch()
        return name, result.returncode == 0, time.monotonic() - start, result.stdout

    failed, fresh = [], 0
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for name, passed, seconds, output in pool.map(check, sorted(commands)):
            fresh += seconds > 0
            if seconds > 20:
                print(f"tidy: {name} took {seconds:.0f} s", flush=True)
            if not passed:
                failed.append(name)
                print(output, flush=True)
    print(f"tidy: {len(commands)} files, {fresh} of them checked now, the others passed before; {len(failed)} failed"
          + "".join(f"\n  {name}" for name in failed))
    # Old stamps of files that changed since.
    for stamp in cache.iterdir():
        if time.time() - stamp.stat().st_mtime > 30 * 86400:
            stamp.unlink()
    return 1 if failed or not commands else 0


if __name__ == "__main__":
    sys.exit(main())
