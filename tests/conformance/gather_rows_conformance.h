#ifndef EXPERTMESH_TESTS_CONFORMANCE_GATHER_ROWS_CONFORMANCE_H_
#define EXPERTMESH_TESTS_CONFORMANCE_GATHER_ROWS_CONFORMANCE_H_

// Of row_ops_conformance.h what is about GatherRows and UploadRows.

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "tests/conformance/row_ops_fixture.h"

namespace expertmesh {

// Three spans, one of them empty and one that starts at an odd address; each on the host or on the
// device.
TEST_P(RowOpsConformance, GathersFromUnalignedSpans) {
  for (const int64_t hidden_size : {1, 15, 16, 33, 300}) {
    for (const int on_device : {0, 1, 2, 3}) {
      SCOPED_TRACE(std::to_string(hidden_size) + " on device " + std::to_string(on_device));
      const int64_t row_bytes = hidden_size * element_bytes_;
      const std::vector<double> values = RandomValues(random_, 10 * hidden_size, 1.0, dtype_);
      std::vector<std::byte> bytes = ToBytes(values, dtype_);
      std::vector<std::byte> first(bytes.begin(), bytes.begin() + 3 * row_bytes);
      std::vector<std::byte> second(static_cast<size_t>(7 * row_bytes) + 1);
      std::copy(bytes.begin() + 3 * row_bytes, bytes.end(), second.begin() + 1);
      const std::byte* first_rows = first.data();
      const std::byte* second_rows = second.data() + 1;
      if (on_device % 2 == 1) first_rows = Put(first);
      if (on_device >= 2) second_rows = Put(second.data() + 1, 7 * row_bytes, 1);
      const RowSpan sources[] = {{first_rows, 3}, {nullptr, 0}, {second_rows, 7}};
      const int32_t indices[] = {9, 0, 3, 2, 3, 0};
      std::byte* const device_output = PutPoison(6 * row_bytes + 1);
      Gather(GatherFrom(sources, hidden_size, indices, device_output));
      const std::vector<std::byte> output = Take(device_output, 6 * row_bytes + 1);
      for (int64_t i = 0; i < 6; ++i) {
        EXPECT_EQ(std::memcmp(output.data() + i * row_bytes, bytes.data() + indices[i] * row_bytes,
                              static_cast<size_t>(row_bytes)),
                  0);
      }
      EXPECT_EQ(output.back(), kPoison);
    }
  }
}

// Large spans of request memory, of which some rows are gathered often and some never.
TEST_P(RowOpsConformance, GathersFromRequests) {
  const int64_t hidden_size = 256;
  const int64_t row_bytes = hidden_size * element_bytes_;
  const int64_t num_rows = 1200;
  const std::vector<std::byte> bytes = RandomRows(num_rows, hidden_size);
  std::vector<Buffer> requests;
  std::vector<RowSpan> sources;
  int64_t first_row = 0;
  for (const int64_t count : {1, 500, 3, 696}) {
    requests.push_back(device_->request_allocator().Allocate(count * row_bytes).value());
    std::memcpy(requests.back().data(), bytes.data() + first_row * row_bytes,
                static_cast<size_t>(count * row_bytes));
    sources.push_back({requests.back().data(), count});
    first_row += count;
  }
  std::vector<int32_t> indices;
  for (int i = 0; i < 700; ++i) {
    indices.push_back(static_cast<int32_t>(random_() % static_cast<uint64_t>(num_rows)));
  }
  const int64_t output_bytes = static_cast<int64_t>(indices.size()) * row_bytes;
  std::byte* const device_output = PutPoison(output_bytes);
  Gather(GatherFrom(sources, hidden_size, indices, device_output));
  const std::vector<std::byte> output = Take(device_output, output_bytes);
  for (size_t i = 0; i < indices.size(); ++i) {
    ASSERT_EQ(std::memcmp(output.data() + static_cast<int64_t>(i) * row_bytes,
                          bytes.data() + indices[i] * row_bytes, static_cast<size_t>(row_bytes)),
              0)
        << i;
  }
}

// Request memory of every kind and size, some of it unaligned or without rows, in one piece on the
// device.
TEST_P(RowOpsConformance, UploadsRowsInOnePiece) {
  const int64_t row_bytes = 300 * element_bytes_;
  const int64_t counts[] = {3, 0, 1, 500, 600, 2, 1, 450};
  std::vector<std::byte> expected;
  std::vector<Buffer> requests;
  std::vector<RowSpan> sources;
  for (const int64_t count : counts) {
    const int64_t misalignment = static_cast<int64_t>(random_() % 3);
    requests.push_back(
        device_->request_allocator().Allocate(count * row_bytes + misalignment).value());
    std::byte* const rows = requests.back().data() + misalignment;
    for (int64_t i = 0; i < count * row_bytes; ++i) {
      rows[i] = static_cast<std::byte>(random_() & 0xff);
      expected.push_back(rows[i]);
    }
    sources.push_back({count == 0 ? nullptr : rows, count});
  }
  const int64_t size_bytes = static_cast<int64_t>(expected.size());
  StepArena host_arena(&device_->request_allocator());
  UploadRowsParams params;
  params.sources = sources;
  params.row_bytes = row_bytes;
  params.output = PutPoison(size_bytes + 1);
  params.host_arena = &host_arena;
  ASSERT_TRUE(row_ops().UploadRows(params, stream()).ok());
  std::vector<std::byte> output = Take(params.output, size_bytes + 1);
  EXPECT_EQ(output.back(), kPoison);
  output.pop_back();
  EXPECT_TRUE(output == expected);
  params.row_bytes = 0;
  EXPECT_EQ(row_ops().UploadRows(params, stream()).code(), absl::StatusCode::kInvalidArgument);
}

// As a step does it: rows in many pieces of the device's memory, all lists sent before.
TEST_P(RowOpsConformance, GathersFromManySpansOfTheDevice) {
  const int64_t hidden_size = 24;
  const int64_t row_bytes = hidden_size * element_bytes_;
  for (const int num_spans : {1, 2, 7, 8, 9, 16, 17, 30}) {
    SCOPED_TRACE(num_spans);
    std::vector<std::byte> bytes;
    std::vector<RowSpan> sources;
    for (int span = 0; span < num_spans; ++span) {
      const int64_t count = static_cast<int64_t>(random_() % 4);
      const std::vector<std::byte> rows = RandomRows(count, hidden_size);
      const int64_t misalignment = static_cast<int64_t>(random_() % 3) * element_bytes_;
      sources.push_back({Put(rows.data(), count * row_bytes, misalignment), count});
      bytes.insert(bytes.end(), rows.begin(), rows.end());
    }
    const uint64_t num_rows = bytes.size() / static_cast<size_t>(row_bytes);
    std::vector<int32_t> indices;
    std::vector<int64_t> destinations;
    const std::vector<float> weights(40, 1.0f);
    for (int i = 0; i < 40 && num_rows > 0; ++i) {
      indices.push_back(static_cast<int32_t>(random_() % num_rows));
      destinations.push_back(39 - i);
    }
    for (const bool weighted : {false, true}) {
      StepArena arena(&device_->allocator());
      StepArena host_arena(&device_->request_allocator());
      StepLists lists(&arena, &host_arena);
      GatherRowsParams params =
          GatherFrom(sources, hidden_size, indices, PutPoison(40 * row_bytes));
      if (weighted) params.weights = absl::MakeConstSpan(weights).subspan(0, indices.size());
      params.destination_indices = destinations;
      params.lists = &lists;
      lists.Add(params.row_indices);
      lists.Add(params.weights);
      lists.Add(params.destination_indices);
      ASSERT_TRUE(lists.Send(stream()).ok());
      Gather(params);
      const std::vector<std::byte> output = Take(params.output, 40 * row_bytes);
      for (size_t i = 0; i < indices.size(); ++i) {
        EXPECT_EQ(
            std::memcmp(output.data() + destinations[i] * row_bytes,
                        bytes.data() + indices[i] * row_bytes, static_cast<size_t>(row_bytes)),
            0)
            << i;
      }
    }
  }
}

TEST_P(RowOpsConformance, GathersToDestinations) {
  const int64_t hidden_size = 20;
  const int64_t row_bytes = hidden_size * element_bytes_;
  const std::vector<std::byte> bytes = RandomRows(2, hidden_size);
  const RowSpan source = {bytes.data(), 2};
  const int32_t indices[] = {1, 0};
  const int64_t destinations[] = {4, 2};
  std::byte* const device_output = PutPoison(6 * row_bytes);
  GatherRowsParams params =
      GatherFrom(absl::MakeConstSpan(&source, 1), hidden_size, indices, device_output);
  params.destination_indices = destinations;
  Gather(params);
  const std::vector<std::byte> output = Take(device_output, 6 * row_bytes);
  const std::vector<std::byte> untouched(static_cast<size_t>(row_bytes), kPoison);
  for (int64_t row = 0; row < 6; ++row) {
    const std::byte* expected = untouched.data();
    if (row == 4) expected = bytes.data() + row_bytes;
    if (row == 2) expected = bytes.data();
    EXPECT_EQ(std::memcmp(output.data() + row * row_bytes, expected, untouched.size()), 0) << row;
  }
}

// round(x * round(w)), exactly: the product of two values of a 16-bit dtype is exact in float64, of
// float32 as well.
TEST_P(RowOpsConformance, GathersWeighted) {
  for (const int64_t hidden_size : {1, 17, 64, 129}) {
    const std::vector<double> values = RandomValues(random_, 3 * hidden_size, 1.0, dtype_);
    const std::vector<std::byte> bytes = ToBytes(values, dtype_);
    const RowSpan source = {bytes.data(), 3};
    const int32_t indices[] = {2, 0, 2, 1};
    const float weights[] = {0.3f, -1.7f, 0.0f, 1e-3f};
    std::byte* const device_output = PutPoison(4 * hidden_size * element_bytes_);
    GatherRowsParams params =
        GatherFrom(absl::MakeConstSpan(&source, 1), hidden_size, indices, device_output);
    params.weights = weights;
    Gather(params);
    const std::vector<std::byte> output = Take(device_output, 4 * hidden_size * element_bytes_);
    for (int64_t i = 0; i < 4; ++i) {
      const double weight = ReferenceRound(static_cast<double>(weights[i]), RoundingOf(dtype_));
      for (int64_t j = 0; j < hidden_size; ++j) {
        const double x = values[static_cast<size_t>(indices[i] * hidden_size + j)];
        ASSERT_EQ(static_cast<double>(LoadFloat(output.data(), dtype_, i * hidden_size + j)),
                  ReferenceRound(x * weight, RoundingOf(dtype_)));
      }
    }
  }
}

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_CONFORMANCE_GATHER_ROWS_CONFORMANCE_H_
