#include "server/model/strict_json.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "server/model/printable.h"

namespace expertmesh {
namespace {

class StrictSax {
 public:
  bool null() { return Value(); }
  bool boolean(bool) { return Value(); }
  bool number_integer(int64_t) { return Value(); }
  bool number_unsigned(uint64_t) { return Value(); }
  bool number_float(double, const std::string&) { return Value(); }
  bool string(std::string&) { return Value(); }
  bool binary(std::vector<uint8_t>&) { return Value(); }
  bool start_object(size_t) {
    keys_.emplace_back();
    return CheckDepth();
  }
  bool key(std::string& key) {
    if (keys_.back().insert(key).second) return true;
    return Fail(absl::StrCat("key ", Printable(key), " occurs twice"));
  }
  bool end_object() {
    keys_.pop_back();
    return true;
  }
  bool start_array(size_t) {
    if (!Value()) return false;
    keys_.emplace_back();
    return CheckDepth();
  }
  bool end_array() {
    keys_.pop_back();
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception& error) {
    absl::string_view what = error.what();
    const size_t end_of_id = what.find("] ");
    if (end_of_id != absl::string_view::npos) what.remove_prefix(end_of_id + 2);
    return Fail(absl::StrCat("is no valid JSON at byte ", position, ": ", Printable(what)));
  }
  const absl::Status& status() const { return status_; }

 private:
  bool Fail(const absl::AlphaNum& rule) {
    status_ = absl::InvalidArgumentError(rule.Piece());
    return false;
  }
  bool Value() { return !keys_.empty() || Fail("is no JSON object"); }
  bool CheckDepth() {
    if (keys_.size() <= kMaxJsonDepth) return true;
    return Fail(absl::StrCat("is nested more than ", kMaxJsonDepth, " deep"));
  }

  std::vector<absl::flat_hash_set<std::string>> keys_;  // of each open object; none in arrays
  absl::Status status_;
};

}  // namespace

absl::Status CheckStrictJson(absl::string_view text) {
  // The parser would take a zero byte for the end of its input.
  const size_t zero = text.find('\0');
  if (zero != absl::string_view::npos) {
    return absl::InvalidArgumentError(absl::StrCat("has a zero byte at ", zero));
  }
  StrictSax sax;
  nlohmann::json::sax_parse(text.begin(), text.end(), &sax);
  return sax.status();
}

absl::StatusOr<std::string> ReadSmallFile(const std::string& path, int64_t max_bytes) {
  const auto system_error = [&path](absl::string_view action) {
    const absl::Status status = absl::ErrnoToStatus(errno, absl::StrCat("cannot ", action));
    return absl::Status(status.code(),
                        absl::StrCat("file ", Printable(path), ": ", status.message()));
  };
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return system_error("open");
  const absl::Cleanup closer = [fd] { close(fd); };
  struct stat info;
  if (fstat(fd, &info) != 0) return system_error("stat");
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat("file ", Printable(path), ": is not a regular file"));
  }
  // Reading goes by what is there, not by a size that may be about to change.
  std::string text;
  char block[16384];
  while (true) {
    const ssize_t got = read(fd, block, sizeof(block));
    if (got < 0) {
      if (errno == EINTR) continue;
      return system_error("read");
    }
    if (got == 0) return text;
    text.append(block, got);
    if (static_cast<int64_t>(text.size()) > max_bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("file ", Printable(path), ": is larger than ", max_bytes, " bytes"));
    }
  }
}

}  // namespace expertmesh
