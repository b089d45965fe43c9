#ifndef EXPERTMESH_TESTS_GPU_RESULT_TABLE_H_
#define EXPERTMESH_TESTS_GPU_RESULT_TABLE_H_

#include <string>
#include <utility>
#include <vector>

namespace expertmesh {

// One measured figure beside the limit of the same run.
struct Result {
  std::string name;
  double value = 0;
  std::string unit;
  double limit = 0;  // same unit; 0: none
  std::string limit_name;
  double target = 0;     // of value / limit; 0: none
  std::string check;     // how the output was found right; empty: not checked
  bool is_right = true;  // false: the output was wrong, and the figure means nothing
};

class ResultTable {
 public:
  ResultTable() = default;
  // `device` describes the GPU. Empty `json_path`: no file.
  ResultTable(std::string json_path, std::string device)
      : json_path_(std::move(json_path)), device_(std::move(device)) {}

  // Prints the row and writes the file anew at once: a run that is cut short has said what it
  // knows, and leaves a whole file.
  void Add(const Result& result);
  // False when the file could not be written once.
  bool is_written() const { return is_written_; }
  bool all_right() const;
  const std::vector<Result>& results() const { return results_; }

 private:
  bool WriteJson() const;

  std::string json_path_;
  std::string device_;
  bool is_written_ = true;
  std::vector<Result> results_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_GPU_RESULT_TABLE_H_
