#include "tests/server/comm/nccl_socket_links.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace expertmesh {
namespace {

using Lock = std::lock_guard<std::mutex>;

// How often a rank that does not listen yet is asked again.
constexpr int kConnectIntervalMillis = 2;

std::string SystemError(const char* call) { return std::string(call) + ": " + strerror(errno); }

// In the abstract namespace: no file is left behind.
socklen_t AddressOf(const std::string& group, int32_t rank, sockaddr_un* address) {
  const std::string name = "expertmesh-nccl-" + group + "." + std::to_string(rank);
  *address = {};
  address->sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof(address->sun_path)) std::abort();
  std::memcpy(address->sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

UniqueFd NewSocket() {
  return UniqueFd(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

}  // namespace

NcclSocketLinks::Kernel::Kernel(std::shared_ptr<NcclSocketLinks> owner) : links(std::move(owner)) {
  const Lock lock(links->mutex_);
  ++links->num_kernels_;
}

NcclSocketLinks::Kernel::~Kernel() {
  const Lock lock(links->mutex_);
  --links->num_kernels_;
}

NcclSocketLinks::NcclSocketLinks(const Params& params) : params_(params) {
  links_.resize(static_cast<size_t>(params.num_ranks));
  links_[params.rank].came = true;
}

NcclSocketLinks::~NcclSocketLinks() { Abort(); }

std::shared_ptr<NcclSocketLinks> NcclSocketLinks::Start(const Params& params, std::string* error) {
  const auto started = std::shared_ptr<NcclSocketLinks>(new NcclSocketLinks(params));
  *error = started->Listen();
  if (!error->empty()) return nullptr;
  started->thread_ = std::thread([links = started.get()] { links->Run(); });
  return started;
}

std::string NcclSocketLinks::Listen() {
  wake_.reset(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wake_.valid()) return SystemError("eventfd");
  listener_ = NewSocket();
  if (!listener_.valid()) return SystemError("socket");
  sockaddr_un address;
  const socklen_t size = AddressOf(params_.group, params_.rank, &address);
  if (bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0) {
    return SystemError("bind");
  }
  if (listen(listener_.get(), params_.num_ranks) != 0) return SystemError("listen");
  return "";
}

void NcclSocketLinks::Wake() {
  const uint64_t one = 1;
  static_cast<void>(!write(wake_.get(), &one, sizeof(one)));
}

bool NcclSocketLinks::IsConnectedLocked() const {
  return std::all_of(links_.begin(), links_.end(), [](const Link& link) { return link.came; });
}

bool NcclSocketLinks::is_connected() const {
  const Lock lock(mutex_);
  return IsConnectedLocked();
}

std::string NcclSocketLinks::error() const {
  const Lock lock(mutex_);
  return error_;
}

bool NcclSocketLinks::is_drained() const {
  const Lock lock(mutex_);
  return num_kernels_ == 0 && std::all_of(links_.begin(), links_.end(),
                                          [](const Link& link) { return link.out.empty(); });
}

std::shared_ptr<NcclSocketLinks::Kernel> NcclSocketLinks::NewKernel() {
  return std::make_shared<Kernel>(shared_from_this());
}

void NcclSocketLinks::Begin(Kernel& kernel) {
  const Lock lock(mutex_);
  if (aborted_) return;
  kernel.begun = true;
  for (const std::shared_ptr<Part>& part : kernel.parts) {
    Link& link = links_[part->peer];
    if (!part->is_send) {
      link.receives.push_back(part);
      Match(part->peer);
      continue;
    }
    link.sends.push_back(part);
    part->bytes.assign(reinterpret_cast<const char*>(part->from),
                       static_cast<size_t>(part->num_bytes));
    Put(part->peer, {MessageType::kData, static_cast<uint32_t>(part->kind), part->num_bytes},
        part->bytes);
  }
  Wake();
}

bool NcclSocketLinks::IsOver(const Kernel& kernel) const {
  const Lock lock(mutex_);
  if (!kernel.begun || aborted_) return true;
  return std::all_of(kernel.parts.begin(), kernel.parts.end(),
                     [](const std::shared_ptr<Part>& part) { return part->over; });
}

void NcclSocketLinks::End(Kernel& kernel) {
  const Lock lock(mutex_);
  if (!kernel.begun || aborted_) return;
  for (const std::shared_ptr<Part>& part : kernel.parts) {
    if (part->is_send) continue;
    std::memcpy(part->to, part->bytes.data(), part->bytes.size());
    part->bytes.clear();
  }
}

void NcclSocketLinks::SayFarewell() {
  const Lock lock(mutex_);
  for (int32_t peer = 0; peer < params_.num_ranks; ++peer) {
    if (peer != params_.rank) Put(peer, {MessageType::kFarewell, 0, 0}, "");
  }
  Wake();
}

void NcclSocketLinks::Abort() {
  {
    const Lock lock(mutex_);
    aborted_ = true;
  }
  Wake();
  if (thread_.joinable()) thread_.join();
  const Lock lock(mutex_);
  for (Link& link : links_) link.fd.reset();
  strangers_.clear();
  listener_.reset();
}

void NcclSocketLinks::Put(int32_t peer, const Header& header, const std::string& bytes) {
  if (peer == params_.rank) return Take(peer, header, bytes);
  Link& link = links_[peer];
  if (!link.fd.valid()) return;
  link.out.append(reinterpret_cast<const char*>(&header), sizeof(header));
  link.out.append(bytes);
}

void NcclSocketLinks::Take(int32_t peer, const Header& header, std::string bytes) {
  Link& link = links_[peer];
  switch (header.type) {
    case MessageType::kData:
      link.arrived.push_back({static_cast<Kind>(header.kind), std::move(bytes)});
      Match(peer);
      return;
    case MessageType::kOver:
      link.sends.front()->over = true;
      link.sends.pop_front();
      return;
    case MessageType::kFarewell:
      link.said_farewell = true;
      return;
    case MessageType::kHello:
      std::abort();
  }
}

// What does not match stays for ever, and holds up what comes behind it.
void NcclSocketLinks::Match(int32_t peer) {
  Link& link = links_[peer];
  while (!link.arrived.empty() && !link.receives.empty()) {
    Message& message = link.arrived.front();
    Part& receive = *link.receives.front();
    if (message.kind != receive.kind ||
        static_cast<int64_t>(message.bytes.size()) != receive.num_bytes) {
      return;
    }
    receive.bytes = std::move(message.bytes);
    receive.over = true;
    link.arrived.pop_front();
    link.receives.pop_front();
    Put(peer, {MessageType::kOver, 0, 0}, "");
  }
}

void NcclSocketLinks::Lose(int32_t peer) {
  Link& link = links_[peer];
  link.fd.reset();
  link.out.clear();
  if (link.said_farewell || params_.peers_end_silently || !error_.empty()) return;
  error_ = "rank " + std::to_string(peer) + " closed its connection";
}

// Each rank dials the lower ones. False when some do not listen yet.
bool NcclSocketLinks::ConnectMissing() {
  bool all = true;
  for (int32_t peer = 0; peer < params_.rank; ++peer) {
    Link& link = links_[peer];
    if (link.came) continue;
    UniqueFd fd = NewSocket();
    sockaddr_un address;
    const socklen_t size = AddressOf(params_.group, peer, &address);
    if (!fd.valid() || connect(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
      all = false;
      continue;
    }
    link.fd = std::move(fd);
    link.came = true;
    Put(peer, {MessageType::kHello, static_cast<uint32_t>(params_.rank), 0}, "");
  }
  return all;
}

void NcclSocketLinks::Accept() {
  while (true) {
    UniqueFd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd.valid()) return;
    strangers_.push_back(std::move(fd));
  }
}

void NcclSocketLinks::Greet(UniqueFd& stranger) {
  Header header;
  const ssize_t size = recv(stranger.get(), &header, sizeof(header), MSG_PEEK);
  if (size < 0 && errno == EAGAIN) return;
  if (size == static_cast<ssize_t>(sizeof(header)) && header.type == MessageType::kHello &&
      header.kind < links_.size() && !links_[header.kind].came) {
    static_cast<void>(!recv(stranger.get(), &header, sizeof(header), 0));
    links_[header.kind].fd = std::move(stranger);
    links_[header.kind].came = true;
  }
  if (size <= 0) stranger.reset();
}

void NcclSocketLinks::Receive(int32_t peer) {
  Link& link = links_[peer];
  char buffer[1 << 16];
  ssize_t size;
  while ((size = recv(link.fd.get(), buffer, sizeof(buffer), 0)) > 0) {
    link.in.append(buffer, static_cast<size_t>(size));
  }
  const bool is_lost = size == 0 || errno != EAGAIN;
  size_t taken = 0;
  Header header;
  while (link.in.size() - taken >= sizeof(header)) {
    std::memcpy(&header, link.in.data() + taken, sizeof(header));
    const size_t whole = sizeof(header) + static_cast<size_t>(header.num_bytes);
    if (link.in.size() - taken < whole) break;
    Take(peer, header,
         link.in.substr(taken + sizeof(header), static_cast<size_t>(header.num_bytes)));
    taken += whole;
  }
  link.in.erase(0, taken);
  if (is_lost) Lose(peer);
}

void NcclSocketLinks::Flush(int32_t peer) {
  Link& link = links_[peer];
  while (!link.out.empty()) {
    const ssize_t size = send(link.fd.get(), link.out.data(), link.out.size(), MSG_NOSIGNAL);
    // That the peer is gone is what reading tells, after its last words.
    if (size < 0) return;
    link.out.erase(0, static_cast<size_t>(size));
  }
}

void NcclSocketLinks::Run() {
  while (true) {
    std::vector<pollfd> fds = {{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    int timeout = -1;
    {
      const Lock lock(mutex_);
      if (aborted_) return;
      if (!ConnectMissing()) timeout = kConnectIntervalMillis;
      for (int32_t peer = 0; peer < params_.num_ranks; ++peer) {
        if (!links_[peer].fd.valid()) continue;
        Flush(peer);
        const short events = links_[peer].out.empty() ? POLLIN : POLLIN | POLLOUT;
        fds.push_back({links_[peer].fd.get(), events, 0});
      }
      for (const UniqueFd& stranger : strangers_) fds.push_back({stranger.get(), POLLIN, 0});
    }
    if (poll(fds.data(), fds.size(), timeout) < 0 && errno != EINTR) std::abort();
    const Lock lock(mutex_);
    uint64_t count = 0;
    static_cast<void>(!read(wake_.get(), &count, sizeof(count)));
    Accept();
    for (UniqueFd& stranger : strangers_) Greet(stranger);
    std::erase_if(strangers_, [](const UniqueFd& stranger) { return !stranger.valid(); });
    for (int32_t peer = 0; peer < params_.num_ranks; ++peer) {
      if (links_[peer].fd.valid()) Receive(peer);
    }
  }
}

}  // namespace expertmesh
