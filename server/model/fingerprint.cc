#include "server/model/fingerprint.h"

#include <openssl/evp.h>

#include <algorithm>
#include <memory>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace expertmesh {
namespace {

class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new(), &EVP_MD_CTX_free) {
    ok_ = context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1;
  }
  void Update(const void* data, size_t size_bytes) {
    ok_ = ok_ && EVP_DigestUpdate(context_.get(), data, size_bytes) == 1;
  }
  absl::StatusOr<std::string> FinishHex() {
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned int size = 0;
    ok_ = ok_ && EVP_DigestFinal_ex(context_.get(), digest, &size) == 1;
    if (!ok_) return absl::InternalError("SHA-256 of OpenSSL failed");
    return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(digest), size));
  }

 private:
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
  bool ok_ = false;
};

class Hasher {
 public:
  // Hashes bytes [begin, end) of the tensor.
  absl::Status Range(const CheckpointTensor& tensor, int64_t begin, int64_t end) {
    constexpr int64_t kBlockBytes = 1 << 20;
    while (begin < end) {
      const int64_t size_bytes = std::min(kBlockBytes, end - begin);
      buffer_.resize(size_bytes);
      const absl::Status status = tensor.file->Read(*tensor.tensor, begin, absl::MakeSpan(buffer_));
      if (!status.ok()) return status;
      sha256_.Update(buffer_.data(), buffer_.size());
      begin += size_bytes;
    }
    return absl::OkStatus();
  }

  absl::Status Samples(const CheckpointTensor& tensor, int64_t begin, int64_t end) {
    const int64_t size_bytes = end - begin;
    if (size_bytes <= 3 * kFingerprintSampleBytes) return Range(tensor, begin, end);
    const int64_t middle = begin + (size_bytes - kFingerprintSampleBytes) / 2;
    for (const int64_t at : {begin, middle, end - kFingerprintSampleBytes}) {
      const absl::Status status = Range(tensor, at, at + kFingerprintSampleBytes);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  void Text(const std::string& text) { sha256_.Update(text.data(), text.size()); }
  absl::StatusOr<std::string> FinishHex() { return sha256_.FinishHex(); }

 private:
  Sha256 sha256_;
  std::vector<std::byte> buffer_;
};

}  // namespace

absl::StatusOr<std::string> ComputeFingerprint(const std::vector<FingerprintTensor>& tensors,
                                               int64_t full_bytes) {
  int64_t total_bytes = 0;
  // Sizes of mapped files: their sum fits.
  for (const FingerprintTensor& entry : tensors) total_bytes += entry.tensor->tensor->size_bytes();
  const bool full = total_bytes <= full_bytes;

  Hasher hasher;
  hasher.Text(full ? "expertmesh experts, whole\n" : "expertmesh experts, sampled\n");
  for (const FingerprintTensor& entry : tensors) {
    const SafetensorsTensor& tensor = *entry.tensor->tensor;
    // Lengths in front, so that no two lists of tensors give the same text.
    hasher.Text(absl::StrCat(tensor.name.size(), " ", tensor.name, " ",
                             StoredDTypeName(tensor.dtype), " ", ShapeText(tensor.shape), " ",
                             tensor.size_bytes(), "\n"));
    const int64_t num_pieces = full ? 1 : std::max<int64_t>(1, entry.num_pieces);
    const int64_t piece_bytes = tensor.size_bytes() / num_pieces;
    for (int64_t piece = 0; piece < num_pieces; ++piece) {
      const int64_t begin = piece * piece_bytes;
      const int64_t end = piece + 1 == num_pieces ? tensor.size_bytes() : begin + piece_bytes;
      const absl::Status status = full ? hasher.Range(*entry.tensor, begin, end)
                                       : hasher.Samples(*entry.tensor, begin, end);
      if (!status.ok()) return status;
    }
  }
  return hasher.FinishHex();
}

}  // namespace expertmesh
