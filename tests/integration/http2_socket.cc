#include "tests/integration/http2_socket.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"

namespace expertmesh {
namespace {

constexpr char kPreface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr size_t kMaxFrameBytes = 16384;
constexpr uint8_t kEndStream = 1;
constexpr uint8_t kEndHeaders = 4;
constexpr size_t kHeadBytes = 9;  // length (3), type, flags, stream (4)

}  // namespace

Http2Socket::Http2Socket(int port) {
  fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_EQ(send(fd_, kPreface, sizeof(kPreface) - 1, MSG_NOSIGNAL),
            static_cast<ssize_t>(sizeof(kPreface) - 1));
  EXPECT_TRUE(Send(kSettings, 0, ""));
}

Http2Socket::~Http2Socket() { close(fd_); }

bool Http2Socket::Send(FrameType type, uint8_t flags, const std::string& payload) {
  return SendFrame(type, flags, 0, payload);
}

bool Http2Socket::SendCall(const std::string& method, const std::string& message) {
  std::string headers;
  for (const auto& [name, value] : {std::pair<std::string, std::string>{":method", "POST"},
                                    {":scheme", "http"},
                                    {":path", method},
                                    {":authority", "localhost"},
                                    {"content-type", "application/grpc"},
                                    {"te", "trailers"}}) {
    // HPACK's literal without indexing; lengths below 127 are one byte.
    headers += '\0';
    headers += static_cast<char>(name.size());
    headers += name;
    headers += static_cast<char>(value.size());
    headers += value;
  }
  if (!SendFrame(kHeaders, kEndHeaders, 1, headers)) return false;
  const size_t size = message.size();
  std::string body = {0, static_cast<char>(size >> 24), static_cast<char>(size >> 16),
                      static_cast<char>(size >> 8), static_cast<char>(size)};
  body += message;
  for (size_t begin = 0; begin < body.size(); begin += kMaxFrameBytes) {
    const bool is_last = body.size() - begin <= kMaxFrameBytes;
    if (!SendFrame(kData, is_last ? kEndStream : 0, 1, body.substr(begin, kMaxFrameBytes))) {
      return false;
    }
  }
  return true;
}

bool Http2Socket::SendFrame(FrameType type, uint8_t flags, uint8_t stream,
                            const std::string& payload) {
  const size_t size = payload.size();
  std::string frame = {static_cast<char>(size >> 16),
                       static_cast<char>(size >> 8),
                       static_cast<char>(size),
                       static_cast<char>(type),
                       static_cast<char>(flags),
                       0,
                       0,
                       0,
                       static_cast<char>(stream)};
  frame += payload;
  return send(fd_, frame.data(), frame.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(frame.size());
}

bool Http2Socket::Fill(size_t num_bytes, absl::Time deadline) {
  while (buffered_.size() < num_bytes) {
    pollfd poll_fd = {fd_, POLLIN, 0};
    const int64_t wait = std::max<int64_t>(0, absl::ToInt64Milliseconds(deadline - absl::Now()));
    if (poll(&poll_fd, 1, static_cast<int>(wait)) <= 0) return false;
    char chunk[4096];
    const ssize_t got = recv(fd_, chunk, sizeof(chunk), 0);
    if (got <= 0) {
      is_closed_ = true;
      return false;
    }
    buffered_.append(chunk, static_cast<size_t>(got));
  }
  return true;
}

std::optional<Http2Socket::Frame> Http2Socket::Read(absl::Time deadline) {
  if (!Fill(kHeadBytes, deadline)) return std::nullopt;
  const auto byte = [this](size_t i) { return static_cast<uint8_t>(buffered_[i]); };
  const size_t size = size_t{byte(0)} << 16 | size_t{byte(1)} << 8 | byte(2);
  Frame frame{byte(3), byte(4), ""};
  if (!Fill(kHeadBytes + size, deadline)) return std::nullopt;
  frame.payload = buffered_.substr(kHeadBytes, size);
  buffered_.erase(0, kHeadBytes + size);
  return frame;
}

std::optional<Http2Socket::Frame> Http2Socket::ReadUntil(FrameType type, absl::Time deadline) {
  while (std::optional<Frame> frame = Read(deadline)) {
    if (frame->type == type) return frame;
  }
  return std::nullopt;
}

}  // namespace expertmesh
