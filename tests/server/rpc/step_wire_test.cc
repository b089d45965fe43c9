#include "server/rpc/step_wire.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/host_buffer_pool.h"
#include "server/ops/call_error.h"
#include "server/planning/monolithic_plan.h"
#include "server/planning/slice_check.h"
#include "tests/server/planning/random_routing.h"

namespace expertmesh {
namespace {

constexpr int64_t kHiddenSize = 5;

std::string Bytes(const grpc::ByteBuffer& message) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(message.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

// As it arrives: in slices of random sizes.
grpc::ByteBuffer Arrived(const std::string& bytes, std::mt19937_64& random) {
  std::vector<grpc::Slice> slices;
  for (size_t begin = 0; begin < bytes.size();) {
    const size_t size = std::min<size_t>(bytes.size() - begin, 1 + random() % 200);
    slices.emplace_back(bytes.data() + begin, size);
    begin += size;
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

struct Example {
  Example(uint64_t seed, CombineMode combine) : random(seed) {
    const int32_t ep_size = 1 + static_cast<int32_t>(random() % 4);
    const int32_t num_experts = 1 + static_cast<int32_t>(random() % 9);
    num_tokens = static_cast<int64_t>(random() % 40);
    const RandomRouting routing = MakeRandomRouting(random, num_tokens, 3, num_experts);
    const std::vector<RoutingSegment> segments = CutIntoSegments(random, routing);
    const Placement placement = MakeRandomPlacement(random, num_experts, ep_size);
    StepPlanParams params;
    params.header.incarnation = random();
    params.header.epoch = random() % 100;
    params.header.step = random();
    params.header.model = "a model";
    params.header.layer = 17;
    params.header.strategy = seed % 4 == 0   ? DispatchMode::kAllGatherReduceScatter
                             : seed % 4 == 1 ? DispatchMode::kDirect
                             : seed % 4 == 2 ? DispatchMode::kAllToAllFixedCapacity
                             : ep_size > 1   ? DispatchMode::kAllToAll
                                             : DispatchMode::kPassthrough;
    params.header.combine = combine;
    params.header.activation_dtype = DType::kBFloat16;
    params.header.combine_dtype = DType::kFloat32;
    params.header.output_dtype = DType::kFloat16;
    params.header.apply_router_weight_on_input = random() % 2 == 0;
    params.header.include_shared_experts =
        random() % 2 == 0 && params.header.strategy != DispatchMode::kDirect;
    params.segments = segments;
    params.placement = &placement;
    params.max_num_tokens = 50;
    if (seed % 5 == 0) {
      params.header.strategy = DispatchMode::kAllGatherReduceScatterMonolithic;
    }
    absl::StatusOr<StepPlan> plan = PlanStep(params);
    EXPECT_TRUE(plan.ok()) << plan.status();
    if (seed % 5 == 0) {
      std::vector<float> logits(num_tokens * num_experts);
      for (float& logit : logits) logit = static_cast<float>(random());
      MakePlanMonolithic(logits, *plan);
    }
    rank = static_cast<int32_t>(random() % ep_size);
    slice = plan->slices[rank];
    num_local_experts = static_cast<int32_t>(placement.local_experts(rank).size());

    auto memory =
        std::make_shared<std::vector<std::byte>>(slice.num_source_tokens * kHiddenSize * 2);
    for (std::byte& byte : *memory) byte = static_cast<std::byte>(random());
    rows = memory;
    const int64_t first = slice.num_source_tokens / 3;
    shard.rows = {{memory->data(), first},
                  {memory->data() + first * kHiddenSize * 2, slice.num_source_tokens - first}};
    // One is referred to, the other copied.
    shard.owners = {memory, nullptr};
  }

  std::mt19937_64 random;
  int64_t num_tokens = 0;
  int32_t rank = 0;
  int32_t num_local_experts = 0;
  StepSlice slice;
  TokenShard shard;
  std::shared_ptr<std::vector<std::byte>> rows;
};

void ExpectEqual(const StepSlice& a, const StepSlice& b) {
  EXPECT_EQ(a.header.incarnation, b.header.incarnation);
  EXPECT_EQ(a.header.epoch, b.header.epoch);
  EXPECT_EQ(a.header.step, b.header.step);
  EXPECT_EQ(a.header.model, b.header.model);
  EXPECT_EQ(a.header.layer, b.header.layer);
  EXPECT_EQ(a.header.strategy, b.header.strategy);
  EXPECT_EQ(a.header.combine, b.header.combine);
  EXPECT_EQ(a.header.activation_dtype, b.header.activation_dtype);
  EXPECT_EQ(a.header.combine_dtype, b.header.combine_dtype);
  EXPECT_EQ(a.header.output_dtype, b.header.output_dtype);
  EXPECT_EQ(a.header.apply_router_weight_on_input, b.header.apply_router_weight_on_input);
  EXPECT_EQ(a.header.include_shared_experts, b.header.include_shared_experts);
  EXPECT_EQ(a.num_source_tokens, b.num_source_tokens);
  EXPECT_EQ(a.send_counts, b.send_counts);
  EXPECT_EQ(a.send_rows, b.send_rows);
  EXPECT_EQ(a.recv_counts, b.recv_counts);
  EXPECT_EQ(a.pair_offsets, b.pair_offsets);
  EXPECT_EQ(a.pair_local_expert, b.pair_local_expert);
  EXPECT_EQ(a.pair_k, b.pair_k);
  EXPECT_EQ(a.pair_weights, b.pair_weights);
  EXPECT_EQ(a.return_send_counts, b.return_send_counts);
  EXPECT_EQ(a.return_recv_counts, b.return_recv_counts);
  EXPECT_EQ(a.sum_offsets, b.sum_offsets);
  EXPECT_EQ(a.sum_rows, b.sum_rows);
  EXPECT_EQ(a.sum_weights, b.sum_weights);
  EXPECT_EQ(a.gather_counts, b.gather_counts);
  EXPECT_EQ(a.gather_rows, b.gather_rows);
  EXPECT_EQ(a.router_logits, b.router_logits);
  EXPECT_EQ(a.max_num_tokens, b.max_num_tokens);
  EXPECT_EQ(a.max_topk, b.max_topk);
}

TEST(StepWireTest, SlicesComeAsTheyWereSent) {
  HostBufferPool memory;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Example example(seed, seed % 2 == 0 ? CombineMode::kSum : CombineMode::kPerExpert);
    const std::weak_ptr<std::vector<std::byte>> held = example.rows;
    absl::StatusOr<grpc::ByteBuffer> message =
        EncodeSlice(example.slice, example.shard, kHiddenSize, absl::Milliseconds(1234));
    ASSERT_TRUE(message.ok()) << message.status();
    const std::vector<std::byte> rows = *example.rows;
    const bool refers = example.shard.rows[0].num_rows > 0;
    example.rows.reset();
    example.shard = {};
    EXPECT_EQ(held.expired(), !refers) << "the message keeps what it refers to";
    const std::string bytes = Bytes(*message);
    message->Clear();
    EXPECT_TRUE(held.expired());

    grpc::ByteBuffer arrived = Arrived(bytes, example.random);
    const absl::StatusOr<ReceivedCommand> command = DecodeCommand(&arrived, &memory);
    ASSERT_TRUE(command.ok()) << command.status();
    ASSERT_TRUE(command->slice.has_value());
    ExpectEqual(command->slice->slice, example.slice);
    EXPECT_EQ(command->slice->hidden_size, kHiddenSize);
    EXPECT_EQ(command->slice->timeout, absl::Milliseconds(1234));
    ASSERT_EQ(command->slice->shard.size_bytes(), static_cast<int64_t>(rows.size()));
    EXPECT_TRUE(rows.empty() ||
                std::memcmp(command->slice->shard.data(), rows.data(), rows.size()) == 0);

    // It is plain protobuf.
    v1::RunStepsResponse parsed;
    ASSERT_TRUE(parsed.ParseFromString(bytes));
    EXPECT_EQ(parsed.slice().send_rows_size(), static_cast<int>(example.slice.send_rows.size()));
    EXPECT_EQ(parsed.slice().shard().data().size(), rows.size());
    grpc::ByteBuffer again = Arrived(parsed.SerializeAsString(), example.random);
    const absl::StatusOr<ReceivedCommand> from_protobuf = DecodeCommand(&again, &memory);
    ASSERT_TRUE(from_protobuf.ok()) << from_protobuf.status();
    ExpectEqual(from_protobuf->slice->slice, example.slice);
  }
}

TEST(StepWireTest, OtherCommandsAndEvents) {
  HostBufferPool memory;
  std::mt19937_64 random(1);
  v1::RunStepsResponse begin;
  begin.mutable_epoch_begin()->set_epoch(7);
  grpc::ByteBuffer arrived = Arrived(begin.SerializeAsString(), random);
  const absl::StatusOr<ReceivedCommand> command = DecodeCommand(&arrived, &memory);
  ASSERT_TRUE(command.ok()) << command.status();
  EXPECT_FALSE(command->slice.has_value());
  EXPECT_EQ(command->other.epoch_begin().epoch(), 7u);

  v1::RunStepsRequest hello;
  hello.mutable_hello()->set_member_id(9);
  arrived = Arrived(hello.SerializeAsString(), random);
  const absl::StatusOr<ReceivedEvent> event = DecodeEvent(&arrived, &memory);
  ASSERT_TRUE(event.ok()) << event.status();
  EXPECT_FALSE(event->result.has_value());
  EXPECT_EQ(event->other.hello().member_id(), 9u);
}

absl::StatusOr<grpc::ByteBuffer> ExampleResult(StepArena* arena, int64_t num_rows) {
  StepHeader header;
  header.incarnation = 3;
  header.epoch = 4;
  header.step = 5;
  header.output_dtype = DType::kFloat32;
  RankStepResult result;
  result.output.arena = std::shared_ptr<StepArena>(std::shared_ptr<void>(), arena);
  std::byte* const rows = arena->Allocate(num_rows * kHiddenSize * 4).value();
  std::memset(rows, 0x5a, num_rows * kHiddenSize * 4);
  result.output.rows = rows;
  result.output.num_rows = num_rows;
  result.timings = {10, 20, 30};
  result.num_expert_rows = 77;
  result.traffic = {{0, 5'000'000'000, 1}, {0, 0, 250}};
  return EncodeStepResult(header, kHiddenSize, std::move(result));
}

TEST(StepWireTest, ResultsComeAsTheyWereSent) {
  HostBufferPool memory;
  StepArena arena(&memory);
  std::mt19937_64 random(2);
  for (const int64_t num_rows : {0, 1, 300}) {
    const absl::StatusOr<grpc::ByteBuffer> message = ExampleResult(&arena, num_rows);
    ASSERT_TRUE(message.ok()) << message.status();
    grpc::ByteBuffer arrived = Arrived(Bytes(*message), random);
    const absl::StatusOr<ReceivedEvent> event = DecodeEvent(&arrived, &memory);
    ASSERT_TRUE(event.ok()) << event.status();
    ASSERT_TRUE(event->result.has_value());
    const ReceivedResult& result = *event->result;
    EXPECT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.incarnation, 3u);
    EXPECT_EQ(result.epoch, 4u);
    EXPECT_EQ(result.step, 5u);
    EXPECT_EQ(result.timings.compute_micros, 20);
    EXPECT_EQ(result.num_expert_rows, 77);
    EXPECT_EQ(result.traffic.bytes_sent, (std::vector<int64_t>{0, 5'000'000'000, 1}));
    EXPECT_EQ(result.traffic.wait_nanos, (std::vector<int64_t>{0, 0, 250}));
    EXPECT_EQ(result.dtype, DType::kFloat32);
    EXPECT_EQ(result.num_rows, num_rows);
    EXPECT_EQ(result.hidden_size, kHiddenSize);
    ASSERT_EQ(result.output.size_bytes(), num_rows * kHiddenSize * 4);
    for (int64_t i = 0; i < result.output.size_bytes(); ++i) {
      ASSERT_EQ(result.output.data()[i], std::byte{0x5a});
    }
  }
  StepHeader header;
  header.step = 6;
  const absl::StatusOr<grpc::ByteBuffer> failed =
      EncodeStepResult(header, kHiddenSize, CallError(ErrorReason::kBuffersExhausted, "no memory"));
  ASSERT_TRUE(failed.ok());
  grpc::ByteBuffer arrived = Arrived(Bytes(*failed), random);
  const absl::StatusOr<ReceivedEvent> event = DecodeEvent(&arrived, &memory);
  ASSERT_TRUE(event.ok() && event->result.has_value());
  EXPECT_EQ(event->result->step, 6u);
  EXPECT_EQ(event->result->status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(GetCallErrorDetails(event->result->status)->reason, ErrorReason::kBuffersExhausted);
}

TEST(StepWireTest, RowsThatAreNotWhatTheirShapeSaysAreRefused) {
  HostBufferPool memory;
  Example example(5, CombineMode::kSum);
  absl::StatusOr<grpc::ByteBuffer> message =
      EncodeSlice(example.slice, example.shard, kHiddenSize, absl::Seconds(1));
  v1::RunStepsResponse good;
  ASSERT_TRUE(good.ParseFromString(Bytes(*message)));
  const auto decode = [&](const v1::RunStepsResponse& spoilt) {
    grpc::ByteBuffer arrived = Arrived(spoilt.SerializeAsString(), example.random);
    return DecodeCommand(&arrived, &memory).status();
  };
  ASSERT_TRUE(decode(good).ok());
  using Spoil = void (*)(v1::StepSlice*);
  const std::vector<Spoil> spoils = {
      [](v1::StepSlice* s) { s->mutable_shard()->mutable_data()->push_back('x'); },
      [](v1::StepSlice* s) { s->mutable_shard()->add_shape(1); },
      [](v1::StepSlice* s) { s->mutable_shard()->clear_shape(); },
      [](v1::StepSlice* s) { s->mutable_shard()->set_shape(1, 0); },
      [](v1::StepSlice* s) { s->mutable_shard()->set_shape(0, -1); },
      [](v1::StepSlice* s) { s->mutable_shard()->set_shape(0, int64_t{1} << 62); },
      [](v1::StepSlice* s) { s->mutable_shard()->set_dtype(v1::DATA_TYPE_INT8); },
      [](v1::StepSlice* s) { s->clear_shard(); },
      [](v1::StepSlice* s) { s->set_strategy(v1::DISPATCH_MODE_AUTO); },
      [](v1::StepSlice* s) { s->set_combine(static_cast<v1::Combine>(9)); },
  };
  for (size_t i = 0; i < spoils.size(); ++i) {
    v1::RunStepsResponse spoilt = good;
    spoils[i](spoilt.mutable_slice());
    const absl::Status status = decode(spoilt);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << i << ": " << status;
  }
}

// What is left of a message after a cut or flipped bits is refused or is another valid message;
// then the checks behind the codec see it. Nothing crashes (sanitizers watch).
TEST(StepWireTest, SpoiltMessagesNeverCrash) {
  HostBufferPool memory;
  StepArena arena(&memory);
  for (uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Example example(seed, seed % 2 == 0 ? CombineMode::kSum : CombineMode::kPerExpert);
    absl::StatusOr<grpc::ByteBuffer> message =
        EncodeSlice(example.slice, example.shard, kHiddenSize, absl::Seconds(1));
    ASSERT_TRUE(message.ok());
    const std::string slice_bytes = Bytes(*message);
    const std::string result_bytes = Bytes(*ExampleResult(&arena, 3));
    const auto check = [&](const std::string& bytes) {
      grpc::ByteBuffer arrived = Arrived(bytes, example.random);
      absl::StatusOr<ReceivedCommand> command = DecodeCommand(&arrived, &memory);
      if (command.ok() && command->slice.has_value()) {
        StepSlice& slice = command->slice->slice;
        slice.ep_rank = example.rank;
        slice.ep_size = example.slice.ep_size;
        CheckSlice(slice, example.rank, example.slice.ep_size, example.num_local_experts)
            .IgnoreError();
      }
      DecodeEvent(&arrived, &memory).status().IgnoreError();
    };
    for (const std::string& bytes : {slice_bytes, result_bytes}) {
      for (int i = 0; i < 200; ++i) {
        std::string spoilt =
            bytes.substr(0, i % 4 == 0 ? example.random() % bytes.size() : bytes.size());
        for (uint64_t flips = example.random() % 4; flips > 0 && !spoilt.empty(); --flips) {
          // Mostly in the heads, where the structure is.
          const size_t limit =
              example.random() % 2 == 0 ? std::min<size_t>(spoilt.size(), 64) : spoilt.size();
          spoilt[example.random() % limit] ^= static_cast<char>(1 << (example.random() % 8));
        }
        check(spoilt);
      }
    }
  }
}

}  // namespace
}  // namespace expertmesh
