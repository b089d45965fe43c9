#include "server/comm/nccl_operation.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace expertmesh {
namespace {

const char* KindName(NcclOperation::Kind kind) {
  switch (kind) {
    case NcclOperation::Kind::kAllToAllV:
      return "AllToAllV";
    case NcclOperation::Kind::kAllGatherV:
      return "AllGatherV";
    case NcclOperation::Kind::kBarrier:
      return "Barrier";
  }
  return "an unknown operation";
}

}  // namespace

void NcclOperation::WriteHeader(int64_t ep_size) {
  header.assign(HeaderSize(ep_size), 0);
  header[0] = static_cast<int64_t>(kind);
  std::copy(send_bytes.begin(), send_bytes.end(), header.begin() + 1);
  std::copy(receive_bytes.begin(), receive_bytes.end(), header.begin() + 1 + ep_size);
  headers.assign(HeaderSize(ep_size) * ep_size, 0);
  header_bytes.assign(ep_size, HeaderSize(ep_size) * static_cast<int64_t>(sizeof(header.front())));
}

absl::Status NcclOperation::CheckHeaders(int64_t ep_size) const {
  const auto record = [&](int64_t rank) { return headers.data() + rank * HeaderSize(ep_size); };
  for (int64_t rank = 0; rank < ep_size; ++rank) {
    if (record(rank)[0] != record(0)[0]) {
      return absl::DataLossError(
          absl::StrCat("rank 0 is at ", KindName(static_cast<Kind>(record(0)[0])), ", rank ", rank,
                       " at ", KindName(static_cast<Kind>(record(rank)[0])), ", in ", ToString()));
    }
  }
  for (int64_t from = 0; from < ep_size; ++from) {
    for (int64_t to = 0; to < ep_size; ++to) {
      const int64_t sent = record(from)[1 + to];
      const int64_t expected = record(to)[1 + ep_size + from];
      if (sent == expected) continue;
      return absl::DataLossError(absl::StrCat("rank ", from, " sends ", sent, " bytes to rank ", to,
                                              ", which expects ", expected, ", in ", ToString()));
    }
  }
  return absl::OkStatus();
}

int64_t NcclOperation::EqualBytes(int64_t ep_size) const {
  const int64_t count = headers[1];
  for (int64_t rank = 0; rank < ep_size; ++rank) {
    const int64_t* const sent = headers.data() + rank * HeaderSize(ep_size) + 1;
    if (std::any_of(sent, sent + ep_size, [count](int64_t bytes) { return bytes != count; })) {
      return -1;
    }
  }
  return count;
}

std::string NcclOperation::ToString() const {
  return absl::StrCat(KindName(kind), " of incarnation ", tag.incarnation, " epoch ", tag.epoch,
                      " step ", tag.step, " operation ", tag.operation);
}

}  // namespace expertmesh
