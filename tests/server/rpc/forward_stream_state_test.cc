#include "server/rpc/forward_stream_state.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace expertmesh {
namespace {

using Action = ForwardStreamState::Action;
using MessagePtr = ForwardStreamState::MessagePtr;
constexpr int64_t kOverhead = ForwardStreamState::kMessageOverheadBytes;

MessagePtr NewMessage(uint64_t stream_seq) {
  auto message = std::make_shared<ForwardStreamMessage>();
  message->stream_seq = stream_seq;
  return message;
}

class ForwardStreamStateTest : public testing::Test {
 protected:
  // A message that arrives and is admitted.
  MessagePtr Arrive(uint64_t stream_seq, int64_t bytes) {
    EXPECT_EQ(state_.Next(), Action::kRead);
    state_.OnReadDone(true);
    MessagePtr message = NewMessage(stream_seq);
    EXPECT_TRUE(state_.Admit(message, bytes));
    return message;
  }

  ForwardStreamTotal total_{10 * kOverhead};
  ForwardStreamState state_{5 * kOverhead, &total_};
};

TEST_F(ForwardStreamStateTest, AnswersOutOfOrderOneWriteAtATime) {
  const MessagePtr first = Arrive(1, 0);
  const MessagePtr second = Arrive(2, 0);
  EXPECT_EQ(state_.Next(), Action::kRead);
  EXPECT_TRUE(state_.OnAnswer(second, 10));
  EXPECT_TRUE(state_.OnAnswer(first, 10));
  EXPECT_EQ(state_.Next(), Action::kWrite);
  EXPECT_EQ(state_.writing(), second);
  EXPECT_EQ(state_.Next(), Action::kNone);
  EXPECT_EQ(state_.OnWriteDone(), second);
  EXPECT_EQ(state_.Next(), Action::kWrite);
  EXPECT_EQ(state_.writing(), first);
}

TEST_F(ForwardStreamStateTest, KeepsBackWhatIsFollowedButNeverTheFirst) {
  std::vector<MessagePtr> messages;
  for (const uint64_t seq : {1, 2, 3}) messages.push_back(Arrive(seq, 0));
  for (const MessagePtr& message : messages) EXPECT_TRUE(state_.OnAnswer(message, 10));
  EXPECT_EQ(state_.Next(), Action::kWrite);
  EXPECT_FALSE(state_.may_keep_back()) << "the headers go with it";
  state_.OnWriteDone();
  EXPECT_EQ(state_.Next(), Action::kWrite);
  EXPECT_TRUE(state_.may_keep_back());
  state_.OnWriteDone();
  EXPECT_EQ(state_.Next(), Action::kWrite);
  EXPECT_FALSE(state_.may_keep_back()) << "nothing follows";
}

TEST_F(ForwardStreamStateTest, WithholdsReadsUntilAnAnswerIsWritten) {
  const MessagePtr first = Arrive(1, 4 * kOverhead);  // with its overhead, all of it
  EXPECT_EQ(state_.Next(), Action::kNone);
  EXPECT_TRUE(state_.OnAnswer(first, 4 * kOverhead));
  EXPECT_EQ(state_.Next(), Action::kWrite);
  EXPECT_EQ(state_.Next(), Action::kNone) << "an answer counts until it was written";
  state_.OnWriteDone();
  EXPECT_EQ(state_.Next(), Action::kRead);
}

TEST_F(ForwardStreamStateTest, AMessageReadBeforeTheEndButSeenAfterItIsNotTaken) {
  EXPECT_EQ(state_.Next(), Action::kRead);
  state_.EndWhenAnswered(absl::UnavailableError("draining"));
  EXPECT_EQ(state_.Next(), Action::kFinish);
  EXPECT_TRUE(state_.ended());
  state_.OnReadDone(true);
  EXPECT_FALSE(state_.Admit(NewMessage(1), 1000));
  EXPECT_EQ(state_.num_running(), 0);
  EXPECT_EQ(total_.bytes(), 0) << "of every other stream's budget, until the process ends";
}

TEST_F(ForwardStreamStateTest, AnExpectedAnswerCountsAndAShorterOneFrees) {
  const MessagePtr first = Arrive(1, 0);
  state_.ExpectAnswer(first.get(), 4 * kOverhead);
  EXPECT_EQ(state_.Next(), Action::kNone);
  EXPECT_TRUE(state_.OnAnswer(first, 0));
  EXPECT_EQ(state_.charged_bytes(), kOverhead);
  EXPECT_EQ(state_.Next(), Action::kWrite);
  EXPECT_EQ(state_.Next(), Action::kRead);
}

TEST_F(ForwardStreamStateTest, OneMessageIsAlwaysTaken) {
  total_.Add(1'000'000);  // other streams
  const MessagePtr first = Arrive(1, 100 * kOverhead);
  EXPECT_EQ(state_.Next(), Action::kNone);
  EXPECT_TRUE(state_.OnAnswer(first, 0));
  EXPECT_EQ(state_.Next(), Action::kWrite);
  EXPECT_EQ(state_.Next(), Action::kNone) << "below its own bound, but the process's is used up";
  total_.Add(-1'000'000);
  EXPECT_EQ(state_.Next(), Action::kRead);
}

TEST_F(ForwardStreamStateTest, ANumberIsFreeWhenItsAnswerMayBeOut) {
  const MessagePtr first = Arrive(7, 0);
  EXPECT_EQ(state_.FindRunning(7), first);
  EXPECT_EQ(state_.Next(), Action::kRead);
  EXPECT_FALSE(state_.Admit(NewMessage(7), 0)) << "in flight";
  EXPECT_TRUE(state_.OnAnswer(first, 0));
  EXPECT_EQ(state_.FindRunning(7), nullptr) << "too late to cancel";
  EXPECT_FALSE(state_.Admit(NewMessage(7), 0)) << "the client cannot know of the answer yet";
  EXPECT_EQ(state_.Next(), Action::kWrite);
  EXPECT_TRUE(state_.Admit(NewMessage(7), 0));
}

TEST_F(ForwardStreamStateTest, HalfCloseFinishesAfterTheLastAnswer) {
  const MessagePtr first = Arrive(1, 0);
  EXPECT_EQ(state_.Next(), Action::kRead);
  state_.OnReadDone(false);
  EXPECT_EQ(state_.Next(), Action::kNone);
  EXPECT_TRUE(state_.OnAnswer(first, 0));
  EXPECT_EQ(state_.Next(), Action::kWrite);
  EXPECT_EQ(state_.Next(), Action::kNone);
  state_.OnWriteDone();
  EXPECT_EQ(state_.Next(), Action::kFinish);
  EXPECT_TRUE(state_.final_status().ok());
  EXPECT_EQ(state_.Next(), Action::kNone);
}

TEST_F(ForwardStreamStateTest, AnEndDropsAnswersAndAwaitsWhatRuns) {
  const MessagePtr written = Arrive(1, 0), waiting = Arrive(2, 0), running = Arrive(3, 0);
  EXPECT_TRUE(state_.OnAnswer(written, 0));
  EXPECT_TRUE(state_.OnAnswer(waiting, 0));
  EXPECT_EQ(state_.Next(), Action::kWrite);
  EXPECT_EQ(state_.Next(), Action::kRead);
  const auto ended = state_.End(absl::CancelledError("gone"));
  EXPECT_EQ(ended.running, std::vector<MessagePtr>{running});
  EXPECT_EQ(std::vector<MessagePtr>(ended.dropped.begin(), ended.dropped.end()),
            std::vector<MessagePtr>{waiting});
  EXPECT_TRUE(state_.End(absl::InternalError("later")).running.empty());
  EXPECT_EQ(state_.Next(), Action::kNone);
  EXPECT_EQ(total_.bytes(), 2 * kOverhead) << "what runs and what is being written holds memory";
  EXPECT_FALSE(state_.OnAnswer(running, 100));
  EXPECT_EQ(state_.Next(), Action::kNone);
  state_.OnWriteDone();
  EXPECT_EQ(total_.bytes(), 0);
  EXPECT_EQ(state_.Next(), Action::kFinish) << "with a read outstanding";
  EXPECT_EQ(state_.final_status(), absl::CancelledError("gone"));
  state_.OnReadDone(true);
  EXPECT_FALSE(state_.Admit(NewMessage(9), 0));
}

TEST_F(ForwardStreamStateTest, EndWhenAnsweredTakesWhatWasOnItsWay) {
  const MessagePtr first = Arrive(1, 0);
  EXPECT_EQ(state_.Next(), Action::kRead);
  state_.EndWhenAnswered(absl::UnavailableError("stopping"));
  state_.OnReadDone(true);
  const MessagePtr second = NewMessage(2);
  EXPECT_TRUE(state_.Admit(second, 0));
  EXPECT_EQ(state_.Next(), Action::kNone) << "nothing more is read";
  for (const MessagePtr& message : {first, second}) {
    EXPECT_TRUE(state_.OnAnswer(message, 0));
    EXPECT_EQ(state_.Next(), Action::kWrite);
    EXPECT_EQ(state_.Next(), Action::kNone);
    state_.OnWriteDone();
  }
  EXPECT_EQ(state_.Next(), Action::kFinish);
  EXPECT_EQ(state_.final_status(), absl::UnavailableError("stopping"));
}

TEST_F(ForwardStreamStateTest, AnswersBehindManyOthersAreCopied) {
  ForwardStreamState state(1'000'000'000, &total_);
  std::vector<MessagePtr> messages;
  for (uint64_t i = 0; i < 12; ++i) {
    messages.push_back(NewMessage(i));
    ASSERT_TRUE(state.Admit(messages.back(), 0));
  }
  for (size_t i = 0; i < ForwardStreamState::kMaxSharedAnswers; ++i) {
    EXPECT_FALSE(state.ShouldCopyAnswer());
    state.OnAnswer(messages[i], 0);
  }
  EXPECT_TRUE(state.ShouldCopyAnswer());
  EXPECT_EQ(state.Next(), Action::kWrite);
  EXPECT_FALSE(state.ShouldCopyAnswer());
  state.OnAnswer(messages[8], ForwardStreamState::kMaxSharedAnswerBytes);
  EXPECT_TRUE(state.ShouldCopyAnswer());
}

// The rules once more, without any sum that is kept: everything is counted anew each time.
struct Model {
  enum class Phase { kRunning, kWaiting, kWriting, kGone };
  struct Entry {
    MessagePtr message;
    Phase phase;
    int64_t bytes;
    bool dropped = false;
  };
  std::vector<Entry> entries;
  std::vector<size_t> answers;  // the order in which they came
  int64_t max_bytes, max_total, other_bytes;
  bool reading = false, reads_done = false, ended = false, finished = false;

  int64_t Count(Phase phase) const {
    return std::count_if(entries.begin(), entries.end(),
                         [&](const Entry& entry) { return entry.phase == phase; });
  }
  int64_t Charged() const {
    int64_t sum = 0;
    for (const Entry& entry : entries) sum += entry.phase == Phase::kGone ? 0 : entry.bytes;
    return sum;
  }
  bool InFlight(uint64_t seq) const {
    return std::any_of(entries.begin(), entries.end(), [&](const Entry& entry) {
      return entry.message->stream_seq == seq && !entry.dropped &&
             (entry.phase == Phase::kRunning || entry.phase == Phase::kWaiting);
    });
  }
  Action Next() {
    if (finished) return Action::kNone;
    if (Count(Phase::kWriting) == 0 && !answers.empty()) {
      entries[answers.front()].phase = Phase::kWriting;
      answers.erase(answers.begin());
      return Action::kWrite;
    }
    const int64_t charged = Charged();
    if (!reading && !reads_done && !ended &&
        (charged == 0 || (charged < max_bytes && charged + other_bytes < max_total))) {
      reading = true;
      return Action::kRead;
    }
    if ((reads_done || ended) && Count(Phase::kRunning) == 0 && Count(Phase::kWriting) == 0) {
      finished = true;
      return Action::kFinish;
    }
    return Action::kNone;
  }
};

void RunRandomly(uint64_t seed) {
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  Model model{};
  model.max_bytes = draw(1, 12) * kOverhead;
  model.max_total = draw(1, 16) * kOverhead;
  ForwardStreamTotal total(model.max_total);
  ForwardStreamState state(model.max_bytes, &total);
  using Phase = Model::Phase;
  // One that is in the phase, at random; or entries.size().
  const auto any = [&](Phase phase) {
    std::vector<size_t> found;
    for (size_t i = 0; i < model.entries.size(); ++i) {
      if (model.entries[i].phase == phase) found.push_back(i);
    }
    return found.empty() ? model.entries.size() : found[draw(0, found.size() - 1)];
  };
  for (int step = 0; step < 400 && !model.finished; ++step) {
    const int64_t other = draw(0, 8) * kOverhead;
    total.Add(other - model.other_bytes);
    model.other_bytes = other;
    for (;;) {
      const Action expected = model.Next();
      ASSERT_EQ(static_cast<int>(state.Next()), static_cast<int>(expected)) << "step " << step;
      if (expected == Action::kNone || expected == Action::kFinish) break;
      if (expected == Action::kWrite) {
        ASSERT_EQ(state.writing(), model.entries[any(Phase::kWriting)].message);
      }
    }
    if (model.finished) break;
    switch (draw(0, 5)) {
      case 0:
      case 1: {
        if (!model.reading) break;
        model.reading = false;
        if (draw(0, 50) == 0) {
          state.OnReadDone(false);
          model.reads_done = true;
          break;
        }
        state.OnReadDone(true);
        const MessagePtr message = NewMessage(static_cast<uint64_t>(draw(0, 20)));
        const int64_t bytes = draw(0, 3 * kOverhead);
        const bool taken = !model.ended && !model.InFlight(message->stream_seq);
        ASSERT_EQ(state.Admit(message, bytes), taken);
        if (taken) model.entries.push_back({message, Phase::kRunning, bytes + kOverhead});
        break;
      }
      case 2: {
        const size_t index = any(Phase::kRunning);
        if (index == model.entries.size()) break;
        const int64_t bytes = draw(0, kOverhead);
        state.ExpectAnswer(model.entries[index].message.get(), bytes);
        model.entries[index].bytes += bytes;
        break;
      }
      case 3: {
        const size_t index = any(Phase::kRunning);
        if (index == model.entries.size()) break;
        const int64_t bytes = draw(0, 3 * kOverhead);
        ASSERT_EQ(state.OnAnswer(model.entries[index].message, bytes), !model.ended);
        model.entries[index].phase = model.ended ? Phase::kGone : Phase::kWaiting;
        model.entries[index].bytes = bytes + kOverhead;
        if (!model.ended) model.answers.push_back(index);
        break;
      }
      case 4: {
        const size_t index = any(Phase::kWriting);
        if (index == model.entries.size()) break;
        ASSERT_EQ(state.OnWriteDone(), model.entries[index].message);
        model.entries[index].phase = Phase::kGone;
        break;
      }
      case 5: {
        if (draw(0, 30) != 0) break;
        const size_t running = state.End(absl::CancelledError("")).running.size();
        ASSERT_EQ(running, model.ended ? 0 : model.Count(Phase::kRunning));
        model.ended = true;
        model.answers.clear();
        for (Model::Entry& entry : model.entries) {
          entry.dropped = true;
          if (entry.phase == Phase::kWaiting) entry.phase = Phase::kGone;
        }
        break;
      }
    }
    ASSERT_EQ(state.charged_bytes(), model.Charged());
    ASSERT_EQ(total.bytes(), model.Charged() + model.other_bytes);
    ASSERT_EQ(state.num_running(), model.Count(Phase::kRunning));
    for (const Model::Entry& entry : model.entries) {
      const MessagePtr found = state.FindRunning(entry.message->stream_seq);
      if (entry.phase == Phase::kRunning && !entry.dropped) {
        ASSERT_EQ(found, entry.message);
      } else {
        ASSERT_NE(found, entry.message);
      }
    }
  }
  // Nothing stays charged once everything has ended.
  state.End(absl::OkStatus());
  for (const Model::Entry& entry : model.entries) {
    if (entry.phase == Phase::kRunning) state.OnAnswer(entry.message, 1);
    if (entry.phase == Phase::kWriting) state.OnWriteDone();
  }
  EXPECT_EQ(total.bytes(), model.other_bytes);
}

TEST(ForwardStreamStateRandomTest, DoesAsTheModelDoes) {
  const uint64_t base = std::random_device()();
  for (uint64_t i = 0; i < 500 && !testing::Test::HasFatalFailure(); ++i) RunRandomly(base + i);
}

}  // namespace
}  // namespace expertmesh
