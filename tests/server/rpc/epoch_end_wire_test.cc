#include "server/rpc/epoch_end_wire.h"

#include <gtest/gtest.h>

namespace expertmesh {
namespace {

TEST(EpochEndWireTest, EveryKindAndReasonCrosses) {
  for (const EpochEndKind kind :
       {EpochEndKind::kLoss, EpochEndKind::kRankLeft, EpochEndKind::kControlPlaneStops}) {
    // A text never tells the kind.
    const EpochEnd end{kind, absl::UnavailableError("rank 1 left")};
    const v1::EpochEnd message = EpochEndToWire(7, end);
    EXPECT_EQ(message.epoch(), 7u);
    const EpochEnd received = EpochEndFromWire(message);
    EXPECT_EQ(received.kind, kind);
    EXPECT_EQ(received.is_wanted(), kind != EpochEndKind::kLoss);
    EXPECT_EQ(received.reason, end.reason);
  }
}

TEST(EpochEndWireTest, AnUnknownKindIsALoss) {
  v1::EpochEnd message;
  message.set_reason("rank 1 left");
  EXPECT_FALSE(EpochEndFromWire(message).is_wanted());
  message.set_kind(static_cast<v1::EpochEndKind>(99));
  EXPECT_FALSE(EpochEndFromWire(message).is_wanted());
}

}  // namespace
}  // namespace expertmesh
