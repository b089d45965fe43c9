#ifndef EXPERTMESH_SERVER_MODEL_CONFIG_READER_H_
#define EXPERTMESH_SERVER_MODEL_CONFIG_READER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace expertmesh {

// Typed, range-checked reading of config.json. A key is a name, or "a|b" for the first name that is
// there; null counts as absent. Errors are INVALID_ARGUMENT and name the key, its value and the
// limit. Immutable, cheap to copy.
class ConfigReader {
 public:
  // `text` must be strict JSON (CheckStrictJson).
  static absl::StatusOr<ConfigReader> Parse(absl::string_view text);

  // The object at `key`; an error when it is missing or no object.
  absl::StatusOr<ConfigReader> Section(absl::string_view key) const;

  bool Has(absl::string_view key) const;
  absl::StatusOr<int64_t> Int(absl::string_view key, int64_t min, int64_t max) const;
  absl::StatusOr<int64_t> IntOr(absl::string_view key, int64_t min, int64_t max,
                                int64_t absent) const;
  // An integer for all layers, or a list of num_layers integers of which element `layer` counts.
  absl::StatusOr<int64_t> LayerInt(absl::string_view key, int64_t layer, int64_t num_layers,
                                   int64_t min, int64_t max) const;
  absl::StatusOr<std::vector<int64_t>> IntListOrEmpty(absl::string_view key, int64_t min,
                                                      int64_t max) const;
  absl::StatusOr<bool> BoolOr(absl::string_view key, bool absent) const;
  // A finite number.
  absl::StatusOr<float> FloatOr(absl::string_view key, float min, float max, float absent) const;
  absl::StatusOr<std::string> StringOr(absl::string_view key, absl::string_view absent) const;
  // Of a list of strings the first; empty when the key is absent.
  absl::StatusOr<std::string> FirstStringOrEmpty(absl::string_view key) const;

  // INVALID_ARGUMENT "key 'x' is <value>; expected <limit>", or "... is missing; expected <limit>".
  absl::Status Error(absl::string_view key, absl::string_view limit) const;

 private:
  struct Node;
  explicit ConfigReader(std::shared_ptr<const Node> node);

  std::shared_ptr<const Node> node_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_MODEL_CONFIG_READER_H_
