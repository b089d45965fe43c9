#include "client/cli/text_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace expertmesh {

void TextTable::AddRow(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  rows_.push_back(std::move(cells));
}

std::string TextTable::Text() const {
  std::vector<std::string> lines(rows_.size() + 1);
  for (size_t column = 0; column < columns_.size(); ++column) {
    size_t width = 0;
    for (const auto& row : rows_) width = std::max(width, row[column].size());
    if (width == 0) continue;
    width = std::max(width, columns_[column].title.size());
    for (size_t line = 0; line < lines.size(); ++line) {
      const std::string& text = line == 0                         ? columns_[column].title
                                : rows_[line - 1][column].empty() ? "-"
                                                                  : rows_[line - 1][column];
      const std::string padding(width - text.size(), ' ');
      absl::StrAppend(&lines[line], "  ",
                      columns_[column].align == ColumnAlign::kRight ? padding : "", text,
                      columns_[column].align == ColumnAlign::kLeft ? padding : "");
    }
  }
  std::string text;
  for (const std::string& line : lines) {
    absl::StrAppend(&text, absl::StripTrailingAsciiWhitespace(line), "\n");
  }
  return text;
}

}  // namespace expertmesh
