#ifndef EXPERTMESH_SERVER_OPS_STOP_SIGNALS_H_
#define EXPERTMESH_SERVER_OPS_STOP_SIGNALS_H_

#include <chrono>
#include <functional>
#include <memory>

namespace expertmesh {

// SIGTERM and SIGINT as calls of a function on an ordinary thread. At most one at a time in a
// process.
class StopSignals {
 public:
  // timeout(1) signals a process and then its group: what comes that soon is no second wish.
  static constexpr std::chrono::seconds kRepeatTime{1};

  // First thing in main, before there is any other thread: all threads inherit the blocked signals,
  // which then wait for a StopSignals. SIGPIPE is ignored: a peer that closed its socket is an
  // error code, not our end.
  static void Block();

  // `on_first` runs once, at the first signal, and may block. Signals in the kRepeatTime after it
  // are ignored; the next one ends the process at once, as the signal would have done by itself,
  // after `on_second`, which must not block.
  explicit StopSignals(std::function<void(int signal_number)> on_first,
                       std::function<void(int signal_number)> on_second = nullptr);
  // Waits for `on_first`, if it runs. The signals stay blocked.
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_OPS_STOP_SIGNALS_H_
