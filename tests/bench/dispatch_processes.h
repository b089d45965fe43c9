#ifndef EXPERTMESH_TESTS_BENCH_DISPATCH_PROCESSES_H_
#define EXPERTMESH_TESTS_BENCH_DISPATCH_PROCESSES_H_

namespace expertmesh {

// Parts of bench_dispatch whose ranks are processes on this machine; no thread may run yet.

// Two ranks swap payloads: TcpCommunicator's AllToAllV against plain send and recv of the same
// bytes over two such sockets.
void BenchExchange();

// Time of the rank engines for one step of 512 tokens, 128 experts, hidden size 2048, intermediate
// size 768, top-8, bf16: two processes pinned to a core each against one with two threads.
void BenchRankProcesses();

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_BENCH_DISPATCH_PROCESSES_H_
