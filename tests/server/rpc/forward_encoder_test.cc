#include "server/rpc/forward_encoder.h"

#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "grpcpp/support/slice.h"
#include "gtest/gtest.h"
#include "server/ops/call_error.h"
#include "tests/server/rpc/wire_variations.h"

namespace expertmesh {
namespace {

constexpr int64_t kMaxMessageBytes = std::numeric_limits<int32_t>::max();

template <typename Message>
Message Parse(grpc::ByteBuffer* buffer) {
  Message message;
  grpc::ProtoBufferReader reader(buffer);
  EXPECT_TRUE(message.ParseFromZeroCopyStream(&reader));
  return message;
}

// Random spans, each with an owner of its own, and the bytes that they hold together.
struct Payload {
  std::vector<std::shared_ptr<std::string>> owners;
  std::vector<OutputSpan> spans;
  std::string bytes;
};

Payload RandomPayload(WireVariations* variations, int64_t num_spans) {
  Payload payload;
  for (int64_t i = 0; i < num_spans; ++i) {
    // A multiple of 4, so that the bytes may be floats.
    auto owner = std::make_shared<std::string>(4 * variations->Below(50), '\0');
    for (char& byte : *owner) byte = static_cast<char>(variations->Below(256));
    payload.bytes += *owner;
    payload.spans.push_back(OutputSpan{reinterpret_cast<const std::byte*>(owner->data()),
                                       static_cast<int64_t>(owner->size()), owner});
    payload.owners.push_back(std::move(owner));
  }
  return payload;
}

void SetPayload(const std::string& bytes, EncodedOutput::Field field, v1::Tensor* tensor) {
  if (field == EncodedOutput::Field::kData) {
    tensor->set_data(bytes);
    return;
  }
  tensor->mutable_values()->Resize(static_cast<int>(bytes.size() / 4), 0.0f);
  if (!bytes.empty()) {
    std::memcpy(tensor->mutable_values()->mutable_data(), bytes.data(), bytes.size());
  }
}

TEST(ForwardEncoderTest, ArrivesAsTheMessageThatProtobufWouldHaveSent) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    WireVariations variations(seed);
    v1::ForwardResponse header;
    variations.Fill(&header, 10);
    header.set_request_id("name");  // Fill may make invalid UTF-8
    header.clear_served_by();
    header.mutable_served_by()->set_epoch(seed);
    header.clear_output();
    Payload payload = RandomPayload(&variations, variations.Below(4));
    EncodedOutput output;
    output.tensor.set_dtype(v1::DATA_TYPE_BFLOAT16);
    output.tensor.add_shape(variations.Below(1000));
    output.tensor.add_shape(variations.Below(10000));
    output.spans = payload.spans;
    if (variations.OneIn(2)) output.field = EncodedOutput::Field::kValues;
    const bool has_output = !variations.OneIn(5);

    v1::ForwardResponse expected = header;
    if (has_output) {
      *expected.mutable_output() = output.tensor;
      SetPayload(payload.bytes, output.field, expected.mutable_output());
    }
    auto buffer = EncodeForwardResponse(header, has_output ? &output : nullptr);
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_EQ(Parse<v1::ForwardResponse>(&*buffer).SerializeAsString(),
              expected.SerializeAsString());
    EXPECT_EQ(buffer->Length(), expected.ByteSizeLong());

    auto stream_buffer = EncodeForwardStreamResponse(seed, header, has_output ? &output : nullptr);
    ASSERT_TRUE(stream_buffer.ok());
    v1::ForwardStreamResponse stream_expected;
    stream_expected.set_stream_seq(seed);
    *stream_expected.mutable_response() = expected;
    EXPECT_EQ(Parse<v1::ForwardStreamResponse>(&*stream_buffer).SerializeAsString(),
              stream_expected.SerializeAsString());
  }
}

TEST(ForwardEncoderTest, ThePayloadIsReferredToNotCopied) {
  WireVariations variations(3);
  Payload payload;
  for (int i = 0; i < 3; ++i) {
    auto owner = std::make_shared<std::string>(1 << 20, static_cast<char>('a' + i));
    payload.spans.push_back(OutputSpan{reinterpret_cast<const std::byte*>(owner->data()),
                                       static_cast<int64_t>(owner->size()), owner});
    payload.owners.push_back(std::move(owner));
  }
  EncodedOutput output;
  output.spans = payload.spans;
  auto buffer = EncodeForwardResponse(v1::ForwardResponse(), &output);
  ASSERT_TRUE(buffer.ok());
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(buffer->Dump(&slices).ok());
  ASSERT_EQ(slices.size(), 4u);
  EXPECT_LT(slices[0].size(), 32u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(reinterpret_cast<const char*>(slices[i + 1].begin()), payload.owners[i]->data());
    EXPECT_EQ(slices[i + 1].size(), payload.owners[i]->size());
  }
}

TEST(ForwardEncoderTest, OwnersLiveUntilTheLastSliceIsGone) {
  WireVariations variations(4);
  auto owner = std::make_shared<std::string>(100, 'x');
  const std::weak_ptr<std::string> watch = owner;
  std::vector<OutputSpan> spans(2);
  for (OutputSpan& span : spans) {
    span = OutputSpan{reinterpret_cast<const std::byte*>(owner->data()), 50, owner};
  }
  EncodedOutput output;
  output.spans = spans;
  auto buffer = EncodeForwardResponse(v1::ForwardResponse(), &output);
  ASSERT_TRUE(buffer.ok());
  owner.reset();
  spans.clear();
  EXPECT_EQ(watch.use_count(), 2);
  grpc::ByteBuffer copy = *buffer;
  buffer->Clear();
  EXPECT_FALSE(watch.expired());
  copy.Clear();
  EXPECT_TRUE(watch.expired());
}

TEST(ForwardEncoderTest, NoElementsMeansAnEmptyTensorThatIsThere) {
  EncodedOutput output;
  output.tensor.set_dtype(v1::DATA_TYPE_FLOAT32);
  output.tensor.add_shape(0);
  output.tensor.add_shape(2048);
  const std::vector<OutputSpan> spans(1);
  output.spans = spans;
  auto buffer = EncodeForwardResponse(v1::ForwardResponse(), &output);
  ASSERT_TRUE(buffer.ok());
  const auto response = Parse<v1::ForwardResponse>(&*buffer);
  EXPECT_TRUE(response.has_output());
  EXPECT_EQ(response.output().shape_size(), 2);
  EXPECT_EQ(response.output().data(), "");
}

TEST(ForwardEncoderTest, AMessageEndsAtProtobufsLimit) {
  // The bytes are never looked at.
  const std::byte byte{};
  std::vector<OutputSpan> spans(2);
  spans[0] = OutputSpan{&byte, int64_t{1} << 30, nullptr};
  EncodedOutput output;
  // The heads of output and data: one byte of tag and five of length each.
  spans[1] = OutputSpan{&byte, kMaxMessageBytes - 12 - spans[0].size_bytes, nullptr};
  output.spans = spans;
  const auto buffer = EncodeForwardResponse(v1::ForwardResponse(), &output);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_EQ(static_cast<int64_t>(buffer->Length()), kMaxMessageBytes);
  for (const int64_t more : {int64_t{1}, int64_t{12}, int64_t{13}, int64_t{1} << 40,
                             std::numeric_limits<int64_t>::max()}) {
    SCOPED_TRACE(more);
    std::vector<OutputSpan> larger = spans;
    larger.push_back(OutputSpan{&byte, more, nullptr});
    output.spans = larger;
    const absl::Status status = EncodeForwardResponse(v1::ForwardResponse(), &output).status();
    ASSERT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(GetCallErrorDetails(status)->reason, ErrorReason::kMessageTooLarge);
    EXPECT_EQ(GetCallErrorDetails(status)->limit, absl::StrCat(kMaxMessageBytes));
  }
  // What fits by itself may not fit a stream's message.
  output.spans = spans;
  EXPECT_FALSE(EncodeForwardStreamResponse(1, v1::ForwardResponse(), &output).ok());
}

TEST(ForwardEncoderTest, SmallMessagesToo) {
  v1::ForwardStreamResponse message;
  message.set_stream_seq(5);
  message.mutable_error()->set_message("text");
  grpc::ByteBuffer buffer = EncodeSmallMessage(message);
  EXPECT_EQ(Parse<v1::ForwardStreamResponse>(&buffer).SerializeAsString(),
            message.SerializeAsString());
  grpc::ByteBuffer empty = EncodeSmallMessage(v1::ForwardStreamResponse());
  EXPECT_TRUE(empty.Valid());
  EXPECT_EQ(empty.Length(), 0u);
}

}  // namespace
}  // namespace expertmesh
