#ifndef EXPERTMESH_TESTS_SERVER_COMM_NCCL_SOCKET_LINKS_H_
#define EXPERTMESH_TESTS_SERVER_COMM_NCCL_SOCKET_LINKS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "server/comm/unique_fd.h"

namespace expertmesh {

// One rank's end of a group whose ranks are processes of this machine: a Unix socket to each of the
// others, named by the group's unique id, and a thread that serves them. Sends and receives match
// by pair of ranks, in order; a send is over when its receive is. Thread safe.
class NcclSocketLinks : public std::enable_shared_from_this<NcclSocketLinks> {
 public:
  enum class Kind : uint8_t { kPoint, kAllGather, kAllToAll };
  struct Part {
    Kind kind = Kind::kPoint;
    bool is_send = false;
    const std::byte* from = nullptr;  // device memory
    std::byte* to = nullptr;
    int64_t num_bytes = 0;
    int32_t peer = 0;
    std::string bytes;  // what was sent, or has come
    bool over = false;
  };
  // What a group of calls does on the device. It is on the stream, or was, as long as it lives.
  struct Kernel {
    explicit Kernel(std::shared_ptr<NcclSocketLinks> owner);
    ~Kernel();
    Kernel(const Kernel&) = delete;
    Kernel& operator=(const Kernel&) = delete;

    const std::shared_ptr<NcclSocketLinks> links;
    std::vector<std::shared_ptr<Part>> parts;
    bool begun = false;
  };

  struct Params {
    std::string group;
    int32_t num_ranks = 1;
    int32_t rank = 0;
    // As over NVLink, where nobody tells of a process that is gone.
    bool peers_end_silently = false;
  };
  // Begins to look for the others. `*error` says why the system refused; then null.
  static std::shared_ptr<NcclSocketLinks> Start(const Params& params, std::string* error);
  ~NcclSocketLinks();

  int32_t rank() const { return params_.rank; }
  int32_t num_ranks() const { return params_.num_ranks; }

  bool is_connected() const;  // all have come
  std::string error() const;  // empty: none
  bool is_drained() const;    // no kernel lives, and what was sent has left this process

  std::shared_ptr<Kernel> NewKernel();
  // On the device, with its memory open: Begin, then End once IsOver says so.
  void Begin(Kernel& kernel);
  bool IsOver(const Kernel& kernel) const;
  void End(Kernel& kernel);

  // Tells the others that this end's going is no fault.
  void SayFarewell();
  // All kernels are over, and touch no memory any more. Ends the thread and the sockets.
  void Abort();

 private:
  enum class MessageType : uint32_t { kHello, kData, kOver, kFarewell };
  struct Header {
    MessageType type;
    uint32_t kind;  // kHello: the sender's rank
    int64_t num_bytes;
  };
  struct Message {
    Kind kind = Kind::kPoint;
    std::string bytes;
  };
  struct Link {
    UniqueFd fd;
    bool came = false;
    std::string out;
    std::string in;
    bool said_farewell = false;
    std::deque<Message> arrived;
    std::deque<std::shared_ptr<Part>> receives;  // that wait
    std::deque<std::shared_ptr<Part>> sends;     // that are not over
  };

  explicit NcclSocketLinks(const Params& params);
  std::string Listen();
  void Run();
  // Under the lock, all that follow.
  bool ConnectMissing();
  void Accept();
  void Greet(UniqueFd& stranger);
  void Receive(int32_t peer);
  void Flush(int32_t peer);
  void Take(int32_t peer, const Header& header, std::string bytes);
  void Put(int32_t peer, const Header& header, const std::string& bytes);
  void Match(int32_t peer);
  void Lose(int32_t peer);
  bool IsConnectedLocked() const;
  void Wake();

  const Params params_;
  UniqueFd listener_;
  UniqueFd wake_;

  mutable std::mutex mutex_;  // guards what follows
  std::vector<Link> links_;
  std::vector<UniqueFd> strangers_;  // have not said who they are
  std::string error_;
  int64_t num_kernels_ = 0;
  bool aborted_ = false;
  std::thread thread_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_COMM_NCCL_SOCKET_LINKS_H_
