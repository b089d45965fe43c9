#ifndef EXPERTMESH_SERVER_ROUTING_TOPK_CHOICE_H_
#define EXPERTMESH_SERVER_ROUTING_TOPK_CHOICE_H_

#include <cstdint>

#include "server/model/model_spec.h"

namespace expertmesh {

// The ids of the `topk` largest of `values`[0, size), largest first, equal ones by ascending id. No
// NaN; 0 <= topk <= size. `top_values` [topk] is scratch. Thread safe.
void ChooseTopK(const float* values, int64_t size, int32_t topk, int32_t* ids, float* top_values);

// Overwrites with `masked_value` all `values` [num_groups * group_size] outside the
// spec.topk_groups best groups, equal groups by ascending index. `group_scores` [num_groups] is
// scratch. Thread safe.
void MaskGroups(const RouterSpec& spec, int64_t group_size, float masked_value, float* values,
                float* group_scores);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_ROUTING_TOPK_CHOICE_H_
