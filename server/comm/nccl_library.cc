#include "server/comm/nccl_library.h"

#include <dlfcn.h>
#include <nccl.h>

#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/comm/nccl_device_functions.h"

namespace expertmesh {
namespace {

// Of what is called here the newest, but for ncclAlltoAll: ncclCommInitRankConfig (2.14) whose
// communicators' groups do not block (2.18).
constexpr int kMinVersion = 21800;

static_assert(sizeof(NcclFunctions::UniqueId) == sizeof(ncclUniqueId));
static_assert(static_cast<int>(NcclFunctions::Result::kSuccess) == ncclSuccess);
static_assert(static_cast<int>(NcclFunctions::Result::kUnhandledCudaError) ==
              ncclUnhandledCudaError);
static_assert(static_cast<int>(NcclFunctions::Result::kSystemError) == ncclSystemError);
static_assert(static_cast<int>(NcclFunctions::Result::kInternalError) == ncclInternalError);
static_assert(static_cast<int>(NcclFunctions::Result::kInvalidArgument) == ncclInvalidArgument);
static_assert(static_cast<int>(NcclFunctions::Result::kInvalidUsage) == ncclInvalidUsage);
static_assert(static_cast<int>(NcclFunctions::Result::kRemoteError) == ncclRemoteError);
static_assert(static_cast<int>(NcclFunctions::Result::kInProgress) == ncclInProgress);

// Closed never: NCCL leaves threads and thread-local values behind that would run on.
struct NcclSymbols {
  decltype(&ncclGetVersion) get_version = nullptr;
  decltype(&ncclGetErrorString) get_error_string = nullptr;
  decltype(&ncclGetLastError) get_last_error = nullptr;
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) comm_init_rank_config = nullptr;
  decltype(&ncclCommGetAsyncError) comm_get_async_error = nullptr;
  decltype(&ncclCommFinalize) comm_finalize = nullptr;
  decltype(&ncclCommDestroy) comm_destroy = nullptr;
  decltype(&ncclCommAbort) comm_abort = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) recv = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclAlltoAll) all_to_all = nullptr;  // null before 2.28
};

// As people write it.
std::string VersionText(int version) {
  return absl::StrCat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

absl::StatusOr<NcclSymbols> FindSymbols(void* library) {
  NcclSymbols symbols;
  std::vector<std::string> missing;
  const auto find = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    return function != nullptr;
  };
  const auto need = [&](const char* name, auto& function) {
    if (!find(name, function)) missing.emplace_back(name);
  };
  need("ncclGetVersion", symbols.get_version);
  need("ncclGetErrorString", symbols.get_error_string);
  need("ncclGetLastError", symbols.get_last_error);
  need("ncclGetUniqueId", symbols.get_unique_id);
  need("ncclCommInitRankConfig", symbols.comm_init_rank_config);
  need("ncclCommGetAsyncError", symbols.comm_get_async_error);
  need("ncclCommFinalize", symbols.comm_finalize);
  need("ncclCommDestroy", symbols.comm_destroy);
  need("ncclCommAbort", symbols.comm_abort);
  need("ncclGroupStart", symbols.group_start);
  need("ncclGroupEnd", symbols.group_end);
  need("ncclSend", symbols.send);
  need("ncclRecv", symbols.recv);
  need("ncclAllGather", symbols.all_gather);
  find("ncclAlltoAll", symbols.all_to_all);
  if (!missing.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("lacks ", absl::StrJoin(missing, ", ")));
  }
  return symbols;
}

class NcclLibrary : public NcclDeviceFunctions {
 public:
  NcclLibrary(NcclSymbols symbols, std::string description)
      : symbols_(symbols), description_(std::move(description)) {}

  std::string Describe() const override { return description_; }

  std::string ErrorText(Result result, Comm comm) override {
    const char* const last = symbols_.get_last_error(AsComm(comm));
    return absl::StrCat(symbols_.get_error_string(static_cast<ncclResult_t>(result)),
                        last == nullptr || *last == '\0' ? "" : ": ", last == nullptr ? "" : last);
  }

  Result GetUniqueId(UniqueId* id) override {
    ncclUniqueId made;
    const ncclResult_t result = symbols_.get_unique_id(&made);
    std::memcpy(id->data(), made.internal, id->size());
    return AsResult(result);
  }
  Result CommInitRank(Comm* comm, int32_t num_ranks, const UniqueId& id, int32_t rank) override {
    ncclUniqueId shared;
    std::memcpy(shared.internal, id.data(), id.size());
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.maxCTAs = kNcclMultiprocessors;
    ncclComm_t made = nullptr;
    const ncclResult_t result =
        symbols_.comm_init_rank_config(&made, num_ranks, shared, rank, &config);
    *comm = made;
    return AsResult(result);
  }
  Result CommGetAsyncError(Comm comm, Result* error) override {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t result = symbols_.comm_get_async_error(AsComm(comm), &state);
    *error = AsResult(state);
    return AsResult(result);
  }
  Result CommFinalize(Comm comm) override { return AsResult(symbols_.comm_finalize(AsComm(comm))); }
  Result CommDestroy(Comm comm) override { return AsResult(symbols_.comm_destroy(AsComm(comm))); }
  Result CommAbort(Comm comm) override { return AsResult(symbols_.comm_abort(AsComm(comm))); }
  Result GroupStart() override { return AsResult(symbols_.group_start()); }
  Result GroupEnd() override { return AsResult(symbols_.group_end()); }
  Result Send(const void* data, int64_t num_bytes, int32_t peer, Comm comm,
              DeviceStream stream) override {
    return AsResult(symbols_.send(data, static_cast<size_t>(num_bytes), ncclInt8, peer,
                                  AsComm(comm), AsStream(stream)));
  }
  Result Recv(void* data, int64_t num_bytes, int32_t peer, Comm comm,
              DeviceStream stream) override {
    return AsResult(symbols_.recv(data, static_cast<size_t>(num_bytes), ncclInt8, peer,
                                  AsComm(comm), AsStream(stream)));
  }
  Result AllGather(const void* send, void* receive, int64_t num_bytes, Comm comm,
                   DeviceStream stream) override {
    return AsResult(symbols_.all_gather(send, receive, static_cast<size_t>(num_bytes), ncclInt8,
                                        AsComm(comm), AsStream(stream)));
  }
  bool has_all_to_all() const override { return symbols_.all_to_all != nullptr; }
  Result AllToAll(const void* send, void* receive, int64_t num_bytes, Comm comm,
                  DeviceStream stream) override {
    return AsResult(symbols_.all_to_all(send, receive, static_cast<size_t>(num_bytes), ncclInt8,
                                        AsComm(comm), AsStream(stream)));
  }

 private:
  static Result AsResult(ncclResult_t result) { return static_cast<Result>(result); }
  static ncclComm_t AsComm(Comm comm) { return static_cast<ncclComm_t>(comm); }
  static cudaStream_t AsStream(DeviceStream stream) { return static_cast<cudaStream_t>(stream); }

  const NcclSymbols symbols_;
  const std::string description_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<NcclFunctions>> OpenNcclLibrary(const std::string& path) {
  const std::vector<std::string> candidates =
      path.empty() ? std::vector<std::string>{"libnccl.so.2", EXPERTMESH_NCCL_LIBRARY}
                   : std::vector<std::string>{path};
  std::vector<std::string> failures;
  for (const std::string& candidate : candidates) {
    void* const library = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == nullptr) {
      failures.emplace_back(dlerror());
      continue;
    }
    const absl::StatusOr<NcclSymbols> symbols = FindSymbols(library);
    if (!symbols.ok()) {
      failures.push_back(absl::StrCat(candidate, " ", symbols.status().message()));
      continue;
    }
    int version = 0;
    if (symbols->get_version(&version) != ncclSuccess || version < kMinVersion) {
      failures.push_back(absl::StrCat(candidate, " is version ", VersionText(version), "; ",
                                      VersionText(kMinVersion), " and later will do"));
      continue;
    }
    return std::make_shared<NcclLibrary>(
        *symbols, absl::StrCat("NCCL ", VersionText(version), " (", candidate, ")"));
  }
  return absl::FailedPreconditionError(absl::StrCat("no NCCL: ", absl::StrJoin(failures, "; ")));
}

}  // namespace expertmesh
