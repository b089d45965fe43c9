#ifndef EXPERTMESH_TESTS_SERVER_MODEL_SCRATCH_DIRECTORY_H_
#define EXPERTMESH_TESTS_SERVER_MODEL_SCRATCH_DIRECTORY_H_

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

#include "gtest/gtest.h"

namespace expertmesh {

// A directory of its own for one test, removed with all it holds.
class ScratchDirectory {
 public:
  ScratchDirectory() : path_(testing::TempDir() + "/expertmesh_model_XXXXXX") {
    EXPECT_NE(mkdtemp(path_.data()), nullptr) << path_;
  }
  ~ScratchDirectory() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;

  const std::string& path() const { return path_; }
  std::string File(std::string_view name) const { return path_ + "/" + std::string(name); }

  // Writes a file and returns its path.
  std::string Write(std::string_view name, std::string_view content) const {
    const std::string path = File(name);
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }
  std::string Read(std::string_view name) const {
    std::ifstream file(File(name), std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }

 private:
  std::string path_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_MODEL_SCRATCH_DIRECTORY_H_
