#include <memory>

#include "gtest/gtest.h"
#include "kernels/cuda/cuda_stream.h"
#include "tests/conformance/stream_conformance.h"

namespace expertmesh {
namespace {

// A stream with a pool of its own, so that nothing of the device is left when it goes.
INSTANTIATE_TEST_SUITE_P(Cuda, StreamConformance,
                         testing::Values(StreamKind{"Cuda",
                                                    []() -> std::unique_ptr<Stream> {
                                                      return CudaStreamPool(0).NewStream();
                                                    }}),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace expertmesh
