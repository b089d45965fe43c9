#include "server/comm/collective_call.h"

#include "absl/strings/str_cat.h"

namespace expertmesh {
namespace {

std::vector<int64_t> SumsBefore(const std::vector<int64_t>& counts) {
  std::vector<int64_t> sums(counts.size());
  for (size_t i = 1; i < counts.size(); ++i) sums[i] = sums[i - 1] + counts[i - 1];
  return sums;
}

}  // namespace

std::vector<int64_t> CollectiveCall::SendOffsets() const {
  return kind == Kind::kAllToAllV ? SumsBefore(send_bytes) : std::vector<int64_t>(ep_size);
}

std::vector<int64_t> CollectiveCall::ReceiveOffsets() const { return SumsBefore(receive_bytes); }

const char* CollectiveCall::KindName(Kind kind) {
  switch (kind) {
    case Kind::kAllToAllV:
      return "AllToAllV";
    case Kind::kAllGatherV:
      return "AllGatherV";
    case Kind::kBarrier:
      return "Barrier";
  }
  return "an unknown operation";
}

std::string CollectiveCall::Describe(Kind kind, const CollectiveTag& tag) {
  return absl::StrCat(KindName(kind), " of incarnation ", tag.incarnation, " epoch ", tag.epoch,
                      " step ", tag.step, " operation ", tag.operation);
}

}  // namespace expertmesh
