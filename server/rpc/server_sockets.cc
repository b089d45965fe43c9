#include "server/rpc/server_sockets.h"

#include <dirent.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cstdlib>

namespace expertmesh {
namespace {

int PortOf(int fd) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  if (address.ss_family == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port);
  }
  if (address.ss_family == AF_INET) {
    return ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
  }
  return 0;
}

bool IsListener(int fd) {
  int listens = 0;
  socklen_t size = sizeof(listens);
  return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 && listens != 0;
}

template <typename Visit>
void VisitSockets(int port, const Visit& visit) {
  DIR* const fds = port > 0 ? opendir("/proc/self/fd") : nullptr;
  if (fds == nullptr) return;
  while (const dirent* entry = readdir(fds)) {
    const int fd = atoi(entry->d_name);
    if (PortOf(fd) == port) visit(fd);
  }
  closedir(fds);
}

}  // namespace

int64_t UnsentBytes(int port) {
  int64_t unsent = 0;
  VisitSockets(port, [&unsent](int fd) {
    int bytes = 0;
    if (ioctl(fd, SIOCOUTQ, &bytes) == 0) unsent += bytes;
  });
  return unsent;
}

void StopTakingConnections(int port) {
  VisitSockets(port, [](int fd) {
    if (IsListener(fd)) shutdown(fd, SHUT_RD);
  });
}

void EndConnections(int port) {
  VisitSockets(port, [](int fd) {
    if (!IsListener(fd)) shutdown(fd, SHUT_RDWR);
  });
}

}  // namespace expertmesh
