#include "client/forward_wire.h"

#include <google/protobuf/message.h>
#include <google/protobuf/unknown_field_set.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace expertmesh {
namespace {

std::string Flatten(const grpc::ByteBuffer& bytes) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(bytes.Dump(&slices).ok());
  std::string text;
  for (const grpc::Slice& slice : slices) {
    text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return text;
}

// `text` cut into slices of `slice_bytes`.
grpc::ByteBuffer Cut(const std::string& text, size_t slice_bytes) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < text.size(); at += slice_bytes) {
    slices.emplace_back(text.substr(at, slice_bytes));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

class ForwardWireTest : public testing::Test {
 protected:
  ForwardWireTest() {
    input_.request_id = "r-1";
    input_.model = "tiny";
    input_.layer = 3;
    input_.num_tokens = 2;
    input_.hidden_size = 3;
    input_.hidden_states = {hidden_.data(), 24, v1::DATA_TYPE_FLOAT32, nullptr};
    input_.routing = TopKRouting{2, ids_, weights_};
  }

  v1::ForwardRequest Parse(const absl::StatusOr<grpc::ByteBuffer>& bytes) {
    v1::ForwardRequest request;
    EXPECT_TRUE(bytes.ok()) << bytes.status();
    if (bytes.ok()) {
      EXPECT_TRUE(request.ParseFromString(Flatten(*bytes)));
    }
    return request;
  }

  const std::vector<float> hidden_ = {1, -2, 3, 4, 5.5f, -6};
  const std::vector<int32_t> ids_ = {0, -1, 7, 7};
  const std::vector<float> weights_ = {0.5f, 0, 0.25f, 0.75f};
  ForwardInput input_;
};

TEST_F(ForwardWireTest, WritesWhatProtobufReads) {
  input_.apply_router_weight_on_input = true;
  input_.expected_fingerprint = "abc";
  input_.options.set_output_dtype(v1::DATA_TYPE_FLOAT16);
  const v1::ForwardRequest request = Parse(EncodeForwardRequest(input_));
  EXPECT_EQ(request.request_id(), "r-1");
  EXPECT_EQ(request.model(), "tiny");
  EXPECT_EQ(request.layer(), 3);
  EXPECT_TRUE(request.apply_router_weight_on_input());
  EXPECT_EQ(request.expected_fingerprint(), "abc");
  EXPECT_EQ(request.options().output_dtype(), v1::DATA_TYPE_FLOAT16);
  ASSERT_EQ(request.routing_case(), v1::ForwardRequest::kTopk);
  EXPECT_EQ(request.topk().topk(), 2);
  EXPECT_EQ(std::vector<int32_t>(request.topk().ids().begin(), request.topk().ids().end()), ids_);
  EXPECT_EQ(std::vector<float>(request.topk().weights().begin(), request.topk().weights().end()),
            weights_);
  EXPECT_EQ(request.hidden_states().dtype(), v1::DATA_TYPE_FLOAT32);
  EXPECT_EQ(std::vector<int64_t>(request.hidden_states().shape().begin(),
                                 request.hidden_states().shape().end()),
            (std::vector<int64_t>{2, 3}));
  ASSERT_EQ(request.hidden_states().data().size(), 24u);
  EXPECT_EQ(memcmp(request.hidden_states().data().data(), hidden_.data(), 24), 0);
  EXPECT_TRUE(request.GetReflection()->GetUnknownFields(request).empty());
}

TEST_F(ForwardWireTest, WritesLogitsAndGate) {
  const std::vector<float> logits = {1, 2, 3, 4, 5, 6, 7, 8};
  input_.routing = RouterLogitsRouting{{logits.data(), 32, v1::DATA_TYPE_FLOAT32, nullptr}, 4};
  v1::ForwardRequest request = Parse(EncodeForwardRequest(input_));
  ASSERT_EQ(request.routing_case(), v1::ForwardRequest::kRouterLogits);
  EXPECT_EQ(request.router_logits().shape(1), 4);
  ASSERT_EQ(request.router_logits().data().size(), 32u);
  EXPECT_EQ(memcmp(request.router_logits().data().data(), logits.data(), 32), 0);
  EXPECT_EQ(request.hidden_states().data().size(), 24u);

  input_.routing = ServerGateRouting();
  request = Parse(EncodeForwardRequest(input_));
  EXPECT_EQ(request.routing_case(), v1::ForwardRequest::kServerGate);
}

TEST_F(ForwardWireTest, ZeroTokensAreARequest) {
  input_.num_tokens = 0;
  input_.hidden_states.size_bytes = 0;
  input_.routing = TopKRouting{2, {}, {}};
  const v1::ForwardRequest request = Parse(EncodeForwardRequest(input_));
  EXPECT_EQ(request.hidden_states().shape(0), 0);
  EXPECT_TRUE(request.hidden_states().data().empty());
  EXPECT_EQ(request.topk().topk(), 2);
}

TEST_F(ForwardWireTest, OwnedBytesAreSentFromWhereTheyAreAndReleased) {
  auto owned = std::make_shared<std::vector<float>>(hidden_);
  input_.hidden_states.data = owned->data();
  input_.hidden_states.owner = owned;
  {
    const absl::StatusOr<grpc::ByteBuffer> bytes = EncodeForwardRequest(input_);
    ASSERT_TRUE(bytes.ok());
    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(bytes->Dump(&slices).ok());
    EXPECT_EQ(static_cast<const void*>(slices.back().begin()),
              static_cast<const void*>(owned->data()));
    EXPECT_EQ(owned.use_count(), 3);  // ours, the input's, the slice's
  }
  EXPECT_EQ(owned.use_count(), 2);
}

TEST_F(ForwardWireTest, RefusesWhatDoesNotFitItsShape) {
  input_.hidden_states.size_bytes = 23;
  EXPECT_EQ(EncodeForwardRequest(input_).status().message(),
            "hidden_states: 23 bytes given; shape [2, 3] has 24");
  input_.hidden_states.size_bytes = 24;
  input_.routing = TopKRouting{3, ids_, weights_};
  EXPECT_EQ(EncodeForwardRequest(input_).status().message(),
            "topk: 4 ids and 4 weights given; [2, 3] has 6");
  input_.routing = TopKRouting{2, ids_, weights_};
  input_.hidden_states.data = nullptr;
  EXPECT_EQ(EncodeForwardRequest(input_).status().message(),
            "hidden_states: data is null for 24 bytes");
  input_.num_tokens = int64_t{1} << 62;
  EXPECT_EQ(EncodeForwardRequest(input_).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(ForwardWireTest, ReadsAnswersHoweverTheyAreCut) {
  v1::ForwardResponse response;
  response.set_request_id("r-1");
  response.mutable_served_by()->set_epoch(5);
  response.mutable_output()->set_dtype(v1::DATA_TYPE_FLOAT32);
  response.mutable_output()->add_shape(2);
  response.mutable_output()->add_shape(3);
  response.mutable_output()->set_data(hidden_.data(), 24);
  const std::string text = response.SerializeAsString();
  for (size_t slice_bytes = 1; slice_bytes <= text.size(); ++slice_bytes) {
    SCOPED_TRACE(slice_bytes);
    const absl::StatusOr<ForwardOutput> output = DecodeForwardResponse(Cut(text, slice_bytes));
    ASSERT_TRUE(output.ok()) << output.status();
    EXPECT_EQ(output->response.request_id(), "r-1");
    EXPECT_EQ(output->response.served_by().epoch(), 5u);
    EXPECT_EQ(output->num_tokens, 2);
    EXPECT_EQ(output->hidden_size, 3);
    ASSERT_EQ(output->output.size(), 24u);
    EXPECT_EQ(memcmp(output->output.data(), hidden_.data(), 24), 0);
    EXPECT_TRUE(output->response.output().data().empty());
  }
}

TEST_F(ForwardWireTest, EveryTruncationOfAnAnswerIsRefusedOrConsistent) {
  v1::ForwardResponse response;
  response.mutable_output()->set_dtype(v1::DATA_TYPE_FLOAT32);
  response.mutable_output()->add_shape(2);
  response.mutable_output()->add_shape(3);
  response.mutable_output()->set_data(hidden_.data(), 24);
  const std::string text = response.SerializeAsString();
  for (size_t size = 1; size < text.size(); ++size) {
    const absl::StatusOr<ForwardOutput> output =
        DecodeForwardResponse(Cut(text.substr(0, size), 7));
    EXPECT_EQ(output.status().code(), absl::StatusCode::kDataLoss) << size;
  }
}

TEST_F(ForwardWireTest, AnAnswerOfTheWrongSizeIsDataLoss) {
  v1::ForwardResponse response;
  response.mutable_output()->set_dtype(v1::DATA_TYPE_BFLOAT16);
  response.mutable_output()->add_shape(2);
  response.mutable_output()->add_shape(3);
  response.mutable_output()->set_data(hidden_.data(), 24);
  EXPECT_EQ(DecodeForwardResponse(Cut(response.SerializeAsString(), 100)).status().message(),
            "output: 24 bytes given; shape [2, 3] has 12");
}

TEST_F(ForwardWireTest, AStreamsMessageIsTheRequestInItsEnvelope) {
  const absl::StatusOr<grpc::ByteBuffer> bytes = EncodeForwardStreamRequest(7, 250, input_);
  ASSERT_TRUE(bytes.ok());
  v1::ForwardStreamRequest message;
  ASSERT_TRUE(message.ParseFromString(Flatten(*bytes)));
  EXPECT_EQ(message.stream_seq(), 7u);
  EXPECT_EQ(message.timeout_micros(), 250);
  EXPECT_FALSE(message.cancel());
  EXPECT_EQ(message.request().SerializeAsString(),
            Parse(EncodeForwardRequest(input_)).SerializeAsString());
  ASSERT_TRUE(message.ParseFromString(Flatten(EncodeForwardStreamCancel(7))));
  EXPECT_EQ(message.stream_seq(), 7u);
  EXPECT_TRUE(message.cancel());
  EXPECT_FALSE(message.has_request());
}

TEST_F(ForwardWireTest, ReadsAStreamsAnswersHoweverTheyAreCut) {
  v1::ForwardStreamResponse message;
  message.set_stream_seq(300);
  v1::ForwardResponse& response = *message.mutable_response();
  response.set_request_id("r-1");
  response.mutable_output()->set_dtype(v1::DATA_TYPE_FLOAT32);
  response.mutable_output()->add_shape(2);
  response.mutable_output()->add_shape(3);
  response.mutable_output()->set_data(hidden_.data(), 24);
  // The number stands first, or last.
  v1::ForwardStreamResponse number;
  number.set_stream_seq(300);
  v1::ForwardStreamResponse rest = message;
  rest.clear_stream_seq();
  for (const std::string& text :
       {message.SerializeAsString(), rest.SerializeAsString() + number.SerializeAsString()}) {
    for (size_t slice_bytes = 1; slice_bytes <= text.size(); ++slice_bytes) {
      SCOPED_TRACE(slice_bytes);
      const auto answer = DecodeForwardStreamResponse(Cut(text, slice_bytes));
      ASSERT_TRUE(answer.ok()) << answer.status();
      EXPECT_EQ(answer->stream_seq, 300u);
      ASSERT_TRUE(answer->result.ok()) << answer->result.status();
      EXPECT_EQ(answer->result->response.request_id(), "r-1");
      ASSERT_EQ(answer->result->output.size(), 24u);
      EXPECT_EQ(memcmp(answer->result->output.data(), hidden_.data(), 24), 0);
    }
    for (size_t size = 0; size < text.size(); ++size) {
      const auto answer = DecodeForwardStreamResponse(Cut(text.substr(0, size), 7));
      EXPECT_TRUE(!answer.ok() || !answer->result.ok() || answer->stream_seq == 0) << size;
    }
  }
}

TEST_F(ForwardWireTest, ReadsAStreamsErrors) {
  v1::ForwardStreamResponse message;
  message.set_stream_seq(4);
  message.mutable_error()->set_code(5);
  message.mutable_error()->set_message("no such layer");
  auto answer = DecodeForwardStreamResponse(Cut(message.SerializeAsString(), 3));
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->stream_seq, 4u);
  EXPECT_EQ(answer->result.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(answer->result.status().message(), "no such layer");
  // An answer that is none is told to the message, not taken for one.
  message.mutable_error()->set_code(0);
  answer = DecodeForwardStreamResponse(Cut(message.SerializeAsString(), 3));
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->result.status().code(), absl::StatusCode::kDataLoss);
  message.clear_result();
  answer = DecodeForwardStreamResponse(Cut(message.SerializeAsString(), 3));
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->result.status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace expertmesh
