#ifndef EXPERTMESH_SERVER_CLUSTER_INCARNATION_H_
#define EXPERTMESH_SERVER_CLUSTER_INCARNATION_H_

#include <cstdint>
#include <random>

namespace expertmesh {

// A number that no other group has or had: random, not 0.
inline uint64_t NewIncarnation() {
  std::random_device random;
  uint64_t incarnation = 0;
  while (incarnation == 0) incarnation = (uint64_t{random()} << 32) | random();
  return incarnation;
}

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CLUSTER_INCARNATION_H_
