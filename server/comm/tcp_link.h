#ifndef EXPERTMESH_SERVER_COMM_TCP_LINK_H_
#define EXPERTMESH_SERVER_COMM_TCP_LINK_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/comm/payload_checksum.h"
#include "server/comm/unique_fd.h"

namespace expertmesh {

// In front of every payload; a checksum of header and payload is behind it, where the sender can
// compute it while the payload passes through its cache. Both together are 64 bytes in the
// payload's own message. Little-endian, as every machine this runs on.
struct TcpMessageHeader {
  // Changes with every change of the format; and so does kRankProtocolVersion, so that ranks that
  // would not understand each other are refused when they join.
  static constexpr uint32_t kMagic = 0x32584d45;  // "EMX2"

  uint32_t magic = kMagic;
  uint32_t operation = 0;
  uint64_t incarnation = 0;
  uint64_t epoch = 0;
  uint64_t step = 0;
  uint64_t kind = 0;
  uint64_t payload_bytes = 0;
  uint64_t imbalance = 0;  // TcpOperation::Imbalance of the sender
};
static_assert(sizeof(TcpMessageHeader) == 56);

// One peer's connection: at most one message out and one in at a time, without ever blocking. Not
// thread safe.
class TcpLink {
 public:
  // Bytes that one call of Send or Receive moves, give or take a quarter: so that no peer keeps the
  // others waiting, and what is summed is still in the cache when it is moved, or the other way
  // round.
  static constexpr int64_t kSliceBytes = int64_t{512} << 10;

  // Takes over a connected, non-blocking socket.
  explicit TcpLink(UniqueFd fd) : fd_(std::move(fd)) {}

  int fd() const { return fd_.get(); }
  void Close() { fd_.reset(); }

  // `payload` must stay as it is until sent(), or Close.
  void BeginSend(const TcpMessageHeader& header, const std::byte* payload, int64_t payload_bytes);
  // `payload` is written up to payload_bytes, whatever the peer sends.
  void BeginReceive(std::byte* payload, int64_t payload_bytes);

  // False when the socket takes no more for now, or nothing is left to send. UNAVAILABLE when the
  // connection broke.
  absl::StatusOr<bool> Send();
  // False when nothing more is there for now, or nothing is left to receive. Stops once behind the
  // header, which the caller must check (header(), then set_header_checked()) before the rest is
  // waited for. UNAVAILABLE when the connection broke.
  absl::StatusOr<bool> Receive();

  bool sent() const { return send_.done; }
  bool received() const { return receive_.done; }
  bool header_received() const { return receive_.moved >= kHeaderBytes; }
  bool header_checked() const { return header_checked_; }
  void set_header_checked() { header_checked_ = true; }
  const TcpMessageHeader& header() const { return receive_.header; }
  // Of a received message whose header was checked.
  bool checksum_matches() const { return receive_.checksum.Finish() == receive_.trailer; }

 private:
  static constexpr int64_t kHeaderBytes = sizeof(TcpMessageHeader);
  static constexpr int64_t kTrailerBytes = sizeof(uint64_t);

  template <typename Byte>
  struct Message {
    TcpMessageHeader header;
    Byte* payload = nullptr;
    int64_t payload_bytes = 0;
    uint64_t trailer = 0;
    int64_t moved = 0;   // of header, payload and trailer together
    int64_t summed = 0;  // of the payload
    PayloadChecksum checksum;
    bool done = true;

    void Begin(Byte* bytes, int64_t size);
    void SumHeader();
    // Of the payload, all before `end`.
    void SumUpTo(int64_t end);
    int64_t total() const { return kHeaderBytes + payload_bytes + kTrailerBytes; }
  };

  void WaitForBytes();

  UniqueFd fd_;
  int64_t low_water_ = 1;  // the socket is readable from so many bytes on
  Message<const std::byte> send_;
  Message<std::byte> receive_;
  bool header_checked_ = false;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_TCP_LINK_H_
