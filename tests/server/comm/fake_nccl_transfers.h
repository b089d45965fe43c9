#ifndef EXPERTMESH_TESTS_SERVER_COMM_FAKE_NCCL_TRANSFERS_H_
#define EXPERTMESH_TESTS_SERVER_COMM_FAKE_NCCL_TRANSFERS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace expertmesh {

// Sends and receives that wait for their other half: they match by group, by pair of ranks and by
// order. A pair that does not match stays for ever, and holds up what comes behind it. Not thread
// safe.
class FakeNcclTransfers {
 public:
  enum class Kind : uint8_t { kPoint, kAllGather, kAllToAll };

  struct Part {
    static Part Send(Kind kind, const void* from, int64_t num_bytes, int32_t peer) {
      return {kind, true, static_cast<const std::byte*>(from), nullptr, num_bytes, peer};
    }
    static Part Receive(Kind kind, void* to, int64_t num_bytes, int32_t peer) {
      return {kind, false, nullptr, static_cast<std::byte*>(to), num_bytes, peer};
    }

    Kind kind = Kind::kPoint;
    bool is_send = false;
    const std::byte* from = nullptr;
    std::byte* to = nullptr;
    int64_t num_bytes = 0;
    int32_t peer = 0;
    bool over = false;
  };

  // `parts` of that rank must stay where they are until they are withdrawn.
  void Post(const std::string& group, int32_t rank, std::vector<Part>& parts);
  void Withdraw(const std::string& group, int32_t rank, std::vector<Part>& parts);

 private:
  using Channel = std::pair<std::string, std::pair<int32_t, int32_t>>;  // group; sender, receiver
  struct Waiting {
    std::deque<Part*> sends;
    std::deque<Part*> receives;
  };

  Waiting& WaitingWith(const std::string& group, int32_t rank, const Part& part);
  static void Match(Waiting& waiting);

  std::map<Channel, Waiting> channels_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_COMM_FAKE_NCCL_TRANSFERS_H_
