#ifndef EXPERTMESH_TESTS_INTEGRATION_HTTP2_SOCKET_H_
#define EXPERTMESH_TESTS_INTEGRATION_HTTP2_SOCKET_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/time/time.h"

namespace expertmesh {

// A client on loopback that speaks just enough HTTP/2 to misbehave as no gRPC client can be made
// to. Answers nothing by itself. Not thread safe.
class Http2Socket {
 public:
  enum FrameType : uint8_t {
    kData = 0,
    kHeaders = 1,
    kResetStream = 3,
    kSettings = 4,
    kPing = 6,
    kGoAway = 7
  };
  struct Frame {
    uint8_t type = 0;
    uint8_t flags = 0;
    std::string payload;
  };

  // Connects and sends the connection preface with empty SETTINGS.
  explicit Http2Socket(int port);
  ~Http2Socket();
  Http2Socket(const Http2Socket&) = delete;
  Http2Socket& operator=(const Http2Socket&) = delete;

  // False when the server has closed the connection.
  bool Send(FrameType type, uint8_t flags, const std::string& payload);
  // A unary gRPC call on stream 1. The message must fit HTTP/2's initial window, 65,535 bytes; so
  // must what the server answers, or it waits for a WINDOW_UPDATE that never comes.
  bool SendCall(const std::string& method, const std::string& message);
  // Blocks for the next frame; nothing after the end of the connection or at the deadline.
  std::optional<Frame> Read(absl::Time deadline);
  // The next frame of that type.
  std::optional<Frame> ReadUntil(FrameType type, absl::Time deadline);
  // After Read found nothing: because the server closed the connection.
  bool is_closed() const { return is_closed_; }

 private:
  bool SendFrame(FrameType type, uint8_t flags, uint8_t stream, const std::string& payload);
  bool Fill(size_t num_bytes, absl::Time deadline);

  int fd_ = -1;
  bool is_closed_ = false;
  std::string buffered_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_INTEGRATION_HTTP2_SOCKET_H_
