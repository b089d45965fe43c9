// Ranks that are processes, and what becomes of the others when one is killed or stopped.
#include <signal.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/comm/rank_process.h"

namespace expertmesh {
namespace {

constexpr int64_t kLarge = int64_t{64} << 20;

class TcpProcessesTest : public ::testing::TestWithParam<int> {
 protected:
  void Start(int ep_size) {
    for (int rank = 0; rank < ep_size; ++rank) {
      ranks_.push_back(std::make_unique<RankProcess>(store_));
    }
  }
  // Forms the next epoch of all processes.
  void Connect(int operation_timeout_millis = 60000) {
    ++epoch_;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      ranks_[rank]->Command(absl::StrCat("connect ", rank, " ", ranks_.size(), " ", epoch_, " ",
                                         operation_timeout_millis));
    }
    ExpectResults(absl::StatusCode::kOk);
  }
  void CommandAll(const std::string& command) {
    for (auto& rank : ranks_) rank->Command(command);
  }
  void ExpectResults(absl::StatusCode code, int but_rank = -1) {
    for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
      if (rank == but_rank) continue;
      const absl::Status status = ranks_[rank]->Result();
      EXPECT_EQ(status.code(), code) << "rank " << rank << ": " << status;
    }
  }
  // Nobody crashed: every process ends when it is asked to.
  void ExpectCleanExits(int but_rank = -1) {
    for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
      if (rank != but_rank) {
        EXPECT_EQ(ranks_[rank]->ExitCode(), 0) << "rank " << rank;
      }
    }
  }

  InMemoryRendezvousStore store_;
  std::vector<std::unique_ptr<RankProcess>> ranks_;
  int epoch_ = 0;
};

TEST_P(TcpProcessesTest, Exchange) {
  Start(GetParam());
  Connect();
  for (int step = 0; step < 20; ++step) {
    CommandAll(absl::StrCat("uneven ", step, " ", step % 5 == 4 ? 1000000 : 3000));
    ExpectResults(absl::StatusCode::kOk);
  }
  CommandAll("all_to_all 20 0");
  ExpectResults(absl::StatusCode::kOk);
  CommandAll("all_to_all 21 3000000");
  ExpectResults(absl::StatusCode::kOk);
  ExpectCleanExits();
}

TEST_P(TcpProcessesTest, WrongCount) {
  if (GetParam() == 1) GTEST_SKIP() << "no peer";
  Start(GetParam());
  Connect();
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    ranks_[rank]->Command(rank == 0 ? "wrong 1 1000" : "all_to_all 1 1000");
  }
  ExpectResults(absl::StatusCode::kDataLoss);
  // The next epoch of the same processes is unharmed.
  Connect();
  CommandAll("all_to_all 1 1000");
  ExpectResults(absl::StatusCode::kOk);
  ExpectCleanExits();
}

INSTANTIATE_TEST_SUITE_P(Ranks, TcpProcessesTest, ::testing::Values(1, 2, 3, 4, 7));

class TcpLossTest : public TcpProcessesTest {};

TEST_F(TcpLossTest, KilledWhileIdle) {
  Start(3);
  Connect();
  CommandAll("all_to_all 1 1000");
  ExpectResults(absl::StatusCode::kOk);
  ranks_[1]->Signal(SIGKILL);
  EXPECT_EQ(ranks_[1]->ExitCode(), -SIGKILL);
  CommandAll("all_to_all 2 1000");
  ExpectResults(absl::StatusCode::kUnavailable, 1);
  ExpectCleanExits(1);
}

TEST_F(TcpLossTest, KilledInAnOperation) {
  Start(3);
  Connect();
  // Rank 0 never comes, so the others are in the operation for sure.
  for (int rank : {1, 2}) ranks_[rank]->Command("all_to_all 1 1000");
  for (int rank : {1, 2}) ranks_[rank]->AwaitPosted();
  ranks_[1]->Signal(SIGKILL);
  EXPECT_EQ(ranks_[2]->Result().code(), absl::StatusCode::kUnavailable);
  ranks_[0]->Command("all_to_all 1 1000");
  EXPECT_EQ(ranks_[0]->Result().code(), absl::StatusCode::kUnavailable);
  ExpectCleanExits(1);
}

TEST_F(TcpLossTest, ReceiverKilledInALargeOperation) {
  Start(3);
  Connect();
  // A stopped rank reads nothing: the others fill its sockets and are stuck amid the payload.
  ranks_[1]->Signal(SIGSTOP);
  for (int rank : {0, 2}) ranks_[rank]->Command(absl::StrCat("all_to_all 1 ", kLarge));
  for (int rank : {0, 2}) ranks_[rank]->AwaitPosted();
  ranks_[1]->Signal(SIGKILL);
  for (int rank : {0, 2}) {
    EXPECT_EQ(ranks_[rank]->Result().code(), absl::StatusCode::kUnavailable);
  }
  ExpectCleanExits(1);
}

TEST_F(TcpLossTest, SenderKilledInALargeOperation) {
  Start(2);
  Connect();
  ranks_[1]->Command(absl::StrCat("all_to_all 1 ", kLarge));
  ranks_[1]->AwaitPosted();
  ranks_[1]->Signal(SIGKILL);
  EXPECT_EQ(ranks_[1]->ExitCode(), -SIGKILL);
  ranks_[0]->Command(absl::StrCat("all_to_all 1 ", kLarge));
  EXPECT_EQ(ranks_[0]->Result().code(), absl::StatusCode::kUnavailable);
  ExpectCleanExits(1);
}

TEST_F(TcpLossTest, StoppedAndContinuedInTime) {
  Start(3);
  Connect();
  ranks_[1]->Signal(SIGSTOP);
  CommandAll("all_to_all 1 3000000");
  for (int rank : {0, 2}) ranks_[rank]->AwaitPosted();
  ranks_[1]->Signal(SIGCONT);
  ExpectResults(absl::StatusCode::kOk);
  ExpectCleanExits();
}

TEST_F(TcpLossTest, StoppedBeyondTheDeadline) {
  for (const int64_t bytes : {int64_t{1000}, kLarge}) {
    ranks_.clear();
    Start(3);
    Connect(300);
    ranks_[1]->Signal(SIGSTOP);
    const absl::Time start = absl::Now();
    CommandAll(absl::StrCat("all_to_all 1 ", bytes));
    for (int rank : {0, 2}) {
      const absl::Status status = ranks_[rank]->Result();
      EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    }
    // Rank 1 hears of it when it wakes, rather than waiting on its own. What lay in its sockets by
    // then may have been all that it needed, but then its next operation fails.
    ranks_[1]->Signal(SIGCONT);
    absl::Status status = ranks_[1]->Result();
    if (status.ok() && bytes != kLarge) {
      ranks_[1]->Command("all_to_all 2 1000");
      status = ranks_[1]->Result();
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_LT(absl::Now() - start, absl::Seconds(60));
    // And is good for the next epoch.
    Connect();
    CommandAll("all_to_all 1 1000");
    ExpectResults(absl::StatusCode::kOk);
    ExpectCleanExits();
  }
}

TEST_F(TcpLossTest, AbortAndLeaving) {
  Start(3);
  Connect();
  for (int rank : {0, 2}) ranks_[rank]->Command("all_to_all 1 1000");
  for (int rank : {0, 2}) ranks_[rank]->AwaitPosted();
  ranks_[1]->Command("abort");
  EXPECT_TRUE(ranks_[1]->Result().ok());
  for (int rank : {0, 2}) {
    const absl::Status status = ranks_[rank]->Result();
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("told to"));
  }
  Connect();
  for (int rank : {0, 2}) ranks_[rank]->Command("all_to_all 1 1000");
  ranks_[1]->Command("leave");
  EXPECT_TRUE(ranks_[1]->Result().ok());
  for (int rank : {0, 2}) {
    const absl::Status status = ranks_[rank]->Result();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("rank 1 has left"));
  }
  ExpectCleanExits();
}

// Killed at any moment of a stream of operations: each of the others' ends whole or UNAVAILABLE.
TEST_F(TcpLossTest, KilledAtAnyMoment) {
  for (int round = 0; round < 10; ++round) {
    ranks_.clear();
    Start(3);
    Connect();
    bool lost = false;
    for (int step = 0; !lost; ++step) {
      CommandAll(absl::StrCat("all_to_all ", step, " ", round % 2 == 0 ? 2000 : 2000000));
      if (step == round) {
        ranks_[2]->AwaitPosted();
        ranks_[2]->Signal(SIGKILL);
      }
      for (int rank : {0, 1}) {
        const absl::Status status = ranks_[rank]->Result();
        if (status.ok()) continue;
        EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
        lost = true;
      }
      ASSERT_LT(step, 100);
      if (step < round) {
        EXPECT_TRUE(ranks_[2]->Result().ok());
      }
    }
    ExpectCleanExits(2);
  }
}

}  // namespace
}  // namespace expertmesh
