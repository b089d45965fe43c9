#include "tests/server/comm/fake_nccl.h"

#include <cstring>
#include <functional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/server/comm/fake_nccl_state.h"
#include "tests/server/comm/fake_nccl_transfers.h"

namespace expertmesh {
namespace {

using Result = NcclFunctions::Result;

using Part = FakeNcclTransfers::Part;

thread_local FakeNcclCalls open_group;

}  // namespace

FakeNccl::FakeNccl(bool has_all_to_all, LaunchKernel launch_kernel)
    : has_all_to_all_(has_all_to_all), state_(std::make_unique<State>(std::move(launch_kernel))) {}

FakeNccl::~FakeNccl() {
  ReleaseAborts();
  state_->device.DestroyStreams();
}

void FakeNccl::SetFaults(int32_t rank, const Faults& faults) {
  const State::Lock lock(state_->mutex);
  state_->faults[rank] = faults;
  state_->changed.notify_all();
}

void FakeNccl::ReleaseAborts() {
  State::Lock lock(state_->mutex);
  state_->aborts_released = true;
  state_->changed.notify_all();
  state_->changed.wait(lock, [this] { return state_->num_hung_aborts == 0; });
}

void FakeNccl::HangQueries() {
  const State::Lock lock(state_->mutex);
  state_->queries_hang = true;
}

std::string FakeNccl::misuses() const {
  const State::Lock lock(state_->mutex);
  return state_->misuses;
}
int64_t FakeNccl::num_live_comms() const {
  const State::Lock lock(state_->mutex);
  return static_cast<int64_t>(state_->comms.size());
}
int64_t FakeNccl::num_live_streams() const { return state_->device.num_live_streams(); }
int64_t FakeNccl::num_live_events() const { return state_->device.num_live_events(); }
int64_t FakeNccl::num_aborts() const { return state_->Read(&State::num_aborts); }
int64_t FakeNccl::num_all_to_alls() const { return state_->Read(&State::num_all_to_alls); }
int64_t FakeNccl::num_all_gathers() const { return state_->Read(&State::num_all_gathers); }
int64_t FakeNccl::num_sends() const { return state_->Read(&State::num_sends); }
int64_t FakeNccl::num_taken() const { return state_->Read(&State::num_taken); }
int64_t FakeNccl::num_native_records() const { return state_->device.num_records_on_host(); }
void FakeNccl::TreatCallersAsDeviceStreams() {
  const State::Lock lock(state_->mutex);
  state_->native_callers = true;
}

std::string FakeNccl::ErrorText(Result result, Comm comm) {
  const State::Lock lock(state_->mutex);
  if (comm != nullptr) state_->Find(comm, "ErrorText");
  return absl::StrCat("fake NCCL error ", static_cast<int32_t>(result));
}

Result FakeNccl::GetUniqueId(UniqueId* id) {
  const State::Lock lock(state_->mutex);
  if (state_->faults[0].get_unique_id != Result::kSuccess) return state_->faults[0].get_unique_id;
  const std::string text = absl::StrCat("id ", ++state_->num_ids);
  // Not text alone, as a real one.
  id->fill('\xff');
  std::memcpy(id->data() + 1, text.data(), text.size());
  (*id)[0] = '\0';
  return Result::kSuccess;
}

Result FakeNccl::CommInitRank(Comm* comm, int32_t num_ranks, const UniqueId& id, int32_t rank) {
  const State::Lock lock(state_->mutex);
  const Faults& fault = state_->faults[rank];
  if (fault.init != Result::kSuccess && !fault.init_late) return fault.init;
  const auto made = std::make_shared<FakeComm>();
  made->rank = rank;
  made->num_ranks = num_ranks;
  made->group = std::string(id.begin(), id.end());
  state_->comms[made.get()] = made;
  if (!fault.init_never_ends && fault.init == Result::kSuccess &&
      !state_->joined[made->group].insert(rank).second) {
    state_->Misuse("one rank twice");
  }
  *comm = made.get();
  return Result::kInProgress;
}

Result FakeNccl::CommGetAsyncError(Comm comm, Result* error) {
  State::Lock lock(state_->mutex);
  FakeComm* const found = state_->Find(comm, "CommGetAsyncError");
  if (found == nullptr) return Result::kInvalidArgument;
  const Faults& fault = state_->faults[found->rank];
  *error = Result::kInProgress;
  if (!found->initialized) {
    if (fault.init_never_ends) return Result::kSuccess;
    if (fault.init != Result::kSuccess) {
      *error = fault.init;
      return Result::kSuccess;
    }
    if (static_cast<int32_t>(state_->joined[found->group].size()) < found->num_ranks) {
      return Result::kSuccess;
    }
    found->initialized = true;
  }
  if (fault.async_error != Result::kSuccess) {
    *error = fault.async_error;
    return Result::kSuccess;
  }
  if (found->finalizing && (fault.finalize_never_ends || found->num_kernels > 0)) {
    return Result::kSuccess;
  }
  if (found->enqueue != nullptr && fault.enqueue_never_ends) return Result::kSuccess;
  if (found->polls_left > 0 && --found->polls_left > 0) return Result::kSuccess;
  *error = Result::kSuccess;
  const std::shared_ptr<FakeComm> kept = found->shared_from_this();
  const std::function<void()> enqueue = std::exchange(found->enqueue, nullptr);
  if (enqueue != nullptr) ++state_->num_taken;
  lock.unlock();
  if (enqueue != nullptr) enqueue();
  return Result::kSuccess;
}

Result FakeNccl::CommFinalize(Comm comm) {
  const State::Lock lock(state_->mutex);
  FakeComm* const found = state_->Find(comm, "CommFinalize");
  if (found == nullptr) return Result::kInvalidArgument;
  found->finalizing = true;
  found->polls_left = kPollsInProgress;
  return Result::kInProgress;
}

Result FakeNccl::CommDestroy(Comm comm) {
  const State::Lock lock(state_->mutex);
  FakeComm* const found = state_->Find(comm, "CommDestroy");
  if (found == nullptr) return Result::kInvalidArgument;
  if (!found->finalizing || found->polls_left > 0 || found->num_kernels > 0) {
    state_->Misuse("CommDestroy before CommFinalize was over");
  }
  state_->comms.erase(found);
  return Result::kSuccess;
}

Result FakeNccl::CommAbort(Comm comm) {
  State::Lock lock(state_->mutex);
  FakeComm* const found = state_->Find(comm, "CommAbort");
  if (found == nullptr) return Result::kInvalidArgument;
  const std::shared_ptr<FakeComm> kept = found->shared_from_this();
  ++state_->num_aborts;
  if (state_->faults[found->rank].abort_hangs) {
    ++state_->num_hung_aborts;
    state_->changed.wait(lock, [this] { return state_->aborts_released; });
    --state_->num_hung_aborts;
  }
  found->aborted = true;
  state_->changed.notify_all();
  if (state_->launch_kernel == nullptr) {
    state_->changed.wait(lock, [found] { return found->num_kernels == 0; });
  }
  found->enqueue = nullptr;
  state_->comms.erase(found);
  return Result::kSuccess;
}

Result FakeNccl::GroupStart() {
  ++open_group.depth;
  return Result::kSuccess;
}

Result FakeNccl::GroupEnd() {
  if (--open_group.depth > 0) return Result::kSuccess;
  return state_->Enqueue(std::exchange(open_group, FakeNcclCalls()));
}

Result FakeNccl::Send(const void* data, int64_t num_bytes, int32_t peer, Comm comm,
                      DeviceStream stream) {
  const State::Lock lock(state_->mutex);
  FakeComm* const found = state_->Find(comm, "Send");
  if (found == nullptr) return Result::kInvalidArgument;
  if (open_group.depth == 0) state_->Misuse("Send outside a group");
  if (num_bytes <= 0) state_->Misuse("Send of nothing");
  ++state_->num_sends;
  open_group.comm = found;
  open_group.stream = stream;
  open_group.parts.push_back(Part::Send(FakeNcclTransfers::Kind::kPoint, data, num_bytes, peer));
  return Result::kSuccess;
}

Result FakeNccl::Recv(void* data, int64_t num_bytes, int32_t peer, Comm comm, DeviceStream stream) {
  const State::Lock lock(state_->mutex);
  FakeComm* const found = state_->Find(comm, "Recv");
  if (found == nullptr) return Result::kInvalidArgument;
  if (open_group.depth == 0) state_->Misuse("Recv outside a group");
  open_group.comm = found;
  open_group.stream = stream;
  open_group.parts.push_back(Part::Receive(FakeNcclTransfers::Kind::kPoint, data, num_bytes, peer));
  return Result::kSuccess;
}

Result FakeNccl::AllGather(const void* send, void* receive, int64_t num_bytes, Comm comm,
                           DeviceStream stream) {
  FakeNcclCalls group;
  {
    const State::Lock lock(state_->mutex);
    group.comm = state_->Find(comm, "AllGather");
    if (group.comm == nullptr) return Result::kInvalidArgument;
    ++state_->num_all_gathers;
    group.stream = stream;
    group.AddForAllPeers(FakeNcclTransfers::Kind::kAllGather, send, /*send_stride=*/0, receive,
                         num_bytes);
  }
  return state_->Enqueue(group);
}

Result FakeNccl::AllToAll(const void* send, void* receive, int64_t num_bytes, Comm comm,
                          DeviceStream stream) {
  FakeNcclCalls group;
  {
    const State::Lock lock(state_->mutex);
    group.comm = state_->Find(comm, "AllToAll");
    if (group.comm == nullptr) return Result::kInvalidArgument;
    ++state_->num_all_to_alls;
    if (!has_all_to_all_) state_->Misuse("AllToAll of a library without it");
    group.stream = stream;
    group.AddForAllPeers(FakeNcclTransfers::Kind::kAllToAll, send, num_bytes, receive, num_bytes);
  }
  return state_->Enqueue(group);
}

absl::Status FakeNccl::SetDevice(int32_t device_index) {
  if (device_index == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("no device ", device_index));
}

absl::Status FakeNccl::StreamCreate(DeviceStream* stream) {
  *stream = state_->device.CreateStream();
  return absl::OkStatus();
}

void FakeNccl::StreamDestroy(DeviceStream stream) { state_->device.DestroyStream(stream); }

absl::Status FakeNccl::StreamSynchronize(DeviceStream stream) {
  state_->device.Synchronize(stream);
  return absl::OkStatus();
}

absl::Status FakeNccl::StreamWaitEvent(DeviceStream stream, DeviceEvent event) {
  state_->device.WaitFor(stream, event);
  return absl::OkStatus();
}

absl::Status FakeNccl::EventCreate(DeviceEvent* event) {
  *event = state_->device.CreateEvent();
  return absl::OkStatus();
}

void FakeNccl::EventDestroy(DeviceEvent event) { state_->device.DestroyEvent(event); }

absl::Status FakeNccl::EventRecord(DeviceEvent event, DeviceStream stream) {
  state_->device.Record(event, stream);
  return absl::OkStatus();
}

absl::StatusOr<bool> FakeNccl::EventQuery(DeviceEvent event) {
  State::Lock lock(state_->mutex);
  state_->changed.wait(lock, [this] { return !state_->queries_hang || state_->num_aborts > 0; });
  return state_->device.IsReached(event);
}

bool FakeNccl::IsDeviceStream(const Stream& /*stream*/) const {
  const State::Lock lock(state_->mutex);
  return state_->native_callers;
}

absl::Status FakeNccl::RecordOnCaller(Stream& stream, DeviceEvent event, const Event& recorded,
                                      std::shared_ptr<const void> event_owner) {
  return state_->device.RecordOnHost(stream, event, recorded, std::move(event_owner));
}

}  // namespace expertmesh
