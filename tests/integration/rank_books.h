#ifndef EXPERTMESH_TESTS_INTEGRATION_RANK_BOOKS_H_
#define EXPERTMESH_TESTS_INTEGRATION_RANK_BOOKS_H_

#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "expertmesh/v1/expert_service.pb.h"

namespace expertmesh {

// What requests are to cost the ranks of tests/golden/qwen3_moe_bfloat16, counted from their ids
// alone.
struct RankBooks {
  static constexpr int32_t kLayer = 1;
  static constexpr int32_t kNumExperts = 12;
  static constexpr int64_t kHiddenSize = 48;

  explicit RankBooks(int32_t num_ranks)
      : ep_size(num_ranks), bytes(num_ranks, std::vector<int64_t>(num_ranks)), rows(num_ranks) {}

  // Every token's ids are distinct or -1.
  static v1::ForwardRequest RandomRequest(std::mt19937_64& random, int64_t num_tokens,
                                          int32_t topk);
  void Add(const v1::ForwardRequest& request);

  const int32_t ep_size;
  std::vector<std::vector<int64_t>> bytes;  // [source][destination]
  std::vector<int64_t> rows;
  std::map<int32_t, int64_t> tokens;  // by expert

 private:
  // Shards are as equal as possible, the first ones larger.
  int32_t SourceOf(int64_t token, int64_t num_tokens) const;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_INTEGRATION_RANK_BOOKS_H_
