#include "server/control/stitching.h"

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/host_buffer_pool.h"
#include "tests/server/control/control_fixture.h"

namespace expertmesh {
namespace {

class StitchingTest : public testing::Test {
 protected:
  static constexpr int64_t kRowBytes = 8 * 4;  // hidden_size 8, float32 in and out

  StepPiece MakePiece(int64_t call_tokens, int64_t first, int64_t count) {
    auto call = std::make_unique<ForwardCall>();
    call->model = &model_;
    call->layer = &model_.layers[0];
    call->num_tokens = call_tokens;
    call->activation_dtype = call->output_dtype = DType::kFloat32;
    call->hidden_states = *pool_.Allocate(call_tokens * kRowBytes);
    return {std::make_shared<PendingCall>(1, std::move(call)), first, count, {}};
  }

  ShardOutput MakeShard(int64_t rows) {
    ShardOutput shard;
    shard.arena = arenas_.Acquire();
    shard.rows = *shard.arena->Allocate(rows * kRowBytes);
    shard.num_rows = rows;
    return shard;
  }

  const ModelSpec model_ = SmallModel();
  HostBufferPool pool_;
  StepArenaPool arenas_{&pool_};
  HeldOutputs held_{int64_t{1} << 20};
};

TEST_F(StitchingTest, EveryTokenFindsItsWayThereAndBack) {
  // 3 + 1 + 4 tokens over shards of 2, 0, 4, 2.
  const std::vector<StepPiece> pieces = {MakePiece(5, 2, 3), MakePiece(1, 0, 1),
                                         MakePiece(9, 0, 4)};
  const std::vector<int64_t> offsets = {0, 2, 2, 6, 8};
  const std::vector<TokenShard> shards = CutShards(pieces, offsets);
  ASSERT_EQ(shards.size(), 4u);
  std::vector<const std::byte*> rows;
  for (size_t rank = 0; rank < shards.size(); ++rank) {
    int64_t count = 0;
    for (const RowSpan& span : shards[rank].rows) {
      EXPECT_GT(span.num_rows, 0);
      for (int64_t i = 0; i < span.num_rows; ++i) rows.push_back(span.data + i * kRowBytes);
      count += span.num_rows;
    }
    EXPECT_EQ(count, offsets[rank + 1] - offsets[rank]);
  }
  std::vector<const std::byte*> expected;
  for (const StepPiece& piece : pieces) {
    for (int64_t i = 0; i < piece.num_tokens; ++i) {
      expected.push_back(piece.call->call->hidden_states.data() +
                         (piece.first_token + i) * kRowBytes);
    }
  }
  EXPECT_EQ(rows, expected);

  std::vector<ShardOutput> outputs;
  for (const int64_t count : {2, 0, 4, 2}) outputs.push_back(MakeShard(count));
  ASSERT_TRUE(StitchOutputs(pieces, offsets, outputs, held_).ok());
  const std::vector<OutputSpan>& first = pieces[0].call->result.output;
  ASSERT_EQ(first.size(), 2u);
  EXPECT_EQ(first[0].data, outputs[0].rows);
  EXPECT_EQ(first[0].size_bytes, 2 * kRowBytes);
  EXPECT_EQ(first[0].owner, outputs[0].arena);
  EXPECT_EQ(first[1].data, outputs[2].rows);
  EXPECT_EQ(first[1].size_bytes, kRowBytes);
  const std::vector<OutputSpan>& second = pieces[1].call->result.output;
  ASSERT_EQ(second.size(), 1u);
  EXPECT_EQ(second[0].data, outputs[2].rows + kRowBytes);
  const std::vector<OutputSpan>& third = pieces[2].call->result.output;
  ASSERT_EQ(third.size(), 2u);
  EXPECT_EQ(third[0].size_bytes, 2 * kRowBytes);
  EXPECT_EQ(third[1].data, outputs[3].rows);
}

TEST_F(StitchingTest, NeighboursInOneArenaAreOneSpan) {
  std::vector<StepPiece> pieces = {MakePiece(4, 0, 2)};
  ShardOutput shared = MakeShard(4);
  ShardOutput first = shared, second = shared, other = MakeShard(2);
  first.num_rows = second.num_rows = 1;
  second.rows += kRowBytes;
  ASSERT_TRUE(StitchOutputs(pieces, {0, 1, 2}, {first, second}, held_).ok());
  ASSERT_EQ(pieces[0].call->result.output.size(), 1u);
  EXPECT_EQ(pieces[0].call->result.output[0].size_bytes, 2 * kRowBytes);
  // The rest of the call comes from another step.
  pieces[0].first_token = 2;
  ASSERT_TRUE(StitchOutputs(pieces, {0, 2}, {other}, held_).ok());
  EXPECT_EQ(pieces[0].call->result.output.size(), 2u);
}

// One output row would keep its whole step's.
TEST_F(StitchingTest, ASmallPartOfAShardDoesNotKeepIt) {
  const std::vector<StepPiece> pieces = {MakePiece(1, 0, 1), MakePiece(90, 0, 90)};
  std::weak_ptr<StepArena> arena;
  {
    ShardOutput shard = MakeShard(91);
    std::memset(const_cast<std::byte*>(shard.rows), 7, 91 * kRowBytes);
    arena = shard.arena;
    ASSERT_TRUE(StitchOutputs(pieces, {0, 91}, {shard}, held_).ok());
    EXPECT_EQ(pieces[1].call->result.output[0].data, shard.rows + kRowBytes);
  }
  EXPECT_EQ(held_.bytes(), 91 * kRowBytes);
  pieces[1].call->result.output.clear();
  EXPECT_TRUE(arena.expired());
  EXPECT_EQ(held_.bytes(), 0);
  const std::vector<OutputSpan>& small = pieces[0].call->result.output;
  ASSERT_EQ(small.size(), 1u);
  ASSERT_EQ(small[0].size_bytes, kRowBytes);
  EXPECT_EQ(small[0].data[kRowBytes - 1], std::byte{7});
}

TEST_F(StitchingTest, LargerPartsAreCopiedOnlyWhenMuchIsHeld) {
  constexpr int64_t kRows = (64 << 10) / kRowBytes + 1;
  for (const bool spent : {false, true}) {
    HeldOutputs held(spent ? 0 : int64_t{1} << 30);
    const std::vector<StepPiece> pieces = {MakePiece(kRows, 0, kRows),
                                           MakePiece(5 * kRows, 0, 5 * kRows)};
    const ShardOutput shard = MakeShard(6 * kRows);
    ASSERT_TRUE(StitchOutputs(pieces, {0, 6 * kRows}, {shard}, held).ok());
    const std::vector<OutputSpan>& output = pieces[0].call->result.output;
    ASSERT_EQ(output.size(), 1u);
    EXPECT_EQ(output[0].data == shard.rows, !spent);
    EXPECT_EQ(output[0].size_bytes, kRows * kRowBytes);
  }
}

TEST_F(StitchingTest, ShardsThatDoNotFitAreRefusedWhole) {
  const std::vector<StepPiece> pieces = {MakePiece(4, 0, 4)};
  EXPECT_EQ(StitchOutputs(pieces, {0, 2, 4}, {MakeShard(2)}, held_).code(),
            absl::StatusCode::kInternal);
  EXPECT_EQ(StitchOutputs(pieces, {0, 2, 4}, {MakeShard(2), MakeShard(1)}, held_).code(),
            absl::StatusCode::kInternal);
  ShardOutput without_rows = MakeShard(2);
  without_rows.rows = nullptr;
  EXPECT_EQ(StitchOutputs(pieces, {0, 2, 4}, {MakeShard(2), without_rows}, held_).code(),
            absl::StatusCode::kInternal);
  EXPECT_TRUE(pieces[0].call->result.output.empty());
}

}  // namespace
}  // namespace expertmesh
