#ifndef EXPERTMESH_SERVER_ROUTING_ROUTER_TABLE_H_
#define EXPERTMESH_SERVER_ROUTING_ROUTER_TABLE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "server/routing/router.h"

namespace expertmesh {

// The routers of all layers that are served. Filled before it is used; then thread safe.
class RouterTable {
 public:
  // Replaces an earlier one of the same model and layer.
  void Add(std::string model, std::unique_ptr<Router> router) {
    const int32_t layer = router->layer().index;
    routers_[std::move(model)][layer] = std::move(router);
  }

  // Null when there is none.
  const Router* Find(std::string_view model, int32_t layer) const {
    const auto of_model = routers_.find(model);
    if (of_model == routers_.end()) return nullptr;
    const auto found = of_model->second.find(layer);
    return found == of_model->second.end() ? nullptr : found->second.get();
  }

 private:
  std::map<std::string, std::map<int32_t, std::unique_ptr<Router>>, std::less<>> routers_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_ROUTING_ROUTER_TABLE_H_
