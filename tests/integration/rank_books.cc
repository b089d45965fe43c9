#include "tests/integration/rank_books.h"

#include <algorithm>

namespace expertmesh {

v1::ForwardRequest RankBooks::RandomRequest(std::mt19937_64& random, int64_t num_tokens,
                                            int32_t topk) {
  v1::ForwardRequest request;
  request.set_layer(kLayer);
  v1::Tensor* hidden = request.mutable_hidden_states();
  hidden->set_dtype(v1::DATA_TYPE_BFLOAT16);
  hidden->add_shape(num_tokens);
  hidden->add_shape(kHiddenSize);
  hidden->mutable_data()->resize(2 * num_tokens * kHiddenSize, 1);
  request.mutable_topk()->set_topk(topk);
  std::vector<int32_t> ids(kNumExperts);
  for (int32_t i = 0; i < kNumExperts; ++i) ids[i] = i;
  for (int64_t token = 0; token < num_tokens; ++token) {
    std::shuffle(ids.begin(), ids.end(), random);
    for (int32_t k = 0; k < topk; ++k) {
      request.mutable_topk()->add_ids(random() % 4 == 0 ? -1 : ids[k]);
      request.mutable_topk()->add_weights(0.5f);
    }
  }
  request.mutable_options()->set_combine_dtype(v1::DATA_TYPE_FLOAT32);
  return request;
}

void RankBooks::Add(const v1::ForwardRequest& request) {
  const int64_t num_tokens = request.hidden_states().shape(0);
  const int32_t topk = request.topk().topk();
  const v1::DispatchMode mode = request.options().dispatch();
  for (int64_t token = 0; token < num_tokens; ++token) {
    std::map<int32_t, int32_t> experts_by_owner;
    for (int32_t k = 0; k < topk; ++k) {
      const int32_t id = request.topk().ids(static_cast<int>(token * topk + k));
      if (id < 0) continue;
      ++tokens[id];
      ++experts_by_owner[id * ep_size / kNumExperts];
    }
    for (const auto& [owner, num_experts] : experts_by_owner) rows[owner] += num_experts;
    if (mode == v1::DISPATCH_MODE_DIRECT || experts_by_owner.empty()) continue;
    const int32_t source = SourceOf(token, num_tokens);
    for (int32_t rank = 0; rank < ep_size; ++rank) {
      if (rank == source) continue;
      const auto owned = experts_by_owner.find(rank);
      const bool is_owner = owned != experts_by_owner.end();
      if (is_owner || mode == v1::DISPATCH_MODE_ALLGATHER_REDUCESCATTER) {
        bytes[source][rank] += kHiddenSize * 2;
      }
      if (!is_owner) continue;
      const bool is_summed = request.options().combine() != v1::COMBINE_PER_EXPERT;
      bytes[rank][source] += kHiddenSize * 4 * (is_summed ? 1 : owned->second);
    }
  }
}

int32_t RankBooks::SourceOf(int64_t token, int64_t num_tokens) const {
  int64_t end = 0;
  for (int32_t rank = 0; rank < ep_size; ++rank) {
    end += num_tokens / ep_size + (rank < num_tokens % ep_size ? 1 : 0);
    if (token < end) return rank;
  }
  return -1;
}

}  // namespace expertmesh
