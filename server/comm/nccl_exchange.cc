#include "server/comm/nccl_exchange.h"

#include <sys/prctl.h>

#include <algorithm>
#include <atomic>

#include "absl/strings/str_cat.h"
#include "kernels/base/steady_now.h"
#include "server/ops/start_thread.h"

namespace expertmesh {
namespace {

// How often the device and NCCL are asked: a small operation takes some ten microseconds, one that
// waits for its peers may take long.
constexpr std::chrono::microseconds kPollInterval(10);
constexpr std::chrono::microseconds kPatientPollInterval(200);
constexpr std::chrono::milliseconds kPatientAfter(5);

// For the last bytes of a rank that leaves in peace.
constexpr absl::Duration kFinalizeTimeout = absl::Seconds(2);

std::chrono::nanoseconds ToChrono(absl::Duration duration) {
  return absl::ToChronoNanoseconds(std::clamp(duration, absl::ZeroDuration(), absl::Hours(1000)));
}

}  // namespace

absl::Status NcclStatus(NcclFunctions& functions, NcclFunctions::Result result,
                        NcclFunctions::Comm comm, const char* call) {
  using Result = NcclFunctions::Result;
  if (result == Result::kSuccess || result == Result::kInProgress) return absl::OkStatus();
  const std::string text = absl::StrCat(call, ": ", functions.ErrorText(result, comm));
  if (result == Result::kRemoteError || result == Result::kSystemError) {
    return absl::UnavailableError(text);
  }
  return absl::InternalError(text);
}

NcclExchange::NcclExchange(Params params)
    : params_(std::move(params)),
      functions_(*params_.functions),
      operation_timeout_(ToChrono(params_.operation_timeout)),
      traffic_(params_.ep_size),
      control_stream_(NewThreadedHostStream()) {}

NcclExchange::~NcclExchange() {
  // The device may still get to them.
  if (left_behind_) return;
  for (const NcclFunctions::DeviceEvent event : idle_events_) functions_.EventDestroy(event);
}

absl::Status NcclExchange::Begin() {
  absl::StatusOr<std::unique_ptr<DeadlineWorker>> worker = DeadlineWorker::Start();
  if (!worker.ok()) return worker.status();
  worker_ = *std::move(worker);
  absl::StatusOr<std::thread> teardown = StartThread([this] { WatchForBreak(); });
  if (!teardown.ok()) return teardown.status();
  teardown_ = *std::move(teardown);
  absl::StatusOr<std::thread> thread = StartThread([this] { Run(); });
  if (!thread.ok()) return thread.status();
  thread_ = *std::move(thread);
  return absl::OkStatus();
}

absl::Status NcclExchange::broken() const {
  const Lock lock(mutex_);
  return broken_;
}

void NcclExchange::WakeWhenDone(const Event& event) {
  event.OnDone([weak = weak_from_this()] {
    const std::shared_ptr<NcclExchange> exchange = weak.lock();
    if (exchange == nullptr) return;
    const Lock lock(exchange->mutex_);
    exchange->changed_.notify_all();
  });
}

absl::StatusOr<NcclFunctions::DeviceEvent> NcclExchange::TakeDeviceEvent() {
  {
    const Lock lock(mutex_);
    if (!idle_events_.empty()) {
      const NcclFunctions::DeviceEvent event = idle_events_.back();
      idle_events_.pop_back();
      return event;
    }
  }
  NcclFunctions::DeviceEvent event = nullptr;
  absl::Status status = functions_.SetDevice(params_.device_index);
  if (status.ok()) status = functions_.EventCreate(&event);
  if (!status.ok()) return status;
  return event;
}

void NcclExchange::KeepDeviceEvents(NcclOperation& operation) {
  for (NcclFunctions::DeviceEvent* event : {&operation.reached, &operation.completed}) {
    if (*event != nullptr) idle_events_.push_back(std::exchange(*event, nullptr));
  }
}

absl::Status NcclExchange::Start(OperationPlace place, std::shared_ptr<NcclOperation> operation,
                                 Stream& stream) {
  WakeWhenDone(operation->ready);
  // A barrier is agreed on when the stream has reached it, which the host must know.
  if (operation->kind != NcclOperation::Kind::kBarrier && functions_.IsDeviceStream(stream)) {
    absl::StatusOr<NcclFunctions::DeviceEvent> event = TakeDeviceEvent();
    if (!event.ok()) return event.status();
    operation->reached = *event;
  }
  {
    const Lock lock(mutex_);
    if (broken_.ok() && place < next_) {
      // Another step has had it: no peer will come.
      const absl::Status status =
          absl::DataLossError(absl::StrCat("rank ", ep_rank(), " calls ", operation->ToString(),
                                           " at place ", place.order, ", which is past"));
      BreakLocked(status, status);
    }
    if (!broken_.ok()) {
      KeepDeviceEvents(*operation);
      return broken_;
    }
    called_.emplace(place, operation);
    changed_.notify_all();
  }
  absl::Status status = operation->reached == nullptr
                            ? stream.Record(operation->ready)
                            : functions_.RecordOnCaller(stream, operation->reached,
                                                        operation->ready, shared_from_this());
  if (!status.ok()) operation->ready.Signal(status);
  status.Update(stream.WaitFor(operation->done));
  return status;
}

void NcclExchange::CloseOrder(int64_t order, int64_t num_operations) {
  const Lock lock(mutex_);
  if (order < next_.order) return;
  closed_orders_.emplace(order, num_operations);
  PassClosedOrders();
  changed_.notify_all();
}

void NcclExchange::PassClosedOrders() {
  auto closed = closed_orders_.begin();
  while (closed != closed_orders_.end() && closed->first == next_.order &&
         closed->second <= next_.index) {
    next_ = {next_.order + 1, 0};
    closed = closed_orders_.erase(closed);
  }
}

void NcclExchange::Run() {
  // Else the kernel adds 50 microseconds to every short wait.
  prctl(PR_SET_TIMERSLACK, 1000UL);
  absl::Status device = functions_.SetDevice(params_.device_index);
  Lock lock(mutex_);
  if (!device.ok()) BreakLocked(device, device);
  Clock::time_point moved_at = Clock::now();
  while (broken_.ok() && !stopping_) {
    const bool sent = SendHeaders(lock);
    const bool issued = IssueFirst(lock);
    const bool finished = FinishFirst(lock);
    if (sent || issued || finished) {
      moved_at = Clock::now();
      continue;
    }
    if (!broken_.ok() || stopping_) break;
    if (issued_.empty()) {
      // Whoever changes something that this thread can go on with notifies.
      if (!CanMove()) changed_.wait(lock);
      moved_at = Clock::now();
    } else {
      const bool patient = Clock::now() - moved_at > kPatientAfter;
      changed_.wait_for(lock, patient ? kPatientPollInterval : kPollInterval);
    }
  }
}

bool NcclExchange::CanMove() const {
  const auto called = called_.find(next_);
  if (called != called_.end() &&
      (called->second->kind != NcclOperation::Kind::kBarrier || called->second->ready.done())) {
    return true;
  }
  return !agreeing_.empty() && agreeing_.front()->agreed.done() &&
         (!agreeing_.front()->checked || agreeing_.front()->ready.done());
}

bool NcclExchange::SendHeaders(Lock& lock) {
  const auto called = called_.find(next_);
  if (called == called_.end()) return false;
  const std::shared_ptr<NcclOperation> operation = called->second;
  if (operation->kind == NcclOperation::Kind::kBarrier && !operation->ready.done()) return false;
  called_.erase(called);
  ++next_.index;
  PassClosedOrders();
  agreeing_.push_back(operation);
  lock.unlock();
  operation->WriteHeader(ep_size());
  AllGatherVParams params;
  params.tag = operation->tag;
  params.tag.order = CollectiveTag::kAsCalled;
  params.send = reinterpret_cast<const std::byte*>(operation->header.data());
  params.receive = reinterpret_cast<std::byte*>(operation->headers.data());
  params.receive_bytes = operation->header_bytes;
  absl::Status status = params_.control->AllGatherV(params, *control_stream_);
  status.Update(control_stream_->Record(operation->agreed));
  WakeWhenDone(operation->agreed);
  lock.lock();
  if (!status.ok()) BreakLocked(status, absl::OkStatus());
  return true;
}

bool NcclExchange::IssueFirst(Lock& lock) {
  if (agreeing_.empty()) return false;
  const std::shared_ptr<NcclOperation> operation = agreeing_.front();
  if (!operation->agreed.done()) return false;
  if (!operation->checked) {
    // Either way all ranks find the same.
    absl::Status status = operation->agreed.status();
    if (status.ok()) status = operation->CheckHeaders(ep_size());
    operation->checked = true;
    if (!status.ok()) {
      BreakLocked(status, absl::OkStatus());
      return true;
    }
  }
  if (!operation->ready.done()) return false;
  if (const absl::Status status = operation->ready.status(); !status.ok()) {
    BreakLocked(status, status);
    return true;
  }
  agreeing_.pop_front();
  operation->deadline = Clock::now() + operation_timeout_;
  issued_.push_back(operation);
  lock.unlock();
  const absl::Status status = Issue(*operation);
  lock.lock();
  if (!status.ok()) BreakLocked(status, status);
  return true;
}

absl::Status NcclExchange::Call(const std::function<absl::Status()>& call) {
  {
    const Lock lock(mutex_);
    if (!broken_.ok()) return broken_;
    in_call_ = true;
  }
  const absl::Status status = call();
  const Lock lock(mutex_);
  in_call_ = false;
  changed_.notify_all();
  return status;
}

absl::StatusOr<NcclExchange::Result> NcclExchange::AsyncError() {
  Result result = Result::kSuccess;
  const absl::Status status = Call([&] {
    absl::Status asked = NcclStatus(functions_, functions_.CommGetAsyncError(params_.comm, &result),
                                    params_.comm, "ncclCommGetAsyncError");
    asked.Update(NcclStatus(functions_, result, params_.comm, "NCCL"));
    return asked;
  });
  if (status.ok()) return result;
  // A rank that aborts says by `control` why; all that NCCL knows is that it is gone.
  if (absl::Status told = params_.control->status(); !told.ok()) return told;
  return status;
}

absl::Status NcclExchange::Issue(NcclOperation& operation) {
  const auto any = [](const std::vector<int64_t>& counts) {
    return std::any_of(counts.begin(), counts.end(), [](int64_t count) { return count > 0; });
  };
  if (!any(operation.send_bytes) && !any(operation.receive_bytes)) return absl::OkStatus();
  absl::StatusOr<NcclFunctions::DeviceEvent> completed = TakeDeviceEvent();
  if (!completed.ok()) return completed.status();
  Result result = Result::kSuccess;
  absl::Status status = Call([&]() -> absl::Status {
    if (operation.reached != nullptr) {
      absl::Status waits = functions_.StreamWaitEvent(params_.stream, operation.reached);
      if (!waits.ok()) return waits;
    }
    result = GiveToNccl(operation);
    return NcclStatus(functions_, result, params_.comm, operation.ToString().c_str());
  });
  // Only then is it on the stream.
  while (status.ok() && result == Result::kInProgress) {
    absl::StatusOr<Result> asked = AsyncError();
    status = asked.status();
    if (!status.ok()) break;
    result = *asked;
    if (result != Result::kInProgress) break;
    if (Clock::now() > operation.deadline) {
      status = absl::DeadlineExceededError(
          absl::StrCat("NCCL did not take ", operation.ToString(), " in time"));
    }
    Lock lock(mutex_);
    if (broken_.ok()) changed_.wait_for(lock, kPollInterval);
  }
  if (status.ok()) {
    status = Call([&] { return functions_.EventRecord(*completed, params_.stream); });
  }
  const Lock lock(mutex_);
  operation.completed = *completed;
  return status;
}

NcclFunctions::Result NcclExchange::GiveToNccl(const NcclOperation& operation) {
  const int64_t equal_bytes = operation.EqualBytes(ep_size());
  if (equal_bytes > 0 && operation.kind == NcclOperation::Kind::kAllGatherV) {
    return functions_.AllGather(operation.send, operation.receive, equal_bytes, params_.comm,
                                params_.stream);
  }
  if (equal_bytes > 0 && operation.kind == NcclOperation::Kind::kAllToAllV &&
      functions_.has_all_to_all()) {
    return functions_.AllToAll(operation.send, operation.receive, equal_bytes, params_.comm,
                               params_.stream);
  }
  std::vector<int64_t> send_offsets(ep_size());
  std::vector<int64_t> receive_offsets(ep_size());
  for (int32_t rank = 1; rank < ep_size(); ++rank) {
    receive_offsets[rank] = receive_offsets[rank - 1] + operation.receive_bytes[rank - 1];
    if (operation.kind == NcclOperation::Kind::kAllToAllV) {
      send_offsets[rank] = send_offsets[rank - 1] + operation.send_bytes[rank - 1];
    }
  }
  Result result = functions_.GroupStart();
  if (result != Result::kSuccess) return result;
  const auto add = [&result](Result added) {
    if (result == Result::kSuccess && added != Result::kInProgress) result = added;
  };
  // Each rank begins with itself, so that not all send to rank 0 first.
  for (int32_t i = 0; i < ep_size() && result == Result::kSuccess; ++i) {
    const int32_t to = (ep_rank() + i) % ep_size();
    const int32_t from = (ep_rank() + ep_size() - i) % ep_size();
    if (operation.send_bytes[to] > 0) {
      add(functions_.Send(operation.send + send_offsets[to], operation.send_bytes[to], to,
                          params_.comm, params_.stream));
    }
    if (operation.receive_bytes[from] > 0) {
      add(functions_.Recv(operation.receive + receive_offsets[from], operation.receive_bytes[from],
                          from, params_.comm, params_.stream));
    }
  }
  // Also after an error: the thread would stay in the group.
  const Result ended = functions_.GroupEnd();
  return result == Result::kSuccess ? ended : result;
}

bool NcclExchange::FinishFirst(Lock& lock) {
  if (issued_.empty()) return false;
  const std::shared_ptr<NcclOperation> operation = issued_.front();
  bool is_done = operation->completed == nullptr;
  lock.unlock();
  absl::Status status;
  if (!is_done) {
    status = AsyncError().status();
    if (status.ok()) status = params_.control->status();
    if (status.ok()) {
      status = Call([&] {
        absl::StatusOr<bool> reached = functions_.EventQuery(operation->completed);
        is_done = reached.value_or(false);
        return reached.status();
      });
    }
  }
  lock.lock();
  if (!broken_.ok()) return true;
  if (!is_done && status.ok() && Clock::now() > operation->deadline) {
    status = absl::DeadlineExceededError(
        absl::StrCat("rank ", ep_rank(), " waited in vain for the end of ", operation->ToString()));
  }
  if (!status.ok()) {
    BreakLocked(status, status);
    return true;
  }
  if (!is_done) return false;
  issued_.pop_front();
  KeepDeviceEvents(*operation);
  if (!issued_.empty()) issued_.front()->deadline = Clock::now() + operation_timeout_;
  lock.unlock();
  operation->done.Signal();
  lock.lock();
  return true;
}

void NcclExchange::Break(const absl::Status& status, const absl::Status& reason_for_peers) {
  const Lock lock(mutex_);
  BreakLocked(status, reason_for_peers);
}

void NcclExchange::BreakLocked(const absl::Status& status, const absl::Status& reason_for_peers) {
  if (!broken_.ok()) return;
  broken_ = status;
  reason_for_peers_ = reason_for_peers;
  changed_.notify_all();
}

void NcclExchange::WatchForBreak() {
  absl::Status reason_for_peers;
  {
    Lock lock(mutex_);
    changed_.wait(lock, [this] { return !broken_.ok(); });
    if (torn_down_) return;
    reason_for_peers = reason_for_peers_;
  }
  TearDown(reason_for_peers);
}

void NcclExchange::TearDown(const absl::Status& reason_for_peers) {
  if (absl::IsDataLoss(reason_for_peers)) {
    // An abort would be an ABORTED to them; a call without counts is refused on all ranks.
    static_cast<void>(params_.control->AllGatherV({}, *control_stream_));
  } else if (!reason_for_peers.ok()) {
    params_.control->Abort(reason_for_peers);
  }
  {
    // A call that does not come back may be what the abort ends.
    Lock lock(mutex_);
    changed_.wait_for(lock, ToChrono(params_.abort_timeout / 2), [this] { return !in_call_; });
  }
  const bool returned = worker_->Run(
      [functions = params_.functions, comm = params_.comm, stream = params_.stream,
       device_index = params_.device_index] {
        // Nobody is left to hear of an error; what matters is that it is over.
        static_cast<void>(functions->SetDevice(device_index));
        static_cast<void>(functions->CommAbort(comm));
        static_cast<void>(functions->StreamSynchronize(stream));
      },
      params_.abort_timeout);
  absl::Status broken;
  std::vector<Event> pending;
  {
    const Lock lock(mutex_);
    broken = broken_;
    left_behind_ = !returned;
  }
  if (!returned) {
    const absl::Status stuck = absl::DeadlineExceededError(
        absl::StrCat("ncclCommAbort of rank ", ep_rank(), " did not return within ",
                     absl::FormatDuration(params_.abort_timeout), " after: ", broken.ToString()));
    params_.on_stuck_abort(stuck);
  }
  {
    const Lock lock(mutex_);
    torn_down_ = true;
    // They stay, for what they hold is named to `control`.
    for (const auto& [place, operation] : called_) pending.push_back(operation->done);
    for (const auto& operation : agreeing_) pending.push_back(operation->done);
    for (const auto& operation : issued_) pending.push_back(operation->done);
    changed_.notify_all();
  }
  for (Event& event : pending) event.Signal(broken);
}

void NcclExchange::WaitUntilTornDown() {
  Lock lock(mutex_);
  changed_.wait(lock, [this] { return torn_down_; });
}

bool NcclExchange::EndInPeace() {
  const auto is_over = std::make_shared<std::atomic<bool>>(false);
  const absl::Time deadline = SteadyNow() + kFinalizeTimeout;
  const bool returned = worker_->Run(
      [is_over, deadline, functions = params_.functions, comm = params_.comm,
       device_index = params_.device_index] {
        if (!functions->SetDevice(device_index).ok()) return;
        Result result = functions->CommFinalize(comm);
        while (result == Result::kInProgress && SteadyNow() < deadline) {
          std::this_thread::sleep_for(kPatientPollInterval);
          if (functions->CommGetAsyncError(comm, &result) != Result::kSuccess) return;
        }
        if (result == Result::kSuccess) {
          is_over->store(functions->CommDestroy(comm) == Result::kSuccess);
        }
      },
      kFinalizeTimeout * 2);
  return returned && is_over->load();
}

void NcclExchange::Stop() {
  const absl::Status left = absl::UnavailableError(absl::StrCat("rank ", ep_rank(), " has left"));
  {
    const Lock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  bool in_peace;
  {
    const Lock lock(mutex_);
    in_peace = teardown_.joinable() && broken_.ok() && called_.empty() && agreeing_.empty() &&
               issued_.empty();
  }
  if (in_peace && EndInPeace()) {
    const Lock lock(mutex_);
    broken_ = left;
    torn_down_ = true;
    changed_.notify_all();
  } else {
    Break(left, left);
  }
  if (teardown_.joinable()) {
    teardown_.join();
  } else if (!torn_down_) {
    // Without threads there is none to wait for it from.
    static_cast<void>(functions_.CommAbort(params_.comm));
  }
  control_stream_.reset();
  // To peers that wait, this says that the rank has left.
  params_.control.reset();
  const Lock lock(mutex_);
  if (!left_behind_) functions_.StreamDestroy(params_.stream);
  for (const auto& [place, operation] : called_) KeepDeviceEvents(*operation);
  for (const auto& operation : agreeing_) KeepDeviceEvents(*operation);
  for (const auto& operation : issued_) KeepDeviceEvents(*operation);
  called_.clear();
  agreeing_.clear();
  issued_.clear();
}

}  // namespace expertmesh
