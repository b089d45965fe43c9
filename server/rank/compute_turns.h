#ifndef EXPERTMESH_SERVER_RANK_COMPUTE_TURNS_H_
#define EXPERTMESH_SERVER_RANK_COMPUTE_TURNS_H_

#include <condition_variable>
#include <list>
#include <mutex>
#include <utility>

namespace expertmesh {

// Steps that overlap on one rank compute one at a time, in the order in which they came: two at
// once would only share the cores, and whoever came first is waited for by the others' ranks.
class ComputeTurns {
 public:
  // One step's place in the queue, until it ends or is destroyed. Used by one thread at a time.
  class Turn {
   public:
    Turn() = default;
    Turn(Turn&& other) noexcept
        : turns_(std::exchange(other.turns_, nullptr)), place_(other.place_) {}
    Turn& operator=(Turn&& other) noexcept {
      if (this == &other) return *this;
      End();
      turns_ = std::exchange(other.turns_, nullptr);
      place_ = other.place_;
      return *this;
    }
    ~Turn() { End(); }

    // Blocks until all turns that were taken before have ended.
    void Wait();
    // Nothing when it has ended.
    void End();

   private:
    friend class ComputeTurns;
    Turn(ComputeTurns* turns, std::list<bool>::iterator place) : turns_(turns), place_(place) {}

    ComputeTurns* turns_ = nullptr;
    std::list<bool>::iterator place_;
  };

  // Behind all others. Any thread; the turn must end before this goes.
  Turn Take();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<bool> queue_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RANK_COMPUTE_TURNS_H_
