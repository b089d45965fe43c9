#include "server/comm/payload_checksum.h"

// On x86-64 the library has a form per instruction set and picks one at run time; this header puts
// those in the place of the plain functions.
#if __has_include(<xxh_x86dispatch.h>)
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#include <new>

namespace expertmesh {

void PayloadChecksum::Free::operator()(XXH3_state_s* state) const { XXH3_freeState(state); }

PayloadChecksum::PayloadChecksum() : state_(XXH3_createState()) {
  if (state_ == nullptr) throw std::bad_alloc();
  Reset();
}

void PayloadChecksum::Reset() { XXH3_64bits_reset(state_.get()); }

void PayloadChecksum::Update(const std::byte* data, int64_t size_bytes) {
  XXH3_64bits_update(state_.get(), data, static_cast<size_t>(size_bytes));
}

uint64_t PayloadChecksum::Finish() const { return XXH3_64bits_digest(state_.get()); }

}  // namespace expertmesh
