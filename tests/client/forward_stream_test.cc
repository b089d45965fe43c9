#include "client/forward_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client_error.h"
#include "client/expert_client.h"
#include "kernels/base/steady_now.h"
#include "tests/server/rpc/forward_stream_fixture.h"

namespace expertmesh {
namespace {

class ForwardStreamTest : public testing::Test {
 protected:
  void Open(const ForwardStreamOptions& options = {}) {
    ExpertClientOptions client_options;
    client_options.target = server_.target();
    client_ = *ExpertClient::Create(client_options);
    stream_ = client_->OpenForwardStream(options);
  }

  // Hidden states that tell one message from another.
  static std::vector<float> Hidden(uint64_t stream_seq) {
    return std::vector<float>(64, static_cast<float>(stream_seq) + 0.5f);
  }

  ForwardInput Input(uint64_t stream_seq) {
    ForwardInput input;
    input.request_id = absl::StrCat(stream_seq);
    input.layer = 1;
    input.num_tokens = 1;
    input.hidden_size = 64;
    hidden_ = Hidden(stream_seq);
    input.hidden_states = {hidden_.data(), 256, v1::DATA_TYPE_FLOAT32, nullptr};
    input.routing = TopKRouting{2, ids_, weights_};
    return input;
  }

  absl::Status Send(uint64_t stream_seq, absl::Duration timeout = absl::ZeroDuration()) {
    return stream_->Send(stream_seq, timeout, Input(stream_seq),
                         [this, stream_seq](absl::StatusOr<ForwardOutput> result) {
                           const std::lock_guard<std::mutex> lock(mutex_);
                           EXPECT_TRUE(results_.emplace(stream_seq, std::move(result)).second);
                           changed_.notify_all();
                         });
  }

  // Blocks until the message's callback has run.
  absl::StatusOr<ForwardOutput> Await(uint64_t stream_seq) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return results_.count(stream_seq) != 0; });
    auto result = std::move(results_.at(stream_seq));
    results_.erase(stream_seq);
    return result;
  }

  void ExpectAnswer(uint64_t stream_seq) {
    const absl::StatusOr<ForwardOutput> output = Await(stream_seq);
    ASSERT_TRUE(output.ok()) << output.status();
    EXPECT_EQ(output->response.request_id(), absl::StrCat(stream_seq));
    const std::vector<float> expected = Hidden(stream_seq);
    ASSERT_EQ(output->output.size(), 256u);
    EXPECT_EQ(std::memcmp(output->output.data(), expected.data(), 256), 0);
  }

  StreamServer server_;
  const std::vector<int32_t> ids_ = {0, 1};
  const std::vector<float> weights_ = {0.5f, 0.5f};
  std::vector<float> hidden_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, absl::StatusOr<ForwardOutput>> results_;
  std::unique_ptr<ExpertClient> client_;
  std::unique_ptr<ForwardStream> stream_;
};

TEST_F(ForwardStreamTest, EachCallbackGetsItsOwnAnswer) {
  Open();
  for (uint64_t seq = 0; seq < 100; ++seq) ASSERT_TRUE(Send(seq).ok());
  server_.controller().AwaitHeld(100);
  for (uint64_t seq = 100; seq-- > 50;) server_.controller().Answer(absl::StrCat(seq));
  for (uint64_t seq = 100; seq-- > 50;) ExpectAnswer(seq);
  stream_->HalfClose();
  EXPECT_EQ(Send(100).code(), absl::StatusCode::kFailedPrecondition);
  server_.controller().AnswerAtOnce();
  EXPECT_TRUE(stream_->Finish().ok());
  for (uint64_t seq = 0; seq < 50; ++seq) ExpectAnswer(seq);
  EXPECT_TRUE(results_.empty());
}

TEST_F(ForwardStreamTest, ErrorsKeepTheirDetails) {
  Open();
  server_.controller().AnswerAtOnce();
  ForwardInput input = Input(1);
  input.layer = 17;
  ASSERT_TRUE(stream_
                  ->Send(1, absl::ZeroDuration(), input,
                         [this](absl::StatusOr<ForwardOutput> result) {
                           const std::lock_guard<std::mutex> lock(mutex_);
                           results_.emplace(1, std::move(result));
                           changed_.notify_all();
                         })
                  .ok());
  const absl::Status error = Await(1).status();
  EXPECT_EQ(error.code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(GetServerErrorDetails(error).has_value());
  EXPECT_EQ(GetServerErrorDetails(error)->reason, "LAYER_NOT_FOUND");
  ASSERT_TRUE(Send(2).ok());
  ExpectAnswer(2);
  EXPECT_TRUE(stream_->Finish().ok());
}

TEST_F(ForwardStreamTest, RefusesWhatCannotBeSent) {
  Open({.max_inflight_messages = 2});
  ForwardInput input = Input(1);
  input.hidden_states.size_bytes = 3;
  EXPECT_EQ(stream_->Send(1, absl::ZeroDuration(), input, nullptr).code(),
            absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(Send(1).ok());
  EXPECT_EQ(Send(1).code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(Send(2).ok());
  EXPECT_EQ(Send(3).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(stream_->WaitForRoom(absl::Now() + absl::Milliseconds(1)));
  server_.controller().AwaitHeld(2);
  server_.controller().AnswerAtOnce();
  EXPECT_TRUE(stream_->WaitForRoom(absl::InfiniteFuture()));
  EXPECT_TRUE(Send(3).ok());
  EXPECT_TRUE(stream_->Finish().ok());
  for (const uint64_t seq : {1, 2, 3}) ExpectAnswer(seq);
}

TEST_F(ForwardStreamTest, BoundsBytesInFlight) {
  Open({.max_inflight_bytes = 1000});  // three messages of about 300
  int sent = 0;
  while (Send(static_cast<uint64_t>(sent)).ok()) ++sent;
  EXPECT_GE(sent, 3);
  EXPECT_LE(sent, 4);
  server_.controller().AnswerAtOnce();
  EXPECT_TRUE(stream_->Finish().ok());
}

TEST_F(ForwardStreamTest, TimeoutsAndCancelReachTheServer) {
  Open();
  ASSERT_TRUE(Send(1, absl::Seconds(20)).ok());
  ASSERT_TRUE(Send(2, absl::Nanoseconds(1)).ok());
  server_.controller().AwaitHeld(2);
  EXPECT_LE(server_.controller().deadline("1"), SteadyNow() + absl::Seconds(20));
  EXPECT_LE(server_.controller().deadline("2"), SteadyNow());
  stream_->Cancel(1);
  EXPECT_EQ(Await(1).status().code(), absl::StatusCode::kCancelled);
  server_.controller().AnswerAtOnce();
  EXPECT_TRUE(stream_->Finish().ok());
}

TEST_F(ForwardStreamTest, ASilentServerDoesNotOutlastATimeout) {
  Open();
  ASSERT_TRUE(Send(1, absl::Milliseconds(20)).ok());
  ASSERT_TRUE(Send(2, absl::Hours(1)).ok());
  ASSERT_TRUE(Send(3).ok());
  ASSERT_TRUE(Send(4, absl::Milliseconds(10)).ok());
  server_.controller().AwaitHeld(4);
  for (const uint64_t seq : {1, 4}) {
    EXPECT_EQ(Await(seq).status().code(), absl::StatusCode::kDeadlineExceeded);
    // The server still has it.
    EXPECT_EQ(Send(seq).code(), absl::StatusCode::kInvalidArgument);
  }
  server_.controller().AnswerAtOnce();
  ExpectAnswer(2);
  ExpectAnswer(3);
  EXPECT_TRUE(stream_->Finish().ok());
  EXPECT_TRUE(results_.empty()) << "an answer that came too late";
}

TEST_F(ForwardStreamTest, TimeoutsGoOnAfterHalfClose) {
  Open();
  ASSERT_TRUE(Send(1, absl::Milliseconds(20)).ok());
  server_.controller().AwaitHeld(1);
  stream_->HalfClose();
  EXPECT_EQ(Await(1).status().code(), absl::StatusCode::kDeadlineExceeded);
  server_.controller().AnswerAtOnce();
  EXPECT_TRUE(stream_->Finish().ok());
}

TEST_F(ForwardStreamTest, CancelAfterHalfClose) {
  Open();
  for (const uint64_t seq : {1, 2, 3}) ASSERT_TRUE(Send(seq).ok());
  server_.controller().AwaitHeld(3);
  stream_->HalfClose();
  stream_->Cancel(2);
  EXPECT_EQ(Await(2).status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(server_.controller().num_cancelled(), 1);
  server_.controller().AnswerAtOnce();
  EXPECT_TRUE(stream_->Finish().ok());
  ExpectAnswer(1);
  ExpectAnswer(3);
}

TEST_F(ForwardStreamTest, AbortAnswersEverything) {
  Open();
  for (uint64_t seq = 0; seq < 10; ++seq) ASSERT_TRUE(Send(seq).ok());
  server_.controller().AwaitHeld(10);
  stream_->Abort();
  EXPECT_EQ(stream_->Finish().code(), absl::StatusCode::kCancelled);
  for (uint64_t seq = 0; seq < 10; ++seq) {
    EXPECT_EQ(Await(seq).status().code(), absl::StatusCode::kCancelled);
  }
  EXPECT_EQ(Send(11).code(), absl::StatusCode::kCancelled);
}

TEST_F(ForwardStreamTest, TheDestructorAnswersEverything) {
  Open();
  for (uint64_t seq = 0; seq < 10; ++seq) ASSERT_TRUE(Send(seq).ok());
  stream_.reset();
  EXPECT_EQ(results_.size(), 10u);
}

TEST_F(ForwardStreamTest, OutlivesItsClient) {
  for (int i = 0; i < 20; ++i) {
    Open();
    client_.reset();
    ASSERT_TRUE(Send(1).ok());
    server_.controller().AwaitHeld(1);
    ASSERT_TRUE(server_.controller().Answer("1"));
    ExpectAnswer(1);
    // Ended by itself, or by its destructor: either way its channel goes on this thread.
    if (i % 2 == 0) {
      EXPECT_TRUE(stream_->Finish().ok());
    }
    stream_.reset();
  }
}

TEST_F(ForwardStreamTest, AServerThatGoesAnswersEverything) {
  Open();
  for (uint64_t seq = 0; seq < 10; ++seq) ASSERT_TRUE(Send(seq).ok());
  server_.controller().AwaitHeld(10);
  server_.server().Shutdown(absl::Now());
  for (uint64_t seq = 0; seq < 10; ++seq) {
    EXPECT_EQ(Await(seq).status().code(), absl::StatusCode::kUnavailable);
  }
  EXPECT_EQ(stream_->Finish().code(), absl::StatusCode::kUnavailable);
}

TEST_F(ForwardStreamTest, TheStreamsOwnTimeEndsIt) {
  // On a busy machine 20 ms may be over before the message is sent.
  absl::Status sent;
  for (absl::Duration timeout = absl::Milliseconds(20); timeout < absl::Minutes(1); timeout *= 10) {
    Open({.timeout = timeout});
    sent = Send(1);
    if (sent.ok()) break;
  }
  ASSERT_TRUE(sent.ok()) << sent;
  EXPECT_EQ(Await(1).status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(stream_->Finish().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(ForwardStreamTest, CallbacksMaySend) {
  server_.controller().AnswerAtOnce();
  Open();
  constexpr uint64_t kLast = 200;
  std::function<void(uint64_t)> send = [&](uint64_t seq) {
    EXPECT_TRUE(stream_
                    ->Send(seq, absl::ZeroDuration(), Input(seq),
                           [&, seq](absl::StatusOr<ForwardOutput> result) {
                             EXPECT_TRUE(result.ok()) << result.status();
                             if (seq < kLast) return send(seq + 1);
                             const std::lock_guard<std::mutex> lock(mutex_);
                             results_.emplace(seq, std::move(result));
                             changed_.notify_all();
                           })
                    .ok());
  };
  send(1);
  ExpectAnswer(kLast);
  EXPECT_TRUE(stream_->Finish().ok());
}

}  // namespace
}  // namespace expertmesh
