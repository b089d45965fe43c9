#include "server/model/config_reader.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace expertmesh {

using Json = nlohmann::json;

struct ConfigReader::Node {
  Json json;         // an object
  std::string path;  // of sections, with a dot at the end; empty at the top

  // The first of the key's names that is there and not null.
  std::pair<std::string, const Json*> Find(absl::string_view key) const {
    for (const absl::string_view name : absl::StrSplit(key, '|')) {
      const auto it = json.find(std::string(name));
      if (it != json.end() && !it->is_null()) return {std::string(name), &*it};
    }
    return {std::string(key), nullptr};
  }
};

namespace {

constexpr size_t kMaxValueBytes = 200;

// The integer, if the value is one that fits.
std::optional<int64_t> AsInt(const Json& value, int64_t min, int64_t max) {
  if (!value.is_number_integer()) return std::nullopt;
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
    return std::nullopt;
  }
  const int64_t number = value.get<int64_t>();
  if (number < min || number > max) return std::nullopt;
  return number;
}

std::string IntLimit(int64_t min, int64_t max) {
  return absl::StrCat("an integer from ", min, " to ", max);
}

}  // namespace

ConfigReader::ConfigReader(std::shared_ptr<const Node> node) : node_(std::move(node)) {}

absl::StatusOr<ConfigReader> ConfigReader::Parse(absl::string_view text) {
  Json json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return absl::InvalidArgumentError("is no JSON object");
  return ConfigReader(std::make_shared<const Node>(Node{std::move(json), ""}));
}

absl::StatusOr<ConfigReader> ConfigReader::Section(absl::string_view key) const {
  const auto [name, value] = node_->Find(key);
  if (value == nullptr || !value->is_object()) return Error(key, "an object");
  return ConfigReader(
      std::make_shared<const Node>(Node{*value, absl::StrCat(node_->path, name, ".")}));
}

absl::Status ConfigReader::Error(absl::string_view key, absl::string_view limit) const {
  const auto [name, value] = node_->Find(key);
  std::string text = "missing";
  if (value != nullptr) {
    // As JSON in ASCII: control characters are escaped.
    text = value->dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
    if (text.size() > kMaxValueBytes) text = text.substr(0, kMaxValueBytes) + "...";
  }
  return absl::InvalidArgumentError(
      absl::StrCat("key '", node_->path, name, "' is ", text, "; expected ", limit));
}

bool ConfigReader::Has(absl::string_view key) const {
  return !key.empty() && node_->Find(key).second != nullptr;
}

absl::StatusOr<int64_t> ConfigReader::Int(absl::string_view key, int64_t min, int64_t max) const {
  const Json* value = node_->Find(key).second;
  const std::optional<int64_t> number = value == nullptr ? std::nullopt : AsInt(*value, min, max);
  if (!number.has_value()) return Error(key, IntLimit(min, max));
  return *number;
}

absl::StatusOr<int64_t> ConfigReader::IntOr(absl::string_view key, int64_t min, int64_t max,
                                            int64_t absent) const {
  if (!Has(key)) return absent;
  return Int(key, min, max);
}

absl::StatusOr<int64_t> ConfigReader::LayerInt(absl::string_view key, int64_t layer,
                                               int64_t num_layers, int64_t min, int64_t max) const {
  const Json* value = node_->Find(key).second;
  if (value == nullptr || !value->is_array()) return Int(key, min, max);
  if (static_cast<int64_t>(value->size()) != num_layers) {
    return Error(key,
                 absl::StrCat("an integer, or a list of ", num_layers, ", one for each layer"));
  }
  const std::optional<int64_t> number = AsInt((*value)[layer], min, max);
  if (!number.has_value()) {
    return Error(key, absl::StrCat("in element ", layer, " ", IntLimit(min, max)));
  }
  return *number;
}

absl::StatusOr<std::vector<int64_t>> ConfigReader::IntListOrEmpty(absl::string_view key,
                                                                  int64_t min, int64_t max) const {
  std::vector<int64_t> numbers;
  if (!Has(key)) return numbers;
  const Json& value = *node_->Find(key).second;
  if (!value.is_array()) return Error(key, "a list of integers");
  for (const Json& element : value) {
    const std::optional<int64_t> number = AsInt(element, min, max);
    if (!number.has_value()) {
      return Error(key, absl::StrCat("in element ", numbers.size(), " ", IntLimit(min, max)));
    }
    numbers.push_back(*number);
  }
  return numbers;
}

absl::StatusOr<bool> ConfigReader::BoolOr(absl::string_view key, bool absent) const {
  if (!Has(key)) return absent;
  const Json& value = *node_->Find(key).second;
  if (!value.is_boolean()) return Error(key, "true or false");
  return value.get<bool>();
}

absl::StatusOr<float> ConfigReader::FloatOr(absl::string_view key, float min, float max,
                                            float absent) const {
  if (!Has(key)) return absent;
  const Json& value = *node_->Find(key).second;
  const double number = value.is_number() ? value.get<double>() : std::nan("");
  if (!(number >= min && number <= max)) {
    return Error(key, absl::StrCat("a number from ", min, " to ", max));
  }
  return static_cast<float>(number);
}

absl::StatusOr<std::string> ConfigReader::StringOr(absl::string_view key,
                                                   absl::string_view absent) const {
  if (!Has(key)) return std::string(absent);
  const Json& value = *node_->Find(key).second;
  if (!value.is_string()) return Error(key, "a string");
  return value.get<std::string>();
}

absl::StatusOr<std::string> ConfigReader::FirstStringOrEmpty(absl::string_view key) const {
  if (!Has(key)) return std::string();
  const Json& value = *node_->Find(key).second;
  if (!value.is_array() || value.empty() || !value[0].is_string()) {
    return Error(key, "a list that begins with a string");
  }
  return value[0].get<std::string>();
}

}  // namespace expertmesh
