#include "tests/server/comm/fake_nccl.h"

#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace expertmesh {
namespace {

using Result = NcclFunctions::Result;

// How often CommGetAsyncError says that a call is in progress before it is over.
constexpr int kPollsInProgress = 2;

enum class PartKind : uint8_t { kPoint, kAllGather, kAllToAll };

struct Part {
  PartKind kind = PartKind::kPoint;
  bool is_send = false;
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  int64_t num_bytes = 0;
  int32_t peer = 0;
  bool over = false;
};

struct FakeComm {
  int32_t rank = 0;
  int32_t num_ranks = 1;
  std::string group;
  int polls_left = kPollsInProgress;
  bool initialized = false;
  bool finalizing = false;
  bool aborted = false;
  int num_kernels = 0;            // that run
  std::function<void()> enqueue;  // when the call in progress is over
};

struct FakeEvent {
  int64_t num_recorded = 0;
  int64_t num_reached = 0;
};

struct FakeStream {
  std::deque<std::function<void()>> work;
  bool running = false;
  bool stopping = false;
  std::thread thread;
};

struct Group {
  FakeComm* comm = nullptr;
  NcclFunctions::DeviceStream stream = nullptr;
  std::vector<Part> parts;
  int depth = 0;
};
thread_local Group open_group;

}  // namespace

struct FakeNccl::State {
  using Lock = std::unique_lock<std::mutex>;
  // Parts that wait for their other half, by group, sender, receiver.
  using Channel = std::pair<std::string, std::pair<int32_t, int32_t>>;
  struct Waiting {
    std::deque<Part*> sends;
    std::deque<Part*> receives;
  };

  const LaunchKernel launch_kernel;

  explicit State(LaunchKernel launch) : launch_kernel(std::move(launch)) {}

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::map<int32_t, Faults> faults;
  std::set<FakeComm*> comms;
  std::set<FakeStream*> streams;
  std::set<FakeEvent*> events;
  std::map<std::string, std::set<int32_t>> joined;  // ranks, by group
  std::map<Channel, Waiting> channels;
  std::string misuses;
  int64_t num_ids = 0;
  int64_t num_aborts = 0;
  int64_t num_hung_aborts = 0;
  bool aborts_released = false;
  bool queries_hang = false;
  int64_t num_all_to_alls = 0;
  int64_t num_all_gathers = 0;
  int64_t num_sends = 0;
  int64_t num_taken = 0;
  int64_t num_native_records = 0;
  bool native_callers = false;

  void Misuse(const std::string& what) { absl::StrAppend(&misuses, what, "; "); }

  // Null, and a misuse, for one that is gone.
  FakeComm* Find(Comm comm, const char* call) {
    const auto found = comms.find(static_cast<FakeComm*>(comm));
    if (found != comms.end() && !(*found)->aborted) return *found;
    Misuse(absl::StrCat(call, " of a communicator that is gone"));
    return nullptr;
  }

  void Push(FakeStream* stream, std::function<void()> work) {
    stream->work.push_back(std::move(work));
    changed.notify_all();
  }

  void FreeAborted() {
    std::erase_if(comms, [](FakeComm* comm) {
      const bool is_free = comm->aborted && comm->num_kernels == 0;
      if (is_free) delete comm;
      return is_free;
    });
  }

  // Copies what has both halves. A pair that does not match stays for ever, and holds up what comes
  // behind it.
  void Match(const Channel& channel) {
    Waiting& waiting = channels[channel];
    while (!waiting.sends.empty() && !waiting.receives.empty()) {
      Part& send = *waiting.sends.front();
      Part& receive = *waiting.receives.front();
      if (send.num_bytes != receive.num_bytes || send.kind != receive.kind) return;
      std::memcpy(receive.to, send.from, static_cast<size_t>(send.num_bytes));
      send.over = receive.over = true;
      waiting.sends.pop_front();
      waiting.receives.pop_front();
    }
    changed.notify_all();
  }

  // What a group does on the device, in three steps of its stream.
  struct Kernel {
    FakeComm* comm = nullptr;
    std::vector<Part> parts;
    bool begun = false;
  };
  Channel ChannelOf(const Kernel& kernel, const Part& part) const {
    const int32_t rank = kernel.comm->rank;
    return {kernel.comm->group,
            part.is_send ? std::pair{rank, part.peer} : std::pair{part.peer, rank}};
  }
  void Begin(Kernel& kernel) {
    const Lock lock(mutex);
    if (kernel.comm->aborted) return;
    kernel.begun = true;
    ++kernel.comm->num_kernels;
    for (Part& part : kernel.parts) {
      Waiting& waiting = channels[ChannelOf(kernel, part)];
      (part.is_send ? waiting.sends : waiting.receives).push_back(&part);
      Match(ChannelOf(kernel, part));
    }
  }
  bool IsOverLocked(const Kernel& kernel) {
    if (!kernel.begun || kernel.comm->aborted) return true;
    bool all_over = !faults[kernel.comm->rank].operations_hang;
    for (const Part& part : kernel.parts) all_over = all_over && part.over;
    return all_over;
  }
  bool IsOver(const Kernel& kernel) {
    const Lock lock(mutex);
    return IsOverLocked(kernel);
  }
  void WaitUntilOver(const Kernel& kernel) {
    Lock lock(mutex);
    changed.wait(lock, [&] { return IsOverLocked(kernel); });
  }
  void End(Kernel& kernel) {
    const Lock lock(mutex);
    if (!kernel.begun) return;
    for (const Part& part : kernel.parts) {
      Waiting& waiting = channels[ChannelOf(kernel, part)];
      std::erase(waiting.sends, &part);
      std::erase(waiting.receives, &part);
    }
    --kernel.comm->num_kernels;
    changed.notify_all();
  }

  Result Enqueue(const Group& group) {
    Lock lock(mutex);
    if (group.comm == nullptr) return Result::kSuccess;
    FakeComm* const comm = group.comm;
    if (comm->enqueue != nullptr || comm->polls_left > 0) {
      Misuse("a group on a communicator that is in progress");
      return Result::kInvalidUsage;
    }
    const Faults& fault = faults[comm->rank];
    if (fault.group_end != Result::kSuccess) return fault.group_end;
    if (fault.call_hangs) {
      const bool survives = fault.call_survives_abort;
      changed.wait(lock, [&] { return aborts_released || (comm->aborted && !survives); });
      return Result::kInternalError;
    }
    comm->polls_left = kPollsInProgress;
    comm->enqueue = [this, group] {
      const auto kernel = std::make_shared<Kernel>(Kernel{group.comm, group.parts});
      if (launch_kernel != nullptr) {
        launch_kernel(
            group.stream, [this, kernel] { Begin(*kernel); },
            [this, kernel] { return IsOver(*kernel); }, [this, kernel] { End(*kernel); });
        return;
      }
      const Lock pushing(mutex);
      Push(static_cast<FakeStream*>(group.stream), [this, kernel] {
        Begin(*kernel);
        WaitUntilOver(*kernel);
        End(*kernel);
      });
    };
    return Result::kInProgress;
  }
};

FakeNccl::FakeNccl(bool has_all_to_all, LaunchKernel launch_kernel)
    : has_all_to_all_(has_all_to_all), state_(std::make_unique<State>(std::move(launch_kernel))) {}

FakeNccl::~FakeNccl() {
  ReleaseAborts();
  // What was left behind in a hung abort.
  for (FakeStream* stream : std::set<FakeStream*>(state_->streams)) StreamDestroy(stream);
  for (FakeComm* comm : state_->comms) delete comm;
  for (FakeEvent* event : state_->events) delete event;
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
int64_t FakeNccl::num_live_streams() const {
  const State::Lock lock(state_->mutex);
  return static_cast<int64_t>(state_->streams.size());
}
int64_t FakeNccl::num_live_events() const {
  const State::Lock lock(state_->mutex);
  return static_cast<int64_t>(state_->events.size());
}
int64_t FakeNccl::num_aborts() const {
  const State::Lock lock(state_->mutex);
  return state_->num_aborts;
}
int64_t FakeNccl::num_all_to_alls() const {
  const State::Lock lock(state_->mutex);
  return state_->num_all_to_alls;
}
int64_t FakeNccl::num_all_gathers() const {
  const State::Lock lock(state_->mutex);
  return state_->num_all_gathers;
}
int64_t FakeNccl::num_sends() const {
  const State::Lock lock(state_->mutex);
  return state_->num_sends;
}
int64_t FakeNccl::num_taken() const {
  const State::Lock lock(state_->mutex);
  return state_->num_taken;
}
int64_t FakeNccl::num_native_records() const {
  const State::Lock lock(state_->mutex);
  return state_->num_native_records;
}
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
  auto* const made = new FakeComm;
  made->rank = rank;
  made->num_ranks = num_ranks;
  made->group = std::string(id.begin(), id.end());
  state_->comms.insert(made);
  if (!fault.init_never_ends && fault.init == Result::kSuccess &&
      !state_->joined[made->group].insert(rank).second) {
    state_->Misuse("one rank twice");
  }
  *comm = made;
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
  delete found;
  return Result::kSuccess;
}

Result FakeNccl::CommAbort(Comm comm) {
  State::Lock lock(state_->mutex);
  FakeComm* const found = state_->Find(comm, "CommAbort");
  if (found == nullptr) return Result::kInvalidArgument;
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
  // Not freed yet: its kernels may still stand in a stream's queue.
  return Result::kSuccess;
}

Result FakeNccl::GroupStart() {
  ++open_group.depth;
  return Result::kSuccess;
}

Result FakeNccl::GroupEnd() {
  if (--open_group.depth > 0) return Result::kSuccess;
  return state_->Enqueue(std::exchange(open_group, Group()));
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
  open_group.parts.push_back({PartKind::kPoint, true, static_cast<const std::byte*>(data), nullptr,
                              num_bytes, peer, false});
  return Result::kSuccess;
}

Result FakeNccl::Recv(void* data, int64_t num_bytes, int32_t peer, Comm comm, DeviceStream stream) {
  const State::Lock lock(state_->mutex);
  FakeComm* const found = state_->Find(comm, "Recv");
  if (found == nullptr) return Result::kInvalidArgument;
  if (open_group.depth == 0) state_->Misuse("Recv outside a group");
  open_group.comm = found;
  open_group.stream = stream;
  open_group.parts.push_back(
      {PartKind::kPoint, false, nullptr, static_cast<std::byte*>(data), num_bytes, peer, false});
  return Result::kSuccess;
}

Result FakeNccl::AllGather(const void* send, void* receive, int64_t num_bytes, Comm comm,
                           DeviceStream stream) {
  Group group;
  {
    const State::Lock lock(state_->mutex);
    group.comm = state_->Find(comm, "AllGather");
    if (group.comm == nullptr) return Result::kInvalidArgument;
    ++state_->num_all_gathers;
    group.stream = stream;
    for (int32_t peer = 0; peer < group.comm->num_ranks; ++peer) {
      group.parts.push_back({PartKind::kAllGather, true, static_cast<const std::byte*>(send),
                             nullptr, num_bytes, peer, false});
      group.parts.push_back({PartKind::kAllGather, false, nullptr,
                             static_cast<std::byte*>(receive) + peer * num_bytes, num_bytes, peer,
                             false});
    }
  }
  return state_->Enqueue(group);
}

Result FakeNccl::AllToAll(const void* send, void* receive, int64_t num_bytes, Comm comm,
                          DeviceStream stream) {
  Group group;
  {
    const State::Lock lock(state_->mutex);
    group.comm = state_->Find(comm, "AllToAll");
    if (group.comm == nullptr) return Result::kInvalidArgument;
    ++state_->num_all_to_alls;
    if (!has_all_to_all_) state_->Misuse("AllToAll of a library without it");
    group.stream = stream;
    for (int32_t peer = 0; peer < group.comm->num_ranks; ++peer) {
      group.parts.push_back({PartKind::kAllToAll, true,
                             static_cast<const std::byte*>(send) + peer * num_bytes, nullptr,
                             num_bytes, peer, false});
      group.parts.push_back({PartKind::kAllToAll, false, nullptr,
                             static_cast<std::byte*>(receive) + peer * num_bytes, num_bytes, peer,
                             false});
    }
  }
  return state_->Enqueue(group);
}

absl::Status FakeNccl::SetDevice(int32_t device_index) {
  if (device_index == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("no device ", device_index));
}

absl::Status FakeNccl::StreamCreate(DeviceStream* stream) {
  auto* const made = new FakeStream;
  made->thread = std::thread([state = state_.get(), made] {
    State::Lock lock(state->mutex);
    while (true) {
      state->changed.wait(lock, [made] { return made->stopping || !made->work.empty(); });
      if (made->work.empty()) return;
      const std::function<void()> work = std::move(made->work.front());
      made->work.pop_front();
      made->running = true;
      lock.unlock();
      work();
      lock.lock();
      made->running = false;
      state->changed.notify_all();
    }
  });
  const State::Lock lock(state_->mutex);
  state_->streams.insert(made);
  *stream = made;
  return absl::OkStatus();
}

void FakeNccl::StreamDestroy(DeviceStream stream) {
  auto* const found = static_cast<FakeStream*>(stream);
  {
    const State::Lock lock(state_->mutex);
    found->stopping = true;
    state_->changed.notify_all();
  }
  found->thread.join();
  const State::Lock lock(state_->mutex);
  state_->streams.erase(found);
  delete found;
  state_->FreeAborted();
}

void FakeNccl::FreeAborted() {
  const State::Lock lock(state_->mutex);
  state_->FreeAborted();
}

absl::Status FakeNccl::StreamSynchronize(DeviceStream stream) {
  auto* const found = static_cast<FakeStream*>(stream);
  State::Lock lock(state_->mutex);
  state_->changed.wait(lock, [found] { return found->work.empty() && !found->running; });
  return absl::OkStatus();
}

absl::Status FakeNccl::StreamWaitEvent(DeviceStream stream, DeviceEvent event) {
  const State::Lock lock(state_->mutex);
  auto* const found = static_cast<FakeEvent*>(event);
  state_->Push(static_cast<FakeStream*>(stream), [state = state_.get(), found,
                                                  number = found->num_recorded] {
    State::Lock waiting(state->mutex);
    state->changed.wait(waiting, [found, number] { return found->num_reached >= number; });
  });
  return absl::OkStatus();
}

absl::Status FakeNccl::EventCreate(DeviceEvent* event) {
  const State::Lock lock(state_->mutex);
  auto* const made = new FakeEvent;
  state_->events.insert(made);
  *event = made;
  return absl::OkStatus();
}

void FakeNccl::EventDestroy(DeviceEvent event) {
  const State::Lock lock(state_->mutex);
  auto* const found = static_cast<FakeEvent*>(event);
  state_->events.erase(found);
  delete found;
}

absl::Status FakeNccl::EventRecord(DeviceEvent event, DeviceStream stream) {
  const State::Lock lock(state_->mutex);
  auto* const found = static_cast<FakeEvent*>(event);
  const int64_t number = ++found->num_recorded;
  state_->Push(static_cast<FakeStream*>(stream), [state = state_.get(), found, number] {
    const State::Lock reached(state->mutex);
    found->num_reached = number;
    state->changed.notify_all();
  });
  return absl::OkStatus();
}

absl::StatusOr<bool> FakeNccl::EventQuery(DeviceEvent event) {
  State::Lock lock(state_->mutex);
  state_->changed.wait(lock, [this] { return !state_->queries_hang || state_->num_aborts > 0; });
  const auto* const found = static_cast<const FakeEvent*>(event);
  return found->num_reached == found->num_recorded;
}

bool FakeNccl::IsDeviceStream(const Stream& /*stream*/) const {
  const State::Lock lock(state_->mutex);
  return state_->native_callers;
}

absl::Status FakeNccl::RecordOnCaller(Stream& stream, DeviceEvent event, const Event& recorded,
                                      std::shared_ptr<const void> event_owner) {
  return stream.Enqueue([state = state_.get(), found = static_cast<FakeEvent*>(event),
                         recorded = recorded, owner = std::move(event_owner)]() mutable {
    int64_t number;
    {
      const State::Lock lock(state->mutex);
      ++state->num_native_records;
      number = ++found->num_recorded;
    }
    recorded.Signal();
    const State::Lock lock(state->mutex);
    found->num_reached = number;
    state->changed.notify_all();
    return absl::OkStatus();
  });
}

}  // namespace expertmesh
