#include "server/comm/tcp_notices.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace expertmesh {
namespace {

// In front of the message.
struct Notice {
  static constexpr uint32_t kMagic = 0x4e584d45;  // "EMXN"
  uint32_t magic = kMagic;
  uint32_t code = 0;
  uint32_t message_bytes = 0;
};

}  // namespace

void TcpNotices::Say(const absl::Status& reason) const {
  if (!fd_.valid()) return;
  const auto message = reason.message().substr(0, kMaxMessageBytes);
  Notice notice;
  notice.code = static_cast<uint32_t>(reason.code());
  notice.message_bytes = static_cast<uint32_t>(message.size());
  const std::string bytes = absl::StrCat(
      absl::string_view(reinterpret_cast<const char*>(&notice), sizeof(notice)), message);
  // Nothing else goes this way, so the socket has room; and if the peer is gone, it needs no word.
  send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

std::optional<absl::Status> TcpNotices::Hear(int32_t ep_rank) {
  while (true) {
    char bytes[1024];
    const ssize_t moved = recv(fd_.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return std::nullopt;
    if (moved <= 0) {
      return absl::UnavailableError(absl::StrCat(
          "rank ", ep_rank, " is lost: ", moved == 0 ? "connection closed" : strerror(errno)));
    }
    heard_.append(bytes, static_cast<size_t>(moved));
    Notice notice;
    if (heard_.size() < sizeof(notice)) continue;
    memcpy(&notice, heard_.data(), sizeof(notice));
    if (notice.magic != Notice::kMagic || notice.message_bytes > kMaxMessageBytes ||
        notice.code == 0 ||
        notice.code > static_cast<uint32_t>(absl::StatusCode::kUnauthenticated)) {
      return absl::DataLossError(absl::StrCat("rank ", ep_rank, " says what cannot be understood"));
    }
    if (heard_.size() < sizeof(notice) + notice.message_bytes) continue;
    return absl::Status(static_cast<absl::StatusCode>(notice.code),
                        heard_.substr(sizeof(notice), notice.message_bytes));
  }
}

}  // namespace expertmesh
