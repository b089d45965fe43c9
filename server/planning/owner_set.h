#ifndef EXPERTMESH_SERVER_PLANNING_OWNER_SET_H_
#define EXPERTMESH_SERVER_PLANNING_OWNER_SET_H_

#include <cstdint>
#include <vector>

namespace expertmesh {

// The distinct owners of one token, visited in ascending order.
class OwnerSet {
 public:
  explicit OwnerSet(int32_t ep_size) : words_((ep_size + 63) / 64) {}

  void Insert(int32_t rank) { words_[rank >> 6] |= uint64_t{1} << (rank & 63); }

  template <typename Visit>
  void VisitAscendingAndClear(Visit visit) {
    for (size_t i = 0; i < words_.size(); ++i) {
      uint64_t word = words_[i];
      words_[i] = 0;
      for (; word != 0; word &= word - 1) {
        visit(static_cast<int32_t>(i * 64) + __builtin_ctzll(word));
      }
    }
  }

 private:
  std::vector<uint64_t> words_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_PLANNING_OWNER_SET_H_
