#include "server/comm/nccl_exchange.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "server/ops/start_thread.h"

namespace expertmesh {
namespace {

using Clock = std::chrono::steady_clock;

// How often the device and NCCL are asked: a small operation takes some ten microseconds, one that
// waits for its peers may take long.
constexpr std::chrono::microseconds kPollInterval(10);
constexpr std::chrono::microseconds kPatientPollInterval(200);
constexpr std::chrono::milliseconds kPatientAfter(5);

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
      traffic_(params_.ep_size),
      events_(NewNcclEventPool(params_.functions, params_.device_index)),
      control_stream_(NewThreadedHostStream()),
      teardown_(TeardownParams()) {}

NcclExchange::~NcclExchange() = default;

NcclTeardown::Params NcclExchange::TeardownParams() {
  NcclTeardown::Params params;
  params.ep_rank = params_.ep_rank;
  params.device_index = params_.device_index;
  params.functions = params_.functions;
  params.comm = params_.comm;
  params.stream = params_.stream;
  params.control = params_.control.get();
  params.operation_timeout = params_.operation_timeout;
  params.abort_timeout = params_.abort_timeout;
  params.on_stuck_abort = params_.on_stuck_abort;
  params.on_broken = [this] { Wake(); };
  params.on_torn_down = [this](const absl::Status& broken) { FailPending(broken); };
  return params;
}

absl::Status NcclExchange::Begin() {
  if (absl::Status status = teardown_.Begin(); !status.ok()) return status;
  absl::StatusOr<std::thread> thread = StartThread([this] { Run(); });
  if (!thread.ok()) return thread.status();
  thread_ = *std::move(thread);
  return absl::OkStatus();
}

void NcclExchange::Wake() {
  const Lock lock(mutex_);
  changed_.notify_all();
}

void NcclExchange::WakeWhenDone(const Event& event) {
  event.OnDone([weak = weak_from_this()] {
    if (const std::shared_ptr<NcclExchange> exchange = weak.lock()) exchange->Wake();
  });
}

absl::Status NcclExchange::Start(OperationPlace place, std::shared_ptr<NcclOperation> operation,
                                 Stream& stream) {
  WakeWhenDone(operation->ready);
  // A barrier is agreed on when the stream has reached it, which the host must know.
  if (operation->kind != NcclOperation::Kind::kBarrier && functions_.IsDeviceStream(stream)) {
    absl::StatusOr<NcclEventPool::Shared> event = events_->Take();
    if (!event.ok()) return event.status();
    operation->reached = *std::move(event);
  }
  {
    const Lock lock(mutex_);
    if (absl::Status broken = teardown_.broken(); !broken.ok()) return broken;
    if (absl::Status added = called_.Add(place, operation, ep_rank()); !added.ok()) {
      teardown_.Break(added, added);
      return teardown_.broken();
    }
    changed_.notify_all();
  }
  absl::Status status = operation->reached == nullptr
                            ? stream.Record(operation->ready)
                            : functions_.RecordOnCaller(stream, operation->reached.get(),
                                                        operation->ready, operation->reached);
  if (!status.ok()) operation->ready.Signal(status);
  status.Update(stream.WaitFor(operation->done));
  return status;
}

void NcclExchange::CloseOrder(int64_t order, int64_t num_operations) {
  const Lock lock(mutex_);
  called_.Close(order, num_operations);
  changed_.notify_all();
}

void NcclExchange::Run() {
  // Else the kernel adds 50 microseconds to every short wait.
  prctl(PR_SET_TIMERSLACK, 1000UL);
  const absl::Status device =
      teardown_.Call([this] { return functions_.SetDevice(params_.device_index); });
  if (!device.ok()) teardown_.Break(device, device);
  Lock lock(mutex_);
  Clock::time_point moved_at = Clock::now();
  while (!stopping_ && IsWhole()) {
    const bool sent = SendHeaders(lock);
    const bool issued = IssueFirst(lock);
    const bool finished = FinishFirst(lock);
    if (sent || issued || finished) {
      moved_at = Clock::now();
      continue;
    }
    if (stopping_ || !IsWhole()) break;
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

// Whether its headers can go: a barrier's when the caller's stream has reached it.
bool NcclExchange::IsReadyToAgree(const NcclOperation* called) {
  return called != nullptr &&
         (called->kind != NcclOperation::Kind::kBarrier || called->ready.done());
}

bool NcclExchange::CanMove() const {
  if (IsReadyToAgree(called_.Next())) return true;
  return !agreeing_.empty() && agreeing_.front()->agreed.done() &&
         (!agreeing_.front()->checked || agreeing_.front()->ready.done());
}

bool NcclExchange::SendHeaders(Lock& lock) {
  if (!IsReadyToAgree(called_.Next())) return false;
  const std::shared_ptr<NcclOperation> operation = called_.TakeNext();
  agreeing_.push_back(operation);
  lock.unlock();
  operation->WriteHeader();
  AllGatherVParams params;
  params.tag = operation->tag;
  params.tag.order = CollectiveTag::kAsCalled;
  params.send = reinterpret_cast<const std::byte*>(operation->header.data());
  params.receive = reinterpret_cast<std::byte*>(operation->headers.data());
  params.receive_bytes = operation->header_bytes;
  absl::Status status = params_.control->AllGatherV(params, *control_stream_);
  status.Update(control_stream_->Record(operation->agreed));
  WakeWhenDone(operation->agreed);
  if (!status.ok()) teardown_.Break(status, absl::OkStatus());
  lock.lock();
  return true;
}

bool NcclExchange::IssueFirst(Lock& lock) {
  if (agreeing_.empty()) return false;
  const std::shared_ptr<NcclOperation> operation = agreeing_.front();
  if (!operation->agreed.done()) return false;
  if (!operation->checked) {
    // Either way all ranks find the same.
    absl::Status status = operation->agreed.status();
    if (status.ok()) status = operation->CheckHeaders();
    operation->checked = true;
    if (!status.ok()) {
      teardown_.Break(status, absl::OkStatus());
      return true;
    }
  }
  if (!operation->ready.done()) return false;
  if (const absl::Status status = operation->ready.status(); !status.ok()) {
    teardown_.Break(status, status);
    return true;
  }
  agreeing_.pop_front();
  const bool is_first = issued_.empty();
  issued_.push_back(operation);
  lock.unlock();
  teardown_.WatchGiving(operation);
  const absl::Status status = Issue(*operation);
  teardown_.WatchGiving(nullptr);
  if (is_first) teardown_.Watch(operation);
  if (!status.ok()) teardown_.Break(status, status);
  lock.lock();
  return true;
}

absl::Status NcclExchange::StatusOfCall(Result result, const char* call) {
  if (absl::Status broken = teardown_.broken(); !broken.ok()) return broken;
  return NcclStatus(functions_, result, params_.comm, call);
}

absl::Status NcclExchange::AskNccl(Result* result) {
  const absl::Status status = teardown_.Call([&] {
    absl::Status asked =
        StatusOfCall(functions_.CommGetAsyncError(params_.comm, result), "ncclCommGetAsyncError");
    asked.Update(StatusOfCall(*result, "NCCL"));
    return asked;
  });
  if (status.ok()) return status;
  // A rank that aborts says by `control` why; all that NCCL knows is that it is gone.
  if (absl::Status told = params_.control->status(); !told.ok()) return told;
  return status;
}

absl::Status NcclExchange::Issue(NcclOperation& operation) {
  const auto any = [](const std::vector<int64_t>& counts) {
    return std::any_of(counts.begin(), counts.end(), [](int64_t count) { return count > 0; });
  };
  NcclEventPool::Shared passed = operation.reached;
  if (any(operation.send_bytes) || any(operation.receive_bytes)) {
    if (absl::Status status = GiveToNccl(operation); !status.ok()) return status;
    passed = operation.completed;
  }
  // The caller's stream goes on, on the device; `done` follows when the host has seen it all end.
  // Where nothing moves it may come before the device has passed the point: that is one of the
  // caller's stream itself, which waits for nothing there, and no buffer is touched.
  if (operation.reached != nullptr) {
    operation.done.Place(functions_.MakePoint(params_.device_index, passed));
  }
  return absl::OkStatus();
}

absl::Status NcclExchange::GiveToNccl(NcclOperation& operation) {
  absl::Status status = teardown_.Call([&] {
    absl::StatusOr<NcclEventPool::Shared> completed = events_->Take();
    if (!completed.ok()) return completed.status();
    operation.completed = *std::move(completed);
    if (operation.reached == nullptr) return absl::OkStatus();
    return functions_.StreamWaitEvent(params_.stream, operation.reached.get());
  });
  if (!status.ok()) return status;
  Result result = Result::kSuccess;
  status = teardown_.Call([&] {
    result = CallNccl(operation);
    return StatusOfCall(result, operation.ToString().c_str());
  });
  // Only then is it on the stream.
  const Clock::time_point called_at = Clock::now();
  while (status.ok() && result == Result::kInProgress) {
    status = AskNccl(&result);
    if (!status.ok() || result != Result::kInProgress) break;
    Lock lock(mutex_);
    if (!IsWhole()) continue;
    const bool patient = Clock::now() - called_at > kPatientAfter;
    changed_.wait_for(lock, patient ? kPatientPollInterval : kPollInterval);
  }
  if (!status.ok()) return status;
  return teardown_.Call(
      [&] { return functions_.EventRecord(operation.completed.get(), params_.stream); });
}

NcclFunctions::Result NcclExchange::CallNccl(const NcclOperation& operation) {
  const int64_t equal_bytes = operation.EqualBytes();
  if (equal_bytes > 0 && operation.kind == NcclOperation::Kind::kAllGatherV) {
    return functions_.AllGather(operation.send, operation.receive, equal_bytes, params_.comm,
                                params_.stream);
  }
  if (equal_bytes > 0 && operation.kind == NcclOperation::Kind::kAllToAllV &&
      functions_.has_all_to_all()) {
    return functions_.AllToAll(operation.send, operation.receive, equal_bytes, params_.comm,
                               params_.stream);
  }
  const std::vector<int64_t> send_offsets = operation.SendOffsets();
  const std::vector<int64_t> receive_offsets = operation.ReceiveOffsets();
  Result result = functions_.GroupStart();
  if (result != Result::kSuccess) return result;
  const auto add = [&result](Result added) {
    if (result == Result::kSuccess && added != Result::kInProgress) result = added;
  };
  // Each rank begins with itself, so that not all send to rank 0 first. A call that hung may come
  // back after the abort, which has freed the communicator.
  for (int32_t i = 0; i < ep_size() && result == Result::kSuccess && IsWhole(); ++i) {
    const int32_t to = (ep_rank() + i) % ep_size();
    const int32_t from = (ep_rank() + ep_size() - i) % ep_size();
    if (operation.send_bytes[to] > 0) {
      add(functions_.Send(operation.send + send_offsets[to], operation.send_bytes[to], to,
                          params_.comm, params_.stream));
    }
    if (operation.receive_bytes[from] > 0 && IsWhole()) {
      add(functions_.Recv(operation.receive + receive_offsets[from], operation.receive_bytes[from],
                          from, params_.comm, params_.stream));
    }
  }
  // The thread stays in the group, and makes no call of NCCL any more.
  if (!IsWhole()) return result;
  // Also after an error: the thread would stay in the group.
  const Result ended = functions_.GroupEnd();
  return result == Result::kSuccess ? ended : result;
}

// NCCL is asked after the device: what ended an operation before its time has been told of by then.
absl::Status NcclExchange::HasCompleted(const NcclOperation& operation, bool* completed) {
  const absl::Status status = teardown_.Call([&] {
    const absl::StatusOr<bool> reached = functions_.EventQuery(operation.completed.get());
    *completed = reached.value_or(false);
    return reached.status();
  });
  if (!status.ok()) return status;
  Result result = Result::kSuccess;
  return AskNccl(&result);
}

bool NcclExchange::FinishFirst(Lock& lock) {
  if (issued_.empty()) return false;
  const std::shared_ptr<NcclOperation> operation = issued_.front();
  lock.unlock();
  bool is_done = operation->completed == nullptr;
  absl::Status status = params_.control->status();
  if (status.ok() && !is_done) {
    status = HasCompleted(*operation, &is_done);
  }
  if (!status.ok()) teardown_.Break(status, status);
  lock.lock();
  if (!IsWhole()) return true;
  if (!is_done) return false;
  issued_.pop_front();
  teardown_.Watch(issued_.empty() ? nullptr : issued_.front());
  lock.unlock();
  operation->done.Signal();
  lock.lock();
  return true;
}

void NcclExchange::FailPending(const absl::Status& broken) {
  std::vector<Event> pending;
  {
    const Lock lock(mutex_);
    // They stay, for what they hold is named to `control`.
    pending = called_.DoneEvents();
    for (const auto& operation : agreeing_) pending.push_back(operation->done);
    for (const auto& operation : issued_) pending.push_back(operation->done);
  }
  for (Event& event : pending) event.Signal(broken);
}

void NcclExchange::Stop() {
  {
    const Lock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  const bool is_idle = called_.empty() && agreeing_.empty() && issued_.empty();
  if (!teardown_.Stop(/*in_peace=*/is_idle)) events_->Abandon();
  control_stream_.reset();
  // To peers that wait, this says that the rank has left.
  params_.control.reset();
  called_.clear();
  agreeing_.clear();
  issued_.clear();
}

}  // namespace expertmesh
