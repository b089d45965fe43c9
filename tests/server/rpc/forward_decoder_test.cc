#include "server/rpc/forward_decoder.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "google/protobuf/stubs/logging.h"
#include "grpcpp/support/slice.h"
#include "gtest/gtest.h"
#include "server/ops/call_error.h"
#include "tests/server/rpc/decoder_oracle.h"
#include "tests/server/rpc/wire_variations.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;

grpc::ByteBuffer OneSlice(const std::string& wire) {
  const grpc::Slice slice(wire);
  return grpc::ByteBuffer(&slice, 1);
}

std::string Varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes.push_back(static_cast<char>(value | 0x80));
  bytes.push_back(static_cast<char>(value));
  return bytes;
}

struct Counts {
  int accepted = 0;
  int refused = 0;
};

template <typename Message, typename Compare>
Counts CompareRandomMessages(int num_cases, bool mutate, Compare compare) {
  const google::protobuf::LogSilencer silent;  // invalid UTF-8 is reported there
  Counts counts;
  for (int i = 0; i < num_cases; ++i) {
    const uint64_t seed = static_cast<uint64_t>(i) * 2 + (mutate ? 1 : 0);
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    WireVariations variations(seed);
    Message message;
    variations.Fill(&message, variations.OneIn(4) ? 200 : 6);
    std::string wire =
        variations.OneIn(5) ? message.SerializeAsString() : variations.Serialize(message);
    if (mutate) variations.Mutate(&wire);
    grpc::ByteBuffer buffer = variations.Slice(wire);
    ++(compare(wire, &buffer) ? counts.accepted : counts.refused);
    if (::testing::Test::HasFailure()) {
      ADD_FAILURE() << "wire: " << absl::BytesToHexString(wire);
      break;
    }
  }
  return counts;
}

TEST(ForwardDecoderTest, WellFormedMessagesMeanWhatProtobufSays) {
  const Counts counts =
      CompareRandomMessages<v1::ForwardRequest>(20000, false, CompareForwardRequest);
  EXPECT_GT(counts.accepted, 10000);
  EXPECT_GT(counts.refused, 100);
}

TEST(ForwardDecoderTest, MutatedMessagesAreRefusedWhereProtobufRefuses) {
  const Counts counts =
      CompareRandomMessages<v1::ForwardRequest>(40000, true, CompareForwardRequest);
  EXPECT_GT(counts.accepted, 4000);
  EXPECT_GT(counts.refused, 10000);
}

TEST(ForwardDecoderTest, StreamRequestsMeanWhatProtobufSays) {
  for (const bool mutate : {false, true}) {
    const Counts counts =
        CompareRandomMessages<v1::ForwardStreamRequest>(8000, mutate, CompareStreamRequest);
    EXPECT_GT(counts.accepted, 500);
    EXPECT_GT(counts.refused, 50);
  }
}

TEST(ForwardDecoderTest, ExplainRequestsMeanWhatProtobufSays) {
  for (const bool mutate : {false, true}) {
    const Counts counts =
        CompareRandomMessages<v1::ExplainRequest>(8000, mutate, CompareExplainRequest);
    EXPECT_GT(counts.accepted, 500);
    EXPECT_GT(counts.refused, 50);
  }
}

TEST(ForwardDecoderTest, EveryTruncationIsTreatedAsProtobufDoes) {
  const google::protobuf::LogSilencer silent;
  WireVariations variations(7);
  v1::ForwardRequest message;
  variations.Fill(&message, 6);
  message.mutable_topk()->add_ids(3);
  message.mutable_hidden_states()->set_data("payload");
  const std::string wire = message.SerializeAsString();
  for (size_t size = 0; size <= wire.size(); ++size) {
    SCOPED_TRACE(size);
    const std::string cut = wire.substr(0, size);
    grpc::ByteBuffer buffer = variations.Slice(cut);
    CompareForwardRequest(cut, &buffer);
  }
}

TEST(ForwardDecoderTest, GroupsNestAsDeepAsProtobufAllows) {
  for (const int depth : {1, 99, 100, 101, 5000}) {
    SCOPED_TRACE(depth);
    const std::string wire = std::string(depth, '\x63') + std::string(depth, '\x64');  // field 12
    grpc::ByteBuffer buffer = OneSlice(wire);
    EXPECT_EQ(CompareForwardRequest(wire, &buffer), depth <= 100);
    // One level deeper, within hidden_states.
    const std::string nested = "\x7a" + Varint(wire.size()) + wire;
    grpc::ByteBuffer nested_buffer = OneSlice(nested);
    EXPECT_EQ(CompareForwardRequest(nested, &nested_buffer), depth <= 99);
  }
}

TEST(ForwardDecoderTest, DepthIsGivenBackByWhatEnds) {
  std::string wire;
  for (int i = 0; i < 150; ++i) {
    wire += "\x63\x64";      // an unknown group
    wire += "\x7a\x02\x08";  // hidden_states with a dtype
    wire.push_back(static_cast<char>(i & 0x7f));
  }
  grpc::ByteBuffer buffer = OneSlice(wire);
  EXPECT_TRUE(CompareForwardRequest(wire, &buffer));
}

TEST(ForwardDecoderTest, LengthsBeyondTheMessageAllocateNothing) {
  // hidden_states of 2 GiB - 17 bytes, with data of as many, in a message of 12 bytes.
  for (const std::string& prefix :
       {std::string("\x7a\xef\xff\xff\xff\x07", 6), std::string("\x7a\xff\xff\xff\xff\x0f", 6),
        std::string("\x7a\x06\x7a\xef\xff\xff\xff\x07", 8),
        std::string("\x22\xf0\xff\xff\xff\x07", 6)}) {
    const std::string wire = prefix + std::string(12 - prefix.size(), '\0');
    grpc::ByteBuffer buffer = OneSlice(wire);
    EXPECT_FALSE(CompareForwardRequest(wire, &buffer));
  }
}

TEST(ForwardDecoderTest, AnEmptyMessageIsARequestWithNothingSet) {
  grpc::ByteBuffer buffer = OneSlice("");
  EXPECT_TRUE(CompareForwardRequest("", &buffer));
}

TEST(ForwardDecoderTest, MalformedNamesTypeAndOffset) {
  grpc::ByteBuffer buffer = OneSlice(std::string("\x18\x05\x7a\x09", 4));
  CountingAllocator allocator;
  const absl::Status status =
      DecodeForwardRequest(&buffer, ForwardDecodeLimits(), allocator).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(GetCallErrorDetails(status)->reason, ErrorReason::kMalformedMessage);
  EXPECT_THAT(std::string(status.message()), HasSubstr("ForwardRequest"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("byte 4 of 4"));
}

void ExpectRefused(const v1::ForwardRequest& request, const ForwardDecodeLimits& limits,
                   ErrorReason reason, const std::string& field, const std::string& limit) {
  grpc::ByteBuffer buffer = OneSlice(request.SerializeAsString());
  CountingAllocator allocator;
  const auto decoded = DecodeForwardRequest(&buffer, limits, allocator);
  ASSERT_FALSE(decoded.ok());
  const auto details = GetCallErrorDetails(decoded.status());
  ASSERT_TRUE(details.has_value()) << decoded.status();
  EXPECT_EQ(details->reason, reason) << decoded.status();
  EXPECT_EQ(details->field, field);
  EXPECT_THAT(details->limit, HasSubstr(limit));
  EXPECT_EQ(allocator.num_buffers, 0);
}

TEST(ForwardDecoderTest, LimitsNameTheirField) {
  const ForwardDecodeLimits limits;
  v1::ForwardRequest request;
  request.mutable_hidden_states()->set_data("payload");

  v1::ForwardRequest bad = request;
  bad.set_request_id(std::string(129, 'x'));
  ExpectRefused(bad, limits, ErrorReason::kInvalidField, "request_id", "128");
  bad = request;
  bad.set_model(std::string(1025, 'x'));
  ExpectRefused(bad, limits, ErrorReason::kInvalidField, "model", "1024");
  bad = request;
  for (int i = 0; i < 1025; ++i) bad.add_adapters("");
  ExpectRefused(bad, limits, ErrorReason::kInvalidField, "adapters", "1024");
  bad = request;
  for (int i = 0; i < 9; ++i) bad.mutable_hidden_states()->add_shape(1);
  ExpectRefused(bad, limits, ErrorReason::kInvalidField, "hidden_states.shape", "2");
  bad = request;
  for (int i = 0; i < 9; ++i) bad.mutable_router_logits()->add_shape(1);
  ExpectRefused(bad, limits, ErrorReason::kInvalidField, "router_logits.shape", "2");

  ForwardDecodeLimits small;
  small.max_message_bytes = 10;
  ExpectRefused(request, small, ErrorReason::kMessageTooLarge, "", "10");

  request.set_request_id(std::string(128, 'x'));
  for (int i = 0; i < 8; ++i) request.mutable_hidden_states()->add_shape(1);
  grpc::ByteBuffer buffer = OneSlice(request.SerializeAsString());
  CountingAllocator allocator;
  EXPECT_TRUE(DecodeForwardRequest(&buffer, limits, allocator).ok());
}

TEST(ForwardDecoderTest, AnAllocatorsErrorIsTheCallsError) {
  v1::ForwardRequest request;
  request.mutable_topk()->add_ids(1);
  request.mutable_hidden_states()->set_data("payload");
  for (int64_t fail_at = 0; fail_at < 2; ++fail_at) {
    grpc::ByteBuffer buffer = OneSlice(request.SerializeAsString());
    CountingAllocator allocator;
    allocator.fail_at = fail_at;
    const absl::Status status =
        DecodeForwardRequest(&buffer, ForwardDecodeLimits(), allocator).status();
    EXPECT_EQ(GetCallErrorDetails(status)->reason, ErrorReason::kBuffersExhausted);
  }
}

TEST(ForwardDecoderTest, ALargePayloadIsCopiedOnceFromManySlices) {
  constexpr size_t kBytes = 64 << 20;
  std::string data(kBytes, '\0');
  WireVariations variations(1);
  for (size_t i = 0; i < kBytes; i += 4096) data[i] = static_cast<char>(variations.Below(256));
  v1::ForwardRequest request;
  request.mutable_hidden_states()->set_dtype(v1::DATA_TYPE_BFLOAT16);
  request.mutable_hidden_states()->set_data(data);
  const std::string wire = request.SerializeAsString();
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < wire.size(); at += 100003) {
    slices.emplace_back(wire.data() + at, std::min<size_t>(100003, wire.size() - at));
  }
  grpc::ByteBuffer buffer(slices.data(), slices.size());
  CountingAllocator allocator;
  const auto decoded = DecodeForwardRequest(&buffer, ForwardDecodeLimits(), allocator);
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(decoded->payload_bytes_copied, static_cast<int64_t>(kBytes));
  EXPECT_EQ(allocator.num_buffers, 1);
  ASSERT_EQ(decoded->hidden_states.data.size_bytes(), static_cast<int64_t>(kBytes));
  EXPECT_EQ(std::memcmp(decoded->hidden_states.data.data(), data.data(), kBytes), 0);
}

TEST(ForwardDecoderTest, UnpackedElementsGatherIntoOneBuffer) {
  std::string ids;
  constexpr int kNumIds = 1000000;
  for (int32_t i = 0; i < kNumIds; ++i) {
    ids += '\x15';
    ids.append(reinterpret_cast<const char*>(&i), sizeof(i));
  }
  const std::string wire = "\x22" + Varint(ids.size()) + ids;
  grpc::ByteBuffer buffer = OneSlice(wire);
  CountingAllocator allocator;
  const auto decoded = DecodeForwardRequest(&buffer, ForwardDecodeLimits(), allocator);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(allocator.num_buffers, 1);
  ASSERT_EQ(decoded->topk_ids.size_bytes(), 4 * kNumIds);
  const auto* elements = reinterpret_cast<const int32_t*>(decoded->topk_ids.data());
  for (int32_t i = 0; i < kNumIds; ++i) ASSERT_EQ(elements[i], i);
}

}  // namespace
}  // namespace expertmesh
