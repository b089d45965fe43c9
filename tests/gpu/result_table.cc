#include "tests/gpu/result_table.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

namespace expertmesh {
namespace {

void PrintRow(const Result& result) {
  std::printf("%-58s %10.1f %-8s", result.name.c_str(), result.value, result.unit.c_str());
  if (result.limit > 0) {
    std::printf(" %10.1f %-22s %5.2f", result.limit, result.limit_name.c_str(),
                result.value / result.limit);
    if (result.target > 0) {
      std::printf(" (to reach %.2f: %s)", result.target,
                  result.value / result.limit >= result.target ? "yes" : "no");
    }
  }
  std::printf("%s%s\n",
              result.is_right ? "" : "  WRONG: ", result.is_right ? "" : result.check.c_str());
}

}  // namespace

void ResultTable::Add(const Result& result) {
  if (results_.empty()) {
    std::printf("%-58s %10s %-8s %10s %-22s %5s\n", "what", "measured", "unit", "limit",
                "of the same run", "ratio");
  }
  PrintRow(result);
  std::fflush(stdout);
  results_.push_back(result);
  if (!json_path_.empty()) is_written_ = WriteJson() && is_written_;
}

bool ResultTable::WriteJson() const {
  nlohmann::json rows = nlohmann::json::array();
  for (const Result& result : results_) {
    nlohmann::json row = {{"name", result.name},
                          {"value", result.value},
                          {"unit", result.unit},
                          {"check", result.check},
                          {"right", result.is_right}};
    if (result.limit > 0) {
      row["limit"] = result.limit;
      row["limit_name"] = result.limit_name;
      row["ratio"] = result.value / result.limit;
      if (result.target > 0) row["target"] = result.target;
    }
    rows.push_back(row);
  }
  const std::string unfinished = json_path_ + ".unfinished";
  std::ofstream file(unfinished);
  file << nlohmann::json{{"device", device_}, {"results", rows}}.dump(2) << "\n";
  file.close();
  return file.good() && std::rename(unfinished.c_str(), json_path_.c_str()) == 0;
}

bool ResultTable::all_right() const {
  return std::all_of(results_.begin(), results_.end(), [](const Result& r) { return r.is_right; });
}

}  // namespace expertmesh
