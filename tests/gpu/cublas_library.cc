#include "tests/gpu/cublas_library.h"

#include <dlfcn.h>
#include <library_types.h>

#include <vector>

namespace expertmesh {
namespace {

// Of cublas_api.h.
constexpr int kOperationNone = 0;
constexpr int kOperationTranspose = 1;
constexpr int kCompute32F = 68;
constexpr int kDefaultAlgorithm = -1;

template <class Function>
bool Find(void* library, const char* name, Function** function) {
  *function = reinterpret_cast<Function*>(dlsym(library, name));
  return *function != nullptr;
}

}  // namespace

struct CublasLibrary::Functions {
  int (*create)(void** handle) = nullptr;
  int (*destroy)(void* handle) = nullptr;
  int (*set_stream)(void* handle, cudaStream_t stream) = nullptr;
  int (*gemm)(void* handle, int transpose_a, int transpose_b, int m, int n, int k,
              const void* alpha, const void* a, cudaDataType a_type, int a_stride, const void* b,
              cudaDataType b_type, int b_stride, const void* beta, void* c, cudaDataType c_type,
              int c_stride, int compute_type, int algorithm) = nullptr;
};

CublasLibrary::CublasLibrary() : functions_(new Functions) {}

std::unique_ptr<CublasLibrary> CublasLibrary::Open(const std::string& path, std::string* why) {
  std::unique_ptr<CublasLibrary> cublas(new CublasLibrary);
  std::vector<std::string> names = {"libcublas.so.13", "libcublas.so.12", "libcublas.so"};
  if (!path.empty()) names = {path};
  for (const std::string& name : names) {
    cublas->library_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (cublas->library_ != nullptr) break;
    const char* error = dlerror();
    *why = error != nullptr ? error : name;
  }
  if (cublas->library_ == nullptr) return nullptr;
  Functions& functions = *cublas->functions_;
  if (!Find(cublas->library_, "cublasCreate_v2", &functions.create) ||
      !Find(cublas->library_, "cublasDestroy_v2", &functions.destroy) ||
      !Find(cublas->library_, "cublasSetStream_v2", &functions.set_stream) ||
      !Find(cublas->library_, "cublasGemmEx", &functions.gemm)) {
    *why = "no cuBLAS of version 12 or 13";
    return nullptr;
  }
  if (functions.create(&cublas->handle_) != 0) {
    cublas->handle_ = nullptr;
    *why = "cublasCreate failed";
    return nullptr;
  }
  return cublas;
}

CublasLibrary::~CublasLibrary() {
  if (handle_ != nullptr) functions_->destroy(handle_);
  if (library_ != nullptr) dlclose(library_);
}

bool CublasLibrary::Multiply(const void* rows, const void* weights, void* output, int64_t num_rows,
                             int64_t n, int64_t k, cudaStream_t stream) {
  const float one = 1.0f;
  const float zero = 0.0f;
  // Column-major there: output as [n, rows] = weights [n, k] (its transpose lies in memory) * rows.
  return functions_->set_stream(handle_, stream) == 0 &&
         functions_->gemm(handle_, kOperationTranspose, kOperationNone, static_cast<int>(n),
                          static_cast<int>(num_rows), static_cast<int>(k), &one, weights,
                          CUDA_R_16BF, static_cast<int>(k), rows, CUDA_R_16BF, static_cast<int>(k),
                          &zero, output, CUDA_R_16BF, static_cast<int>(n), kCompute32F,
                          kDefaultAlgorithm) == 0;
}

}  // namespace expertmesh
