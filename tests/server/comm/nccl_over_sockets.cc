// NCCL's C interface, as far as server/comm/nccl_library.cc looks it up, between processes of one
// machine and on the emulated device of each: a shared library that a program with the emulated
// CUDA runtime opens by --nccl_library. What it runs on a stream it gives to that program's
// EnqueueEmulatedWork, so the program must export it.
//
// As FakeNccl (fake_nccl.h, which says what of NCCL that is), and: a peer whose process is gone is
// ncclRemoteError, unless it destroyed its communicator before. What real code would crash or hang
// on ends the process with a line that begins with "nccl_over_sockets misused".
//
// NCCL_OVER_SOCKETS in the environment, some of: silent_peers (a peer that is gone is not told of,
// as over NVLink), init_fails, abort_hangs, old_version (2.17).

#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/cuda/emulated_cuda_runtime.h"
#include "tests/server/comm/nccl_socket_links.h"

using expertmesh::NcclSocketLinks;
using Kind = NcclSocketLinks::Kind;

struct ncclComm {
  std::shared_ptr<NcclSocketLinks> links;
  int polls_left = 0;
  bool initialized = false;
  bool finalizing = false;
  bool said_farewell = false;
  std::function<void()> enqueue;  // when the call in progress is over
  std::set<std::pair<Kind, int>> connected;
};

namespace {

// How often ncclCommGetAsyncError says that a call is in progress before it is over.
constexpr int kPollsInProgress = 2;

std::mutex mutex;  // of the set and of what it holds
std::set<ncclComm*>& Comms() {
  static auto* const comms = new std::set<ncclComm*>();
  return *comms;
}

thread_local std::string last_error;

struct Group {
  ncclComm* comm = nullptr;
  cudaStream_t stream = nullptr;
  std::vector<NcclSocketLinks::Part> parts;
  int depth = 0;
};
thread_local Group open_group;

[[noreturn]] void Misuse(const char* call, const char* what) {
  std::fprintf(stderr, "nccl_over_sockets misused: %s %s\n", call, what);
  std::abort();
}

bool HasFault(const char* name) {
  const char* const faults = std::getenv("NCCL_OVER_SOCKETS");
  return faults != nullptr && std::strstr(faults, name) != nullptr;
}

ncclComm& Find(ncclComm* comm, const char* call) {
  if (Comms().count(comm) == 0) Misuse(call, "of a communicator that is gone");
  return *comm;
}

// As NCCL, which connects ranks when a call first needs it; tells of it.
void Connect(ncclComm& comm, const NcclSocketLinks::Part& part) {
  if (part.peer == comm.links->rank()) return;
  if (!comm.connected.emplace(part.kind, part.peer).second) return;
  const char* const call = part.kind == Kind::kPoint       ? "ncclSend"
                           : part.kind == Kind::kAllGather ? "ncclAllGather"
                                                           : "ncclAlltoAll";
  std::fprintf(stderr, "nccl_over_sockets: rank %d connects to rank %d for %s\n",
               comm.links->rank(), part.peer, call);
}

ncclResult_t Enqueue(Group group) {
  if (group.parts.empty()) return ncclSuccess;
  const std::lock_guard<std::mutex> lock(mutex);
  ncclComm& comm = Find(group.comm, "a group");
  if (!comm.initialized || comm.polls_left > 0 || comm.enqueue != nullptr) {
    Misuse("a group", "on a communicator that is in progress");
  }
  const std::shared_ptr<NcclSocketLinks::Kernel> kernel = comm.links->NewKernel();
  for (NcclSocketLinks::Part& part : group.parts) {
    Connect(comm, part);
    kernel->parts.push_back(std::make_shared<NcclSocketLinks::Part>(std::move(part)));
  }
  comm.polls_left = kPollsInProgress;
  comm.enqueue = [kernel, stream = group.stream] {
    // Of a lost device the runtime tells whoever asks it.
    static_cast<void>(expertmesh::EnqueueEmulatedWork(stream, [kernel] {
      kernel->links->Begin(*kernel);
      return cudaSuccess;
    }));
    static_cast<void>(expertmesh::EnqueueEmulatedWork(
        stream,
        [kernel] {
          kernel->links->End(*kernel);
          return cudaSuccess;
        },
        [kernel] { return kernel->links->IsOver(*kernel); }));
  };
  return ncclInProgress;
}

ncclResult_t Point(bool is_send, const void* from, void* to, size_t count, ncclDataType_t type,
                   int peer, ncclComm* comm, cudaStream_t stream) {
  const char* const call = is_send ? "ncclSend" : "ncclRecv";
  if (open_group.depth == 0) Misuse(call, "outside a group");
  if (count == 0) Misuse(call, "of nothing");
  if (type != ncclInt8) Misuse(call, "of what is not bytes");
  if (open_group.comm != nullptr && (open_group.comm != comm || open_group.stream != stream)) {
    Misuse(call, "in a group of another communicator or stream");
  }
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (peer < 0 || peer >= Find(comm, call).links->num_ranks()) return ncclInvalidArgument;
  }
  open_group.comm = comm;
  open_group.stream = stream;
  NcclSocketLinks::Part& part = open_group.parts.emplace_back();
  part.is_send = is_send;
  part.from = static_cast<const std::byte*>(from);
  part.to = static_cast<std::byte*>(to);
  part.num_bytes = static_cast<int64_t>(count);
  part.peer = peer;
  return ncclSuccess;
}

// `send_stride`: from what is for one rank to what is for the next.
ncclResult_t AllRanks(Kind kind, const char* call, const void* send, int64_t send_stride,
                      void* receive, size_t count, ncclDataType_t type, ncclComm* comm,
                      cudaStream_t stream) {
  if (open_group.depth > 0) Misuse(call, "inside a group");
  if (type != ncclInt8) Misuse(call, "of what is not bytes");
  Group group;
  group.comm = comm;
  group.stream = stream;
  int num_ranks;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    num_ranks = Find(comm, call).links->num_ranks();
  }
  for (int peer = 0; peer < num_ranks; ++peer) {
    for (const bool is_send : {true, false}) {
      NcclSocketLinks::Part& part = group.parts.emplace_back();
      part.kind = kind;
      part.is_send = is_send;
      part.from = static_cast<const std::byte*>(send) + peer * send_stride;
      part.to = static_cast<std::byte*>(receive) + peer * static_cast<int64_t>(count);
      part.num_bytes = static_cast<int64_t>(count);
      part.peer = peer;
    }
  }
  return Enqueue(std::move(group));
}

}  // namespace

ncclResult_t ncclGetVersion(int* version) {
  *version = HasFault("old_version") ? 21700 : NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInvalidArgument:
      return "invalid argument";
    default:
      return "an error that nccl_over_sockets has not";
  }
}

const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  // Not text alone, as a real one.
  std::memset(id->internal, 0xff, sizeof(id->internal));
  std::random_device random;
  for (int i = 0; i < 32; ++i) id->internal[i] = "0123456789abcdef"[random() % 16];
  id->internal[32] = '\0';
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  if (config->blocking != 0) Misuse("ncclCommInitRankConfig", "to block");
  // Else it would take more multiprocessors than products of experts leave.
  if (config->maxCTAs == NCCL_CONFIG_UNDEF_INT) Misuse("ncclCommInitRankConfig", "no maxCTAs");
  const char* const interface = std::getenv("NCCL_SOCKET_IFNAME");
  const char* const loading = std::getenv("CUDA_MODULE_LOADING");
  const char* const connect = std::getenv("NCCL_RUNTIME_CONNECT");
  std::fprintf(stderr,
               "nccl_over_sockets: rank %d of %d, NCCL_SOCKET_IFNAME%s, NCCL_RUNTIME_CONNECT=%s, "
               "CUDA_MODULE_LOADING=%s\n",
               rank, num_ranks, interface == nullptr ? " is not set" : interface,
               connect == nullptr ? "" : connect, loading == nullptr ? "" : loading);
  NcclSocketLinks::Params params;
  params.group = std::string(id.internal, 32);
  params.num_ranks = num_ranks;
  params.rank = rank;
  params.peers_end_silently = HasFault("silent_peers");
  std::shared_ptr<NcclSocketLinks> links = NcclSocketLinks::Start(params, &last_error);
  if (links == nullptr) return ncclSystemError;
  auto made = std::make_unique<ncclComm>();
  made->links = std::move(links);
  made->polls_left = kPollsInProgress;
  const std::lock_guard<std::mutex> lock(mutex);
  *comm = made.get();
  Comms().insert(made.release());
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  std::function<void()> enqueue;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    ncclComm& found = Find(comm, "ncclCommGetAsyncError");
    if (const std::string error = found.links->error(); !error.empty()) {
      last_error = error;
      *state = ncclRemoteError;
      return ncclSuccess;
    }
    if (HasFault("init_fails")) {
      last_error = "Bootstrap : no socket interface found";
      *state = ncclSystemError;
      return ncclSuccess;
    }
    *state = ncclInProgress;
    if (!found.links->is_connected()) return ncclSuccess;
    if (found.polls_left > 0 && --found.polls_left > 0) return ncclSuccess;
    if (found.finalizing) {
      if (!found.links->is_drained()) return ncclSuccess;
      if (!std::exchange(found.said_farewell, true)) {
        found.links->SayFarewell();
        return ncclSuccess;
      }
    }
    found.initialized = true;
    *state = ncclSuccess;
    enqueue = std::exchange(found.enqueue, nullptr);
  }
  if (enqueue != nullptr) enqueue();
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const std::lock_guard<std::mutex> lock(mutex);
  ncclComm& found = Find(comm, "ncclCommFinalize");
  if (!found.initialized || found.finalizing) Misuse("ncclCommFinalize", "out of its turn");
  found.finalizing = true;
  found.polls_left = kPollsInProgress;
  return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  std::unique_ptr<ncclComm> owned;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    owned.reset(&Find(comm, "ncclCommDestroy"));
    if (!owned->said_farewell) Misuse("ncclCommDestroy", "before ncclCommFinalize was over");
    Comms().erase(comm);
  }
  owned->links->Abort();
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  std::unique_ptr<ncclComm> owned;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    owned.reset(&Find(comm, "ncclCommAbort"));
    Comms().erase(comm);
  }
  while (HasFault("abort_hangs")) pause();
  owned->links->Abort();
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++open_group.depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (open_group.depth == 0) Misuse("ncclGroupEnd", "without a group");
  if (--open_group.depth > 0) return ncclSuccess;
  return Enqueue(std::exchange(open_group, Group()));
}

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return Point(/*is_send=*/true, data, nullptr, count, type, peer, comm, stream);
}

ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return Point(/*is_send=*/false, nullptr, data, count, type, peer, comm, stream);
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return AllRanks(Kind::kAllGather, "ncclAllGather", send, 0, receive, count, type, comm, stream);
}

ncclResult_t ncclAlltoAll(const void* send, void* receive, size_t count, ncclDataType_t type,
                          ncclComm_t comm, cudaStream_t stream) {
  return AllRanks(Kind::kAllToAll, "ncclAlltoAll", send, static_cast<int64_t>(count), receive,
                  count, type, comm, stream);
}
