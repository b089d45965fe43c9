#include "server/model/checkpoint_index.h"

#include <unistd.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/model/printable.h"
#include "server/model/strict_json.h"

namespace expertmesh {
namespace {

constexpr int64_t kMaxIndexBytes = 100'000'000;

bool Exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

// No path and nothing hidden; the suffix keeps the loader from opening whatever else lies there.
bool IsPlainFileName(absl::string_view name) {
  return absl::EndsWith(name, ".safetensors") && !absl::StartsWith(name, ".") &&
         name.find_first_of(absl::string_view("/\\\0", 3)) == absl::string_view::npos;
}

}  // namespace

absl::StatusOr<CheckpointIndex> CheckpointIndex::Open(const std::string& directory) {
  CheckpointIndex index;
  index.directory_ = directory;
  const std::string single_path = absl::StrCat(directory, "/model.safetensors");
  const std::string index_path = absl::StrCat(directory, "/model.safetensors.index.json");
  absl::Status status;
  // The order of Hugging Face Transformers.
  if (Exists(single_path)) {
    status = index.AddWholeFile(single_path);
  } else if (Exists(index_path)) {
    status = index.AddShards(index_path);
  } else {
    status = absl::NotFoundError(
        absl::StrCat("directory ", Printable(directory),
                     " has neither model.safetensors nor model.safetensors.index.json"));
  }
  if (!status.ok()) return status;
  return index;
}

absl::Status CheckpointIndex::AddWholeFile(const std::string& path) {
  absl::StatusOr<std::shared_ptr<const SafetensorsFile>> file = SafetensorsFile::Open(path);
  if (!file.ok()) return file.status();
  tensors_.reserve((*file)->tensors().size());
  for (const SafetensorsTensor& tensor : (*file)->tensors()) {
    tensors_.emplace(tensor.name, CheckpointTensor{*file, &tensor});
  }
  files_.push_back(*std::move(file));
  return absl::OkStatus();
}

absl::Status CheckpointIndex::AddShards(const std::string& index_path) {
  const absl::StatusOr<std::string> text = ReadSmallFile(index_path, kMaxIndexBytes);
  if (!text.ok()) return text.status();
  const auto error = [&index_path](const absl::AlphaNum& rule) {
    return absl::InvalidArgumentError(absl::StrCat("file ", Printable(index_path), ": ", rule));
  };
  const absl::Status strict = CheckStrictJson(*text);
  if (!strict.ok()) return error(strict.message());
  const nlohmann::json json = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
  const auto weight_map = json.find("weight_map");
  if (weight_map == json.end() || !weight_map->is_object()) {
    return error("key 'weight_map' is missing or no object");
  }
  if (weight_map->empty()) return error("'weight_map' is empty");

  absl::flat_hash_map<std::string, std::shared_ptr<const SafetensorsFile>> opened;
  for (const auto& [name, file_value] : weight_map->items()) {
    if (!file_value.is_string()) {
      return error(absl::StrCat("weight_map[", Printable(name), "] is no string"));
    }
    const std::string& file_name = file_value.get_ref<const std::string&>();
    if (!IsPlainFileName(file_name)) {
      return error(absl::StrCat("weight_map[", Printable(name), "] is ", Printable(file_name),
                                "; expected a plain file name ending in .safetensors"));
    }
    std::shared_ptr<const SafetensorsFile>& file = opened[file_name];
    if (file == nullptr) {
      absl::StatusOr<std::shared_ptr<const SafetensorsFile>> result =
          SafetensorsFile::Open(absl::StrCat(directory_, "/", file_name));
      if (!result.ok()) {
        return absl::Status(
            result.status().code(),
            absl::StrCat(result.status().message(), " (named by ", Printable(index_path),
                         " for tensor ", Printable(name), ")"));
      }
      file = *std::move(result);
      files_.push_back(file);
    }
    const SafetensorsTensor* tensor = file->Find(name);
    if (tensor == nullptr) {
      return absl::NotFoundError(absl::StrCat("file ", Printable(file->path()), ": tensor ",
                                              Printable(name), " is missing; ",
                                              Printable(index_path), " says it is there"));
    }
    tensors_.emplace(name, CheckpointTensor{file, tensor});
  }
  return absl::OkStatus();
}

const CheckpointTensor* CheckpointIndex::Find(absl::string_view name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

std::string CheckpointIndex::Describe(const CheckpointTensor& tensor) {
  return absl::StrCat("file ", Printable(tensor.file->path()), ": tensor ",
                      Printable(tensor.tensor->name));
}

}  // namespace expertmesh
