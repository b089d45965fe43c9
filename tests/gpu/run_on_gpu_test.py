"""What run_on_gpu.sh does with parts that pass, fail, crash and hang, with programs that only say so.

usage: run_on_gpu_test.py REPOSITORY
"""

import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import unittest

SCRIPT = pathlib.Path(sys.argv.pop(1)) / "tests/gpu/run_on_gpu.sh"

GPU_BENCH = """
for argument; do declare "${argument#--}"; done 2>/dev/null
row() { printf '{"name": "%s", "value": 3, "unit": "x", "check": "", "right": true%s}' "$1" "$2"; }
target=', "limit": 4, "limit_name": "of it", "ratio": 0.75, "target": 0.8'
printf '{"device": "a stub", "results": [%s, %s]}' "$(row "a copy" "")" "$(row "$only's row" "$target")" > "$json"
[[ $only != prefill ]] || kill -SEGV $$
"""
# A suite that takes its process with it.
KERNELS = """
case "$*" in
  *list_tests*) printf 'Running main() from main.cc\\nGoodTest.\\n  One\\nBad/BadTest.\\n  Two\\n'; exit 0 ;;
  *GoodTest*) echo '[  PASSED  ] 1 test.'; exit 0 ;;
  *) exit 134 ;;
esac
"""
PASSES = """
echo 'NCCL 9.9'
echo '[  PASSED  ] 3 tests.'
"""
# With a process of its own, and deaf to SIGTERM.
HANGS = """
trap '' TERM
echo '[ RUN      ] Suite.One'
echo '[       OK ] Suite.One (1 ms)'
echo '[ RUN      ] Suite.Hangs'
tail -f /dev/null &
echo $$ $! > "$PIDS.new" && mv "$PIDS.new" "$PIDS"
while true; do wait; done
"""


def is_running(pid):
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


class RunOnGpuTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.bundle = self.folder / "bundle"
        for name in ("bin", "libexec", "lib"):
            (self.bundle / name).mkdir(parents=True)
        shutil.copy(SCRIPT, self.bundle)
        (self.bundle / "commit").write_text("abc123\n")
        self.tools = self.folder / "tools"
        self.tools.mkdir()
        self.out = self.folder / "out"
        for name in ("expertmesh", "expertmesh-control-plane", "expertmesh-expert-server"):
            self.put(self.bundle / "bin" / name, "echo version")
        self.put(self.bundle / "bin/gpu_bench", GPU_BENCH)
        self.put(self.bundle / "bin/kernels_cuda_gpu_test", KERNELS)
        self.put(self.bundle / "bin/server_rank_gpu_test", PASSES)
        self.put(self.bundle / "bin/server_comm_nccl_gpu_test", PASSES)

    def put(self, path, script):
        path.write_text("#!/usr/bin/env bash\n" + script)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run_script(self, *arguments):
        environment = dict(os.environ, PATH=f"{self.tools}:{os.environ['PATH']}", PIDS=str(self.folder / "pids"))
        environment.pop("OUT", None)
        return subprocess.run([self.bundle / "run_on_gpu.sh", "--out", self.out, *arguments], env=environment,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def parts(self):
        result = json.loads((self.out / "results.json").read_text())
        self.assertEqual(result["commit"], "abc123")
        return {part["part"]: (part["outcome"], part["note"]) for part in result["parts"]}

    def test_what_fails_keeps_nothing_else_from_being_told(self):
        self.put(self.tools / "nvidia-smi", "echo 'a GPU, 1, 2'")
        run = self.run_script("--only", "facts,start,kernels,rank,nccl,bench")
        self.assertEqual(run.returncode, 1, run.stdout)
        parts = self.parts()
        for name in ("facts", "start", "rank", "nccl", "bench_rows", "bench_deepseek", "bench_step", "bench_tiles"):
            self.assertEqual(parts[name][0], "passed", run.stdout)
        self.assertIn("3 tests", parts["rank"][1])
        self.assertEqual(parts["kernels"][0], "FAILED")
        self.assertIn("Bad/BadTest. fails with 134", parts["kernels"][1])
        self.assertNotIn("GoodTest", parts["kernels"][1])
        # What a part had measured when it crashed counts.
        self.assertEqual(parts["bench_prefill"][0], "FAILED")
        table = (self.out / "table.txt").read_text()
        for part in ("rows", "prefill", "deepseek", "step", "tiles"):
            self.assertRegex(table, f"{part}'s row +3.0 x +0.75 of 4 of it .>= 0.80: NO")
        # The limits stand once by what may be cut off, and once behind it.
        tiles, rest = table.split("rows, ", 1)
        self.assertEqual((tiles.count("a copy"), rest.count("a copy")), (1, 1), table)
        # A caller may see no more than the end, and take no more than a few files.
        self.assertTrue(run.stdout.endswith(table), run.stdout)
        self.assertRegex(table.splitlines()[-1], "commit abc123 [0-9]+ s in all$")
        self.assertEqual(sorted(os.listdir(self.out)), ["log.txt", "results.json", "table.txt"])
        log = (self.out / "log.txt").read_text()
        for name in parts:
            self.assertIn(f"==== {name}: ", log)

    def test_what_hangs_is_ended_with_all_that_it_started(self):
        self.put(self.tools / "nvidia-smi", "")
        self.put(self.bundle / "bin/server_rank_gpu_test", HANGS)
        run = self.run_script("--only", "rank,nccl", "--seconds", "12")
        self.assertEqual(run.returncode, 1, run.stdout)
        parts = self.parts()
        self.assertEqual(parts["rank"][0], "timeout", run.stdout)
        self.assertEqual(parts["nccl"], ("timeout", "no time was left "))
        pids = self.folder / "pids"
        if not pids.exists():
            self.skipTest("too busy a machine: the hanging program had not begun")
        self.assertIn("1 tests had passed, in Suite.Hangs", parts["rank"][1])
        deadline = time.monotonic() + 60
        for pid in pids.read_text().split():
            while is_running(pid):
                self.assertLess(time.monotonic(), deadline, f"process {pid} was left")
                os.sched_yield()

    @unittest.skipIf(os.path.exists("/dev/nvidiactl"), "there is a GPU here")
    def test_says_that_there_is_no_gpu(self):
        self.put(self.tools / "nvidia-smi", "exit 9")
        self.put(self.bundle / "bin/gpu_bench", "echo 'gpu_bench: no GPU'; exit 77")
        run = self.run_script()
        self.assertEqual(run.returncode, 77, run.stdout)
        self.assertIn("there is no GPU here", run.stdout)

    def test_refuses_arguments(self):
        for arguments in (["--what"], ["--seconds"], ["--seconds", "1x"], ["--only"]):
            self.assertEqual(self.run_script(*arguments).returncode, 2, arguments)


if __name__ == "__main__":
    unittest.main()
