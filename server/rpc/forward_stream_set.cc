#include "server/rpc/forward_stream_set.h"

#include <utility>
#include <vector>

#include "server/rpc/forward_stream_reactor.h"

namespace expertmesh {

void ForwardStreamSet::EndAll() {
  std::vector<std::shared_ptr<ForwardStreamReactor>> streams;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
    for (const auto& [key, weak] : streams_) {
      if (auto stream = weak.lock()) streams.push_back(std::move(stream));
    }
  }
  for (const auto& stream : streams) stream->EndWhenAnswered();
}

void ForwardStreamSet::Add(const std::shared_ptr<ForwardStreamReactor>& stream) {
  bool ending;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    streams_.emplace(stream.get(), stream);
    ending = ending_;
  }
  if (ending) stream->EndWhenAnswered();
}

void ForwardStreamSet::Remove(ForwardStreamReactor* stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  streams_.erase(stream);
}

}  // namespace expertmesh
