#include "server/comm/tcp_operation.h"

#include <string.h>

#include "absl/strings/str_cat.h"

namespace expertmesh {
namespace {

CollectiveTag TagOf(const TcpMessageHeader& header) {
  CollectiveTag tag;
  tag.incarnation = header.incarnation;
  tag.epoch = header.epoch;
  tag.step = header.step;
  tag.operation = header.operation;
  return tag;
}

uint64_t Scramble(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

uint64_t CountHash(int32_t from_rank, int32_t to_rank, int64_t size_bytes) {
  const uint64_t ranks =
      (uint64_t{static_cast<uint32_t>(from_rank)} << 32) | static_cast<uint32_t>(to_rank);
  return Scramble(Scramble(ranks + 1) + static_cast<uint64_t>(size_bytes));
}

}  // namespace

absl::Status TcpOperation::CopyOwnBlock() const {
  const int64_t size_bytes = receive_bytes[ep_rank];
  if (send_bytes[ep_rank] != size_bytes) {
    return absl::DataLossError(absl::StrCat("rank ", ep_rank, " sends ", send_bytes[ep_rank],
                                            " bytes to itself but expects ", size_bytes, ", in ",
                                            ToString()));
  }
  if (size_bytes == 0) return absl::OkStatus();
  const std::byte* from = send + SendOffsets()[ep_rank];
  std::byte* to = receive + ReceiveOffsets()[ep_rank];
  if (from != to) memcpy(to, from, static_cast<size_t>(size_bytes));
  return absl::OkStatus();
}

TcpMessageHeader TcpOperation::Header(int32_t rank) const {
  TcpMessageHeader header;
  header.operation = tag.operation;
  header.incarnation = tag.incarnation;
  header.epoch = tag.epoch;
  header.step = tag.step;
  header.kind = static_cast<uint64_t>(kind);
  header.payload_bytes = static_cast<uint64_t>(send_bytes[rank]);
  return header;
}

uint64_t TcpOperation::Imbalance() const {
  uint64_t sum = 0;
  for (int32_t rank = 0; rank < ep_size; ++rank) {
    if (rank == ep_rank) continue;
    sum += CountHash(ep_rank, rank, send_bytes[rank]);
    sum -= CountHash(rank, ep_rank, receive_bytes[rank]);
  }
  return sum;
}

absl::Status TcpOperation::CheckHeader(const TcpMessageHeader& header, int32_t rank) const {
  if (header.magic != TcpMessageHeader::kMagic) {
    return absl::DataLossError(
        absl::StrCat("rank ", rank, " sent to rank ", ep_rank, " what is no message"));
  }
  if (header.kind != static_cast<uint64_t>(kind) || TagOf(header) != tag) {
    return absl::DataLossError(
        absl::StrCat("rank ", ep_rank, " is at ", ToString(), ", rank ", rank, " at ",
                     Describe(static_cast<Kind>(header.kind), TagOf(header))));
  }
  if (header.payload_bytes != static_cast<uint64_t>(receive_bytes[rank])) {
    return absl::DataLossError(absl::StrCat("rank ", rank, " sends ", header.payload_bytes,
                                            " bytes to rank ", ep_rank, ", which expects ",
                                            receive_bytes[rank], ", in ", ToString()));
  }
  return absl::OkStatus();
}

}  // namespace expertmesh
