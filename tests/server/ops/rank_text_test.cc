#include "server/ops/rank_text.h"

#include <gtest/gtest.h>

#include "server/ops/call_error.h"

namespace expertmesh {
namespace {

TEST(RankTextTest, NamesTheRankOnce) {
  EXPECT_EQ(RankText(1, "its stream ended"), "rank 1: its stream ended");
  EXPECT_EQ(RankText(1, "rank 1 is gone"), "rank 1 is gone");
  EXPECT_EQ(RankText(1, "rank 1: out of memory"), "rank 1: out of memory");
  EXPECT_EQ(RankText(1, "rank 12 is gone"), "rank 1: rank 12 is gone");
  EXPECT_EQ(RankText(1, "rank 2 is gone"), "rank 1: rank 2 is gone");
  EXPECT_EQ(RankText(1, "was lost", "its stream ended"), "rank 1 was lost: its stream ended");
  EXPECT_EQ(RankText(1, "was lost", "rank 1 gave 3 rows"), "rank 1 was lost: it gave 3 rows");
  EXPECT_EQ(RankText(1, "was lost", "rank 1: out of memory"), "rank 1 was lost: out of memory");
  EXPECT_EQ(RankText(1, "was lost", "rank 1"), "rank 1 was lost: it");
}

TEST(RankTextTest, AnErrorComesWithItsCodeButNotWithItsDetails) {
  EXPECT_EQ(RankText(3, "aborted", CallError(ErrorReason::kStepLost, "rank 0 left")),
            "rank 3 aborted: UNAVAILABLE: rank 0 left");
  EXPECT_EQ(RankText(3, "aborted", absl::NotFoundError("rank 3 holds no layer 7")),
            "rank 3 aborted: NOT_FOUND: it holds no layer 7");
}

}  // namespace
}  // namespace expertmesh
