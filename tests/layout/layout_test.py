"""The repository obeys layout_rules, and each rule can fail. usage: layout_test.py ROOT COMPILE_COMMANDS"""

import json
import pathlib
import sys
import unittest

import layout_rules as rules

ROOT = None
COMPILE_COMMANDS = None


class RepositoryTest(unittest.TestCase):
    def test_files(self):
        files = rules.repository_files(ROOT)
        self.assertIn("tests/layout/layout_test.py", files)
        present = set(files)
        found = []
        for path in files:
            text = (ROOT / path).read_text(encoding="utf-8") if rules.is_read(path) else ""
            found += rules.file_violations(path, text, present.__contains__)
        self.assertEqual([], found, "\n" + "\n".join(found))

    def test_compile_commands(self):
        commands = json.loads(COMPILE_COMMANDS.read_text())
        self.assertTrue(commands)
        found = rules.command_violations(ROOT, commands)
        self.assertEqual([], found, "\n" + "\n".join(found))


class RulesTest(unittest.TestCase):
    """A bad file per rule, beside a good one that differs little."""

    def violations(self, path, text):
        if path.endswith(rules.HEADER_SUFFIXES) and "#ifndef" not in text:
            guard = rules.guard_of(path)
            text = f"#ifndef {guard}\n#define {guard}\n{text}\n#endif"
        return rules.file_violations(path, text, lambda included: "missing" not in included)

    def good(self, path, text=""):
        self.assertEqual([], self.violations(path, text))

    def bad(self, path, text, why):
        found = self.violations(path, text)
        self.assertEqual(1, len(found), found)
        self.assertIn(why, found[0])

    def includes(self, path, included, why=None):
        line = f"#include <{included}>" if included.startswith("<") else f'#include "{included}"'
        line = line.replace("<<", "<").replace(">>", ">")
        if why:
            self.bad(path, line, why)
        else:
            self.good(path, line)

    def test_every_upward_include_is_found(self):
        rows = rules.LAYERS
        for low, lower in enumerate(rows):
            for high, upper in enumerate(rows):
                for a in lower:
                    for b in upper:
                        if a == b or low > high:
                            continue
                        self.includes(f"{a}/x.cc", f"{b}/y.h", "is not below")
                        if low < high:
                            self.includes(f"{b}/x.cc", f"{a}/y.h")

    def test_planning_routing_and_comm_do_not_know_each_other(self):
        self.includes("server/planning/step_plan.cc", "server/comm/communicator.h", "is not below")
        self.includes("server/comm/communicator.cc", "server/routing/router.h", "is not below")
        self.includes("server/dispatch/all_to_all.cc", "server/comm/communicator.h")

    def test_ops_is_open_to_the_server_alone(self):
        self.includes("server/model/safetensors.cc", "server/ops/logging.h")
        self.includes("server/rpc/service.cc", "server/ops/metrics.h")
        self.includes("server/control_plane_main.cc", "server/ops/health.h")
        self.includes("kernels/cpu/ffn.cc", "server/ops/logging.h", "only server/ may include")
        self.includes("server/ops/metrics.cc", "server/control/batcher.h", "may include")
        self.includes("server/ops/metrics.cc", "kernels/base/dtype.h")

    def test_client(self):
        self.includes("client/client.cc", "expertmesh/v1/expert_service.grpc.pb.h")
        self.includes("client/client.cc", "client/retry.h")
        self.includes("client/client.cc", "server/model/safetensors.h", "client may include")
        self.includes("client/cli/forward.cc", "server/model/safetensors.h")
        self.includes("client/cli/forward.cc", "server/control/batcher.h", "client/cli may include")
        self.includes("server/rpc/service.cc", "client/client.h", "nothing but itself")

    def test_tests_are_not_product(self):
        self.includes("tests/server/rpc/service_test.cc", "server/control/batcher.h")
        self.includes("server/rank/rank_engine.cc", "tests/reference/moe.h", "does not include tests")
        self.includes("tests/reference/moe.cc", "tests/reference/moe.h")
        self.includes("tests/reference/moe.cc", "kernels/base/dtype.h", "independent")

    def test_grpc_and_protobuf(self):
        for header in ("<grpcpp/grpcpp.h>", "<grpc/slice.h>", "<google/protobuf/message.h>", "google/rpc/status.pb.h",
                       "expertmesh/v1/tensor.pb.h"):
            self.includes("server/control/batcher.cc", header, "gRPC or protobuf")
            self.includes("kernels/base/buffer.cc", header, "gRPC or protobuf")
            self.includes("server/rpc/codec.cc", header)
            self.includes("server/expert_server_main.cc", header)
            self.includes("tests/server/rpc/codec_test.cc", header)

    def test_spdlog_json_cuda_gloo(self):
        self.includes("server/ops/logging.cc", "spdlog/spdlog.h")
        self.includes("server/ops/logging.h", "spdlog/spdlog.h", "spdlog")
        self.includes("server/rpc/service.cc", "spdlog/spdlog.h", "spdlog")
        self.includes("server/model/config.cc", "nlohmann/json.hpp")
        self.includes("server/model/config.h", "nlohmann/json.hpp", ".cc files only")
        self.includes("kernels/cuda/ffn.cu", "<cuda_runtime.h>")
        self.includes("server/comm/nccl_communicator.cc", "<nccl.h>")
        self.includes("server/comm/communicator.cc", "<nccl.h>", "CUDA headers")
        self.includes("kernels/cpu/ffn.cc", "<cuda_bf16.h>", "CUDA headers")
        self.includes("server/comm/gloo_communicator.cc", "<gloo/context.h>")
        self.includes("server/comm/communicator.cc", "<gloo/context.h>", "Gloo")

    def test_instruction_set_files(self):
        for path in ("kernels/cpu/ffn_avx2.cc", "kernels/cpu/ffn_avx512_bf16.cc", "kernels/cpu/ffn_avx512.h",
                     "kernels/cpu/ffn_plain.h"):
            self.includes(path, "<immintrin.h>")
            self.includes(path, "<stdint.h>")
            self.includes(path, "kernels/cpu/tile_plain.h")
            for header in ("<vector>", "<algorithm>", "<cmath>", "absl/types/span.h", "kernels/base/dtype.h"):
                self.includes(path, header, "plain-data headers")
        self.includes("kernels/cpu/ffn_dispatch.cc", "<vector>")

    def test_instruction_set_flags_need_a_name(self):
        root = pathlib.PurePosixPath("/r")

        def found(path, flags):
            return rules.command_violations(root, [{"file": path, "command": f"c++ {flags} -c {path}"}])

        for flags in ("-mavx2 -mfma", "-march=x86-64-v4", "-mavx512bf16", "-mamx-tile"):
            self.assertEqual(1, len(found("/r/kernels/cpu/ffn.cc", flags)), flags)
            self.assertEqual([], found("/r/kernels/cpu/ffn_avx512.cc", flags))
        self.assertEqual([], found("/r/kernels/cpu/ffn.cc", "-O2"))
        self.assertEqual([], found("/elsewhere/x.cc", "-mavx2"))

    def test_include_paths(self):
        self.includes("kernels/base/buffer.cc", "buffer.h", "repository root")
        self.includes("kernels/base/buffer.cc", "kernels/base/missing.h", "no such file")
        self.good("kernels/base/buffer.cc", '// #include "server/rpc/service.h"\n/*\n#include "x.h"\n*/')

    def test_names(self):
        for path in ("kernels/base/utils.h", "server/rpc/rpc_helpers.cc", "server/common/x.cc", "tests/test_util.py"):
            self.assertEqual(1, len(rules.name_violations(path)), path)
        self.good("server/comm/communicator.cc")

    def test_wall_clock(self):
        self.bad("kernels/cuda/x.cc", "if (absl::Now() > deadline) {}", "not by the wall clock")
        self.bad("server/comm/x.h", "std::chrono::system_clock::now()", "not by the wall clock")
        self.good("server/rpc/grpc_deadline.h", "return absl::Now();")
        self.good("server/comm/x.cc", "SteadyNow();")

    def test_sleep(self):
        for call in ("sleep(1);", "std::this_thread::sleep_for(ms);", "absl::SleepFor(d);", "usleep (10);"):
            self.bad("tests/server/rpc/x_test.cc", call, "must not sleep")
            self.good("server/rpc/x.cc", call)
            self.good("tests/server/rpc/x_test.cc", f'// {call}\nStart("{call}");')
        self.bad("tests/x.py", "    time.sleep" + "(1)", "must not sleep")
        self.good("tests/x.py", "# time.sleep" + "(1)")
        for line in ("sleep 1", "start & sleep 1", "while true; do sleep 1; done", "(sleep 2)"):
            self.bad("tests/x.sh", line, "must not sleep")
        self.good("tests/x.sh", "# no sleep here\necho asleep now")

    def test_dockerfiles(self):
        good = "# Why.\nFROM debian:12 AS build\nRUN make\nFROM debian:12-slim\nUSER 65532:65532\n"
        self.good("deploy/Dockerfile.cpu", good)
        self.bad("deploy/Dockerfile.cpu", good.replace("debian:12-slim", "some.host/debian:12"), "registry's host")
        self.bad("deploy/Dockerfile.cpu", good.replace("debian:12-slim", "debian"), "with a tag")
        self.bad("deploy/Dockerfile.cpu", good.replace("USER 65532:65532", "USER 0:0"), "as root")
        self.bad("deploy/Dockerfile.cpu", good.replace("USER 65532:65532", ""), "as root")
        self.bad("deploy/Dockerfile.cpu", good.replace("FROM debian:12-slim\n", ""), "several stages")

    def test_header_guards(self):
        good = "#ifndef EXPERTMESH_SERVER_RPC_CODEC_H_\n#define EXPERTMESH_SERVER_RPC_CODEC_H_\n#endif"
        self.good("server/rpc/codec.h", "// Why.\n" + good)
        self.bad("server/rpc/codec.h", good.replace("CODEC", "CODE"), "header guard")
        self.bad("server/rpc/codec.h", "#ifndef X\n#define X\n#endif", "header guard")
        self.bad("server/rpc/codec.h", "#include <vector>\n" + good, "header guard")


if __name__ == "__main__":
    COMPILE_COMMANDS = pathlib.Path(sys.argv.pop())
    ROOT = pathlib.Path(sys.argv.pop()).resolve()
    unittest.main(verbosity=2)
