#ifndef EXPERTMESH_SERVER_OPS_FEW_OF_H_
#define EXPERTMESH_SERVER_OPS_FEW_OF_H_

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

namespace expertmesh {

// A list that a message can hold: the first names and how many there are beside them, e.g. "a, b
// and 37 more".
inline std::string FewOf(const std::vector<std::string>& names, size_t most = 8) {
  // To leave out one would not shorten it.
  const size_t shown = names.size() <= most + 1 ? names.size() : most;
  std::string text;
  for (size_t i = 0; i < shown; ++i) text += (i == 0 ? "" : ", ") + names[i];
  if (shown < names.size()) text += " and " + std::to_string(names.size() - shown) + " more";
  return text;
}

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_OPS_FEW_OF_H_
