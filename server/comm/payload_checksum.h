#ifndef EXPERTMESH_SERVER_COMM_PAYLOAD_CHECKSUM_H_
#define EXPERTMESH_SERVER_COMM_PAYLOAD_CHECKSUM_H_

#include <cstddef>
#include <cstdint>
#include <memory>

struct XXH3_state_s;

namespace expertmesh {

// XXH3 (64 bits, seed 0; xxhash_spec.md of libxxhash) of bytes that come in pieces, wherever they
// are cut. Some times faster than memory brings them, on machines with AVX2 or AVX-512: each rank
// sums all that it sends and receives. Against accidents, not attackers. Not thread safe.
class PayloadChecksum {
 public:
  PayloadChecksum();

  // Begins anew; needs no memory.
  void Reset();
  void Update(const std::byte* data, int64_t size_bytes);
  uint64_t Finish() const;

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_PAYLOAD_CHECKSUM_H_
