#ifndef EXPERTMESH_TESTS_SERVER_RPC_WIRE_VARIATIONS_H_
#define EXPERTMESH_TESTS_SERVER_RPC_WIRE_VARIATIONS_H_

#include <cstdint>
#include <random>
#include <string>

#include "google/protobuf/message.h"
#include "grpcpp/support/byte_buffer.h"

namespace expertmesh {

// Random messages and the many ways in which a sender may put one on the wire. Deterministic in the
// seed.
class WireVariations {
 public:
  explicit WireVariations(uint64_t seed) : random_(seed) {}

  // Sets a random subset of the fields to random values, embedded messages too; at most
  // `max_elements` elements in a repeated field or a bytes field.
  void Fill(google::protobuf::Message* message, int max_elements);

  // Serializes with fields in any order, decoys that a later occurrence overrides or merges with,
  // repeated fields split and unpacked, overlong varints, unknown fields and groups, a known number
  // with a wrong wire type. Mostly well-formed.
  std::string Serialize(const google::protobuf::Message& message);

  // Truncates, flips bits, overwrites, inserts and removes bytes.
  void Mutate(std::string* wire);

  // Cut into slices at random places, empty ones among them.
  grpc::ByteBuffer Slice(const std::string& wire);

  // Uniform in [0, n).
  int64_t Below(int64_t n);
  bool OneIn(int64_t n) { return Below(n) == 0; }

 private:
  void FillField(google::protobuf::Message* message, const google::protobuf::FieldDescriptor* field,
                 int max_elements);
  std::string Text();
  std::string Varint(uint64_t value);
  std::string Tag(int field_number, int wire_type);
  std::string Delimited(int field_number, const std::string& bytes);
  std::string UnknownField(int depth);
  // One element or value of the field, without its tag.
  std::string Element(const google::protobuf::Message& message,
                      const google::protobuf::FieldDescriptor* field, int index);
  void AppendOccurrences(const google::protobuf::Message& message,
                         const google::protobuf::FieldDescriptor* field,
                         std::vector<std::string>* occurrences);
  std::string SerializeAt(const google::protobuf::Message& message, int depth);

  std::mt19937_64 random_;
  int depth_ = 0;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_RPC_WIRE_VARIATIONS_H_
