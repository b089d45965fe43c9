#include "server/rpc/payload_message.h"

#include <cstring>
#include <ctime>
#include <string>

#include "grpcpp/support/slice.h"
#include "gtest/gtest.h"
#include "kernels/base/host_buffer_pool.h"

namespace expertmesh {
namespace {

constexpr PayloadPath kPath = {1, 2, 3};
constexpr char kPayloadTag = 3 << 3 | 2;
constexpr char kOtherTag = 4 << 3;

// A message around the messages around `inner`.
grpc::ByteBuffer Wrap(const std::string& inner) {
  std::string text = inner;
  for (const int field : {2, 1}) {
    std::string length;
    uint64_t rest = text.size();
    for (; rest >= 0x80; rest >>= 7) length.push_back(static_cast<char>(rest | 0x80));
    length.push_back(static_cast<char>(rest));
    text = std::string(1, static_cast<char>(field << 3 | 2)) + length + text;
  }
  const grpc::Slice slice(text.data(), text.size());
  return grpc::ByteBuffer(&slice, 1);
}

std::string PayloadOf(const PayloadMessage& message) {
  return std::string(reinterpret_cast<const char*>(message.payload.data()),
                     static_cast<size_t>(message.payload.size_bytes()));
}

TEST(PayloadMessageTest, TheLastPayloadWins) {
  HostBufferPool pool;
  grpc::ByteBuffer message = Wrap(std::string{kPayloadTag, 2, 'a', 'b', kPayloadTag, 1, 'c'} +
                                  std::string{kOtherTag, 7, kPayloadTag, 1, 'd', kOtherTag, 8});
  const PayloadMessage parts = DecodePayloadMessage(&message, kPath, &pool).value();
  EXPECT_EQ(parts.depth, 3);
  EXPECT_EQ(PayloadOf(parts), "d");
  EXPECT_EQ(parts.heads[2], (std::string{kOtherTag, 7, kOtherTag, 8}));
  message = Wrap({kPayloadTag, 1, 'c', kPayloadTag, 0});
  EXPECT_EQ(PayloadOf(DecodePayloadMessage(&message, kPath, &pool).value()), "");
}

TEST(PayloadMessageTest, ManyRepeatsTakeTimeInProportion) {
  constexpr int kRepeats = 300000;
  std::string inner;
  for (int i = 0; i < kRepeats; ++i) inner += {kOtherTag, 7, kPayloadTag, 1, 'x'};
  grpc::ByteBuffer message = Wrap(inner);
  HostBufferPool pool;
  // The processor's time, which does not grow with what else the machine does.
  const std::clock_t start = std::clock();
  const PayloadMessage parts = DecodePayloadMessage(&message, kPath, &pool).value();
  EXPECT_LT((std::clock() - start) / CLOCKS_PER_SEC, 10);
  EXPECT_EQ(PayloadOf(parts), "x");
  EXPECT_EQ(parts.heads[2].size(), 2 * kRepeats);
}

}  // namespace
}  // namespace expertmesh
