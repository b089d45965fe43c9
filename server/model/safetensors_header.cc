#include "server/model/safetensors_header.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/checked_math.h"
#include "server/model/printable.h"

namespace expertmesh {
namespace {

constexpr absl::string_view kMetadataKey = "__metadata__";

// Receives nlohmann::json's parse events. Where in the format an event may stand is a small state
// machine, so whatever the format does not have is refused before anything is kept of it.
class HeaderSax {
 public:
  // The interface that nlohmann::json expects; false stops the parse.
  bool null() { return Unexpected("null"); }
  bool boolean(bool) { return Unexpected("a boolean"); }
  bool number_integer(int64_t value) {
    if (!AtNumber()) return Unexpected("a number");
    if (value < 0) return Fail(absl::StrCat(NumberName(), " is ", value, "; expected >= 0"));
    return Number(static_cast<uint64_t>(value));
  }
  bool number_unsigned(uint64_t value) {
    if (!AtNumber()) return Unexpected("a number");
    return Number(value);
  }
  bool number_float(double, const std::string& text) {
    if (!AtNumber()) return Unexpected("a number");
    return Fail(absl::StrCat(NumberName(), " is ", Printable(text),
                             "; expected an integer from 0 to 9223372036854775807"));
  }
  bool string(std::string& value) {
    if (place_ == Place::kMetadataValue) {
      metadata_value_ = std::move(value);
      header_.metadata.emplace(std::move(metadata_key_), std::move(metadata_value_));
      place_ = Place::kMetadata;
      return true;
    }
    if (place_ == Place::kDType) {
      const std::optional<StoredDType> dtype = StoredDTypeFromName(value);
      if (!dtype.has_value()) {
        return Fail(absl::StrCat("dtype ", Printable(value), " is unknown to the format"));
      }
      tensor_.dtype = *dtype;
      place_ = Place::kTensor;
      return true;
    }
    return Unexpected("a string");
  }
  bool binary(std::vector<uint8_t>&) { return Unexpected("binary"); }

  bool start_object(size_t) {
    switch (place_) {
      case Place::kStart:
        place_ = Place::kHeader;
        return true;
      case Place::kHeaderValue:
        place_ = in_metadata_ ? Place::kMetadata : Place::kTensor;
        return true;
      default:
        return Unexpected("an object");
    }
  }
  bool key(std::string& key) {
    switch (place_) {
      case Place::kHeader:
        return HeaderKey(key);
      case Place::kMetadata:
        if (header_.metadata.contains(key)) {
          return Fail(absl::StrCat("key ", Printable(key), " occurs twice"));
        }
        metadata_key_ = std::move(key);
        place_ = Place::kMetadataValue;
        return true;
      case Place::kTensor:
        return TensorKey(key);
      default:
        return Unexpected("a key");
    }
  }
  bool end_object() {
    if (place_ == Place::kHeader) {
      place_ = Place::kEnd;
      return true;
    }
    if (place_ == Place::kTensor) {
      if (!has_dtype_) return Fail("key 'dtype' is missing");
      if (!has_shape_) return Fail("key 'shape' is missing");
      if (!has_offsets_) return Fail("key 'data_offsets' is missing");
      if (num_offsets_ != 2) {
        return Fail(absl::StrCat("data_offsets has ", num_offsets_, " elements; expected 2"));
      }
      header_.tensors.push_back(std::move(tensor_));
    }
    in_metadata_ = false;
    in_tensor_ = false;
    place_ = Place::kHeader;
    return true;
  }
  bool start_array(size_t) {
    if (place_ == Place::kShape) {
      place_ = Place::kShapeElement;
    } else if (place_ == Place::kOffsets) {
      place_ = Place::kOffsetsElement;
    } else {
      return Unexpected("an array");
    }
    return true;
  }
  bool end_array() {
    place_ = Place::kTensor;
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception& error) {
    // The library's text is "[id] parse error at ...: what".
    absl::string_view what = error.what();
    const size_t end_of_id = what.find("] ");
    if (end_of_id != absl::string_view::npos) what.remove_prefix(end_of_id + 2);
    return Fail(absl::StrCat("header is no valid JSON at byte ", position, ": ", Printable(what)));
  }

  const absl::Status& status() const { return status_; }
  SafetensorsHeader& header() { return header_; }

 private:
  enum class Place : uint8_t {
    kStart,
    kHeader,       // before a key or the end of the outer object
    kHeaderValue,  // after such a key
    kMetadata,
    kMetadataValue,
    kTensor,
    kDType,
    kShape,
    kShapeElement,
    kOffsets,
    kOffsetsElement,
    kEnd,
  };

  bool Fail(const absl::AlphaNum& rule) {
    std::string message;
    if (in_tensor_) absl::StrAppend(&message, "tensor ", Printable(name_), ": ");
    if (in_metadata_) absl::StrAppend(&message, kMetadataKey, ": ");
    absl::StrAppend(&message, rule);
    status_ = absl::InvalidArgumentError(message);
    return false;
  }

  bool Unexpected(absl::string_view what) {
    switch (place_) {
      case Place::kStart:
        return Fail(absl::StrCat("header is ", what, "; expected an object"));
      case Place::kHeaderValue:
        return Fail(absl::StrCat("value is ", what, "; expected an object"));
      case Place::kMetadataValue:
        return Fail(absl::StrCat("value of ", Printable(metadata_key_), " is ", what,
                                 "; expected a string"));
      case Place::kDType:
        return Fail(absl::StrCat("dtype is ", what, "; expected a string"));
      case Place::kShape:
        return Fail(absl::StrCat("shape is ", what, "; expected an array of integers"));
      case Place::kOffsets:
        return Fail(absl::StrCat("data_offsets is ", what, "; expected an array of integers"));
      case Place::kShapeElement:
      case Place::kOffsetsElement:
        return Fail(absl::StrCat(NumberName(), " is ", what, "; expected an integer"));
      default:
        return Fail(absl::StrCat(what, " stands where the format has none"));
    }
  }

  bool HeaderKey(std::string& key) {
    in_metadata_ = key == kMetadataKey;
    in_tensor_ = !in_metadata_;
    name_ = std::move(key);
    if (!names_.insert(name_).second) return Fail("name occurs twice");
    tensor_ = SafetensorsTensor{};
    tensor_.name = name_;
    has_dtype_ = has_shape_ = has_offsets_ = false;
    num_offsets_ = 0;
    place_ = Place::kHeaderValue;
    return true;
  }

  bool TensorKey(const std::string& key) {
    bool* has = nullptr;
    if (key == "dtype") {
      has = &has_dtype_;
      place_ = Place::kDType;
    } else if (key == "shape") {
      has = &has_shape_;
      place_ = Place::kShape;
    } else if (key == "data_offsets") {
      has = &has_offsets_;
      place_ = Place::kOffsets;
    } else {
      return Fail(absl::StrCat("key ", Printable(key), " is unknown to the format"));
    }
    if (*has) return Fail(absl::StrCat("key ", Printable(key), " occurs twice"));
    *has = true;
    return true;
  }

  bool AtNumber() const {
    return place_ == Place::kShapeElement || place_ == Place::kOffsetsElement;
  }
  std::string NumberName() const {
    return place_ == Place::kShapeElement ? absl::StrCat("shape[", tensor_.shape.size(), "]")
                                          : absl::StrCat("data_offsets[", num_offsets_, "]");
  }
  bool Number(uint64_t value) {
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return Fail(absl::StrCat(NumberName(), " is ", value,
                               "; expected an integer from 0 to 9223372036854775807"));
    }
    const int64_t number = static_cast<int64_t>(value);
    if (place_ == Place::kShapeElement) {
      tensor_.shape.push_back(number);
      return true;
    }
    if (num_offsets_ == 2) return Fail("data_offsets has more than 2 elements");
    (num_offsets_ == 0 ? tensor_.begin_offset : tensor_.end_offset) = number;
    ++num_offsets_;
    return true;
  }

  SafetensorsHeader header_;
  absl::Status status_;
  Place place_ = Place::kStart;
  bool in_metadata_ = false;
  bool in_tensor_ = false;
  std::string name_;
  SafetensorsTensor tensor_;
  bool has_dtype_ = false;
  bool has_shape_ = false;
  bool has_offsets_ = false;
  int num_offsets_ = 0;
  std::string metadata_key_;
  std::string metadata_value_;
  absl::flat_hash_set<std::string> names_;
};

absl::Status TensorError(const SafetensorsTensor& tensor, const absl::AlphaNum& rule) {
  return absl::InvalidArgumentError(absl::StrCat("tensor ", Printable(tensor.name), ": ", rule));
}

std::string Offsets(const SafetensorsTensor& tensor) {
  return absl::StrCat("data_offsets [", tensor.begin_offset, ", ", tensor.end_offset, "]");
}

// Bytes by dtype and shape, in whole bytes and int64_t.
absl::StatusOr<int64_t> SizeBytes(const SafetensorsTensor& tensor) {
  std::optional<int64_t> bits = StoredDTypeBits(tensor.dtype);
  for (const int64_t extent : tensor.shape) {
    bits = CheckedMul(*bits, extent);
    if (!bits.has_value()) {
      return TensorError(tensor, absl::StrCat("shape ", ShapeText(tensor.shape), " of ",
                                              StoredDTypeName(tensor.dtype),
                                              " overflows a size in bits of 64 bits"));
    }
  }
  if (*bits % 8 != 0) {
    return TensorError(tensor,
                       absl::StrCat("shape ", ShapeText(tensor.shape), " of ",
                                    StoredDTypeName(tensor.dtype), " does not fill whole bytes"));
  }
  return *bits / 8;
}

absl::Status CheckLayout(const std::vector<SafetensorsTensor>& tensors, int64_t data_bytes) {
  int64_t expected_begin = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    if (tensor.end_offset < tensor.begin_offset) {
      return TensorError(tensor, absl::StrCat(Offsets(tensor), " end before they begin"));
    }
    const absl::StatusOr<int64_t> size_bytes = SizeBytes(tensor);
    if (!size_bytes.ok()) return size_bytes.status();
    if (tensor.size_bytes() != *size_bytes) {
      return TensorError(
          tensor, absl::StrCat(Offsets(tensor), " hold ", tensor.size_bytes(), " bytes; shape ",
                               ShapeText(tensor.shape), " of ", StoredDTypeName(tensor.dtype),
                               " needs ", *size_bytes));
    }
    if (tensor.end_offset > data_bytes) {
      return TensorError(tensor, absl::StrCat(Offsets(tensor), " end after the file's ", data_bytes,
                                              " bytes of data"));
    }
    if (tensor.begin_offset > expected_begin) {
      return TensorError(tensor,
                         absl::StrCat(Offsets(tensor), " leave a hole of ",
                                      tensor.begin_offset - expected_begin, " bytes before it"));
    }
    if (tensor.begin_offset < expected_begin) {
      return TensorError(tensor, absl::StrCat(Offsets(tensor), " overlap the tensor before it by ",
                                              expected_begin - tensor.begin_offset, " bytes"));
    }
    expected_begin = tensor.end_offset;
  }
  if (expected_begin != data_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tensors end at byte ", expected_begin, " of the data; the file goes on to ", data_bytes));
  }
  return absl::OkStatus();
}

}  // namespace

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<int64_t> ParseSafetensorsPrefix(absl::string_view prefix, int64_t file_bytes) {
  if (file_bytes < kSafetensorsPrefixBytes ||
      static_cast<int64_t>(prefix.size()) < kSafetensorsPrefixBytes) {
    return absl::InvalidArgumentError(absl::StrCat("file has ", file_bytes,
                                                   " bytes; the header's size alone takes ",
                                                   kSafetensorsPrefixBytes));
  }
  uint64_t header_bytes = 0;
  for (int i = kSafetensorsPrefixBytes - 1; i >= 0; --i) {
    header_bytes = header_bytes << 8 | static_cast<uint8_t>(prefix[i]);
  }
  if (header_bytes > static_cast<uint64_t>(kMaxSafetensorsHeaderBytes)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "header size is ", header_bytes, " bytes; expected at most ", kMaxSafetensorsHeaderBytes));
  }
  const int64_t available = file_bytes - kSafetensorsPrefixBytes;
  if (static_cast<int64_t>(header_bytes) > available) {
    return absl::InvalidArgumentError(absl::StrCat(
        "header size is ", header_bytes, " bytes; the file has ", available, " after the first 8"));
  }
  return static_cast<int64_t>(header_bytes);
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view json,
                                                         int64_t data_bytes) {
  if (json.empty() || json.front() != '{') {
    return absl::InvalidArgumentError(
        absl::StrCat("header begins with ", Printable(json.substr(0, 1)), "; expected '{'"));
  }
  // The parser would take a zero byte for the end of its input.
  const size_t zero = json.find('\0');
  if (zero != absl::string_view::npos) {
    return absl::InvalidArgumentError(absl::StrCat("header has a zero byte at ", zero));
  }
  const absl::string_view unpadded = json.substr(0, json.find_last_not_of(' ') + 1);
  if (unpadded.back() != '}') {
    return absl::InvalidArgumentError(
        absl::StrCat("header ends with ", Printable(unpadded.substr(unpadded.size() - 1)),
                     "; expected '}', padded with nothing but spaces"));
  }
  HeaderSax sax;
  if (!nlohmann::json::sax_parse(unpadded.begin(), unpadded.end(), &sax)) return sax.status();
  SafetensorsHeader header = std::move(sax.header());
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
              return std::pair(a.begin_offset, a.end_offset) <
                     std::pair(b.begin_offset, b.end_offset);
            });
  const absl::Status status = CheckLayout(header.tensors, data_bytes);
  if (!status.ok()) return status;
  return header;
}

}  // namespace expertmesh
