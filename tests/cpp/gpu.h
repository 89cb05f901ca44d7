// What tests that need a GPU have in common.
#pragma once

#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string_view>

namespace dmuon::testing {

/// Skips without a GPU, or fails when DMUON_REQUIRE_GPU=1.
class OnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (at::hasCUDA()) return;
    const char* required = std::getenv("DMUON_REQUIRE_GPU");
    if (required != nullptr && std::string_view(required) == "1") FAIL() << "DMUON_REQUIRE_GPU=1, but there is no GPU";
    GTEST_SKIP() << "no GPU";
  }
};

}  // namespace dmuon::testing
