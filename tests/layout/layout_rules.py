"""The layout's rules that a compiler does not check: who may include whom, and what may be named how.

Everything works on (path, text) pairs, so that the tests can feed it files that break one rule each.
"""

import pathlib
import re
import subprocess

# Lowest first. A folder may include itself and what stands in an earlier row; folders of one row do not
# know each other. The longest matching prefix names a file's folder.
LAYERS = (
    ("kernels/base",),
    ("kernels",),
    ("kernels/cpu", "kernels/cuda"),
    ("server/model",),
    ("server/planning", "server/routing", "server/comm"),
    ("server/dispatch",),
    ("server/rank",),
    ("server/cluster",),
    ("server/control",),
    ("server/rpc",),
    ("server",),
)
LEVEL = {folder: level for level, row in enumerate(LAYERS) for folder in row}

# Folders beside that order: what of the repository each may include, itself included.
BESIDE = {
    "server/ops": ("server/ops", "kernels/base"),
    "client": ("client",),
    "client/cli": ("client", "client/cli", "server/model", "server/ops", "kernels", "kernels/base"),
    # The oracle is independent of the product's code.
    "tests/reference": ("tests/reference",),
}
FOLDERS = tuple(LEVEL) + tuple(BESIDE)

SOURCE_SUFFIXES = (".h", ".cc", ".cu", ".cuh")
HEADER_SUFFIXES = (".h", ".cuh")

GRPC = re.compile(r"^(grpc|grpcpp|grpc\+\+|google/(protobuf|rpc|api))/|\.pb\.h$")
CUDA = re.compile(r"^(cuda|cublas|cudnn|curand|nvtx3?|nccl|cooperative_groups|cub/|thrust/|cutlass/|cute/)|\.cuh$")
GLOO = re.compile(r"^gloo/")
SPDLOG = re.compile(r"^(spdlog|fmt)/")
JSON = re.compile(r"^nlohmann/")

# Files that CMake compiles for a newer instruction set than the rest.
ISA_FILE = re.compile(r"_(sse\d*|avx\d*|avx512\w*|avxvnni|f16c|fma|amx\w*)\.(h|cc)$")
ISA_FLAG = re.compile(r"(^|\s)-m(arch=|avx|fma|f16c|amx|sse[34])")
INTRINSICS = {"immintrin.h", "x86intrin.h"}
# No inline functions of std:: that could win at link time and crash an older CPU.
C_HEADERS = {
    "assert.h", "float.h", "inttypes.h", "limits.h", "math.h", "stdbool.h", "stddef.h", "stdint.h", "string.h",
    "cfloat", "climits", "cstddef", "cstdint",
}
# Headers of plain structs, constants and declarations, fit for such files.
PLAIN_DATA = re.compile(r"^kernels/cpu/\w+_plain\.h$")

BANNED_WORDS = {"util", "utils", "helper", "helpers", "common", "misc"}
SLEEP = re.compile(r"\b(sleep|usleep|nanosleep|clock_nanosleep|sleep_for|sleep_until|SleepFor|SleepUntil)\s*\(")
# Deadlines go by kernels/base/steady_now.h: whoever sets the wall clock ends and prolongs nothing.
WALL_CLOCK = re.compile(r"\babsl::Now\(|\bsystem_clock::now\(")
WALL_CLOCK_FILES = {"kernels/base/steady_now.h", "server/rpc/grpc_deadline.h", "server/ops/logging.cc"}
SHELL_SLEEP = re.compile(r"(^|[;&|({]\s*|\bdo\s+|\bthen\s+|\belse\s+)\s*sleep\s", re.MULTILINE)

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">]+)[">]', re.MULTILINE)
TOP_FOLDERS = ("kernels/", "server/", "client/", "tests/", "proto/", "deploy/")


def folder_of(path):
    """The entry of FOLDERS that `path` belongs to, or None."""
    matches = [folder for folder in FOLDERS if path.startswith(folder + "/")]
    return max(matches, key=len) if matches else None


def is_main(path):
    """The mains, and what they are put together from."""
    return folder_of(path) == "server"


def is_test(path):
    return path.startswith("tests/")


def is_read(path):
    """Whether file_violations looks into the file."""
    return path.endswith((*SOURCE_SUFFIXES, ".py", ".sh")) or pathlib.PurePosixPath(path).name.startswith("Dockerfile.")


def strip_comments(text):
    """Blanks C++ comments, keeping line structure and string literals."""
    token = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
    return token.sub(lambda m: re.sub(r"[^\n]", " ", m[0]) if m[0][0] == "/" else m[0], text)


def strip_strings(text):
    return re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text)


def direction_violation(path, included):
    """Why `path` may not include the repository's file `included`, or None."""
    source, target = folder_of(path), folder_of(included)
    if source == "tests/reference" and target != "tests/reference":
        return "the reference is independent of the product's code"
    if is_test(path):
        return None
    if is_test(included):
        return "product code does not include tests"
    if source is None or target is None:
        return "is in no known folder"
    if source == target:
        return None
    if source in BESIDE:
        return None if target in BESIDE[source] else f"{source} may include {', '.join(BESIDE[source])}"
    if target == "server/ops":
        return None if source.startswith("server") else "only server/ may include server/ops"
    if target in BESIDE:
        return f"nothing but itself includes {target}"
    if LEVEL[target] >= LEVEL[source]:
        return f"{target} is not below {source}"
    return None


def external_violation(path, included):
    """Why `path` may not include the package's header `included`, or None."""
    folder = folder_of(path)
    if GRPC.search(included):
        if not (is_test(path) or is_main(path) or folder in ("server/rpc", "client", "client/cli")):
            return "only server/rpc, client and the mains include gRPC or protobuf"
    if SPDLOG.search(included) and path != "server/ops/logging.cc":
        return "only server/ops/logging.cc includes spdlog"
    if JSON.search(included) and path.endswith(HEADER_SUFFIXES):
        return "JSON is included in .cc files only"
    if CUDA.search(included):
        if not (path.startswith(("kernels/cuda/", "server/comm/nccl", "tests/kernels/cuda/", "tests/server/comm/nccl",
                                 "tests/gpu/"))):
            return "only kernels/cuda and server/comm/nccl* see CUDA headers"
    if GLOO.search(included) and not path.startswith(("server/comm/gloo", "tests/")):
        return "only server/comm/gloo* sees Gloo's headers"
    return None


def plain_violation(path, included):
    """Why a file for a newer instruction set, or a header that it may include, may not include `included`."""
    if included in INTRINSICS or included in C_HEADERS or PLAIN_DATA.search(included):
        return None
    # Its own header, and those of the same instruction set, obey the same rule.
    if ISA_FILE.search(included):
        return None
    return "may include intrinsics, C headers and plain-data headers (kernels/cpu/*_plain.h) only"


def guard_of(path):
    return "EXPERTMESH_" + re.sub(r"[^A-Za-z0-9]", "_", path).upper() + "_"


def source_violations(path, text, exists):
    """Violations of one C++ or CUDA file; `exists(path)` says whether the repository has a file."""
    code = strip_comments(text)
    found = []
    for quote, included in INCLUDE.findall(code):
        in_repository = included.startswith(TOP_FOLDERS) and not included.endswith(".pb.h")
        if quote == '"' and not in_repository and "/" not in included:
            found.append(f'{path}: "{included}": write the path from the repository root')
        if in_repository:
            why = direction_violation(path, included)
            if not exists(included):
                why = "no such file"
        else:
            why = external_violation(path, included)
        if not why and (ISA_FILE.search(path) or PLAIN_DATA.search(path)) and not is_test(path):
            why = plain_violation(path, included)
        if why:
            found.append(f"{path}: includes {included}: {why}")
    if path.endswith(HEADER_SUFFIXES):
        guard = guard_of(path)
        first = [line.split() for line in code.splitlines() if line.strip()][:2]
        if first != [["#ifndef", guard], ["#define", guard]]:
            found.append(f"{path}: the header guard must be {guard}")
    if path.startswith(("kernels/", "server/")) and path not in WALL_CLOCK_FILES and WALL_CLOCK.search(code):
        found.append(f"{path}: deadlines go by SteadyNow(), not by the wall clock")
    if is_test(path) and SLEEP.search(strip_strings(code)):
        found.append(f"{path}: a test must not sleep")
    return found


def name_violations(path):
    words = {word for part in pathlib.PurePosixPath(path).parts for word in re.split(r"[^a-z0-9]+", part.lower())}
    banned = sorted(words & BANNED_WORDS)
    return [f"{path}: '{word}' says nothing about what is inside" for word in banned]


def dockerfile_violations(path, text):
    """No engine is here to try them: base images by short name, several stages, the last one without root."""
    found = []
    stages = re.findall(r"^FROM[ \t]+(\S+)", text, re.MULTILINE)
    for image in stages:
        if not re.fullmatch(r"[a-z0-9-]+(/[a-z0-9-]+)?:[\w.-]+", image):
            found.append(f"{path}: base image '{image}': a short name with a tag, without a registry's host")
    if len(stages) < 2:
        found.append(f"{path}: compilers do not belong into an image: several stages")
    users = re.findall(r"^USER[ \t]+(\S+)", text[text.rfind("\nFROM"):], re.MULTILINE)
    if not users or users[-1].split(":")[0] in ("root", "0"):
        found.append(f"{path}: the last stage runs as root")
    return found


def file_violations(path, text, exists):
    found = name_violations(path)
    if pathlib.PurePosixPath(path).name.startswith("Dockerfile."):
        return found + dockerfile_violations(path, text)
    if path.endswith(SOURCE_SUFFIXES):
        found += source_violations(path, text, exists)
    elif is_test(path) and path.endswith(".py"):
        if re.search(r"^[^#\n]*\btime\.sleep\(", text, re.MULTILINE):
            found.append(f"{path}: a test must not sleep")
    elif is_test(path) and path.endswith(".sh"):
        if SHELL_SLEEP.search(re.sub(r"#.*", "", text)):
            found.append(f"{path}: a test must not sleep")
    return found


def command_violations(root, commands):
    """`commands`: entries of compile_commands.json. Files compiled for a newer instruction set say so by name."""
    found = []
    for entry in commands:
        path = pathlib.PurePosixPath(entry["file"])
        if not path.is_relative_to(root):
            continue
        path = str(path.relative_to(root))
        if ISA_FLAG.search(entry["command"]) and not ISA_FILE.search(path) and not is_test(path):
            found.append(f"{path}: is compiled for a newer instruction set, so it must be named *_<set>.cc")
    return found


def repository_files(root):
    """Tracked files and new ones that git does not ignore."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root,
                            check=True, capture_output=True, text=True).stdout
    return sorted(path for path in set(listed.split("\0")) if path and (root / path).is_file())
