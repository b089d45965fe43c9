#ifndef EXPERTMESH_TESTS_SERVER_OPS_NO_MORE_THREADS_H_
#define EXPERTMESH_TESTS_SERVER_OPS_NO_MORE_THREADS_H_

#include <pthread.h>

#include <cstddef>

namespace expertmesh {

// While it lives no thread of this process can be started: each would want a stack that fits no
// memory.
class NoMoreThreads {
 public:
  NoMoreThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, size_t{1} << 46);
    pthread_setattr_default_np(&attributes);
    pthread_attr_destroy(&attributes);
  }
  ~NoMoreThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }

 private:
  pthread_attr_t before_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_OPS_NO_MORE_THREADS_H_
