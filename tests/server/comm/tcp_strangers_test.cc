// Who may join a group, and what happens to bytes that change on the way.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "server/comm/in_memory_rendezvous_store.h"
#include "server/comm/socket_address.h"
#include "server/comm/tcp_communicator.h"
#include "server/comm/unique_fd.h"
#include "tests/server/comm/tcp_group.h"

namespace expertmesh {
namespace {

absl::Time Soon() { return absl::Now() + absl::Seconds(60); }

UniqueFd ConnectTo(uint16_t port) {
  absl::StatusOr<SocketAddress> address = SocketAddress::Parse("127.0.0.1", port);
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(connect(fd.get(), address->data(), address->size()), 0) << strerror(errno);
  return fd;
}

void SendAll(int fd, const std::string& bytes) {
  EXPECT_EQ(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
}

// True when the other side has closed the connection without a word.
bool WasRefused(int fd) {
  char byte;
  const ssize_t moved = recv(fd, &byte, 1, 0);
  return moved == 0 || (moved < 0 && errno == ECONNRESET);
}

std::string Hello(uint64_t incarnation, uint64_t epoch, int32_t from_rank, int32_t to_rank,
                  uint32_t channel, uint32_t ep_size, const std::string& secret) {
  std::string bytes;
  const auto add = [&](const auto& value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  add(uint64_t{0x31686d7470784545});
  add(incarnation);
  add(epoch);
  add(from_rank);
  add(to_rank);
  add(channel);
  add(ep_size);
  return bytes + secret;
}

TEST(TcpStrangersTest, AreRefusedAndTheGroupForms) {
  InMemoryRendezvousStore store;
  absl::StatusOr<std::unique_ptr<Communicator>> first, second;
  std::thread rank0([&] { first = NewTcpCommunicator(LoopbackTcpParams(0, 2, &store)); });
  const absl::StatusOr<std::string> value = store.Get(RendezvousKey(5, 6, "rank/0"), Soon());
  ASSERT_TRUE(value.ok());
  int port = 0;
  ASSERT_TRUE(absl::SimpleAtoi(std::vector<std::string>(absl::StrSplit(*value, ' '))[1], &port));
  const auto listener = static_cast<uint16_t>(port);

  std::vector<UniqueFd> silent;
  for (int i = 0; i < 200; ++i) silent.push_back(ConnectTo(listener));
  const std::string no_secret(16, 'x');
  const std::vector<std::string> greetings = {
      "GET / HTTP/1.1\r\nHost: expert\r\n\r\n",
      std::string(4096, '\0'),
      std::string(1 << 16, '\xff'),
      Hello(5, 6, 1, 0, 0, 2, no_secret),  // no secret
      Hello(4, 6, 1, 0, 0, 2, no_secret),  // of another control plane
      Hello(5, 5, 1, 0, 1, 2, no_secret),  // of a past epoch
      Hello(5, 6, 7, 0, 0, 2, no_secret),  // no such rank
      Hello(5, 6, 1, 1, 0, 2, no_secret),  // wrong door
      Hello(5, 6, 1, 0, 9, 2, no_secret),  // no such channel
      Hello(5, 6, -1, 0, 0, 2, no_secret),
  };
  std::vector<UniqueFd> strangers;
  for (const std::string& greeting : greetings) {
    strangers.push_back(ConnectTo(listener));
    SendAll(strangers.back().get(), greeting);
  }
  UniqueFd short_hello = ConnectTo(listener);
  SendAll(short_hello.get(), Hello(5, 6, 1, 0, 0, 2, no_secret).substr(0, 20));
  short_hello.reset();

  std::thread rank1([&] { second = NewTcpCommunicator(LoopbackTcpParams(1, 2, &store)); });
  rank0.join();
  rank1.join();
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_TRUE(second.ok()) << second.status();
  for (UniqueFd& stranger : strangers) EXPECT_TRUE(WasRefused(stranger.get()));
  for (UniqueFd& stranger : silent) EXPECT_TRUE(WasRefused(stranger.get()));

  const auto stream0 = NewInlineHostStream();
  const auto stream1 = NewInlineHostStream();
  ASSERT_TRUE((*first)->Barrier({}, *stream0).ok());
  ASSERT_TRUE((*second)->Barrier({}, *stream1).ok());
  EXPECT_TRUE(stream0->Wait(Soon()).ok());
  EXPECT_TRUE(stream1->Wait(Soon()).ok());
}

// Nobody who cannot read the store is taken for a rank, even where the rank's own port should be.
TEST(TcpStrangersTest, AnImpostorBehindARanksAddress) {
  InMemoryRendezvousStore store;
  UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const absl::StatusOr<SocketAddress> any = SocketAddress::Parse("127.0.0.1", 0);
  ASSERT_EQ(bind(listener.get(), any->data(), any->size()), 0);
  ASSERT_EQ(listen(listener.get(), 8), 0);
  ASSERT_TRUE(store
                  .Set(RendezvousKey(5, 6, "rank/0"),
                       absl::StrCat("127.0.0.1 ", SocketAddress::OfSocket(listener.get()).port(),
                                    " ", std::string(32, 'a')))
                  .ok());
  absl::Status status;
  std::thread rank1([&] { status = NewTcpCommunicator(LoopbackTcpParams(1, 2, &store)).status(); });
  UniqueFd accepted(accept(listener.get(), nullptr, nullptr));
  SendAll(accepted.get(), std::string(24, 'y'));
  rank1.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
}

TEST(TcpStrangersTest, ARankWhoseListenerIsGone) {
  InMemoryRendezvousStore store;
  uint16_t port;
  {
    UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const absl::StatusOr<SocketAddress> any = SocketAddress::Parse("127.0.0.1", 0);
    ASSERT_EQ(bind(listener.get(), any->data(), any->size()), 0);
    port = SocketAddress::OfSocket(listener.get()).port();
  }
  ASSERT_TRUE(store
                  .Set(RendezvousKey(5, 6, "rank/0"),
                       absl::StrCat("127.0.0.1 ", port, " ", std::string(32, 'a')))
                  .ok());
  const absl::Status status = NewTcpCommunicator(LoopbackTcpParams(1, 2, &store)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
}

// Forwards connections to rank 0 and flips one bit of what comes the other way or back on the data
// connection, counted behind the handshake.
class FlippingProxy : public RendezvousStore {
 public:
  FlippingProxy(bool towards_rank0, int64_t byte, int bit)
      : towards_rank0_(towards_rank0), byte_(byte), bit_(bit) {
    const absl::StatusOr<SocketAddress> any = SocketAddress::Parse("127.0.0.1", 0);
    listener_.reset(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(bind(listener_.get(), any->data(), any->size()), 0);
    EXPECT_EQ(listen(listener_.get(), 8), 0);
  }
  ~FlippingProxy() override {
    for (std::thread& thread : threads_) thread.join();
  }

  // What rank 1 reads of rank 0 leads here.
  absl::Status Set(absl::string_view key, absl::string_view value) override {
    if (key != RendezvousKey(5, 6, "rank/0")) return store_.Set(key, value);
    std::vector<std::string> parts = absl::StrSplit(value, ' ');
    int port = 0;
    EXPECT_TRUE(absl::SimpleAtoi(parts[1], &port));
    threads_.emplace_back([this, port] { Accept(static_cast<uint16_t>(port)); });
    return store_.Set(
        key, absl::StrCat(parts[0], " ", SocketAddress::OfSocket(listener_.get()).port(), " ",
                          parts[2]));
  }
  absl::StatusOr<std::string> Get(absl::string_view key, absl::Time deadline) override {
    return store_.Get(key, deadline);
  }

 private:
  void Accept(uint16_t port) {
    std::thread other;
    for (int i = 0; i < 2; ++i) {
      UniqueFd from(accept(listener_.get(), nullptr, nullptr));
      UniqueFd to = ConnectTo(port);
      if (i == 1) {
        Forward(std::move(from), std::move(to));
      } else {
        other = std::thread([this, from = std::move(from), to = std::move(to)]() mutable {
          Forward(std::move(from), std::move(to));
        });
      }
    }
    other.join();
  }

  void Forward(UniqueFd rank1, UniqueFd rank0) const {
    constexpr int64_t kHelloBytes = 56, kReplyBytes = 24, kChannelByte = 32;
    int64_t offset[2] = {-kHelloBytes, -kReplyBytes};  // towards rank 0, back
    bool is_data = false;
    const int fds[2] = {rank1.get(), rank0.get()};
    while (true) {
      pollfd polled[2] = {{fds[0], POLLIN, 0}, {fds[1], POLLIN, 0}};
      poll(polled, 2, -1);
      for (int side = 0; side < 2; ++side) {
        if (polled[side].revents == 0) continue;
        char bytes[4096];
        const ssize_t moved = recv(fds[side], bytes, sizeof(bytes), 0);
        if (moved <= 0) return;  // closes both sides
        const int64_t begin = offset[side];
        offset[side] += moved;
        if (side == 0 && begin <= -kHelloBytes + kChannelByte &&
            offset[0] > -kHelloBytes + kChannelByte) {
          is_data = bytes[-kHelloBytes + kChannelByte - begin] == 0;
        }
        const bool flips = side == (towards_rank0_ ? 0 : 1);
        if (is_data && flips && begin <= byte_ && byte_ < offset[side]) {
          bytes[byte_ - begin] ^= static_cast<char>(1 << bit_);
        }
        if (send(fds[1 - side], bytes, static_cast<size_t>(moved), MSG_NOSIGNAL) != moved) return;
      }
    }
  }

  const bool towards_rank0_;
  const int64_t byte_;
  const int bit_;
  UniqueFd listener_;
  InMemoryRendezvousStore store_;
  std::vector<std::thread> threads_;
};

// Statuses of two ranks: of an all-to-all and the operation after it.
std::vector<absl::Status> ExchangeBehind(FlippingProxy& proxy, int64_t num_bytes) {
  std::vector<absl::Status> statuses(2);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      auto communicator = NewTcpCommunicator(LoopbackTcpParams(rank, 2, &proxy));
      if (!communicator.ok()) {
        statuses[rank] = communicator.status();
        return;
      }
      const std::vector<std::byte> send(2 * num_bytes, static_cast<std::byte>(rank + 1));
      const std::vector<int64_t> bytes(2, num_bytes);
      AllToAllVParams params;
      params.send = send.data();
      params.send_bytes = bytes;
      std::vector<std::byte> receive(2 * num_bytes);
      params.receive = receive.data();
      params.receive_bytes = bytes;
      const auto stream = NewInlineHostStream();
      statuses[rank] = (*communicator)->AllToAllV(params, *stream);
      statuses[rank].Update(stream->Wait(Soon()));
      // Whoever did not see it itself learns it at the next operation.
      const auto next = NewInlineHostStream();
      absl::Status later = (*communicator)->Barrier({}, *next);
      later.Update(next->Wait(Soon()));
      statuses[rank].Update(later);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

TEST(TcpStrangersTest, AFlippedBitAnywhereIsDataLoss) {
  const uint64_t seed = 20261129;
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  constexpr int64_t kNumBytes = 40;
  for (const bool towards_rank0 : {true, false}) {
    for (int64_t byte = 0; byte < 56 + kNumBytes + 8; ++byte) {
      const int bit = static_cast<int>(random() % 8);
      SCOPED_TRACE(
          absl::StrCat("towards rank ", towards_rank0 ? 0 : 1, ", byte ", byte, " bit ", bit));
      FlippingProxy proxy(towards_rank0, byte, bit);
      const std::vector<absl::Status> statuses = ExchangeBehind(proxy, kNumBytes);
      for (int rank : {0, 1}) {
        EXPECT_EQ(statuses[rank].code(), absl::StatusCode::kDataLoss) << statuses[rank];
      }
    }
  }
}

TEST(TcpStrangersTest, AFlippedBitOfALargePayload) {
  for (const int64_t byte : {int64_t{56}, int64_t{1} << 20, (int64_t{3} << 20) + 55}) {
    FlippingProxy proxy(true, byte, 3);
    const std::vector<absl::Status> statuses = ExchangeBehind(proxy, int64_t{3} << 20);
    for (int rank : {0, 1}) {
      EXPECT_EQ(statuses[rank].code(), absl::StatusCode::kDataLoss) << statuses[rank];
    }
  }
}

// The proxy itself changes nothing else.
TEST(TcpStrangersTest, BehindAProxyThatFlipsNothing) {
  FlippingProxy proxy(true, int64_t{1} << 40, 0);
  const std::vector<absl::Status> statuses = ExchangeBehind(proxy, 1000);
  for (int rank : {0, 1}) EXPECT_TRUE(statuses[rank].ok()) << statuses[rank];
}

}  // namespace
}  // namespace expertmesh
