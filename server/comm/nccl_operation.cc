#include "server/comm/nccl_operation.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace expertmesh {

void NcclOperation::WriteHeader() {
  header.assign(HeaderSize(), 0);
  header[0] = static_cast<int64_t>(kind);
  std::copy(send_bytes.begin(), send_bytes.end(), header.begin() + 1);
  std::copy(receive_bytes.begin(), receive_bytes.end(), header.begin() + 1 + ep_size);
  headers.assign(HeaderSize() * ep_size, 0);
  header_bytes.assign(ep_size, HeaderSize() * static_cast<int64_t>(sizeof(header.front())));
}

absl::Status NcclOperation::CheckHeaders() const {
  const auto record = [&](int64_t rank) { return headers.data() + rank * HeaderSize(); };
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

int64_t NcclOperation::EqualBytes() const {
  const int64_t count = headers[1];
  for (int64_t rank = 0; rank < ep_size; ++rank) {
    const int64_t* const sent = headers.data() + rank * HeaderSize() + 1;
    if (std::any_of(sent, sent + ep_size, [count](int64_t bytes) { return bytes != count; })) {
      return -1;
    }
  }
  return count;
}

}  // namespace expertmesh
