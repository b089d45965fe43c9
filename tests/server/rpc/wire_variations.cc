#include "tests/server/rpc/wire_variations.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "google/protobuf/descriptor.h"
#include "grpcpp/support/slice.h"

namespace expertmesh {
namespace {

using ::google::protobuf::FieldDescriptor;
using ::google::protobuf::Message;
using ::google::protobuf::Reflection;

bool IsPackable(const FieldDescriptor* field) { return field->is_packable(); }

int WireTypeOf(const FieldDescriptor* field) {
  switch (field->type()) {
    case FieldDescriptor::TYPE_FLOAT:
    case FieldDescriptor::TYPE_FIXED32:
    case FieldDescriptor::TYPE_SFIXED32:
      return 5;
    case FieldDescriptor::TYPE_DOUBLE:
    case FieldDescriptor::TYPE_FIXED64:
    case FieldDescriptor::TYPE_SFIXED64:
      return 1;
    case FieldDescriptor::TYPE_STRING:
    case FieldDescriptor::TYPE_BYTES:
    case FieldDescriptor::TYPE_MESSAGE:
      return 2;
    default:
      return 0;
  }
}

template <typename T>
std::string RawBytes(T value) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

}  // namespace

int64_t WireVariations::Below(int64_t n) {
  return static_cast<int64_t>(random_() % static_cast<uint64_t>(n));
}

std::string WireVariations::Text() {
  static const char* const kPieces[] = {
      "a", "Z9", "qwen3-moe", "", "\xc3\xa4", "\xe2\x82\xac", "\xf0\x9f\x98\x80", "\xed\x9f\xbf"};
  std::string text;
  for (int64_t i = Below(5); i > 0; --i) text += kPieces[Below(std::size(kPieces))];
  // Rarely no UTF-8: a lone continuation, overlong, a surrogate, too large, cut short.
  static const char* const kBad[] = {"\x80",     "\xc0\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80",
                                     "\xe2\x82", "\xff"};
  if (OneIn(300)) text += kBad[Below(std::size(kBad))];
  return text;
}

void WireVariations::Fill(Message* message, int max_elements) {
  const auto* descriptor = message->GetDescriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    if (!OneIn(3)) FillField(message, descriptor->field(i), max_elements);
  }
}

void WireVariations::FillField(Message* message, const FieldDescriptor* field, int max_elements) {
  const Reflection* reflection = message->GetReflection();
  const auto number = [&] {
    const uint64_t bits = random_();
    return static_cast<int64_t>(OneIn(3) ? bits : bits % 300);
  };
  if (field->is_repeated()) {
    for (int64_t i = Below(max_elements + 1); i > 0; --i) {
      switch (field->type()) {
        case FieldDescriptor::TYPE_FLOAT: {
          const auto bits = static_cast<uint32_t>(random_());
          float value;
          std::memcpy(&value, &bits, sizeof(value));
          reflection->AddFloat(message, field, value);
          break;
        }
        case FieldDescriptor::TYPE_INT64:
          reflection->AddInt64(message, field, number());
          break;
        case FieldDescriptor::TYPE_SFIXED32:
          reflection->AddInt32(message, field, static_cast<int32_t>(number()));
          break;
        case FieldDescriptor::TYPE_STRING:
          reflection->AddString(message, field, Text());
          break;
        default:
          GOOGLE_LOG(FATAL) << "no random values for repeated " << field->full_name();
      }
    }
    return;
  }
  switch (field->type()) {
    case FieldDescriptor::TYPE_MESSAGE:
      Fill(reflection->MutableMessage(message, field), max_elements);
      break;
    case FieldDescriptor::TYPE_STRING:
      reflection->SetString(message, field, Text());
      break;
    case FieldDescriptor::TYPE_BYTES: {
      std::string bytes(static_cast<size_t>(Below(4 * max_elements + 1)), '\0');
      for (char& byte : bytes) byte = static_cast<char>(random_());
      reflection->SetString(message, field, bytes);
      break;
    }
    case FieldDescriptor::TYPE_BOOL:
      reflection->SetBool(message, field, OneIn(2));
      break;
    case FieldDescriptor::TYPE_ENUM:
      reflection->SetEnumValue(message, field, static_cast<int>(number()));
      break;
    case FieldDescriptor::TYPE_INT32:
      reflection->SetInt32(message, field, static_cast<int32_t>(number()));
      break;
    case FieldDescriptor::TYPE_INT64:
      reflection->SetInt64(message, field, number());
      break;
    case FieldDescriptor::TYPE_UINT64:
      reflection->SetUInt64(message, field, static_cast<uint64_t>(number()));
      break;
    case FieldDescriptor::TYPE_FIXED64:
      reflection->SetUInt64(message, field, random_());
      break;
    case FieldDescriptor::TYPE_DOUBLE:
      reflection->SetDouble(message, field, static_cast<double>(number()));
      break;
    case FieldDescriptor::TYPE_FLOAT:
      reflection->SetFloat(message, field, static_cast<float>(number()));
      break;
    default:
      GOOGLE_LOG(FATAL) << "no random values for " << field->full_name();
  }
}

std::string WireVariations::Varint(uint64_t value) {
  std::string bytes;
  while (value >= 0x80) {
    bytes.push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  bytes.push_back(static_cast<char>(value));
  // Overlong: legal up to 10 bytes for a value, up to 5 for a tag or a length.
  if (OneIn(60)) {
    for (int64_t i = Below(6); i >= 0; --i) {
      bytes.back() = static_cast<char>(bytes.back() | 0x80);
      bytes.push_back('\0');
    }
  }
  return bytes;
}

std::string WireVariations::Tag(int field_number, int wire_type) {
  return Varint(static_cast<uint64_t>(field_number) << 3 | static_cast<uint64_t>(wire_type));
}

std::string WireVariations::Delimited(int field_number, const std::string& bytes) {
  return Tag(field_number, 2) + Varint(bytes.size()) + bytes;
}

std::string WireVariations::UnknownField(int depth) {
  // Known numbers with what is mostly a wrong type; unknown, large and impossible ones.
  static const int kNumbers[] = {1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 15, 16, 100, (1 << 29) - 1, 17};
  const int field_number = OneIn(200) ? 0 : kNumbers[Below(std::size(kNumbers))];
  switch (OneIn(200) ? 6 : Below(5)) {
    case 0:
      return Tag(field_number, 0) + Varint(random_());
    case 1:
      return Tag(field_number, 1) + RawBytes(random_());
    case 2: {
      std::string bytes(static_cast<size_t>(Below(20)), '\0');
      for (char& byte : bytes) byte = static_cast<char>(random_());
      return Delimited(field_number, bytes);
    }
    case 3: {
      std::string group = Tag(field_number, 3);
      if (depth < 5) {
        for (int64_t i = Below(3); i > 0; --i) group += UnknownField(depth + 1);
      }
      return group + Tag(OneIn(50) ? field_number + 1 : field_number, 4);
    }
    case 4:
      return Tag(field_number, 5) + RawBytes(static_cast<uint32_t>(random_()));
    default:
      return Tag(field_number, 6 + static_cast<int>(Below(2)));
  }
}

std::string WireVariations::Element(const Message& message, const FieldDescriptor* field,
                                    int index) {
  const Reflection* reflection = message.GetReflection();
  const bool repeated = field->is_repeated();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_FLOAT:
      return RawBytes(repeated ? reflection->GetRepeatedFloat(message, field, index)
                               : reflection->GetFloat(message, field));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return RawBytes(reflection->GetDouble(message, field));
    case FieldDescriptor::CPPTYPE_INT32: {
      const int32_t value = repeated ? reflection->GetRepeatedInt32(message, field, index)
                                     : reflection->GetInt32(message, field);
      return field->type() == FieldDescriptor::TYPE_SFIXED32
                 ? RawBytes(value)
                 : Varint(static_cast<uint64_t>(int64_t{value}));
    }
    case FieldDescriptor::CPPTYPE_INT64:
      return Varint(static_cast<uint64_t>(repeated
                                              ? reflection->GetRepeatedInt64(message, field, index)
                                              : reflection->GetInt64(message, field)));
    case FieldDescriptor::CPPTYPE_UINT64: {
      const uint64_t value = reflection->GetUInt64(message, field);
      return field->type() == FieldDescriptor::TYPE_FIXED64 ? RawBytes(value) : Varint(value);
    }
    case FieldDescriptor::CPPTYPE_BOOL:
      return Varint(reflection->GetBool(message, field) ? (OneIn(4) ? random_() | 1 : 1) : 0);
    case FieldDescriptor::CPPTYPE_ENUM:
      return Varint(static_cast<uint64_t>(int64_t{reflection->GetEnumValue(message, field)}));
    case FieldDescriptor::CPPTYPE_STRING: {
      const std::string bytes = repeated ? reflection->GetRepeatedString(message, field, index)
                                         : reflection->GetString(message, field);
      return Varint(bytes.size()) + bytes;
    }
    case FieldDescriptor::CPPTYPE_MESSAGE: {
      const std::string bytes =
          SerializeAt(repeated ? reflection->GetRepeatedMessage(message, field, index)
                               : reflection->GetMessage(message, field),
                      depth_ + 1);
      return Varint(bytes.size()) + bytes;
    }
    default:
      GOOGLE_LOG(FATAL) << "no wire form for " << field->full_name();
      return "";
  }
}

void WireVariations::AppendOccurrences(const Message& message, const FieldDescriptor* field,
                                       std::vector<std::string>* occurrences) {
  const int wire_type = WireTypeOf(field);
  if (!field->is_repeated()) {
    occurrences->push_back(Tag(field->number(), wire_type) + Element(message, field, 0));
    return;
  }
  const int size = message.GetReflection()->FieldSize(message, field);
  for (int begin = 0; begin < size;) {
    if (!IsPackable(field) || OneIn(8)) {
      occurrences->push_back(Tag(field->number(), wire_type) + Element(message, field, begin++));
      continue;
    }
    const int end = OneIn(3) ? begin + 1 + static_cast<int>(Below(size - begin)) : size;
    std::string packed;
    for (int i = begin; i < end; ++i) packed += Element(message, field, i);
    occurrences->push_back(Delimited(field->number(), packed));
    begin = end;
  }
}

std::string WireVariations::Serialize(const Message& message) { return SerializeAt(message, 0); }

std::string WireVariations::SerializeAt(const Message& message, int depth) {
  const int outer_depth = depth_;
  depth_ = depth;
  std::vector<std::string> occurrences;
  const auto append_all = [&](const Message& source) {
    std::vector<const FieldDescriptor*> fields;
    source.GetReflection()->ListFields(source, &fields);
    for (const FieldDescriptor* field : fields) AppendOccurrences(source, field, &occurrences);
  };
  append_all(message);
  if (OneIn(4) && depth < 3) {
    const std::unique_ptr<Message> decoy(message.New());
    Fill(decoy.get(), 3);
    append_all(*decoy);
  }
  while (OneIn(4)) occurrences.push_back(UnknownField(0));
  if (!OneIn(4)) {
    std::shuffle(occurrences.begin(), occurrences.end(), random_);
  }
  std::string wire;
  for (const std::string& occurrence : occurrences) wire += occurrence;
  depth_ = outer_depth;
  return wire;
}

void WireVariations::Mutate(std::string* wire) {
  for (int64_t i = 1 + Below(3); i > 0 && !wire->empty(); --i) {
    const auto at = static_cast<size_t>(Below(static_cast<int64_t>(wire->size())));
    switch (Below(6)) {
      case 0:
        wire->resize(at);
        break;
      case 1:
      case 2:
        (*wire)[at] = static_cast<char>((*wire)[at] ^ (1 << Below(8)));
        break;
      case 3:
        (*wire)[at] = static_cast<char>(random_());
        break;
      case 4:
        wire->insert(at, 1, static_cast<char>(random_()));
        break;
      default:
        wire->erase(at, static_cast<size_t>(1 + Below(3)));
    }
  }
}

grpc::ByteBuffer WireVariations::Slice(const std::string& wire) {
  std::vector<grpc::Slice> slices;
  size_t at = 0;
  const int64_t max_piece = OneIn(2) ? 4 : static_cast<int64_t>(wire.size()) + 1;
  while (at < wire.size()) {
    const size_t piece =
        std::min(wire.size() - at, static_cast<size_t>(Below(max_piece) + (OneIn(10) ? 0 : 1)));
    slices.emplace_back(wire.data() + at, piece);
    at += piece;
  }
  if (slices.empty()) slices.emplace_back();
  return grpc::ByteBuffer(slices.data(), slices.size());
}

}  // namespace expertmesh
