#include "tests/server/comm/fake_nccl_device.h"

#include <deque>
#include <thread>
#include <utility>

namespace expertmesh {

struct FakeNcclDevice::FakeStream {
  std::deque<std::function<void()>> work;
  bool running = false;
  bool stopping = false;
  std::thread thread;
};

struct FakeNcclDevice::FakeEvent {
  int64_t num_recorded = 0;
  int64_t num_reached = 0;
};

FakeNcclDevice::~FakeNcclDevice() {
  DestroyStreams();
  for (FakeEvent* event : events_) delete event;
}

FakeNcclDevice::DeviceStream FakeNcclDevice::CreateStream() {
  auto* const made = new FakeStream;
  made->thread = std::thread([this, made] { RunStream(*made); });
  const Lock lock(mutex_);
  streams_.insert(made);
  return made;
}

void FakeNcclDevice::RunStream(FakeStream& stream) {
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&stream] { return stream.stopping || !stream.work.empty(); });
    if (stream.work.empty()) return;
    const std::function<void()> work = std::move(stream.work.front());
    stream.work.pop_front();
    stream.running = true;
    lock.unlock();
    work();
    lock.lock();
    stream.running = false;
    changed_.notify_all();
  }
}

void FakeNcclDevice::DestroyStream(DeviceStream stream) {
  auto* const found = static_cast<FakeStream*>(stream);
  {
    const Lock lock(mutex_);
    found->stopping = true;
    changed_.notify_all();
  }
  found->thread.join();
  const Lock lock(mutex_);
  streams_.erase(found);
  delete found;
}

void FakeNcclDevice::DestroyStreams() {
  for (FakeStream* stream : std::set<FakeStream*>(streams_)) DestroyStream(stream);
}

void FakeNcclDevice::Push(DeviceStream stream, std::function<void()> work) {
  const Lock lock(mutex_);
  static_cast<FakeStream*>(stream)->work.push_back(std::move(work));
  changed_.notify_all();
}

void FakeNcclDevice::Synchronize(DeviceStream stream) {
  const auto* const found = static_cast<FakeStream*>(stream);
  Lock lock(mutex_);
  changed_.wait(lock, [found] { return found->work.empty() && !found->running; });
}

int64_t FakeNcclDevice::num_live_streams() const {
  const Lock lock(mutex_);
  return static_cast<int64_t>(streams_.size());
}

FakeNcclDevice::DeviceEvent FakeNcclDevice::CreateEvent() {
  auto* const made = new FakeEvent;
  const Lock lock(mutex_);
  events_.insert(made);
  return made;
}

void FakeNcclDevice::DestroyEvent(DeviceEvent event) {
  auto* const found = static_cast<FakeEvent*>(event);
  const Lock lock(mutex_);
  events_.erase(found);
  delete found;
}

void FakeNcclDevice::Record(DeviceEvent event, DeviceStream stream) {
  auto* const found = static_cast<FakeEvent*>(event);
  int64_t number;
  {
    const Lock lock(mutex_);
    number = ++found->num_recorded;
  }
  Push(stream, [this, found, number] { Reach(*found, number); });
}

void FakeNcclDevice::WaitFor(DeviceStream stream, DeviceEvent event) {
  const auto* const found = static_cast<FakeEvent*>(event);
  int64_t number;
  {
    const Lock lock(mutex_);
    number = found->num_recorded;
  }
  Push(stream, [this, found, number] {
    Lock lock(mutex_);
    changed_.wait(lock, [found, number] { return found->num_reached >= number; });
  });
}

bool FakeNcclDevice::IsReached(DeviceEvent event) const {
  const auto* const found = static_cast<const FakeEvent*>(event);
  const Lock lock(mutex_);
  return found->num_reached == found->num_recorded;
}

int64_t FakeNcclDevice::num_live_events() const {
  const Lock lock(mutex_);
  return static_cast<int64_t>(events_.size());
}

absl::Status FakeNcclDevice::RecordOnHost(Stream& stream, DeviceEvent event, const Event& recorded,
                                          std::shared_ptr<const void> event_owner) {
  return stream.Enqueue([this, found = static_cast<FakeEvent*>(event), recorded = recorded,
                         owner = std::move(event_owner)]() mutable {
    int64_t number;
    {
      const Lock lock(mutex_);
      ++num_records_on_host_;
      number = ++found->num_recorded;
    }
    recorded.Signal();
    Reach(*found, number);
    return absl::OkStatus();
  });
}

int64_t FakeNcclDevice::num_records_on_host() const {
  const Lock lock(mutex_);
  return num_records_on_host_;
}

void FakeNcclDevice::Reach(FakeEvent& event, int64_t number) {
  const Lock lock(mutex_);
  event.num_reached = number;
  changed_.notify_all();
}

}  // namespace expertmesh
