#ifndef EXPERTMESH_TESTS_SERVER_RPC_DECODER_ORACLE_H_
#define EXPERTMESH_TESTS_SERVER_RPC_DECODER_ORACLE_H_

// Protobuf as the oracle of the decoder, which reads messages by itself.

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "grpcpp/support/byte_buffer.h"
#include "gtest/gtest.h"
#include "kernels/base/host_buffer_pool.h"
#include "server/ops/call_error.h"

namespace expertmesh {

// Hands out buffers, counting them; refuses the one numbered `fail_at`.
class CountingAllocator {
 public:
  // Const, as absl::FunctionRef calls it.
  absl::StatusOr<Buffer> operator()(int64_t size_bytes) const {
    EXPECT_GT(size_bytes, 0);
    if (num_buffers == fail_at) {
      return CallError(ErrorReason::kBuffersExhausted, "no memory for the payload");
    }
    ++num_buffers;
    num_bytes += size_bytes;
    return pool_.Allocate(size_bytes);
  }

  mutable int64_t num_buffers = 0;
  mutable int64_t num_bytes = 0;
  int64_t fail_at = -1;

 private:
  mutable HostBufferPool pool_;
};

// Each compares one message with protobuf's own reading of it, fields, and payloads, which must
// have been copied once, included; false where both refuse it. `buffer` has the bytes of `wire`.
bool CompareForwardRequest(const std::string& wire, grpc::ByteBuffer* buffer);
bool CompareStreamRequest(const std::string& wire, grpc::ByteBuffer* buffer);
bool CompareExplainRequest(const std::string& wire, grpc::ByteBuffer* buffer);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_RPC_DECODER_ORACLE_H_
