#ifndef EXPERTMESH_TESTS_INTEGRATION_BAD_REQUESTS_H_
#define EXPERTMESH_TESTS_INTEGRATION_BAD_REQUESTS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "expertmesh/v1/expert_service.pb.h"

namespace expertmesh {

// The model that the requests are meant for: bfloat16, no shared experts, no adapters.
struct RequestTarget {
  std::string model;
  int32_t layer = 0;        // an MoE layer
  int32_t dense_layer = 0;  // one that is none
  int64_t hidden_size = 0;
  int32_t num_experts = 0;
};

// Given top-k, bfloat16 bytes.
v1::ForwardRequest GoodRequest(const RequestTarget& target, int64_t num_tokens, int32_t topk);

struct BadRequest {
  std::string name;
  std::function<void(v1::ForwardRequest*)> spoil;  // a GoodRequest of 4 tokens, top-2
  absl::StatusCode code;
  std::string reason;
  std::string field;
  std::string value;
  std::string limit;
};

// A case per rule on bad input.
std::vector<BadRequest> BadRequests(const RequestTarget& target);

// Good ones that look bad: what must not be read, and what may be left out.
struct OddRequest {
  std::string name;
  std::function<void(v1::ForwardRequest*)> change;
};
std::vector<OddRequest> OddButGoodRequests(const RequestTarget& target);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_INTEGRATION_BAD_REQUESTS_H_
