#include "tests/integration/rank_cluster.h"

#include <gtest/gtest.h>

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace expertmesh {
namespace {

constexpr absl::Duration kStartTimeout = absl::Seconds(60);

}  // namespace

std::unique_ptr<RankCluster> RankCluster::Start(const Options& options) {
  std::unique_ptr<RankCluster> cluster = StartWithoutEpoch(options);
  return cluster != nullptr && cluster->WaitForEpoch(1) ? std::move(cluster) : nullptr;
}

std::unique_ptr<RankCluster> RankCluster::StartWithoutEpoch(const Options& options) {
  auto cluster = std::unique_ptr<RankCluster>(new RankCluster(options));
  if (!cluster->StartControl(/*rank_port=*/0)) return nullptr;
  cluster->ranks_.resize(options.ep_size);
  for (int32_t rank = 0; rank < options.ep_size; ++rank) {
    if (!cluster->StartRank(rank)) return nullptr;
  }
  return cluster;
}

bool RankCluster::StartControl(int rank_port) {
  ServerUnderTest::Options server;
  server.checkpoint = options_.checkpoint;
  server.args = {absl::StrCat("--ep_size=", options_.ep_size),
                 absl::StrCat("--rank_listen=127.0.0.1:", rank_port)};
  server.args.insert(server.args.end(), options_.control_args.begin(), options_.control_args.end());
  server.wait_until_serving = false;
  std::shared_ptr<ServerUnderTest> started = ServerUnderTest::Start(server);
  if (started == nullptr) return false;
  {
    const std::lock_guard<std::mutex> lock(control_mutex_);
    control_ = started;
  }
  const auto port =
      control_->process().WaitForLine("ranks dial 127\\.0\\.0\\.1:([0-9]+)", kStartTimeout);
  if (!port.ok() || !absl::SimpleAtoi((*port)[1], &rank_port_)) {
    ADD_FAILURE() << port.status();
    return false;
  }
  return true;
}

std::shared_ptr<ServerUnderTest> RankCluster::shared_control() const {
  const std::lock_guard<std::mutex> lock(control_mutex_);
  return control_;
}

bool RankCluster::KillControl() {
  if (!control_->process().Kill().ok() || !control_->process().Wait(kStartTimeout).ok()) {
    ADD_FAILURE() << "the control plane was not to be killed";
    return false;
  }
  return true;
}

std::unique_ptr<ServerProcess> RankCluster::StartExpertServer(std::vector<std::string> args) {
  ServerProcess::Options process;
  process.path = SiblingBinary(options_.expert_server);
  process.args = std::move(args);
  process.environment = options_.rank_environment;
  process.args.push_back(absl::StrCat("--control_plane=127.0.0.1:", rank_port_));
  auto started = ServerProcess::Start(std::move(process));
  if (!started.ok()) {
    ADD_FAILURE() << started.status();
    return nullptr;
  }
  return *std::move(started);
}

bool RankCluster::StartRank(int32_t ep_rank) {
  ranks_[ep_rank].reset();
  std::vector<std::string> args = {absl::StrCat("--checkpoint=", options_.checkpoint),
                                   absl::StrCat("--ep_rank=", ep_rank),
                                   absl::StrCat("--ep_size=", options_.ep_size), "--threads=1"};
  args.insert(args.end(), options_.rank_args.begin(), options_.rank_args.end());
  ranks_[ep_rank] = StartExpertServer(std::move(args));
  return ranks_[ep_rank] != nullptr;
}

bool RankCluster::WaitForEpoch(uint64_t epoch) {
  // On a busy machine a group may fall apart before it has formed, or just after; each attempt
  // takes a number.
  std::string numbers = absl::StrCat(epoch);
  for (uint64_t later = epoch + 1; later < epoch + 10; ++later) {
    absl::StrAppend(&numbers, "|", later);
  }
  const auto line = control_->process().WaitForLine(
      absl::StrCat("serving .* on .* epoch=(", numbers, ")$"), kStartTimeout);
  if (!line.ok()) ADD_FAILURE() << line.status();
  return line.ok();
}

}  // namespace expertmesh
