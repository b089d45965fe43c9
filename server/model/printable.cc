#include "server/model/printable.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace expertmesh {

std::string Printable(absl::string_view text) {
  constexpr size_t kMaxBytes = 200;
  if (text.size() <= kMaxBytes) return absl::StrCat("'", absl::Utf8SafeCHexEscape(text), "'");
  return absl::StrCat("'", absl::CHexEscape(text.substr(0, kMaxBytes)), "...' (", text.size(),
                      " bytes)");
}

}  // namespace expertmesh
