#include <cstring>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/cli/tensor_file.h"
#include "kernels/base/checked_math.h"

namespace expertmesh {
namespace {

constexpr absl::string_view kMagic("\x93NUMPY", 6);
constexpr size_t kHeaderAlignment = 64;

struct Descr {
  absl::string_view text;
  DType dtype;
};
constexpr Descr kDescrs[] = {{"<f4", DType::kFloat32},
                             {"<f2", DType::kFloat16},
                             {"<i4", DType::kInt32},
                             {"<i8", DType::kInt64}};

// The text behind 'key': up to the end of the header; nullopt when the key is not there.
std::optional<absl::string_view> AfterKey(absl::string_view header, absl::string_view key) {
  const size_t at = header.find(absl::StrCat("'", key, "':"));
  if (at == absl::string_view::npos) return std::nullopt;
  return absl::StripLeadingAsciiWhitespace(header.substr(at + key.size() + 3));
}

// The quoted type at the start of `descr`, for a message.
absl::string_view DescrText(const std::optional<absl::string_view>& descr) {
  if (!descr.has_value()) return "missing";
  return descr->substr(
      0, descr->find('\'', 1) == absl::string_view::npos ? 16 : descr->find('\'', 1) + 1);
}

absl::StatusOr<std::vector<int64_t>> ParseShape(absl::string_view header) {
  const std::optional<absl::string_view> text = AfterKey(header, "shape");
  const size_t end = text.has_value() ? text->find(')') : absl::string_view::npos;
  if (end == absl::string_view::npos || !absl::StartsWith(*text, "(")) {
    return absl::InvalidArgumentError("the header has no shape");
  }
  std::vector<int64_t> shape;
  for (const absl::string_view item :
       absl::StrSplit(text->substr(1, end - 1), ',', absl::SkipWhitespace())) {
    int64_t size = 0;
    if (!absl::SimpleAtoi(item, &size) || size < 0) {
      return absl::InvalidArgumentError(absl::StrCat("the shape has a size '", item, "'"));
    }
    shape.push_back(size);
  }
  return shape;
}

}  // namespace

absl::StatusOr<FileTensor> ParseNpy(absl::string_view bytes) {
  if (bytes.size() < 10 || bytes.substr(0, 6) != kMagic) {
    return absl::InvalidArgumentError("not a NumPy file: the first bytes are not \\x93NUMPY");
  }
  const auto major = static_cast<unsigned char>(bytes[6]);
  if (major < 1 || major > 3) {
    return absl::InvalidArgumentError(
        absl::StrCat("NumPy format version ", major, "; 1 to 3 are known"));
  }
  const size_t length_bytes = major == 1 ? 2 : 4;
  if (bytes.size() < 8 + length_bytes) return absl::InvalidArgumentError("the header is cut short");
  size_t header_bytes = 0;
  for (size_t i = 0; i < length_bytes; ++i) {
    header_bytes |= static_cast<size_t>(static_cast<unsigned char>(bytes[8 + i])) << (8 * i);
  }
  const size_t data_at = 8 + length_bytes + header_bytes;
  if (bytes.size() < data_at) return absl::InvalidArgumentError("the header is cut short");
  const absl::string_view header = bytes.substr(8 + length_bytes, header_bytes);

  FileTensor tensor;
  const std::optional<absl::string_view> descr = AfterKey(header, "descr");
  for (const Descr& known : kDescrs) {
    if (descr.has_value() && absl::StartsWith(*descr, absl::StrCat("'", known.text, "'"))) {
      tensor.dtype = known.dtype;
    }
  }
  if (tensor.dtype == DType::kInvalid) {
    return absl::InvalidArgumentError(absl::StrCat("element type ", DescrText(descr),
                                                   "; '<f4', '<f2', '<i4' and '<i8' are read"));
  }
  const std::optional<absl::string_view> order = AfterKey(header, "fortran_order");
  if (!order.has_value() || !absl::StartsWith(*order, "False")) {
    return absl::InvalidArgumentError(
        "the array is in Fortran order; save numpy.ascontiguousarray(x)");
  }
  absl::StatusOr<std::vector<int64_t>> shape = ParseShape(header);
  if (!shape.ok()) return shape.status();
  tensor.shape = *std::move(shape);
  std::optional<int64_t> size_bytes = DTypeBytes(tensor.dtype);
  for (const int64_t size : tensor.shape) {
    if (size_bytes.has_value()) size_bytes = CheckedMul(*size_bytes, size);
  }
  const absl::string_view data = bytes.substr(data_at);
  if (!size_bytes.has_value() || static_cast<uint64_t>(*size_bytes) != data.size()) {
    return absl::InvalidArgumentError(absl::StrCat("shape [", absl::StrJoin(tensor.shape, ", "),
                                                   "] does not fit ", data.size(),
                                                   " bytes of data"));
  }
  tensor.data.resize(data.size());
  if (!data.empty()) memcpy(tensor.data.data(), data.data(), data.size());
  return tensor;
}

absl::StatusOr<std::string> FormatNpy(const FileTensor& tensor) {
  absl::string_view descr;
  for (const Descr& known : kDescrs) {
    if (known.dtype == tensor.dtype) descr = known.text;
  }
  if (descr.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("NumPy has no ", std::string(DTypeName(tensor.dtype)),
                     "; write a .safetensors file, or ask for --output_dtype=float32"));
  }
  std::string header =
      absl::StrCat("{'descr': '", descr, "', 'fortran_order': False, 'shape': (",
                   absl::StrJoin(tensor.shape, ", "), tensor.shape.size() == 1 ? ",), }" : "), }");
  const size_t unpadded = kMagic.size() + 4 + header.size() + 1;
  header.append((kHeaderAlignment - unpadded % kHeaderAlignment) % kHeaderAlignment, ' ');
  header.push_back('\n');
  std::string bytes(kMagic);
  bytes.append({'\x01', '\x00', static_cast<char>(header.size() & 0xff),
                static_cast<char>(header.size() >> 8)});
  bytes.append(header);
  bytes.append(reinterpret_cast<const char*>(tensor.data.data()), tensor.data.size());
  return bytes;
}

}  // namespace expertmesh
