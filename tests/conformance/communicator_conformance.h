#ifndef EXPERTMESH_TESTS_CONFORMANCE_COMMUNICATOR_CONFORMANCE_H_
#define EXPERTMESH_TESTS_CONFORMANCE_COMMUNICATOR_CONFORMANCE_H_

// What every Communicator must do. Include it in one test file per implementation and instantiate
// CommunicatorConformance with a factory.

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/conformance/communicator_conformance_fixture.h"

namespace expertmesh {

TEST_P(CommunicatorConformance, KnowsItsPlace) {
  ASSERT_EQ(static_cast<int32_t>(ranks_.size()), ep_size());
  for (int32_t self = 0; self < ep_size(); ++self) {
    EXPECT_EQ(ranks_[self].communicator->ep_rank(), self);
    EXPECT_EQ(ranks_[self].communicator->ep_size(), ep_size());
  }
}

TEST_P(CommunicatorConformance, ManyRoundsOfRandomSizes) {
  const uint64_t seed = 1234;
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::vector<std::vector<int64_t>> sent(ep_size(), std::vector<int64_t>(ep_size()));
  for (uint64_t round = 0; round < 60; ++round) {
    const auto bytes = RandomBytes(random, round % 10 == 9 ? 300000 : 700);
    PrepareAllToAll(bytes, round);
    Run(
        ep_size(), [&](int32_t self) { return PostAllToAll(self, MakeTag(round, 0)); },
        [&](int32_t self, const absl::Status& status) {
          EXPECT_TRUE(status.ok()) << status;
          ExpectAllToAllResult(self, bytes, round);
        });
    ASSERT_FALSE(HasFailure());
    for (int32_t self = 0; self < ep_size(); ++self) {
      for (int32_t peer = 0; peer < ep_size(); ++peer) {
        if (peer != self) sent[self][peer] += bytes[self][peer];
      }
      EXPECT_THAT(ranks_[self].communicator->bytes_sent(), ::testing::ElementsAreArray(sent[self]));
    }
  }
}

// Whoever stands at an operation waits for the rank that comes last, and its clock says for how
// long.
TEST_P(CommunicatorConformance, CountsTheWaitForALateRank) {
  if (GetParam().drive == CommunicatorDrive::kThreadedStreams) {
    GTEST_SKIP() << "nobody knows when a stream's thread reaches an operation";
  }
  EXPECT_THAT(ranks_[0].communicator->wait_nanos(), ::testing::Each(0));
  PrepareAllToAll(EqualBytes(100), 1);
  const int32_t last = ep_size() - 1;
  for (int32_t self = 0; self < last; ++self) {
    ASSERT_TRUE(PostAllToAll(self, MakeTag(1, 0)).ok());
  }
  const absl::Time all_wait = absl::Now();
  while (absl::Now() < all_wait + absl::Milliseconds(20)) {
  }
  const int64_t waited = absl::ToInt64Nanoseconds(absl::Now() - all_wait);
  ASSERT_TRUE(PostAllToAll(last, MakeTag(1, 0)).ok());
  for (int32_t self = 0; self < ep_size(); ++self) {
    ASSERT_TRUE(ranks_[self].stream->Wait(Soon()).ok());
    const std::vector<int64_t> waits = ranks_[self].communicator->wait_nanos();
    EXPECT_EQ(waits[self], 0);
    EXPECT_THAT(waits, ::testing::Each(::testing::Ge(0)));
    if (self == last) continue;
    EXPECT_GE(waits[last], waited * 9 / 10) << "rank " << self;
  }
}

// The second operation is posted before anyone waited for the first, and reads what that received.
TEST_P(CommunicatorConformance, FollowsTheOrderOfItsStream) {
  const auto bytes = EqualBytes(40);
  PrepareAllToAll(bytes, 1);
  std::vector<std::vector<std::byte>> back(ep_size());
  for (std::vector<std::byte>& buffer : back) buffer.resize(40 * ep_size());
  const auto post_second = [&](int32_t self) {
    Rank& rank = ranks_[self];
    AllToAllVParams params;
    params.tag = MakeTag(1, 1);
    params.send = rank.receive.data();
    params.send_bytes = rank.receive_bytes;
    params.receive = back[self].data();
    params.receive_bytes = rank.send_bytes;
    return rank.communicator->AllToAllV(params, *rank.stream);
  };
  const auto check = [&](int32_t self, const absl::Status& status) {
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(back[self] == ranks_[self].send) << "rank " << self;
  };
  if (GetParam().drive == CommunicatorDrive::kOneThread) {
    // All ranks post an operation before any posts the next one.
    for (int32_t self = 0; self < ep_size(); ++self) {
      ASSERT_TRUE(PostAllToAll(self, MakeTag(1, 0)).ok());
    }
    Run(ep_size(), post_second, check);
    return;
  }
  Run(
      ep_size(),
      [&](int32_t self) {
        absl::Status status = PostAllToAll(self, MakeTag(1, 0));
        status.Update(post_second(self));
        return status;
      },
      check);
}

TEST_P(CommunicatorConformance, AllGatherV) {
  std::mt19937_64 random(77);
  for (uint64_t round = 0; round < 20; ++round) {
    std::vector<int64_t> counts;
    for (int32_t self = 0; self < ep_size(); ++self) {
      counts.push_back(random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % 5000));
    }
    std::vector<std::byte> expected;
    for (int32_t self = 0; self < ep_size(); ++self) {
      std::vector<std::byte>& send = ranks_[self].send;
      send.clear();
      AppendPayload(self, 0, round, counts[self], &send);
      expected.insert(expected.end(), send.begin(), send.end());
    }
    Run(
        ep_size(),
        [&](int32_t self) {
          Rank& rank = ranks_[self];
          rank.receive.assign(expected.size(), kGuard);
          AllGatherVParams params;
          params.tag = MakeTag(round, 2);
          params.send = rank.send.data();
          params.receive = rank.receive.data();
          params.receive_bytes = counts;
          return rank.communicator->AllGatherV(params, *rank.stream);
        },
        [&](int32_t self, const absl::Status& status) {
          EXPECT_TRUE(status.ok()) << status;
          EXPECT_TRUE(ranks_[self].receive == expected) << "rank " << self;
        });
    ASSERT_FALSE(HasFailure());
  }
}

TEST_P(CommunicatorConformance, BarrierHoldsUntilTheLastRank) {
  std::vector<Event> passed(ep_size());
  const auto post = [&](int32_t self) {
    Rank& rank = ranks_[self];
    absl::Status status = rank.communicator->Barrier(MakeTag(1, 0), *rank.stream);
    status.Update(rank.stream->Record(passed[self]));
    return status;
  };
  const int32_t last = ep_size() - 1;
  for (int32_t self = 0; self < last; ++self) ASSERT_TRUE(post(self).ok());
  for (int32_t self = 0; self < last; ++self) EXPECT_FALSE(passed[self].done());
  ASSERT_TRUE(post(last).ok());
  for (int32_t self = 0; self < ep_size(); ++self) {
    EXPECT_TRUE(ranks_[self].stream->Wait(Soon()).ok());
    EXPECT_TRUE(passed[self].done());
  }
}

// Two threads of each rank call operations that have places, each rank in an order of its own; some
// places stay empty, some have several operations.
TEST_P(CommunicatorConformance, PlacesOrderOperationsHoweverTheyAreCalled) {
  constexpr int64_t kPlaces = 24;
  const uint64_t seed = 4321;
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  struct Operation {
    std::unique_ptr<Stream> stream;
    std::vector<std::byte> send;
    std::vector<std::byte> receive;
    std::vector<int64_t> counts;
    absl::Status posted;
  };
  std::vector<int> num_operations;
  std::vector<std::vector<int64_t>> sequences(ep_size());
  std::vector<std::vector<std::vector<Operation>>> operations(ep_size());
  for (int64_t place = 0; place < kPlaces; ++place) {
    num_operations.push_back(static_cast<int>(random() % 3));
    for (int32_t self = 0; self < ep_size(); ++self) {
      sequences[self].push_back(place);
      operations[self].emplace_back();
    }
    for (int i = 0; i < num_operations[place]; ++i) {
      std::vector<int64_t> counts;
      for (int32_t self = 0; self < ep_size(); ++self) {
        counts.push_back(static_cast<int64_t>(random() % 20000));
      }
      for (int32_t self = 0; self < ep_size(); ++self) {
        Operation& operation = operations[self].back().emplace_back();
        operation.stream = NewStream();
        operation.counts = counts;
        AppendPayload(self, 0, place * 2 + i, counts[self], &operation.send);
        operation.receive.resize(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
      }
    }
  }
  const auto call = [&](int32_t self, size_t first, size_t step) {
    Communicator& communicator = *ranks_[self].communicator;
    for (size_t at = first; at < sequences[self].size(); at += step) {
      const int64_t place = sequences[self][at];
      for (Operation& operation : operations[self][place]) {
        AllGatherVParams params;
        params.tag = MakeTag(place / 2, 0);
        params.tag.order = place;
        params.send = operation.send.data();
        params.receive = operation.receive.data();
        params.receive_bytes = operation.counts;
        operation.posted = communicator.AllGatherV(params, *operation.stream);
      }
      communicator.CloseOrder(place);
    }
  };
  std::vector<std::thread> threads;
  for (int32_t self = 0; self < ep_size(); ++self) {
    std::shuffle(sequences[self].begin(), sequences[self].end(), random);
    if (GetParam().drive == CommunicatorDrive::kOneThread) {
      call(self, 0, 1);
      continue;
    }
    for (size_t half = 0; half < 2; ++half) threads.emplace_back(call, self, half, 2);
  }
  for (std::thread& thread : threads) thread.join();
  for (int64_t place = 0; place < kPlaces; ++place) {
    for (int i = 0; i < num_operations[place]; ++i) {
      std::vector<std::byte> expected;
      for (int32_t self = 0; self < ep_size(); ++self) {
        const std::vector<std::byte>& sent = operations[self][place][i].send;
        expected.insert(expected.end(), sent.begin(), sent.end());
      }
      for (int32_t self = 0; self < ep_size(); ++self) {
        Operation& operation = operations[self][place][i];
        ASSERT_TRUE(operation.posted.ok()) << operation.posted;
        const absl::Status status = operation.stream->Wait(Soon());
        ASSERT_TRUE(status.ok()) << status;
        ASSERT_TRUE(operation.receive == expected) << "rank " << self << " place " << place;
      }
    }
  }
}

TEST_P(CommunicatorConformance, WrongCountsFailEveryRank) {
  if (ep_size() == 1) return;  // no peer
  // Rank 0 promises the last rank one byte more or less than that expects, or the other way round.
  for (const int64_t difference : {1, -1}) {
    for (const bool sender : {false, true}) {
      MakeRanks();
      PrepareAllToAll(EqualBytes(64), 1);
      if (sender) {
        ranks_.front().send_bytes.back() += difference;
        ranks_.front().send.resize(64 * ep_size() + 1);
      } else {
        ranks_.back().receive_bytes.front() += difference;
      }
      Run(
          ep_size(), [&](int32_t self) { return PostAllToAll(self, MakeTag(1, 0)); },
          [&](int32_t self, const absl::Status& status) {
            EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss)
                << "rank " << self << ": " << status;
            EXPECT_THAT(std::vector<std::byte>(ranks_[self].receive.end() - kGuardBytes + 1,
                                               ranks_[self].receive.end()),
                        ::testing::Each(kGuard));
          });
      ExpectAllBroken(absl::StatusCode::kDataLoss);
    }
  }
}

TEST_P(CommunicatorConformance, WrongTagsFailEveryRank) {
  if (ep_size() == 1) return;  // no peer
  for (int field = 0; field < 4; ++field) {
    MakeRanks();
    PrepareAllToAll(EqualBytes(64), 1);
    Run(
        ep_size(),
        [&](int32_t self) {
          CollectiveTag tag = MakeTag(1, 0);
          if (self == ep_size() / 2) {
            if (field == 0) ++tag.incarnation;
            if (field == 1) ++tag.epoch;
            if (field == 2) ++tag.step;
            if (field == 3) ++tag.operation;
          }
          return PostAllToAll(self, tag);
        },
        [&](int32_t self, const absl::Status& status) {
          EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss)
              << "rank " << self << ": " << status;
        });
    ExpectAllBroken(absl::StatusCode::kDataLoss);
  }
}

TEST_P(CommunicatorConformance, InvalidCountsBreakTheGroup) {
  PrepareAllToAll(EqualBytes(8), 1);
  ranks_[0].send_bytes.back() = -1;
  EXPECT_EQ(PostAllToAll(0, MakeTag(1, 0)).code(), absl::StatusCode::kInvalidArgument);
  ExpectAllBroken(absl::StatusCode::kDataLoss);
}

TEST_P(CommunicatorConformance, AbortBeforeAnOperation) {
  ranks_.back().communicator->Abort(absl::InternalError("why"));
  ranks_.front().communicator->Abort(absl::InternalError("again"));
  PrepareAllToAll(EqualBytes(8), 1);
  Run(
      ep_size(), [&](int32_t self) { return PostAllToAll(self, MakeTag(1, 0)); },
      [&](int32_t, const absl::Status& status) {
        EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
        // The first reason that reaches a rank; in another process that may be the later one.
        EXPECT_THAT(std::string(status.message()),
                    ::testing::AnyOf(::testing::HasSubstr("why"), ::testing::HasSubstr("again")));
      });
}

TEST_P(CommunicatorConformance, AbortEndsPendingOperations) {
  if (ep_size() == 1) return;  // no peer
  // All ranks but the last are in the operation when the last one gives up.
  PrepareAllToAll(EqualBytes(8), 1);
  for (int32_t self = 0; self + 1 < ep_size(); ++self) {
    ASSERT_TRUE(PostAllToAll(self, MakeTag(1, 0)).ok());
  }
  std::thread aborter([&] { ranks_.back().communicator->Abort(absl::InternalError("why")); });
  for (int32_t self = 0; self + 1 < ep_size(); ++self) {
    const absl::Status status = ranks_[self].stream->Wait(Soon());
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  }
  aborter.join();
  ExpectAllBroken(absl::StatusCode::kAborted);
}

// Whenever it comes, an abort either lets a rank's operation finish whole or fails it, and after it
// has returned no buffer is touched: they are freed at once.
TEST_P(CommunicatorConformance, AbortDuringOperations) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    MakeRanks();
    const auto bytes = EqualBytes(20000);
    PrepareAllToAll(bytes, seed);
    const auto aborting_rank = static_cast<int32_t>(random() % ep_size());
    std::thread aborter(
        [&] { ranks_[aborting_rank].communicator->Abort(absl::InternalError("why")); });
    Run(
        ep_size(), [&](int32_t self) { return PostAllToAll(self, MakeTag(1, 0)); },
        [&](int32_t self, const absl::Status& status) {
          if (status.ok()) {
            ExpectAllToAllResult(self, bytes, seed);
          } else {
            EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
          }
        });
    aborter.join();
    for (Rank& rank : ranks_) {
      rank.send = std::vector<std::byte>();
      rank.receive = std::vector<std::byte>();
    }
    ASSERT_FALSE(HasFailure());
  }
}

TEST_P(CommunicatorConformance, DeadlineOfAWaitThatAPeerNeverJoins) {
  if (ep_size() == 1) return;  // no peer
  PrepareAllToAll(EqualBytes(8), 1);
  Run(
      ep_size() - 1, [&](int32_t self) { return PostAllToAll(self, MakeTag(1, 0)); },
      [&](int32_t, const absl::Status& status) {
        EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
      },
      absl::Now() + absl::Milliseconds(10));
  ranks_.front().communicator->Abort(absl::DeadlineExceededError("step"));
  for (int32_t self = 0; self + 1 < ep_size(); ++self) {
    EXPECT_EQ(ranks_[self].stream->Wait(Soon()).code(), absl::StatusCode::kAborted);
  }
}

TEST_P(CommunicatorConformance, ALostPeerFailsTheOthers) {
  if (ep_size() == 1) return;  // no peer
  PrepareAllToAll(EqualBytes(8), 1);
  for (int32_t self = 0; self + 1 < ep_size(); ++self) {
    ASSERT_TRUE(PostAllToAll(self, MakeTag(1, 0)).ok());
  }
  ranks_.back().communicator.reset();
  for (int32_t self = 0; self + 1 < ep_size(); ++self) {
    const absl::Status status = ranks_[self].stream->Wait(Soon());
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  }
}

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_CONFORMANCE_COMMUNICATOR_CONFORMANCE_H_
