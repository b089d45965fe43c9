#ifndef EXPERTMESH_TESTS_GPU_RESULT_TABLE_H_
#define EXPERTMESH_TESTS_GPU_RESULT_TABLE_H_

#include <string>
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
  // Prints the row at once as well: a run that is cut short has said what it knows.
  void Add(const Result& result);
  void Print() const;
  // False when the file cannot be written. `device` describes the GPU.
  bool WriteJson(const std::string& path, const std::string& device) const;
  bool all_right() const;

 private:
  std::vector<Result> results_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_GPU_RESULT_TABLE_H_
