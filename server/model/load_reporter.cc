#include "server/model/load_reporter.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace expertmesh {

std::string BytesText(int64_t size_bytes) {
  const double value = static_cast<double>(size_bytes);
  if (size_bytes >= int64_t{1} << 30) return absl::StrFormat("%.2f GiB", value / (1 << 30));
  if (size_bytes >= 1 << 20) return absl::StrFormat("%.1f MiB", value / (1 << 20));
  if (size_bytes >= 1 << 10) return absl::StrFormat("%.1f KiB", value / (1 << 10));
  return absl::StrCat(size_bytes, " bytes");
}

LoadReporter::LoadReporter(LoadReporterOptions options, std::string model_name)
    : options_(std::move(options)), model_name_(std::move(model_name)) {}

void LoadReporter::Start(int64_t need_bytes, int64_t available_bytes) {
  start_ = options_.now();
  last_output_ = start_;
  total_bytes_ = need_bytes;
  options_.log(absl::StrCat("loading model ", model_name_, ": its experts need ",
                            BytesText(need_bytes), " of memory, ", BytesText(available_bytes),
                            " are available"));
}

void LoadReporter::Update(int64_t loaded_bytes, int64_t total_bytes) {
  loaded_bytes_ = loaded_bytes;
  total_bytes_ = total_bytes;
  const absl::Time now = options_.now();
  if (now - last_output_ < (options_.is_terminal ? kBarInterval : kLogInterval)) return;
  last_output_ = now;
  if (options_.is_terminal) {
    bar_shown_ = true;
    options_.write_terminal(BarLine());
  } else {
    options_.log(absl::StrCat("loading model ", model_name_, ": ", RateText()));
  }
}

void LoadReporter::Finish(const absl::Status& status) {
  if (bar_shown_) {
    // The whole bar when all went well, so that what stays on the screen is true.
    options_.write_terminal(absl::StrCat(BarLine(), "\n"));
    bar_shown_ = false;
  }
  if (!status.ok()) return;
  const double seconds = absl::ToDoubleSeconds(options_.now() - start_);
  options_.log(absl::StrFormat("loaded model %s: %s in %.1f s", model_name_,
                               BytesText(loaded_bytes_), seconds));
}

std::string LoadReporter::RateText() const {
  const double seconds = absl::ToDoubleSeconds(options_.now() - start_);
  std::string text =
      absl::StrFormat("%3d%% %s of %s", total_bytes_ > 0 ? loaded_bytes_ * 100 / total_bytes_ : 100,
                      BytesText(loaded_bytes_), BytesText(total_bytes_));
  if (seconds <= 0 || loaded_bytes_ <= 0) return text;
  const double bytes_per_second = static_cast<double>(loaded_bytes_) / seconds;
  absl::StrAppend(&text, ", ", BytesText(static_cast<int64_t>(bytes_per_second)), "/s");
  const double left_seconds = static_cast<double>(total_bytes_ - loaded_bytes_) / bytes_per_second;
  if (loaded_bytes_ < total_bytes_) absl::StrAppendFormat(&text, ", %.0f s left", left_seconds);
  return text;
}

std::string LoadReporter::BarLine() const {
  const std::string rate = RateText();
  const std::string head = absl::StrCat("loading ", model_name_, " [");
  const int64_t width = std::max<int64_t>(
      0, options_.terminal_columns - static_cast<int64_t>(head.size() + rate.size()) - 3);
  const int64_t filled =
      total_bytes_ > 0
          ? static_cast<int64_t>(static_cast<double>(width) * static_cast<double>(loaded_bytes_) /
                                 static_cast<double>(total_bytes_))
          : width;
  const std::string bar =
      std::string(std::min(filled, width), '#') + std::string(width - std::min(filled, width), '-');
  // A line longer than the terminal would wrap and could not be drawn over.
  const std::string line = width > 0 ? absl::StrCat(head, bar, "] ", rate) : rate;
  return absl::StrCat("\r\x1b[K", line.substr(0, options_.terminal_columns - 1));
}

}  // namespace expertmesh
