#ifndef EXPERTMESH_CLIENT_CLI_TEXT_TABLE_H_
#define EXPERTMESH_CLIENT_CLI_TEXT_TABLE_H_

#include <string>
#include <vector>

namespace expertmesh {

enum class ColumnAlign { kLeft, kRight };

// Lines of text whose columns are as wide as what stands in them.
class TextTable {
 public:
  struct Column {
    std::string title;
    ColumnAlign align = ColumnAlign::kLeft;
  };
  explicit TextTable(std::vector<Column> columns) : columns_(std::move(columns)) {}

  // As many cells as columns; an empty one is shown as "-".
  void AddRow(std::vector<std::string> cells);

  // The titles and the rows, each line after two spaces; columns without anything in any row are
  // left out. Nothing stands behind a line's last word.
  std::string Text() const;

 private:
  const std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_CLIENT_CLI_TEXT_TABLE_H_
