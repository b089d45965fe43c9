#ifndef EXPERTMESH_TESTS_BENCH_DISPATCH_PROCESSES_H_
#define EXPERTMESH_TESTS_BENCH_DISPATCH_PROCESSES_H_

namespace expertmesh {

// Parts of bench_dispatch whose ranks are processes on this machine; no thread may run yet.

// Two ranks swap payloads: TcpCommunicator's AllToAllV against plain send and recv of the same
// bytes on a thread of their own, since a communicator must move them while its caller computes.
// bench_exchange has Gloo beside it.
void BenchExchange();

// Time of the rank engines for one step of 512 tokens, 128 experts, hidden size 2048, intermediate
// size 768, top-8, bf16: two processes pinned to a core each against one with two threads.
void BenchRankProcesses();

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_BENCH_DISPATCH_PROCESSES_H_
