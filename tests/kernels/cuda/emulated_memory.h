#ifndef EXPERTMESH_TESTS_KERNELS_CUDA_EMULATED_MEMORY_H_
#define EXPERTMESH_TESTS_KERNELS_CUDA_EMULATED_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <map>

namespace expertmesh {

// Device memory of the emulated runtime: pages that refuse every access unless they are open. Not
// thread safe.
class EmulatedMemory {
 public:
  struct Block {
    std::byte* pages;
    int64_t open_bytes;  // whole pages; a guard page follows
    int64_t size_bytes;
    int device;
  };

  // Null when the system refuses. Aligned to 256 bytes, filled with 0xff.
  std::byte* Allocate(int64_t size_bytes, int device);
  // False for what was not allocated here.
  bool Free(std::byte* data);
  void Open();
  void Close();

  // The block that holds `data`, or null.
  const Block* Find(const void* data) const;
  // Whether [data, data + size_bytes) is not device memory at all, or lies within one block.
  bool IsWhole(const void* data, int64_t size_bytes) const;
  int64_t allocated_bytes(int device) const;
  int64_t num_blocks() const { return static_cast<int64_t>(blocks_.size()); }

 private:
  void Protect(const Block& block, int protection) const;

  std::map<std::byte*, Block> blocks_;  // by their first byte
  bool is_open_ = false;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_KERNELS_CUDA_EMULATED_MEMORY_H_
