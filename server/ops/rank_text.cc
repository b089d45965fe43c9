#include "server/ops/rank_text.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace expertmesh {
namespace {

bool BeginsWithRank(const std::string& rank, absl::string_view text) {
  return absl::ConsumePrefix(&text, rank) && (text.empty() || !absl::ascii_isalnum(text.front()));
}

// Of somebody who was named already.
std::string WithoutRank(const std::string& rank, absl::string_view text) {
  if (!BeginsWithRank(rank, text)) return std::string(text);
  text.remove_prefix(rank.size());
  return absl::ConsumePrefix(&text, ": ") ? std::string(text) : absl::StrCat("it", text);
}

}  // namespace

std::string RankText(int32_t ep_rank, absl::string_view why) {
  const std::string rank = absl::StrCat("rank ", ep_rank);
  return BeginsWithRank(rank, why) ? std::string(why) : absl::StrCat(rank, ": ", why);
}

std::string RankText(int32_t ep_rank, absl::string_view what, absl::string_view why) {
  const std::string rank = absl::StrCat("rank ", ep_rank);
  return absl::StrCat(rank, " ", what, ": ", WithoutRank(rank, why));
}

std::string RankText(int32_t ep_rank, absl::string_view what, const absl::Status& why) {
  const std::string rank = absl::StrCat("rank ", ep_rank);
  return absl::StrCat(rank, " ", what, ": ", absl::StatusCodeToString(why.code()), ": ",
                      WithoutRank(rank, why.message()));
}

}  // namespace expertmesh
