// Mutual TLS from the client to the ranks: who is let in, who is refused with which words, and
// files that change under running processes.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/integration/certificates.h"
#include "tests/integration/process.h"
#include "tests/integration/rank_cluster.h"

namespace expertmesh {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

constexpr char kCheckpoint[] = "tests/golden/qwen3_moe_bfloat16";
constexpr absl::Duration kPlenty = absl::Seconds(60);
constexpr char kServerNames[] = "DNS:localhost,IP:127.0.0.1";

std::string TextOf(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// At once: nobody sees a part of it.
void Write(const std::string& path, const std::string& text) {
  const std::string unfinished = path + ".tmp";
  std::ofstream(unfinished, std::ios::trunc) << text;
  EXPECT_EQ(std::rename(unfinished.c_str(), path.c_str()), 0);
}

int Count(const std::string& text, const std::string& what) {
  int count = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++count;
  return count;
}

class TlsTest : public testing::Test {
 protected:
  TlsTest() : files_("tls_test") {}

  void MakeGeneration(const std::string& generation) {
    files_.MakeAuthority(generation);
    files_.Make(generation, "server", "server " + generation, kServerNames);
    files_.Make(generation, "rank", "rank " + generation, "DNS:rank.example");
    files_.Make(generation, "client", "client " + generation, "DNS:client.example");
  }

  std::vector<std::string> Flags(const std::string& generation, const std::string& name) const {
    const std::string path = files_.Path(absl::StrCat(generation, "/", name));
    return {absl::StrCat("--tls_cert=", path, ".crt"), absl::StrCat("--tls_key=", path, ".key"),
            absl::StrCat("--tls_ca=", files_.Path(generation), "/ca.crt")};
  }

  bool StartCluster(const std::string& generation) {
    RankCluster::Options options;
    options.checkpoint = kCheckpoint;
    options.control_args = Flags(generation, "server");
    options.control_args.push_back("--rank_tls_names=other.example,rank.example");
    options.rank_args = Flags(generation, "rank");
    cluster_ = RankCluster::Start(options);
    return cluster_ != nullptr;
  }

  // A call by the command line client.
  FinishedProcess Call(const std::vector<std::string>& tls_flags) const {
    std::vector<std::string> args = {"forward", "--tokens=3", "--timeout=20s", "--max_attempts=1",
                                     absl::StrCat("--target=", cluster_->control().address())};
    args.insert(args.end(), tls_flags.begin(), tls_flags.end());
    return RunToEnd({.path = SiblingBinary("expertmesh"), .args = std::move(args)});
  }

  FinishedProcess StartStranger(const std::vector<std::string>& tls_flags,
                                const std::string& join_timeout) const {
    std::vector<std::string> args = {absl::StrCat("--checkpoint=", kCheckpoint), "--ep_rank=1",
                                     "--ep_size=2", "--join_timeout=" + join_timeout};
    args.insert(args.end(), tls_flags.begin(), tls_flags.end());
    const auto stranger = cluster_->StartExpertServer(std::move(args));
    if (stranger == nullptr) return {};
    const auto exit_code = stranger->Wait(kPlenty);
    EXPECT_TRUE(exit_code.ok()) << exit_code.status();
    return {exit_code.value_or(-1), stranger->Stdout(), stranger->Stderr()};
  }

  // What the public listener shows to a new connection, in openssl's words.
  std::string ShownCertificate(const std::string& generation) const {
    const std::string client = files_.Path(generation + "/client");
    return RunToEnd({.path = "/usr/bin/openssl",
                     .args = {"s_client", "-connect", cluster_->control().address(), "-alpn", "h2",
                              "-CAfile", files_.Path(generation + "/ca.crt"), "-cert",
                              client + ".crt", "-key", client + ".key"}})
        .out;
  }

  const Certificates files_;
  std::unique_ptr<RankCluster> cluster_;
};

TEST_F(TlsTest, WhoIsNotOfTheAuthorityOrNotOnTheListStaysOutside) {
  MakeGeneration("ours");
  files_.Make("ours", "stranger", "stranger", "DNS:stranger.example");
  MakeGeneration("theirs");
  ASSERT_TRUE(StartCluster("ours"));
  const FinishedProcess called = Call(Flags("ours", "client"));
  EXPECT_EQ(called.exit_code, 0) << called.err;

  // No TLS; no certificate; one of another authority; a server of another authority.
  const std::string our_ca = absl::StrCat("--tls_ca=", files_.Path("ours/ca.crt"));
  std::vector<std::string> forged = Flags("theirs", "client");
  forged.back() = our_ca;
  for (const std::vector<std::string>& flags :
       {std::vector<std::string>(), {our_ca}, forged, Flags("theirs", "client")}) {
    const FinishedProcess refused = Call(flags);
    EXPECT_NE(refused.exit_code, 0) << refused.out;
    EXPECT_THAT(refused.err, HasSubstr("UNAVAILABLE"));
  }

  const FinishedProcess stranger = StartStranger(Flags("ours", "stranger"), "60s");
  EXPECT_EQ(stranger.exit_code, 1);
  EXPECT_THAT(stranger.err,
              HasSubstr("is for stranger.example, which --rank_tls_names does not allow"));
  EXPECT_TRUE(cluster_->control()
                  .process()
                  .WaitForLine("a rank was refused .*why=.*stranger\\.example", kPlenty)
                  .ok());
  std::vector<std::string> forged_rank = Flags("theirs", "rank");
  forged_rank.back() = our_ca;
  for (const std::vector<std::string>& flags :
       {std::vector<std::string>(), {our_ca}, forged_rank, Flags("theirs", "rank")}) {
    // Who does not trust the control plane reads that at the end too; on a busy machine a second
    // may be over before a handshake is.
    const std::string why = flags == Flags("theirs", "rank") ? "certificate verify failed" : "";
    FinishedProcess refused;
    std::string says;
    for (const char* time : {"1s", "10s", "40s"}) {
      refused = StartStranger(flags, time);
      says = absl::StrCat("could not join at 127.0.0.1:.* in ", time, ": .*", why);
      if (std::regex_search(refused.err, std::regex(says))) break;
    }
    EXPECT_EQ(refused.exit_code, 1);
    EXPECT_THAT(refused.err, ContainsRegex(says));
  }
  const FinishedProcess again = Call(Flags("ours", "client"));
  EXPECT_EQ(again.exit_code, 0) << again.err;
  EXPECT_THAT(again.out, HasSubstr("epoch 1,"));
}

TEST_F(TlsTest, FilesThatChangeAreUsedWithoutARestart) {
  MakeGeneration("first");
  MakeGeneration("second");
  files_.GoLive("first");
  ASSERT_TRUE(StartCluster("live"));
  EXPECT_EQ(Call(Flags("first", "client")).exit_code, 0);
  EXPECT_THAT(ShownCertificate("first"), HasSubstr("CN = server first"));

  files_.GoLive("second");
  const absl::Time deadline = absl::Now() + kPlenty;
  FinishedProcess called = Call(Flags("second", "client"));
  while (called.exit_code != 0 && absl::Now() < deadline) called = Call(Flags("second", "client"));
  EXPECT_EQ(called.exit_code, 0) << called.err;
  EXPECT_THAT(called.out, HasSubstr("epoch 1,")) << "connections that stand stay";
  EXPECT_THAT(ShownCertificate("second"), HasSubstr("CN = server second"));
  // Of the old authority, whom nobody trusts any more.
  std::vector<std::string> old = Flags("first", "client");
  old.back() = absl::StrCat("--tls_ca=", files_.Path("second/ca.crt"));
  EXPECT_NE(Call(old).exit_code, 0);

  // A new control plane knows the second authority alone; the ranks were started with the first.
  const pid_t ranks[] = {cluster_->rank(0).pid(), cluster_->rank(1).pid()};
  ASSERT_TRUE(cluster_->RestartControl());
  ASSERT_TRUE(cluster_->WaitForEpoch(1));
  EXPECT_EQ(cluster_->rank(0).pid(), ranks[0]);
  EXPECT_EQ(cluster_->rank(1).pid(), ranks[1]);
  called = Call(Flags("second", "client"));
  EXPECT_EQ(called.exit_code, 0) << called.err;
}

TEST_F(TlsTest, AnExpertServerMayBeThereBeforeItsControlPlane) {
  MakeGeneration("live");
  ASSERT_TRUE(StartCluster("live"));
  ASSERT_TRUE(cluster_->KillControl());
  ASSERT_TRUE(cluster_->StartRank(0));
  const auto line = cluster_->rank(0).WaitForLine("cannot join yet.*Connection refused", kPlenty);
  ASSERT_TRUE(line.ok()) << line.status();
  ASSERT_TRUE(cluster_->StartControlAgain());
  ASSERT_TRUE(cluster_->WaitForEpoch(1));
  EXPECT_EQ(Call(Flags("live", "client")).exit_code, 0);
}

// Renewals that go wrong, one file at a time: cert and key, of a control plane and of a rank.
TEST_F(TlsTest, ARenewalThatCannotServeLeavesWhatIsInUse) {
  MakeGeneration("live");
  files_.Make("live", "renewed", "renewed", kServerNames);
  ASSERT_TRUE(StartCluster("live"));
  ServerProcess* const processes[] = {&cluster_->control().process(), &cluster_->rank(0)};
  const char* const names[] = {"server", "rank"};
  for (const int who : {0, 1}) {
    for (const char* kind : {"crt", "key"}) {
      const char* const flag = std::string(kind) == "crt" ? "tls_cert" : "tls_key";
      const std::string path = files_.Path(absl::StrCat("live/", names[who], ".", kind));
      SCOPED_TRACE(path);
      const std::string good = TextOf(path);
      Write(path, "");
      const std::string says =
          absl::StrCat("E TLS files cannot be used.*--", flag, ": nothing in .*", names[who]);
      auto line = processes[who]->WaitForLine(says, kPlenty);
      ASSERT_TRUE(line.ok()) << line.status();
      Write(path, "junk\n");
      line = processes[who]->WaitForLine(
          absl::StrCat("E TLS files cannot be used.*--", flag, ": the file has no"), kPlenty);
      ASSERT_TRUE(line.ok()) << line.status();
      EXPECT_EQ(Call(Flags("live", "client")).exit_code, 0);
      Write(path, good);
      const absl::Time deadline = absl::Now() + kPlenty;
      const std::string again = "I TLS files are again those that are in use not_after=2";
      while (Count(processes[who]->Stderr(), again) < (std::string(kind) == "crt" ? 1 : 2)) {
        ASSERT_TRUE(processes[who]->Signal(0).ok());
        ASSERT_LT(absl::Now(), deadline);
        // It serves all the while.
        EXPECT_EQ(Call(Flags("live", "client")).exit_code, 0);
      }
      EXPECT_EQ(Count(processes[who]->Stderr(), absl::StrCat("--", flag, ": nothing in")), 1);
    }
  }

  // The certificate is there before its key.
  Write(files_.Path("live/server.crt"), TextOf(files_.Path("live/renewed.crt")));
  auto line = processes[0]->WaitForLine(
      "E TLS files cannot be used.*--tls_key is not the key of the certificate", kPlenty);
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_THAT(ShownCertificate("live"), HasSubstr("CN = server live"));
  EXPECT_EQ(Call(Flags("live", "client")).exit_code, 0);
  Write(files_.Path("live/server.key"), TextOf(files_.Path("live/renewed.key")));
  line = processes[0]->WaitForLine("I TLS files have changed.*not_after=2", kPlenty);
  ASSERT_TRUE(line.ok()) << line.status();
  const absl::Time deadline = absl::Now() + kPlenty;
  std::string shown = ShownCertificate("live");
  while (!absl::StrContains(shown, "CN = renewed") && absl::Now() < deadline) {
    shown = ShownCertificate("live");
  }
  EXPECT_THAT(shown, HasSubstr("CN = renewed"));
  EXPECT_EQ(Call(Flags("live", "client")).exit_code, 0);
}

}  // namespace
}  // namespace expertmesh
