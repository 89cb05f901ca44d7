#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "dmuon/newton_schulz.h"
#include "newton_schulz/matrices.h"

namespace dmuon {
namespace {

using ::testing::AllOf;
using testing::compose;
using ::testing::HasSubstr;

struct Band {
  double low = 1e300;
  double high = -1e300;
};

Band band(const std::vector<NsCoefficients>& steps, double lower) {
  constexpr int kPoints = 200000;
  Band result;
  for (int i = 0; i <= kPoints; ++i) {
    const double value = compose(steps, std::pow(lower, 1.0 - static_cast<double>(i) / kPoints));
    result.low = std::min(result.low, value);
    result.high = std::max(result.high, value);
  }
  return result;
}

template <class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

struct KnownBand {
  const char* name;
  double lower;
  Band band;
};

// The exact composition on [lower, 1], as published to three digits.
TEST(CoefficientSet, BringsSingularValuesIntoTheKnownBand) {
  const KnownBand known[] = {
      {"keller_jordan", 1e-2, {.682, 1.134}}, {"keller_jordan", 3e-3, {.682, 1.202}},
      {"keller_jordan", 1e-3, {.471, 1.202}}, {"keller_jordan", 1e-4, {.048, 1.202}},
      {"you", 1e-2, {.978, 1.032}},           {"you", 3e-3, {.978, 1.145}},
      {"you", 1e-3, {.475, 1.145}},           {"you", 1e-4, {.049, 1.145}},
      {"polar_express", 1e-2, {.846, 1.124}}, {"polar_express", 3e-3, {.846, 1.124}},
      {"polar_express", 1e-3, {.729, 1.124}}, {"polar_express", 1e-4, {.080, 1.124}},
  };
  for (const auto& [name, lower, expected] : known) {
    const Band found = band(coefficient_set(name, 5), lower);
    EXPECT_NEAR(found.low, expected.low, 5.1e-4) << name << " on [" << lower << ", 1]";
    EXPECT_NEAR(found.high, expected.high, 5.1e-4) << name << " on [" << lower << ", 1]";
  }
}

TEST(CoefficientSet, StaysNearOneBeyondItsInterval) {
  for (const char* name : {"polar_express", "you", "keller_jordan"}) {
    for (int steps = 5; steps <= 12; ++steps) {
      const std::vector<NsCoefficients> set = coefficient_set(name, steps);
      for (double sigma = 1.0; sigma <= 1.05; sigma += 1e-4) {
        EXPECT_GT(compose(set, sigma), 0.6) << name << ", " << steps << " steps, sigma " << sigma;
        EXPECT_LT(compose(set, sigma), 1.21) << name << ", " << steps << " steps, sigma " << sigma;
      }
    }
  }
}

TEST(CoefficientSet, PolarExpressIsThePublishedTableWithItsMargin) {
  const std::vector<NsCoefficients> set = coefficient_set("polar_express", 2);
  EXPECT_DOUBLE_EQ(set[0].a * kPolarExpressMargin, 8.28721201814563);
  EXPECT_DOUBLE_EQ(set[1].b * std::pow(kPolarExpressMargin, 3), -2.9478499167379106);
  EXPECT_DOUBLE_EQ(set[1].c * std::pow(kPolarExpressMargin, 5), 0.5448431082926601);
}

TEST(CoefficientSet, IsCutAndExtended) {
  EXPECT_EQ(coefficient_set("you", 3).size(), 3U);
  EXPECT_EQ(coefficient_set("you", 3)[2], (NsCoefficients{3.7418, -5.5913, 2.3037}));
  EXPECT_EQ(coefficient_set("you", 8)[7], (NsCoefficients{2.8366, -3.0525, 1.2012}));
  EXPECT_EQ(coefficient_set("keller_jordan", 10)[9], (NsCoefficients{3.4445, -4.7750, 2.0315}));
  EXPECT_EQ(coefficient_set("polar_express", 10)[9], (NsCoefficients{1.875, -1.25, 0.375}));
  for (int steps = 1; steps < 10; ++steps) {
    const std::vector<NsCoefficients> longer = coefficient_set("polar_express", 10);
    const std::vector<NsCoefficients> set = coefficient_set("polar_express", steps);
    EXPECT_TRUE(std::equal(set.begin(), set.end(), longer.begin())) << steps;
  }
}

TEST(CoefficientSet, ConvergesWithMoreSteps) {
  const Band found = band(coefficient_set("polar_express", 10), 1e-3);
  EXPECT_GT(found.low, 1.0 - 1e-3);
  EXPECT_LT(found.high, 1.0 + 1e-3);
}

TEST(CoefficientSet, NamesTheKnownSetsInItsError) {
  EXPECT_THAT(
      error_of([] { (void)coefficient_set("polar", 5); }),
      AllOf(HasSubstr("'polar'"), HasSubstr("'polar_express'"), HasSubstr("'you'"), HasSubstr("'keller_jordan'")));
  EXPECT_THAT(error_of([] { (void)coefficient_set("you", 0); }), HasSubstr("steps is 0; expected at least 1"));
}

TEST(MakeNsOptions, KnowsItsBackends) {
  EXPECT_EQ(make_ns_options("gram", 5, "you").restarts, std::vector<int>{2});
  EXPECT_EQ(make_ns_options("gram_accurate", 5, "you").restarts, (std::vector<int>{2, 4}));
  EXPECT_EQ(make_ns_options("standard", 5, "you").backend, NsBackend::kStandard);
  EXPECT_EQ(make_ns_options("gram", 6, "you").coefficients, coefficient_set("you", 6));
  EXPECT_THAT(error_of([] { (void)make_ns_options("fast", 5, "you"); }),
              AllOf(HasSubstr("'fast'"), HasSubstr("'gram'"), HasSubstr("'gram_accurate'"), HasSubstr("'standard'")));
  EXPECT_THAT(error_of([] { (void)make_ns_options("gram", -1, "you"); }), HasSubstr("steps is -1"));
}

TEST(SolveCoefficients, ReproducesThePrintedCansDigits) {
  const NsCoefficients printed[] = {{8.4703, -25.1081, 18.6293},
                                    {4.1828, -3.1087, 0.5806},
                                    {3.9619, -2.9541, 0.5630},
                                    {3.2866, -2.4647, 0.5074},
                                    {2.2737, -1.6447, 0.4162}};
  const std::vector<NsCoefficients> solved = solve_coefficients(1e-3, 5);
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_NEAR(solved[i].a, printed[i].a, 5.1e-5) << i;
    EXPECT_NEAR(solved[i].b, printed[i].b, 5.1e-5) << i;
    EXPECT_NEAR(solved[i].c, printed[i].c, 5.1e-5) << i;
  }
}

TEST(SolveCoefficients, HasTheKnownWorstCaseErrors) {
  struct Known {
    double lower;
    int steps;
    double error;
    double tolerance;
  };
  const Known known[] = {{3e-4, 3, .955, 5e-4},   {3e-4, 5, .468, 5e-4},  {1e-3, 4, .546, 5e-4},
                         {1e-3, 5, .113, 5e-4},   {3e-3, 4, .198, 5e-4},  {3e-3, 5, 4.9e-3, 5e-5},
                         {1e-2, 4, 1.3e-2, 5e-4}, {3e-2, 3, 3.6e-2, 5e-4}};
  for (const auto& [lower, steps, error, tolerance] : known) {
    const Band found = band(solve_coefficients(lower, steps), lower);
    EXPECT_NEAR(1.0 - found.low, error, tolerance) << lower << ", " << steps << " steps";
    EXPECT_NEAR(found.high - 1.0, error, tolerance) << lower << ", " << steps << " steps";
  }
}

void expect_interior_extremes(const NsCoefficients& step, double lower, double upper, double error) {
  const double root = std::sqrt(9.0 * step.b * step.b - 20.0 * step.a * step.c);
  const double first = std::sqrt((-3.0 * step.b - root) / (10.0 * step.c));
  const double second = std::sqrt((-3.0 * step.b + root) / (10.0 * step.c));
  EXPECT_TRUE(lower < first && first < second && second < upper) << lower << " " << upper;
  EXPECT_NEAR(compose({{step}}, first), 1.0 + error, 1e-12);
  EXPECT_NEAR(compose({{step}}, second), 1.0 - error, 1e-12);
}

// Property: every step's error takes its extreme value at four points of the interval, with alternating sign.
TEST(SolveCoefficients, EquioscillatesOnEachInterval) {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> exponent(-7.0, -0.01);
  for (int trial = 0; trial < 50; ++trial) {
    double lower = std::pow(10.0, exponent(random));
    double upper = 1.0;
    for (const NsCoefficients& step : solve_coefficients(lower, 6)) {
      const double error = 1.0 - compose({{step}}, lower);
      EXPECT_NEAR(compose({{step}}, upper), 1.0 + error, 1e-12);
      if (lower / upper < 0.999) expect_interior_extremes(step, lower, upper, error);
      lower = 1.0 - error;
      upper = 1.0 + error;
    }
  }
}

TEST(SolveCoefficients, RefusesWhatHasNoSolution) {
  for (const double lower : {0.0, -1.0, 1.0, 2.0, std::nan("")}) {
    EXPECT_THAT(error_of([=] { (void)solve_coefficients(lower, 5); }), HasSubstr("expected a value between 0 and 1"));
  }
  EXPECT_THAT(error_of([] { (void)solve_coefficients(0.1, 0); }), HasSubstr("steps is 0"));
}

}  // namespace
}  // namespace dmuon
