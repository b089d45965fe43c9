// Copyright 2026 The ExpertMesh Authors
// SPDX-License-Identifier: Apache-2.0

#ifndef EXPERTMESH_TESTS_REFERENCE_REFERENCE_REQUIRE_H_
#define EXPERTMESH_TESTS_REFERENCE_REFERENCE_REQUIRE_H_

#include <cstdio>
#include <cstdlib>

// Ends the test when it hands the oracle arguments that do not fit together.
#define REFERENCE_REQUIRE(condition)                                                  \
  do {                                                                                \
    if (!(condition)) {                                                               \
      std::fprintf(stderr, "%s:%d: reference: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                   \
    }                                                                                 \
  } while (false)

#endif  // EXPERTMESH_TESTS_REFERENCE_REFERENCE_REQUIRE_H_
