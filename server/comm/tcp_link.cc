#include "server/comm/tcp_link.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace expertmesh {
namespace {

constexpr int64_t kLowWaterBytes = int64_t{512} << 10;

// The parts of a message that lie in [begin, end), as system calls want them. Returns their number.
template <typename Byte>
int Parts(TcpMessageHeader& header, int64_t header_bytes, Byte* payload, int64_t payload_bytes,
          uint64_t& trailer, int64_t begin, int64_t end, iovec* parts) {
  int num_parts = 0;
  int64_t offset = 0;
  const auto add = [&](void* data, int64_t size) {
    const int64_t from = std::max(begin - offset, int64_t{0});
    const int64_t to = std::min(end - offset, size);
    if (from < to) {
      parts[num_parts++] = {static_cast<char*>(data) + from, static_cast<size_t>(to - from)};
    }
    offset += size;
  };
  add(&header, header_bytes);
  add(const_cast<std::byte*>(payload), payload_bytes);
  add(&trailer, sizeof(trailer));
  return num_parts;
}

// A small rest is worth no system call and no wake-up of the peer of its own.
int64_t SliceEnd(int64_t begin, int64_t total) {
  const int64_t end = begin + TcpLink::kSliceBytes;
  return total - end < TcpLink::kSliceBytes / 4 ? total : end;
}

absl::Status Broken(const char* what) {
  return absl::UnavailableError(absl::StrCat("connection broke: ", what));
}

}  // namespace

template <typename Byte>
void TcpLink::Message<Byte>::Begin(Byte* bytes, int64_t size) {
  payload = bytes;
  payload_bytes = size;
  moved = 0;
  summed = 0;
  checksum.Reset();
  done = false;
}

template <typename Byte>
void TcpLink::Message<Byte>::SumHeader() {
  checksum.Update(reinterpret_cast<const std::byte*>(&header), kHeaderBytes);
}

template <typename Byte>
void TcpLink::Message<Byte>::SumUpTo(int64_t end) {
  if (end <= summed) return;
  checksum.Update(payload + summed, end - summed);
  summed = end;
}

void TcpLink::BeginSend(const TcpMessageHeader& header, const std::byte* payload,
                        int64_t payload_bytes) {
  send_.Begin(payload, payload_bytes);
  send_.header = header;
  send_.SumHeader();
}

void TcpLink::BeginReceive(std::byte* payload, int64_t payload_bytes) {
  receive_.Begin(payload, payload_bytes);
  header_checked_ = false;
}

absl::StatusOr<bool> TcpLink::Send() {
  if (send_.done) return false;
  const int64_t limit = SliceEnd(send_.moved, send_.total());
  const int64_t payload_end = std::clamp(limit - kHeaderBytes, int64_t{0}, send_.payload_bytes);
  send_.SumUpTo(payload_end);
  if (payload_end == send_.payload_bytes) send_.trailer = send_.checksum.Finish();
  iovec parts[3];
  msghdr message = {};
  message.msg_iov = parts;
  message.msg_iovlen = Parts(send_.header, kHeaderBytes, send_.payload, send_.payload_bytes,
                             send_.trailer, send_.moved, limit, parts);
  ssize_t moved;
  do {
    moved = sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (moved < 0 && errno == EINTR);
  if (moved < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
    return Broken(strerror(errno));
  }
  send_.moved += moved;
  send_.done = send_.moved == send_.total();
  return true;
}

// Of a large payload, lets the socket be readable only once a good piece of it is there, so that
// the thread that waits is not woken for every packet.
void TcpLink::WaitForBytes() {
  const int64_t low_water =
      receive_.done ? 1 : std::clamp(receive_.total() - receive_.moved, int64_t{1}, kLowWaterBytes);
  // A small message is worth no system call.
  if (low_water == low_water_ || (low_water < kLowWaterBytes && low_water_ == 1)) return;
  const auto value = static_cast<int>(low_water);
  if (setsockopt(fd_.get(), SOL_SOCKET, SO_RCVLOWAT, &value, sizeof(value)) == 0) {
    low_water_ = low_water;
  }
}

absl::StatusOr<bool> TcpLink::Receive() {
  if (receive_.done || (header_received() && !header_checked_)) return false;
  const int64_t limit = SliceEnd(receive_.moved, receive_.total());
  iovec parts[3];
  msghdr message = {};
  message.msg_iov = parts;
  message.msg_iovlen =
      Parts(receive_.header, kHeaderBytes, receive_.payload, receive_.payload_bytes,
            receive_.trailer, receive_.moved, limit, parts);
  ssize_t moved;
  do {
    moved = recvmsg(fd_.get(), &message, MSG_DONTWAIT);
  } while (moved < 0 && errno == EINTR);
  if (moved < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      WaitForBytes();
      return false;
    }
    return Broken(strerror(errno));
  }
  if (moved == 0) return Broken("closed by the peer");
  const bool had_header = header_received();
  receive_.moved += moved;
  if (!had_header && header_received()) receive_.SumHeader();
  receive_.SumUpTo(std::clamp(receive_.moved - kHeaderBytes, int64_t{0}, receive_.payload_bytes));
  receive_.done = receive_.moved == receive_.total();
  if (receive_.done) WaitForBytes();
  return true;
}

}  // namespace expertmesh
