#ifndef EXPERTMESH_SERVER_COMM_COLLECTIVE_CALL_H_
#define EXPERTMESH_SERVER_COMM_COLLECTIVE_CALL_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/base/stream.h"
#include "server/comm/communicator.h"

namespace expertmesh {

// One rank's part of a collective operation, as it was called.
struct CollectiveCall {
  enum class Kind : uint8_t {
    kAllToAllV,
    kAllGatherV,
    kBarrier
  };  // their numbers go over the wire

  Kind kind = Kind::kBarrier;
  int32_t ep_rank = 0;
  int32_t ep_size = 1;
  CollectiveTag tag;
  const std::byte* send = nullptr;
  std::byte* receive = nullptr;
  std::vector<int64_t> send_bytes;     // [ep_size], to each rank; kBarrier: zeros
  std::vector<int64_t> receive_bytes;  // [ep_size], from each rank; kBarrier: zeros
  Event done;                          // signalled when the buffers are no longer needed

  // Where each rank's block begins, [ep_size]. All that kAllGatherV sends is one block.
  std::vector<int64_t> SendOffsets() const;
  std::vector<int64_t> ReceiveOffsets() const;

  std::string ToString() const { return Describe(kind, tag); }

  // Of any value.
  static const char* KindName(Kind kind);
  static std::string Describe(Kind kind, const CollectiveTag& tag);
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_COLLECTIVE_CALL_H_
