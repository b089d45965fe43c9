#ifndef EXPERTMESH_SERVER_COMM_PAYLOAD_CHECKSUM_H_
#define EXPERTMESH_SERVER_COMM_PAYLOAD_CHECKSUM_H_

#include <cstddef>
#include <cstdint>

namespace expertmesh {

// 64-bit checksum of bytes that come in pieces, about as fast as memory brings them. Every change
// that is confined to one aligned 8-byte word is found, and nearly every other. Against accidents,
// not attackers. The bytes are read in this machine's order: both ends must agree on it.
class PayloadChecksum {
 public:
  static constexpr int64_t kBlockBytes = 64;

  // A piece that is not a multiple of kBlockBytes is filled up with zeros: both ends must cut the
  // bytes at the same places, but for cuts between whole blocks.
  void Update(const std::byte* data, int64_t size_bytes);
  uint64_t Finish() const;

 private:
  static constexpr int kNumLanes = 8;
  uint64_t lanes_[kNumLanes] = {1, 2, 3, 4, 5, 6, 7, 8};
  uint64_t size_bytes_ = 0;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_PAYLOAD_CHECKSUM_H_
