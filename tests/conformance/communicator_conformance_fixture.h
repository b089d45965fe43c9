#ifndef EXPERTMESH_TESTS_CONFORMANCE_COMMUNICATOR_CONFORMANCE_FIXTURE_H_
#define EXPERTMESH_TESTS_CONFORMANCE_COMMUNICATOR_CONFORMANCE_FIXTURE_H_

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/base/stream.h"
#include "server/comm/communicator.h"

namespace expertmesh {

enum class CommunicatorDrive {
  kOneThread,        // one thread posts for all ranks in turn, over inline streams
  kThreadPerRank,    // inline streams
  kThreadedStreams,  // one thread posts, every rank's stream has a thread
};

struct CommunicatorConformanceParam {
  std::string name;
  // Communicators of a new group, all ranks in this process.
  std::function<std::vector<std::unique_ptr<Communicator>>(int32_t ep_size)> make;
  CommunicatorDrive drive = CommunicatorDrive::kThreadPerRank;
  int32_t ep_size = 1;
  // With kThreadedStreams, in the place of host streams with a thread.
  std::function<std::unique_ptr<Stream>()> new_stream = NewThreadedHostStream;
};

// Even, odd and prime numbers of ranks, driven in the given ways.
inline std::vector<CommunicatorConformanceParam> CommunicatorConformanceParams(
    const std::string& name,
    const std::function<std::vector<std::unique_ptr<Communicator>>(int32_t ep_size)>& make,
    const std::vector<CommunicatorDrive>& drives,
    const std::function<std::unique_ptr<Stream>()>& new_stream = NewThreadedHostStream) {
  const char* const drive_names[] = {"one_thread", "thread_per_rank", "threaded_streams"};
  std::vector<CommunicatorConformanceParam> params;
  for (const CommunicatorDrive drive : drives) {
    for (const int32_t ep_size : {1, 2, 3, 4, 7}) {
      params.push_back({name + "_" + drive_names[static_cast<int>(drive)] + "_" +
                            std::to_string(ep_size) + "ranks",
                        make, drive, ep_size, new_stream});
    }
  }
  return params;
}

class CommunicatorConformance : public ::testing::TestWithParam<CommunicatorConformanceParam> {
 protected:
  struct Rank {
    std::unique_ptr<Communicator> communicator;
    std::unique_ptr<Stream> stream;
    std::vector<int64_t> send_bytes;
    std::vector<int64_t> receive_bytes;
    std::vector<std::byte> send;
    std::vector<std::byte> receive;
  };

  void SetUp() override { MakeRanks(); }

  void MakeRanks() {
    ranks_.clear();
    for (std::unique_ptr<Communicator>& communicator : GetParam().make(ep_size())) {
      Rank& rank = ranks_.emplace_back();
      rank.communicator = std::move(communicator);
      rank.stream = NewStream();
    }
  }

  static std::unique_ptr<Stream> NewStream() {
    return GetParam().drive == CommunicatorDrive::kThreadedStreams ? GetParam().new_stream()
                                                                   : NewInlineHostStream();
  }

  int32_t ep_size() const { return GetParam().ep_size; }
  static absl::Time Soon() { return absl::Now() + absl::Seconds(60); }

  // Every rank in [0, num_ranks): post(rank), then wait and check(rank, status), as the drive says.
  void Run(int32_t num_ranks, const std::function<absl::Status(int32_t)>& post,
           const std::function<void(int32_t, const absl::Status&)>& check,
           absl::Time deadline = Soon()) {
    const auto wait = [&](int32_t rank, const absl::Status& posted) {
      const absl::Status waited = ranks_[rank].stream->Wait(deadline);
      check(rank, posted.ok() ? waited : posted);
    };
    if (GetParam().drive == CommunicatorDrive::kThreadPerRank) {
      std::vector<std::thread> threads;
      for (int32_t rank = 0; rank < num_ranks; ++rank) {
        threads.emplace_back([&, rank] { wait(rank, post(rank)); });
      }
      for (std::thread& thread : threads) thread.join();
      return;
    }
    std::vector<absl::Status> posted;
    for (int32_t rank = 0; rank < num_ranks; ++rank) posted.push_back(post(rank));
    for (int32_t rank = 0; rank < num_ranks; ++rank) wait(rank, posted[rank]);
  }

  // Every 32nd byte tells where it stands; enough, and quick under sanitizers.
  static void AppendPayload(int32_t source, int32_t destination, uint64_t round, int64_t count,
                            std::vector<std::byte>* bytes) {
    const size_t begin = bytes->size();
    bytes->resize(begin + count,
                  static_cast<std::byte>(source * 31 + destination * 7 + round * 13 + 1));
    for (int64_t i = 0; i < count; i += 32) {
      (*bytes)[begin + i] ^= static_cast<std::byte>(i / 32 + 1);
    }
  }

  // bytes[source][destination]; fills the send buffers, poisons the receive buffers.
  void PrepareAllToAll(const std::vector<std::vector<int64_t>>& bytes, uint64_t round) {
    for (int32_t self = 0; self < ep_size(); ++self) {
      Rank& rank = ranks_[self];
      rank.send_bytes.clear();
      rank.receive_bytes.clear();
      rank.send.clear();
      int64_t num_received = 0;
      for (int32_t peer = 0; peer < ep_size(); ++peer) {
        rank.send_bytes.push_back(bytes[self][peer]);
        rank.receive_bytes.push_back(bytes[peer][self]);
        num_received += bytes[peer][self];
        AppendPayload(self, peer, round, bytes[self][peer], &rank.send);
      }
      rank.receive.assign(num_received + kGuardBytes, kGuard);
    }
  }

  absl::Status PostAllToAll(int32_t self, const CollectiveTag& tag) {
    Rank& rank = ranks_[self];
    AllToAllVParams params;
    params.tag = tag;
    params.send = rank.send.data();
    params.send_bytes = rank.send_bytes;
    params.receive = rank.receive.data();
    params.receive_bytes = rank.receive_bytes;
    return rank.communicator->AllToAllV(params, *rank.stream);
  }

  void ExpectAllToAllResult(int32_t self, const std::vector<std::vector<int64_t>>& bytes,
                            uint64_t round) {
    std::vector<std::byte> expected;
    for (int32_t peer = 0; peer < ep_size(); ++peer) {
      AppendPayload(peer, self, round, bytes[peer][self], &expected);
    }
    expected.insert(expected.end(), kGuardBytes, kGuard);
    EXPECT_TRUE(ranks_[self].receive == expected) << "rank " << self << " round " << round;
  }

  std::vector<std::vector<int64_t>> RandomBytes(std::mt19937_64& random, int64_t max_bytes) {
    std::vector<std::vector<int64_t>> bytes(ep_size(), std::vector<int64_t>(ep_size()));
    for (std::vector<int64_t>& row : bytes) {
      for (int64_t& count : row) {
        count = random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % max_bytes);
      }
    }
    return bytes;
  }

  std::vector<std::vector<int64_t>> EqualBytes(int64_t count) {
    return std::vector<std::vector<int64_t>>(ep_size(), std::vector<int64_t>(ep_size(), count));
  }

  void ExpectAllBroken(absl::StatusCode code) {
    for (int32_t self = 0; self < ep_size(); ++self) {
      const std::unique_ptr<Stream> stream = NewInlineHostStream();
      absl::Status status = ranks_[self].communicator->Barrier(MakeTag(999, 0), *stream);
      status.Update(stream->Wait(Soon()));
      EXPECT_EQ(status.code(), code) << "rank " << self << ": " << status;
    }
  }

  static CollectiveTag MakeTag(uint64_t step, uint32_t operation) {
    CollectiveTag tag;
    tag.incarnation = 5;
    tag.epoch = 6;
    tag.step = step;
    tag.operation = operation;
    return tag;
  }

  static constexpr int64_t kGuardBytes = 16;  // behind the receive buffer, must stay
  static constexpr std::byte kGuard{0xee};
  std::vector<Rank> ranks_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_CONFORMANCE_COMMUNICATOR_CONFORMANCE_FIXTURE_H_
