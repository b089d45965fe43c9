#ifndef EXPERTMESH_TESTS_GPU_CUBLAS_LIBRARY_H_
#define EXPERTMESH_TESTS_GPU_CUBLAS_LIBRARY_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>

namespace expertmesh {

// cuBLAS where the machine has it, opened at run time: linking it would make the bundle grow by
// 400 MB. One thread.
class CublasLibrary {
 public:
  // `path`: of libcublas.so.13 or .12, or empty for what the loader finds. Null when there is none,
  // with the reason in `why`.
  static std::unique_ptr<CublasLibrary> Open(const std::string& path, std::string* why);
  ~CublasLibrary();
  CublasLibrary(const CublasLibrary&) = delete;
  CublasLibrary& operator=(const CublasLibrary&) = delete;

  // Enqueues output [rows, n] = rows [rows, k] · weights [n, k]ᵀ, all bfloat16, sums in float32.
  // False when cuBLAS refuses.
  bool Multiply(const void* rows, const void* weights, void* output, int64_t num_rows, int64_t n,
                int64_t k, cudaStream_t stream);

 private:
  struct Functions;
  CublasLibrary();

  std::unique_ptr<Functions> functions_;
  void* library_ = nullptr;
  void* handle_ = nullptr;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_GPU_CUBLAS_LIBRARY_H_
