#ifndef EXPERTMESH_TESTS_INTEGRATION_SHARED_REQUEST_H_
#define EXPERTMESH_TESTS_INTEGRATION_SHARED_REQUEST_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/expert_client.h"
#include "tests/integration/bad_requests.h"

namespace expertmesh {

// One request of any size that many calls send at a time without a copy: its hidden states are
// bfloat16 ones. Immutable.
class SharedRequest {
 public:
  SharedRequest(const RequestTarget& target, int64_t num_tokens, int32_t topk);

  // Valid while this object lives; the hidden states for as long as gRPC needs them.
  ForwardInput Input() const;
  int64_t hidden_bytes() const { return num_tokens_ * target_.hidden_size * 2; }

 private:
  const RequestTarget target_;
  const int64_t num_tokens_;
  const int32_t topk_;
  std::vector<int32_t> ids_;
  std::vector<float> weights_;
  std::shared_ptr<const std::vector<uint16_t>> hidden_;
};

// A client with a connection of its own, which asks once: what the server says is what the test
// gets. `number` tells it from its sisters: gRPC shares connections among channels that are alike.
std::unique_ptr<ExpertClient> SeparateClient(const std::string& target, int number = 0);

// Calls in flight and what became of them. Thread safe; the destructor waits for them.
class CallGroup {
 public:
  struct Ended {
    absl::Status status;
    absl::Duration latency;
  };
  CallGroup();
  ~CallGroup();
  // The client outlives the call.
  void Start(ExpertClient* client, const ForwardInput& input, absl::Duration timeout);
  int num_ended() const;
  int num_answered() const;  // of those that ended, with OK
  // All of them, once all have ended: their own deadlines bound that.
  std::vector<Ended> Wait();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_INTEGRATION_SHARED_REQUEST_H_
