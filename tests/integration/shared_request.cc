#include "tests/integration/shared_request.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <utility>

#include "absl/time/clock.h"

namespace expertmesh {
namespace {

constexpr uint16_t kOneInBFloat16 = 0x3f80;

}  // namespace

SharedRequest::SharedRequest(const RequestTarget& target, int64_t num_tokens, int32_t topk)
    : target_(target),
      num_tokens_(num_tokens),
      topk_(topk),
      weights_(static_cast<size_t>(num_tokens * topk), 0.5f),
      hidden_(std::make_shared<std::vector<uint16_t>>(
          static_cast<size_t>(num_tokens * target.hidden_size), kOneInBFloat16)) {
  ids_.reserve(weights_.size());
  for (size_t i = 0; i < weights_.size(); ++i) {
    ids_.push_back(static_cast<int32_t>(i) % target.num_experts);
  }
}

ForwardInput SharedRequest::Input() const {
  ForwardInput input;
  input.model = target_.model;
  input.layer = target_.layer;
  input.num_tokens = num_tokens_;
  input.hidden_size = target_.hidden_size;
  input.hidden_states = {hidden_->data(), hidden_bytes(), v1::DATA_TYPE_BFLOAT16, hidden_};
  input.routing = TopKRouting{topk_, ids_, weights_};
  return input;
}

std::unique_ptr<ExpertClient> SeparateClient(const std::string& target, int number) {
  ExpertClientOptions options;
  options.target = target;
  options.retry.max_attempts = 1;
  options.max_message_bytes += number;
  absl::StatusOr<std::unique_ptr<ExpertClient>> client = ExpertClient::Create(options);
  EXPECT_TRUE(client.ok()) << client.status();
  return *std::move(client);
}

struct CallGroup::State {
  std::mutex mutex;
  std::condition_variable changed;
  int num_running = 0;
  int num_answered = 0;
  std::vector<Ended> ended;
};

CallGroup::CallGroup() : state_(std::make_shared<State>()) {}

CallGroup::~CallGroup() { Wait(); }

void CallGroup::Start(ExpertClient* client, const ForwardInput& input, absl::Duration timeout) {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    ++state_->num_running;
  }
  client->ForwardAsync(input, {.timeout = timeout},
                       [state = state_, start = absl::Now()](absl::StatusOr<ForwardOutput> answer) {
                         {
                           const std::lock_guard<std::mutex> lock(state->mutex);
                           state->ended.push_back({answer.status(), absl::Now() - start});
                           if (answer.ok()) ++state->num_answered;
                           --state->num_running;
                         }
                         state->changed.notify_all();
                       });
}

int CallGroup::num_ended() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return static_cast<int>(state_->ended.size());
}

int CallGroup::num_answered() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->num_answered;
}

std::vector<CallGroup::Ended> CallGroup::Wait() {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->changed.wait(lock, [this] { return state_->num_running == 0; });
  return state_->ended;
}

}  // namespace expertmesh
